"""The publisher, or the folder of versions, that a worker has joined: one at a time."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from wtransfer.deadline import Deadline
from wtransfer.errors import AuthenticationError, RoundBusyError
from wtransfer.transport.address import parse_address
from wtransfer.transport.handshake import resolve_token
from wtransfer.weight_sync.worker.follower import Follower, folder_of, is_folder
from wtransfer.weight_sync.worker.participant import PublisherConnection

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    import msgspec

    from wtransfer.transport.address import Address
    from wtransfer.weight_sync.worker.participant import Member

LOSS_GRACE_S = 1.0
"""Seconds that `join` waits for the loss of a connected publisher to be noticed."""
LOSS_POLL_S = 0.005
"""Seconds between two polls of that."""


class JoinedPublisher:
    """Joins publishers for a worker, and leaves them.

    Args:
        token: The worker's secret; None: that of the environment.
        engines: Engine names that a publisher may ask for; None: every engine found here.
    """

    def __init__(self, token: str | None, engines: Collection[str] | None) -> None:
        self.current: PublisherConnection | Follower | None = None
        """The publisher that was joined and not left."""
        self.has_joined = False
        """True once a publisher was joined, also if it was left."""
        self.lock = threading.RLock()
        """Held while a publisher is joined or left."""
        self._token = token
        self._engines = None if engines is None else frozenset(engines)

    def at(self, address: str) -> PublisherConnection | Follower | None:
        """Return the publisher, if it was joined by this address; else None.

        Raises:
            AddressError: Not an address.
        """
        place, current = _place(address), self.current
        return current if current is not None and _place(current.address) == place else None

    def join(self, member: Member, address: str, token: str | None, host: str | None) -> None:
        """Join a publisher for `member`; arguments and errors as `WorkerSession.join`."""
        with self.lock:
            current = self.current
            # Before any connection: the publisher would refuse a second one as the same worker.
            if self.at(address) is not None:
                raise ValueError(f"this WorkerSession has joined {address} already; join it once")
            # A publisher that ended a moment ago is noticed within milliseconds, on a busy host
            # later.
            grace = Deadline(LOSS_GRACE_S)
            while current is not None and current.connected and not grace.expired:
                time.sleep(LOSS_POLL_S)
            since = None if current is None else current.connected_since
            if current is not None and since is not None:
                raise RoundBusyError(
                    f"{member.name} cannot join {address}: its publisher is {current.address}, "
                    f"connected for {time.monotonic() - since:.1f} s; leave that one, or end it"
                )
            if is_folder(address) and member.num_ranks > 1:
                raise ValueError(
                    f"a rank of {member.num_ranks} cannot follow {address}: a folder cannot see to "
                    "it that all ranks commit or none; join a publisher (it may send a kept "
                    "version)"
                )
            secret = resolve_token(self._token if token is None else token, os.environ)
            if not is_folder(address) and secret is None:
                raise AuthenticationError(
                    f"no token for {address}: pass token=, or set WTRANSFER_TOKEN to the "
                    "publisher's"
                )
            self.current = None
            if current is not None:
                # First: from here on no message of the old publisher can begin a round.
                current.close()
            publisher: PublisherConnection | Follower
            if secret is None or is_folder(address):
                publisher = Follower(member, address)
            else:
                publisher = PublisherConnection(member, address, secret, host, self._engines)
            # In this order: messages after the hello must reach the publisher.
            self.current = publisher
            self.has_joined = True
            try:
                publisher.start()
            except BaseException:
                self.current = None
                raise

    def leave(self, address: str) -> None:
        """Leave the publisher.

        Raises:
            ValueError: Not an address, or one that was not joined.
        """
        with self.lock:
            current = self.at(address)
            if current is None:
                raise ValueError(f"this WorkerSession has not joined {address}")
            self.current = None
            current.close()

    def send(self, message: msgspec.Struct) -> None:
        """Send to the publisher; without one the message is dropped."""
        current = self.current
        if current is not None:
            current.send(message)

    def close(self) -> None:
        """Leave the publisher, if there is one."""
        current, self.current = self.current, None
        if current is not None:
            current.close()


def _place(address: str) -> Address | Path:
    return folder_of(address) if is_folder(address) else parse_address(address)
