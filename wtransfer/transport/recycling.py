"""Memory that is used again once nobody looks at it any more."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from wtransfer.transport.memory import Segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.transport.tensors import ByteArray


class RecycledMemory:
    """Hands out memory, and takes it back when all that was made from it is gone.

    Fresh pages cost ten times a copy. A worker that adopts updates needs two pieces in turn: the
    one that its model consists of, and the one that the next update is received into.

    Used by one thread; what was handed out may be let go of by any.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[Segment, weakref.ref[ByteArray]]] = []

    def take(self, nbytes: int, on_step: Callable[[], object] | None = None) -> ByteArray:
        """Return memory that nobody else uses, shape ``(nbytes,)``, with anything in it.

        Args:
            nbytes: Size.
            on_step: Called again and again while fresh memory is taken; may raise.

        Raises:
            StagingMemoryError: There is not that much.
        """
        segment = self._reclaim(nbytes) or Segment(nbytes, on_step)
        # Tensors and slices keep this object alive, whichever way they were made from it.
        lent: ByteArray = np.frombuffer(segment.buffer.data, np.uint8, nbytes)
        self._pieces.append((segment, weakref.ref(lent)))
        return lent

    def forget(self) -> None:
        """Keep nothing for later; what is in use stays as long as it is."""
        for segment, _ in self._pieces:
            segment.close()
        self._pieces.clear()

    def _reclaim(self, nbytes: int) -> Segment | None:
        """Return a piece that is free and large enough; the others that are free are let go of."""
        pieces, self._pieces = self._pieces, []
        found = None
        for segment, lent in pieces:
            if lent() is not None:
                self._pieces.append((segment, lent))
            elif found is None and segment.nbytes >= nbytes:
                found = segment
            else:
                segment.close()
        return found
