"""Tell a block that is kept several times once: stored by the first, removed by the last.

The same block may be in several chunks of one tier, which share a beginning, and in the tiers of
several connectors.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.connectors.interface import KVEvent
    from wtransfer.specs.interface import Medium


class ToldBlocks:
    """Counts how often a block is kept, as many blocks as are told at a time."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Medium, int], dict[bytes, int]] = {}
        """By medium and group, then by the host's hash."""

    def news(self, event: KVEvent) -> Iterator[KVEvent]:
        """Yield the parts of an event that are the first to store a block, or the last to remove.

        Args:
            event: Blocks that are kept once more, or once less, in the event's medium.
        """
        blocks, size = event.blocks, event.blocks.block_size
        counts = self._counts.setdefault((event.medium, blocks.group), {})
        is_news = []
        for block_hash in blocks.block_hashes:
            before = counts.get(block_hash, 0)
            is_news.append(before == event.removed)
            if not event.removed:
                counts[block_hash] = before + 1
            elif before > 1:
                counts[block_hash] = before - 1
            else:
                counts.pop(block_hash, None)
        if all(is_news):
            yield event
            return
        for news, run in itertools.groupby(range(len(is_news)), is_news.__getitem__):
            first, *rest = run
            end = first + 1 + len(rest)
            if news:
                part = dataclasses.replace(
                    blocks,
                    block_hashes=blocks.block_hashes[first:end],
                    parent_block_hash=(
                        blocks.block_hashes[first - 1] if first else blocks.parent_block_hash
                    ),
                    token_ids=blocks.token_ids[first * size : end * size],
                    extra_keys=blocks.extra_keys[first:end],
                )
                yield dataclasses.replace(event, blocks=part)
