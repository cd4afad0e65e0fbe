"""One piece of memory for all tensors of a round, as something to hand to a round's source."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wtransfer.engines.interface import ParamMeta
    from wtransfer.transport.tensors import ByteArray

MAX_RUN_TENSORS = 1024
"""Most tensors of a run, however small: between two runs a round that has failed is noticed."""


class Places:
    """Says where each tensor goes, to `RoundSource.copy_into`.

    A tensor may lie there for a while before it is yielded, so that many small ones can be digested
    together. Where the next one's place is not behind it, it is yielded before that is written.

    Args:
        memory: Writable.
        numbers: Name -> number of the tensor, in the order of the metadata.
        starts: First byte of each tensor, by number.
        stops: Byte behind each tensor.
    """

    def __init__(
        self,
        memory: ByteArray,
        numbers: Mapping[str, int],
        starts: Sequence[int],
        stops: Sequence[int],
    ) -> None:
        self.memory = memory
        self.starts = starts
        self.stops = stops
        self._numbers = numbers
        self._view = memory.data

    def __getitem__(self, name: str) -> slice:
        """Return the place of a tensor, which is free from now on: those before are copied."""
        number = self._numbers[name]
        self.reach(number)
        return slice(self.starts[number], self.stops[number])

    def __call__(self, meta: ParamMeta) -> memoryview:
        """Return the place of a tensor, as memory."""
        return self._view[self[meta.name]]

    def parts(self, first: int, stop: int) -> Iterator[memoryview]:
        """Return the memory of tensors from `first` up to `stop`, whose places were reached."""
        return map(
            self._view.__getitem__, map(slice, self.starts[first:stop], self.stops[first:stop])
        )

    def reach(self, number: int) -> int:  # noqa: ARG002  # others have to make room
        """Make sure that the place of a tensor is free, all before it having been copied.

        Returns:
            Number of the tensor behind it up to which that is so of the following ones as well.
            Up to there places are in ascending order.
        """
        return len(self.starts)

    def run_from(self, number: int, nbytes: int) -> int:
        """Return the number behind the last tensor of a run of at most `nbytes`.

        A tensor that is larger is a run by itself.
        """
        free = min(self.reach(number), number + MAX_RUN_TENSORS)
        return max(
            number + 1, bisect.bisect_right(self.stops, self.starts[number] + nbytes, number, free)
        )
