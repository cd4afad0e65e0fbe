"""The side of a hand-over that owns the segments; `wtransfer.transport.handover` has the whole."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from wtransfer.errors import AddressInUseError, ClosedError, ForkedError
from wtransfer.transport.memory import os_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.transport.memory import Segment

PROTOCOL = "wtransfer-handover-1"
"""Name and number of this protocol; both sides must say the same."""
MAX_WAITING = 64
"""Connections that may be open without having shown the secret; more end the oldest."""
REQUEST_DEADLINE_S = 1.0
"""Time in which a connection has to show the secret."""

MAX_DATAGRAM = 4096
"""Longest message, in bytes."""

_BACKLOG = 512
_NO_DESCRIPTOR_PAUSE_S = 0.1
_CREDENTIALS = struct.Struct("3i")

Status = Literal["lent", "unknown", "denied", "protocol"]
"""Answers to a request."""
Fact = int | str
"""What a lender may say of a segment."""


class Request(msgspec.Struct, array_like=True):
    """What a borrower says, once, on a fresh connection."""

    protocol: str
    """`PROTOCOL` of the borrower."""
    secret: str
    """`Lender.secret`."""
    segment_id: int
    """Segment it wants."""


class Reply(msgspec.Struct, array_like=True):
    """What the lender answers; with ``lent``, and only then, comes a descriptor."""

    protocol: str
    """`PROTOCOL` of the lender."""
    status: Status
    """What became of the request."""
    nbytes: int
    """Size of the segment."""
    facts: dict[str, Fact] = {}
    """What the lender says of it."""


_decode = msgspec.msgpack.Decoder(Request).decode
_encode = msgspec.msgpack.Encoder().encode


def peer_uid(connection: socket.socket) -> int:
    """Return the user that the kernel says is at the other end of a Unix socket."""
    return _credentials(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """Return the process that the kernel says is at the other end of a Unix socket."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


class _Offer(NamedTuple):
    segment: Segment
    facts: dict[str, Fact]


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{address.removeprefix('@')}")
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"somebody listens at {address} already") from error
        raise
    listener.setblocking(False)
    return listener


class Lender:
    """The side that owns segments and must not rewrite one while somebody reads it.

    One daemon thread answers borrowers; every method may be called from any thread. In a forked
    child the sockets are closed and every method raises.

    Args:
        address: Where to listen, as ``@name``; by default a random one.
        secret: What a borrower has to show; by default a random one.

    Raises:
        AddressInUseError: Somebody listens there.
        DescriptorLimitError: No descriptor is left.
    """

    def __init__(self, address: str | None = None, secret: str | None = None) -> None:
        self.secret = secrets.token_hex(32) if secret is None else secret
        """What a borrower has to show; hand it over out of band."""
        self.address = f"@wtransfer-{secrets.token_hex(8)}" if address is None else address
        """Where to connect, as ``@name``: an abstract Unix socket, gone with this process."""
        self._pid = os.getpid()
        # Guards segments and leases. A condition, so that `wait_free` hears of every lease's end.
        self._changed = threading.Condition()
        self._segments: dict[int, _Offer] = {}
        self._leases: dict[socket.socket, int] = {}
        self._waiting: dict[socket.socket, float] = {}
        self._listen_again: float | None = None
        self._closed = False
        with os_errors("listening for borrowers"):
            self._listener = _listen(self.address)
            self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="wtransfer-lender", daemon=True)
        _LENDERS.add(self)
        self._thread.start()

    def offer(
        self, segment_id: int, segment: Segment, facts: Mapping[str, Fact] | None = None
    ) -> None:
        """Let borrowers have a segment.

        Args:
            segment_id: A number of its own for every content: leases are counted by it.
            segment: Stays open until it is withdrawn.
            facts: What borrowers shall know of it; some dozens at most.

        Raises:
            ValueError: The number is on offer.
            ClosedError: The lender was closed.
            ForkedError: This is a forked child.
        """
        self._check_usable()
        with self._changed:
            if segment_id in self._segments:
                raise ValueError(f"segment {segment_id} is on offer already; withdraw it first")
            self._segments[segment_id] = _Offer(segment, dict(facts or {}))

    def withdraw(self, segment_id: int) -> None:
        """Lend a segment no more; leases that exist go on.

        When this returns, every lease that was ever granted on it is counted: granting happens
        under the same lock, and counts before it sends. So "withdraw, then wait until free" cannot
        miss a borrower. Withdrawing what is not on offer does nothing.

        Raises:
            ForkedError: This is a forked child.
        """
        self._check_owner()
        with self._changed:
            self._segments.pop(segment_id, None)

    def num_leases(self, segment_id: int) -> int:
        """Return how many leases on a segment exist now, also after it was withdrawn.

        Raises:
            ClosedError: The lender was closed, so that leases are no longer counted.
            ForkedError: This is a forked child.
        """
        self._check_usable()
        with self._changed:
            return list(self._leases.values()).count(segment_id)

    def wait_free(self, segment_id: int, timeout_s: float) -> bool:
        """Wait until there is no lease on a segment.

        Args:
            segment_id: Best withdrawn before, else a new lease may follow at once.
            timeout_s: Longest wait, in seconds.

        Returns:
            Whether it is free. False: take another segment, this one must not be rewritten.

        Raises:
            ClosedError: The lender was closed, so that leases are no longer counted.
            ForkedError: This is a forked child.
        """
        self._check_usable()
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._closed or segment_id not in self._leases.values(), timeout_s
            )
        self._check_usable()
        return free

    def close(self) -> None:
        """Stop lending; a second call does nothing.

        Mappings that exist stay valid, but are no longer known: memory that was lent must not be
        rewritten after this.
        """
        if os.getpid() != self._pid or self._closed:
            return
        with self._changed:
            self._closed = True
            self._segments.clear()
            self._changed.notify_all()
        # Wakes the thread: a listener that was shut down is readable.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("this lender belongs to the parent process; make one after fork()")

    def _check_usable(self) -> None:
        self._check_owner()
        if self._closed:
            raise ClosedError("this lender was closed; make another one")

    # -- the thread; it alone touches selector, listener and waiting connections ----------------

    def _serve(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(self._next_check_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.data)
                self._end_overdue()
        finally:
            self._close_sockets()

    def _next_check_s(self) -> float | None:
        times = list(self._waiting.values())
        if self._listen_again is not None:
            times.append(self._listen_again)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for connection in [c for c, end in self._waiting.items() if end <= now]:
            self._drop(connection)
        if self._listen_again is not None and self._listen_again <= now:
            self._listen_again = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor is left (or the listener was shut down). The connection stays queued and
            # the listener readable: look away for a while instead of spinning.
            self._selector.unregister(self._listener)
            self._listen_again = time.monotonic() + _NO_DESCRIPTOR_PAUSE_S
            return
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        if len(self._waiting) >= MAX_WAITING:
            self._drop(next(iter(self._waiting)))
        connection.setblocking(False)
        self._waiting[connection] = time.monotonic() + REQUEST_DEADLINE_S
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._waiting and connection not in self._leases:
            return  # dropped a moment ago, for another event of the same batch
        try:
            datagram = connection.recv(MAX_DATAGRAM)
        except BlockingIOError:
            return
        except OSError:
            datagram = b""
        if not datagram:
            self._drop(connection)
        elif connection in self._waiting:
            self._answer(connection, datagram)
        # Whatever a leaseholder says further changes nothing: its lease is its connection.

    def _answer(self, connection: socket.socket, datagram: bytes) -> None:
        del self._waiting[connection]
        try:
            request = _decode(datagram)
        except msgspec.DecodeError:
            self._refuse(connection, "protocol")
            return
        if request.protocol != PROTOCOL:
            self._refuse(connection, "protocol")
        elif not hmac.compare_digest(request.secret.encode(), self.secret.encode()):
            self._refuse(connection, "denied")
        else:
            self._lend(connection, request.segment_id)

    def _lend(self, connection: socket.socket, segment_id: int) -> None:
        with self._changed:
            offered = self._segments.get(segment_id)
            if offered is not None:
                segment = offered.segment
                # Counted before it is sent: from here on the borrower may map and read. Under the
                # lock, since a withdrawn segment's descriptor may be closed and its number reused.
                self._leases[connection] = segment_id
                reply = _encode(Reply(PROTOCOL, "lent", segment.nbytes, offered.facts))
                try:
                    socket.send_fds(connection, [reply], [segment.fd])
                except (OSError, ClosedError):
                    # The peer is gone, or the segment was closed without being withdrawn.
                    offered = None
        if offered is None:
            self._refuse(connection, "unknown")

    def _refuse(self, connection: socket.socket, status: Status) -> None:
        # The first datagram on a fresh connection always fits; if the peer is gone, so be it.
        with contextlib.suppress(OSError):
            connection.send(_encode(Reply(PROTOCOL, status, 0)))
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._waiting.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()
        with self._changed:
            self._leases.pop(connection, None)
            self._changed.notify_all()

    def _close_sockets(self) -> None:
        self._selector.close()
        self._listener.close()
        for connection in [*self._waiting, *self._leases]:
            connection.close()

    def _abandon(self) -> None:
        """Close this process's copies after a fork.

        A child that kept the listener would leave borrowers of a dead lender in its queue, waiting.
        No lock is taken: the thread that held it may not exist here.
        """
        self._close_sockets()


_LENDERS: weakref.WeakSet[Lender] = weakref.WeakSet()


def _abandon_all() -> None:
    for lender in list(_LENDERS):
        lender._abandon()  # noqa: SLF001 - same module
    _LENDERS.clear()


os.register_at_fork(after_in_child=_abandon_all)
