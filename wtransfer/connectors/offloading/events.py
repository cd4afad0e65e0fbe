"""Tell a host which blocks a tier keeps, by the host's own hashes.

A host hashes blocks without the weights, and what listens to it (a router) knows no others. So the
same hash names blocks of other weights too, and only those are told that a look-up would find now:
of the present weights, while the tier is asked at all. When that changes, the blocks told before
are told as removed, and those that the tier still has of the weights that came back as stored. Each
block is told as stored once, and as removed once before it is told as stored again.

Blocks of requests with pictures or other media are not told: a key of ours is over all media of a
request, and a hash of the host over those up to the end of the block. Of one hash before them there
would be a block for each request, stored and removed by itself.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wtransfer.connectors.interface import KVBlocks, KVEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wtransfer.kv.keys import OffloadKey
    from wtransfer.specs.interface import Medium, OffloadingEvent

MAX_KEPT = 1 << 20
"""Most chunks that are told at a time, with those of other weights; the oldest are removed."""


@dataclass
class _Kept:
    """A chunk that a tier keeps, of present or other weights."""

    blocks: KVBlocks
    fingerprint: str
    media: set[Medium] = field(default_factory=set)


class BlockEvents:
    """Turns the events of a spec's manager into those of the host.

    Args:
        block_size: Tokens per block.
        blocks_per_chunk: Blocks that the tier keeps as one.
        enabled: True if the host takes events in every step; else nothing is recorded.
    """

    def __init__(self, block_size: int, blocks_per_chunk: int, *, enabled: bool) -> None:
        self.hash_block_size = block_size
        """Tokens per hash of the host, by which the tokens per block can be divided."""
        self._block_size, self._per_chunk = block_size, blocks_per_chunk
        self._enabled = enabled
        self._kept: dict[OffloadKey, _Kept] = {}
        self._told: str | None = None
        """Fingerprint of the weights whose blocks are told."""
        self._events: list[KVEvent] = []

    def describe(
        self, request: Any, places: Mapping[OffloadKey, tuple[int, int]], fingerprint: str | None
    ) -> dict[OffloadKey, Any]:
        """Return what is told of chunks of a request once they are kept.

        Args:
            request: ``block_hashes``; blocks without a hash are not told, nor those of a request
                with ``mm_features``.
            places: Group and number of each chunk.
            fingerprint: Weights that the chunks are named by.
        """
        hashes = getattr(request, "block_hashes", None) if self._enabled else None
        if not hashes or fingerprint is None or getattr(request, "mm_features", None):
            return {}
        salt = getattr(request, "cache_salt", None)
        size, per_block = self._block_size, self._block_size // self.hash_block_size
        described = {}
        for key, (group, chunk) in places.items():
            first, end = chunk * self._per_chunk, (chunk + 1) * self._per_chunk
            if end * per_block > len(hashes):
                continue
            # A block has the hash of its last part, which is over all that is before it.
            of_blocks = [hashes[(n + 1) * per_block - 1] for n in range(first, end)]
            described[key] = _Kept(
                KVBlocks(
                    group=group,
                    block_hashes=of_blocks,
                    parent_block_hash=hashes[first * per_block - 1] if first else None,
                    token_ids=array("I", request.all_token_ids[first * size : end * size]),
                    block_size=size,
                    extra_keys=[None if n or not salt else (salt,) for n in range(first, end)],
                ),
                fingerprint,
            )
        return described

    def hear(
        self, events: Iterable[OffloadingEvent], described: Mapping[OffloadKey, Any] | None = None
    ) -> None:
        """Take events of the manager, in their order.

        Args:
            events: The events.
            described: What `describe` returned of the chunks that may have been stored.
        """
        for event in events:
            for key in event.keys:
                kept = self._kept.get(key)
                if event.removed:
                    if kept is not None:
                        self._remove(key, kept, event.medium)
                elif (kept := kept or (described or {}).get(key)) is not None:
                    self._kept[key] = kept
                    if event.medium not in kept.media:
                        kept.media.add(event.medium)
                        self._tell(kept, event.medium, removed=False)
        # A spec of a third party may have no bound: told less, a block costs a hit of a router.
        excess = max(0, len(self._kept) - MAX_KEPT)
        self.lose(list(itertools.islice(self._kept, excess)))

    def lose(self, keys: Iterable[OffloadKey]) -> None:
        """Take chunks as removed that no look-up will find, whatever the manager says of them."""
        for key in keys:
            if (kept := self._kept.get(key)) is not None:
                for medium in list(kept.media):
                    self._remove(key, kept, medium)

    def is_due(self, fingerprint: str | None) -> bool:
        """Return whether `take` would return anything, or other weights are told from it on."""
        return self._enabled and (bool(self._events) or fingerprint != self._told)

    def take(self, fingerprint: str | None) -> list[KVEvent]:
        """Return the events since the last call.

        Args:
            fingerprint: The present weights; None: no block would be found.

        Cost: a change of weights looks at every chunk that is kept.
        """
        if self._enabled and fingerprint != self._told:
            for told, removed in ((self._told, True), (fingerprint, False)):
                self._told = told
                for kept in self._kept.values():
                    for medium in kept.media:
                        self._tell(kept, medium, removed=removed)
        events, self._events = self._events, []
        return events

    def _remove(self, key: OffloadKey, kept: _Kept, medium: Medium) -> None:
        if medium in kept.media:
            kept.media.remove(medium)
            self._tell(kept, medium, removed=True)
        if not kept.media:
            del self._kept[key]

    def _tell(self, kept: _Kept, medium: Medium, *, removed: bool) -> None:
        if kept.fingerprint == self._told:
            self._events.append(KVEvent(kept.blocks, medium, removed))
