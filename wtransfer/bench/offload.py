"""``bench offload``: KV cache in host memory, its copies beside memcpy, its manager beside vLLM's.

``--tier NAME`` measures a tier instead (`wtransfer.bench.tiers`).

Each row is measured by the function ``measure_...`` of its kind; below them stand the functions
that the processes of their cases run.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import mmap
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wtransfer import OffloadingConfig, OffloadingSpecFactory
from wtransfer.bench.harness import BESIDE_NBYTES, MIB, Goal, Result, Row, Spread, format_nbytes
from wtransfer.errors import DigestMismatchError
from wtransfer.kv.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from wtransfer.kv.keys import fence_key, make_offload_key
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import GPULoadStoreSpec, LookupResult, ReqContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from wtransfer.bench.harness import Runner, Setup
    from wtransfer.kv.keys import OffloadKey

NUM_LAYERS = 32
"""Pages of a block; each layer is a tensor of its own."""
_POLL_S = 0.0002
NUM_KEYS = 16
"""Blocks of one request to a manager."""
GOALS = {2 * MIB: 0.9, 128 << 10: 0.6}
"""Bytes of a block -> least ratio of a plain copy and ours."""

OPERATIONS = {
    "lookup": "lookup",
    "store": "prepare_store + complete_store, room is free",
    "evict": "prepare_store + complete_store, others give way",
    "load": "prepare_load + complete_load",
}


@dataclass(frozen=True)
class Settings:
    """Sizes and numbers; the defaults are those that the goals are for."""

    block_nbytes: tuple[int, ...] = (2 * MIB, 128 << 10, 16 << 10)
    """Bytes of a block, of all its 32 layers."""
    nbytes: int = 256 * MIB
    """Bytes that one round copies."""
    num_blocks: int = 100_000
    """How many blocks managers have."""
    num_rounds: int = 7
    """Rounds that count."""
    tier: str | None = None
    """Name of the tier to measure; None: the arena."""
    tier_options: Mapping[str, Any] = field(default_factory=dict)
    """Its options."""

    def __post_init__(self) -> None:
        for nbytes in self.block_nbytes:
            if nbytes % NUM_LAYERS or nbytes > self.nbytes:
                raise ValueError(
                    f"blocks of {nbytes} bytes: expected a multiple of {NUM_LAYERS}, one for each "
                    f"layer, and at most the {self.nbytes} of a round"
                )

    @classmethod
    def quick(cls) -> Settings:
        """Return small sizes, with which every row is filled and no number means much."""
        return cls(nbytes=16 * MIB, num_blocks=2_000, num_rounds=3)

    @property
    def options_of_tier(self) -> dict[str, Any]:
        """Options that name the tier, and its own."""
        return {"tier": self.tier, **self.tier_options}

    @property
    def needed_nbytes(self) -> int:
        """Memory that a run takes: the cache, two arenas, and the plain copies."""
        return BESIDE_NBYTES + 5 * self.nbytes


def goal_of_copies(goals: Mapping[int, float], block_nbytes: int, nbytes: int) -> Goal | None:
    """Return the goal for copies of these blocks; None where there is none for such rounds.

    With fewer bytes, what is done once per round takes longer than the copies.

    Args:
        goals: Bytes of a block -> least ratio.
        block_nbytes: Bytes of a block.
        nbytes: Bytes of a round.
    """
    least = goals.get(block_nbytes) if nbytes >= 128 * MIB else None
    return None if least is None else Goal(">=", least)


def slots_nbytes(num_blocks: int, block_nbytes: int) -> int:
    """Return enough memory for blocks in slots that have headers and begin at whole pages."""
    page = mmap.PAGESIZE
    return num_blocks * (-(-block_nbytes // page) * page + page) + MIB


# -- rows ------------------------------------------------------------------------------------------


def rows(settings: Settings) -> Iterator[Row]:
    """Yield all rows, in order."""
    for suffix, proof in (("", "checksummed"), ("-unverified", "without checksums")):
        for block_nbytes in settings.block_nbytes:
            for direction, way in (("put", "cache to arena"), ("get", "arena to cache")):
                size = format_nbytes(block_nbytes)
                yield Row(
                    f"{direction}-{size.replace(' ', '')}{suffix}",
                    f"memcpy / ({way}, two threads), blocks of {size}, {proof}; memcpy: the same "
                    "blocks, each in one piece, on one thread",
                    partial(measure_put_and_get, settings, block_nbytes, direction, suffix),
                )
    for policy in ("lru", "arc"):
        for operation, what in OPERATIONS.items():
            yield Row(
                f"{operation}-{policy}",
                f"ours / vLLM's manager: {what}, per block, {policy}, {NUM_KEYS} blocks a call, "
                f"{settings.num_blocks:,} kept",
                partial(measure_lookup_store_evict_load, settings, operation, policy),
            )


def measure_put_and_get(
    settings: Settings, block_nbytes: int, direction: str, suffix: str, runner: Runner
) -> Result:
    num_blocks = settings.nbytes // block_nbytes
    found = runner.run(
        f"blocks of {format_nbytes(block_nbytes)} into an arena and back",
        copy_rounds,
        block_nbytes=block_nbytes,
        num_blocks=num_blocks,
        num_rounds=settings.num_rounds,
    ).trainer
    return compare_copies(
        found[f"memcpy-{direction}"],
        found[direction + suffix],
        num_blocks,
        None if suffix else goal_of_copies(GOALS, block_nbytes, settings.nbytes),
    )


def compare_copies(
    memcpy: list[float], ours: list[float], num_blocks: int, goal: Goal | None
) -> Result:
    """Return the seconds of plain copies divided by ours, round by round."""
    return Result(
        Spread.of(one / other for one, other in zip(memcpy, ours, strict=True)),
        goal=goal,
        beside={
            "memcpy_each_us": median(memcpy) / num_blocks * 1e6,
            "ours_each_us": median(ours) / num_blocks * 1e6,
        },
    )


def measure_lookup_store_evict_load(
    settings: Settings, operation: str, policy: str, runner: Runner
) -> Result:
    found = runner.run(
        f"managers of {settings.num_blocks:,} blocks, {policy}",
        time_managers,
        num_blocks=settings.num_blocks,
        num_rounds=settings.num_rounds,
        policy=policy,
    ).trainer
    ours = found["ours"][operation]
    if found["missing"]:
        note = f"nothing stands beside it: vLLM's manager is not here ({found['missing']})"
        return Result(Spread.of(ours), "us", beside={"ours_us": median(ours)}, note=note)
    theirs = found["vllm"][operation]
    return Result(
        Spread.of(one / other for one, other in zip(ours, theirs, strict=True)),
        goal=Goal("<=", 1.0),
        beside={"ours_us": median(ours), "vllm_us": median(theirs)},
    )


# -- copies ----------------------------------------------------------------------------------------


class PlainCopies:
    """Copies block by block, each in one piece, on one thread, in another order each time.

    One memory is like a cache's; the other one consists of huge pages, as arenas and segments do.
    """

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        shape = num_blocks, block_nbytes
        memory = mmap.mmap(-1, num_blocks * block_nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        # Written to, so that no page is touched for the first time while it is measured.
        self._slots = np.frombuffer(memory, np.uint8).reshape(shape)
        self._blocks = torch.ones(shape, dtype=torch.uint8).numpy()
        self._slots[:] = 2
        self._random = np.random.default_rng(0)

    def seconds(self, *, back: bool = False) -> float:
        """Return the seconds of one copy of all blocks, into the huge pages or back."""
        source, target = (self._slots, self._blocks) if back else (self._blocks, self._slots)
        to, of = (self._random.permutation(len(source)).tolist() for _ in range(2))
        began = time.perf_counter()
        for one, other in zip(to, of, strict=True):
            np.copyto(target[one], source[other])
        return time.perf_counter() - began


def copy_rounds(
    _setup: Setup, block_nbytes: int, num_blocks: int, num_rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of every round, of each way to copy.

    Blocks and slots are in random order: what a cache and an arena look like after a while.

    Raises:
        DigestMismatchError: A copy failed, or brought other bytes.
    """
    # Threads that store lower their priority; plain copies that do not would be ahead.
    os.nice(10)
    # Torch's threads spin for milliseconds after they have filled a tensor: on processors on which
    # copies are timed by then.
    torch.set_num_threads(1)
    layers = [
        torch.zeros(num_blocks, block_nbytes // NUM_LAYERS, dtype=torch.uint8)
        for _ in range(NUM_LAYERS)
    ]
    arenas = {
        suffix: Arena(
            layers,
            block_nbytes,
            {
                "cpu_bytes_to_use": slots_nbytes(num_blocks, block_nbytes),
                "verify_checksums": not suffix,
            },
        )
        for suffix in ("", "-unverified")
    }
    copies = PlainCopies(num_blocks, block_nbytes)
    random = np.random.default_rng(0)
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(1 + num_rounds):
        for at, layer in enumerate(layers):
            layer.fill_(number + at)
        block_ids, order = (random.permutation(num_blocks).tolist() for _ in range(2))
        seconds["memcpy-put"].append(copies.seconds())
        seconds["memcpy-get"].append(copies.seconds(back=True))
        for suffix, arena in arenas.items():
            seconds[f"put{suffix}"].append(arena.put(number, block_ids))
            for layer in layers:
                layer.zero_()
            seconds[f"get{suffix}"].append(arena.get(order))
            check_layers(layers, number)
    return {name: each[1:] for name, each in seconds.items()}


def bench_key(number: int, at: int) -> OffloadKey:
    """Return the key of a block of one round."""
    block_hash = number.to_bytes(8, "big") + at.to_bytes(8, "big")
    return fence_key(make_offload_key(block_hash), "bench")


def check_layers(layers: list[torch.Tensor], number: int) -> None:
    """Raise unless a cache has what the round of this number filled it with.

    Raises:
        DigestMismatchError: It has other bytes.
    """
    for at, layer in enumerate(layers):
        # Every byte, and fast: threads are slow to start after a long time without any.
        if [int(each) for each in layer.aminmax()] != [number + at] * 2:
            raise DigestMismatchError(f"round {number} of the bench brought other bytes")


class Arena:
    """One rank of an offloading spec, and a host that does one job at a time."""

    def __init__(
        self, layers: list[torch.Tensor], block_nbytes: int, options: dict[str, Any]
    ) -> None:
        page_nbytes = layers[0].shape[1]
        self._is_tier = "tier" in options
        spec = OffloadingSpecFactory.create_spec(
            OffloadingConfig(options, worker_kv_bytes_per_block=block_nbytes)
        )
        self._manager = spec.get_manager()
        self._worker = spec.get_worker(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(layer, page_nbytes) for layer in layers],
                [[CanonicalKVCacheRef(at, page_nbytes) for at in range(len(layers))]],
            )
        )
        self._block_of: dict[OffloadKey, int] = {}

    def put(self, number: int, block_ids: list[int]) -> float:
        """Store blocks under new keys; those of earlier rounds give way. Return the seconds."""
        context = ReqContext(f"put-{number}")
        keys = [bench_key(number, at) for at in range(len(block_ids))]
        self._block_of = dict(zip(keys, block_ids, strict=True))
        self._manager.on_new_request(context)
        room = self._manager.prepare_store(keys, context)
        assert room is not None, "nothing is pinned"
        cache = GPULoadStoreSpec(block_ids)
        seconds = self._run(lambda: self._worker.submit_store(0, cache, room.store_spec))
        self._manager.complete_store(keys, context)
        return seconds

    def get(self, order: list[int]) -> float:
        """Load all blocks back to where they were, in another order; return the seconds."""
        context = ReqContext("get")
        stored = list(self._block_of)
        keys = [stored[at] for at in order]
        cache = GPULoadStoreSpec([self._block_of[key] for key in keys])
        self._manager.on_new_request(context)
        # All of them in each turn, as hosts do: answers are only of use for a while.
        while LookupResult.RETRY in [self._manager.lookup(each, context) for each in keys]:
            time.sleep(_POLL_S)
        arena = self._manager.prepare_load(keys, context)
        seconds = self._run(lambda: self._worker.submit_load(0, arena, cache))
        self._manager.complete_load(keys, context)
        return seconds

    def close(self) -> None:
        """Let go of both sides."""
        self._manager.shutdown()
        self._worker.shutdown()

    def _run(self, submit: Callable[[], bool]) -> float:
        began = time.perf_counter()
        submit()
        if not self._is_tier:
            self._worker.wait({0})
        finished = self._worker.get_finished()
        # A tier releases blocks, for which `wait` waits, before it has them.
        while self._is_tier and not finished:
            time.sleep(_POLL_S)
            finished = self._worker.get_finished()
        seconds = time.perf_counter() - began
        if not all(result.success for result in finished):
            raise DigestMismatchError(f"the bench's arena failed: {dict(self._worker.get_stats())}")
        return seconds


# -- managers --------------------------------------------------------------------------------------


def time_managers(
    _setup: Setup, num_blocks: int, num_rounds: int, policy: str
) -> dict[str, dict[str, list[float]] | str]:
    """Return the microseconds per block of every round, of each manager and operation.

    Args:
        num_blocks: Blocks of a full cache.
        num_rounds: Rounds that count.
        policy: Eviction policy.
    """
    managers: dict[str, tuple[Any, Any]] = {"ours": (CPUOffloadingManager, ReqContext)}
    missing = ""
    try:
        cpu = importlib.import_module("vllm.v1.kv_offload.cpu.manager")
        base = importlib.import_module("vllm.v1.kv_offload.base")
        time_manager(cpu.CPUOffloadingManager, base.ReqContext, 2 * NUM_KEYS, "lru")
        managers["vllm"] = (cpu.CPUOffloadingManager, base.ReqContext)
    except Exception as error:
        # Not installed, or not one that this was written for.
        missing = f"{type(error).__name__}: {error}"
    found: dict[str, dict[str, list[float]]] = {
        name: defaultdict(list) for name in ("ours", "vllm")
    }
    for number in range(1 + num_rounds):
        for name, (make_manager, make_context) in managers.items():
            times = time_manager(make_manager, make_context, num_blocks, policy)
            for operation, us in times.items():
                if number:
                    found[name][operation].append(us)
    return {**found, "missing": missing}


def time_manager(
    make_manager: Callable[..., Any], make_context: Callable[..., Any], num_blocks: int, policy: str
) -> dict[str, float]:
    """Return microseconds per block of each operation of a manager with a full cache.

    Args:
        make_manager: Number of slots and policy to a manager.
        make_context: Name of a request to its context.
        num_blocks: Blocks of a full cache.
        policy: Eviction policy.
    """
    manager = make_manager(num_blocks, policy)
    kept = _requests(0, num_blocks)
    # As many calls as the clock needs, and as come to some percent of a large cache.
    num_calls = min(len(kept), max(32, len(kept) // 20))
    some = kept[:: max(1, len(kept) // num_calls)][:num_calls]
    names = map(str, itertools.count())

    def store(keys: list[OffloadKey], context: Any) -> None:
        manager.complete_store(manager.prepare_store(keys, context).keys_to_store, context)

    def look_up(keys: list[OffloadKey], context: Any) -> None:
        for key in keys:
            manager.lookup(key, context)

    def load(keys: list[OffloadKey], context: Any) -> None:
        manager.prepare_load(keys, context)
        manager.complete_load(keys, context)

    def run(
        operation: Callable[[list[OffloadKey], Any], None], requests: list[list[OffloadKey]]
    ) -> float:
        contexts = [make_context(next(names)) for _ in requests]
        for context in contexts:
            manager.on_new_request(context)
        # Of the processor, not of the clock on the wall: nothing here waits, but others may work.
        began = time.thread_time()
        for keys, context in zip(requests, contexts, strict=True):
            operation(keys, context)
        return (time.thread_time() - began) / sum(map(len, requests)) * 1e6

    gc.collect()
    gc.disable()
    try:
        for number, keys in enumerate(kept[:-num_calls]):
            store(keys, make_context(f"fill-{number}"))
        return {
            "store": run(store, kept[-num_calls:]),
            "lookup": run(look_up, some),
            "load": run(load, some),
            "evict": run(store, _requests(num_blocks, num_calls * NUM_KEYS)),
        }
    finally:
        gc.enable()


def _requests(start: int, num_blocks: int) -> list[list[OffloadKey]]:
    keys = [make_offload_key(n.to_bytes(32, "big")) for n in range(start, start + num_blocks)]
    return [keys[at : at + NUM_KEYS] for at in range(0, num_blocks, NUM_KEYS)]
