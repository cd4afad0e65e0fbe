"""Lend shared segments to other processes of the same user on the same host, by descriptor.

How a segment travels:

1. Lender: listens on an abstract Unix socket; address and secret reach the borrower another way.
2. Lender: `Lender.offer` names a segment by number.
3. Borrower: connects, checks that the same user listens there, sends secret and number.
4. Lender: checks user and secret, counts a lease, answers with size and descriptor.
5. Borrower: maps it privately and keeps the connection for as long as the mapping lives.
6. Lender: sees the connection end, and counts the lease no longer.

**The connection is the lease.** There is no message that ends one: the kernel closes the borrower's
end when the mapping is let go (a finalizer), when the process ends, whichever way, and in a forked
child not before the child, which holds a copy of the mapping, lets go of its copy as well. So a
lease never ends while somebody could still read the segment through it, nothing needs to be sent
from a finalizer (which may run in any thread, inside the garbage collector), and a killed borrower
leaves no lease behind.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    AuthenticationError,
    ClosedError,
    DescriptorLimitError,
    ForkedError,
    PeerError,
    PeerLostError,
    ProtocolError,
    SegmentGoneError,
    StallError,
    WTransferError,
)
from wtransfer.transport.memory import map_private, os_errors

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator

    from wtransfer.transport.memory import Segment

PROTOCOL = "wtransfer-handover-1"
"""Name and number of this protocol; both sides must say the same."""
MAX_WAITING = 64
"""Connections that may be open without having shown the secret; more end the oldest."""
REQUEST_DEADLINE_S = 1.0
"""Time in which a connection has to show the secret."""

_MAX_DATAGRAM = 4096
_BACKLOG = 512
_NO_DESCRIPTOR_PAUSE_S = 0.1
_QUEUE_RETRY_S = 0.005
_SHORTEST_WAIT_S = 0.001
_CREDENTIALS = struct.Struct("3i")

Status = Literal["lent", "unknown", "denied", "protocol"]


class _Request(msgspec.Struct, array_like=True):
    protocol: str
    secret: str
    segment_id: int


class _Reply(msgspec.Struct, array_like=True):
    protocol: str
    status: Status
    nbytes: int


_decode_request = msgspec.msgpack.Decoder(_Request).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode
_encode = msgspec.msgpack.Encoder().encode


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return int(uid)


class Lender:
    """The side that owns segments and must not rewrite one while somebody reads it.

    One daemon thread answers borrowers; every method may be called from any thread. In a forked
    child the sockets are closed and every method raises.
    """

    def __init__(self) -> None:
        self.secret = secrets.token_hex(32)
        """What a borrower has to show; hand it over out of band."""
        name = f"wtransfer-{secrets.token_hex(8)}"
        self.address = f"@{name}"
        """Where to connect, as ``@name``: an abstract Unix socket, gone with this process."""
        self._pid = os.getpid()
        # Guards segments and leases. A condition, so that `wait_free` hears of every lease's end.
        self._changed = threading.Condition()
        self._segments: dict[int, Segment] = {}
        self._leases: dict[socket.socket, int] = {}
        self._waiting: dict[socket.socket, float] = {}
        self._closed = False
        with os_errors("listening for borrowers"):
            self._selector = selectors.DefaultSelector()
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(f"\0{name}")
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="wtransfer-lender", daemon=True)
        _LENDERS.add(self)
        self._thread.start()

    def offer(self, segment_id: int, segment: Segment) -> None:
        """Let borrowers have a segment.

        Args:
            segment_id: A number of its own for every content: leases are counted by it.
            segment: Stays open until it is withdrawn.

        Raises:
            ValueError: The number is on offer.
            ClosedError: The lender was closed.
            ForkedError: This is a forked child.
        """
        self._check_usable()
        with self._changed:
            if segment_id in self._segments:
                raise ValueError(f"segment {segment_id} is on offer already; withdraw it first")
            self._segments[segment_id] = segment

    def withdraw(self, segment_id: int) -> None:
        """Lend a segment no more; leases that exist go on.

        When this returns, every lease that was ever granted on it is counted: granting happens
        under the same lock, and counts before it sends. So "withdraw, then wait until free" cannot
        miss a borrower. Withdrawing what is not on offer does nothing.
        """
        with self._changed:
            self._segments.pop(segment_id, None)

    def num_leases(self, segment_id: int) -> int:
        """Return how many leases on a segment exist now, also after it was withdrawn."""
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

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("this lender belongs to the parent process; make one after fork()")
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
        if self._listener not in self._selector.get_map():
            return _NO_DESCRIPTOR_PAUSE_S
        if not self._waiting:
            return None
        return max(0.0, min(self._waiting.values()) - time.monotonic())

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for connection in [c for c, end in self._waiting.items() if end <= now]:
            self._drop(connection)
        if not self._closed and self._listener not in self._selector.get_map():
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
            return
        if _peer_uid(connection) != os.geteuid():
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
            datagram = connection.recv(_MAX_DATAGRAM)
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
            request = _decode_request(datagram)
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
            segment = self._segments.get(segment_id)
            if segment is not None:
                # Counted before it is sent: from here on the borrower may map and read. Under the
                # lock, since a withdrawn segment's descriptor may be closed and its number reused.
                self._leases[connection] = segment_id
                reply = _encode(_Reply(PROTOCOL, "lent", segment.nbytes))
                try:
                    socket.send_fds(connection, [reply], [segment.fd])
                except OSError:
                    segment = None
        if segment is None:
            self._refuse(connection, "unknown")

    def _refuse(self, connection: socket.socket, status: Status) -> None:
        # The first datagram on a fresh connection always fits; if the peer is gone, so be it.
        with contextlib.suppress(OSError):
            connection.send(_encode(_Reply(PROTOCOL, status, 0)))
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


@dataclass(frozen=True)
class Mapping:
    """A borrowed segment.

    The lease ends when `mapping` is unmapped: when this object, and every tensor and array made
    from the mapping, are gone. Never call ``mapping.close()``.
    """

    segment_id: int
    """Number under which it was lent."""
    nbytes: int
    """Size in bytes."""
    mapping: mmap.mmap
    """Private, writable mapping; mapped afresh by each `Borrower.borrow`, not populated."""


class Borrower:
    """The side that maps segments of a lender.

    It holds no connection of its own, only leases do. Usable from any thread, and after a fork.

    Args:
        address: `Lender.address`.
        secret: `Lender.secret`.
        timeout_s: Longest time that one `borrow` may take, in seconds.
    """

    def __init__(self, address: str, secret: str, timeout_s: float) -> None:
        self.address = address
        self._secret = secret
        self._timeout_s = timeout_s
        self._closed = False

    def borrow(self, segment_id: int) -> Mapping:
        """Map a segment and hold a lease on it until the mapping is gone.

        Raises:
            SegmentGoneError: The lender does not lend this segment (any more).
            PeerLostError: The lender is gone.
            AuthenticationError: Wrong secret, or the lender belongs to another user.
            ProtocolError: The lender speaks another protocol.
            StallError: No answer within the time allowed.
            TruncatedError: The segment is smaller than announced.
            DescriptorLimitError: No descriptor is left; each mapping takes two.
            StagingMemoryError: No address space is left.
            ClosedError: The borrower was closed.

        Cost: about 0.2 ms.
        """
        if self._closed:
            raise ClosedError("this borrower was closed; make another one")
        with _our_errors(f"borrowing segment {segment_id} of {self.address}", self._timeout_s):
            return self._borrow(segment_id, Deadline(self._timeout_s))

    def close(self) -> None:
        """Borrow nothing more. What is borrowed stays, and so do its leases."""
        self._closed = True

    def _borrow(self, segment_id: int, deadline: Deadline) -> Mapping:
        with contextlib.ExitStack() as cleanup:
            connection = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._connect(connection, deadline)
            connection.settimeout(deadline.remaining() or _SHORTEST_WAIT_S)
            connection.send(_encode(_Request(PROTOCOL, self._secret, segment_id)))
            nbytes, fd = self._receive(connection, segment_id)
            cleanup.callback(os.close, fd)
            mapping = map_private(fd, nbytes)
            # From here on the connection ends with the mapping. Not at interpreter exit, where a
            # daemon thread may still run the model: the kernel closes it after the last thread.
            weakref.finalize(mapping, os.close, connection.detach()).atexit = False
        return Mapping(segment_id, nbytes, mapping)

    def _connect(self, connection: socket.socket, deadline: Deadline) -> None:
        connection.setblocking(False)
        while True:
            try:
                connection.connect(f"\0{self.address.removeprefix('@')}")
                break
            except BlockingIOError:
                # The lender's queue is full. Unix sockets do not tell when it has room again.
                deadline.check(f"the connection to {self.address}")
                time.sleep(_QUEUE_RETRY_S)
        # The secret is shown only to a process of the same user.
        if _peer_uid(connection) != os.geteuid():
            raise AuthenticationError(
                f"{self.address} belongs to user {_peer_uid(connection)}, this process to user "
                f"{os.geteuid()}; segments are lent between processes of one user"
            )

    def _receive(self, connection: socket.socket, segment_id: int) -> tuple[int, int]:
        """Return size and descriptor."""
        datagram, fds, _, _ = socket.recv_fds(connection, _MAX_DATAGRAM, 1, socket.MSG_CMSG_CLOEXEC)
        if not datagram:
            raise PeerLostError(f"the lender at {self.address} hung up")
        try:
            reply = _decode_reply(datagram)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self.address} does not speak {PROTOCOL}: {error}") from error
        if reply.status == "lent" and fds:
            return reply.nbytes, fds[0]
        if reply.status == "lent":
            raise DescriptorLimitError(
                f"segment {segment_id} was lent, but no descriptor is left here to receive it; "
                "raise the limit (ulimit -n) or close files"
            )
        raise self._refusal(reply, segment_id)

    def _refusal(self, reply: _Reply, segment_id: int) -> PeerError:
        if reply.status == "unknown":
            return SegmentGoneError(
                f"{self.address} does not lend segment {segment_id} (any more); its round is over"
            )
        if reply.status == "denied":
            return AuthenticationError(f"{self.address} did not accept the secret")
        return ProtocolError(
            f"{self.address} speaks {reply.protocol}, this process {PROTOCOL}; install the same "
            "version of wtransfer on both sides"
        )


@contextlib.contextmanager
def _our_errors(what: str, timeout_s: float) -> Iterator[None]:
    try:
        with os_errors(what):
            yield
    except WTransferError:
        raise
    except TimeoutError as error:
        raise StallError(
            f"{what}: no answer from the lender within {timeout_s:g} s", seconds=timeout_s
        ) from error
    except OSError as error:
        raise PeerLostError(f"{what}: the lender is gone ({error.strerror})") from error
