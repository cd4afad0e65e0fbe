"""Blocks from a process that computes a prompt to one that goes on with it.

The two take turns, so that neither is in the way of what the other one measures: one saves, between
two plain copies; then the other loads, between two plain copies, and compares every byte.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from wtransfer.bench.jobs import meeting, tell
from wtransfer.bench.jobs.block_copies import BlockCopies
from wtransfer.bench.jobs.connector_options import options_of
from wtransfer.bench.jobs.kv_cache import KVCache
from wtransfer.bench.jobs.sides import Sides, prompt
from wtransfer.bench.scratch import Scratch

if TYPE_CHECKING:
    from wtransfer.testing.mini_engine.channel import Channel

_WARM_UP_ROUNDS = 1
# The last block is the one of the last token, which nobody saves.
_BESIDE = 1


class Saved(msgspec.Struct, frozen=True):
    """What the one that computes says after each round."""

    params: dict[str, Any] | None
    """What the other one needs to know."""
    save_s: float
    """Seconds of saving."""
    memcpy_s: float
    """Of the faster one of the copies before and after it."""


_OPTIONS = msgspec.msgpack.Decoder(dict[str, Any])
_SAVED = msgspec.msgpack.Decoder(Saved)
_WORD = msgspec.msgpack.Decoder(str)
_LOADED, _GONE = "loaded", "gone"


def decode(
    *,
    address: str,
    token: str,
    connector: str,
    block_nbytes: int,
    num_blocks: int,
    num_rounds: int,
    folder: str | None,
    **_: Any,
) -> None:
    """Load what the other one has computed, and tell the seconds of either's rounds.

    Args:
        address: Where the two meet.
        token: Secret of the bench.
        connector: Name of the connector.
        block_nbytes: Bytes of a block.
        num_blocks: Blocks of a round.
        num_rounds: Rounds that count.
        folder: Where files go meanwhile; None: into memory.
        **_: Of the other one.
    """
    torch.set_num_threads(1)
    cache = KVCache(num_blocks + _BESIDE, block_nbytes)
    with Scratch(folder) as scratch, meeting.answer(address, "the bench's prefill") as line:
        options = options_of(connector, num_blocks, block_nbytes, token=token, folder=scratch.path)
        line.send(options)
        seconds: dict[str, list[float]] = defaultdict(list)
        with Sides(connector, "kv_consumer", options, cache) as sides:
            loading = _Loading(sides, cache, line)
            for number in range(_WARM_UP_ROUNDS + num_rounds):
                if number == _WARM_UP_ROUNDS:
                    seconds.clear()
                for name, value in loading.round(number).items():
                    seconds[name].append(value)
        # Nobody may be writing there when the folder goes.
        line.receive(_WORD)
    tell(**seconds)


def prefill(
    *, address: str, connector: str, block_nbytes: int, num_blocks: int, num_rounds: int, **_: Any
) -> None:
    """Compute and save, round after round; the other one says when it has loaded.

    Args:
        address: Where the two meet.
        connector: Name of the connector.
        block_nbytes: Bytes of a block.
        num_blocks: Blocks of a round.
        num_rounds: Rounds that count.
        **_: Of the other one.
    """
    torch.set_num_threads(1)
    cache = KVCache(num_blocks + _BESIDE, block_nbytes)
    copies = BlockCopies(num_blocks, block_nbytes)
    with meeting.call(address, "the bench's decode") as line:
        options = line.receive(_OPTIONS)
        with Sides(connector, "kv_producer", options, cache) as sides:
            for number in range(_WARM_UP_ROUNDS + num_rounds):
                line.send(_save(number, sides, cache, copies))
                line.receive(_WORD)
                sides.forget()
        line.send(_GONE)


def _save(number: int, sides: Sides, cache: KVCache, copies: BlockCopies) -> Saved:
    block_ids = _anywhere(number, cache)
    cache.compute(number, block_ids[:-_BESIDE])
    before_s = copies.seconds()
    saved = sides.prefill(prompt(number, cache.num_blocks - _BESIDE), block_ids)
    return Saved(saved.params, saved.save_s, min(before_s, copies.seconds()))


class _Loading:
    """The rounds of the one that loads."""

    def __init__(self, sides: Sides, cache: KVCache, line: Channel) -> None:
        self._sides, self._cache, self._line = sides, cache, line
        self._copies = BlockCopies(cache.num_blocks - _BESIDE, cache.block_nbytes)

    def round(self, number: int) -> dict[str, float]:
        saved = self._line.receive(_SAVED)
        # Other places than those of the other one, and than before.
        block_ids = _anywhere(-1 - number, self._cache)
        before_s = self._copies.seconds()
        tokens = prompt(number, self._cache.num_blocks - _BESIDE)
        loaded = self._sides.load(tokens, saved.params, block_ids)
        memcpy_s = min(before_s, self._copies.seconds())
        self._cache.check(number, block_ids[:-_BESIDE])
        self._line.send(_LOADED)
        return {
            "load": loaded.load_s,
            "load_memcpy": memcpy_s,
            "save": saved.save_s,
            "save_memcpy": saved.memcpy_s,
        }


def _anywhere(seed: int, cache: KVCache) -> list[int]:
    """Return all blocks in random order: what a cache looks like after a while."""
    order: list[int] = (
        np.random.default_rng(abs(2 * seed) + (seed < 0)).permutation(cache.num_blocks).tolist()
    )
    return order
