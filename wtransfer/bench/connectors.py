"""``bench connectors``: KV cache from prefill to decode, and what it costs the scheduler.

Rows first, then the functions that the processes of their cases run. Prefill and decode take turns,
so that neither disturbs what the other one measures: one saves, between two plain copies; then the
other loads, between two plain copies, and compares every byte.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import distributed as dist

from wtransfer import (
    KVCacheConfig,
    KVConnectorFactory,
    KVConnectorRole,
    KVTransferConfig,
    ModelConfig,
    ServingConfig,
)
from wtransfer.bench.harness import (
    BESIDE_NBYTES,
    MEMORY_FOLDER,
    MIB,
    Goal,
    Result,
    Row,
    Spread,
    format_nbytes,
)
from wtransfer.bench.offload import (
    NUM_LAYERS,
    PlainCopies,
    compare_copies,
    goals_are_for,
    slots_nbytes,
)
from wtransfer.connectors.interface import KVConnectorOutput
from wtransfer.deadline import Deadline
from wtransfer.errors import DigestMismatchError, IncompleteUpdateError
from wtransfer.weights import process_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Self

    from wtransfer.bench.harness import Runner, Setup

_BLOCK_SIZE = 16  # tokens of a block
# Pages are filled and compared word by word; smaller blocks lie in slots several times their size.
_UNIT_NBYTES = 8 * NUM_LAYERS
_MIN_BLOCK_NBYTES = 4096
# Longest wait for a load, and for blocks to be free again.
_PATIENCE_S = 300.0


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
    """What must be known to read its rows."""


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
    Kind("multi", "MultiConnector", "shm, then storage", is_files=True),
)
"""The built-in connectors; the first three bring blocks from one process to another."""


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
            if nbytes % _UNIT_NBYTES or not _MIN_BLOCK_NBYTES <= nbytes <= self.nbytes:
                raise ValueError(
                    f"blocks of {nbytes} bytes: expected a multiple of {_UNIT_NBYTES}, 8 for each "
                    f"of {NUM_LAYERS} layers, at least {_MIN_BLOCK_NBYTES} and at most the "
                    f"{self.nbytes} of a round"
                )

    @classmethod
    def quick(cls) -> Settings:
        """Return small sizes, with which every row is filled and no number means much."""
        return cls(nbytes=16 * MIB, num_planned=200, num_rounds=3)

    @property
    def needed_nbytes(self) -> int:
        """Memory that a run takes.

        On either side a cache and the two memories of plain copies; between them a connector's
        memory, or files in memory. Slots of the smallest blocks are twice as large.
        """
        return BESIDE_NBYTES + 8 * self.nbytes


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
                    partial(measure_blocks, settings, kind, block_nbytes, direction),
                )
    for kind in KINDS:
        yield Row(
            f"plan-{kind.short}",
            f"{kind.connector}, scheduler's side, per block: get_num_new_matched_tokens to "
            f"build_connector_meta, a request of {settings.num_planned:,} blocks, all found",
            partial(measure_plans, settings, kind),
        )


def measure_blocks(
    settings: Settings, kind: Kind, block_nbytes: int, direction: str, runner: Runner
) -> Result:
    keywords: dict[str, Any] = {
        "connector": kind.connector,
        "block_nbytes": block_nbytes,
        "num_blocks": settings.nbytes // block_nbytes,
        "num_rounds": settings.num_rounds,
    }
    found = runner.run(
        f"{kind.connector}, blocks of {format_nbytes(block_nbytes)}",
        partial(decode, **keywords),
        partial(prefill, **keywords),
        1,
    ).trainer
    ours, memcpy = found[direction], found[f"{direction}_memcpy"]
    is_goal = (kind.short, direction) == ("shm", "load")
    has_goal = is_goal and goals_are_for(block_nbytes, settings.nbytes)
    goal = Goal(">=", 0.8) if has_goal else None
    result = compare_copies(memcpy, ours, keywords["num_blocks"], goal)
    result.beside["best_by_best"] = min(memcpy) / min(ours)
    note = f"files in {settings.folder or MEMORY_FOLDER}" if kind.is_files else kind.note
    return replace(result, note=note)


def measure_plans(settings: Settings, kind: Kind, runner: Runner) -> Result:
    number = settings.num_planned
    seconds = runner.run(
        f"{kind.connector}, a request of {number:,} blocks",
        partial(
            time_plans,
            connector=kind.connector,
            num_blocks=number,
            num_rounds=settings.num_rounds,
            # Blocks that were seen in the last half second are not looked for again.
            pause_s=0.55 if kind.is_files else 0.0,
        ),
    ).trainer
    each_us = Spread.of(each / number * 1e6 for each in seconds)
    return Result(each_us, "us", beside={"request_s": median(seconds)})


# -- processes -------------------------------------------------------------------------------------


def prefill(
    setup: Setup, connector: str, block_nbytes: int, num_blocks: int, num_rounds: int
) -> None:
    """Compute and save, round after round; decode says when it has loaded."""
    torch.set_num_threads(1)
    channel, copies = Channel(setup), PlainCopies(num_blocks, block_nbytes)
    # One block more: nothing saves the block of the last token.
    cache = KVCache(num_blocks + 1, block_nbytes)
    with Instance(setup, connector, "kv_producer", cache) as instance:
        for number in range(1 + num_rounds):
            block_ids = _in_random_order(2 * number, cache)
            cache.compute(number, block_ids[:-1])
            before_s = copies.seconds()
            params, save_s = instance.prefill(prompt(number, num_blocks), block_ids)
            memcpy_s = min(before_s, copies.seconds())
            channel.send(
                f"saved-{number}", {"params": params, "save": save_s, "save_memcpy": memcpy_s}
            )
            channel.receive(f"loaded-{number}")
            instance.forget()


def decode(
    setup: Setup, connector: str, block_nbytes: int, num_blocks: int, num_rounds: int
) -> dict[str, list[float]]:
    """Load what prefill has computed; return the seconds of both sides' rounds.

    Raises:
        DigestMismatchError: Other bytes have come.
        IncompleteUpdateError: Some blocks were not found, or have not come.
    """
    torch.set_num_threads(1)
    channel, copies = Channel(setup), PlainCopies(num_blocks, block_nbytes)
    cache = KVCache(num_blocks + 1, block_nbytes)
    seconds: dict[str, list[float]] = defaultdict(list)
    with Instance(setup, connector, "kv_consumer", cache) as instance:
        for number in range(1 + num_rounds):
            saved = channel.receive(f"saved-{number}")
            # Other places than those of prefill, and than before.
            block_ids = _in_random_order(2 * number + 1, cache)
            before_s = copies.seconds()
            _, load_s = instance.load(prompt(number, num_blocks), saved.pop("params"), block_ids)
            memcpy_s = min(before_s, copies.seconds())
            cache.check(number, block_ids[:-1])
            for name, value in {**saved, "load": load_s, "load_memcpy": memcpy_s}.items():
                seconds[name].append(value)
            channel.send(f"loaded-{number}", None)
    return {name: each[1:] for name, each in seconds.items()}


def time_plans(
    setup: Setup, connector: str, num_blocks: int, num_rounds: int, pause_s: float
) -> list[float]:
    """Return the seconds from asking what there is of a request to the order to load it.

    One instance computes the blocks, and asks about them as if it were the next one. What was found
    is loaded each time, so that the connector does not remember more and more.

    Args:
        setup: Of this process.
        connector: Name of the connector.
        num_blocks: Blocks of the request.
        num_rounds: Rounds that count.
        pause_s: Time before each round, for what the connector remembers that long.
    """
    torch.set_num_threads(1)
    # The scheduler's side does not see the bytes: as few as can be.
    cache = KVCache(num_blocks + 1, _UNIT_NBYTES)
    block_ids, tokens = list(range(cache.num_blocks)), prompt(0, num_blocks)
    with Instance(setup, connector, "kv_both", cache) as instance:
        params, _ = instance.prefill(tokens, block_ids)
        seconds = []
        for _ in range(1 + num_rounds):
            time.sleep(pause_s)
            plan_s, _ = instance.load(tokens, params, block_ids)
            seconds.append(plan_s)
    return seconds[1:]


def prompt(number: int, num_blocks: int) -> list[int]:
    """Return the tokens of a round: so many blocks and one more; no two rounds begin alike."""
    return [number, *range(num_blocks * _BLOCK_SIZE)]


def _in_random_order(seed: int, cache: KVCache) -> list[int]:
    """Return all blocks in the order that a cache has after a while."""
    order: list[int] = np.random.default_rng(seed).permutation(cache.num_blocks).tolist()
    return order


class Channel:
    """Named messages between the two processes of a case.

    There is no need to notice here that the other process has died: that ends the case.
    """

    def __init__(self, setup: Setup) -> None:
        path = str(Path(setup.folder, "channel"))
        self._store = dist.FileStore(path, 2)  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_PATIENCE_S))

    def send(self, name: str, message: Any) -> None:
        self._store.set(name, json.dumps(message))

    def receive(self, name: str) -> Any:
        """Return the message of this name, when it has come."""
        return json.loads(self._store.get(name))


class KVCache:
    """A KV cache whose bytes tell the round, the block's place in it, and the layer.

    Args:
        num_blocks: Blocks.
        block_nbytes: Bytes of a block, over all layers.
    """

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        self.num_blocks, self.block_nbytes = num_blocks, block_nbytes
        page_nbytes = block_nbytes // NUM_LAYERS
        # Written to, so that no page is touched for the first time while it is measured.
        self.layers = {
            f"layer.{at}": torch.full((num_blocks, page_nbytes), 0xEE, dtype=torch.uint8)
            for at in range(NUM_LAYERS)
        }
        self._words = [layer.numpy().view(np.uint64) for layer in self.layers.values()]
        # Random, or a page whose words have changed places would pass for what it was.
        self._base = np.random.default_rng(0).integers(
            1 << 64, size=page_nbytes // 8, dtype=np.uint64
        )

    def compute(self, number: int, block_ids: Sequence[int]) -> None:
        """Fill blocks as a round does; no page of any round is like another."""
        for mark, page in self._pages(number, block_ids):
            np.bitwise_xor(self._base, mark, out=page)

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
            for words in self._words:
                # Times an odd number: other marks give other words.
                yield np.uint64(next(marks) * 0x9E37_79B9_7F4A_7C15 & (1 << 64) - 1), words[block]


def options_of(setup: Setup, connector: str, num_blocks: int, block_nbytes: int) -> dict[str, Any]:
    """Return a connector's options, with room for the blocks of a round."""
    nbytes = slots_nbytes(num_blocks, block_nbytes)
    if connector == "MultiConnector":
        return {
            "connectors": [
                {
                    "kv_connector": name,
                    "kv_connector_extra_config": options_of(setup, name, num_blocks, block_nbytes),
                }
                for name in ("SharedMemoryConnector", "SharedStorageConnector")
            ]
        }
    known: dict[str, dict[str, Any]] = {
        "SharedMemoryConnector": {"shelf_bytes": nbytes},
        "ProcessGroupConnector": {"shelf_bytes": nbytes, "token": setup.token},
        "SharedStorageConnector": {
            "shared_storage_path": str(Path(setup.folder, "kv")),
            "max_bytes": max(16 << 30, 2 * nbytes),
        },
        "OffloadingConnector": {"cpu_bytes_to_use": nbytes},
    }
    return known[connector]


class Instance:
    """Both sides of a connector, called as a host does that has one request at a time.

    Use it as a context manager.

    Args:
        setup: Of this process.
        connector: Name of the connector.
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        cache: Of the only worker.
    """

    def __init__(self, setup: Setup, connector: str, role: str, cache: KVCache) -> None:
        self._connector, self._cache = connector, cache
        self._files = Path(setup.folder, "kv")
        self._files.mkdir(exist_ok=True)
        self._numbers = itertools.count()
        self._fastest_s = 0.0
        # All processes of the bench compute with the same weights, or no block would fit.
        self._weights = process_weights.hold("the bench's weights")
        options = options_of(setup, connector, cache.num_blocks, cache.block_nbytes)
        config = ServingConfig(
            kv_transfer_config=KVTransferConfig(connector, f"bench-{role}", role, None, options),
            cache_config=KVCacheConfig(cache.num_blocks, _BLOCK_SIZE, cache.block_nbytes),
            model_config=ModelConfig("bench", "uint8"),
        )
        make = KVConnectorFactory.create_connector_v1
        self._scheduler = make(config, KVConnectorRole.SCHEDULER)
        self._worker = make(config, KVConnectorRole.WORKER)
        self._worker.register_kv_caches(cache.layers)
        metadata = self._worker.get_handshake_metadata()
        if metadata is not None:
            self._scheduler.set_xfer_handshake_metadata({0: metadata})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.shutdown()
        self._scheduler.shutdown()
        self._weights.close()

    def prefill(self, tokens: list[int], block_ids: list[int]) -> tuple[Any, float]:
        """Save a prompt whose blocks are computed.

        Returns:
            What the next instance needs to know, and the seconds of saving.
        """
        request = self._begin(tokens, {"do_remote_decode": True})
        self._scheduler.get_num_new_matched_tokens(request, 0)
        self._scheduler.update_state_after_alloc(request, _blocks(block_ids), 0)
        self._bind(_step(request, block_ids))
        self._worker.start_load_kv(None)
        began = time.perf_counter()
        for name, layer in self._cache.layers.items():
            self._worker.save_kv_layer(name, layer, None)
        self._worker.wait_for_save()
        save_s = time.perf_counter() - began
        self._end_step(*self._worker.get_finished(set()))
        return self._finish(request, block_ids), save_s

    def load(self, tokens: list[int], params: Any, block_ids: list[int]) -> tuple[float, float]:
        """Load all of a prompt but the last token.

        Args:
            tokens: Whole blocks, and one more.
            params: What the instance that has computed them returned.
            block_ids: Where they belong.

        Returns:
            Seconds that the scheduler's side took, and from the order until all was in the cache.

        Raises:
            IncompleteUpdateError: Some of its blocks are not found, or do not come.
        """
        request, blocks = self._begin(tokens, params), _blocks(block_ids)
        began = time.perf_counter()
        number, is_later = self._scheduler.get_num_new_matched_tokens(request, 0)
        number = number or 0
        self._scheduler.update_state_after_alloc(request, blocks, number)
        output = _step() if is_later else _step(request, block_ids, number)
        metadata = self._scheduler.build_connector_meta(output)
        plan_s = time.perf_counter() - began
        if number != len(tokens) - 1:
            raise self._incomplete(f"found {number} of {len(tokens) - 1} tokens")
        self._worker.handle_preemptions(metadata)
        self._worker.bind_connector_metadata(metadata)
        began = time.perf_counter()
        self._worker.start_load_kv(None)
        received = self._wait_for_load() if is_later else None
        load_s = time.perf_counter() - began
        self._fastest_s = min(load_s, self._fastest_s or load_s)
        missing = self._worker.get_block_ids_with_load_errors()
        if missing or received not in (None, {request.request_id}):
            raise self._incomplete(f"could not load {len(missing)} blocks")
        if not is_later:
            self._worker.wait_for_save()
        self._end_step(None, received)
        self._finish(request, block_ids)
        return plan_s, load_s

    def forget(self) -> None:
        """Drop everything that was saved, so that each round finds what the first one found.

        Raises:
            StallError: Something stays.
        """
        deadline = Deadline(_PATIENCE_S)
        self._scheduler.reset_cache()
        # Files are removed in the background, which would disturb the next round.
        while self._worker.get_stats().get("leases") or self._has_files():
            deadline.check(f"the end of what {self._connector} keeps")
            time.sleep(0.005)

    def _has_files(self) -> bool:
        try:
            sizes = [path.stat().st_size for path in self._files.rglob("*") if path.is_file()]
        except FileNotFoundError:
            return True
        return any(nbytes >= self._cache.block_nbytes for nbytes in sizes)

    def _wait_for_load(self) -> set[str]:
        """Return the requests that were received."""
        deadline = Deadline(_PATIENCE_S)
        # Asking takes turns with the threads that copy: not during most of the load, then often.
        time.sleep(0.7 * self._fastest_s)
        while True:
            _, received = self._worker.get_finished(set())
            if received:
                found: set[str] = received
                return found
            deadline.check(f"a load by {self._connector}")
            time.sleep(0.0002)

    def _begin(self, tokens: list[int], params: Any) -> Any:
        request = SimpleNamespace(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=tokens,
            all_token_ids=tokens,
            output_token_ids=[],
            num_tokens=len(tokens),
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            kv_transfer_params=params,
            **_NO_EXTRAS,
        )
        self._scheduler.on_new_request(request)
        return request

    def _bind(self, output: Any) -> None:
        metadata = self._scheduler.build_connector_meta(output)
        self._worker.handle_preemptions(metadata)
        self._worker.bind_connector_metadata(metadata)

    def _end_step(self, sent: set[str] | None, received: set[str] | None) -> None:
        errors = self._worker.get_block_ids_with_load_errors()
        metadata = self._worker.build_connector_worker_meta()
        self._worker.clear_connector_metadata()
        output = KVConnectorOutput(sent, received, metadata, errors)
        self._scheduler.update_connector_output(output)

    def _finish(self, request: Any, block_ids: list[int]) -> Any:
        """End a request, wait until its blocks are free; return what the next instance needs."""
        stays, params = self._scheduler.request_finished(request, list(block_ids))
        finished, deadline = {request.request_id}, Deadline(_PATIENCE_S)
        while True:
            # A step that computes nothing.
            self._bind(_step(finished=finished))
            self._worker.start_load_kv(None)
            sent, received = self._worker.get_finished(finished)
            self._end_step(sent, received)
            if not stays or request.request_id in (sent or ()):
                return params
            deadline.check(f"blocks that {self._connector} sends")
            finished = set()
            time.sleep(0.005)

    def _incomplete(self, what: str) -> IncompleteUpdateError:
        stats = {**self._scheduler.get_stats(), **self._worker.get_stats()}
        return IncompleteUpdateError(f"the bench's {self._connector} {what}: {stats}")


# What connectors read of a request besides its tokens: this host has none of it.
_NO_EXTRAS: dict[str, Any] = {
    "mm_features": [],
    "sampling_params": None,
    "pooling_params": None,
    "lora_request": None,
    "prompt_embeds": None,
    "cache_salt": None,
}


def _blocks(block_ids: Iterable[int]) -> Any:
    """Return blocks as the scheduler hands them to a connector: one group of them."""
    ids = list(block_ids)
    return SimpleNamespace(
        get_block_ids=lambda: (ids,), blocks=([SimpleNamespace(block_id=each) for each in ids],)
    )


def _step(
    request: Any = None,
    block_ids: Iterable[int] = (),
    num_computed: int = 0,
    finished: set[str] | None = None,
) -> Any:
    """Return the scheduler's output for a step that computes one request, or nothing."""
    new, scheduled = [], {}
    if request is not None:
        new = [
            SimpleNamespace(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                block_ids=(list(block_ids),),
                num_computed_tokens=num_computed,
                **_NO_EXTRAS,
            )
        ]
        scheduled = {request.request_id: request.num_tokens - num_computed}
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[],
            resumed_req_ids=set(),
            new_block_ids=[],
            num_computed_tokens=[],
            num_output_tokens=[],
            all_token_ids={},
            new_token_ids=[],
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_req_ids=finished or set(),
        preempted_req_ids=set(),
    )
