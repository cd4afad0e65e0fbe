"""The conformance kit of weight transfer engines; the built-in engines pass it.

Subclass it in a test module of your own::

    from wtransfer.testing.engine import EngineConformance


    class TestMine(EngineConformance):
        engine = "mine"

A publisher and its workers run in this process, with the engine between them, so an engine needs
neither a second process nor a second host to be tested. `options_in` is given an empty folder for
each publisher. Tests cannot be overridden; state the tests that the engine may fail, each with its
reason::

        expected_failures = {
            "test_empty_and_scalar_tensors_arrive": "my transport has no 0-dim tensors",
        }
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec
import pytest
import torch

from wtransfer.calls import call_apart
from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.deadline import Deadline
from wtransfer.engines.factory import WeightTransferTrainerFactory
from wtransfer.engines.interface import (
    Resends,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
)
from wtransfer.errors import RoundAbortedError, WTransferError
from wtransfer.registry.discovery import contract_of
from wtransfer.registry.resolve import registry
from wtransfer.testing.contents import TRAVELLING_DTYPES, contents, random_tensor
from wtransfer.testing.faults import Fault, Faults
from wtransfer.testing.fleet import Fleet, GatedSource
from wtransfer.testing.kit import ConformanceKit, recorded_unpickling, registered_name, usually
from wtransfer.testing.leftovers import Leftovers, descendants, resident_nbytes
from wtransfer.testing.reachable import check_this_host_only, reachable
from wtransfer.testing.strangers import (
    LET_IN_S,
    Strangers,
    answer_of,
    no_tokens,
    send_noise,
)
from wtransfer.testing.two_hosts import TRAINER_ADDRESS, NoTwoHostsError, TwoHosts
from wtransfer.weight_sync.worker.target import StateDictTarget

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from wtransfer.testing.fleet import Member
    from wtransfer.weight_sync.trainer.round_handle import Round

    MakeFleet = Callable[..., Fleet]
    from wtransfer.testing.strangers import Speak

BIG_NBYTES = 24 * 2**20 + 4
"""Bytes of the one big tensor: larger than a usual bucket, and no multiple of it."""
NUM_SMALL = 2000
"""Number of small tensors."""
NUM_LATE = 128
"""Number of tensors for a worker that begins late: more than a few small slots take."""
LATE_TENSOR_NBYTES = 2**17
"""Bytes of each of them."""
NUM_ARRIVING = 12
"""Number of tensors whose arrival one by one is watched, and of a round that is ended amid them."""
ARRIVING = (4 * 2**20, 16 * 2**20)
"""Bytes of each of them: some fill a usual bucket, and all of them several; or else a large one."""
HELD_NBYTES = 33 * 2**20
"""Bytes of a round before and after which memory is compared: so many that the C library gives
them back as they are freed."""
NUM_ROUNDS = 12
"""Rounds of a life after which as much is in use as after its first ones."""
NUM_LONG_ROUNDS = 100
"""The same where tests may take minutes."""
NUM_HELD = 2
"""Number of workers that the kit holds before their vote."""
NUM_BUFFERS = 8
"""Sets of receive buffers in turn that the kit finds: as many rounds come between two commits."""
SERVED_NBYTES = 2**16
"""Bytes of a tensor that is surely adopted: smaller ones are copied."""
QUIET_S = 0.1
"""Time without a tensor after which a stopped trainer has sent what it could, in seconds."""
SLOW_TENSOR_MS = 2.0
"""Time per small tensor above which the kit prints a line."""
LATE_S = 0.2
"""Delay of a late worker, and the time that its first tensor takes, in seconds."""
ENTERED_WITHIN_S = 0.5
"""Time after which nobody is taken to receive, where another try follows, in seconds."""
UNBLOCKED_WITHIN_S = 1.0
"""Time that an engine gets to return after ``abort_weight_update``, as in a round."""
KEPT = "kept"
"""Name of the folder in which each publisher of a test has its own."""
_OTHER = "a worker has other tensors than the trainer"


class EngineConformance(ConformanceKit):
    """Subclass it with a name that starts with ``Test``, and state the engine.

    Attributes:
        engine: Name of the engine, as a publisher would use it.
        engine_cls: Instead of a name: the worker class of an engine that is not installed.
        trainer_cls: Its trainer class, where the worker class does not name it.
        options: Options of the trainer side.
        device: Device of the trainer's and the workers' tensors, as ``torch.device`` takes it.
        deadline_s: Bound on every wait, in seconds. Raise it for engines that start slowly. A test
            that takes six times as long has failed: a call of the engine hangs.
        ends_within_s: Bound on the leftovers of a shutdown, in seconds.
        token_field: Field of a worker's init info that has the token, for `dial_as_stranger`.
        host_option: Option of the trainer side that takes the address at which workers of other
            hosts reach it; no option is set if there is none of this name.
    """

    engine: ClassVar[str] = ""
    engine_cls: ClassVar[type | None] = None
    trainer_cls: ClassVar[type | None] = None
    options: ClassVar[dict[str, Any]] = {}
    device: ClassVar[str] = "cpu"
    deadline_s: ClassVar[float] = 10.0
    ends_within_s: ClassVar[float] = 5.0
    token_field: ClassVar[str] = "token"  # noqa: S105  # no token, a field's name
    host_option: ClassVar[str] = "host"
    smoke_test = "test_one_round_is_committed"
    _moving_nbytes: ClassVar[dict[type, int]] = {}
    """Bytes of a tensor of which workers have some before the last is read; 0: of no size."""
    _contract = (WeightTransferEngine, TrainerWeightTransferEngine, Resends)

    def run_test(self, test: Callable[[], None]) -> None:
        """Run a test on a thread, whose time is bounded."""

        def run() -> None:
            # Of a thread, as the fixture is.
            with torch.device(self.device):
                test()

        self.run_bounded(run, "a call of the engine")

    def options_in(self, folder: Path) -> dict[str, Any]:
        """Return the options of one publisher's trainer side.

        Args:
            folder: An empty folder, another one for each publisher of a test. Files that are left
                in it at shutdown are a failure, unless the engine keeps versions (`KeepsVersions`).
        """
        del folder
        return dict(self.options)

    def dial_as_stranger(self, peer: socket.socket, token: Any) -> None:
        """Speak the engine's own protocol, as a worker does that has this token.

        Override it, or the strangers of the kit speak none. For an engine whose workers send first
        the token that the init info has as hexadecimal digits:
        ``peer.sendall(bytes.fromhex(token))``. The kit calls it with the workers' token, and this
        peer must be let in; and with tokens that are none: empty, cut, of another publisher.

        Args:
            peer: Connected to a socket at which this process listens; calls end after 5 seconds.
            token: A token, as the field `token_field` of the init info has it.
        """

    # -- fixtures

    @pytest.fixture(autouse=True)
    def _tensors_on_device(self) -> Iterator[None]:
        """Create tensors on the device by default."""
        with torch.device(self.device):
            yield

    @pytest.fixture
    def worker_cls(self) -> type:
        """Return the worker class that is tested."""
        return self.engine_cls or registry("engines").get(self.engine)

    @pytest.fixture
    def twin_cls(self, worker_cls: type) -> type:
        """Return the trainer class that is tested."""
        if self.trainer_cls is not None:
            return self.trainer_cls
        if self.engine_cls is None:
            return WeightTransferTrainerFactory.trainer_class(self.engine)
        return WeightTransferTrainerFactory.trainer_class(registered_name("engines", worker_cls))

    @pytest.fixture
    def fleet(self, worker_cls: type, twin_cls: type, tmp_path: Path) -> Iterator[MakeFleet]:
        """Make fleets of this engine, which are closed at the end of the test."""
        fleets: list[Fleet] = []

        def make(
            source: Any, *, trainer: type | None = None, engine: str | None = None, **more: Any
        ) -> Fleet:
            name = engine or self.engine or registered_name("engines", worker_cls)
            trainer = trainer or (None if engine else twin_cls)
            folder = tmp_path / KEPT / str(len(fleets))
            folder.mkdir(parents=True)
            made = Fleet(
                source,
                engine=name,
                trainer=trainer,
                options={**self.options_in(folder), **more},
                deadline_s=self.deadline_s,
            )
            fleets.append(made)
            return made

        def close_all() -> None:
            while fleets:
                fleets.pop().close()

        yield make
        # Fixtures live on for a while, and would keep everything that fleets refer to.
        self.end_bounded(close_all, "shutdown()")

    # -- arrival

    def test_one_round_is_committed(self, fleet: MakeFleet) -> None:
        """One tensor arrives at two workers."""
        with self.is_smoke_test():
            self._check_one_round(fleet)

    @usually("`receive_weights` does not pass on every tensor under its name, or before it returns")
    def _check_one_round(self, fleet: MakeFleet) -> None:
        _round_trip(fleet({"weight": torch.arange(12.0)}))

    @usually(
        "tensors pass through a library that lacks the dtype, or are compared or converted by value"
    )
    @pytest.mark.parametrize("dtype", TRAVELLING_DTYPES, ids=str)
    def test_every_dtype_arrives(self, fleet: MakeFleet, dtype: torch.dtype) -> None:
        """Bits are not interpreted, so NaN patterns and signs of zero arrive as well."""
        _round_trip(fleet({"weight": random_tensor(dtype, (3, 5), seed=1)}))

    @usually(
        "a loop over bytes skips tensors of none, or that a shape of no dimensions becomes `(1,)`"
    )
    def test_empty_and_scalar_tensors_arrive(self, fleet: MakeFleet) -> None:
        """Tensors without dimensions, and tensors without elements, arrive."""
        source = {
            "scalar": torch.tensor(7.0),
            "empty": torch.empty(0),
            "no rows": torch.empty(0, 4, dtype=torch.int64),
            "no columns": torch.empty(4, 0, 3, dtype=torch.bfloat16),
            "one": torch.ones(1, dtype=torch.bool),
        }
        _round_trip(fleet(source))

    @usually(
        "a tensor must fit into one buffer or message, or that one short read is taken for "
        "all of it"
    )
    def test_one_big_tensor_arrives(self, fleet: MakeFleet) -> None:
        """A tensor may be larger than any buffer."""
        tensor = torch.arange(BIG_NBYTES // 4, dtype=torch.int32)
        _round_trip(fleet({"small": torch.ones(3), "big": tensor, "last": torch.zeros(1)}))

    @usually("a list, queue or message has a bound, at which tensors are dropped")
    def test_many_small_tensors_arrive(self, fleet: MakeFleet) -> None:
        """More tensors than buffers and messages arrive; a high cost per tensor is printed."""
        made = fleet({f"layer.{i}": torch.full((i % 7,), float(i)) for i in range(NUM_SMALL)})
        start = time.monotonic()
        _round_trip(made)
        cost_ms = (time.monotonic() - start) * 1e3 / NUM_SMALL
        self.user_properties.append(("ms_per_small_tensor", cost_ms))
        if cost_ms > SLOW_TENSOR_MS:
            # Not a warning: many projects turn warnings into errors, and slowness is no error.
            self.note(
                f"a small tensor takes {cost_ms:.1f} ms, more than {SLOW_TENSOR_MS:g} ms: send "
                "tensors in buckets"
            )

    @usually(
        "`receive_weights` collects all tensors for one call of `load_weights`: pass each on, or "
        "each bucket, as it arrives; each call is progress"
    )
    def test_tensors_are_passed_on_as_they_arrive(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type
    ) -> None:
        """The trainer's last tensor is held back; a worker has been given others by then."""
        # What a bucket of the engine holds comes in one call: so a second time, four times as much.
        for nbytes in ARRIVING:
            watch = _Watch()
            in_time = self._passes_on_in_time(
                fleet, watch.wrap(worker_cls, twin_cls), watch, nbytes
            )
            in_one = watch.is_in_one
            if in_time or not in_one:
                break
        if not in_time:
            self._moving_nbytes[type(self)] = 0
        told = (
            f"{NUM_ARRIVING - 1} of {NUM_ARRIVING} tensors of {nbytes:,} bytes, and "
            "nothing was passed on by `load_weights` before the trainer had read the last one"
        )
        end = (
            "with a model whose transfer takes longer than the publisher's deadline, the round "
            "ends with StallError"
        )
        half = f"{NUM_ARRIVING * nbytes // 2**21} MiB"
        assert in_time or not in_one, (
            f"{told}; then they came in one call, or its bucket is larger than {half}: {end}"
        )
        if not in_time:
            self.note(f"{told}; if moving them is no progress of the trainer's source, {end}")

    def _passes_on_in_time(
        self,
        fleet: MakeFleet,
        engine: str,
        watch: _Watch,
        nbytes: int,
        within_s: float | None = None,
    ) -> bool:
        """Run a round of tensors; return whether some came before the last one was read."""
        source = _gated(_large(nbytes))
        made = fleet(source, engine=engine)
        member = made.join(_zeros(source.tensors))
        source.gate.clear()
        round_ = made.publisher.publish("v1", wait=False)
        try:
            assert source.reached.wait(self.deadline_s)
            in_time = self._is_moving(watch, within_s)
        finally:
            source.gate.set()
        made.finish(round_)
        assert member.contents == contents(source.tensors)
        made.close()
        return in_time

    def _is_moving(self, watch: _Watch, within_s: float | None = None) -> bool:
        """Wait until a worker was given a tensor of the round that is stopped."""
        # Half: after the whole time without progress the round ends with StallError.
        end = Deadline(within_s or self.deadline_s / 2)
        is_moving = _in_time(lambda: sum(watch.passed) > 0, end.remaining())
        # What was sent arrives: a transport may keep a transfer that is cut off for a while.
        before = -1
        while before < (before := sum(watch.passed)) and not end.expired:
            time.sleep(QUIET_S)
        return is_moving

    def _moving(self, fleet: MakeFleet, worker_cls: type, twin_cls: type) -> _Moving:
        """Return a source that stops while tensors are on their way, where the engine can."""
        cls = type(self)
        if cls not in self._moving_nbytes:
            # The smaller, the sooner a round is over; an engine with small buckets needs no more.
            tries = ((SERVED_NBYTES, ENTERED_WITHIN_S), *((each, None) for each in ARRIVING))
            self._moving_nbytes[cls] = 0
            for nbytes, within_s in tries:
                watch = _Watch()
                engine = watch.wrap(worker_cls, twin_cls)
                if self._passes_on_in_time(fleet, engine, watch, nbytes, within_s):
                    self._moving_nbytes[cls] = nbytes
                    break
                if within_s is None and not watch.is_in_one:
                    break
        nbytes = self._moving_nbytes[cls]
        if nbytes:
            return _Moving(_gated(_large(nbytes)), is_moving=True)
        return _Moving(GatedSource(_model()), is_moving=False)

    @usually("the trainer sends storage, as from `data_ptr()`, without `contiguous()`")
    def test_tensors_of_any_strides_arrive(self, fleet: MakeFleet) -> None:
        """Elements are sent in C order, whatever their strides are in the trainer's memory."""
        base = random_tensor(torch.float32, (6, 8), seed=2)
        source = {"transposed": base.t(), "every other": base[:, ::2], "row": base[3]}
        made = fleet(source)
        member = made.join({name: tensor.clone() * 0 for name, tensor in source.items()})
        _publish(made, "v1")
        assert member.contents == contents(source), _OTHER

    @usually("names become parts of paths, are split, or are encoded as ASCII")
    def test_names_of_any_characters_arrive(self, fleet: MakeFleet) -> None:
        """Names are not paths, and not ASCII."""
        names = ["a.b", "../up", "/etc/name", "with space", "ключ", "重み", "a" * 300, "%s{}"]
        _round_trip(fleet({name: torch.full((2,), float(i)) for i, name in enumerate(names)}))

    @usually("the trainer keeps what it sent first, or that a buffer or counter is not reset")
    def test_one_round_after_another_arrives(self, fleet: MakeFleet) -> None:
        """Buffers are reused; bytes of an earlier round must not remain."""
        source = _model()
        made = fleet(source)
        member = made.join()
        for number in range(5):
            for tensor in source.values():
                # The latter is not counted as a change of the tensor (`Tensor._version`).
                (tensor if number % 2 else tensor.data).add_(1)
            _publish(made, f"v{number}")
            assert member.contents == contents(source), _OTHER
            assert member.session.version == f"v{number}"

    @usually("a list or a dictionary keeps the tensors of each round: keep those of the last one")
    def test_tensors_of_earlier_rounds_are_let_go(self, fleet: MakeFleet) -> None:
        """Memory does not grow from round to round; pages that both sides share count once."""
        source = {"weight": torch.zeros(HELD_NBYTES // 4)}
        made = fleet(source)
        made.join()
        used = []
        # The first rounds may fill buffers, a few in turn.
        for number in range(6):
            source["weight"] += 1
            _publish(made, f"v{number}")
            used.append(resident_nbytes())
        # Half of what three rounds have: the process frees and takes other memory meanwhile.
        grown = used[5] - used[2]
        assert grown < 3 * HELD_NBYTES // 2, (
            f"three more rounds of {HELD_NBYTES >> 20} MiB leave {grown >> 20} MiB more in use"
        )

    @usually(
        "what a round opens, starts or writes is ended by `shutdown()` only: end it in "
        "`round_finished` or with the last tensor that needs it"
    )
    def test_rounds_leave_nothing_behind(
        self, fleet: MakeFleet, twin_cls: type, tmp_path: Path
    ) -> None:
        """Threads, descriptors, mappings and files are as many after many rounds as after four.

        Dry runs and commits in turn: `NUM_ROUNDS`, and `NUM_LONG_ROUNDS` with
        ``--wtransfer-long``.
        """
        source = _served()
        made = fleet(source)
        made.join()

        def live(numbers: range) -> int:
            for number in numbers:
                source["weight"] += 1
                made.publisher.publish(f"try {number}", dry_run=True)
                _publish(made, f"v{number}")
            return len(_files(tmp_path / KEPT))

        # The first rounds may fill buffers, a few in turn.
        num_files = live(range(4))
        # A group that is formed anew has other threads.
        leftovers = Leftovers(threads_by_name=True)
        num_rounds = NUM_LONG_ROUNDS if self._asks_long else NUM_ROUNDS
        more_files = live(range(4, num_rounds)) - num_files
        what = f"{num_rounds - 4} more rounds, each after a dry run, have left more in use"
        if found := leftovers.found(self.ends_within_s):
            raise AssertionError("\n  ".join([f"{what}:", *found]))
        if not hasattr(twin_cls, "kept"):
            names = sorted({each.name for each in _files(tmp_path / KEPT)})
            assert more_files <= 0, f"{what}: {more_files} files beside {', '.join(names[:8])}"

    @usually(
        "the engine serves the first worker only; `client.num_workers` says how many there are"
    )
    def test_two_workers_get_the_same(self, fleet: MakeFleet) -> None:
        """Each worker verifies the digests itself."""
        source = _model()
        made = fleet(source)
        members = [made.join(), made.join()]
        for version in ("v1", "v2"):
            source["weight"] += 1
            _publish(made, version)
            assert [member.contents for member in members] == [contents(source)] * 2, _OTHER

    @usually(
        "the trainer writes to a slot that a worker still reads (wait until every worker has "
        "returned it, also the slowest one), or to the tensors that it sends"
    )
    def test_worker_that_begins_late_gets_the_same(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type
    ) -> None:
        """A trainer that runs ahead overwrites bytes that one of its workers has not read."""
        watch = _Watch()
        source = {
            f"layer.{i}": torch.arange(i, i + LATE_TENSOR_NBYTES // 4, dtype=torch.int32)
            for i in range(NUM_LATE)
        }
        made = fleet(source, engine=watch.wrap(worker_cls, twin_cls))
        members = [made.join(), made.join()]
        meanwhile: list[dict[str, Any]] = []
        watch.on_late, watch.is_late = lambda: meanwhile.append(contents(source)), True
        _publish(made, "v1")
        assert not watch.is_late, "the second worker was never asked to receive: it was not late"
        assert meanwhile == [contents(source)] * len(meanwhile), (
            "the trainer's own tensors had other bytes while they were sent"
        )
        assert [member.contents for member in members] == [contents(source)] * 2, _OTHER

    @usually(
        "`resend(client)` sends nothing, or to `self.client`, or not what it has sent but what the "
        "trainer has now; leave it out if weights are not kept"
    )
    def test_a_late_joiner_gets_the_current_version(self, fleet: MakeFleet, twin_cls: type) -> None:
        """The version arrives at once if the trainer can ``resend``, else with the next round."""
        source = _model()
        made = fleet(source)
        made.join()
        for version in ("v1", "v2"):
            _publish(made, version)
            published = contents(source)
            # The trainer goes on: what it has now is no version.
            source["weight"] += 1
            late = made.join()
            if hasattr(twin_cls, "resend"):
                assert late.session.commit_pending(self.deadline_s), (
                    f"`resend` brought nothing, or other tensors than those of {version}, to a "
                    "worker that joined later"
                )
                assert (late.session.version, late.contents) == (version, published)
        _publish(made, "v3")
        assert (late.session.version, late.contents) == ("v3", contents(source))

    # -- failures

    @usually(
        "state of the aborted round is kept: a flag, a half-read stream, a lock, what was packed "
        "or announced"
    )
    @pytest.mark.parametrize("phase", ["first", "sending", "received"])
    def test_an_aborted_round_changes_nothing(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type, phase: str
    ) -> None:
        """An abort leaves the old version, bit for bit, and the engine usable.

        It comes before the first tensor is read, while workers are given tensors, or when they
        have all of them and the vote has not begun.
        """
        watch, source, is_moving = _Watch(), GatedSource(_served()), False
        if phase == "sending":
            source, is_moving = self._moving(fleet, worker_cls, twin_cls)
        elif phase == "first":
            source.gate_at = 0
        made = fleet(source, engine=watch.wrap(worker_cls, twin_cls))
        served = _Served(made, source.tensors)
        _publish(made, "v1")
        served.note()
        # Once, and twice in a row: buffers may take turns.
        for number in (1, 2):
            for _ in range(number):
                try:
                    if phase == "first":
                        round_ = self._begin_stopped(made, source, watch)
                    elif phase == "received":
                        round_ = self._stop_when_received(made, source.tensors, watch)
                    else:
                        round_ = self._stop_in_sending(made, source, watch, is_moving=is_moving)
                    served.check("a round was held")
                    round_.abort("the test says so")
                    _await(self.deadline_s, served.is_idle, "the workers to hear of the abort")
                finally:
                    watch.release(source)
                with pytest.raises(RoundAbortedError, match="the test says so"):
                    made.finish(round_)
                served.check("a round was aborted")
            _publish(made, f"after {number}")
            served.check_has(source.tensors)
            served.note()

    @usually("`receive_weights` swallows the error of `load_weights`, or is left unusable by it")
    @pytest.mark.parametrize("worker", [0, 1])
    def test_a_round_that_fails_on_one_worker_changes_none(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type, worker: int
    ) -> None:
        """``load_weights`` raises on one worker; the engine raises it too, and works again."""
        faults = Faults()
        source = _model()
        made = fleet(source, engine=registered_name("engines", faults.wrap(worker_cls, twin_cls)))
        members = [made.join(), made.join()]
        _publish(made, "v1")
        before = contents(source)
        source["weight"] += 1
        faults.arm(Fault("twice", tensor=1, worker=worker))
        error = _error_of(made, "v2")
        assert faults.fired
        assert "twice" in error, (
            f"`load_weights` has raised on worker {worker}, as a tensor came twice; the round must "
            f"end with that error, and {error}"
        )
        assert [member.contents for member in members] == [before] * 2
        _publish(made, "v3")
        assert [member.contents for member in members] == [contents(source)] * 2, _OTHER

    @usually(
        "`receive_weights` waits in a call that `abort_weight_update` does not end, or that the "
        "worker's class lacks it: shut its socket down, or set its event"
    )
    def test_blocked_receive_is_unblocked(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type
    ) -> None:
        """A worker that waits for the trainer's next tensor returns once it is aborted.

        So does one whose abort comes a moment before it waits.
        """
        tried: list[str] = []
        for is_large in (False, True):
            source, is_moving = _Moving(GatedSource(_model()), is_moving=False)
            if is_large:
                source, is_moving = self._moving(fleet, worker_cls, twin_cls)
                if not is_moving:
                    break
            tried.append(f"{len(source.tensors) - source.gate_at} of {len(source.tensors)} tensors")
            if self._unblocks(fleet, worker_cls, twin_cls, source, is_moving=is_moving):
                return
        self.not_tested(
            "whether an abort ends `receive_weights`: no worker waited in it while the trainer "
            f"held back the last {', then '.join(tried)}; nothing is missing if it never "
            "waits for the trainer, else give `options` by which it does, such as smaller buckets"
        )

    def _unblocks(
        self,
        fleet: MakeFleet,
        worker_cls: type,
        twin_cls: type,
        source: GatedSource,
        *,
        is_moving: bool,
    ) -> bool:
        """Check a worker that waits for a source that is stopped; return whether it does wait."""
        watch = _Watch()
        made = fleet(source, engine=watch.wrap(worker_cls, twin_cls))
        member = made.join(_zeros(source.tensors))
        _publish(made, "v1")
        # The second time, the abort comes first.
        for watch.is_aborted_early in (False, True):
            round_ = self._begin_stopped(made, source, watch)
            try:
                if watch.is_aborted_early:
                    _await(self.deadline_s, lambda: watch.aborted or round_.done, "a receiver")  # noqa: B023
                    assert watch.ended(watch.aborted), (
                        "`abort_weight_update` came a moment before `receive_weights` waited for "
                        "the trainer, and it waits on"
                    )
                    continue
                if is_moving:
                    self._is_moving(watch)
                if not (blocked := watch.blocked()):
                    break
                for engine in blocked:
                    _abort(engine)
                assert watch.ended(blocked), "receive_weights goes on after abort_weight_update"
            finally:
                source.gate.set()
                if not round_.done:
                    round_.abort("the test says so")
                _end(made, round_)
        watch.is_aborted_early = False
        _publish(made, "v3")
        assert member.contents == contents(source.tensors)
        made.close()
        return bool(watch.aborted)

    @usually(
        "the trainer waits for a worker to dial, as in accept(), without a look at whether "
        "`client.update_weights`, on its other thread, has failed, and without a deadline"
    )
    def test_worker_that_fails_first_leaves_nothing_blocked(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type
    ) -> None:
        """``receive_weights`` raises before the first byte; the round ends with that error."""
        watch = _Watch()
        source = _model()
        engine = watch.wrap(worker_cls, twin_cls)

        def live() -> None:
            made = fleet(source, engine=engine)
            members = [made.join(), made.join()]
            _publish(made, "v1")
            source["weight"] += 1
            watch.fails_first = True
            error = _error_of(made, "v2")
            assert "before the first byte" in error, (
                "`receive_weights` has raised 'injected before the first byte'; the round must end "
                f"with that error, and {error}"
            )
            assert watch.sends_end(), "send_weights goes on though its round has ended"
            _publish(made, "v3")
            assert [member.contents for member in members] == [contents(source)] * 2, _OTHER
            made.close()

        self._check_leaves_nothing(live)

    @usually(
        "an error path of one side does not close what its round has opened; a `with` block does"
    )
    def test_worker_that_is_lost_ends_the_round(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type
    ) -> None:
        """A worker leaves while it is sent to; the round ends, and nothing of it is left."""
        source, is_moving = self._moving(fleet, worker_cls, twin_cls)
        watch = _Watch()
        engine = watch.wrap(worker_cls, twin_cls)

        def live() -> None:
            made = fleet(source, engine=engine)
            member, lost = (made.join(_zeros(source.tensors)) for _ in range(2))
            _publish(made, "v1")
            round_ = self._stop_in_sending(made, source, watch, is_moving=is_moving)
            lost.session.close()
            made.members.remove(lost)
            watch.release(source)
            _end(made, round_)
            _change(source.tensors)
            _publish(made, "v2")
            assert member.contents == contents(source.tensors)
            made.close()

        self._check_leaves_nothing(live)

    @usually("all publishers of a host share a port, a file or a name: let the system choose it")
    def test_two_publishers_do_not_meet(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type
    ) -> None:
        """Two publishers of one host send at the same time."""
        held, _ = self._moving(fleet, worker_cls, twin_cls)
        other, watch = {name: each + 2 for name, each in held.tensors.items()}, _Watch()
        first, second = fleet(held, engine=watch.wrap(worker_cls, twin_cls)), fleet(other)
        member = first.join(_zeros(held.tensors))
        beside = second.join()
        _publish(first, "v1")
        # The trainer, whether workers have been given some by then or not: it is amid its own.
        round_ = self._begin_stopped(first, held, watch)
        self._is_moving(watch, QUIET_S)
        try:
            _publish(second, "w1")
        finally:
            watch.release(held)
        first.finish(round_)
        assert member.contents == contents(held.tensors)
        assert beside.contents == contents(other)

    @usually(
        "every peer that dials is taken for a worker, or is read from without a deadline: compare "
        "a token from the init info first, and let no silent peer keep the others waiting"
    )
    def test_stranger_gets_nothing(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type
    ) -> None:
        """Peers without the token dial before the workers: one is silent, one sends noise.

        More speak the engine's protocol, where `dial_as_stranger` does: without a token, and with
        those that are none. The peers dial TCP and Unix sockets, and read the files whose
        descriptors they are given.
        """
        watch = _Watch()
        source = {"weight": random_tensor(torch.float32, (64, 64), seed=5)}
        weights = source["weight"].cpu().numpy().tobytes()
        another: Any = None
        speaks: list[Speak] = [lambda _peer: None, send_noise]
        is_spoken = type(self).dial_as_stranger is not EngineConformance.dial_as_stranger
        if is_spoken:
            another = self._other_token(fleet, worker_cls, twin_cls)
            speaks += [
                functools.partial(self._dial_without_token, watch, another, number)
                for number in range(len(no_tokens("", "")))
            ]
        # A publisher's own listener is authenticated; it is there from now on.
        made = fleet(source, engine=watch.wrap(worker_cls, twin_cls))
        members = [made.join(), made.join()]
        with contextlib.ExitStack() as stack:
            strangers = Strangers(stack, speaks)
            watch.on_receive = strangers.dial
            _publish(made, "v1")
            if not strangers.found:
                pytest.skip("the engine listens on no socket: there is nothing to dial")
            assert [member.contents for member in members] == [contents(source)] * 2, _OTHER
            strangers.check(weights)
        if not strangers.sockets:
            self.skip_not_tested(
                f"a stranger: the engine listens at {', '.join(strangers.found)}, where none could "
                "connect, as another peer keeps the listener busy, or it is closed too soon"
            )
        if is_spoken:
            self._check_lets_in(fleet, worker_cls, twin_cls, source, another)
        else:
            self.not_tested(
                "a stranger that speaks the engine's protocol; write "
                "dial_as_stranger(self, peer, token) in the subclass of the kit"
            )

    def _dial_without_token(
        self, watch: _Watch, another: Any, number: int, peer: socket.socket
    ) -> None:
        self.dial_as_stranger(peer, no_tokens(self._token_of(watch), another)[number])

    def _token_of(self, watch: _Watch) -> Any:
        token = getattr(watch.init_info, self.token_field, None)
        assert isinstance(token, str | bytes), (
            f"the init info of a worker has no text or bytes {self.token_field!r}, by which "
            "`dial_as_stranger` is called: name the field of its token in `token_field`"
        )
        return token

    def _other_token(self, fleet: MakeFleet, worker_cls: type, twin_cls: type) -> Any:
        """Return the token of another publisher."""
        watch = _Watch()
        made = fleet({"weight": torch.ones(3)}, engine=watch.wrap(worker_cls, twin_cls))
        made.join()
        _publish(made, "v1")
        made.close()
        return self._token_of(watch)

    def _check_lets_in(
        self,
        fleet: MakeFleet,
        worker_cls: type,
        twin_cls: type,
        source: Mapping[str, torch.Tensor],
        another: Any,
    ) -> None:
        """Check that a peer with the workers' token gets in by the same call, in their place."""
        watch = _Watch()
        made = fleet(source, engine=watch.wrap(worker_cls, twin_cls))
        made.join()
        strange: list[str] = []
        right: list[str] = []
        with contextlib.ExitStack() as stack:
            known = Strangers(
                stack, [lambda peer: self.dial_as_stranger(peer, self._token_of(watch))]
            )
            unknown = Strangers(stack, [lambda peer: self.dial_as_stranger(peer, another)])

            def dial() -> None:
                # Before the worker itself dials: the trainer may wait for one peer only.
                for answers, peers in ((strange, unknown), (right, known)):
                    peers.dial()
                    while peers.sockets:
                        answers.append(answer_of(peers.sockets.pop()))

            watch.on_receive = dial
            # The worker whose place the peer has taken may fail.
            _error_of(made, "v1")
        assert "" in right or "sent" in right, (
            "`dial_as_stranger` was given the token of the workers, and its peer was turned away: "
            "so the engine's protocol is another one, and strangers that speak it were not tried"
        )
        if "sent" not in right and "" in strange:
            self.not_tested(
                "a stranger that speaks the engine's protocol: a peer with the token of the "
                f"workers was sent nothing in {LET_IN_S:g} s, as one without; let dial_as_stranger "
                "go on with the protocol until an answer comes"
            )

    @usually(
        "the engine listens at '', 0.0.0.0 or ::, or at the address of a network card: listen at "
        "127.0.0.1, or at the address that an option names"
    )
    def test_only_this_host_reaches_it(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type, tmp_path: Path
    ) -> None:
        """Sockets listen at loopback addresses and Unix sockets, unless an option names another.

        Those of this process and of its children: they listen, or take datagrams.
        """
        watch = _Watch()
        before = reachable()
        source = _served()
        made = fleet(source, engine=watch.wrap(worker_cls, twin_cls))
        for _ in range(2):
            made.join()
        found: set[tuple[str, int]] = set()
        watch.on_receive = lambda: found.update(reachable() - before)
        for version in ("v1", "v2"):
            _publish(made, version)
        check_this_host_only(found, self.options_in(tmp_path))

    @usually(
        "the trainer announces an address of its own host alone, such as 127.0.0.1: take the "
        "address as an option, whose name is `host_option`, or do not declare multi_host"
    )
    def test_worker_on_another_host_gets_the_same(
        self, fleet: MakeFleet, worker_cls: Any, twin_cls: Any
    ) -> None:
        """Both sides of an engine that says `multi_host` run on two hosts: network namespaces."""
        if not getattr(worker_cls, "multi_host", False):
            pytest.skip("the engine does not declare multi_host")
        fields = getattr(twin_cls.init_info_cls, "__dataclass_fields__", {})
        options = {self.host_option: TRAINER_ADDRESS} if self.host_option in fields else {}
        source = _model()
        with contextlib.ExitStack() as stack:
            try:
                hosts = stack.enter_context(TwoHosts())
            except NoTwoHostsError as error:
                self.skip_not_tested(f"two hosts, which cannot be made here ({error})")
            engine = _on_two_hosts(hosts, worker_cls, twin_cls)
            made = fleet(source, engine=engine, **options)
            # Before the hosts are gone, on which its sides shut down.
            stack.callback(made.close)
            member = made.join()
            for version in ("v1", "v2"):
                _publish(made, version)
                assert member.contents == contents(source), _OTHER
                source["weight"] += 1

    def _check_leaves_nothing(self, live: Callable[[], None]) -> None:
        """Check that a life of a fleet, its end included, leaves nothing in the process."""
        # A process may create resources once and keep them, such as a pool of threads.
        live()
        leftovers, processes = Leftovers(), set(descendants())
        live()
        live()
        try:
            leftovers.check(self.ends_within_s)
        except AssertionError as error:
            raise AssertionError(f"of two fleets that were closed, {error}") from None
        deadline = Deadline(self.ends_within_s)
        while more := set(descendants()) - processes:
            assert not deadline.expired, (
                f"of two fleets that were closed, {len(more)} processes are left: "
                f"{', '.join(map(_command, sorted(more)))}"
            )
            time.sleep(0.02)

    def _stop_in_sending(
        self, fleet: Fleet, source: GatedSource, watch: _Watch, *, is_moving: bool
    ) -> Round:
        """Begin a round, of changed weights, that is stopped while workers are given tensors.

        Args:
            fleet: Its publisher begins it.
            source: Waits, if that is amid the tensors that workers are given.
            watch: Of the fleet's engine; stops the first worker otherwise, between two of them.
            is_moving: True if they are given some while the source waits, as `_moving` has found.
        """
        if is_moving:
            round_ = self._begin_stopped(fleet, source, watch)
            self._is_moving(watch)
            return round_
        _change(source.tensors)
        watch.passing.hold(1)
        round_ = fleet.publisher.publish("stopped", wait=False)
        _await(self.deadline_s, lambda: watch.passing.num_waiting or round_.done, "a tensor")
        return round_

    def _begin_stopped(self, fleet: Fleet, source: GatedSource, watch: _Watch) -> Round:
        """Begin a round, of changed weights, and wait until its source waits."""
        _change(source.tensors)
        source.reached.clear()
        source.gate.clear()
        watch.passed.clear()
        try:
            round_ = fleet.publisher.publish("stopped", wait=False)
            _await(self.deadline_s, lambda: source.reached.is_set() or round_.done, "a pass")
        except BaseException:
            source.gate.set()
            raise
        return round_

    def _stop_when_received(
        self, fleet: Fleet, tensors: Mapping[str, torch.Tensor], watch: _Watch
    ) -> Round:
        """Begin a round, of changed weights, and stop the first two workers before they vote."""
        _change(tensors)
        watch.received.hold(NUM_HELD)
        round_ = fleet.publisher.publish("received", wait=False)
        _await(self.deadline_s, lambda: watch.received.is_full or round_.done, "the receivers")
        return round_

    @usually(
        "`shutdown()` of one side does not end its threads and processes, close its sockets, files "
        "and memory, or remove its files"
    )
    def test_shutdown_leaves_nothing(
        self, fleet: MakeFleet, twin_cls: type, tmp_path: Path
    ) -> None:
        """Threads, processes, descriptors and shared memory are gone within `ends_within_s`.

        So are the files in the folder of `options_in`, unless the engine keeps versions.
        """

        def live() -> None:
            made = fleet(_model())
            made.join(commit="copy")
            _publish(made, "v1")
            _publish(made, "v2")
            made.close()

        self._check_leaves_nothing(live)
        if not hasattr(twin_cls, "kept"):
            left = _files(tmp_path / KEPT)
            names = sorted({each.name for each in left})
            assert not left, f"{len(left)} files of 3 publishers are left: {', '.join(names[:8])}"

    # -- declarations and infos

    @usually(
        "an attribute has another type: `devices` is a tuple, `tensors_valid_until` is "
        "'return' or 'round'"
    )
    def test_declared_attributes_are_valid(self, worker_cls: Any, twin_cls: Any) -> None:
        """Attributes have the types that the framework reads; each has a default."""
        assert getattr(worker_cls, "tensors_valid_until", "return") in ("return", "round")
        devices = getattr(worker_cls, "devices", ("cpu",))
        assert isinstance(devices, tuple), "devices is a tuple of device types"
        assert devices, "devices names at least one device type"
        assert all(isinstance(device, str) for device in devices)
        assert isinstance(getattr(worker_cls, "writes_after_return", True), bool)
        is_none = vars(worker_cls).get("contract_version") is None
        is_stated = is_none or contract_of(worker_cls) is not None
        assert is_stated, "contract_version is 'major.minor', such as '1.0'"
        assert isinstance(getattr(worker_cls, "multi_host", False), bool)
        assert isinstance(getattr(worker_cls, "needs_generation", False), bool)
        assert isinstance(worker_cls.init_info_cls, type)
        assert isinstance(worker_cls.update_info_cls, type)
        assert isinstance(twin_cls.init_info_cls, type)
        for device in devices:
            if device != torch.device(self.device).type:
                self.not_tested(
                    f"{device}, which `devices` declares; run the kit again with "
                    f'device = "{device}" where there is one'
                )

    @usually(
        "a receive buffer is used again though `tensors_valid_until` is 'round': that is until the "
        "worker releases its tensors, whatever rounds come between; copy, or declare 'return'"
    )
    @pytest.mark.parametrize(
        "between", ["commit", "dry run", "lost worker", "catch-up", "another publisher"]
    )
    def test_tensors_keep_their_bytes_for_as_long_as_declared(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type, between: str
    ) -> None:
        """What a worker has adopted keeps its bytes, whatever comes before its next commit.

        It is compared while that is staged, and after it has ended.
        """
        watch, source = _Watch(), _served()
        made = fleet(source, engine=watch.wrap(worker_cls, twin_cls))
        served = _Served(made, source)
        _publish(made, "v1")
        served.check_has(source)
        served.note()
        if between == "commit":
            self._check_commits(made, served, keeps=hasattr(twin_cls, "kept"))
        elif between == "dry run":
            for number in (NUM_BUFFERS, 1, 2):
                for n in range(number):
                    _change(source)
                    made.publisher.publish("a try", dry_run=True)
                    served.check(f"{n + 1} dry runs had ended, one after the other")
                _publish(made, f"after {number}")
                served.check_has(source)
                served.note()
        elif between == "lost worker":
            for number in range(2):
                lost = made.join()
                # From here on it counts.
                _publish(made, f"before loss {number}")
                served.note()
                try:
                    round_ = self._stop_when_received(made, source, watch)
                    served.check("another worker was about to be lost")
                    lost.session.close()
                    made.members.remove(lost)
                finally:
                    watch.release()
                _end(made, round_)
                served.check("another worker was lost")
        elif between == "catch-up":
            self._check_catch_up(made, served, resends=hasattr(twin_cls, "resend"))
        else:
            for _ in range(2):
                made = served.move(made, fleet(source))
                served.check("its publisher had closed, and another one was joined")
                self._check_commits(made, served, keeps=False)
        _change(source)
        _publish(made, "the last")
        served.check_has(source)

    def _check_commits(self, made: Fleet, served: _Served, *, keeps: bool) -> None:
        """Check that commits, and ways back to an earlier version, touch nothing before."""
        for n in range(3 if keeps else 2):
            _change(served.source)
            publisher = made.publisher
            is_back = n == 2  # noqa: PLR2004  # the last one
            round_ = (
                publisher.rollback("v1", wait=False)
                if is_back
                else publisher.publish(f"commit {n}", wait=False)
            )
            served.await_commit(round_, self.deadline_s)
            served.check("the next round wrote to tensors in use")
            made.finish(round_)
            if not is_back:
                served.check_has(served.source)
            served.note()

    def _check_catch_up(self, made: Fleet, served: _Served, *, resends: bool) -> None:
        """Check that weights which are sent again, to one worker, touch none that are served."""
        for n in range(2):
            if resends:
                late = made.join()
                _await(self.deadline_s, lambda: late.session.status().pending, "a late joiner")  # noqa: B023
                served.check("a worker that has joined late was brought up to date")
                made.step()
                made.leave(late)
            _change(served.source)
            member = served.members[0]
            round_ = made.publisher.publish(f"declined {n}", wait=False)
            served.await_commit(round_, self.deadline_s)
            member.session.discard_pending()
            made.members.remove(member)
            made.finish(round_)
            # It was sent to the others as well, who have it by now.
            served.check("a version that it had declined was committed by others", member)
            if resends:
                _await(self.deadline_s, lambda: member.session.status().pending, "a second try")  # noqa: B023
                served.check("the version that it had declined was sent to it again", member)
            made.members.insert(0, member)
            made.step()
            served.note()
            round_ = made.publisher.publish(f"again {n}", wait=False)
            served.await_commit(round_, self.deadline_s)
            served.check("it had declined a version, and the next one was staged", member)
            made.finish(round_)
            served.check_has(served.source)
            served.note()

    @usually(
        "a buffer is filled again, or a transfer goes on, after `load_weights` has returned; leave "
        "`writes_after_return` as it is"
    )
    def test_memory_is_not_written_after_it_was_delivered(
        self, fleet: MakeFleet, worker_cls: type
    ) -> None:
        """An engine that declares this is trusted: its tensors are digested on arrival only."""
        if vars(worker_cls).get("writes_after_return", True):
            pytest.skip("the engine does not declare writes_after_return = False")
        source = _model()
        made = fleet(source)
        ledger = _Ledger(source)
        made.join(ledger)
        for version in ("v1", "v2"):
            round_ = made.publisher.publish(version, wait=False)
            deadline = Deadline(self.deadline_s)
            while not made.members[0].session.commit_pending(0.002):
                deadline.check("an update to be committed")
            _check_unchanged(contents(ledger.held), contents(source), "it wrote before the vote")
            # A transfer that goes on shows within this time.
            time.sleep(LATE_S)
            _check_unchanged(contents(ledger.held), contents(source), "it wrote after the vote")
            made.finish(round_)
            source["weight"] += 1

    @usually(
        "an info holds an object, a set or a tuple; it travels as msgpack, so send "
        "numbers, text, lists and dictionaries"
    )
    def test_infos_are_plain_data(self, fleet: MakeFleet, twin_cls: type) -> None:
        """Infos round-trip through msgpack."""
        infos = _sent_infos(fleet, twin_cls)
        assert infos, "the trainer sent no info at all"
        for info in infos:
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(info)) == info, (
                "an info is another one after msgpack"
            )

    @usually("tensors or infos pass through pickle: whoever sends them runs code here")
    def test_nothing_is_unpickled(self, fleet: MakeFleet) -> None:
        """No function of `pickle` that loads is called by either side."""
        # Imports at the first use are no concern of this test.
        _round_trip(fleet(_model()))
        with recorded_unpickling() as loads:
            made = fleet(_model())
            _round_trip(made)
            made.close()
        assert loads == [], "functions of the module pickle were called"

    @usually("`parse_init_info` or `parse_update_info` is overridden; the base class has both")
    @pytest.mark.parametrize("what", ["init_info", "update_info"])
    def test_infos_that_do_not_fit_are_refused(self, worker_cls: type, what: str) -> None:
        """The error has the text of vLLM's."""
        worker = _worker(worker_cls)
        parse = getattr(worker, f"parse_{what}")
        expected = f"^Invalid {what} for {worker_cls.__name__}: "
        with pytest.raises(ValueError, match=expected):
            parse({"no_such_field": 1})
        worker.shutdown()

    @usually("`receive_weights` returns at once, or waits, where there is no connection")
    def test_receiving_before_init_raises(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type
    ) -> None:
        """The engine neither waits for data that cannot come, nor returns as if it had come."""
        update = _sent_infos(fleet, twin_cls)[-1]
        worker = _worker(worker_cls)
        info = worker.parse_update_info(update)
        refused = False
        try:
            worker.receive_weights(info, list)
        except Exception:  # the contract names no class
            refused = True
        assert refused, "receive_weights returned, though it was never initialised"
        worker.shutdown()


class _Watch:
    """Records the begin and end of an engine's calls, in both sides' classes."""

    def __init__(self) -> None:
        self.fails_first = False
        """True if the next ``receive_weights`` of the second worker is to fail at once."""
        self.is_late = False
        """True if the next ``receive_weights`` of the second worker is to begin late."""
        self.on_late: Callable[[], None] = lambda: None
        """Called while the trainer waits for the late worker, or has sent all."""
        self.is_aborted_early = False
        """True if each ``receive_weights`` is preceded by an ``abort_weight_update``."""
        self.aborted: list[Any] = []
        """The workers that were aborted early."""
        self.passing = _Hold()
        """Where workers wait that have passed on tensors."""
        self.received = _Hold()
        """Where workers wait that have all tensors, before they vote."""
        self.init_info: Any = None
        """The last init info of a worker."""
        self.on_receive: Callable[[], None] = lambda: None
        """Called before a worker dials, and as it passes tensors on."""
        self.passed: list[int] = []
        """Bytes of each call of ``load_weights``."""
        self.receiving: list[Any] = []
        self.sending: list[Any] = []

    def wrap(self, worker_cls: Any, twin_cls: Any) -> str:
        """Return the name of an engine that is watched."""
        watch = self

        class Trainer(twin_cls):  # type: ignore[misc]  # the class that is tested
            """The tested trainer."""

            def send_weights(self) -> None:
                watch.sending.append(self)
                try:
                    super().send_weights()
                finally:
                    watch.sending.remove(self)

        class Worker(worker_cls):  # type: ignore[misc]  # the class that is tested
            """The tested worker."""

            trainer_cls = Trainer

            def init_transfer_engine(self, init_info: Any) -> None:
                watch.init_info = init_info
                watch.on_receive()
                super().init_transfer_engine(init_info)

            def receive_weights(self, update_info: Any, load_weights: Any) -> None:
                watch.on_receive()
                is_second = self.parallel_config.data_parallel_index == 1
                if watch.fails_first and is_second:
                    watch.fails_first = False
                    raise ConnectionError("injected before the first byte")
                if watch.is_late and is_second:
                    watch.is_late = False
                    time.sleep(LATE_S)
                    load_weights = _late(load_weights, watch.on_late)
                watch.receiving.append(self)
                try:
                    if watch.is_aborted_early:
                        call_apart(lambda: _abort(self), "kit")
                        watch.aborted.append(self)
                    super().receive_weights(
                        update_info,
                        watch.noting(load_weights, self.parallel_config.data_parallel_index),
                    )
                finally:
                    watch.receiving.remove(self)

            def finish_weight_update(self) -> None:
                watch.received.wait(self.parallel_config.data_parallel_index)
                if finish := getattr(super(), "finish_weight_update", None):
                    finish()

        return _registered_as(worker_cls, Worker, Trainer)

    @property
    def is_in_one(self) -> bool:
        """True if one call of ``load_weights`` was given most of the bytes."""
        return max(self.passed) > sum(self.passed) // 2

    def release(self, source: GatedSource | None = None) -> None:
        """Let workers go on that are held, and a source that waits."""
        self.passing.release()
        self.received.release()
        if source is not None:
            source.gate.set()

    def noting(self, load_weights: Any, number: int) -> Any:
        """Return a worker's function, whose calls are recorded in `passed`."""

        def noted(pairs: Any) -> Iterator[Any]:
            # One by one: an engine may reuse a buffer for the next tensor.
            for name, tensor in pairs:
                self.passed[-1] += tensor.nbytes
                yield name, tensor

        def load(pairs: Any) -> Any:
            self.on_receive()
            self.passed.append(0)
            loaded = load_weights(noted(pairs))
            self.passing.wait(number)
            return loaded

        return load

    def blocked(self) -> list[Any]:
        """Return the workers that are receiving now, and still a while later."""
        _in_time(lambda: bool(self.receiving), ENTERED_WITHIN_S)
        first = list(self.receiving)
        time.sleep(0.1)
        return [engine for engine in first if engine in self.receiving]

    def ended(self, engines: list[Any]) -> bool:
        """Wait until none of these receives; return whether that was in time."""
        return _in_time(lambda: not any(engine in self.receiving for engine in engines))

    def sends_end(self) -> bool:
        """Wait until no trainer sends; return whether that was in time."""
        return _in_time(lambda: not self.sending)


class _Hold:
    """Where the first workers wait while they are held."""

    def __init__(self) -> None:
        self._go_on = threading.Event()
        self._go_on.set()
        self._num_held = 0
        self._waiting: set[int] = set()

    def hold(self, number: int) -> None:
        """Have as many wait from now on."""
        self._waiting.clear()
        self._num_held = number
        self._go_on.clear()

    def release(self) -> None:
        """Let them go on, and nobody wait."""
        self._go_on.set()

    @property
    def num_waiting(self) -> int:
        """Number of workers that wait, or have waited."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """True if all of them wait."""
        return self.num_waiting == self._num_held

    def wait(self, number: int) -> None:
        """Wait, if this worker is held."""
        if number < self._num_held and not self._go_on.is_set():
            self._waiting.add(number)
            self._go_on.wait()


class _Moving(NamedTuple):
    """A source that waits at a tensor."""

    source: GatedSource
    is_moving: bool
    """True if workers are given others meanwhile."""


class _Served:
    """Two workers that keep what an engine has delivered, and compute with it."""

    def __init__(self, fleet: Fleet, source: Mapping[str, torch.Tensor]) -> None:
        self.source = source
        # One whose parameters are pointed there, and one that keeps the small tensors as well.
        self.members = [fleet.join(_zeros(source)), fleet.join(_Ledger(_zeros(source)))]
        self._noted: list[dict[str, Any]] = []

    def note(self) -> None:
        """Note the weights that are served."""
        self._noted = [_contents_of(member) for member in self.members]

    def check(self, when: str, only: Member | None = None) -> None:
        """Fail, and name the tensors, if one is served with other bytes than were noted."""
        for member, expected in zip(self.members, self._noted, strict=True):
            if only in (None, member):
                _check_unchanged(_contents_of(member), expected, _why(member, when))

    def check_has(self, source: Mapping[str, torch.Tensor]) -> None:
        """Fail unless both have these weights."""
        expected = contents(source)
        assert all(_contents_of(member) == expected for member in self.members), _OTHER

    def is_idle(self) -> bool:
        """Return True if neither receives a round."""
        return all(member.session.status().staging is None for member in self.members)

    def await_commit(self, round_: Round, within_s: float) -> None:
        """Wait until both have a round that waits for their commit, or it is over."""

        def is_pending() -> bool:
            return all(member.session.status().pending for member in self.members)

        _await(within_s, lambda: is_pending() or round_.done, "a commit")

    def move(self, old: Fleet, new: Fleet) -> Fleet:
        """Have both join another publisher, once theirs is closed; return that one's fleet."""
        old.members.clear()
        for member in self.members:
            member.session.leave(old.publisher.address)
        old.close()
        for member in self.members:
            new.adopt(member)
        return new


def _contents_of(member: Member) -> dict[str, Any]:
    model = member.model
    return contents(model.held if isinstance(model, _Ledger) else model)


def _why(member: Member, when: str) -> str:
    said = member.session.status().last_error
    return f"{when}; the worker says: {said}" if said else when


def _command(pid: str) -> str:
    """Return a process's number and what it runs."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return f"{pid} ({b' '.join(words).decode('utf-8', 'replace').strip()[:80]})"
    return pid


def _in_time(is_so: Callable[[], bool], within_s: float = UNBLOCKED_WITHIN_S) -> bool:
    deadline = Deadline(within_s)
    while not is_so() and deadline.remaining():
        time.sleep(0.01)
    return is_so()


def _await(within_s: float, is_so: Callable[[], object], what: str) -> None:
    """Wait until something is so.

    Raises:
        StallError: It is not in time.
    """
    deadline = Deadline(within_s)
    while not is_so():
        deadline.check(what)
        time.sleep(0.002)


def _abort(engine: Any) -> None:
    abort = getattr(engine, "abort_weight_update", None)
    assert abort is not None, "receive_weights blocks; there is no abort_weight_update"
    abort()


def _files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if not each.is_dir()]


class _Ledger(StateDictTarget):
    """A target that keeps the tensors of its last update."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.held: Mapping[str, torch.Tensor] = {}

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.held = dict(tensors)


def _zeros(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the target of a worker: `Fleet.join` makes none for a source that is no dict."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def _model() -> dict[str, torch.Tensor]:
    return {
        "embedding": random_tensor(torch.bfloat16, (16, 8), seed=3),
        "weight": torch.arange(600.0).view(30, 20),
        "bias": torch.ones(30),
        "count": torch.tensor(3),
    }


def _served() -> dict[str, torch.Tensor]:
    """Return tensors of which a worker copies the small ones and adopts the others."""
    shape = SERVED_NBYTES // 4 // 64, 64
    layers = {f"layer.{i}": random_tensor(torch.float32, shape, seed=10 + i) for i in range(4)}
    return {**_model(), **layers}


def _large(nbytes: int) -> dict[str, torch.Tensor]:
    """Return tensors of this size, of which some fill a usual bucket, and all of them several."""
    return {
        f"layer.{i}": torch.full((nbytes // 4,), i, dtype=torch.int32) for i in range(NUM_ARRIVING)
    }


def _gated(tensors: Mapping[str, torch.Tensor]) -> GatedSource:
    """Return a source that waits at its last tensor."""
    return GatedSource(tensors, gate_at=len(tensors) - 1)


def _change(tensors: Mapping[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.add_(1)


def _publish(fleet: Fleet, version: str) -> None:
    report = fleet.publish(version)
    assert report.ok, str(report)


def _check_unchanged(now: Mapping[str, Any], expected: Mapping[str, Any], why: str) -> None:
    """Fail, and name the tensors, if those of the last update have other contents by now."""
    changed = [repr(name) for name in expected if now.get(name) != expected[name]]
    named = f"tensor{'s' * (len(changed) > 1)} {', '.join(changed)}"
    assert not changed, f"{named} changed after load_weights had returned: {why}"


def _error_of(fleet: Fleet, version: str) -> str:
    """Run a round that has to fail; return "it ended with ..." or "it was committed"."""
    try:
        fleet.publish(version)
    except WTransferError as error:
        return f"it ended with {type(error).__name__}: {error}"
    return "it was committed"


def _end(fleet: Fleet, round_: Round) -> None:
    """Wait for the end of a round that may fail."""
    try:
        fleet.finish(round_)
    except WTransferError as error:
        # The publisher keeps it, and it would keep the frames of the test, with its models.
        error.__traceback__ = None


def _late(load_weights: Any, on_late: Callable[[], None]) -> Any:
    """Return the same function, whose first call takes longer."""
    waits = [LATE_S]

    def load(pairs: Any) -> Any:
        if waits:
            time.sleep(waits.pop())
            on_late()
        return load_weights(pairs)

    return load


def _on_two_hosts(hosts: TwoHosts, worker_cls: Any, twin_cls: Any) -> str:
    """Return the name of an engine each of whose sides runs on a host of its own."""

    class Trainer(twin_cls):  # type: ignore[misc]  # the class that is tested
        """The tested trainer; threads that it starts are on its host."""

        @classmethod
        def trainer_init(cls, init_info: Any, **arguments: Any) -> Any:
            with hosts.on_trainer():
                return super().trainer_init(init_info, **arguments)

        def send_weights(self) -> None:
            with hosts.on_trainer():
                super().send_weights()

        if hasattr(twin_cls, "resend"):

            def resend(self, client: Any) -> None:
                with hosts.on_trainer():
                    super().resend(client)

        def shutdown(self) -> None:
            with hosts.on_trainer():
                super().shutdown()

    class Worker(worker_cls):  # type: ignore[misc]  # the class that is tested
        """The tested worker; threads that it starts are on its host."""

        trainer_cls = Trainer

        def init_transfer_engine(self, init_info: Any) -> None:
            with hosts.on_worker():
                super().init_transfer_engine(init_info)

        def receive_weights(self, update_info: Any, load_weights: Any) -> None:
            with hosts.on_worker():
                super().receive_weights(update_info, load_weights)

        def shutdown(self) -> None:
            with hosts.on_worker():
                super().shutdown()

    return _registered_as(worker_cls, Worker, Trainer)


def _registered_as(worker_cls: Any, worker: Any, trainer: Any) -> str:
    """Return the name of an engine whose errors shall name the class that is tested."""
    worker.__name__, worker.__qualname__ = worker_cls.__name__, worker_cls.__qualname__
    trainer.__name__ = trainer.__base__.__name__
    return registered_name("engines", worker)


def _round_trip(fleet: Fleet) -> None:
    source = fleet.source
    assert isinstance(source, dict)
    members = [fleet.join(commit=commit) for commit in ("adopt", "copy")]
    _publish(fleet, "v1")
    assert [member.contents for member in members] == [contents(source)] * 2, _OTHER


def _worker(worker_cls: Any) -> Any:
    return worker_cls(WeightTransferConfig(worker_cls.__name__), ParallelConfig())


def _sent_infos(fleet: MakeFleet, twin_cls: Any) -> list[dict[str, Any]]:
    """Run a round and return the infos that the trainer has sent: init first."""
    sent: list[dict[str, Any]] = []

    class Tap:
        """A client that records infos."""

        def __init__(self, client: Any) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            sent.append(init_info)
            self._client.init_weight_transfer_engine(init_info)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            sent.append(update_info)
            self._client.update_weights(update_info)

    class Tapped(twin_cls):  # type: ignore[misc]  # the class that is tested
        """The tested trainer, with a tap on its client."""

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
            return super().trainer_init(init_info, client=Tap(client), source=source)

    made = fleet(_model(), trainer=Tapped)
    made.join()
    _publish(made, "v1")
    return sent
