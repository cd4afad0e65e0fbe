"""The publishers that a session has joined because a request named them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, TypeAlias

from wtransfer.deadline import Deadline
from wtransfer.errors import ClosedError, StallError

if TYPE_CHECKING:
    from wtransfer.weight_sync.worker.follower import Follower
    from wtransfer.weight_sync.worker.link import Link
    from wtransfer.weight_sync.worker.session import WorkerSession

    Joined: TypeAlias = Link | Follower

ARRIVE_S = 10.0
"""Time for a publisher to be reached, in seconds."""

_POLL_S = 0.005


class Invitations:
    """Joins and leaves publishers on request.

    What the session has joined otherwise is not touched: its owner has decided on that.

    Args:
        session: The worker's.
        token: Secret of publishers that come without one.
    """

    def __init__(self, session: WorkerSession, token: str) -> None:
        self._session = session
        self._token = token
        self._lock = threading.Lock()
        self._joined: dict[str, Joined] = {}
        self._arriving: set[str] = set()

    def accept(self, address: str, token: str | None, host: str | None = None) -> Joined:
        """Join a publisher; one that was joined before is no error. May block for a second.

        Those that were joined here and are not reached any more are left: they are dead, or will
        ask again.

        Args:
            address: The publisher's.
            token: Its secret, where that is another than the worker's.
            host: What the publisher calls this host.

        Raises:
            AddressError: Not an address.
            ClosedError: The session was closed.
        """
        with self._lock:
            self._leave_lost()
            link = self._session.link_to(address)
            if link is not None:
                return link
            self._session.join(address, token=token or self._token, host=host)
            link = self._session.link_to(address)
            assert link is not None
            self._joined[address] = link
            self._arriving.add(address)
            return link

    async def arrival(self, link: Joined) -> None:
        """Wait until a publisher is reached.

        Raises:
            StallError: It was not reached in time.
            PeerError: It refuses this worker.
        """
        deadline = Deadline(ARRIVE_S)
        try:
            while not link.connected:
                _check_arriving(link, deadline)
                # A link tells nobody when it connects, and this is once per publisher.
                await asyncio.sleep(_POLL_S)
        finally:
            self._arriving.discard(link.address)

    def leave(self, address: str) -> bool:
        """Leave a publisher; return whether it was joined here. May block for a second."""
        with self._lock:
            return self._leave(address)

    def leave_all(self) -> list[str]:
        """Leave every publisher that was joined here; return their addresses."""
        with self._lock:
            return [address for address in list(self._joined) if self._leave(address)]

    def _leave_lost(self) -> None:
        for address, link in list(self._joined.items()):
            if not link.connected and address not in self._arriving:
                self._leave(address)

    def _leave(self, address: str) -> bool:
        link = self._joined.pop(address, None)
        if link is None:
            return False
        # The session's owner may have left it, or closed everything, meanwhile.
        if self._session.link_to(address) is link:
            with contextlib.suppress(ClosedError):
                self._session.leave(address)
        return True


def _check_arriving(link: Joined, deadline: Deadline) -> None:
    if link.refusal is not None:
        raise link.refusal
    if deadline.expired:
        raise StallError(
            f"publisher {link.address} was not reached within {deadline.seconds:g} s; is it there, "
            "and can this host dial it?",
            seconds=deadline.seconds,
        )
