"""Blocks of a prefix that each group of layers needs: all of them, or the last ones of a window.

A host gives every KV cache group a block table of its own. Layers with full attention read every
block of a prefix. Layers with a sliding window read the last blocks only: the host releases those
that the window has passed, gives them to other requests, and takes a prefix for computed without
them. Layers with a state read the one after the last token, which is a window of two: that token
and the next. A prefix is kept where each group has what it needs of it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def first_needed(window: int | None, num_tokens: int, block_size: int) -> int:
    """Return the first block of a prefix that any later token reads.

    Args:
        window: Tokens that a token attends to, itself included; None: all.
        num_tokens: Tokens of the prefix.
        block_size: Tokens per block.
    """
    return 0 if window is None else max(0, num_tokens - window + 1) // block_size


def longest_prefix(
    windows: Sequence[int | None],
    block_size: int,
    first: int,
    last: int,
    is_kept: Callable[[int, int], bool | None],
) -> tuple[int, bool]:
    """Find the longest prefix that is kept; the host has what the one before `first` needs.

    Every block that the prefix may need is asked about where one is not known yet: a store that has
    to ask does so once for the request, and not once for each block.

    Args:
        windows: Window of each group.
        block_size: Tokens per block.
        first: Blocks of the prefix that the host has.
        last: Most blocks of the prefix.
        is_kept: Called with a group and a block; None: not known yet.

    Returns:
        Number of blocks of the prefix, `first` if nothing is kept beyond, and whether any that it
        needs is not known yet.
    """
    longest, unknown = last, list[int]()

    def is_missing(group: int, block: int) -> bool:
        found = is_kept(group, block)
        if found is None:
            unknown.append(block)
        return found is False

    for group, window in enumerate(windows):
        if window is None:
            for block in range(first, longest):
                if is_missing(group, block):
                    longest = block
                    break
    # A block of a window is missing: prefixes that end behind it, up to this one, need it as well.
    while (end := _gap(windows, block_size, first, longest, is_missing)) is not None:
        longest = end
    is_pending = any(block < longest for block in unknown)
    if is_pending:
        windowed = [group for group, window in enumerate(windows) if window is not None]
        for group, block in itertools.product(windowed, range(first, longest)):
            is_kept(group, block)
    return longest, is_pending


def _gap(
    windows: Sequence[int | None],
    block_size: int,
    first: int,
    end: int,
    is_missing: Callable[[int, int], bool],
) -> int | None:
    """Return a block that a window needs of a prefix, and that is missing."""
    for group, window in enumerate(windows):
        if window is not None:
            needed = max(first, first_needed(window, end * block_size, block_size))
            for block in range(needed, end):
                if is_missing(group, block):
                    return block
    return None
