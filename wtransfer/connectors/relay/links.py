"""The links of one worker, by address."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from wtransfer.errors import WTransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.connectors.relay.link import Here, Link
    from wtransfer.connectors.relay.loads import Loading
    from wtransfer.connectors.relay.plan import Place

logger = logging.getLogger(__name__)

MAX_LINKS = 256
"""Workers of other instances that one worker is linked with at a time."""


class Links:
    """All links of a worker; made where they are first needed.

    Args:
        here: The worker.
        make: Makes a link to an address, with a token.
    """

    def __init__(self, here: Here, make: Callable[[str, str], Link]) -> None:
        self._here = here
        self._make = make
        self._lock = threading.Lock()
        self._links: dict[tuple[str, str], Link] = {}
        self._closed = False

    def load(self, loading: Loading) -> None:
        """Begin a load; if that cannot be, its blocks are missing."""
        place = loading.load.place
        num_ranks = self._here.taker.layout.geometry.num_ranks
        if len(place.addresses) != num_ranks:
            logger.warning(
                "KV blocks of %r do not fit: num_ranks is %d there and %d here",
                place.engine_id,
                len(place.addresses),
                num_ranks,
            )
            self._here.loads.end(loading, "layout")
        elif not self._submit(place, loading):
            self._here.loads.end(loading, "lost")

    def over(self, place: Place) -> None:
        """Say that nothing more is wanted of a request; if nobody hears it, its lease runs out."""
        if len(place.addresses) == self._here.taker.layout.geometry.num_ranks:
            self._submit(place, place.request_id)

    def close(self) -> None:
        """End all."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()

    def _submit(self, place: Place, what: Loading | str) -> bool:
        # By token, too: who tells of a wrong one must not be in the way of those who have it.
        where = address, token = place.of(self._here.taker.rank)
        with self._lock:
            link = self._links.get(where)
            if link is not None and link.submit(what):
                return True
            self._links = {at: each for at, each in self._links.items() if each.is_alive}
            if self._closed or len(self._links) >= MAX_LINKS:
                return False
            try:
                link = self._links[where] = self._make(address, token)
            except (WTransferError, OSError) as error:
                logger.warning("no blocks from %s: %s", address, error)
                return False
            link.start(what)
            return True
