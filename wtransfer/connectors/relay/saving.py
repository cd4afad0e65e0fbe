"""Put what a step computes on the shelf, layer by layer, while the next layers compute."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from wtransfer.blocks import CHECKSUM_NBYTES
from wtransfer.connectors.relay.pages import copy_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from wtransfer.connectors.relay.pages import CachePages
    from wtransfer.connectors.relay.plan import Save
    from wtransfer.connectors.relay.shelf import Shelf

logger = logging.getLogger(__name__)


class _Filling(NamedTuple):
    """One block on its way to the shelf."""

    name: bytes
    block: int
    slot: int


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
                self._shelf.keep(filling.name)
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
        layout = self._shelf.layout
        at = layout.table.start + layer * CHECKSUM_NBYTES
        for filling in step.fillings:
            slot = self._shelf.slot(filling.slot)
            digest = copy_digest(slot[layout.pages[layer]], self._pages.page(layer, filling.block))
            slot[at : at + CHECKSUM_NBYTES].data[:] = digest
