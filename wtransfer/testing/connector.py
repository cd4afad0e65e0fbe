"""The conformance kit of KV connectors; the built-in connectors pass it.

Subclass it in a test module of your own::

    from wtransfer.testing.connector import ConnectorConformance


    class TestMine(ConnectorConformance):
        connector = "MyConnector"
        kind = "store"

        def options_in(self, folder):
            return {"path": str(folder)}

The connector is served by the mini engine: a real scheduler, a small model whose keys and values
have the same bits whether they were computed or loaded, and metadata that travels as plain data.
One that says ``supports_hma`` also serves a model with two KV cache groups, of which one has a
window. Tests cannot be overridden; state the tests that it may fail, each with its reason::

        expected_failures = {"test_something_is_loaded": "it only ever saves"}
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec
import pytest
import torch
import xxhash

from wtransfer.connectors.factory import KVConnectorFactory
from wtransfer.connectors.interface import (
    SCHEDULER_METHODS,
    WORKER_METHODS,
    ConnectorScheduler,
    ConnectorWorker,
    KVConnectorOutput,
    KVConnectorRole,
)
from wtransfer.connectors.naming import BlockNaming
from wtransfer.deadline import Deadline
from wtransfer.errors import ConnectorRoleError
from wtransfer.testing.kit import (
    ConformanceKit,
    checked_stats,
    fallen_counters,
    kit_zygote,
    recorded_unpickling,
    registered_name,
    usually,
)
from wtransfer.testing.leftovers import Leftovers, descriptors, num_kept
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits, ModelShape
from wtransfer.testing.mini_engine.contract import (
    NULL_BLOCK,
    OVER,
    SchedulerOutput,
    block_numbers,
)
from wtransfer.testing.mini_engine.engine import LocalExecutor, MiniEngine
from wtransfer.testing.mini_engine.instance import Instance
from wtransfer.testing.mini_engine.model import LocalWeights
from wtransfer.testing.mini_engine.reference import reference_output, some_prompts
from wtransfer.testing.mini_engine.scheduler import Scheduler
from wtransfer.testing.mini_engine.serialize import deserialize, serialize
from wtransfer.testing.mini_engine.worker import Worker
from wtransfer.testing.reachable import check_this_host_only, reachable
from wtransfer.weight_version import process_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wtransfer.testing.mini_engine.contract import Request
    from wtransfer.testing.mini_engine.instance import Answer
    from wtransfer.testing.mini_engine.reference import Reference
    from wtransfer.transport.communicator import Communicator

    MakeBed = Callable[..., "ConnectorTestBed"]
    Moment = tuple[str, str, str, int]

BLOCK_SIZE = 16
NUM_NEW_TOKENS = 3
"""Tokens to generate, unless a test asks for another number."""
SMALL = ModelShape(width=32, num_heads=2, num_kv_heads=1)
SIX_HEADS = ModelShape(width=96, num_heads=6, num_kv_heads=6)
"""A model that two or three ranks can share."""
CHUNKED = EngineConfig(limits=Limits(max_num_batched_tokens=24))
"""Settings by which a prompt is computed in several steps."""
DEEP = ModelShape(num_layers=12, width=16, num_heads=2, num_kv_heads=1)
"""A model whose layers do not run in the order of their sorted names: layers.10, layers.2."""
LARGE = ModelShape(num_layers=12, width=128, num_heads=2, num_kv_heads=1)
"""A model of which a block has 96 KiB: a checksum may be of the first bytes, or of samples."""
HYBRID = ModelShape(num_layers=3, width=32, num_heads=2, num_kv_heads=1, windows=(None, 24))
"""A model with two KV cache groups: two layers see all tokens, and one the last 24."""
METADATA_METHODS = ("build_connector_meta", "build_connector_worker_meta")
CHANGES = {"there": (1,), "there and back": (1, 0)}
"""Seeds from which the weights are drawn, one after the other."""
QUERIES = ("get_finished_count", "get_stats", "has_pending_push_work", "take_events")
"""Methods without effect: no change of weights is tried before them."""
FOLLOWING = (
    "clear_connector_metadata",
    "get_block_ids_with_load_errors",
    "handle_preemptions",
    "on_new_request",
)
"""Methods that precede another method: a change of weights before the latter is enough."""
PARTICULARS = {
    "salt": ("cache_salt", "tenant-1", "tenant-2"),
    "adapter": (
        "lora_request",
        SimpleNamespace(lora_name="one", lora_int_id=1, lora_path="/adapters/one"),
        SimpleNamespace(lora_name="two", lora_int_id=2, lora_path="/adapters/two"),
    ),
    # As in vLLM: the prompt has placeholder tokens, and the media that they stand for are here.
    "media": (
        "mm_features",
        [SimpleNamespace(identifier="image one", mm_position=SimpleNamespace(offset=0, length=9))],
        [SimpleNamespace(identifier="image two", mm_position=SimpleNamespace(offset=0, length=9))],
    ),
}
"""Attributes of requests on which KV cache depends, with two values each."""


def _some_tokens(count: int, seed: int = 0) -> list[int]:
    drawn = random.Random(11 + seed)  # noqa: S311  # no secret
    return [drawn.randrange(ModelShape().vocabulary) for _ in range(count)]


def _other_tokens() -> dict[str, tuple[list[list[int]], list[int], int]]:
    one, other, common, next_one = (_some_tokens(BLOCK_SIZE, seed) for seed in range(1, 5))
    end, long = _some_tokens(5, seed=5), _some_tokens(8 * BLOCK_SIZE + 5, seed=6)
    late, swapped = list(long), list(long)
    late[8 * BLOCK_SIZE - 1] ^= 1
    swapped[20:22] = [long[20] ^ 1, long[20]]
    long[20:22] = reversed(swapped[20:22])
    late[20:22] = long[20:22]
    return {
        "a block before": (
            [[*one, *common, *next_one, *end], [*other, *common, *end]],
            [*other, *common, *next_one, *end],
            2 * BLOCK_SIZE,
        ),
        "the last token of a block": ([long], late, 7 * BLOCK_SIZE),
        "two tokens swapped": ([long], swapped, BLOCK_SIZE),
        "a block once more": ([[*one, *one, *end]], [*one, *one, *one, *end], 2 * BLOCK_SIZE),
        "blocks swapped": ([[*one, *other, *end]], [*other, *one, *end], 0),
    }


@contextlib.contextmanager
def _full(folder: Path) -> Iterator[str]:
    """Let every write fail whose file would be longer than a few bytes, as if it had no room."""
    del folder
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signals = signal.getsignal(signal.SIGXFSZ)
    assert signals is signal.SIG_IGN, "this process ends at files that are too large"
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield ""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def _read_only(folder: Path) -> Iterator[str]:
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    modes = {path: path.stat().st_mode for path in folders}
    for path in reversed(folders):
        path.chmod(0o500)
    try:
        writes = os.access(folder, os.W_OK)
        yield "this user writes all the same: run the kit as one without privileges" * writes
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


@contextlib.contextmanager
def _gone(folder: Path) -> Iterator[str]:
    """Put a file in the folder's place: it cannot be made again."""
    aside = folder.rename(folder.with_name(f"{folder.name}-aside"))
    folder.touch()
    try:
        yield ""
    finally:
        folder.unlink()
        aside.rename(folder)


@contextlib.contextmanager
def _cut(folder: Path) -> Iterator[str]:
    """Cut files short, each to another length, as a loss of power does."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    mapped = Path("/proc/self/maps").read_text("utf-8")
    if any(str(path) in mapped for path in files):
        yield "a process that reads beyond the end of a mapped file is killed"
        return
    for number, path in enumerate(files):
        os.truncate(path, (0, 10, path.stat().st_size // 2)[number % 3])
    yield ""


FAULTS_OF_FOLDERS = {"full": _full, "read-only": _read_only, "gone": _gone, "cut short": _cut}
OTHER_TOKENS = _other_tokens()
"""By their difference: prompts that were saved, the one that is asked for, its saved tokens."""
NOT_DAMAGED = (
    "whether damaged blocks are a miss: damage() has damaged nothing. Write `def "
    "damage(self, bed, where)` in the subclass of the kit: change a byte of every block that the "
    "connector has saved, for example of each file in bed.folder, and return True"
)
"""Reason of a skipped test."""
PLACES = (0.0, *((number + 0.5) / DEEP.num_layers for number in range(DEEP.num_layers)), 1.0)
"""Parts of a saved block that lie before a damaged byte: the first and last byte, and one in each
layer between."""
NO_PLACES = (
    "damage at the first and last byte of a block, and in each layer: write `def damage(self, bed, "
    "where)`, which changes the byte at this part of each block, from 0.0 to 1.0"
)
"""Question that a `damage` without a place cannot answer."""
NO_FILES = (
    "a store that is full, read-only or gone: no file was kept in the folder that options_in() is "
    "given; name it in the connector's options, if it keeps files"
)
"""Reason of a skipped test."""
ONE_GROUP = (
    "two KV cache groups: the connector does not say supports_hma, so hosts refuse "
    "it for models with sliding windows. Keep the blocks of each group, as the guide to connectors "
    "says below its example, and write `supports_hma = True` in the class"
)
"""Reason of a skipped test."""

_EACH_LOAD_ONCE = "get_finished() has not named each load that outlasts its step, once"
_NOT_HIT = "damage() has damaged no block that was loaded"
_STORE_S = 0.5
FEW, MANY = 40, 1000
"""Requests after which a connector is as large as before; the latter take a minute."""
CALL_S = 0.05
"""Time of a call of the scheduler's side that half of the calls may not take."""


class ConnectorConformance(ConformanceKit):
    """Subclass it with a name that starts with ``Test``, and state the connector.

    Attributes:
        connector: Name of the connector, as a user would write it.
        connector_cls: Instead of a name: the class of a connector that is not installed.
        kind: ``store``: a request loads what any request with the same prefix has saved.
            ``transfer``: a request loads what the request named by its ``kv_transfer_params`` has
            computed.
        is_shared: True if instances share a store.
        options: The connector's options.
        prefill_params: For ``transfer``: ``kv_transfer_params`` of the producer's requests.
        deadline_s: Bound on every wait, in seconds; also on how long unclaimed blocks are held. A
            test that takes six times as long has failed: a call of the connector hangs.
        ends_within_s: Bound on a shutdown while work is running, and on its leftovers, in seconds.
        saved_block_size: Tokens of a block that the connector saves, a multiple of the host's 16:
            fewer tokens at the end of a prefix are not expected to be loaded.
        module_path: Module of a connector whose name is registered nowhere.
        in_processes: True if a fresh process finds the connector by its name.
    """

    connector: ClassVar[str] = ""
    connector_cls: ClassVar[type | None] = None
    kind: ClassVar[str] = "store"
    is_shared: ClassVar[bool] = False
    options: ClassVar[dict[str, Any]] = {}
    prefill_params: ClassVar[dict[str, Any]] = {"do_remote_decode": True}
    deadline_s: ClassVar[float] = 10.0
    ends_within_s: ClassVar[float] = 5.0
    saved_block_size: ClassVar[int] = BLOCK_SIZE
    module_path: ClassVar[str | None] = None
    in_processes: ClassVar[bool] = True
    smoke_test = "test_one_prompt_is_served"
    _contract = (ConnectorScheduler, ConnectorWorker)

    def run_test(self, test: Callable[[], None]) -> None:
        """Run a test on a thread, whose time is bounded."""
        self.run_bounded(test, "a call of the connector")

    def options_in(self, folder: Path) -> dict[str, Any]:
        """Return the connector's options.

        Args:
            folder: A folder of the test's own for the connector's files.
        """
        del folder
        return dict(self.options)

    def damage(self, bed: ConnectorTestBed, where: float) -> bool:
        """Damage all saved blocks.

        Override it, and return True; False: the blocks cannot be reached.

        Args:
            bed: ``producer.workers[0].side`` is the worker side that has saved them, and
                ``bed.folder`` the argument of `options_in`.
            where: Part of a block's bytes before the one to change: 0.0 is the first byte, 1.0 the
                last.
        """
        del bed, where
        return False

    @property
    def _knows_places(self) -> bool:
        """True if `damage` takes a place; guides of earlier releases had none."""
        return len(inspect.signature(self.damage).parameters) > 1

    def _damage(self, bed: ConnectorTestBed, where: float = 0.5) -> None:
        """Damage all saved blocks, or skip the test."""
        damage: Callable[..., bool] = self.damage
        if not (damage(bed, where) if self._knows_places else damage(bed)):
            self.skip_not_tested(NOT_DAMAGED)

    def weaken(
        self, monkeypatch: pytest.MonkeyPatch, hash_function: Callable[[bytes], bytes]
    ) -> None:
        """Name blocks by another hash function on all sides that are made from now on.

        Override it where blocks are not named by `wtransfer.connectors.naming.BlockNaming`.
        """
        monkeypatch.setattr(BlockNaming.__init__, "__defaults__", (hash_function,))

    # -- fixtures

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Compute on one thread: the bits do not depend on how work is divided."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    @pytest.fixture
    def weights(self) -> Iterator[LocalWeights]:
        """Provide the weights of all instances of a test."""
        # The collection of an earlier test's model would change the name of these weights.
        process_weights.begin_anew()
        weights = LocalWeights(0)
        yield weights
        weights.close()

    @pytest.fixture
    def make_bed(self, tmp_path: Path, weights: LocalWeights) -> Iterator[MakeBed]:
        """Make test beds that are closed at the end of the test."""
        beds: list[ConnectorTestBed] = []

        def make(settings: EngineConfig | None = None, **options: Any) -> ConnectorTestBed:
            settings = self._settings(settings or EngineConfig(), tmp_path / "kept")
            beds.append(self._bed(settings, weights, tmp_path / "kept", **options))
            return beds[-1]

        def close_all() -> None:
            while beds:
                beds.pop().close()

        yield make
        self.end_bounded(close_all, "shutdown()")

    @pytest.fixture
    def make_hybrid_bed(self, make_bed: MakeBed, tmp_path: Path) -> MakeBed:
        """Make test beds whose model has two KV cache groups, or other models with windows."""

        def make(settings: EngineConfig | None = None) -> ConnectorTestBed:
            settings = settings or EngineConfig()
            if not settings.is_hybrid:
                settings = msgspec.structs.replace(settings, model=HYBRID)
            return make_bed(settings)

        if not self._settings(EngineConfig(), tmp_path).connector_supports_hma:
            self.skip_not_tested(ONE_GROUP)
        return make

    @pytest.fixture
    def bed(self, make_bed: MakeBed) -> ConnectorTestBed:
        """Make a test bed of the default size."""
        return self.run_bounded(make_bed, "a constructor")

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[..., Instance]]:
        """Start instances in processes that end with the test."""
        if not self.in_processes:
            self.skip_not_tested(
                "processes: in_processes is False, so others do not find the connector"
            )
        settings = self._settings(EngineConfig(model=SIX_HEADS), tmp_path / "kept")
        with contextlib.ExitStack() as stack:

            def start(name: str, num_ranks: int, seed: int = 0) -> Instance:
                named = msgspec.structs.replace(
                    settings, engine_id=name, num_ranks=num_ranks, seed=seed
                )
                return stack.enter_context(Instance(named, kit_zygote().spawn))

            yield start

    def _settings(self, settings: EngineConfig, folder: Path) -> EngineConfig:
        folder.mkdir(exist_ok=True)
        return msgspec.structs.replace(
            settings,
            model=SMALL if settings.model == ModelShape() else settings.model,
            connector=self.connector or registered_name("connectors", self.connector_cls),
            module_path=self.module_path,
            options=self.options_in(folder),
        )

    def _bed(
        self, settings: EngineConfig, weights: LocalWeights, folder: Path, **options: Any
    ) -> ConnectorTestBed:
        producer = consumer = RecordedInstance(settings, weights, **options)
        if self._has_consumer():
            other = msgspec.structs.replace(settings, engine_id="another")
            consumer = RecordedInstance(other, weights, **options)
        return ConnectorTestBed(
            producer,
            consumer,
            weights,
            folder=folder,
            prefill_params=self.prefill_params if self.kind == "transfer" else None,
            deadline_s=self.deadline_s,
            saved_block_size=self.saved_block_size,
        )

    def _has_consumer(self) -> bool:
        """Return whether the consumer is another instance than the producer."""
        return self.kind == "transfer" or self.is_shared

    # -- output: tokens, keys and values are the same bits with and without loads

    def test_one_prompt_is_served(self, make_bed: MakeBed) -> None:
        """One prompt is produced and consumed, and nothing of it stays behind."""
        with self.is_smoke_test():
            self._check_one_prompt(make_bed)

    @usually(
        "the worker's side does not load what it has saved, waits for a notice that never comes, "
        "or names a load in get_finished() before its bytes are there; start here, the other tests "
        "build on it"
    )
    def _check_one_prompt(self, make_bed: MakeBed) -> None:
        make_bed().transfer(some_prompts(1)[0])

    @usually(
        "layers, or blocks of a request, are mixed up (layers come in the order in which the model "
        "runs, not in that of their names), that a block size is built in, that a view of the "
        "cache is kept in the place of a copy, or that the model does not wait for loads"
    )
    @pytest.mark.parametrize("block_size", [1, 16, 128])
    def test_output_equals_reference(self, make_bed: MakeBed, block_size: int) -> None:
        """Tokens, keys and values equal the reference, computed or loaded."""
        cache = CacheShape(block_size, 4096 // block_size)
        bed = make_bed(EngineConfig(model=DEEP, cache=cache))
        for prompt in some_prompts(2, unit=max(block_size, 16)):
            bed.transfer(prompt)

    @usually(
        "save and look-up name blocks differently, that get_num_new_matched_tokens() looks in "
        "another place than the workers save to, or that it takes half of deadline_s until a "
        "block is saved"
    )
    def test_something_is_loaded(self, bed: ConnectorTestBed) -> None:
        """Each prompt that was saved is loaded."""
        for prompt in some_prompts(2):
            bed.load(prompt)

    @usually(
        "blocks to load into are counted from the first of the request, and not from the first "
        "that is loaded"
    )
    def test_loads_write_only_to_their_blocks(self, bed: ConnectorTestBed) -> None:
        """The rest of the cache keeps its bytes."""
        prompt = some_prompts(1)[0]
        params = bed.produce(prompt)
        bed.consumer.clear_cache()
        before = [[layer.clone() for layer in cache.layers] for cache in bed.consumer.caches]
        with bed.loading():
            request = bed.submit_to_consumer(prompt, params)
            bed.run(request)
        bed.consumer.check(request)
        for cache, layers in zip(bed.consumer.caches, before, strict=True):
            for layer, expected in zip(cache.layers, layers, strict=True):
                expected[request.block_ids] = layer[request.block_ids]
                assert layer.equal(expected), f"others than {request.block_ids} were written"

    @usually(
        "a step saves all blocks of the prompt, also those that only later steps compute; take "
        "num_scheduled_tokens into account, as `Progress` does"
    )
    def test_chunked_prefill(self, make_bed: MakeBed) -> None:
        """Blocks of one step may be sent before the next step computes the rest."""
        bed = make_bed(CHUNKED)
        for prompt in some_prompts(2):
            bed.load(prompt)

    @usually(
        "a step leaves out a block that it fills, as the last one or all that follow the first "
        "ones, that a look-up asks for too few, that ranks wait for a notice of one of them, that "
        "saves last longer than half of deadline_s, or that blocks are larger than the host's, "
        "which the kit does not know: state their tokens in saved_block_size"
    )
    @pytest.mark.parametrize("num_ranks", [1, 2])
    def test_all_that_was_saved_is_loaded(self, make_bed: MakeBed, num_ranks: int) -> None:
        """The tokens loaded are those of all whole blocks before the last token, block by block.

        A connector that saves larger blocks than the host's states `saved_block_size`. One that
        saves behind the steps has half of `deadline_s` until a look-up finds what was saved.
        """
        settings = EngineConfig(model=SIX_HEADS, num_ranks=num_ranks, limits=CHUNKED.limits)
        self._check_gain(make_bed, settings)

    def _check_gain(self, make_bed: MakeBed, settings: EngineConfig) -> None:
        """Compare the tokens loaded of prompts that share a prefix with those that can be."""
        bed, long = make_bed(settings), _some_tokens(133)
        bed.check_gains(long, bed.produce(long))
        if self.kind == "transfer":
            # The last token is always computed, and with it its block.
            bed.check_gain(long[:128], 112, bed.produce(long[:128]))
            return
        bed.check_gain(long[:128], 112)
        branch = [*long[:85], *_some_tokens(35, seed=1)]
        bed.check_gain(branch, 80)
        bed.check_gain(branch, 112)
        self._note_if_answers_are_lost(bed, branch[:40])
        if self.is_shared:
            bed.close()
            bed = make_bed(settings)
            bed.check_gain(branch, 112)
            bed.check_gains(long)

    def _note_if_answers_are_lost(self, bed: ConnectorTestBed, prompt: list[int]) -> None:
        """Note it if the next turn of a conversation does not load the answer."""
        request = bed.producer.submit(prompt, 4 * BLOCK_SIZE)
        bed.run(request)
        before, most = bed.num_loaded, bed.most(request.all_token_ids)
        bed.consume(request.all_token_ids, expected=most)
        if bed.num_loaded - before < most:
            self.note(
                f"of a prompt and its answer {bed.num_loaded - before} tokens were loaded, of "
                f"{most}: blocks that a request generates are not kept, and the next turn of a "
                "conversation computes them again"
            )

    @usually(
        "a block is taken for bytes in the order of its dimensions: copy into `cache[block]`, not "
        "into `cache[block].reshape(-1)`, which may be another tensor; or it is kept as it lies in "
        "memory, and its name does not say how"
    )
    def test_caches_of_other_strides(self, make_bed: MakeBed) -> None:
        """In the cache's memory the dimensions have another order than in its shape.

        What one instance has kept, another one with the usual order finds right, or not at all.
        """
        for is_transposed in (True, False):
            cache = CacheShape(is_transposed=is_transposed)
            bed = make_bed(EngineConfig(model=SIX_HEADS, cache=cache))
            for prompt in some_prompts(2):
                if self.kind == "store":
                    bed.consume(prompt)
                bed.load(prompt)
            bed.close()

    @usually(
        "the scheduler's side keeps one load or one request, where a step has several; or that two "
        "requests with equal prompts, which fill the same block in one step, add to one value: "
        "stage by name and layer, so that the second copy is the first"
    )
    @pytest.mark.parametrize(
        ("num_ranks", "num_tokens"),
        [(1, 2048), (1, 112), (2, 2048)],
        ids=["in one step", "in chunks", "two ranks"],
    )
    def test_concurrent_requests(self, make_bed: MakeBed, num_ranks: int, num_tokens: int) -> None:
        """Prompts side by side, two and three of them equal: each is loaded whole afterwards."""
        limits = Limits(max_num_batched_tokens=num_tokens)
        bed = make_bed(EngineConfig(model=SIX_HEADS, num_ranks=num_ranks, limits=limits))
        one, other, *more = some_prompts(4)
        # In chunks, one of them fills blocks in the step of the one before, and of the next.
        prompts = [one, one, one, other, other, one[:42], *more]
        produced = [bed.submit_to_producer(prompt) for prompt in prompts]
        bed.run(*produced)
        for request in produced:
            bed.producer.check_output(request)
        if self.kind == "store":
            for prompt in (one, other, one[:42], *more):
                bed.check_gain(prompt, bed.most(prompt))
        for instance in bed.instances:
            instance.clear_cache()
        before = bed.consumer.counts.copy()
        consumed = bed.consume_side_by_side(produced)
        for request in consumed:
            bed.consumer.check_output(request)
        more_than_before = bed.consumer.counts - before
        found = more_than_before["tokens_loaded"] + more_than_before["tokens_cached"]
        most = sum(map(bed.most, prompts))
        assert found == most, (
            f"of prompts that were saved and asked for side by side {found} tokens were loaded, "
            f"or cached by a request before, and {most} can be"
        )
        for request in consumed if self.kind == "store" else ():
            # Also blocks that equal requests have filled as they went on.
            bed.consume(request.all_token_ids)
        for instance in bed.instances:
            assert instance.load_errors() == set(), "blocks could not be loaded that were saved"

    @usually(
        "the blocks that a request had before it was preempted are still used; it has others "
        "when it is resumed (resumed_req_ids)"
    )
    def test_preempted_requests(self, make_bed: MakeBed) -> None:
        """Blocks of a preempted request are given to others while the connector works on them."""
        self._preempt(make_bed)

    def _preempt(self, make_bed: MakeBed, num_groups: int = 1) -> None:
        """Produce and consume prompts side by side, more than there is room for."""
        for num_lengths in (6, 3):
            self._preempt_some(make_bed, num_groups, num_lengths)

    def _preempt_some(self, make_bed: MakeBed, num_groups: int, num_lengths: int) -> None:
        # Requests begin with two blocks of each group, of which the first is loaded, and end with
        # more. The first that needs a third one preempts the last that runs, in the middle of a
        # block or, if that is as long, right after it has filled one: with the first blocks of all
        # that are loading there is no room for one that ends.
        num_loaded = self.saved_block_size // BLOCK_SIZE
        lengths = [(num_loaded + 1) * BLOCK_SIZE - 5 - 2 * (n % num_lengths) for n in range(6)]
        prompts = [_some_tokens(length, 6 * num_lengths + n) for n, length in enumerate(lengths)]
        cache = CacheShape(BLOCK_SIZE, num_groups * (num_loaded * len(prompts) + 2))
        bed = make_bed(EngineConfig(cache=cache, limits=Limits(max_num_batched_tokens=40)))
        produced = [bed.submit_to_producer(prompt) for prompt in prompts]
        bed.run(*produced)
        bed.consumer.clear_cache()
        consumed = bed.consume_side_by_side(produced, 24)
        preempted = {each.request_id for each in consumed if each.num_preemptions}
        assert preempted & bed.consumer.loaded(), (
            "no request was preempted into whose blocks anything had been loaded"
        )
        for request in produced:
            bed.producer.check_output(request)
        for request in consumed:
            bed.consumer.check_output(request)
        # Blocks that preempted requests have saved are right, too.
        for request in consumed if self.kind == "store" else ():
            bed.consume(request.all_token_ids)
        for request in consumed:
            bed.transfer(request.all_token_ids)

    @usually("a load begins with the first block, and not at num_computed_tokens")
    @pytest.mark.parametrize("num_cached", [1, 2])
    def test_prefix_in_the_local_cache(self, bed: ConnectorTestBed, num_cached: int) -> None:
        """The instance's own cache has the first blocks; the connector loads the others."""
        for prompt in some_prompts(2):
            params = bed.produce(prompt)
            bed.consumer.clear_cache()
            bed.run(bed.consumer.submit([*prompt[: num_cached * BLOCK_SIZE], 1], 1))
            before = bed.consumer.counts["tokens_cached"]
            with bed.loading():
                request = bed.submit_to_consumer(prompt, params)
                bed.run(request)
            bed.consumer.check(request)
            cached = bed.consumer.counts["tokens_cached"] - before
            assert cached == num_cached * BLOCK_SIZE, f"{cached} tokens were cached"

    @usually("ranks write to one place, or that a look-up asks for the block of one rank only")
    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_tensor_parallel_ranks(self, make_bed: MakeBed, num_ranks: int) -> None:
        """Each rank has its own heads of every block."""
        bed = make_bed(EngineConfig(model=SIX_HEADS, num_ranks=num_ranks))
        for prompt in some_prompts(2):
            bed.load(prompt)

    # -- two KV cache groups: layers that see all tokens, and layers with a window

    @usually(
        "a group has no blocks of its own in the connector: names do not end in the number of the "
        "group (RequestNames.under(fingerprint, group=1)), or one group is left out"
    )
    @pytest.mark.parametrize("num_ranks", [1, 2])
    def test_groups_are_loaded_as_far_as_they_were_saved(
        self, make_hybrid_bed: MakeBed, num_ranks: int
    ) -> None:
        """Each group has its own blocks; a prefix counts where all groups have what it needs."""
        model = msgspec.structs.replace(SIX_HEADS, num_layers=3, windows=HYBRID.windows)
        settings = EngineConfig(model=model, num_ranks=num_ranks, limits=CHUNKED.limits)
        self._check_gain(make_hybrid_bed, settings)

    @usually(
        "a load begins with the first block of a window; it begins with the block that "
        "wtransfer.kv.groups.first_needed() returns, as the host has no blocks for those before"
    )
    @pytest.mark.parametrize("num_cached", [0, 1, 4])
    def test_window_loads_its_last_blocks_only(
        self, make_hybrid_bed: MakeBed, num_cached: int
    ) -> None:
        """All other blocks keep their bytes, also that whose number stands for passed blocks."""
        bed, prompt = make_hybrid_bed(), _some_tokens(133)
        params = bed.produce(prompt)
        bed.consumer.clear_cache()
        if num_cached:
            bed.run(bed.consumer.submit([*prompt[: num_cached * BLOCK_SIZE], 1], 1))
        before = [[layer.clone() for layer in cache.layers] for cache in bed.consumer.caches]
        # So few tokens are computed that the window passes no loaded block.
        with bed.loading():
            request = bed.submit_to_consumer(prompt, params, 1)
            bed.run(request)
        bed.consumer.check(request)
        for cache, layers in zip(bed.consumer.caches, before, strict=True):
            for layer, expected in zip(cache.layers, layers, strict=True):
                expected[request.block_ids] = layer[request.block_ids]
                assert layer[NULL_BLOCK].equal(expected[NULL_BLOCK]), (
                    f"block {NULL_BLOCK} was written, whose number stands for blocks that the "
                    "window has passed"
                )
                assert layer.equal(expected), f"others than {request.block_ids} were written"

    @usually(
        "a block of a window is read after the next step was planned, by which time it may be "
        "others'; hold what is still read by the host's block pool (bind_gpu_block_pool) until it "
        "is stored"
    )
    def test_window_blocks_are_saved_before_others_have_them(
        self, make_hybrid_bed: MakeBed
    ) -> None:
        """Blocks that are free once a step is planned are overwritten before it is executed."""
        # A step fills more blocks than the window needs, so the next one releases some of them.
        limits = Limits(max_num_batched_tokens=64)
        bed, prompt = make_hybrid_bed(EngineConfig(limits=limits)), _some_tokens(133)
        producer, num_passed = bed.producer, 0
        request = bed.submit_to_producer(prompt)
        deadline = Deadline(bed.deadline_s)
        while request.state not in OVER:
            plan = producer.scheduler.plan()
            num_passed = sum(table.count(None) for table in request.block_tables)
            producer.clear_cache()
            producer.execute(plan)
            deadline.check("a request of this test")
        assert num_passed > 1, "the window has passed no block"
        bed.run(request)
        producer.check_output(request)
        bed.check_gains(prompt, bed.params_of(request))
        bed.drain()

    @usually(
        "the block tables of one group only are begun anew for a request that is resumed, or that "
        "a request has a load of one group only"
    )
    def test_groups_of_preempted_requests(self, make_hybrid_bed: MakeBed) -> None:
        """Requests lose their blocks, of both groups, and begin anew in others."""
        self._preempt(make_hybrid_bed, num_groups=2)

    @usually(
        "a block of one group has no checksum, or that a request goes on of which a load has "
        "failed: name all blocks of it that could not be loaded"
    )
    @pytest.mark.parametrize(
        "windows", [HYBRID.windows, HYBRID.windows[1:]], ids=["two groups", "a window"]
    )
    def test_damaged_blocks_of_groups_are_a_miss(
        self, make_hybrid_bed: MakeBed, windows: tuple[int | None, ...]
    ) -> None:
        """A request with a damaged block of any group begins anew. Needs `damage`."""
        model = msgspec.structs.replace(HYBRID, windows=windows)
        bed, prompt = make_hybrid_bed(EngineConfig(model=model)), _some_tokens(133)
        bed.load(some_prompts(1)[0])
        params = bed.produce(prompt)
        bed.await_saves(prompt)
        self._damage(bed)
        before = bed.num_loaded
        bed.consume(prompt, params)
        loaded, whole = bed.num_loaded - before, 128
        assert loaded < whole, _NOT_HIT
        assert bed.consumer.received() == [bed.consumer.loads()], _EACH_LOAD_ONCE
        if self.kind == "store":
            bed.consume(prompt)
            bed.check_gain(prompt, whole)
        bed.drain()

    # -- one side and the other

    @usually(
        "one object has the methods of both sides; write two classes, and name them in "
        "scheduler_cls and worker_cls"
    )
    @pytest.mark.parametrize("role", KVConnectorRole)
    def test_methods_of_the_other_side_raise(self, tmp_path: Path, role: KVConnectorRole) -> None:
        """Each side has the methods of its role only."""
        side: Any = self._settings(EngineConfig(), tmp_path).make_connector(role)
        others = {
            KVConnectorRole.SCHEDULER: WORKER_METHODS,
            KVConnectorRole.WORKER: SCHEDULER_METHODS,
        }
        try:
            for name in sorted(others[role]):
                with contextlib.suppress(ConnectorRoleError):
                    getattr(side, name)()
                    raise AssertionError(f"{name}() can be called on the side of the {role.name}")
        finally:
            side.shutdown()

    @usually(
        "the constructor needs kv_cache_config, which older hosts do not pass; "
        "register_kv_caches() has the caches"
    )
    @pytest.mark.parametrize("role", KVConnectorRole)
    def test_cache_shape_is_optional(self, tmp_path: Path, role: KVConnectorRole) -> None:
        """Older hosts pass no ``kv_cache_config``."""
        config = self._settings(EngineConfig(), tmp_path).serving_config()
        KVConnectorFactory.create_connector(config, role).shutdown()

    # -- lookups

    @usually(
        "the answer counts parts of blocks or all tokens of a prompt, or that the first "
        "look-up takes or pins what the next one looks for"
    )
    def test_lookups_change_nothing(self, bed: ConnectorTestBed) -> None:
        """Repeated lookups agree, count whole blocks, and leave a token to compute."""
        found = 0

        def ask(own: Any, request: Request, num_computed: int) -> Any:
            nonlocal found
            answers = [own(request, num_computed) for _ in range(3)]
            number, is_async = answers[-1]
            if number is not None:
                known = [answer for answer in answers if answer[0] is not None]
                assert known == [(number, is_async)] * len(known), (
                    "look-ups of one request do not agree"
                )
                assert number % BLOCK_SIZE == 0, f"{number} tokens are no whole blocks"
                assert 0 <= number < request.num_tokens - num_computed, (
                    "no token is left to compute"
                )
                found += number
            return number, is_async

        bed.consumer.scheduler_side.instead["get_num_new_matched_tokens"] = ask
        for prompt in [*some_prompts(2), some_prompts(1)[0][: 2 * BLOCK_SIZE]]:
            bed.transfer(prompt)
        assert found > 0, "nothing was found"
        bed.drain()

    @usually(
        "something was begun in get_num_new_matched_tokens(); begin it in "
        "update_state_after_alloc(), and forget it in request_finished()"
    )
    def test_abort_after_lookup_leaves_nothing(self, bed: ConnectorTestBed) -> None:
        """A request that is aborted before it has blocks is not waited for, nor reported."""
        prompt = some_prompts(1)[0]
        params = bed.produce(prompt)
        bed.consumer.clear_cache()

        request = bed.look_up(prompt, params)
        for _ in range(2):
            bed.step()
        bed.end_look_up(request)
        bed.drain()
        assert request.request_id not in bed.consumer.reported(), (
            "get_finished() has named a request that was aborted before it had blocks"
        )
        bed.transfer(prompt)

    @usually("a load is planned from the look-up's answer, and not from num_external_tokens")
    def test_host_may_decline_a_hit(self, bed: ConnectorTestBed) -> None:
        """The host computes the tokens, and nothing is loaded into its blocks."""
        prompt = some_prompts(1)[0]
        params = bed.produce(prompt)

        deadline = Deadline(self.deadline_s / 2)

        def decline(own: Any, request: Request, num_computed: int) -> Any:
            number, _ = own(request, num_computed)
            assert number or not deadline.expired, "the look-up of a saved prompt has found nothing"
            return (0 if number else None), False

        bed.consumer.scheduler_side.instead["get_num_new_matched_tokens"] = decline
        before = bed.num_loaded
        bed.consume(prompt, params)
        assert bed.num_loaded == before, "blocks were loaded that must be a miss"
        assert bed.consumer.received() == [Counter()], (
            "get_finished() has named a request that had nothing to load"
        )
        del bed.consumer.scheduler_side.instead["get_num_new_matched_tokens"]
        bed.transfer(prompt)
        bed.drain()

    # -- metadata

    @usually("build_connector_meta() does not forget what it has returned")
    def test_metadata_is_not_repeated(self, bed: ConnectorTestBed) -> None:
        """Metadata built again without new work, or after all work, equals that of an idle step.

        The connector may have to know its peers first, so idle metadata is taken after a transfer.
        """
        first, prompt = some_prompts(2)
        bed.transfer(first)
        bed.drain()
        before = self._idle_metadata(bed)
        steps = []

        def build(own: Any, output: SchedulerOutput) -> Any:
            first = own(output)
            idle = [own(SchedulerOutput()) for _ in range(2)]
            steps.append([_settled(each) for each in (first, *idle)])
            return first

        params = bed.produce(prompt)
        bed.consumer.scheduler_side.instead["build_connector_meta"] = build
        bed.consume(prompt, params)
        for number, (_, second, third) in enumerate(steps):
            assert _without_numbers(second) == _without_numbers(third), f"of step {number}"
        assert [each for each in steps if each[0] != each[1]], "all metadata was that of idle steps"
        bed.drain()
        after = self._idle_metadata(bed)
        assert after == before, "metadata of a request stays after the request"

    def _idle_metadata(self, bed: ConnectorTestBed) -> Any:
        side = bed.consumer.scheduler_side.side
        return _without_numbers(_settled(side.build_connector_meta(SchedulerOutput())))

    @usually(
        "metadata contains a request, a tensor of the cache, a function, or keys that JSON "
        "does not have"
    )
    def test_metadata_is_plain_data(self, bed: ConnectorTestBed) -> None:
        """Metadata is numbers, text and collections; ``kv_transfer_params`` can be JSON."""
        for prompt in some_prompts(2):
            bed.transfer(prompt)
        for side in bed.sides:
            for name in (*METADATA_METHODS, "get_handshake_metadata"):
                for metadata in side.results(name):
                    assert _settled(deserialize(serialize(metadata))) == _settled(metadata), (
                        f"{name}() does not travel"
                    )
        for instance in bed.instances:
            for _, params in instance.scheduler_side.results("request_finished"):
                assert json.loads(json.dumps(params)) == params, (
                    "kv_transfer_params are others after JSON"
                )

    @usually("the returned object, or a list in it, is kept and used for the next step")
    def test_metadata_is_not_changed_after_return(self, bed: ConnectorTestBed) -> None:
        """A host may send metadata some time after it was built."""
        returned: list[tuple[str, Any, Any]] = []

        def note(own: Any, *args: Any) -> Any:
            metadata = own(*args)
            returned.append((type(metadata).__name__, metadata, _settled(metadata)))
            return metadata

        for side in bed.sides:
            side.instead |= dict.fromkeys(METADATA_METHODS, note)
        for prompt in some_prompts(2):
            bed.transfer(prompt)
        for name, metadata, before in returned:
            assert _settled(metadata) == before, f"{name} was changed after it was returned"

    @usually("one side changes metadata that the other side still reads")
    def test_metadata_passed_without_copy(self, bed: ConnectorTestBed) -> None:
        """A host whose sides share a process may pass the very objects."""

        def keep(latest: dict[str, Any], own: Any, *args: Any) -> Any:
            latest["metadata"] = metadata = own(*args)
            return metadata

        def pass_on(latest: dict[str, Any], own: Any, _: Any) -> Any:
            return own(latest["metadata"])

        def pass_back(latest: dict[str, Any], own: Any, output: Any) -> Any:
            output.kv_connector_worker_meta = latest["metadata"]
            return own(output)

        for instance in bed.instances:
            (worker,), scheduler_side = instance.workers, instance.scheduler_side
            planned: dict[str, Any] = {}
            reported: dict[str, Any] = {}
            scheduler_side.instead["build_connector_meta"] = partial(keep, planned)
            worker.instead["handle_preemptions"] = partial(pass_on, planned)
            worker.instead["bind_connector_metadata"] = partial(pass_on, planned)
            worker.instead["build_connector_worker_meta"] = partial(keep, reported)
            scheduler_side.instead["update_connector_output"] = partial(pass_back, reported)
        for prompt in some_prompts(2):
            bed.load(prompt)
            bed.transfer(prompt)
        bed.drain()

    @usually("aggregate() keeps the last rank's report, or that sums count one rank twice")
    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_aggregation_is_independent_of_order(self, make_bed: MakeBed, num_ranks: int) -> None:
        """Worker metadata adds up to the same in any order and grouping."""

        def aggregated(metas: Sequence[Any]) -> Any:
            # Made anew each time: the first operand may be changed.
            made = map(deserialize, metas)
            return serialize(functools.reduce(lambda one, other: one.aggregate(other), made))

        bed = make_bed(EngineConfig(model=SIX_HEADS, num_ranks=num_ranks))
        bed.transfer(some_prompts(1)[0])
        for instance in bed.instances:
            steps = [side.results("build_connector_worker_meta") for side in instance.workers]
            for step in zip(*steps, strict=True):
                # A host leaves out the ranks that return None.
                metas = [serialize(meta) for meta in step if meta is not None]
                sums = [aggregated(order) for order in itertools.permutations(metas) if order]
                if len(metas) > 1:
                    sums.append(aggregated([metas[0], aggregated(metas[1:])]))
                assert all(_sorted_sets(each) == _sorted_sets(sums[0]) for each in sums), (
                    "the order of ranks matters"
                )

    @usually("blocks, names or notices pass through pickle: whoever writes them runs code here")
    def test_nothing_is_unpickled(self, make_bed: MakeBed) -> None:
        """No function of `pickle` that loads is called by either side."""
        # Imports at the first use are no concern of this test.
        make_bed().transfer(some_prompts(1)[0])
        with recorded_unpickling() as loads:
            make_bed().load(some_prompts(1, seed=1)[0])
        assert loads == [], "functions of the module pickle were called"

    # -- reports of loads

    @usually(
        "get_finished() names a load again, names it on one rank only, or names loads that end "
        "within their step"
    )
    def test_every_load_is_reported_once(self, make_bed: MakeBed) -> None:
        """Every rank reports each load that outlasts its step, and no other load."""
        bed = make_bed(EngineConfig(model=SIX_HEADS, num_ranks=2, limits=CHUNKED.limits))
        for prompt in some_prompts(3):
            bed.load(prompt)
        assert bed.consumer.received() == [bed.consumer.loads()] * 2, _EACH_LOAD_ONCE

    @usually(
        "a load that is not begun is forgotten: the host waits for its request, or takes its "
        "blocks for loaded"
    )
    def test_refused_load_is_reported(self, bed: ConnectorTestBed) -> None:
        """The load ends, and its blocks are reported before it or with it."""
        prompt = some_prompts(1)[0]
        params = bed.produce(prompt)
        bed.consumer.clear_cache()
        with bed.loading():
            request = bed.submit_to_consumer(prompt, params)
            plan = _plan_of(bed, bed.consumer, request)
        # The weights are equal again, but their version is not the one of the plan.
        bed.weights.change(1, 0)
        bed.consumer.execute(plan)
        bed.run(request)
        bed.consumer.check(request)
        assert bed.consumer.received() == [bed.consumer.loads()], _EACH_LOAD_ONCE
        bed.consumer.check_errors_in_time()
        bed.drain()

    @usually("get_finished() names requests that were saved, or all of a step, as received")
    def test_requests_without_loads_are_not_reported(self, bed: ConnectorTestBed) -> None:
        """Prompts shorter than a block, or never saved, are not reported."""
        for prompt in ([1, 2, 3], *some_prompts(1, seed=5)):
            request = bed.submit_to_consumer(prompt, None)
            bed.run(request)
            bed.consumer.check(request)
        assert bed.consumer.received() == [Counter()], (
            "get_finished() has named a request that had nothing to load"
        )
        assert bed.consumer.load_errors() == set()

    @usually("get_stats() returns text or objects, or that a counter starts again")
    def test_stats_are_numbers_and_counters_rise(self, bed: ConnectorTestBed) -> None:
        """Statistics are names and numbers; counters, which end in ``_total``, never fall."""
        before: dict[str, float] = {}
        for prompt in some_prompts(3):
            bed.transfer(prompt)
            after: dict[str, float] = {}
            for number, side in enumerate(bed.sides):
                after |= checked_stats(side.get_stats(), f"{number} {side.name}")
            assert fallen_counters(before, after) == [], "counters that have fallen"
            before = after

    # -- notices to the scheduler side

    @usually("notices are counted; keep a set of what is expected, and discard from it")
    def test_duplicate_notices_are_ignored(self, bed: ConnectorTestBed) -> None:
        """Notices come twice, late, and in any order (FAULTS 28)."""
        drawn = random.Random(3)  # noqa: S311  # no secret

        def repeat(passed: list[Any], own: Any, output: KVConnectorOutput) -> None:
            passed.append(serialize(vars(output)))
            for each in (passed[-1], passed[-1], *drawn.sample(passed, min(3, len(passed)))):
                own(KVConnectorOutput(**deserialize(each)))
            # The notice of this step comes last: the latest worker metadata is the valid one.
            own(output)

        for instance in bed.instances:
            instance.scheduler_side.instead["update_connector_output"] = partial(repeat, [])
        prompts = [*some_prompts(3), *some_prompts(3)]
        for prompt in prompts:
            bed.transfer(prompt)
        assert bed.num_loaded > 0, "nothing was loaded"
        bed.weights.change(1)
        for prompt in prompts:
            bed.transfer(prompt)
        bed.drain()

    @usually("a request is looked up by `[]`, or that finished_req_ids are returned as sent")
    def test_unknown_notices_are_ignored(self, bed: ConnectorTestBed) -> None:
        """Notices name requests that never were, and blocks that no request has."""
        unknown = {"unknown", "request-0-of-an-earlier-process"}

        def update_more(own: Any, output: KVConnectorOutput) -> None:
            own(KVConnectorOutput(set(unknown), set(unknown), None, {0, 10**6}, set(unknown)))
            own(output)

        prompts = some_prompts(3)
        for instance in bed.instances:
            instance.scheduler_side.instead["update_connector_output"] = update_more
            for side in instance.workers:
                side.instead["get_finished"] = lambda own, finished: own(finished | unknown)
        for prompt in [*prompts, *prompts]:
            bed.transfer(prompt)
        assert not any(unknown & instance.reported() for instance in bed.instances), (
            "a request was reported that never was"
        )
        for instance in bed.instances:
            del instance.scheduler_side.instead["update_connector_output"]
        bed.transfer(prompts[0])
        assert bed.num_loaded > 0, "nothing was loaded"
        bed.drain()

    # -- ends of requests

    @usually(
        "request_finished() returns True for a request that no worker will name, or that state "
        "of an aborted request stays"
    )
    @pytest.mark.parametrize("where", ["producer", "consumer"])
    def test_abort_after_any_step(self, make_bed: MakeBed, where: str) -> None:
        """An abort, given twice, leaks no block and harms no later request."""
        bed = make_bed(CHUNKED)
        instance: RecordedInstance = getattr(bed, where)
        prompts, struck = some_prompts(8), set[str]()
        for num_steps, prompt in enumerate(prompts):
            if where == "consumer":
                params = bed.produce(prompt)
                bed.consumer.clear_cache()
                request = bed.submit_to_consumer(prompt, params)
            else:
                request = bed.submit_to_producer(prompt)
            for _ in range(num_steps):
                bed.step()
            struck.add(request.state)
            self._abort(instance, request)
            bed.run(request)
        assert struck & {"loading", "running"}, (
            f"no request was under way when it was aborted: they were {sorted(struck)}"
        )
        if where == "consumer":
            self._abort_loads(bed)
        for prompt in prompts:
            bed.transfer(prompt)
        bed.drain()

    def _abort(self, instance: RecordedInstance, request: Request) -> None:
        for _ in range(2):
            instance.scheduler.abort(request)
        # Blocks that are free by now are overwritten, also while the connector reads them.
        instance.clear_cache()

    def _abort_loads(self, bed: ConnectorTestBed) -> None:
        """Abort a request once its load is planned, before and after its step is executed."""
        for number in range(2):
            prompt = some_prompts(1, seed=number + 1)[0]
            params = bed.produce(prompt)
            bed.consumer.clear_cache()
            with bed.loading():
                request = bed.submit_to_consumer(prompt, params)
                plan = _plan_of(bed, bed.consumer, request)
            if number:
                bed.consumer.scheduler.abort(request)
            bed.consumer.execute(plan)
            self._abort(bed.consumer, request)
            bed.run(request)

    @usually(
        "request_finished() keeps blocks until another instance fetches them, without a deadline"
    )
    def test_unclaimed_blocks_are_freed(self, make_bed: MakeBed) -> None:
        """Blocks are freed though no consumer comes for them."""
        bed = make_bed(CHUNKED)
        for prompt in some_prompts(4):
            bed.produce(prompt)
        bed.drain()

    # -- steps that are not executed

    @usually(
        "blocks are kept before wait_for_save(), or in clear_connector_metadata(), which ends "
        "every step"
    )
    def test_refused_step_saves_nothing(self, bed: ConnectorTestBed) -> None:
        """Blocks that a refused step would have computed are a miss."""
        request, plan = _planned(bed)
        bed.weights.change(1, 0)
        _check_not_saved(bed, request, plan)

    @usually(
        "save_kv_layer() keeps a block when it has the last layer; keep it in wait_for_save(), "
        "which makes the step count"
    )
    def test_step_with_late_load_errors_saves_nothing(self, bed: ConnectorTestBed) -> None:
        """The step has computed its layers from blocks that turn out to be wrong."""
        request, plan = _planned(bed)
        # Other tokens stand for wrong blocks: the layers compute wrong keys and values.
        spans = [
            msgspec.structs.replace(span, tokens=[token ^ 1 for token in span.tokens])
            for span in plan.spans
        ]
        plan = msgspec.structs.replace(plan, loads_first=True, spans=spans)
        # The worker asks before the forward pass, and after it.
        worker: Any = bed.producer.executor.worker
        failed, number = worker.has_load_errors, itertools.count()
        worker.has_load_errors = lambda: failed() or next(number) == 1
        _check_not_saved(bed, request, plan)

    # -- damage

    @usually(
        "blocks have no checksum, or one that leaves a part of their bytes out, that it is "
        "compared after the cache was written, or that a damaged block is never saved again"
    )
    def test_damaged_blocks_are_a_miss(self, make_bed: MakeBed) -> None:
        """Damaged blocks are computed afresh (FAULTS 32) and saved again. Needs `damage`."""
        bed = make_bed(EngineConfig(model=LARGE))
        bed.load(some_prompts(1)[0])
        places = PLACES if self._knows_places else (0.5,)
        num_open = len(list(descriptors()))
        for number, where in enumerate(places, start=1):
            prompt = some_prompts(1, seed=number)[0]
            params = bed.produce(prompt)
            bed.await_saves(prompt)
            self._damage(bed, where)
            before = bed.num_loaded
            try:
                bed.consume(prompt, params)
            except AssertionError as error:
                raise AssertionError(f"after damage(where={where:.3f}): {error}") from error
            assert bed.num_loaded - before < bed.most(prompt), _NOT_HIT
            assert bed.consumer.received() == [bed.consumer.loads()], _EACH_LOAD_ONCE
        if not self._knows_places:
            self.not_tested(NO_PLACES)
        more = len(list(descriptors())) - num_open
        assert more < max(len(places), 2), (
            f"{len(places)} loads of damaged blocks have left {more} more descriptors open"
        )
        if self.kind == "store":
            self._check_replaced(bed, prompt)
        bed.drain()

    def _check_replaced(self, bed: ConnectorTestBed, prompt: list[int]) -> None:
        """Check that after a failed load one more request is computed, and the next one loaded."""
        try:
            bed.consume(prompt)
            bed.check_gain(prompt, bed.most(prompt))
        except AssertionError as error:
            raise AssertionError(f"the damaged blocks were not replaced: {error}") from error

    @usually(
        "a failed load raises, that get_block_ids_with_load_errors() does not name its blocks, "
        "that blocks have no checksum, or that a block whose load has failed is found again"
    )
    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    def test_load_failure_policy(
        self, make_bed: MakeBed, policy: Literal["recompute", "fail"]
    ) -> None:
        """A request whose load failed is recomputed, or fails, but not the next. Needs `damage`."""
        bed = make_bed(EngineConfig(on_load_failure=policy))
        prompt = some_prompts(1)[0]
        params = bed.produce(prompt)
        bed.await_saves(prompt)
        self._damage(bed)
        bed.consumer.clear_cache()
        request = bed.submit_to_consumer(prompt, params)
        bed.run(request)
        if policy == "fail" and bed.consumer.counts["loads_failed"]:
            assert request.state == "failed", f"the request is {request.state}"
        else:
            bed.consumer.check(request)
        bed.consumer.check_errors_in_time()
        if self.kind == "store":
            self._check_replaced(bed, prompt)
        bed.drain()

    # -- names of blocks

    @usually(
        "a hash of 64 bits or less is taken for the tokens; use one of 128 bits or more, or "
        "compare the tokens"
    )
    def test_hash_collision_is_a_miss(
        self, make_bed: MakeBed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Equal hashes do not prove equal blocks (FAULTS 30). Needs `weaken` for other names."""
        seen: dict[bytes, bytes] = {}

        def weak(data: bytes) -> bytes:
            return seen.setdefault(data, xxhash.xxh3_64_digest(data)[:1] + b"\0")

        self.weaken(monkeypatch, weak)
        bed = make_bed(hash_function=xxhash.xxh3_128_digest)
        prompts = [prompt for seed in range(12) for prompt in some_prompts(1, seed=seed)]
        for prompt in [*prompts, *prompts]:
            bed.transfer(prompt)
        if not seen:
            self.skip_not_tested(
                "blocks whose names collide: write weaken(self, monkeypatch, hash_function) in the "
                "subclass of the kit, which names blocks by that function"
            )
        assert len(set(seen.values())) < len(seen), "there was no collision"

    @usually(
        "a block is named by its own tokens, by few of those before it, by the first tokens of a "
        "prompt, or without regard to their order: name it by all tokens up to its end"
    )
    @pytest.mark.parametrize("case", OTHER_TOKENS)
    def test_block_after_other_tokens_is_a_miss(self, bed: ConnectorTestBed, case: str) -> None:
        """Keys and values depend on all tokens before, so equal blocks at one place may differ."""
        saved, prompt, num_saved = OTHER_TOKENS[case]
        for each in saved:
            bed.produce(each)
        # A transfer names all blocks by a request of its own, which may find them staged already.
        params = bed.produce(prompt) if self.kind == "transfer" else None
        for each in saved:
            bed.await_saves(each)
        for instance in bed.instances:
            instance.clear_cache()
        before = bed.num_loaded
        request = bed.submit_to_consumer(prompt, params)
        bed.run(request)
        found, most = bed.num_loaded - before, len(prompt) if params else num_saved
        assert found <= most, f"{found} tokens were loaded, of which {most} had been saved"
        bed.consumer.check(request)

    @usually(
        "blocks are named by tokens alone: one tenant's KV is served to another, or that of "
        "one image for the next"
    )
    @pytest.mark.parametrize(
        ("attribute", "one", "other"), PARTICULARS.values(), ids=PARTICULARS.keys()
    )
    def test_other_salt_adapter_or_media_is_a_miss(
        self, bed: ConnectorTestBed, attribute: str, one: Any, other: Any
    ) -> None:
        """Requests share KV cache only if salt, adapter and media are equal, each by itself."""
        current = None

        def set_and_pass_on(own: Any, request: Request) -> None:
            setattr(request, attribute, current)
            own(request)

        for instance in bed.instances:
            instance.scheduler_side.instead["on_new_request"] = set_and_pass_on
        for number, (produced, consumed) in enumerate(((None, one), (one, None), (one, other))):
            prompt = some_prompts(1, seed=number)[0]
            current = produced
            params = bed.produce(prompt)
            current, before = consumed, bed.num_loaded
            bed.consume(prompt, params)
            assert bed.num_loaded == before, (
                f"a request with {attribute}={consumed!r} has loaded blocks that were computed "
                f"with {produced!r}"
            )
        # With an adapter or media, a connector need not load anything.
        for seed, current in enumerate((None, one) if attribute == "cache_salt" else (None,)):
            before = bed.num_loaded
            bed.transfer(some_prompts(1, seed=100 + seed)[0])
            assert bed.num_loaded > before, f"{current!r} does not load its own blocks"

    # -- weights may change at any time (FAULTS 31, 47)

    @usually("names_weights is True, and names do not contain the weights; leave it out")
    def test_other_weights_are_a_miss(self, bed: ConnectorTestBed) -> None:
        """Blocks computed with other weights are not loaded; after a change back they may be."""
        prompt = some_prompts(1)[0]
        params = bed.produce(prompt)
        for seed in (1, 2):
            bed.weights.change(seed)
            # Seed 1: the scheduler looks up before it knows of the change; seed 2: after.
            for _ in range(seed - 1):
                bed.step()
            before = bed.num_loaded
            bed.consume(prompt, params)
            assert bed.num_loaded == before, "blocks were loaded that must be a miss"
        _consume_under(bed, prompt, params, 0)
        bed.load(prompt)

    @usually(
        "the store is emptied when the weights change, and what was there before this process "
        "is not looked at; leave names_weights out"
    )
    @pytest.mark.parametrize("seeds", [(0, 1), (1, 0)], ids=["in one order", "in the other"])
    def test_store_outlives_its_weights(
        self, make_bed: MakeBed, weights: LocalWeights, seeds: tuple[int, int]
    ) -> None:
        """An instance that never had the weights of a block does not load it (FAULTS 50)."""
        prompt, params = some_prompts(1)[0], None
        for seed in seeds:
            weights.change(seed)
            bed = make_bed()
            bed.consume(prompt, params)
            assert bed.num_loaded == 0, "blocks of other weights, or of no request, were loaded"
            params = bed.produce(prompt)
        # An instance with the first weights shares the first instance's blocks, if `is_shared`.
        weights.change(seeds[0])
        bed = make_bed()
        bed.consume(prompt)
        assert bed.num_loaded > 0 or not self.is_shared, (
            "an instance with the first weights again has loaded nothing of the first instance's"
        )

    @usually(
        "blocks are named by the weights of the moment of their save, and not by those that "
        "began the request"
    )
    @pytest.mark.parametrize("seeds", CHANGES.values(), ids=CHANGES)
    def test_weights_change_within_a_request(
        self, make_bed: MakeBed, seeds: tuple[int, ...]
    ) -> None:
        """Blocks of the request are of the old weights, of the new ones, and of both."""
        bed, struck = make_bed(CHUNKED), 0
        for num_steps, prompt in enumerate(some_prompts(6), start=1):
            bed.weights.change(0)
            request = bed.submit_to_producer(prompt)
            for _ in range(num_steps):
                bed.step()
            struck += request.state not in OVER
            for seed in seeds:
                bed.weights.change(seed)
                # The first step is refused, the second computes some of the request.
                bed.step()
                bed.step()
            bed.run(request)
            _consume_under(bed, prompt, bed.params_of(request), seeds[-1], 1, 0)
        assert struck > 1, "no request was under way when the weights changed"
        bed.load(some_prompts(1, seed=1)[0])

    @usually("the worker's side does not compare the weights of the plan with its own")
    @pytest.mark.parametrize("seeds", CHANGES.values(), ids=CHANGES)
    def test_weights_change_between_plan_and_step(
        self, bed: ConnectorTestBed, seeds: tuple[int, ...]
    ) -> None:
        """The scheduler plans a load before it knows of the change: the worker refuses it."""
        for prompt in some_prompts(2):
            bed.weights.change(0)
            # What a scheduler computes before it knows of the change is not saved.
            bed.step()
            params = bed.produce(prompt)
            bed.consumer.clear_cache()
            with bed.loading():
                request = bed.submit_to_consumer(prompt, params)
                plan = _plan_of(bed, bed.consumer, request)
            bed.weights.change(*seeds)
            planned = list(request.block_ids[: request.num_external_tokens // BLOCK_SIZE])
            # Those of the prompt before may be the same.
            for side in bed.consumer.workers:
                side.calls.clear()
            bed.consumer.execute(plan)
            bed.run(request)
            # Nothing of the request had been computed, so it began anew under the new weights.
            bed.consumer.check(request)
            assert bed.consumer.load_errors().issuperset(planned), "they were loaded"
            _consume_under(bed, prompt, params, seeds[-1], 1, 0)

    @usually("the worker's side compares weights once in a step; they may change before each call")
    def test_weights_change_between_calls(self, make_bed: MakeBed) -> None:
        """The weights change once before each kind of call of either side during a transfer."""
        bed = make_bed(CHUNKED)
        moments = _moments(bed)
        # A side has something to do before its second call, where there is one.
        kinds = dict.fromkeys(moment[:3] for moment in moments if moment[2] not in FOLLOWING)
        chosen = [(*kind, min(2, max(m[3] for m in moments if m[:3] == kind))) for kind in kinds]
        missed = []
        for number, moment in enumerate(chosen):
            # There and back within a call of the model's thread: nothing is computed in between.
            goes_back = number % 2 and " S" in moment[1]
            seeds = CHANGES["there and back" if goes_back else "there"]
            missed += [] if _change_at(bed, moment, seeds, number) else [moment[2]]
        assert 2 * len(missed) <= len(chosen), f"these were not called again: {missed}"
        if missed:
            self.not_tested(f"a change of weights before {', '.join(missed)}: not called each time")
        bed.load(some_prompts(1)[0])

    @usually("the worker's side compares weights once in a step; they may change before each call")
    @pytest.mark.parametrize("seeds", CHANGES.values(), ids=CHANGES)
    def test_weights_change_before_every_call(
        self, make_bed: MakeBed, seeds: tuple[int, ...]
    ) -> None:
        """The weights change before every single call. Needs `is_long`."""
        self.skip_unless_long()
        bed = make_bed(CHUNKED)
        for number, moment in enumerate(_moments(bed)):
            _change_at(bed, moment, seeds, number)

    # -- shutdown

    @usually("shutdown() uses what register_kv_caches() or a first request makes")
    @pytest.mark.parametrize("role", KVConnectorRole)
    def test_shutdown_before_use(self, tmp_path: Path, role: KVConnectorRole) -> None:
        """A side may shut down twice before caches are registered."""
        side = self._settings(EngineConfig(), tmp_path).make_connector(role)
        assert side is not None
        for _ in range(2):
            side.shutdown()

    @usually("a second shutdown() uses what the first one has dropped")
    def test_shutdown_is_idempotent(self, bed: ConnectorTestBed) -> None:
        """Sides may shut down twice, in either order."""
        bed.transfer(some_prompts(1)[0])
        for instance in bed.instances:
            for recorded in (*instance.sides, *reversed(instance.sides)):
                recorded.side.shutdown()

    @usually("shutdown() waits for a transfer without a deadline")
    @pytest.mark.parametrize("where", ["producer", "consumer"])
    def test_shutdown_ends_running_work(self, make_bed: MakeBed, where: str) -> None:
        """Work ends, successful or not, within `ends_within_s`."""
        for num_steps in (1, 2, 4):
            bed = make_bed(CHUNKED)
            prompts = some_prompts(4)
            if where == "producer":
                submitted = [bed.submit_to_producer(prompt) for prompt in prompts]
            else:
                params = [bed.produce(prompt) for prompt in prompts]
                bed.consumer.clear_cache()
                of_each = zip(prompts, params, strict=True)
                submitted = [bed.submit_to_consumer(*each, num_new=8) for each in of_each]
            for _ in range(num_steps):
                bed.step()
            assert any(each.state not in OVER for each in submitted), "no request was under way"
            begun = time.monotonic()
            bed.close()
            assert time.monotonic() - begun < self.ends_within_s, (
                f"shutdown() has taken more than {self.ends_within_s:g} s"
            )

    @usually(
        "shutdown() does not join a thread, close a descriptor, or remove a file that the "
        "options did not ask for"
    )
    def test_shutdown_leaves_nothing(
        self, tmp_path: Path, weights: LocalWeights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No thread, descriptor or memory is left, and no file but where the options say."""
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
        settings = self._settings(CHUNKED, tmp_path / "kept")

        def live() -> None:
            bed = self._bed(settings, weights, tmp_path / "kept")
            try:
                for prompt in some_prompts(2):
                    bed.load(prompt)
                    bed.produce(prompt)
                request = bed.submit_to_consumer(some_prompts(1)[0], None)
                bed.step()
                bed.consumer.scheduler.abort(request)
                bed.submit_to_producer(some_prompts(1, seed=1)[0])
                bed.step()
            finally:
                bed.close()

        # A process may create resources once and keep them, such as a pool of threads.
        live()
        leftovers = Leftovers()
        live()
        live()
        leftovers.check(self.ends_within_s)
        files = os.listdir(elsewhere)  # noqa: PTH208 - names are enough
        assert files == [], "files are left that the options did not ask for"

    # -- many requests

    @usually(
        "a call of the scheduler's side waits for a store, a peer or a lock, or reads blocks: "
        "all requests wait meanwhile. Answer (None, False) in a look-up, and find out on a thread"
    )
    def test_scheduler_side_does_not_wait(self, bed: ConnectorTestBed) -> None:
        """Half of the calls of each method take less than `CALL_S`."""
        slow = ""
        # Again: a machine may be busy for a while, and a call that waits does so each time.
        for number in range(3):
            for instance in bed.instances:
                instance.scheduler_side.seconds.clear()
            bed.side_by_side(some_prompts(8, seed=number))
            slow = ", ".join(map(_slow_calls, bed.instances)).strip(", ")
            if not slow:
                break
        assert not slow, f"on the thread that plans the steps {slow}"

    @usually(
        "request_finished() leaves something of the request: an entry in a dictionary or set, a "
        "copy, a thread, a descriptor or a file"
    )
    @pytest.mark.parametrize("number", [FEW, MANY])
    def test_ended_requests_leave_nothing(self, bed: ConnectorTestBed, number: int) -> None:
        """The sides are as large as before after many requests. 1,000 need `is_long`."""
        if number == MANY:
            self.skip_unless_long()
        prompts = some_prompts(8)
        for _ in range(2):
            bed.side_by_side(prompts)
        # A pool may grow once, also to its end; what is kept of requests grows each time.
        for _ in range(3):
            before = _held_by(bed)
            for _ in range(number // len(prompts)):
                bed.side_by_side(prompts)
            if not _grown(before, _held_by(bed), number // 2):
                return
        deadline = Deadline(self.deadline_s)
        while more := _grown(before, _held_by(bed), number // 2):
            # Leases and threads may end a while later.
            assert not deadline.expired, f"after {number} requests that have ended: {more}"
            bed.step()
            for side in bed.sides:
                side.get_stats()

    @usually(
        "a server is bound to all interfaces, or to this machine's address, by default: bind it to "
        "127.0.0.1 or to a Unix socket, and have an option for another address"
    )
    def test_only_this_host_reaches_it(self, make_bed: MakeBed) -> None:
        """No socket listens beyond loopback, unless the options name its address."""
        before = reachable()
        bed = make_bed()
        bed.load(some_prompts(1)[0])
        check_this_host_only(reachable() - before, bed.consumer.config.options)

    # -- a store that fails

    @usually("an error of the store is raised by a call: what is not stored or not read is a miss")
    @pytest.mark.parametrize("fault", FAULTS_OF_FOLDERS)
    def test_store_that_fails_is_a_miss(self, bed: ConnectorTestBed, fault: str) -> None:
        """Requests are answered while nothing can be written, or nothing read. Needs files."""
        kept, new = some_prompts(2)
        bed.load(kept)
        if not any(path.is_file() for path in bed.folder.rglob("*")):
            self.skip_not_tested(NO_FILES)
        with FAULTS_OF_FOLDERS[fault](bed.folder) as reason:
            if reason:
                self.skip_not_tested(f"a store that is {fault}: {reason}")
            for prompt in (new, kept, new):
                bed.transfer(prompt)
        for prompt in (new, kept):
            bed.transfer(prompt)
        bed.drain()

    # -- sides in processes of their own

    @usually(
        "the sides share an object, a module's variable or a path in this process, and not "
        "only metadata"
    )
    def test_ranks_in_processes(self, start: Callable[..., Instance]) -> None:
        """Scheduler and ranks share nothing but metadata."""
        producer = start("producer", 2)
        consumer = start("consumer", 2) if self._has_consumer() else producer
        # The second was saved after the first was looked up.
        for number, prompt in enumerate(some_prompts(2), start=1):
            params = self._produce(producer, prompt)
            # What is saved behind the steps may be found later.
            for _ in range(1 if self.kind == "transfer" else 3):
                consumer.forget_cache()
                answer = consumer.ask(prompt, NUM_NEW_TOKENS, params, self.deadline_s)
                _check_answer(prompt, answer)
                if loaded := answer.counts.get("tokens_loaded", 0):
                    break
            assert loaded, f"of prompt {number} nothing was loaded from another process"

    @usually(
        "a connection is waited for without a deadline, or that a lost one raises instead of "
        "naming blocks"
    )
    def test_killed_producer_is_a_miss(self, start: Callable[..., Instance]) -> None:
        """Blocks that ended with the producer are a miss, without a long wait (FAULTS 27)."""
        if not self._has_consumer():
            pytest.skip("no instance loads what another one has saved")
        producer, consumer = start("producer", 1), start("consumer", 1)
        prompts = some_prompts(2)
        params = [self._produce(producer, prompt) for prompt in prompts]
        # The consumer is connected for the first request, and only has parameters of the second.
        answer = consumer.ask(prompts[0], NUM_NEW_TOKENS, params[0], self.deadline_s)
        assert answer.counts.get("tokens_loaded"), "nothing was loaded while the producer lived"
        producer.kill()
        consumer.forget_cache()
        for prompt, each in zip(prompts, params, strict=True):
            _check_answer(prompt, consumer.ask(prompt, NUM_NEW_TOKENS, each, self.deadline_s))

    @usually(
        "names consist of what is equal for other weights, such as request ids; use the token "
        "ids or block hashes of the request"
    )
    def test_instances_with_other_weights_share_nothing(
        self, start: Callable[..., Instance]
    ) -> None:
        """Instances share blocks of one store only with equal weights, in both orders."""
        one, other = start("one", 1), start("other", 1, 1)
        instances = [(one, other), (other, one)]
        instances += [(one, start("equal", 1))] if self._has_consumer() else []
        for number, (producer, consumer) in enumerate(instances):
            prompt = some_prompts(1, seed=number)[0]
            params = self._produce(producer, prompt)
            answer = consumer.ask(prompt, NUM_NEW_TOKENS, params, self.deadline_s)
            _check_answer(prompt, answer, consumer.config.seed)
            is_equal = producer.config.seed == consumer.config.seed
            loaded = answer.counts.get("tokens_loaded", 0)
            what = "equal" if is_equal else "other"
            assert bool(loaded) == is_equal, (
                f"{loaded} tokens were loaded by an instance with {what} weights"
            )

    def _produce(self, producer: Instance, prompt: list[int]) -> dict[str, Any] | None:
        """Serve a prompt in the producer's process, and return the consumer's parameters."""
        transfers = self.kind == "transfer"
        params = dict(self.prefill_params) if transfers else None
        answer = producer.ask(prompt, 1 if transfers else NUM_NEW_TOKENS, params, self.deadline_s)
        _check_answer(prompt, answer, producer.config.seed)
        if not transfers:
            # A store may be filled beside the steps: its blocks arrive after the answer.
            time.sleep(_STORE_S)
        return answer.kv_transfer_params


# -- the test bed


class Call(NamedTuple):
    """One call of a connector that has returned."""

    name: str
    args: tuple[Any, ...]
    result: Any


class RecordedSide:
    """One side of a connector whose calls are recorded, and may be replaced.

    Args:
        side: The side.
        name: ``S``, or ``W`` and the rank.
    """

    def __init__(self, side: Any, name: str) -> None:
        self.side = side
        self.name = name
        self.calls: list[Call] = []
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """By method: the time of each call."""
        self.before: list[Callable[[RecordedSide, str], None]] = []
        """Called before each call with this object and the method's name."""
        self.instead: dict[str, Callable[..., Any]] = {}
        """By method: called with the side's own method and its arguments."""

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.side, name)
        return partial(self._call, name, own) if callable(own) else own

    def results(self, name: str) -> list[Any]:
        """Return the results of one method, in order."""
        return [call.result for call in self.calls if call.name == name]

    def _call(self, name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for notify in list(self.before):
            notify(self, name)
        replacement, began = self.instead.get(name), time.perf_counter()
        result = own(*args, **kwargs) if replacement is None else replacement(own, *args, **kwargs)
        self.seconds[name].append(time.perf_counter() - began)
        self.calls.append(Call(name, args, result))
        return result


class RecordedInstance(MiniEngine):
    """A serving instance in this process with the connector that is tested.

    Args:
        config: Its configuration.
        weights: Weights of its model.
        hash_function: Hash of its own prefix cache; None: the default.
    """

    executor: LocalExecutor

    def __init__(
        self,
        config: EngineConfig,
        weights: LocalWeights,
        hash_function: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.config = config
        self._weights = weights

        def make_worker(group: Communicator | None) -> Worker:
            rank = group.rank if group else 0
            own = config.make_connector(KVConnectorRole.WORKER, rank)
            side: Any = RecordedSide(own, f"W{rank}")
            return Worker(config, weights.new_model(config.model), side, group)

        executor = LocalExecutor.make(config.num_ranks, make_worker)
        self.workers: list[Any] = [worker.connector for worker in executor.workers]
        """Worker sides of the connector, by rank."""
        self.caches = [worker.cache for worker in executor.workers]
        """Paged caches, by rank."""
        side: Any = RecordedSide(config.make_connector(KVConnectorRole.SCHEDULER), "S")
        self.scheduler_side: RecordedSide = side
        """Scheduler side of the connector."""
        super().__init__(Scheduler(config, side, hash_function), executor)

    @property
    def sides(self) -> list[RecordedSide]:
        """Sides of the connector: of the scheduler, and of every rank."""
        return [self.scheduler_side, *self.workers]

    @property
    def num_used(self) -> int:
        """Blocks of the cache that are not free."""
        return self.scheduler.pool.num_blocks - self.scheduler.pool.num_free

    def clear_cache(self) -> None:
        """Empty the instance's own prefix cache, and overwrite all free blocks."""
        pool = self.scheduler.pool
        pool.reset()
        free = pool.allocate(pool.num_free) or []
        self.overwrite(free)
        pool.release(free)

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks of all ranks."""
        for cache in self.caches:
            for layer in cache.layers:
                layer[list(blocks)] = 7.0

    def check(self, request: Request) -> None:
        """Compare the output of an ended request, and its KV cache, with the reference output.

        Its blocks must not have been reused: no other request was served since.
        """
        known, windows = request.num_tokens - 1, self.config.model.windows
        for layer, pages in enumerate(self._reference(request).pages):
            group = self.config.model.group_of(layer)
            # Of a window the blocks are compared that it has not passed.
            first = request.block_tables[group].count(None) * self.config.cache.block_size
            table = torch.tensor(block_numbers(request.block_tables)[group])
            got = [cache.read(layer, table, known, known) for cache in self.caches]
            where = f" (KV cache group {group}, window {windows[group]})" * self.config.is_hybrid
            assert torch.cat(got, dim=1)[:, :, first:].equal(pages[:, :, first:]), (
                f"layer {layer}{where} has other keys or values"
            )
        self.check_output(request)

    def check_output(self, request: Request) -> None:
        """Compare the output of an ended request with the reference output."""
        expected = self._reference(request).output
        assert request.output == expected, (
            f"other tokens than the reference: {request.output}, not {expected}"
        )

    def _reference(self, request: Request) -> Reference:
        assert request.state == "finished", f"{request.state}: {request.error}"
        prompt, num_new = request.prompt_token_ids, request.max_new_tokens
        return reference_output(prompt, num_new, self._weights.seed, self.config.model)

    # -- recorded calls

    def received(self) -> list[Counter[str]]:
        """Return how often each rank has reported each request as received."""
        return [
            Counter(each for _, names in side.results("get_finished") for each in names or ())
            for side in self.workers
        ]

    def reported(self) -> set[str]:
        """Return all requests that any rank has reported as sent or received."""
        pairs = [pair for side in self.workers for pair in side.results("get_finished")]
        return {each for pair in pairs for names in pair for each in names or ()}

    def loads(self) -> Counter[str]:
        """Return how often each request was to be loaded beyond its step."""
        is_async, loads = {}, Counter[str]()
        for call in self.scheduler_side.calls:
            if call.name == "get_num_new_matched_tokens":
                is_async[call.args[0].request_id] = call.result[1]
            elif call.name == "update_state_after_alloc" and call.args[2]:
                request_id = call.args[0].request_id
                loads[request_id] += is_async[request_id]
        return +loads

    def loaded(self) -> set[str]:
        """Return all requests of which something was to be loaded."""
        calls = [c for c in self.scheduler_side.calls if c.name == "update_state_after_alloc"]
        return {call.args[0].request_id for call in calls if call.args[2]}

    def load_errors(self) -> set[int]:
        """Return all blocks that any rank has reported as not loaded."""
        return {
            block
            for side in self.workers
            for blocks in side.results("get_block_ids_with_load_errors")
            for block in blocks
        }

    def check_errors_in_time(self) -> None:
        """Fail if a rank reports blocks in a later step than their request's load."""
        for side in self.workers:
            is_received = is_over = False
            for call in side.calls:
                if call.name == "get_finished":
                    is_received |= bool(call.result[1])
                elif call.name == "clear_connector_metadata":
                    is_over = is_received
                elif call.name == "get_block_ids_with_load_errors":
                    assert not (is_over and call.result), "blocks were reported after their request"


class ConnectorTestBed:
    """An instance that produces KV cache, and one that consumes it; they may be the same.

    Args:
        producer: Saves or sends KV cache.
        consumer: Loads it.
        weights: Weights of both.
        folder: The folder that the connector's options were made with.
        prefill_params: ``kv_transfer_params`` of a request whose KV cache another instance
            consumes; None: the connector is a store, and requests have none.
        deadline_s: Bound on every wait, in seconds.
        saved_block_size: Tokens of a block that the connector saves.
    """

    def __init__(
        self,
        producer: RecordedInstance,
        consumer: RecordedInstance,
        weights: LocalWeights,
        *,
        folder: Path,
        prefill_params: dict[str, Any] | None,
        deadline_s: float,
        saved_block_size: int = BLOCK_SIZE,
    ) -> None:
        self.producer = producer
        self.consumer = consumer
        self.weights = weights
        self.folder = folder
        self.prefill_params = prefill_params
        self.deadline_s = deadline_s
        self.saved_block_size = saved_block_size

    @property
    def instances(self) -> list[RecordedInstance]:
        """The instances."""
        return [self.producer] if self.producer is self.consumer else [self.producer, self.consumer]

    @property
    def sides(self) -> list[RecordedSide]:
        """Sides of the connector in all instances."""
        return [side for instance in self.instances for side in instance.sides]

    @property
    def num_loaded(self) -> int:
        """Tokens that the consumer has loaded."""
        return self.consumer.counts["tokens_loaded"]

    def transfer(self, prompt: list[int], expected: int = 0) -> Request:
        """Produce and consume the KV cache of a prompt, and return the consumer's request.

        Args:
            prompt: The prompt.
            expected: See `consume`.
        """
        return self.consume(prompt, self.produce(prompt), expected)

    def produce(self, prompt: list[int]) -> dict[str, Any] | None:
        """Serve a prompt on the producer, check it, and return the consumer's parameters."""
        request = self.submit_to_producer(prompt)
        self.run(request)
        self.producer.check(request)
        return self.params_of(request)

    def consume(
        self, prompt: list[int], params: dict[str, Any] | None = None, expected: int = 0
    ) -> Request:
        """Serve a prompt on the consumer, and check it.

        The prefix cache of each instance is emptied first, as if others had taken its free blocks.

        Args:
            prompt: The prompt.
            params: The request's ``kv_transfer_params``.
            expected: Tokens that have been saved, perhaps behind the steps. The look-up is repeated
                until it finds them, for half of `deadline_s`. No step computes the prompt
                meanwhile, which would save what the connector has failed to save.
        """
        for instance in self.instances:
            instance.clear_cache()
        with self.loading(expected):
            request = self.submit_to_consumer(prompt, params)
            self.run(request)
        self.consumer.check(request)
        return request

    def load(self, prompt: list[int]) -> Request:
        """Transfer a prompt, and fail if nothing of it was loaded."""
        before = self.num_loaded
        request = self.transfer(prompt, expected=1)
        assert self.num_loaded > before, "nothing of a prompt that was saved was loaded"
        return request

    def side_by_side(self, prompts: list[list[int]]) -> None:
        """Produce, then consume several prompts at a time."""
        produced = [self.submit_to_producer(prompt) for prompt in prompts]
        self.run(*produced)
        for instance in self.instances:
            instance.clear_cache()
        for request in self.consume_side_by_side(produced):
            self.consumer.check_output(request)

    def consume_side_by_side(
        self, produced: list[Request], num_new: int = NUM_NEW_TOKENS
    ) -> list[Request]:
        """Consume at a time, unchecked, what was produced; return the consumer's requests."""
        with self.loading():
            consumed = [
                self.submit_to_consumer(each.prompt_token_ids, self.params_of(each), num_new)
                for each in produced
            ]
            self.run(*consumed)
        return consumed

    @contextlib.contextmanager
    def loading(self, expected: int | None = None) -> Iterator[None]:
        """Repeat the look-ups of the consumer until they find what was saved.

        They are repeated for half of `deadline_s`: the other half is for serving the requests.

        Args:
            expected: Tokens, for all requests; None: all that can be loaded of each prompt, which
                has to be found of one of them.
        """
        deadline, found_all = Deadline(self.deadline_s / 2), set[str]()

        def repeat(own: Any, request: Request, num_computed: int) -> Any:
            found, is_async = own(request, num_computed)
            most = self.most(request.prompt_token_ids) if expected is None else expected
            if found is not None and num_computed + found >= most:
                found_all.add(request.request_id)
            # Once only: a transfer may have ended when its request is resumed.
            if found is None or request.request_id in found_all or deadline.expired:
                return found, is_async
            # "Ask again", as of a connector that does not know yet.
            return None, False

        instead = self.consumer.scheduler_side.instead
        if expected != 0:
            instead["get_num_new_matched_tokens"] = repeat
        yield
        if expected != 0:
            del instead["get_num_new_matched_tokens"]
        if expected is None:
            assert found_all, "no look-up of a prompt that was saved has found all of it"

    def most(self, prompt: Sequence[int]) -> int:
        """Return the tokens of a prompt that can be loaded: whole blocks before the last token."""
        size = max(self.saved_block_size, self.consumer.config.cache.block_size)
        return (len(prompt) - 1) // size * size

    def look_up(self, prompt: list[int], params: dict[str, Any] | None = None) -> Request:
        """Submit a prompt to the consumer, whose look-up has found it all, and is asked again."""
        deadline, answers = Deadline(self.deadline_s / 2), [0]

        def postpone(own: Any, request: Request, num_computed: int) -> Any:
            found, _ = own(request, num_computed)
            answers.append(num_computed + found if found else 0)
            return None, False

        self.consumer.scheduler_side.instead["get_num_new_matched_tokens"] = postpone
        request = self.submit_to_consumer(prompt, params)
        while answers[-1] < self.most(prompt):
            assert not deadline.expired, (
                f"the look-up finds {answers[-1]} tokens of a prompt that was saved, and "
                f"{self.most(prompt)} can be loaded"
            )
            self.step()
        return request

    def end_look_up(self, request: Request) -> None:
        """Abort the request of `look_up`."""
        self.consumer.scheduler.abort(request)
        del self.consumer.scheduler_side.instead["get_num_new_matched_tokens"]

    def await_saves(self, prompt: list[int]) -> None:
        """Wait until a look-up in a store finds all of a prompt, without loading any of it."""
        if self.prefill_params is not None:
            return
        for instance in self.instances:
            instance.clear_cache()
        request = self.look_up(prompt)
        self.end_look_up(request)
        self.run(request)

    def check_gain(
        self, prompt: list[int], can_be: int, params: dict[str, Any] | None = None
    ) -> None:
        """Consume a prompt, and compare the tokens loaded with those that can be."""
        can_be -= can_be % self.saved_block_size
        before = self.num_loaded
        self.consume(prompt, params, can_be)
        loaded = self.num_loaded - before
        also = ", also the last one," if loaded >= len(prompt) else ","
        assert loaded == can_be, (
            f"of a prompt of {len(prompt)} tokens {loaded} were loaded{also} and {can_be} can be"
        )

    def check_gains(self, prompt: list[int], params: dict[str, Any] | None = None) -> None:
        """Check the gain of a prompt and, in a store, of each of its block-aligned prefixes."""
        most = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.check_gain(prompt, most, params)
        for end in range(BLOCK_SIZE, most, BLOCK_SIZE) if self.prefill_params is None else ():
            self.check_gain(prompt[: end + 1], end)

    def submit_to_producer(self, prompt: list[int]) -> Request:
        """Submit a prompt to the producer."""
        if self.prefill_params is None:
            return self.producer.submit(prompt, NUM_NEW_TOKENS)
        return self.producer.submit(prompt, 1, dict(self.prefill_params))

    def submit_to_consumer(
        self, prompt: list[int], params: dict[str, Any] | None, num_new: int = NUM_NEW_TOKENS
    ) -> Request:
        """Submit a prompt to the consumer."""
        return self.consumer.submit(prompt, num_new, params)

    def run(self, *requests: Request) -> None:
        """Step all instances until requests have ended, and a store has nothing left to do."""
        deadline = Deadline(self.deadline_s)
        while not all(request.state in OVER for request in requests):
            self.step()
            deadline.check("requests of this test")
        # The connector learns of the end of requests in the steps that follow.
        self.step()
        self.step()
        # A transfer may hold blocks for a consumer that is yet to come.
        while self.prefill_params is None and any(
            instance.scheduler.is_busy for instance in self.instances
        ):
            self.step()
            deadline.check("work after the requests of this test")

    def step(self) -> None:
        """Run a step on every instance."""
        for instance in self.instances:
            instance.step()

    def drain(self) -> None:
        """Step all instances until all blocks are free and the connector has nothing to do."""
        deadline = Deadline(self.deadline_s)
        while any(each.num_used or each.scheduler.is_busy for each in self.instances):
            used = [each.num_used for each in self.instances]
            assert not deadline.expired, f"after {self.deadline_s:g} s blocks in use: {used}"
            self.step()

    def params_of(self, request: Request) -> dict[str, Any] | None:
        """Return the consumer's parameters as a router passes them on: through JSON."""
        if self.prefill_params is None:
            return None
        params: dict[str, Any] = msgspec.json.decode(
            msgspec.json.encode(request.kv_transfer_params)
        )
        return params

    def close(self) -> None:
        """Close the instances."""
        for instance in self.instances:
            instance.close()


# -- processes


def _check_answer(prompt: list[int], answer: Answer, seed: int = 0) -> None:
    assert answer.state == "finished", answer.error
    expected = reference_output(prompt, len(answer.tokens), seed, SIX_HEADS).output
    assert answer.tokens == expected, (
        f"other tokens than the reference: {answer.tokens}, not {expected}"
    )


# -- what is held, and for how long


def _slow_calls(instance: RecordedInstance) -> str:
    """Name the methods of the scheduler's side of which half of the calls take long, or none."""
    slow = []
    for method, seconds in instance.scheduler_side.seconds.items():
        took = sorted(seconds)[len(seconds) // 2]
        if took > CALL_S:
            slow.append(f"half of {len(seconds)} calls of {method}() took {took * 1000:.0f} ms")
    return " and ".join(slow)


def _held_by(bed: ConnectorTestBed) -> Counter[str]:
    """Count what the sides keep, and the threads, descriptors and files of this process."""
    gc.collect()
    for side in bed.sides:
        side.calls.clear()
    held = num_kept(*(side.side for side in bed.sides))
    for name in {cls.__module__ for side in bed.sides for cls in _classes_of(side.side)}:
        for value in vars(sys.modules[name]).values() if name in sys.modules else ():
            if isinstance(value, dict | list | set):
                held[f"module {name}"] += len(value)
            elif hasattr(value, "cache_info"):
                held[f"module {name}"] += value.cache_info().currsize
    held["threads"] = threading.active_count()
    held["descriptors"] = len(list(descriptors()))
    held["files"] = sum(path.is_file() for path in bed.folder.rglob("*"))
    return held


def _classes_of(connector: Any) -> Iterator[type]:
    """Yield the classes of a connector, and of its two sides."""
    named = (getattr(connector, name, None) for name in ("scheduler_cls", "worker_cls"))
    for cls in (type(connector), *named):
        yield from cls.__mro__ if isinstance(cls, type) else ()


def _grown(before: Counter[str], after: Counter[str], most: int) -> str:
    """Say what has grown by more than a number; empty: nothing."""
    grown = {name: number - before[name] for name, number in after.items()}
    more = {name: number for name, number in grown.items() if number > most}
    return ", ".join(f"{number} more entries of {name}" for name, number in more.items())


# -- metadata


def _settled(metadata: Any) -> Any:
    """Return metadata in a form that can be compared: sets and dictionaries are sorted."""
    return _sorted_sets(serialize(metadata))


def _sorted_sets(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _sorted_sets(each) for name, each in plain.items()}
    if not isinstance(plain, list):
        return plain
    kind, *rest = map(_sorted_sets, plain)
    return [kind, *(sorted(rest, key=repr) if kind in ("set", "frozenset", "dict") else rest)]


def _without_numbers(settled: Any) -> Any:
    """Return metadata with all numbers as 0, as steps may be counted."""
    if isinstance(settled, dict):
        return {name: _without_numbers(each) for name, each in settled.items()}
    if isinstance(settled, list):
        return [_without_numbers(each) for each in settled]
    return 0 if type(settled) is int else settled


# -- steps that are not executed


def _planned(bed: ConnectorTestBed) -> tuple[Request, Any]:
    """Return a request on the producer, and the plan of the step that computes it."""
    # An instance knows its weights after the first step.
    bed.step()
    request = bed.submit_to_producer(some_prompts(1)[0])
    plan = _plan_of(bed, bed.producer, request)
    assert plan.spans
    return request, plan


def _plan_of(bed: ConnectorTestBed, instance: Any, request: Request) -> Any:
    """Step until a plan gives blocks to a request: a connector may answer "ask again" before."""
    deadline = Deadline(bed.deadline_s)
    while True:
        plan = instance.scheduler.plan()
        if request.block_ids:
            return plan
        instance.execute(plan)
        deadline.check("blocks for a request")


def _check_not_saved(bed: ConnectorTestBed, request: Request, plan: Any) -> None:
    """Run a step that is not executed, abort its request, and find nothing of it."""
    producer, prompt = bed.producer, request.prompt_token_ids
    producer.overwrite(request.block_ids)
    results = producer.executor.step(plan)
    assert all(result.tokens is None for result in results)
    producer.overwrite(request.block_ids)
    producer.scheduler.update(plan, results)
    producer.scheduler.abort(request)
    bed.run(request)
    before = bed.num_loaded
    bed.consume(prompt, bed.params_of(request))
    assert bed.num_loaded == before, "blocks were loaded that must be a miss"
    bed.transfer(prompt)


# -- changes of weights


def _consume_under(
    bed: ConnectorTestBed, prompt: list[int], params: dict[str, object] | None, *seeds: int
) -> None:
    """Consume a prompt under several weights, one after the other."""
    for seed in seeds:
        if seed != bed.weights.seed:
            bed.weights.change(seed)
        # A scheduler that does not know of a change yet has no hits for the first request.
        bed.step()
        bed.consume(prompt, params)


def _moments(bed: ConnectorTestBed) -> list[Moment]:
    """Return all calls while one prompt is produced and consumed: phase, side, method, number."""
    # Peers are met, and a load is awaited, before the calls are counted.
    bed.load(some_prompts(1, seed=1)[0])
    met: list[Moment] = []
    before = bed.num_loaded
    _transfer_and_notify(bed, some_prompts(1)[0], met.append)
    assert bed.num_loaded > before, "nothing was loaded in the transfer whose calls were counted"
    return met


def _change_at(bed: ConnectorTestBed, moment: Moment, seeds: tuple[int, ...], number: int) -> bool:
    """Change the weights before one call, and check the blocks saved around it.

    Returns:
        Whether there was such a call.
    """
    if bed.weights.seed:
        bed.weights.change(0)
    prompt = some_prompts(1, seed=1000 + number)[0]
    met: list[Moment] = []

    def change(now: Moment) -> None:
        if now == moment:
            bed.weights.change(*seeds)
            met.append(now)

    params = _transfer_and_notify(bed, prompt, change)
    # After a change there and back, saved blocks are of the present weights, or wrong.
    _consume_under(bed, prompt, params, *dict.fromkeys((seeds[-1], 0)))
    return bool(met)


def _transfer_and_notify(
    bed: ConnectorTestBed, prompt: list[int], notify: Callable[[Moment], None]
) -> dict[str, object] | None:
    """Produce and consume a prompt unchecked, with a notice before each call of the busy instance.

    Returns:
        The consumer's parameters.
    """
    counted: Counter[tuple[str, str, str]] = Counter()
    phase, busy = "producing", bed.producer

    def before(where: int, side: RecordedSide, method: str) -> None:
        if method in QUERIES or bed.instances[where] is not busy:
            return
        kind = phase, f"{where} {side.name}", method
        counted[kind] += 1
        notify((*kind, counted[kind]))

    for where, instance in enumerate(bed.instances):
        for side in instance.sides:
            side.before.append(functools.partial(before, where))
    request = bed.submit_to_producer(prompt)
    bed.run(request)
    params = bed.params_of(request)
    phase, busy = "consuming", bed.consumer
    bed.consumer.clear_cache()
    bed.run(bed.submit_to_consumer(prompt, params))
    for side in bed.sides:
        side.before.clear()
    return params
