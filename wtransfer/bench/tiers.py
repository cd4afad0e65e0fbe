"""``bench offload --tier NAME``: blocks into a tier and back, beside its client and the model.

Each row is measured by the function ``measure_...`` of its kind; below them stand the functions
that the processes of their cases run.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wtransfer.bench.harness import MIB, Result, Row, Spread, format_nbytes
from wtransfer.bench.offload import (
    NUM_LAYERS,
    Arena,
    PlainCopies,
    Settings,
    bench_key,
    check_layers,
    goal_of_copies,
)
from wtransfer.errors import DigestMismatchError, OffloadingOptionError
from wtransfer.kv.header import HEADER_NBYTES
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.specs.tier import TierOptions, open_tier, rank_key
from wtransfer.specs.tier_spec import TieringOffloadingSpec
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits
from wtransfer.testing.mini_engine.engine import LocalExecutor, make_engine
from wtransfer.testing.mini_engine.worker import make_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wtransfer import Tier
    from wtransfer.bench.harness import Runner, Setup

NUM_THREADS = TierOptions().num_io_threads
NUM_PROMPTS, PROMPT_TOKENS, BLOCK_TOKENS = 24, 256, 16
DEADLINE_S = 300.0


# -- rows ------------------------------------------------------------------------------------------


def rows(settings: Settings) -> Iterator[Row]:
    """Yield all rows, in order."""
    name = settings.tier
    for block_nbytes in settings.block_nbytes:
        for direction, way in (("put", "cache to tier"), ("get", "tier to cache")):
            size = format_nbytes(block_nbytes)
            yield Row(
                f"tier-{direction}-{size.replace(' ', '')}",
                f"client / ({way} {name!r}), blocks of {size}; client: the tier's own calls for as "
                f"many bytes, on as many threads ({NUM_THREADS})",
                partial(measure_put_and_get, settings, block_nbytes, direction),
            )
    yield Row(
        "tier-recompute",
        f"load from the tier {name!r} / computing the same block, by the mini engine's small model",
        partial(measure_load_and_compute, settings),
    )


def measure_put_and_get(
    settings: Settings, block_nbytes: int, direction: str, runner: Runner
) -> Result:
    num_blocks = settings.nbytes // block_nbytes
    found = runner.run(
        f"blocks of {format_nbytes(block_nbytes)} into the tier {settings.tier!r} and back",
        tier_rounds,
        options=settings.options_of_tier,
        block_nbytes=block_nbytes,
        num_blocks=num_blocks,
        num_rounds=settings.num_rounds,
    ).trainer
    memcpy, client, ours = (found[f"{way}-{direction}"] for way in ("memcpy", "client", "ours"))
    return Result(
        Spread.of(one / other for one, other in zip(client, ours, strict=True)),
        goal=goal_of_copies({2 * MIB: 0.85}, block_nbytes, settings.nbytes),
        beside={
            "memcpy_each_us": median(memcpy) / num_blocks * 1e6,
            "client_each_us": median(client) / num_blocks * 1e6,
            "ours_each_us": median(ours) / num_blocks * 1e6,
        },
    )


def measure_load_and_compute(settings: Settings, runner: Runner) -> Result:
    found = runner.run(
        f"the mini engine with the tier {settings.tier!r}",
        serve_twice,
        options=settings.options_of_tier,
    ).trainer
    load_s, compute_s = found["load_seconds_per_block"], found["compute_seconds_per_block"]
    return Result(
        Spread.of([load_s / compute_s]),
        beside={"load_each_us": load_s * 1e6, "compute_each_us": compute_s * 1e6},
        note=f"blocks of {BLOCK_TOKENS} tokens; a load counts from its request to the step that "
        "hears of its end",
    )


# -- copies ----------------------------------------------------------------------------------------


def tier_rounds(
    setup: Setup, options: dict[str, Any], block_nbytes: int, num_blocks: int, num_rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of every round, of plain copies, of the tier's own calls, and of ours.

    Raises:
        DigestMismatchError: A copy failed, or brought other bytes.
        BaseException: The tier's own.
    """
    os.nice(10)
    torch.set_num_threads(1)
    layers = [
        torch.zeros(num_blocks, block_nbytes // NUM_LAYERS, dtype=torch.uint8)
        for _ in range(NUM_LAYERS)
    ]
    options = _in_folder(options, setup)
    own = {"deadline_s": DEADLINE_S, "skip_slow_loads": False}
    host = Arena(layers, block_nbytes, {**own, **options})
    client = Client(options, block_nbytes, num_blocks)
    copies = PlainCopies(num_blocks, block_nbytes)
    random = np.random.default_rng(0)
    seconds: dict[str, list[float]] = defaultdict(list)
    try:
        for number in range(1 + num_rounds):
            for at, layer in enumerate(layers):
                layer.fill_(number + at)
            block_ids, order = (random.permutation(num_blocks).tolist() for _ in range(2))
            seconds["memcpy-put"].append(copies.seconds())
            seconds["memcpy-get"].append(copies.seconds(back=True))
            seconds["client-put"].append(client.put(number))
            seconds["ours-put"].append(host.put(number, block_ids))
            for layer in layers:
                layer.zero_()
            seconds["client-get"].append(client.get(number))
            seconds["ours-get"].append(host.get(order))
            check_layers(layers, number)
            client.remove([rank_key(bench_key(number, at), 0) for at in range(num_blocks)])
            client.remove(client.keys(number))
    finally:
        host.close()
        client.close()
    return {name: each[1:] for name, each in seconds.items()}


class Client:
    """The tier itself, called as its client is, without keys, headers or proofs.

    Args:
        options: Of the tier and of the spec over it.
        block_nbytes: Bytes of a block, without its header.
        num_blocks: Blocks of a round.
    """

    def __init__(self, options: dict[str, Any], block_nbytes: int, num_blocks: int) -> None:
        self._tier: Tier = open_tier(_tier_class(options), TierOptions.of(options)[1])
        self._blocks = np.ones((num_blocks, HEADER_NBYTES + block_nbytes), np.uint8)
        self._tier.register_memory(self._blocks.reshape(-1).data)

    def keys(self, number: int) -> list[bytes]:
        """Return the keys of one round: as long as ours, and others."""
        return [rank_key(bench_key(number, at), 1) for at in range(len(self._blocks))]

    def put(self, number: int) -> float:
        """Put all blocks; return the seconds."""
        keys = self.keys(number)

        def put(thread: int) -> None:
            for at in range(thread, len(keys), NUM_THREADS):
                self._tier.put(keys[at], self._blocks[at].data)

        return self._run(put)

    def get(self, number: int) -> float:
        """Get all blocks; return the seconds."""
        keys = self.keys(number)

        def get(thread: int) -> None:
            for at in range(thread, len(keys), NUM_THREADS):
                if not self._tier.get(keys[at], self._blocks[at].data):
                    raise DigestMismatchError("the tier does not find what it has just put")

        return self._run(get)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Make room for the next round."""
        self._tier.remove(keys)

    def close(self) -> None:
        """Close the tier."""
        self._tier.close()

    def _run(self, work: Callable[[int], None]) -> float:
        errors: list[BaseException] = []

        def run(thread: int) -> None:
            try:
                work(thread)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(each,)) for each in range(NUM_THREADS)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        if errors:
            raise errors[0]
        return seconds


def _tier_class(options: dict[str, Any]) -> type[Tier]:
    spec_cls = OffloadingSpecFactory.get_spec_cls(options)
    if not issubclass(spec_cls, TieringOffloadingSpec):
        raise OffloadingOptionError(f"--tier {options['tier']}: that is no tier")
    return spec_cls.tier_cls


def _in_folder(options: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """Let the tier ``file`` keep its files in the case's folder."""
    return (
        {"shared_storage_path": setup.folder, **options} if options["tier"] == "file" else options
    )


# -- beside the model ------------------------------------------------------------------------------


def serve_twice(setup: Setup, options: dict[str, Any]) -> dict[str, float]:
    """Serve prompts by computing them, then by loading them; return what both took per block."""
    torch.set_num_threads(1)
    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    config = EngineConfig(
        cache=CacheShape(BLOCK_TOKENS, 4 * blocks),
        limits=Limits(max_num_batched_tokens=2 * PROMPT_TOKENS),
        connector="OffloadingConnector",
        options={**_in_folder(options, setup), "skip_slow_loads": False},
    )
    with make_engine(config, LocalExecutor(make_worker(config, owns_process=True))) as engine:
        for number in range(2 * NUM_PROMPTS):
            first = number % NUM_PROMPTS
            prompt = [(first + at) % config.model.vocabulary for at in range(PROMPT_TOKENS)]
            engine.scheduler.pool.reset()
            engine.submit(prompt, 1)
            engine.run(DEADLINE_S)
        connector = engine.scheduler.connector
        assert connector is not None
        stats: dict[str, float] = connector.side.get_stats()
    names = ("load_seconds_per_block", "compute_seconds_per_block")
    return {name: stats[name] for name in names}
