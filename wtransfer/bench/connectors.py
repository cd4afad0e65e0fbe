"""``bench connectors``: KV cache from prefill to decode, and what it costs the scheduler.

Each row is measured by the function ``measure_...`` of its kind; below them stand the functions
that the processes of their cases run. Prefill and decode take turns, so that neither disturbs what
the other one measures: one saves, between two plain copies; then the other loads, between two plain
copies, and compares every byte. Both are serving engines of `wtransfer.testing.mini_engine`, with a
model that writes known bytes in place of keys and values.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import distributed as dist

from wtransfer import KVConnectorRole
from wtransfer.bench.harness import (
    BESIDE_NBYTES,
    MEMORY_FOLDER,
    MIB,
    Result,
    Row,
    Spread,
    format_nbytes,
)
from wtransfer.bench.offload import (
    NUM_LAYERS,
    PlainCopies,
    compare_copies,
    goal_of_copies,
    slots_nbytes,
)
from wtransfer.deadline import Deadline
from wtransfer.errors import DigestMismatchError, IncompleteUpdateError
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits, ModelShape
from wtransfer.testing.mini_engine.engine import LocalExecutor, MiniEngine
from wtransfer.testing.mini_engine.scheduler import Scheduler
from wtransfer.testing.mini_engine.worker import Worker
from wtransfer.weight_version import process_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wtransfer.bench.harness import Runner, Setup
    from wtransfer.testing.mini_engine.cache import PagedCache
    from wtransfer.testing.mini_engine.contract import Request, Span

_BLOCK_SIZE = 16  # tokens of a block
# The least block has a head of one number: a key and a value, of 4 bytes, for each token and layer.
_UNIT_NBYTES = 2 * 4 * _BLOCK_SIZE * NUM_LAYERS
# Longest wait for a load, and for blocks to be free again.
_PATIENCE_S = 300.0
# Short beside a load.
_POLL_S = 0.0002
_LOOKUP = "get_num_new_matched_tokens"


class Kind(NamedTuple):
    """A built-in connector."""

    short: str
    """In the names of its rows."""
    connector: str
    """In ``kv_connector``."""
    way: str
    """How blocks come from one instance to the next, in words."""
    is_files: bool = False
    """Whether blocks are kept in a folder."""
    note: str = ""
    """Note without which its rows cannot be read."""


KINDS = (
    Kind("shm", "SharedMemoryConnector", "the other process's shelf, mapped, two threads"),
    Kind(
        "process-group",
        "ProcessGroupConnector",
        "gloo, TCP on loopback",
        note="sent and received by the kernel: two copies more, and a third into the cache",
    ),
    Kind("storage", "SharedStorageConnector", "files", is_files=True),
    Kind("offloading", "OffloadingConnector", "an arena of the instance's own"),
)
"""The built-in connectors; the first three bring blocks from one process to another."""
GOALS = {
    ("shm", "load"): {2 * MIB: 0.85},
    ("shm", "save"): {2 * MIB: 0.85},
    ("storage", "load"): {2 * MIB: 0.6, 128 << 10: 0.15},
}
"""Kind and direction -> bytes of a block -> least ratio."""


@dataclass(frozen=True)
class Settings:
    """Sizes and numbers; the defaults are those that the goals are for."""

    block_nbytes: tuple[int, ...] = (2 * MIB, 128 << 10)
    """Bytes of a block, of all its 32 layers."""
    nbytes: int = 256 * MIB
    """Bytes that one round saves and loads."""
    num_planned: int = 2000
    """Blocks of the request that schedulers are asked about."""
    folder: str | None = None
    """Where files are kept meanwhile; None: in memory."""
    num_rounds: int = 7
    """Rounds that count."""

    def __post_init__(self) -> None:
        for nbytes in self.block_nbytes:
            if nbytes % _UNIT_NBYTES or not _UNIT_NBYTES <= nbytes <= self.nbytes:
                raise ValueError(
                    f"blocks of {nbytes} bytes: expected a multiple of {_UNIT_NBYTES}, a number of "
                    f"4 bytes for key and value of each of {_BLOCK_SIZE} tokens and {NUM_LAYERS} "
                    f"layers, and at most the {self.nbytes} of a round"
                )

    @classmethod
    def quick(cls) -> Settings:
        """Return small sizes, with which every row is filled and no number means much."""
        return cls(nbytes=16 * MIB, num_planned=200, num_rounds=3)

    @property
    def needed_nbytes(self) -> int:
        """Memory that a run takes.

        On either side a cache and the two memories of plain copies; between them a connector's
        memory, or a file in memory for every round. Slots of the smallest blocks are twice as
        large.
        """
        return BESIDE_NBYTES + (7 + self.num_rounds) * self.nbytes


# -- rows ------------------------------------------------------------------------------------------


def rows(settings: Settings) -> Iterator[Row]:
    """Yield all rows, in order."""
    spans = {
        "load": "start_load_kv until it says that all is there",
        "save": "the first save_kv_layer until wait_for_save returns",
    }
    for kind in KINDS[:3]:
        for block_nbytes in settings.block_nbytes:
            for direction, span in spans.items():
                size = format_nbytes(block_nbytes)
                yield Row(
                    f"{direction}-{kind.short}-{size.replace(' ', '')}",
                    f"memcpy / ({span}), {kind.connector} ({kind.way}), blocks of {size}, checked; "
                    "memcpy: the same blocks, each in one piece, on one thread",
                    partial(measure_load_and_save, settings, kind, block_nbytes, direction),
                )
    for kind in KINDS:
        yield Row(
            f"plan-{kind.short}",
            f"{kind.connector}, scheduler's side, per block: get_num_new_matched_tokens to "
            f"build_connector_meta, a request of {settings.num_planned:,} blocks, all found",
            partial(measure_plan, settings, kind),
        )


def measure_load_and_save(
    settings: Settings, kind: Kind, block_nbytes: int, direction: str, runner: Runner
) -> Result:
    num_blocks = settings.nbytes // block_nbytes
    found = runner.run(
        f"{kind.connector}, blocks of {format_nbytes(block_nbytes)}",
        *(decode, prefill, 1),
        connector=kind.connector,
        block_nbytes=block_nbytes,
        num_blocks=num_blocks,
        num_rounds=settings.num_rounds,
    ).trainer
    ours, memcpy = found[direction], found[f"{direction}_memcpy"]
    goals = GOALS.get((kind.short, direction), {})
    goal = goal_of_copies(goals, block_nbytes, settings.nbytes)
    result = compare_copies(memcpy, ours, num_blocks, goal)
    result.beside["best_by_best"] = min(memcpy) / min(ours)
    note = f"files in {settings.folder or MEMORY_FOLDER}" if kind.is_files else kind.note
    return replace(result, note=note)


def measure_plan(settings: Settings, kind: Kind, runner: Runner) -> Result:
    number = settings.num_planned
    seconds = runner.run(
        f"{kind.connector}, a request of {number:,} blocks",
        plan,
        connector=kind.connector,
        num_blocks=number,
        num_rounds=settings.num_rounds,
        # Blocks that were seen in the last half second are not looked for again.
        pause_s=0.55 if kind.is_files else 0.0,
    ).trainer
    each_us = Spread.of(each / number * 1e6 for each in seconds)
    return Result(each_us, "us", beside={"request_s": median(seconds)})


# -- what the processes run ------------------------------------------------------------------------


def prefill(
    setup: Setup, connector: str, block_nbytes: int, num_blocks: int, num_rounds: int
) -> None:
    """Compute and save, round after round; decode says when it has loaded."""
    channel, copies = _channel(setup), PlainCopies(num_blocks, block_nbytes)
    with Instance(setup, connector, "kv_producer", num_blocks, block_nbytes) as instance:
        for number in range(1 + num_rounds):
            before_s = copies.seconds()
            request = instance.serve(number, {"do_remote_decode": True})
            memcpy_s = min(before_s, copies.seconds())
            saved = {
                "params": request.kv_transfer_params,
                "save": instance.save_s,
                "save_memcpy": memcpy_s,
            }
            channel.set(f"saved-{number}", json.dumps(saved))
            channel.wait([f"loaded-{number}"])
            # Each round finds as much room as the first one.
            deadline = Deadline(_PATIENCE_S)
            while instance.worker.side.get_stats().get("leases"):
                deadline.check(f"the end of what {connector} keeps")
                time.sleep(0.005)


def decode(
    setup: Setup, connector: str, block_nbytes: int, num_blocks: int, num_rounds: int
) -> dict[str, list[float]]:
    """Load what prefill has computed; return the seconds of both sides' rounds.

    Raises:
        DigestMismatchError: Other bytes have come.
        IncompleteUpdateError: Some blocks were not found, or have not come.
    """
    channel, copies = _channel(setup), PlainCopies(num_blocks, block_nbytes)
    seconds: dict[str, list[float]] = defaultdict(list)
    with Instance(setup, connector, "kv_consumer", num_blocks, block_nbytes) as instance:
        for number in range(1 + num_rounds):
            saved = json.loads(channel.get(f"saved-{number}"))
            before_s = copies.seconds()
            request = instance.load(number, saved.pop("params"))
            memcpy_s = min(before_s, copies.seconds())
            instance.model.check(number, request.block_ids[:num_blocks])
            times = {**saved, "load": instance.load_s, "load_memcpy": memcpy_s}
            for name, value in times.items():
                seconds[name].append(value)
            channel.set(f"loaded-{number}", "")
    return {name: each[1:] for name, each in seconds.items()}


def plan(
    setup: Setup, connector: str, num_blocks: int, num_rounds: int, pause_s: float
) -> list[float]:
    """Return the seconds of the scheduler's side, from asking for a request to ordering its load.

    One instance computes the blocks, and asks about them as if it were the next one. What was found
    is loaded each time, so that the connector does not remember more and more.

    Args:
        setup: Of this process.
        connector: Name of the connector.
        num_blocks: Blocks of the request.
        num_rounds: Rounds that count.
        pause_s: Time before each round, for what the connector remembers that long.
    """
    # The scheduler's side does not see the bytes: as few as can be.
    with Instance(setup, connector, "kv_both", num_blocks, _UNIT_NBYTES) as instance:
        params = instance.serve(0, {"do_remote_decode": True}).kv_transfer_params
        seconds = []
        for _ in range(1 + num_rounds):
            time.sleep(pause_s)
            instance.load(0, params)
            seconds.append(sum(call.ended - call.began for call in instance.plan_calls))
    return seconds[1:]


def _channel(setup: Setup) -> Any:
    """Return by what two processes tell each other; the death of one ends the case."""
    store = dist.FileStore(str(Path(setup.folder, "channel")), 2)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=_PATIENCE_S))
    return store


class Call(NamedTuple):
    """One call of a connector."""

    name: str
    began: float
    ended: float
    result: Any


class TimedSide:
    """One side of a connector whose calls are recorded in `calls`."""

    def __init__(self, side: Any) -> None:
        self.side = side
        self.calls: list[Call] = []
        self._received: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.side, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == "get_finished" and self._received:
                return self._received.pop()
            began = time.perf_counter()
            result = own(*args, **kwargs)
            self.calls.append(Call(name, began, time.perf_counter(), result))
            return result

        return timed if callable(own) else own

    def wait_for_load(self, deadline: Deadline) -> None:
        """Ask until a load has ended; the engine gets the answer in its next step.

        Meanwhile it takes none: steps would take turns with the threads that copy.
        """
        sent: set[str] = set()
        while True:
            also_sent, received = self.get_finished(set())
            sent |= also_sent or set()
            if received:
                self._received.append((sent, received))
                return
            deadline.check("the load of a round")
            time.sleep(_POLL_S)

    def named(self, *names: str, since: float = 0.0) -> list[Call]:
        """Return the calls of these methods from a time on, in order."""
        return [call for call in self.calls if call.name in names and call.began >= since]


class StampModel:
    """Writes pages that tell the round, the block's place in it and the layer."""

    def __init__(self) -> None:
        self.words: list[Any] = []

    def use(self, cache: PagedCache) -> None:
        """Set the cache. All of it is written to, so that no page is touched first by a copy."""
        for layer in cache.layers:
            layer.fill_(-1.0)
        self.words = [layer.view(len(layer), -1).numpy().view(np.uint64) for layer in cache.layers]
        # Random, or a page whose words have changed places would pass for what it was.
        random = np.random.default_rng(0)
        self._base = random.integers(1 << 64, size=self.words[0].shape[1], dtype=np.uint64)

    def forward(
        self,
        spans: Sequence[Span],
        _cache: PagedCache,
        _tp: Any,
        before_layer: Callable[[int], None],
        after_layer: Callable[[int], None],
    ) -> list[int]:
        """Write the whole blocks of prompts that begin; then call the connector for every layer."""
        for span in spans:
            if not span.start:
                for mark, page in self._pages(span.tokens[0], span.block_ids[0][:-1]):
                    np.bitwise_xor(self._base, mark, out=page)
        for layer in range(NUM_LAYERS):
            before_layer(layer)
            after_layer(layer)
        return [0 for _ in spans]

    def check(self, number: int, block_ids: Sequence[int]) -> None:
        """Compare every byte with what a round has computed.

        Raises:
            DigestMismatchError: One differs.
        """
        for at, (mark, page) in enumerate(self._pages(number, block_ids)):
            if not np.array_equal(page, np.bitwise_xor(self._base, mark)):
                block, layer = divmod(at, NUM_LAYERS)
                raise DigestMismatchError(
                    f"round {number} of the bench brought other bytes than were computed: block "
                    f"{block} of {len(block_ids)}, layer {layer}"
                )

    def _pages(self, number: int, block_ids: Sequence[int]) -> Iterator[tuple[np.uint64, Any]]:
        marks = itertools.count(1 + number * len(block_ids) * NUM_LAYERS)
        for block in block_ids:
            for words in self.words:
                # Times an odd number: other marks give other words.
                yield np.uint64(next(marks) * 0x9E37_79B9_7F4A_7C15 & (1 << 64) - 1), words[block]


def options_of(setup: Setup, connector: str, num_blocks: int, block_nbytes: int) -> dict[str, Any]:
    """Return a connector's options, with room for the blocks of a round."""
    nbytes = slots_nbytes(num_blocks, block_nbytes)
    known: dict[str, dict[str, Any]] = {
        "SharedMemoryConnector": {"staging_bytes": nbytes},
        "ProcessGroupConnector": {"staging_bytes": nbytes, "token": setup.token},
        "SharedStorageConnector": {
            "shared_storage_path": str(Path(setup.folder, "kv")),
            # None gives way in some thirty rounds.
            "max_bytes": 32 * nbytes,
        },
        "OffloadingConnector": {"cpu_bytes_to_use": nbytes},
    }
    return known[connector]


class Instance(contextlib.ExitStack):
    """A serving engine with one request at a time. Use it as a context manager.

    Args:
        setup: Of this process.
        connector: Name of the connector.
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        num_blocks: Blocks of a request that are saved.
        block_nbytes: Bytes of a block, over all layers.
    """

    def __init__(
        self, setup: Setup, connector: str, role: str, num_blocks: int, block_nbytes: int
    ) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self._num_tokens = num_blocks * _BLOCK_SIZE
        self._random = np.random.default_rng(setup.rank)
        Path(setup.folder, "kv").mkdir(exist_ok=True)
        head_width = block_nbytes // _UNIT_NBYTES
        config = EngineConfig(
            ModelShape(NUM_LAYERS, head_width, num_heads=1, num_kv_heads=1),
            # One block more: nothing saves the block of the last token.
            CacheShape(_BLOCK_SIZE, num_blocks + 1),
            Limits(max_num_batched_tokens=self._num_tokens + 1),
            connector=connector,
            options=options_of(setup, connector, num_blocks, block_nbytes),
            role=role,
            engine_id=f"bench-{role}",
        )
        # All processes of the bench compute with the same weights, or no block would fit.
        self.callback(process_weights.hold("the bench's weights").close)
        self.model = StampModel()
        self.worker = TimedSide(config.make_connector(KVConnectorRole.WORKER))
        self._scheduler = TimedSide(config.make_connector(KVConnectorRole.SCHEDULER))
        worker = Worker(config, cast("Any", self.model), cast("Any", self.worker))
        self.model.use(worker.cache)
        scheduler = Scheduler(config, cast("Any", self._scheduler))
        self._engine = self.enter_context(MiniEngine(scheduler, LocalExecutor(worker)))
        # The scheduler learns the weights of its worker.
        self._engine.step()

    @property
    def save_s(self) -> float:
        """Seconds of saving the last request."""
        (end,) = self.worker.named("wait_for_save")
        return end.ended - self.worker.named("save_kv_layer")[0].began

    @property
    def plan_calls(self) -> list[Call]:
        """Calls of the scheduler's side for the last request, until its load was ordered."""
        allocated = self._scheduler.named("update_state_after_alloc")[0]
        ordered = self._scheduler.named("build_connector_meta", since=allocated.ended)[0]
        names = (_LOOKUP, "update_state_after_alloc", "build_connector_meta")
        return [call for call in self._scheduler.named(*names) if call.began <= ordered.began]

    @property
    def load_s(self) -> float:
        """Seconds of loading the last request."""
        (start, *_) = self.worker.named("start_load_kv", since=self.plan_calls[-1].ended)
        reports = [call for call in self.worker.named("get_finished") if call.result[1]]
        # Without a report it was loaded within the step.
        return (reports or [start])[0].ended - start.began

    def serve(self, number: int, params: Any, *, is_loaded: bool = False) -> Request:
        """Serve the prompt of a round, in blocks that are in another order than before.

        Args:
            number: Of the round; no two prompts begin alike.
            params: For the connector.
            is_loaded: Whether the connector brings its blocks.
        """
        pool = self._engine.scheduler.pool
        pool.reset()
        # In the order that a cache has after a while.
        free = pool.allocate(pool.num_free)
        assert free is not None
        pool.release(self._random.permutation(free).tolist())
        self.worker.calls.clear()
        self._scheduler.calls.clear()
        request = self._engine.submit([number, *range(self._num_tokens)], 1, params)
        self._engine.step()
        if is_loaded:
            deadline = Deadline(_PATIENCE_S)
            # None: the connector does not know yet.
            while (found := self._scheduler.named(_LOOKUP)[-1].result[0]) is None:
                deadline.check("the look-up of a round")
                self._engine.step()
            if found:
                self.worker.wait_for_load(deadline)
        self._engine.run(_PATIENCE_S)
        return request

    def load(self, number: int, params: Any) -> Request:
        """Serve the prompt of a round whose blocks the connector brings.

        Raises:
            IncompleteUpdateError: Some of its blocks are not found, or do not come.
        """
        before = self._engine.scheduler.counts["tokens_loaded"]
        request = self.serve(number, params, is_loaded=True)
        num_loaded = self._engine.scheduler.counts["tokens_loaded"] - before
        if num_loaded != self._num_tokens:
            stats = {**self._scheduler.side.get_stats(), **self.worker.side.get_stats()}
            raise IncompleteUpdateError(
                f"the bench's {type(self.worker.side).__name__} brought {num_loaded} of "
                f"{self._num_tokens} tokens: {stats}"
            )
        return request
