"""How long a connector keeps the scheduler's thread, for a request all of whose blocks it has."""

from __future__ import annotations

import time
from typing import Any

import torch

from wtransfer.bench.jobs import tell
from wtransfer.bench.jobs.connector_options import options_of
from wtransfer.bench.jobs.kv_cache import KVCache
from wtransfer.bench.jobs.sides import Sides, prompt
from wtransfer.bench.offload import NUM_LAYERS
from wtransfer.bench.scratch import Scratch

_WARM_UP_ROUNDS = 1
# The scheduler's side does not see the bytes: as few as can be.
_PAGE_NBYTES = 8


def measure(
    *,
    token: str,
    connector: str,
    num_blocks: int,
    num_rounds: int,
    folder: str | None,
    pause_s: float,
    **_: Any,
) -> None:
    """Tell the seconds from the question what there is to the order to load it.

    One instance computes the blocks, and asks about them as if it were the next one. What was found
    is really loaded each time, so that the connector does not keep more and more in mind.

    Args:
        token: Secret of the bench.
        connector: Name of the connector.
        num_blocks: Blocks of a request.
        num_rounds: Rounds that count.
        folder: Where files go meanwhile; None: into memory.
        pause_s: Time before each round, for what the connector remembers that long.
        **_: Of other jobs.
    """
    torch.set_num_threads(1)
    cache = KVCache(num_blocks + 1, NUM_LAYERS * _PAGE_NBYTES)
    block_ids, tokens = list(range(cache.num_blocks)), prompt(0, num_blocks)
    with Scratch(folder) as scratch:
        options = options_of(
            connector, num_blocks, cache.block_nbytes, token=token, folder=scratch.path
        )
        with Sides(connector, "kv_both", options, cache) as sides:
            params = sides.prefill(tokens, block_ids).params
            plan = []
            for _round in range(_WARM_UP_ROUNDS + num_rounds):
                time.sleep(pause_s)
                plan.append(sides.load(tokens, params, block_ids).plan_s)
    tell(plan=plan[_WARM_UP_ROUNDS:])
