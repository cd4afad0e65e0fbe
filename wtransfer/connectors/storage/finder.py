"""Which blocks are there, for the scheduler's side, which asks often and must not wait for long."""

from __future__ import annotations

import time
from itertools import takewhile
from typing import TYPE_CHECKING

from wtransfer.connectors.storage.files import look
from wtransfer.connectors.storage.store import file_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wtransfer.connectors.storage.store import Store
    from wtransfer.transport.files import Folder

REMEMBERED_S = 0.5
"""How long a block that was seen is taken to be there, in seconds."""


class Finder:
    """Looks for blocks, and remembers for a moment which ones it has seen.

    A look is a system call for each block and rank. A host asks again in every step until it has
    room for a request, and many requests begin alike; so what was seen a moment ago is not looked
    for again, but for the last of it. For what goes first is what was not used for longest, and of
    a prefix that is its end; and a shelf goes as a whole. What is missing is not remembered:
    somebody may be about to store it.

    A block in the middle that goes all the same is promised until the moment is over, or a load of
    it has failed: it is a miss that costs a step, and never other bytes.

    Args:
        store: Where blocks are.
        num_ranks: A block is there if the files of all ranks are.
        clock: Tells the time, in seconds.
    """

    def __init__(
        self, store: Store, num_ranks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._ranks = range(num_ranks)
        self._clock = clock
        self._shelf_name = ""
        self._seen: set[bytes] = set()
        self._until = 0.0

    def num_found(self, shelf_name: str, names: Sequence[bytes]) -> int:
        """Return how many blocks from the first one on are there for all ranks.

        Args:
            shelf_name: Where they would be.
            names: Of the blocks of one request, in order.

        Raises:
            WTransferError: The disk fails.

        Cost: a system call for each rank of each block that is new; for one block if none is.
        """
        if shelf_name != self._shelf_name or self._clock() >= self._until:
            self.forget()
        self._shelf_name = shelf_name
        shelf = self._store.shelf(shelf_name)
        if shelf is None:
            self.forget()
            return 0
        with shelf:
            known = self._num_known(shelf, names)
            fresh = list(takewhile(lambda name: self._is_there(shelf, name), names[known:]))
        if not self._seen:
            # From the end of the look on: it may itself take longer than that.
            self._until = self._clock() + REMEMBERED_S
        self._seen.update(fresh)
        return known + len(fresh)

    def forget(self) -> None:
        """Look again for everything."""
        self._seen.clear()

    def _num_known(self, shelf: Folder, names: Sequence[bytes]) -> int:
        """Return how many blocks from the first one on were seen, and are not to be doubted."""
        known = sum(1 for _ in takewhile(self._seen.__contains__, names))
        if known and not self._is_there(shelf, names[known - 1]):
            self.forget()
            return 0
        return known

    def _is_there(self, shelf: Folder, name: bytes) -> bool:
        return all(look(shelf, file_name(name, rank)) is not None for rank in self._ranks)
