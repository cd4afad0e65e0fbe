"""The conformance kit of tiers; the built-in tier passes it.

Subclass it in a test module of your own::

    from wtransfer.testing.tier import TierConformance


    class TestMine(TierConformance):
        tier = "mine"

        def options_in(self, folder):
            return {"path": str(folder)}

The tier is opened several times with equal options, in this process and in others, and called with
views of larger memory, as the offloading spec over tiers calls it. Then a model is served from it.
Every failure ends with its usual cause. Tests cannot be overridden; state the tests that the tier
may fail, each with its reason, for all parameters or for some::

        expected_failures = {"test_value_of_any_length[4194309]": "it takes at most a megabyte"}
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import random
import secrets
import sys
import threading
import time
import tracemalloc
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from wtransfer.calls import Call, start_call
from wtransfer.deadline import Deadline
from wtransfer.errors import OffloadingOptionError
from wtransfer.kv.header import HEADER_NBYTES
from wtransfer.kv.keys import OffloadKey, fence_key, make_offload_key
from wtransfer.registry.resolve import registry
from wtransfer.specs import tier as tier_module
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.specs.interface import Tier
from wtransfer.specs.tier import TierLoadStoreSpec, open_tier, rank_key
from wtransfer.testing.connector import (
    NUM_NEW_TOKENS,
    SIX_HEADS,
    ConnectorTestBed,
    RecordedInstance,
)
from wtransfer.testing.connector import SMALL as SMALL_MODEL
from wtransfer.testing.kit import (
    ConformanceKit,
    checked_stats,
    fallen_counters,
    kit_zygote,
    recorded_unpickling,
    registered_name,
    usually,
)
from wtransfer.testing.leftovers import Leftovers, resident_nbytes
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.engine import make_engine
from wtransfer.testing.mini_engine.model import LocalWeights, PagedTransformer
from wtransfer.testing.mini_engine.reference import reference_output, some_prompts
from wtransfer.testing.reachable import check_this_host_only, reachable
from wtransfer.testing.spec import Geometry, SpecHost, traced_memory
from wtransfer.testing.store_faults import empty, files_of, held_up, unwritable
from wtransfer.testing.tier_process import (
    NUM_ROUNDS,
    TierPlace,
    TierProcess,
    TierUser,
    value_of,
)
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_version import process_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    OpenTier = Callable[..., TierUser]
    StartTier = Callable[[], Any]
    KeyOf = Callable[..., bytes]
    MakeBed = Callable[..., ConnectorTestBed]
    MakeHost = Callable[..., SpecHost]

SMALL = 1000
"""Bytes of a value whose length does not matter."""
LENGTHS = (1, 2, 3, 511, 4096, 65_537, 2**20 - 1, 2**22 + 5)
"""Lengths of values, in bytes."""
PATTERNS = {
    "zeros": b"\0" * SMALL,
    "ones": b"\xff" * SMALL,
    "ends of lines": b"\r\n" * SMALL,
    "ends with zeros": b"value" + bytes(SMALL),
    "ends with blanks": b" value" + b" \t\n" * SMALL,
}
"""Values that are text, or that end like it."""
KEYS = {
    "one byte": [bytes([number]) for number in range(256)],
    "1 to 66 bytes, one the beginning of the next": [b"k" * number for number in range(1, 67)],
    "1 to 66 zeros": [b"\0" * number for number in range(1, 67)],
    "66 bytes, different in one": [
        b"k" * place + b"K" + b"k" * (65 - place) for place in range(66)
    ],
    "upper and lower case": [b"key", b"Key", b"KEY", b"kEy"],
    "no text": [b"\xff\xfe", b"\xff\xfd", b"\xc3\x28", b"\xc3\x29", b"\x80" * 66, b"\x81" * 66],
    "separators": [
        *(b"a" + each + b"b" for each in (b"/", b"//", b"\\", b"\n", b"\r\n", b"\0", b" ", b":")),
        *(b"a", b"a\0", b"a\n", b"a ", b" a", b"/a", b"a/", b"../a", b".", b"..", b"*", b"a*"),
        *(b"?", b"[a]", b"{a}", b"%00", b"%s", b"$(a)", b"'a'", b'"a"'),
    ],
}
"""Keys that a store may take for one another."""
NUM_THREADS = 4
"""Threads that call one object."""
ARENAS = {
    "the tier alone": {},
    "under an arena": {"cpu_bytes_to_use": 2**13},
    "under an arena that writes back": {"cpu_bytes_to_use": 2**13, "write_back": True},
}
"""Options of the spec over the tier. The arena has room for one prompt of `EIGHTS`."""
ROOM: dict[str, dict[str, int]] = {"alone": {}, "under an arena": {"cpu_bytes_to_use": 2**23}}
"""Like `ARENAS`, with room for all blocks that a test computes."""
CALLS = ("contains", "put", "get", "remove")
"""Methods that a spec calls while a model is served, for one key or for many."""
EIGHTS = EngineConfig(model=SMALL_MODEL, cache=CacheShape(8, 64))
"""A model with small blocks; prompts have two of them, and some tokens."""
TINY = Geometry(num_layers=2, page_nbytes=64, num_blocks=4)
"""A cache whose blocks are so small that a test can damage every byte of one in turn."""
NUM_TURNS = 25
"""Least number of turns of calls beside others."""
QUIET_S = 0.2
"""Duration of the watch for late writes, in seconds."""
FAULTS = ("full", "read-only", "gone")
"""Faults of a store, beside that it is slow: see `TierConformance.fault`."""
NUM_FULL = 20
"""Calls of `put` that fail."""
NUM_KEYS = 1000
"""Keys of a round in which calls shall leave nothing."""

_RIGHT = "the bytes that were put"
_GUARD = 0xA5


class TierConformance(ConformanceKit):
    """Subclass it with a name that starts with ``Test``, and state the tier.

    Attributes:
        tier: Name of the tier, as a user would write it.
        tier_cls: Instead of a name: the class of a tier that is not installed.
        options: The tier's options.
        in_processes: True if objects in other processes reach the same store, as they must where
            scheduler and workers are processes. If False, the tests with other processes are
            skipped.
        size_option: Option that bounds the bytes that are kept; empty: there is none, and no test
            of it.
        num_kills: Processes that are killed while they put.
        deadline_s: Bound on the wait for another process, and for a request that is served, in
            seconds. A test that takes six times as long has failed: a call of the tier hangs.
        ends_within_s: Bound on the leftovers of a closed tier, in seconds.
        gives_up_within_s: Longest time that a `get` takes whose store does not answer, in seconds;
            one that waits for longer is not asked what it does once it has given up.
        slow_options: Options, beside the others, with which it gives up sooner.
    """

    tier: ClassVar[str] = ""
    tier_cls: ClassVar[type[Tier] | None] = None
    options: ClassVar[dict[str, Any]] = {}
    in_processes: ClassVar[bool] = True
    size_option: ClassVar[str] = ""
    num_kills: ClassVar[int] = 5
    deadline_s: ClassVar[float] = 10.0
    ends_within_s: ClassVar[float] = 5.0
    gives_up_within_s: ClassVar[float] = 1.0
    slow_options: ClassVar[dict[str, Any]] = {}
    smoke_test = "test_one_value_is_put_and_found"
    _contract = (Tier,)

    def run_test(self, test: Callable[[], None]) -> None:
        """Run a test on a thread, whose time is bounded."""
        self.run_bounded(test, "a call of the tier")

    def options_in(self, folder: Path) -> dict[str, Any]:
        """Return the tier's options: the same store for the same folder.

        Args:
            folder: An empty folder of the test's own. A store elsewhere need not be empty: but for
                a few short keys, no two tests use the same ones.
        """
        del folder
        return dict(self.options)

    def fault(self, kind: str) -> AbstractContextManager[Any] | None:
        """Bring about a fault of the store while a block runs, for tests of that fault.

        Override it for a store elsewhere than in the folder of `options_in`: of a server stop the
        process, bound its memory, end it and start it anew. None: the kit brings it about where the
        store is files in that folder, and else does not test it.

        Args:
            kind: ``"slow"``: the store answers nothing until the block ends; ``"full"``,
                ``"read-only"``, or ``"gone"``: it is removed, also while an object is open, and
                from then on it is an empty one.
        """
        del kind
        return None

    # -- fixtures

    @pytest.fixture
    def name(self) -> str:
        """Return the name by which the tier is found in this process."""
        return self.tier or registered_name("specs", self.tier_cls, "tier")

    @pytest.fixture
    def found_cls(self, name: str) -> type[Tier]:
        """Return the class that is tested."""
        found = registry("specs").get(name)
        assert issubclass(found, Tier), f"{name} is a spec and no tier: SpecConformance is its kit"
        return found

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Return the folder of the test's own that `options_in` is given."""
        folder = tmp_path / "kept"
        folder.mkdir()
        return folder

    @pytest.fixture
    def tier_options(self, folder: Path) -> dict[str, Any]:
        """Return the options of all objects of a test."""
        return self.options_in(folder)

    @pytest.fixture
    def open_tier(self, found_cls: type[Tier], tier_options: dict[str, Any]) -> Iterator[OpenTier]:
        """Open objects of the tier, which are closed at the end of the test."""
        users: list[TierUser] = []

        def open_one(**others: Any) -> TierUser:
            options = {**copy.deepcopy(tier_options), **others}
            users.append(TierUser(open_tier(found_cls, options)))
            return users[-1]

        def close_all() -> None:
            for user in users:
                if not user.is_closed:
                    user.close()

        yield open_one
        self.end_bounded(close_all, "close()")

    @pytest.fixture
    def start_tier(
        self, found_cls: type[Tier], tier_options: dict[str, Any]
    ) -> Iterator[Callable[[], Any]]:
        """Open the tier in processes, which end with the test."""
        if not self.in_processes:
            self.skip_not_tested(
                "processes: in_processes is False, so others do not reach the store"
            )
        place = TierPlace(self.tier) if self.tier else TierPlace.of(found_cls)
        processes: list[TierProcess] = []

        def start() -> TierProcess:
            spawn = kit_zygote().spawn
            processes.append(TierProcess(place, tier_options, spawn, self.deadline_s))
            return processes[-1]

        yield start
        for process in processes:
            process.close()

    @pytest.fixture
    def key_of(self) -> Callable[..., bytes]:
        """Make keys as the product makes them: of a block, for a rank; others in each test."""
        salt = secrets.token_bytes(28)

        def key_of(number: int, rank: int = 0) -> bytes:
            block = make_offload_key(salt + number.to_bytes(16, "big"))
            return rank_key(fence_key(block, "weights of the kit"), rank)

        return key_of

    @pytest.fixture(params=ROOM.values(), ids=list(ROOM))
    def served(
        self, request: pytest.FixtureRequest, name: str, tier_options: dict[str, Any]
    ) -> EngineConfig:
        """Return the configuration of an instance with the tier, alone or under an arena."""
        options = {"tier": name, "skip_slow_loads": False, **request.param, **tier_options}
        # Ranks of one name share an arena, also with ranks of an earlier test that still hang.
        own = secrets.token_hex(4)
        connector = "OffloadingConnector"
        return EngineConfig(model=SIX_HEADS, connector=connector, options=options, engine_id=own)

    @pytest.fixture
    def one_thread(self) -> Iterator[None]:
        """Let torch have one thread: the bits do not depend on how work is divided."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(num_threads)

    @pytest.fixture
    def make_bed(
        self, one_thread: None, name: str, tier_options: dict[str, Any], tmp_path: Path
    ) -> Iterator[MakeBed]:
        """Make test beds whose instances share the tier; they are closed with the test."""
        del one_thread
        # The collection of an earlier test's model would change the name of these weights.
        process_weights.begin_anew()
        closing, weights = contextlib.ExitStack(), LocalWeights(0)
        closing.callback(weights.close)

        def make(settings: EngineConfig, *engine_ids: str, **options: Any) -> ConnectorTestBed:
            options = {"tier": name, "skip_slow_loads": False, **tier_options, **options}
            instances = []
            for engine_id in engine_ids:
                config = msgspec.structs.replace(
                    settings,
                    connector="OffloadingConnector",
                    options=options,
                    engine_id=f"{engine_id} {secrets.token_hex(8)}",
                )
                instances.append(RecordedInstance(config, weights))
                closing.callback(instances[-1].close)
            return ConnectorTestBed(
                instances[0],
                instances[-1],
                weights,
                folder=tmp_path,
                prefill_params=None,
                deadline_s=self.deadline_s,
            )

        yield make
        self.end_bounded(closing.close, "close() of instances that the tier serves")

    @pytest.fixture
    def bed(self, make_bed: MakeBed, served: EngineConfig) -> ConnectorTestBed:
        """Serve a model with two instances of two ranks, which share the tier."""
        settings = msgspec.structs.replace(served, num_ranks=2)
        return self.run_bounded(
            lambda: make_bed(settings, "producer", "consumer", **served.options),
            "a constructor",
        )

    @pytest.fixture
    def make_host(
        self, name: str, tier_options: dict[str, Any]
    ) -> Iterator[Callable[..., SpecHost]]:
        """Make hosts of the spec over the tier, which are closed with the test."""
        closing = contextlib.ExitStack()

        def make(geometry: Geometry, **options: Any) -> SpecHost:
            options = {"tier": name, **tier_options, **options}
            made = SpecHost(OffloadingSpecFactory.create_spec, geometry, options)
            closing.callback(made.close)
            return made

        yield make
        self.end_bounded(closing.close, "close() of the spec over the tier")

    @contextlib.contextmanager
    def _brought_about(
        self, kind: str, folder: Path, own: AbstractContextManager[Any] | None, process: Any = None
    ) -> Iterator[Callable[[], bool] | None]:
        """Bring about a fault of the store, or skip the test.

        Args:
            kind: As of `fault`.
            folder: The folder of `options_in`.
            own: What `fault` has returned.
            process: Process of the only object that meets it, if the kit brings it about.

        Yields:
            Whether it was met; None where that is not known.
        """
        ask = (
            f"a store that is {kind}: write `def fault(self, kind)` in the subclass of the kit, "
            f"whose context manager for {kind!r} brings it about"
        )
        with contextlib.ExitStack() as ended:
            is_met = None
            if own is not None:
                ended.enter_context(own)
            elif not files_of(folder):
                self.skip_not_tested(ask)
            elif kind == "slow":
                is_met = ended.enter_context(held_up(folder))
                if is_met is None:
                    self.skip_not_tested(ask)
            elif kind == "gone":
                empty(folder)
            elif process is None:
                self.skip_not_tested(f"{ask}; or let in_processes be True")
            elif kind == "full":
                process.bound_files(SMALL)
                ended.callback(process.bound_files, None)
            else:
                process.drop_override()
                ended.enter_context(unwritable(folder))
            yield is_met

    # -- one value

    def test_one_value_is_put_and_found(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """A value is put, contained, and got."""
        with self.is_smoke_test():
            self._check_one_value(open_tier, key_of(1))

    @usually("put() keeps nothing, or that get() does not return True after it has filled `into`")
    def _check_one_value(self, open_tier: OpenTier, key: bytes) -> None:
        user, value = open_tier(), value_of(1, SMALL)
        user.put(key, value)
        assert user.contains([key]) == [True], "contains() does not find a key that was put"
        assert _content(user, key, value) == _RIGHT

    @usually("the answer for a key that is not there is an error, or that of another key")
    def test_missing_key_is_not_found(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """`contains` and `get` say False, in an empty store and beside other keys."""
        user = open_tier()
        for number in range(2):
            assert user.contains([key_of(99)]) == [False], "contains() finds a key never put"
            assert user.get(key_of(99), SMALL) is None, "get() finds a key that was never put"
            user.put(key_of(number), value_of(number, SMALL))

    @usually("get() copies as much as fits and returns True, without a look at the length")
    @pytest.mark.parametrize("nbytes", [1, SMALL - 1, SMALL + 1, 2 * SMALL, 2**20])
    def test_value_of_another_length_is_not_found(
        self, open_tier: OpenTier, key_of: KeyOf, nbytes: int
    ) -> None:
        """`get` into less or more memory than the value has returns False, and keeps the value."""
        user, key, value = open_tier(), key_of(1), value_of(1, SMALL)
        user.put(key, value)
        assert user.get(key, nbytes) is None, f"get() of {nbytes} bytes found {SMALL}"
        assert _content(user, key, value) == _RIGHT

    @usually("get() takes the value away")
    def test_value_stays_when_it_was_read(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """A value may be read many times."""
        user, key, value = open_tier(), key_of(1), value_of(1, SMALL)
        user.put(key, value)
        for number in range(3):
            assert _content(user, key, value) == _RIGHT, f"as it is read for the {number + 1}. time"
        assert user.contains([key]) == [True]

    @usually("put() keeps the first value of a key, or a part of it")
    def test_put_replaces(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """Another value, of equal length or not, takes the place of the value."""
        user, key = open_tier(), key_of(1)
        for seed, nbytes in enumerate([SMALL, SMALL, 3 * SMALL, 10]):
            user.put(key, value_of(seed, nbytes))
            assert _content(user, key, value_of(seed, nbytes)) == _RIGHT, f"after put {seed + 1}"

    @usually("the tier keeps `data` itself, whose memory is used for another block at once")
    @pytest.mark.parametrize("method", ["put", "put_many"])
    def test_put_copies(self, open_tier: OpenTier, key_of: KeyOf, method: str) -> None:
        """The memory of `data` may be overwritten when `put` has returned."""
        user, values = open_tier(), [value_of(number, SMALL) for number in range(3)]
        memory = np.zeros((3, SMALL), np.uint8)
        for number, value in enumerate(values):
            memory[number] = np.frombuffer(value, np.uint8)
        items = [(key_of(number), memory[number].data) for number in range(3)]
        if method == "put":
            for key, data in items:
                user.tier.put(key, data)
        else:
            user.tier.put_many(items)
        memory[:] = 0
        for number, value in enumerate(values):
            assert _content(user, key_of(number), value) == _RIGHT

    @usually("a value is cut, padded or refused at a bound of the store")
    @pytest.mark.parametrize("nbytes", LENGTHS)
    def test_value_of_any_length(self, open_tier: OpenTier, key_of: KeyOf, nbytes: int) -> None:
        """From one byte to some megabytes, also of odd length."""
        user, value = open_tier(), value_of(nbytes, nbytes)
        user.put(key_of(1), value)
        assert _content(user, key_of(1), value) == _RIGHT

    @usually("values are handled as text: stripped, decoded, or taken for empty")
    @pytest.mark.parametrize("value", PATTERNS.values(), ids=PATTERNS)
    def test_value_of_any_bytes(self, open_tier: OpenTier, key_of: KeyOf, value: bytes) -> None:
        """Zeros, ends of lines and blanks are bytes like others."""
        user = open_tier()
        user.put(key_of(1), value)
        assert _content(user, key_of(1), value) == _RIGHT

    @usually(
        "a thread or a device of the client goes on filling `into`: leave writes_after_get as it "
        "is by default, True"
    )
    def test_get_that_declares_it_writes_nothing_after_its_return(
        self, found_cls: type[Tier], open_tier: OpenTier, key_of: KeyOf
    ) -> None:
        """`into` is the caller's again, where `writes_after_get` is False."""
        if found_cls.writes_after_get:
            pytest.skip("writes_after_get is True: what comes late is not believed")
        user, memory = open_tier(), np.empty((8, SMALL), np.uint8)
        keys = [key_of(number) for number in range(len(memory))]
        for number, key in enumerate(keys):
            user.put(key, value_of(number, SMALL))
        for got in (
            [user.tier.get(key, row.data) for key, row in zip(keys, memory, strict=True)],
            user.tier.get_many([(key, row.data) for key, row in zip(keys, memory, strict=True)]),
        ):
            assert got == [True] * len(keys)
            memory[:] = _GUARD
        _use(user, key_of(99))
        user.close()
        _check_quiet(memory, "`into` has changed after get() had returned")

    @usually(
        "a thread or a device of the client goes on filling `into` after a time-out, or sending "
        "`data`: use memory of the tier's own and copy (of `into` it is enough to leave "
        "writes_after_get as it is by default, True)"
    )
    def test_call_that_gives_up_leaves_memory_alone(
        self, found_cls: type[Tier], open_tier: OpenTier, folder: Path, key_of: KeyOf
    ) -> None:
        """Calls of a slow store end, and the statistics do not wait; later nothing is touched."""
        user, nbytes = open_tier(**self.slow_options), 2**16 + 3
        values = [value_of(number, nbytes) for number in range(3)]
        for number, value in enumerate(values):
            user.put(key_of(number), value)
        memory, before = np.full((3, nbytes), _GUARD, np.uint8), set(threading.enumerate())
        other = value_of(99, nbytes)
        memory[2] = np.frombuffer(other, np.uint8)
        with self._brought_about("slow", folder, self.fault("slow")) as is_met:
            calls = [
                start_call(lambda: user.tier.get(key_of(0), memory[0].data), "kit"),
                start_call(lambda: user.tier.get_many([(key_of(1), memory[1].data)])[0], "kit"),
                start_call(lambda: user.tier.put(key_of(2), memory[2].data), "kit"),
            ]
            said = start_call(user.tier.get_stats, "kit").done.wait(self.deadline_s)
            # On a machine that is busy the calls may begin late.
            begun = Deadline(self.deadline_s)
            while is_met is not None and not (is_met() or begun.expired):
                if all(call.done.is_set() for call in calls):
                    break
                time.sleep(0.01)
            end = Deadline(self.gives_up_within_s)
            for call in calls:
                call.done.wait(end.remaining())
            # The memory is the caller's again. `put` returns None where it has not given up.
            given_up = [number for number, call in enumerate(calls) if _gave_up(call)]
            was_met = is_met is None or is_met()
            memory[given_up] = _GUARD
        assert said, "get_stats() waits for the store, and it is called by the scheduler"
        for call in calls:
            assert call.done.wait(self.deadline_s), "a call hangs though the store answers again"
        memory[2] = _GUARD
        for number, value in enumerate(values[:2]):
            _wait_until(
                functools.partial(_has, user, key_of(number), value),
                "a value to be found, though the store answers again",
                self.deadline_s,
            )
        if not was_met or not {0, 1} & set(given_up):
            self.not_tested(
                "what get() does once it has given up: it has waited for as long as the store; if "
                "it has a time-out, slow_options = {...} in the subclass of the kit makes that "
                "shorter, or gives_up_within_s = ... lets the kit wait for longer"
            )
        # A thread of the tier may be late on a machine that is busy.
        late = Deadline(5 * QUIET_S)
        while set(threading.enumerate()) - before and not late.expired:
            time.sleep(QUIET_S / 10)
        if not found_cls.writes_after_get:
            _check_quiet(memory[given_up], "`into` has changed after get() had given up")
        is_whole = user.get(key_of(2), nbytes) in (None, values[2], other)
        assert is_whole, "a value has bytes that `data` had after put() had given up"

    @usually("get() writes whole words, pages or records, or to the memory that `into` is part of")
    @pytest.mark.parametrize("nbytes", [1, 13, 4097])
    def test_get_writes_only_to_into(self, open_tier: OpenTier, key_of: KeyOf, nbytes: int) -> None:
        """`into` is part of larger memory, whose other bytes stay as they are."""
        user, value = open_tier(), value_of(1, nbytes)
        user.put(key_of(1), value)
        for key, has_value in ((key_of(1), True), (key_of(2), False)):
            memory = np.full(nbytes + 8192, _GUARD, np.uint8)
            into = memory[4097 : 4097 + nbytes]
            assert user.tier.get(key, into.data) is has_value
            assert into.tobytes() == value or not has_value
            into[:] = _GUARD
            assert (memory == _GUARD).all(), "bytes before or behind `into` were written"

    # -- keys

    @usually("the store changes keys: it decodes, folds, strips, cuts or splits them")
    @pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
    def test_keys_of_any_bytes(self, open_tier: OpenTier, keys: list[bytes]) -> None:
        """Keys are bytes: each has a value of its own, and is removed alone."""
        user = open_tier()
        for number, key in enumerate(keys):
            user.put(key, value_of(number, 64))
        _check_kept(user, {key: value_of(number, 64) for number, key in enumerate(keys)})
        user.remove(keys[::2])
        found = dict(zip(keys, user.contains(keys), strict=True))
        assert {key: key not in keys[::2] for key in keys} == found, (
            "after every second was removed"
        )

    @usually("the end of a key, with the number of the rank, is cut off or not compared")
    def test_ranks_are_kept_apart(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """The parts of a block that several ranks have are different values."""
        user, ranks = open_tier(), [0, 1, 2, 10, 255, 256, 257, 0xFFFF]
        values = {key_of(1, rank): value_of(rank, SMALL) for rank in ranks}
        for key, value in values.items():
            user.put(key, value)
        _check_kept(user, values)
        user.remove([key_of(1, 1)])
        assert user.contains(list(values)) == [rank != 1 for rank in ranks], (
            "contains() does not answer for each key, in order"
        )

    @usually("answers are made from a set, or from what the store returns for the keys it has")
    def test_contains_answers_for_each_key(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """One bool is returned per key, in order of the keys, which may repeat; none for none."""
        user = open_tier()
        for number in (1, 3, 4):
            user.put(key_of(number), value_of(number, SMALL))
        numbers = [4, 0, 3, 3, 2, 2, 1, 4, 0]
        found = user.contains([key_of(number) for number in numbers])
        assert found == [number in (1, 3, 4) for number in numbers], (
            "contains() does not answer for each key, in order"
        )
        assert user.contains([]) == []
        many = [key_of(number) for number in range(2000)]
        assert user.contains(many) == [number in (1, 3, 4) for number in range(2000)], (
            "contains() does not answer for each key, in order"
        )

    @usually("remove() does nothing, raises for a key that is not there, or removes too much")
    def test_removed_keys_are_gone(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """Others stay, missing ones are ignored, and a removed one may be put again."""
        user, keys = open_tier(), [key_of(number) for number in range(6)]
        values = {key: value_of(number, SMALL) for number, key in enumerate(keys)}
        for key, value in values.items():
            user.put(key, value)
        user.remove([])
        user.remove([key_of(99)])
        _check_kept(user, values)
        user.remove([keys[1], key_of(98), keys[3], keys[1]])
        user.remove([keys[1]])
        gone = [keys[1], keys[3]]
        assert user.contains(gone) == [False, False], "contains() finds removed keys"
        assert [user.get(key, SMALL) for key in gone] == [None, None], "get() finds removed keys"
        _check_kept(user, {key: value for key, value in values.items() if key not in gone})
        user.put(keys[1], values[keys[1]])
        assert _content(user, keys[1], values[keys[1]]) == _RIGHT

    # -- several values at a time

    @usually("put_many() or get_many() mixes up its items, or stops at one that is not there")
    def test_many_equal_singles(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """`put_many` and `get_many` do for each item what `put` and `get` do."""
        user, lengths = open_tier(), [SMALL, 1, 70_000, 33, SMALL]
        values = {key_of(number): value_of(number, n) for number, n in enumerate(lengths)}
        user.tier.put_many([])
        assert user.tier.get_many([]) == []
        user.put(key_of(0), value_of(99, SMALL))
        user.tier.put_many([(key, np.array(memoryview(v)).data) for key, v in values.items()])
        _check_kept(user, values)
        # Key 98 is missing, and value 3 has another length.
        asked = [(0, SMALL), (98, SMALL), (2, 70_000), (3, 34), (1, 1), (4, SMALL)]
        memory = [np.zeros(nbytes, np.uint8) for _, nbytes in asked]
        found = user.tier.get_many(
            [(key_of(number), into.data) for (number, _), into in zip(asked, memory, strict=True)]
        )
        assert found == [True, False, True, False, True, True], (
            "get_many() does not find what get() finds"
        )
        for (number, _), into, is_found in zip(asked, memory, found, strict=True):
            assert not is_found or into.tobytes() == values[key_of(number)], f"item {number}"

    # -- memory

    @usually("offsets in the registered memory are wrong, or that it is taken for the tier's own")
    def test_registered_memory(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """Values are put from and got into parts of it; no other byte of it is written."""
        user, memory = open_tier(), np.full(2**18, _GUARD, np.uint8)
        user.tier.register_memory(memory.data)
        values = {number: value_of(number, 4000 + number) for number in range(3)}
        for number, value in values.items():
            data = memory[101 + 10_000 * number :][: len(value)]
            data[:] = np.frombuffer(value, np.uint8)
            user.tier.put(key_of(number), data.data)
            data[:] = _GUARD
        for number, value in values.items():
            into = memory[150_003 + 10_000 * number :][: len(value)]
            assert user.tier.get(key_of(number), into.data) is True
            assert into.tobytes() == value, f"value {number} has other bytes"
            into[:] = _GUARD
        user.close()
        assert (memory == _GUARD).all(), "the tier has written elsewhere in the memory"

    @usually("every value that was ever put is held: in a list, a log, or a client's buffers")
    def test_replaced_values_are_let_go(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """Memory does not grow when one key is put and got again and again."""
        user, nbytes, num_puts = open_tier(), 2**18, 48
        with traced_memory():
            # The first puts may fill caches.
            for number in range(-8, num_puts):
                if number == 0:
                    gc.collect()
                    before, _ = tracemalloc.get_traced_memory()
                user.put(key_of(1), value_of(abs(number), nbytes))
                assert user.get(key_of(1), nbytes) is not None
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        assert grown < num_puts * nbytes // 3, f"{num_puts} puts of {nbytes} bytes hold {grown}"

    @usually("each call opens a file or a connection, starts a thread, or writes a file beside")
    def test_calls_leave_nothing(self, open_tier: OpenTier, folder: Path, key_of: KeyOf) -> None:
        """Many keys are put, found, missed and removed: descriptors, threads and files stay."""
        user, numbers = open_tier(), itertools.count()

        def live(num_keys: int) -> None:
            keys = [key_of(next(numbers)) for _ in range(num_keys)]
            for key in keys:
                user.put(key, value_of(1, 64))
                assert _content(user, key, value_of(1, 64)) == _RIGHT
                assert user.get(key, 63) is None, "get() of 63 bytes found 64"
            user.remove(keys)
            assert user.contains(keys) == [False] * num_keys, "contains() finds removed keys"
            for key in keys:
                assert user.get(key, 64) is None, "get() finds removed keys"

        # The first calls may make what later ones use.
        live(10)
        num_files, leftovers = len(files_of(folder)), Leftovers()
        live(NUM_KEYS)
        leftovers.check(self.ends_within_s)
        left = len(files_of(folder)) - num_files
        assert left < NUM_KEYS // 4, f"{NUM_KEYS} keys were put and removed, and left {left} files"

    @usually("each key that was ever asked for is remembered")
    def test_memory_of_removed_keys_is_let_go(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """A hundred rounds: what is remembered of removed and missing keys has a bound."""
        self.skip_unless_long()
        user, seen = open_tier(), []
        with traced_memory():
            for round_ in range(100):
                keys = [key_of(round_ * NUM_KEYS + number) for number in range(NUM_KEYS)]
                for key in keys:
                    user.put(key, b"value")
                user.remove(keys)
                user.contains(keys)
                del keys
                if round_ in (0, 49, 99):
                    # Of Python, and with what a client's native code takes.
                    with_native = resident_nbytes()
                    seen.append((tracemalloc.get_traced_memory()[0], with_native))
        for begin, middle, end in zip(*seen, strict=True):
            # 50 bytes for each key, which itself has 66.
            most = max(50 * 50 * NUM_KEYS, (middle - begin) // 2)
            assert end - middle < most, f"50,000 keys that were removed hold {end - middle:,} bytes"

    @usually("values or answers pass through pickle: a writer to the store runs code here")
    def test_nothing_is_unpickled(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """No function of `pickle` that loads is called."""
        # Imports at the first use are no concern of this test.
        _use(open_tier(), key_of(1))
        with recorded_unpickling() as loads:
            user = open_tier()
            _use(user, key_of(2))
            user.close()
        assert loads == [], "functions of the module pickle were called"

    # -- several callers

    @usually(
        "threads share a buffer or a connection without a lock, only one thread may call, or put() "
        "writes in the place that is read"
    )
    def test_threads_share_an_object(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """Several threads put, get and remove, under keys of their own and under the same one."""
        user, nbytes, shared = open_tier(), 2**16, key_of(0)
        of_thread = [value_of(number, nbytes) for number in range(NUM_THREADS)]
        several = [(key_of(1000 + number), value_of(number, nbytes)) for number in range(4)]
        begin = threading.Barrier(NUM_THREADS)
        beside: Any = _Beside(user.tier)
        user.tier = beside
        end = Deadline(self.deadline_s)

        def work(number: int) -> None:
            begin.wait(self.deadline_s)
            for turn in itertools.count():
                if turn >= NUM_TURNS and (beside.was_seen or end.expired):
                    break
                own, value = key_of(1 + number), value_of(100 * number + turn, nbytes)
                user.put(own, value)
                assert _content(user, own, value) == _RIGHT, (
                    "beside other threads, under a key of its own"
                )
                user.put(shared, of_thread[number])
                found = user.get(shared, nbytes)
                assert found is not None, (
                    "beside other threads: nothing, while one replaces the value"
                )
                assert any(found == each for each in of_thread), (
                    "beside other threads: a mix of two values"
                )
                user.remove([own])
                assert user.contains([own, shared]) == [False, True]
                # In another order than the next thread.
                items = several[:: 1 if number % 2 else -1]
                user.tier.put_many([(key, memoryview(bytearray(each))) for key, each in items])

        with _switching_often():
            # The threads of an executor would keep a process, whose tier hangs, from its end.
            calls = [
                start_call(functools.partial(work, number), "kit") for number in range(NUM_THREADS)
            ]
            for call in calls:
                call.done.wait()
        for call in calls:
            call.outcome()
        assert beside.was_seen, "no two calls of threads were under way at a time"

    @usually(
        "a value has its name, or is told by contains(), before all its bytes are there; write it "
        "under another name first, as Tier.write_whole does"
    )
    def test_value_is_there_whole_or_not_at_all(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """A reader that asks all the time, while values are put, replaced and removed."""
        writer, reader, nbytes = open_tier(), open_tier(), 2**20 + 3
        values = [value_of(number, nbytes) for number in range(2)]
        writer.put(key_of(0), values[0])
        beside: Any = _Beside(writer.tier)
        writer.tier = beside
        now, is_over, num_beside = [0], threading.Event(), 0
        # No number comes again: a reader that was held up knows how far the writer is.
        numbers = itertools.count(1)

        def write() -> None:
            for number in itertools.islice(numbers, NUM_TURNS // 2):
                now[0] = number
                writer.put(key_of(number), values[number % 2])
                writer.put(key_of(0), values[number % 2])
                writer.remove([key_of(number - 1)] if number > 1 else [])

        def run() -> None:
            end = Deadline(self.deadline_s)
            try:
                write()
                while not num_beside and not end.expired:
                    write()
            finally:
                is_over.set()

        with _switching_often():
            call = start_call(run, "kit")
            while not is_over.is_set():
                number = now[0]
                num_beside += len(beside.running)
                # It may be removed meanwhile, but not before the next one is put.
                is_told = reader.contains([key_of(number)]) == [True]
                is_found = reader.get(key_of(number), nbytes) in values
                assert is_found or not is_told or now[0] > number, (
                    "contains() finds a key whose value get() does not find: a put is under way"
                )
                for key in (key_of(number), key_of(max(0, number - 1)), key_of(0)):
                    got = reader.get(key, nbytes)
                    is_whole = got is None or got in values
                    assert is_whole, "get() returns a mix of two values"
                is_there = got is not None
                assert is_there, "get() finds nothing while a value is replaced"
            call.done.wait()
        call.outcome()
        assert num_beside, "no put was under way while another object read"

    @usually("values are kept by the object and not by the store that its options name")
    def test_objects_reach_one_store(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """Puts and removals through one object hold for another with equal options."""
        one, other = open_tier(), open_tier()
        for first, second, seed in ((one, other, 1), (other, one, 2)):
            value = value_of(seed, SMALL)
            first.put(key_of(1), value)
            assert second.contains([key_of(1)]) == [True], "contains() of the other object"
            assert _content(second, key_of(1), value) == _RIGHT, "in the other object"
        one.remove([key_of(1)])
        assert other.contains([key_of(1)]) == [False], "after the other object has removed it"

    @usually("an object lists the store when it is made, or remembers what was not there")
    def test_object_made_before_a_put_finds_it(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """A scheduler's object is made, and asked, before the workers' objects put anything."""
        scheduler = open_tier()
        keys = [key_of(number) for number in range(3)]
        assert scheduler.contains(keys) == [False] * 3
        assert scheduler.get(keys[0], SMALL) is None
        worker = open_tier()
        for number, key in enumerate(keys[:2]):
            worker.put(key, value_of(number, SMALL))
        assert scheduler.contains(keys) == [True, True, False], (
            "contains() misses what another object has put"
        )
        assert _content(scheduler, keys[0], value_of(0, SMALL)) == _RIGHT

    @usually(
        "the store is memory of one process, its options mean another place there, or values are "
        "cached or buffered in a process; a tier of one process only sets in_processes = False"
    )
    def test_processes_see_each_others_values(
        self, open_tier: OpenTier, start_tier: StartTier, key_of: KeyOf
    ) -> None:
        """Values, replacements and removals are seen at once, in both directions."""
        user, other = open_tier(), start_tier()
        for first, second, seed in ((user, other, 1), (other, user, 2), (user, other, 3)):
            value = value_of(seed, SMALL)
            first.put(key_of(1), value)
            assert second.contains([key_of(1), key_of(2)]) == [True, False], (
                "contains() misses what another process has put"
            )
            assert _content(second, key_of(1), value) == _RIGHT, f"value {seed} of another process"
        other.remove([key_of(1)])
        assert user.contains([key_of(1)]) == [False], "after the other process has removed it"
        assert user.get(key_of(1), SMALL) is None, "after the other process has removed it"

    @usually("put() writes in the place that is read, or leaves a lock behind")
    def test_killed_process_leaves_whole_values(
        self, open_tier: OpenTier, start_tier: StartTier, key_of: KeyOf, tmp_path: Path
    ) -> None:
        """After SIGKILL in the middle of a put each key has a whole value or none."""
        user, nbytes = open_tier(), 2**20
        keys = [key_of(number) for number in range(3)]
        values = {value_of(number, nbytes) for number in range(NUM_ROUNDS)}
        user.put(key_of(99), value_of(99, nbytes))
        noted, num_kills, num_struck = tmp_path / "is a put under way", 0, 0
        while num_struck < self.num_kills and num_kills < 4 * self.num_kills:
            num_kills += 1
            noted.write_bytes(b"\0")
            process = start_tier()
            duration = process.put_until_killed(keys, nbytes, str(noted))
            # At another moment of a put each time.
            time.sleep(min(random.uniform(0.0, 4.0) * duration, 0.1))  # noqa: S311  # no secret
            process.kill()
            num_struck += noted.read_bytes() == b"\1"
            for key in keys:
                found = user.get(key, nbytes)
                is_whole = found is None or found in values
                assert is_whole, "a value is torn: get() returns it"
                is_there = user.contains([key])
                assert is_there == [found is not None], (
                    "a value is torn: contains() and get() do not agree"
                )
            assert _content(user, key_of(99), value_of(99, nbytes)) == _RIGHT, "of another key"
            user.put(keys[0], value_of(1, nbytes))
            assert _content(user, keys[0], value_of(1, nbytes)) == _RIGHT, "put after the kill"
        if num_struck < self.num_kills:
            self.not_tested(
                f"{self.num_kills} kills within a put: {num_struck} of {num_kills} kills have "
                "struck one; num_kills = ... in the subclass of the kit makes more"
            )

    @usually("put() writes in the place that is read, or under a name that two processes choose")
    def test_processes_put_under_one_key(
        self, open_tier: OpenTier, start_tier: StartTier, key_of: KeyOf, tmp_path: Path
    ) -> None:
        """Each finds whole values, its own or the other's, while both put."""
        user, process, nbytes = open_tier(), start_tier(), 2**20
        values = {value_of(number, nbytes) for number in range(NUM_ROUNDS)}
        own = value_of(99, nbytes)
        noted = tmp_path / "is a put under way"
        noted.write_bytes(b"\0")
        process.put_until_killed([key_of(0)], nbytes, str(noted))
        was_beside, end = False, Deadline(self.deadline_s)
        for turn in itertools.count():
            if turn >= NUM_TURNS and (was_beside or end.expired):
                break
            was_beside = was_beside or noted.read_bytes() == b"\1"
            user.put(key_of(0), own)
            for _ in range(3):
                found = user.get(key_of(0), nbytes)
                is_there = found is not None
                assert is_there, "get() finds nothing, while two processes put"
                is_whole = found == own or found in values
                assert is_whole, "get() returns a mix of two values, while two processes put"
        process.kill()
        assert was_beside, "no put of the other process was under way"

    @usually(
        "put() leaves half a value where it fails, or catches the error; an error of the store is "
        "to be raised, and what was written of the value is to be removed"
    )
    @pytest.mark.parametrize("kind", FAULTS)
    def test_fault_of_the_store(
        self,
        open_tier: OpenTier,
        folder: Path,
        key_of: KeyOf,
        request: pytest.FixtureRequest,
        kind: str,
    ) -> None:
        """While a store is full, read-only or gone no call hangs or lies; then it is used again."""
        nbytes, own = 2**16 + 3, self.fault(kind)
        old, new = ([value_of(n, nbytes) for n in (k, k + 1, k + 2)] for k in (0, 10))
        keys = [key_of(number) for number in range(4)]
        # In this process the kit would hit all that goes on here.
        is_apart = self.in_processes and own is None and kind != "gone"
        process = request.getfixturevalue("start_tier")() if is_apart else None
        user, other = process or open_tier(), open_tier()
        for key, value in zip(keys, old, strict=False):
            user.put(key, value)
        num_files = len(files_of(folder))
        with self._brought_about(kind, folder, own, process):
            puts = [user.tried("put", keys[n % 4], new[n % 3])[0] for n in range(NUM_FULL)]
            found = [user.tried("get", key, nbytes) for key in keys]
            for each in (user, other):
                each.tried("contains", keys)
                each.tried("remove", [key_of(9)])
        whole = {None, *old, *new}
        are_whole = all(not is_done or value in whole for is_done, value in found)
        assert are_whole, f"get() returns bytes that were not put, while the store is {kind}"
        told = []
        for each in (user, other, open_tier()):
            values = [each.get(key, nbytes) for key in keys]
            are_whole = whole.issuperset(values)
            assert are_whole, f"a value is torn, after the store was {kind}"
            told.append(each.contains(keys))
            assert told[-1] == [value is not None for value in values], (
                f"contains() and get() do not agree, after the store was {kind}"
            )
            assert told[-1] == told[0], (
                f"another object finds other keys, after the store was {kind}"
            )
        if kind != "gone" and all(puts) and set(values) <= set(new):
            self.not_tested(f"a store that is {kind}: every put went well in the one of the kit")
        left = len(files_of(folder)) - num_files
        assert left <= len(keys), f"{NUM_FULL} calls of put() that failed have left {left} files"
        # An object need not find a store that was made anew.
        for each in (open_tier(),) if kind == "gone" else (user, other):
            each.put(keys[0], old[2])
            assert _content(each, keys[0], old[2]) == _RIGHT, f"after the store was {kind}"

    @usually(
        "put() counts no bytes, or those that its own object has put only, or evicts nothing: what "
        "was used longest ago has to give way, whoever has put it"
    )
    def test_kept_bytes_are_bounded(
        self, found_cls: type[Tier], tier_options: dict[str, Any], key_of: KeyOf
    ) -> None:
        """More values are put than `size_option` has room for; no more than fit are kept.

        Where objects of other processes reach the store, two of them put, one after the other.
        """
        if not self.size_option:
            self.skip_not_tested(
                "whether kept bytes are bounded: size_option = ... in the subclass of the kit "
                "names the option that bounds them"
            )
        most, nbytes = 8, 2**16
        bound = {self.size_option: most * nbytes}
        values = {key_of(number): value_of(number, nbytes) for number in range(4 * most)}
        users = [
            TierUser(open_tier(found_cls, {**copy.deepcopy(tier_options), **bound}))
            for _ in range(1 + self.in_processes)
        ]
        for number, (key, value) in enumerate(values.items()):
            users[number * len(users) // len(values)].put(key, value)
        *others, user = users
        kept = [key for key, value in values.items() if user.get(key, nbytes) == value]
        there = user.contains(list(values)).count(True)
        user.remove(list(values))
        for each in (*others, user):
            each.close()
        assert kept, f"{self.size_option}={most * nbytes} keeps no value of {nbytes} bytes"
        assert max(len(kept), there) <= most, f"{len(kept)} values are kept, room is for {most}"

    # -- construction, statistics and close

    @usually("the class has no options_cls, and its constructor refuses no option")
    def test_unknown_option_is_refused(
        self, found_cls: type[Tier], tier_options: dict[str, Any]
    ) -> None:
        """An option with a typing error is an `OffloadingOptionError` that names it."""
        unknown = "an_option_that_no_tier_has"
        refusal = None
        try:
            open_tier(found_cls, {**copy.deepcopy(tier_options), unknown: 1}).close()
        except OffloadingOptionError as error:
            refusal = str(error)
        assert refusal is not None, f"the option {unknown!r} is accepted"
        assert unknown in refusal, "the error does not name the option"

    @usually("get_stats() returns text or objects, or that a counter starts again")
    def test_stats_are_numbers_and_counters_rise(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """Statistics are names and numbers; counters, which end in ``_total``, never fall."""
        user = open_tier()
        before: dict[str, float] = {}
        for number in range(3):
            _use(user, key_of(number))
            after = checked_stats(user.tier.get_stats(), "tier")
            assert fallen_counters(before, after) == [], "counters that have fallen"
            before = after
        if not before:
            pytest.skip("this tier has no statistics")

    @usually("close() of a closed object, or of one that was never used, uses what is not there")
    def test_close_is_idempotent(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """Used and unused objects may be closed twice."""
        for is_used in (False, True):
            user = open_tier()
            if is_used:
                _use(user, key_of(1))
            user.close()
            user.close()

    @usually("close() removes the store, or closes what objects share")
    def test_close_ends_one_object_only(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """Other objects find the values that a closed one has put, and go on."""
        one, other = open_tier(), open_tier()
        for number in (1, 2):
            one.put(key_of(number), value_of(number, SMALL))
        one.close()
        _check_kept(other, {key_of(number): value_of(number, SMALL) for number in (1, 2)})
        _use(other, key_of(3))

    @usually("close() does not end a thread, a connection or a pool that the constructor has made")
    def test_close_leaves_nothing(self, open_tier: OpenTier, key_of: KeyOf) -> None:
        """Threads, descriptors and shared memory are released within `ends_within_s`."""

        def live() -> None:
            user = open_tier()
            _use(user, key_of(1))
            user.close()

        # A process may create resources once and keep them, such as a pool of threads.
        live()
        leftovers = Leftovers()
        live()
        live()
        leftovers.check(self.ends_within_s)

    @usually(
        "a server is bound to no address, which is all: bind it to 127.0.0.1, or a Unix socket"
    )
    def test_only_this_host_reaches_it(
        self, open_tier: OpenTier, tier_options: dict[str, Any], key_of: KeyOf
    ) -> None:
        """It listens at loopback addresses alone, but for those that its options name."""
        before = reachable()
        user = open_tier()
        memory = np.zeros(2**16, np.uint8)
        user.tier.register_memory(memory.data)
        _use(user, key_of(1))
        found = reachable() - before
        # The memory outlives it.
        user.close()
        check_this_host_only(found, tier_options)

    # -- blocks over the tier

    @usually("put() keeps the first value of a key, or remove() keeps what was refused")
    @pytest.mark.parametrize("arena", [False, True], ids=["the tier alone", "under an arena"])
    def test_damaged_block_is_refused(
        self, make_host: MakeHost, open_tier: OpenTier, key_of: KeyOf, *, arena: bool
    ) -> None:
        """Damage to any byte is found: the cache keeps its bytes, the tier drops the block."""
        options = {"cpu_bytes_to_use": 2**13} if arena else {}
        made = make_host(TINY, deadline_s=60.0, buffer_bytes=1, num_io_threads=1, **options)
        user, keys = open_tier(), [OffloadKey(key_of(number)[:-2]) for number in range(2)]

        def succeeded(job: int) -> bool:
            # `wait` may return before the end of a store, once the store has read the cache.
            while job not in made.finished:
                made.collect()
                time.sleep(0.0002)
            return made.succeeded(job)

        for number, key in enumerate(keys):
            made.write(number, seed=number)
            where = TierLoadStoreSpec([key], in_arena={0: number} if arena else {})
            assert succeeded(made.submit_store([number], where)), "a store has failed"
        own, other_own = (rank_key(key, 0) for key in keys)
        # Blocks are put from the arena a little later.
        deadline = Deadline(self.deadline_s)
        while user.contains([own, other_own]) != [True, True]:
            deadline.check("a block that was stored to be in the tier")
            time.sleep(0.001)
        nbytes = HEADER_NBYTES + TINY.chunk_nbytes
        good, other = user.get(own, nbytes), user.get(other_own, nbytes)
        assert good, "there is no block of this length"
        assert other, "there is no block of this length"
        damaged = {
            **{
                f"bit {n % 8} of byte {n}": good[:n] + bytes([good[n] ^ 1 << n % 8]) + good[n + 1 :]
                for n in range(nbytes)
            },
            "one byte": good[:1],
            "short": good[:-1],
            "long": good + b"x",
            "zeros": bytes(nbytes),
            "another block": other,
            "header of another block": other[:HEADER_NBYTES] + good[HEADER_NBYTES:],
            "bytes of another block": good[:HEADER_NBYTES] + other[HEADER_NBYTES:],
        }

        def load(key: OffloadKey, slot: int, block: int) -> bool:
            where = TierLoadStoreSpec([key], promoted={0: slot} if arena else {})
            return succeeded(made.submit_load([block], where))

        # Bytes of an earlier load, in a buffer or a slot, must not pass for a later block.
        assert load(keys[0], 0, 2), "a whole block is not loaded"
        before = made.digests()
        for what, value in damaged.items():
            user.put(own, value)
            assert not load(keys[0], 0, 3), f"{what}: it is loaded"
            assert made.digests() == before, f"{what}: the cache was written to"
            assert user.contains([own]) == [False], f"{what}: it is still there"
        assert made.worker.get_stats()["blocks_refused_total"] == len(damaged)
        user.put(own, good)
        assert load(keys[0], 0, 3), "a whole block is not loaded"
        assert made.digest(3) == made.digest(0)
        # After a load that has failed the spec puts a block whatever the tier says that it has.
        user.put(own, other)
        assert not load(keys[0], 0, 3), "another block is loaded"
        stored = TierLoadStoreSpec(keys[:1], in_arena={0: 0} if arena else {}, rewritten=keys[:1])
        assert succeeded(made.submit_store([0], stored)), "a store has failed"
        deadline = Deadline(self.deadline_s)
        while user.contains([own]) != [True]:
            deadline.check("a block that was stored anew to be in the tier")
            time.sleep(0.001)
        assert load(keys[0], 0, 2), "a block that was stored anew is not loaded"
        assert made.digest(2) == made.digest(0), "a block that was stored anew has other bytes"

    # -- a model that is served from the tier

    @usually("contains() takes longer than a second, or that a method raises on the spec's threads")
    def test_model_is_served_from_the_tier(self, bed: ConnectorTestBed) -> None:
        """Tokens equal a fresh model's, with blocks of another instance, in a conversation.

        The weights change within the conversation: then nothing of its first turn is loaded.
        """
        text = some_prompts(1, seed=secrets.randbits(32))[0]
        for number in range(2):
            bed.weights.change(number)
            # The schedulers learn of the change.
            bed.step()
            bed.produce(text)
            assert bed.producer.counts["tokens_loaded"] == 0, "blocks of other weights were loaded"
            before = bed.num_loaded
            # A look-up may come late on a machine that is busy.
            for _ in range(3):
                text = [*bed.consume(text).all_token_ids, number]
                if bed.num_loaded > before:
                    break
            counts = _nonzero(side.get_stats() for side in bed.sides)
            assert bed.num_loaded > before, f"no block was loaded, weights {number}: {counts}"
            failures = {name: count for name, count in counts.items() if "fail" in name}
            assert failures == {}, "calls of the tier have failed"

    @pytest.mark.usefixtures("one_thread")
    @usually("calls fail on the spec's threads; blocks of the first run are never the tier's fault")
    def test_runs_with_one_label_share_nothing(self, served: EngineConfig) -> None:
        """Two runs publish other weights under the same label: a block is named by its weights."""
        text = some_prompts(1, seed=secrets.randbits(32))[0]
        with contextlib.ExitStack() as closing:
            # The first run stays open: some stores forget the values of a closed object.
            for seed in (1, 2):
                process_weights.begin_anew()
                model = PagedTransformer(served.model, seed)
                publisher = closing.enter_context(Publisher(model))
                joined = {"join": publisher.address, "token": publisher.token}
                own = f"{seed} {served.engine_id}"
                config = msgspec.structs.replace(served, engine_id=own, **joined)
                host = closing.enter_context(make_engine(config))
                publisher.wait_for_workers(1, self.deadline_s)
                run, deadline = publisher.publish("1", wait=False), Deadline(self.deadline_s)
                while not host.counts["weight_changes"]:
                    host.step()
                    deadline.check("the commit of a round")
                assert run.result().ok
                expected = reference_output(text, NUM_NEW_TOKENS, seed, served.model).output
                assert host.generate([text], NUM_NEW_TOKENS) == [expected]
                assert host.counts["tokens_loaded"] == 0, "blocks of the first run were loaded"
                for _ in range(3):
                    host.scheduler.pool.reset()
                    assert host.generate([text], NUM_NEW_TOKENS) == [expected]
                assert host.counts["tokens_loaded"] > 0, "a run does not load its own blocks"

    @usually("the beginning of a key, which names the weights, is cut off or not compared")
    def test_no_block_outlives_its_weights(self, bed: ConnectorTestBed) -> None:
        """Blocks of old weights, or of a request across a change, stay a miss (FAULTS 31, 47)."""
        bed.step()
        kept, within = (some_prompts(1, seed=secrets.randbits(32))[0] for _ in range(2))
        # A look-up may come late on a machine that is busy.
        for _ in range(3):
            bed.transfer(kept)
            if bed.num_loaded:
                break
        assert bed.num_loaded, "no block was loaded before the weights changed"
        request = bed.submit_to_producer(within)
        # The prompt is computed, and not all tokens are.
        while not request.output:
            bed.step()
        bed.weights.change(1)
        # The schedulers learn of the change.
        bed.step()
        bed.run(request)
        for prompt in (kept, within):
            before = bed.num_loaded
            bed.consume(prompt)
            assert bed.num_loaded == before, "a block of other weights was loaded"
        counts = _nonzero(side.get_stats() for side in bed.sides)
        # The fence refuses a job of the old weights once the new ones are there: such a store
        # fails, without a call of the tier.
        failures = [
            name
            for name in counts
            if "fail" in name and "_refused" not in name and not name.startswith("store")
        ]
        assert failures == [], f"blocks of other weights were found: {counts}"

    @usually(
        "contains() takes longer than a second, or that a method leaves something where it raises, "
        "or close() where another object of the process is open"
    )
    @pytest.mark.parametrize("arena", ARENAS.values(), ids=ARENAS)
    def test_any_call_may_fail(
        self,
        found_cls: type[Tier],
        open_tier: OpenTier,
        make_bed: MakeBed,
        monkeypatch: pytest.MonkeyPatch,
        arena: dict[str, Any],
    ) -> None:
        """Serving goes on whichever call raises, and nothing is left over (FAULTS 33)."""
        # The spec pauses a tier after some failures in a row.
        monkeypatch.setattr(tier_module, "PAUSE_S", 0.0)
        failing = _FailingCall()
        tier = registered_name("specs", failing.wrap(found_cls), "tier")

        def live(methods: Sequence[str]) -> None:
            """Serve conversations, in each of which the next call of a method fails."""
            user = open_tier()
            bed = make_bed(EIGHTS, "one", tier=tier, buffer_bytes=2**14, **arena)
            bed.step()
            at_rest = _at_rest(bed)
            for method in methods:
                number, deadline = 1, Deadline(self.deadline_s)
                while True:
                    failing.arm(method, number)
                    _converse(bed, user, failing)
                    _wait_for_rest(bed, at_rest, f"call {number} of {method}()", self.deadline_s)
                    if failing.is_over():
                        number += 1
                    elif number > 1:
                        break
                    else:
                        # A look-up may come late on a machine that is busy.
                        deadline.check(f"a call of {method}()")
            failing.arm("", 0)
            deadline = Deadline(self.deadline_s)
            while not _converse(bed, user, failing):
                deadline.check("blocks that are loaded once no call fails")
            bed.producer.close()
            user.close()

        live([])
        # A process may create resources once and keep them, such as a pool of threads. No object
        # is open here and at the end: a library may keep resources of a closed object while
        # another is open, as sqlite keeps descriptors of a locked file.
        leftovers = Leftovers()
        live(CALLS)
        leftovers.check(self.ends_within_s)


class _FailingCall:
    """Lets one call of a tier raise, counted over all objects."""

    def __init__(self) -> None:
        self.put: dict[bytes, int] = {}
        """Lengths of the values that were put since `arm`, by key."""
        self._method, self._num_left, self._num_fired = "", 0, 0
        self._lock = threading.Lock()

    def wrap(self, tier_cls: type[Tier]) -> type[Tier]:
        """Return a class of the tier whose calls may fail."""
        wrapped = {}
        for method in CALLS:
            # A tier has batches if it overrides the method for many keys.
            many = f"{method}_many"
            has_batches = getattr(tier_cls, many, None) is not getattr(Tier, many, None)
            name = many if has_batches else method
            wrapped[name] = self._wrapped(method, getattr(tier_cls, name))
        return type(f"Failing{tier_cls.__name__}", (tier_cls,), wrapped)

    def arm(self, method: str, number: int) -> None:
        """Let a call of a method raise: with 1, the next one."""
        with self._lock:
            self._method, self._num_left = method, number
            self.put.clear()

    def is_over(self) -> bool:
        """Return whether the armed call has raised."""
        return self._num_left <= 0

    def _wrapped(self, method: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(tier: Tier, *args: Any) -> Any:
            with self._lock:
                self._num_left -= method == self._method
                is_due = method == self._method and self._num_left == 0
                if method == "put":
                    items = args[0] if own.__name__ == "put_many" else [args]
                    self.put.update((key, data.nbytes) for key, data in items)
                # Every second failing call does its work, and only its answer is lost.
                self._num_fired += is_due
                is_done = is_due and self._num_fired % 2 == 0
            if is_due and not is_done:
                raise ConnectionError(f"the kit lets {method}() fail")
            found = own(tier, *args)
            if is_done:
                raise ConnectionError(f"the kit drops the answer of {method}()")
            return found

        return call


def _converse(bed: ConnectorTestBed, user: TierUser, failing: _FailingCall) -> int:
    """Serve a prompt, another one in whose favour it is evicted, and the first one twice again.

    Returns:
        Number of tokens that the last one has loaded; before that, a block in the tier was damaged.
    """

    def serve(prompt: list[int]) -> int:
        before = bed.num_loaded
        bed.consumer.clear_cache()
        request = bed.submit_to_consumer(prompt, None, 1)
        bed.run(request)
        bed.consumer.check(request)
        return bed.num_loaded - before

    prompt, other = ([secrets.randbelow(256) for _ in range(2 * 8 + 3)] for _ in range(2))
    serve(prompt)
    serve(other)
    for key, nbytes in list(failing.put.items())[:1]:
        if value := user.get(key, nbytes):
            user.put(key, value[:-1] + bytes([value[-1] ^ 1]))
    serve(prompt)
    num_loaded = serve(prompt)
    bed.drain()
    return num_loaded


def _at_rest(bed: ConnectorTestBed) -> dict[str, float]:
    """Return the statistics that are the same whenever no job is under way."""
    stats = _nonzero(side.get_stats() for side in bed.sides)
    names = ("buffers_free", "puts_waiting", "jobs_running", "blocks_storing", "blocks_loading")
    found = {name: stats.get(name, 0) for name in names}
    return {**found, "slots": stats.get("slots_free", 0) + stats.get("blocks_idle", 0)}


def _wait_for_rest(
    bed: ConnectorTestBed, at_rest: Mapping[str, float], what: str, deadline_s: float
) -> None:
    deadline = Deadline(deadline_s)
    while (now := _at_rest(bed)) != at_rest:
        assert not deadline.expired, f"after {what} there is {now}, before it {at_rest}"
        time.sleep(0.0005)


class _Beside:
    """Calls a tier, and notes whether calls of several threads were under way at a time.

    Args:
        tier: The tier.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.running: set[int] = set()
        """Threads whose call is under way."""
        self.was_seen = False
        """True once there were two."""

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._tier, name)

        def call(*args: Any) -> Any:
            self.was_seen = self.was_seen or bool(self.running)
            self.running.add(threading.get_ident())
            try:
                return own(*args)
            finally:
                self.running.discard(threading.get_ident())

        return call


@contextlib.contextmanager
def _switching_often() -> Iterator[None]:
    """Let threads take turns within the shortest call of a tier."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _gave_up(call: Call) -> bool:
    """Return whether a call has ended by an error, or has found nothing."""
    return call.done.is_set() and (call.error is not None or call.outcome() is False)


def _wait_until(is_so: Callable[[], bool], what: str, within_s: float) -> None:
    """Wait until something has come about; an exception is a no."""
    deadline = Deadline(within_s)
    while True:
        with contextlib.suppress(Exception):
            if is_so():
                return
        deadline.check(what)
        time.sleep(0.01)


def _check_quiet(memory: Any, what: str) -> None:
    """Fail if bytes of memory change within `QUIET_S`."""
    quiet = Deadline(QUIET_S)
    while not quiet.expired:
        assert (memory == _GUARD).all(), what
        time.sleep(QUIET_S / 10)


def _content(user: Any, key: bytes, value: bytes) -> str:
    """Describe the value that `get` finds: pytest's diff of the bytes would take minutes."""
    found = user.get(key, len(value))
    if found is None:
        return "nothing, though it was put"
    if found == value:
        return _RIGHT
    pairs = enumerate(zip(found, value, strict=True))
    return f"other bytes, from byte {next(n for n, (one, other) in pairs if one != other)} on"


def _has(user: Any, key: bytes, value: bytes) -> bool:
    return _content(user, key, value) == _RIGHT


def _check_kept(user: TierUser, values: Mapping[bytes, bytes]) -> None:
    """Fail unless each key has its value."""
    found = {key: _content(user, key, value) for key, value in values.items()}
    wrong = {key: what for key, what in found.items() if what != _RIGHT}
    assert wrong == {}, f"{len(wrong)} of {len(values)} keys have no or other values"
    keys = list(values)
    missing = [key for key, has in zip(keys, user.contains(keys), strict=True) if not has]
    assert missing == [], "contains() does not find keys that get() finds"


def _use(user: TierUser, key: bytes) -> None:
    """Call each method once."""
    user.put(key, value_of(1, SMALL))
    assert user.contains([key]) == [True]
    assert _content(user, key, value_of(1, SMALL)) == _RIGHT
    user.tier.put_many([(key, np.zeros(10, np.uint8).data)])
    assert user.tier.get_many([(key, np.ones(10, np.uint8).data)]) == [True]
    user.remove([key])


def _nonzero(stats: Iterator[Mapping[str, float]]) -> dict[str, float]:
    """Return the numbers of several sides that are not zero."""
    return {name: number for each in stats for name, number in each.items() if number}
