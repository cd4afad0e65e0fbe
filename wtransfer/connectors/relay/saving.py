"""Put what a step computes on the shelf, layer by layer, while the next layers compute."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from wtransfer.connectors.relay.pages import CachePages
    from wtransfer.connectors.relay.plan import Save
    from wtransfer.connectors.relay.shelf import Shelf
    from wtransfer.transport.tensors import ByteArray

logger = logging.getLogger(__name__)


class _Filling:
    """One block on its way to the shelf.

    Args:
        name: Its name.
        block: Its place in the cache.
        slot: Its place on the shelf.
    """

    def __init__(self, name: bytes, block: int, slot: int) -> None:
        self.name, self.block, self.slot = name, block, slot
        self._digest = xxhash.xxh3_128()
        self._num_digested = 0

    def digest(self, number: int, page: ByteArray) -> None:
        """Digest a page, if it is the next: just copied, it is in the processor's cache."""
        if number == self._num_digested:
            self._digest.update(page.data)
            self._num_digested += 1

    def checksum(self, slot: ByteArray, pages: Sequence[slice]) -> bytes:
        """Return that of all pages; those that were copied out of order are digested here."""
        for number in range(self._num_digested, len(pages)):
            self.digest(number, slot[pages[number]])
        return self._digest.digest()


class _Step:
    """What one step saves."""

    def __init__(self, saves: Sequence[Save]) -> None:
        self.saves = saves
        self.fillings: list[_Filling] = []
        self.layers: dict[int, Future[None]] = {}


def request_holder(request_id: str) -> Hashable:
    """Return the holder of what is leased to a request, whoever comes for it."""
    return "request", request_id


class Saving:
    """The way to the shelf. The model's thread calls it.

    Args:
        pages: The cache.
        shelf: The shelf.
        admits: Whether something that was planned for these weights may be done now.
    """

    def __init__(self, pages: CachePages, shelf: Shelf, admits: Callable[[Save], bool]) -> None:
        self._pages = pages
        self._shelf = shelf
        self._admits = admits
        self._step: _Step | None = None
        self._thread = ThreadPoolExecutor(1, "wtransfer-save")

    def layer(self, name: str, saves: Sequence[Save]) -> None:
        """Begin to copy what a step has computed of a layer.

        Args:
            name: The layer.
            saves: All that this step saves, the same for every layer.
        """
        if self._step is None:
            self._step = self._begin(saves)
        step, number = self._step, self._pages.index.get(name)
        if number is not None and step.fillings and number not in step.layers:
            step.layers[number] = self._thread.submit(self._copy, step, number)

    def finish(self) -> None:
        """Wait for the copies of this step, and let the others have its blocks."""
        step, self._step = self._step, None
        if step is None:
            return
        whole = self._wait(step) and all(map(self._admits, step.saves))
        for filling in step.fillings:
            if whole:
                slot, pages = self._shelf.slot(filling.slot), self._shelf.layout.pages
                self._shelf.keep(filling.name, filling.checksum(slot, pages))
            else:
                self._shelf.discard(filling.name)
        for save in step.saves:
            self._shelf.lease(request_holder(save.request_id), save.names)

    def drop(self) -> None:
        """Hear that a step is over; what it did not finish does not count, and nobody gets it."""
        step, self._step = self._step, None
        if step is not None:
            self._wait(step)
            for filling in step.fillings:
                self._shelf.discard(filling.name)

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        self._thread.shutdown()

    def _begin(self, saves: Sequence[Save]) -> _Step:
        step = _Step([save for save in saves if self._admits(save)])
        for save in step.saves:
            # What is there already must not make room for the rest.
            self._shelf.lease(request_holder(save.request_id), save.names)
        for save in step.saves:
            for name, block in zip(save.names, save.block_ids, strict=True):
                slot = self._shelf.open(name)
                if slot is not None:
                    step.fillings.append(_Filling(name, block, slot))
        return step

    def _wait(self, step: _Step) -> bool:
        """Return whether every layer is there."""
        whole = len(step.layers) == len(self._pages.index)
        for each in step.layers.values():
            error = each.exception()
            if error is not None:
                logger.error("a layer could not be put on the shelf", exc_info=error)
                whole = False
        return whole

    def _copy(self, step: _Step, layer: int) -> None:
        where = self._shelf.layout.pages[layer]
        for filling in step.fillings:
            page = self._shelf.slot(filling.slot)[where]
            page[:] = self._pages.page(layer, filling.block)
            filling.digest(layer, page)
