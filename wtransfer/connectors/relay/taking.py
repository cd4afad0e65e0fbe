"""Copy blocks out of slots into the cache, and prove what they are there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

from wtransfer.connectors.relay.layout import HEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from wtransfer.connectors.relay.layout import SlotLayout
    from wtransfer.connectors.relay.pages import CachePages
    from wtransfer.transport.tensors import ByteArray

TASK_NBYTES = 4 * 1024 * 1024
"""Bytes that are worth a thread of their own. At least one block."""


class Wanted(NamedTuple):
    """One block that is wanted, and where it belongs."""

    name: bytes
    """Its name."""
    block: int
    """Its place in the cache."""


class Taken(NamedTuple):
    """How far it went."""

    number: int
    """Blocks, from the first on, that are in the cache and are what they should be."""
    reason: str | None
    """Why the next one is not; None: there is no next one, or it is not wanted any more."""


class Taker:
    """Copies for one worker. Any thread may call it, for different blocks at the same time.

    Args:
        pages: The cache.
        layout: Of a slot.
        rank: Whose parts of blocks they are.
        num_threads: Among how many a load of many blocks is divided.
    """

    def __init__(
        self, pages: CachePages, layout: SlotLayout, rank: int, num_threads: int = 1
    ) -> None:
        self.layout = layout
        """Of a slot."""
        self.rank = rank
        """Whose parts of blocks they are."""
        self._pages = pages
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "wtransfer-take")

    def take(
        self, wanted: Iterable[Wanted], slots: Iterable[ByteArray], go_on: Callable[[], bool]
    ) -> Taken:
        """Copy blocks one after the other, up to the first that cannot be.

        The slots are gone through to their end in any case.

        Args:
            wanted: The blocks.
            slots: The slot of each; valid until the next is asked for.
            go_on: Whether they are still wanted.
        """
        number, reason, ended = 0, None, False
        # Slots first: so they, too, are gone through to their end.
        for slot, each in zip(slots, wanted, strict=False):
            ended = ended or not go_on()
            if not ended:
                reason = self._take(each, slot)
                ended = reason is not None
                number += not ended
        return Taken(number, reason)

    def take_at_once(
        self, wanted: Sequence[Wanted], slots: Sequence[ByteArray], go_on: Callable[[], bool]
    ) -> Taken:
        """Copy blocks on several threads, if there are enough.

        Args:
            wanted: The blocks.
            slots: The slot of each; all are valid until this returns.
            go_on: Whether they are still wanted.
        """
        least = -(-TASK_NBYTES // self.layout.nbytes)
        size = max(least, -(-len(slots) // self._num_threads))
        if size >= len(slots):
            return self.take(wanted, slots, go_on)
        parts = [slice(start, start + size) for start in range(0, len(slots), size)]
        taken = [
            self._threads.submit(self.take, wanted[part], slots[part], go_on) for part in parts
        ]
        # All of them, also if one raises: nothing may be written any more when this returns.
        wait(taken)
        return _joined([each.result() for each in taken], size)

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        self._threads.shutdown()

    def _take(self, wanted: Wanted, slot: ByteArray) -> str | None:
        """Copy a block into the cache; return why it must not be used, if that is so.

        The slot may be another process's, which gives it to another block when it has to: then its
        head is another one afterwards, and what was copied may be of both.
        """
        head = slot[HEAD].tobytes()
        found = self.layout.look(head, wanted.name, self.rank)
        if isinstance(found, str):
            return found
        digest = self._pages.write(wanted.block, slot[self.layout.payload])
        if slot[HEAD].tobytes() != head:
            return "reused"
        return None if digest == found.checksum else "checksum"


def _joined(parts: list[Taken], size: int) -> Taken:
    """Return how far parts went that belong one behind the other."""
    number = 0
    for part in parts:
        number += part.number
        if part.number < size:
            return Taken(number, part.reason)
    return Taken(number, None)
