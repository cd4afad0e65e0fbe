"""Blocks that could not be loaded: they get another key, so that a whole one can take their place.

A tier believes that it keeps what it was given. Where a worker finds a block damaged, the tier's
manager, in another process and perhaps of an author who never thought of it, goes on to say *hit*,
and to every store *kept already*: each request would load in vain and compute, until the block
happens to give way. Under another key it is simply not asked for any more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import xxhash

from wtransfer.blocks import FENCE_NBYTES, OffloadKey

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SPOILED = 65_536
"""Blocks that are remembered; the oldest are forgotten, and then asked for once more."""


class SpoiledBlocks:
    """Which fenced keys stand for blocks that cannot be loaded, and what stands in their place."""

    def __init__(self) -> None:
        self._times: OrderedDict[OffloadKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._times)

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Enter blocks that could not be loaded.

        Args:
            keys: As `wtransfer.blocks.fence_key` returns them; those that were in their place are
                given up, too.
        """
        for key in keys:
            self._times[key] = self._times.pop(key, 0) + 1
        while len(self._times) > MAX_SPOILED:
            self._times.popitem(last=False)

    def current(self, key: OffloadKey) -> OffloadKey:
        """Return what a block is kept under now: its key, unless that was spoiled."""
        times = self._times.get(key) if self._times else None
        if times is None:
            return key
        mark = xxhash.xxh3_128_digest(times.to_bytes(8, "big") + key[:FENCE_NBYTES])
        return OffloadKey(mark + key[FENCE_NBYTES:])
