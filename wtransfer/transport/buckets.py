"""Many tensors as one stream of bytes, cut into buckets that travel one by one."""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LEAST_NBYTES = 1 << 20
"""Bytes below which buckets do not taper off."""
ALIGNMENT = 64
"""Tensors start at multiples of this many bytes: a cache line, and any dtype's need."""


def aligned(nbytes: int) -> int:
    """Return the next place at which a tensor may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Bucket(NamedTuple):
    """Some tensors that follow each other."""

    first: int
    """Number of the first tensor."""
    last: int
    """Number behind the last one."""
    start: int
    """First byte in the stream."""
    stop: int
    """Byte behind the last one."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


class Layout:
    """Where each tensor lies in the stream. Both sides work it out from the same sizes.

    Args:
        sizes: Bytes of each tensor, in order.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.starts: list[int] = []
        """First byte of each tensor."""
        self.stops: list[int] = []
        """Byte behind each tensor."""
        stop = 0
        for size in sizes:
            start = aligned(stop)
            stop = start + size
            self.starts.append(start)
            self.stops.append(stop)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole stream."""
        return self.stops[-1] if self.stops else 0

    def cut(self, nbytes: int) -> Iterator[Bucket]:
        """Yield buckets of whole tensors, each of `nbytes` or a little more.

        Towards the end each takes half of what is left: what was filled last has to travel and be
        looked at while nothing else is to be done. A tensor that is larger makes a larger bucket.
        """
        first = 0
        while first < len(self.stops):
            start = self.starts[first]
            size = min(nbytes, max(LEAST_NBYTES, (self.nbytes - start) // 2))
            last = bisect.bisect_left(self.stops, start + size, first) + 1
            yield self._bucket(first, min(last, len(self.stops)))
            first = last

    def _bucket(self, first: int, last: int) -> Bucket:
        return Bucket(first, last, self.starts[first], self.stops[last - 1])


def slices(bucket: Bucket, nbytes: int) -> Iterator[slice]:
    """Yield a bucket's bytes, counted from its start, in parts of at most `nbytes`.

    What is larger than that travels in several parts, so that both sides see it move.
    """
    edges = [*range(0, bucket.nbytes, nbytes), bucket.nbytes]
    return itertools.starmap(slice, itertools.pairwise(edges))
