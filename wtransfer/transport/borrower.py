"""The side of a hand-over that maps segments; `wtransfer.transport.handover` has the whole."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    AuthenticationError,
    ClosedError,
    DescriptorLimitError,
    PeerError,
    PeerLostError,
    ProtocolError,
    SegmentGoneError,
    StallError,
    WTransferError,
)
from wtransfer.transport.lender import MAX_DATAGRAM, PROTOCOL, Reply, Request, peer_uid
from wtransfer.transport.memory import Segment, map_private, os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.transport.lender import Fact
    from wtransfer.transport.tensors import ByteArray

_QUEUE_RETRY_S = 0.005
_SHORTEST_WAIT_S = 0.001
_FD = struct.Struct("i")

_decode = msgspec.msgpack.Decoder(Reply).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Mapping:
    """A borrowed segment.

    The lease ends when this object, and every tensor and array made from the mapping, are gone.
    """

    segment_id: int
    """Number under which it was lent."""
    nbytes: int
    """Size in bytes."""
    mapping: ByteArray
    """Private, writable memory; mapped afresh by each `Borrower.borrow`, not populated."""


class Shared(NamedTuple):
    """A segment that two processes write to."""

    segment: Segment
    """It; stays when the lender is gone."""
    facts: dict[str, Fact]
    """What the lender says of it."""


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
            DescriptorLimitError: No descriptor is left; each mapping takes one.
            StagingMemoryError: No address space is left.
            ClosedError: The borrower was closed.

        Cost: about 0.2 ms.
        """
        if self._closed:
            raise ClosedError("this borrower was closed; make another one")
        with _our_errors(f"borrowing segment {segment_id} of {self.address}", self._timeout_s):
            return self._borrow(segment_id, Deadline(self._timeout_s))

    def share(self, segment_id: int) -> Shared:
        """Map a segment so that both sides write to the same memory. There is no lease on it.

        Raises:
            WTransferError: As `borrow`.
        """
        if self._closed:
            raise ClosedError("this borrower was closed; make another one")
        with (
            _our_errors(f"sharing segment {segment_id} of {self.address}", self._timeout_s),
            self._ask(segment_id, Deadline(self._timeout_s)) as (_, reply, fd),
        ):
            return Shared(Segment.of(os.dup(fd), reply.nbytes), reply.facts)

    def close(self) -> None:
        """Borrow nothing more. What is borrowed stays, and so do its leases."""
        self._closed = True

    def _borrow(self, segment_id: int, deadline: Deadline) -> Mapping:
        with self._ask(segment_id, deadline) as (connection, reply, fd):
            mapping = map_private(fd, reply.nbytes)
            # From here on the connection ends with the mapping. Not at interpreter exit, where a
            # daemon thread may still run the model: the kernel closes it after the last thread.
            weakref.finalize(mapping, os.close, connection.detach()).atexit = False
        return Mapping(segment_id, reply.nbytes, mapping)

    @contextlib.contextmanager
    def _ask(
        self, segment_id: int, deadline: Deadline
    ) -> Iterator[tuple[socket.socket, Reply, int]]:
        """Get a descriptor, open as long as the context."""
        with contextlib.ExitStack() as cleanup:
            connection = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._connect(connection, deadline)
            connection.settimeout(deadline.remaining() or _SHORTEST_WAIT_S)
            connection.send(_encode(Request(PROTOCOL, self._secret, segment_id)))
            reply, fd = self._receive(connection, segment_id)
            cleanup.callback(os.close, fd)
            yield connection, reply, fd

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
        if peer_uid(connection) != os.geteuid():
            raise AuthenticationError(
                f"{self.address} belongs to user {peer_uid(connection)}, this process to user "
                f"{os.geteuid()}; segments are lent between processes of one user"
            )

    def _receive(self, connection: socket.socket, segment_id: int) -> tuple[Reply, int]:
        """Return the answer and the descriptor."""
        # Not socket.recv_fds, which forgets the flag: a program started by another thread just now
        # would inherit the descriptor.
        datagram, ancillary, _, _ = connection.recvmsg(
            MAX_DATAGRAM, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC
        )
        fds = [_FD.unpack(data)[0] for _, _, data in ancillary]
        if not datagram:
            raise PeerLostError(f"the lender at {self.address} hung up")
        try:
            reply = _decode(datagram)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self.address} does not speak {PROTOCOL}: {error}") from error
        if reply.status == "lent" and fds:
            return reply, fds[0]
        if reply.status == "lent":
            raise DescriptorLimitError(
                f"segment {segment_id} was lent, but no descriptor is left here to receive it; "
                "raise the limit (ulimit -n) or close files"
            )
        raise self._refusal(reply, segment_id)

    def _refusal(self, reply: Reply, segment_id: int) -> PeerError:
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
