"""Tell a host which blocks a tier keeps, by the host's own hashes.

A host hashes blocks without the weights, and what listens to it (a router) knows no others. So the
same hash names blocks of other weights too, and only those are told that a look-up would find now:
of the present weights, while the tier is asked at all. When that changes, the blocks told before
are told as removed, and those that the tier still has of the weights that came back as stored. Each
block is told as stored once, and as removed once before it is told as stored again.

A step tells of `BLOCKS_PER_STEP` blocks, as a change may concern any number of them, and the
scheduler waits. All that is no longer there is told before anything is told as stored, so a router
never hears of a block that no look-up would find; what it has heard before, it believes until then.

Blocks of requests with pictures or other media are not told: a key of ours is over all media of a
request, and a hash of the host over those up to the end of the block. Of one hash before them there
would be a block for each request, stored and removed by itself.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wtransfer.connectors.interface import KVBlocks, KVEvent
from wtransfer.connectors.told_blocks import ToldBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wtransfer.kv.keys import OffloadKey
    from wtransfer.specs.interface import Medium, OffloadingEvent

MAX_KEPT = 1 << 20
"""Most chunks that are told at a time, with those of other weights; the oldest are removed."""
BLOCKS_PER_STEP = 512
"""Most blocks that one step tells as stored, or as removed since the weights have changed."""


@dataclass(slots=True)
class _Kept:
    """A chunk that a tier keeps, of present or other weights."""

    blocks: KVBlocks
    fingerprint: str
    media: tuple[Medium, ...] = ()
    told: tuple[Medium, ...] = ()
    """Media in which it is told: some of `media`, or all."""
    number: int = 0
    """Order in which chunks came."""


class _Chunks(dict[str, "OrderedDict[int, OrderedDict[OffloadKey, _Kept]]"]):
    """Chunks by their weights, in pages by their numbers; weights without any are left out.

    In pages, for a table of all would be made anew whenever it has doubled, within one step.
    """

    PAGE = 512

    def put(self, key: OffloadKey, kept: _Kept, *, at_end: bool) -> None:
        """Enter a chunk that is not there, at one end."""
        pages, number = self.setdefault(kept.fingerprint, OrderedDict()), kept.number // self.PAGE
        if number not in pages:
            pages[number] = OrderedDict()
            pages.move_to_end(number, last=at_end)
        if key not in pages[number]:
            pages[number][key] = kept
            pages[number].move_to_end(key, last=at_end)

    def drop(self, key: OffloadKey, kept: _Kept) -> None:
        number = kept.number // self.PAGE
        pages = self.get(kept.fingerprint, OrderedDict())
        page = pages.get(number, OrderedDict())
        if page.pop(key, None) is not None and not page:
            del pages[number]
            if not pages:
                del self[kept.fingerprint]

    def first(self, fingerprint: str | None) -> tuple[OffloadKey, _Kept] | None:
        """Return the first chunk of weights; None if there is none."""
        pages = None if fingerprint is None else self.get(fingerprint)
        return None if pages is None else next(iter(next(iter(pages.values())).items()))

    def last(self, fingerprint: str) -> tuple[OffloadKey, _Kept]:
        """Return the last chunk of weights that have some."""
        return next(reversed(next(reversed(self[fingerprint].values())).items()))


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
        # No plain dicts where the first entry is taken: see `wtransfer.specs.policies`.
        self._kept: OrderedDict[OffloadKey, _Kept] = OrderedDict()
        # Chunks that are told in a medium, and chunks that a medium has and that are not told in
        # it: nothing is moved when the weights change, however many chunks there are.
        self._told, self._untold = _Chunks(), _Chunks()
        self._weights: str | None = None
        """Fingerprint of the weights whose blocks are told."""
        self._blocks, self._numbers = ToldBlocks(), itertools.count()
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
                    if not kept.media:
                        self._kept[key], kept.number = kept, next(self._numbers)
                    if event.medium not in kept.media:
                        kept.media = (*kept.media, event.medium)
                        self._untold.put(key, kept, at_end=True)
        # A spec of a third party may have no bound: told less, a block costs a hit of a router.
        while len(self._kept) > MAX_KEPT:
            self.lose([next(iter(self._kept))])

    def lose(self, keys: Iterable[OffloadKey]) -> None:
        """Take chunks as removed that no look-up will find, whatever the manager says of them."""
        for key in keys:
            if (kept := self._kept.get(key)) is not None:
                self._remove(key, kept, *kept.media)

    def is_due(self, fingerprint: str | None) -> bool:
        """Return whether `take` would return anything, or other weights are told from it on."""
        is_told = fingerprint == self._weights and self._next() is None
        return self._enabled and (bool(self._events) or not is_told)

    def take(self, fingerprint: str | None) -> list[KVEvent]:
        """Return the events since the last call, as many as one step tells.

        Args:
            fingerprint: The present weights; None: no block would be found.
        """
        if self._enabled:
            self._weights = fingerprint
        num_told = 0
        while num_told < BLOCKS_PER_STEP and (found := self._next()) is not None:
            key, kept = found
            before = kept.told
            self._tell(key, kept, kept.media if kept.fingerprint == self._weights else ())
            num_told += self._per_chunk * abs(len(kept.told) - len(before))
        events, self._events = self._events, []
        return events

    def _next(self) -> tuple[OffloadKey, _Kept] | None:
        """Return a chunk of which there is something to tell.

        What other weights have is told as removed before anything is told as stored; from the last
        chunk on, and then from the first one on: what is told of a prompt begins with its beginning
        at any time.
        """
        others = (each for each in self._told if each != self._weights)
        if (other := next(others, None)) is not None:
            return self._told.last(other)
        return self._untold.first(self._weights)

    def _remove(self, key: OffloadKey, kept: _Kept, *media: Medium) -> None:
        """Note that chunks are gone from media: told at once, however much is to be told."""
        kept.media = tuple(each for each in kept.media if each not in media)
        self._tell(key, kept, tuple(each for each in kept.told if each in kept.media))
        if not kept.media:
            del self._kept[key]

    def _tell(self, key: OffloadKey, kept: _Kept, media: tuple[Medium, ...]) -> None:
        """Tell where a chunk is from now on."""
        for told, others, removed in ((kept.told, media, True), (media, kept.told, False)):
            for medium in told:
                if medium not in others:
                    self._events += self._blocks.news(KVEvent(kept.blocks, medium, removed))
        kept.told = media
        if media:
            self._told.put(key, kept, at_end=True)
        else:
            self._told.drop(key, kept)
        if media == kept.media:
            self._untold.drop(key, kept)
        else:
            self._untold.put(key, kept, at_end=False)
