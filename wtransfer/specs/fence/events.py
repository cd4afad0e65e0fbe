"""Events of a fenced manager: consumers know the host's keys, and nothing of weights.

Whoever routes requests by such events has one entry for a key of the host. So a block of other
weights must not be in there, neither as stored nor, when it goes, as removed: its key may stand for
a block of the present weights by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.blocks import OffloadKey, host_key
from wtransfer.specs.interface import OffloadingEvent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from wtransfer.specs.interface import Medium


class FenceEvents:
    """Translates a manager's events, and keeps those of old weights back.

    Its memory is bounded by the blocks that are kept, and none is taken where no events are.
    """

    def __init__(self) -> None:
        self._ready: list[OffloadingEvent] = []
        # By medium, since a block may be in several, and be removed from each.
        self._announced: dict[Medium, set[OffloadKey]] = {}
        self._retired: set[OffloadKey] = set()

    def take(self) -> list[OffloadingEvent]:
        """Return what there is to tell, once."""
        ready, self._ready = self._ready, []
        return ready

    def put(self, events: Iterable[OffloadingEvent], late: Collection[OffloadKey] = ()) -> None:
        """Take events of the fenced manager.

        Args:
            events: With fenced keys.
            late: Blocks of old weights whose store ended just now.
        """
        for event in events:
            if not event.removed:
                # Kept back now, and whenever they come to another medium.
                self._retired.update(set(event.keys).intersection(late))
            keys = self._removed(event) if event.removed else self._stored(event)
            if keys:
                told = [host_key(key) for key in keys]
                self._ready.append(OffloadingEvent(told, event.medium, event.removed))

    def renew(self, keys: Iterable[OffloadKey]) -> None:
        """Hear that blocks were stored with the present weights."""
        self._retired.difference_update(keys)

    def change(self) -> None:
        """Take back all that was announced: it was of other weights."""
        for medium, keys in self._announced.items():
            if keys:
                told = [host_key(key) for key in sorted(keys)]
                self._ready.append(OffloadingEvent(told, medium, removed=True))
            # Their removal is still to come, and so may be their way to another medium.
            self._retired.update(keys)
        self._announced = {}

    def retire(self, keys: Collection[OffloadKey]) -> None:
        """Take back what was announced of blocks that are not asked for any more."""
        for medium, announced in self._announced.items():
            gone = [key for key in keys if key in announced]
            if gone:
                told = [host_key(key) for key in gone]
                self._ready.append(OffloadingEvent(told, medium, removed=True))
            announced.difference_update(gone)
            # As at a change: they may come to another medium, and be removed from each.
            self._retired.update(keys)

    def _stored(self, event: OffloadingEvent) -> list[OffloadKey]:
        keys = [key for key in event.keys if key not in self._retired]
        self._announced.setdefault(event.medium, set()).update(keys)
        return keys

    def _removed(self, event: OffloadingEvent) -> list[OffloadKey]:
        announced = self._announced.setdefault(event.medium, set())
        keys = [key for key in event.keys if key in announced]
        announced.difference_update(keys)
        self._retired.difference_update(event.keys)
        return keys
