"""Export shared segments to other processes of the same user on the same host, by descriptor.

How a segment travels:

1. Exporter: listens at an abstract Unix socket; address and secret reach the reader another way.
   Where a process beside it has a socket in a folder, the exporter has one there, too, and the path
   is its abstract name: readers that see the folder need not share the network namespace.
2. Exporter: `SegmentExporter.export` registers a segment under a number.
3. Reader: `attach` connects and shakes hands as any dialer of the channel does, again where the
   exporter had no room, and sends the number.
4. Exporter: counts a lease, answers with size and descriptor.
5. Reader: maps it privately and keeps the connection for as long as the mapping lives.
6. Exporter: sees the connection end, and counts the lease no longer.

**The connection is the lease.** There is no message that ends one: the kernel closes the reader's
end when the mapping is released (a finalizer), when the process ends, whichever way, and in a
forked child not before the child, which holds a copy of the mapping, releases its copy as well. So
a lease never ends while a process could still read the segment through it, nothing needs to be sent
from a finalizer (which may run in any thread, inside the garbage collector), and a killed reader
leaves no lease behind.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from wtransfer.deadline import LONGEST_S, Deadline
from wtransfer.errors import (
    AddressError,
    ClosedError,
    DescriptorLimitError,
    PeerLostError,
    ProtocolError,
    SegmentGoneError,
    StallError,
    WTransferError,
)
from wtransfer.transport.address import address_beside, limit_wait, parse_address
from wtransfer.transport.channel import Codec, Connection, Dial, Listener, MessageType, dialed
from wtransfer.transport.memory import Segment, closed_when_dropped, map_private, os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wtransfer.transport.tensors import ByteArray

MAX_LEASES = 1 << 16
"""Leases of one exporter at a time; the limit on descriptors is reached before."""

_MAX_NBYTES = 4096
_ONE_FD_NBYTES = socket.CMSG_LEN(array.array("i").itemsize)

Fact = int | str
"""Type of a fact about a segment."""


class Attach(msgspec.Struct):
    """Ask for a segment, once, on a fresh connection."""

    segment_id: int
    """Number of the segment."""


class Attached(msgspec.Struct):
    """Answer with a segment; its descriptor comes with this message."""

    nbytes: int
    """Size of the segment."""
    facts: dict[str, Fact] = {}
    """The exporter's facts about the segment."""


class Gone(msgspec.Struct):
    """Answer that no such segment is exported."""


CODEC = Codec(
    [
        MessageType(1, Attach, _MAX_NBYTES),
        MessageType(2, Attached, _MAX_NBYTES),
        MessageType(3, Gone, _MAX_NBYTES),
    ]
)


class _Exported(NamedTuple):
    segment: Segment
    facts: dict[str, Fact]


class SegmentExporter:
    """The side that owns segments and must not rewrite one while another process reads it.

    Every method may be called from any thread. In a forked child every method raises.

    Args:
        address: Address to listen at; by default a random abstract Unix address.
        secret: Secret that a reader has to prove to know; by default a random one.
        beside: Address of another listener of this process. Where that is a path, this one listens
            at a path beside it, too, for readers in other network namespaces.

    Raises:
        AddressInUseError: Another process listens there.
        DescriptorLimitError: No descriptor is left.
    """

    def __init__(
        self, address: str | None = None, secret: str | None = None, *, beside: str | None = None
    ) -> None:
        # Guards segments and leases. A condition: every lease's end wakes `wait_free`.
        self._changed = threading.Condition()
        self._segments: dict[int, _Exported] = {}
        self._leases: dict[Connection, int] = {}
        self._closed = False
        self._pid = os.getpid()
        path = address_beside(beside)
        # The abstract name is the path's: readers find either by it, of any release.
        self._listener = self._listen(
            path.replace("unix:", "unix:@", 1) if path else address, secret
        )
        self._at_path: Listener | None = None
        self.address = self._listener.address
        """Address that readers connect to."""
        self.secret = self._listener.token
        """Secret that a reader has to prove to know; hand it over out of band."""
        if path is not None:
            try:
                self._at_path = self._listen(path, self.secret)
            except BaseException:
                self._listener.close()
                raise

    def _listen(self, address: str | None, secret: str | None) -> Listener:
        return Listener(
            CODEC,
            address=address,
            token=secret,
            on_open=lambda _connection: None,
            on_message=self._on_message,
            on_close=self._on_close,
            deadline_s=None,  # a stopped reader keeps its lease
            # Of a busy host's many readers each is late now and then; the round is their limit.
            handshake_s=None,
            max_connections=MAX_LEASES,
        )

    def export(
        self, segment_id: int, segment: Segment, facts: Mapping[str, Fact] | None = None
    ) -> None:
        """Let readers attach a segment.

        Args:
            segment_id: A number of its own for every content: leases are counted by it.
            segment: Segment to export; stays open until it is revoked.
            facts: Facts for readers; some dozens at most.

        Raises:
            ValueError: The number is in use.
            ClosedError: The exporter was closed.
            ForkedError: The process is a forked child.
        """
        self._check_usable()
        with self._changed:
            if segment_id in self._segments:
                raise ValueError(f"segment {segment_id} is exported already; revoke it first")
            self._segments[segment_id] = _Exported(segment, dict(facts or {}))

    def revoke(self, segment_id: int) -> None:
        """Stop exporting a segment; existing leases go on.

        On return, every lease that was ever granted on the segment is counted: granting happens
        under the same lock, and counts before it sends. So "revoke, then wait until free" cannot
        miss a reader. Revoking a segment that is not exported does nothing.

        Raises:
            ForkedError: The process is a forked child.
        """
        self._listener.check_process()
        with self._changed:
            self._segments.pop(segment_id, None)

    def wait_free(self, segment_id: int, timeout_s: float) -> bool:
        """Wait until there is no lease on a segment.

        Args:
            segment_id: Best revoked before, else a new lease may follow at once.
            timeout_s: Longest wait, in seconds.

        Returns:
            True if the segment is free. False: take another one, this one must not be rewritten.

        Raises:
            ClosedError: The exporter was closed, so that leases are no longer counted.
            ForkedError: The process is a forked child.
        """
        self._check_usable()
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._closed or segment_id not in self._leases.values(), timeout_s
            )
        self._check_usable()
        return free

    def close(self) -> None:
        """Stop exporting; a second call does nothing.

        Existing mappings stay valid, but are no longer counted: exported memory must not be
        rewritten afterwards.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._segments.clear()
            self._changed.notify_all()
        self._listener.close()
        if self._at_path is not None:
            self._at_path.close()

    def _check_usable(self) -> None:
        self._listener.check_process()
        if self._closed:
            raise ClosedError("this exporter was closed; make another one")

    # -- on the channel's thread

    def _on_message(self, connection: Connection, message: msgspec.Struct) -> None:
        if not isinstance(message, Attach):
            raise ProtocolError(f"a reader does not send {type(message).__name__}")
        with self._changed, contextlib.suppress(ClosedError):  # closed without being revoked
            exported = self._segments.get(message.segment_id)
            if exported is not None:
                # Under the lock, since a revoked segment's descriptor may be closed and its number
                # reused. Counted before the send: from then on the reader may map and read.
                fd = exported.segment.fd
                self._leases[connection] = message.segment_id
                connection.send_descriptor(Attached(exported.segment.nbytes, exported.facts), fd)
                return
        connection.send(Gone())

    def _on_close(self, connection: Connection, error: WTransferError | None) -> None:  # noqa: ARG002
        with self._changed:
            self._leases.pop(connection, None)
            self._changed.notify_all()


@dataclass(frozen=True)
class Lease:
    """A segment that this process reads.

    The lease ends when this object, and every tensor and array made from the mapping, are gone.
    """

    segment_id: int
    """Number under which the segment is exported."""
    nbytes: int
    """Size in bytes."""
    mapping: ByteArray
    """Private, writable memory; mapped afresh by each `attach`, not populated."""


class Shared(NamedTuple):
    """A segment that two processes write to."""

    segment: Segment
    """The segment; stays when the exporter is gone."""
    facts: dict[str, Fact]
    """The exporter's facts about it."""


def attach(
    address: str,
    secret: str,
    segment_id: int,
    timeout_s: float | None = None,
    dial: Dial | None = None,
) -> Lease:
    """Map a segment and hold a lease on it until the mapping is gone.

    Args:
        address: `SegmentExporter.address`.
        secret: `SegmentExporter.secret`.
        segment_id: Number of the segment.
        timeout_s: Longest time for the whole call, in seconds; None: no limit.
        dial: Calls this call off, from another thread; None: nobody does.

    Raises:
        SegmentGoneError: The exporter does not export this segment (any more).
        PeerLostError: The exporter is gone.
        ClosedError: The call was called off.
        AuthenticationError: Wrong secret, or the exporter belongs to another user.
        ProtocolError: The exporter speaks another protocol.
        StallError: No answer within the time allowed.
        TruncatedError: The segment is smaller than announced.
        DescriptorLimitError: No descriptor is left; each mapping takes one.
        StagingMemoryError: No address space is left.
        AddressError: The address is no Unix socket's.

    Cost: about 0.5 ms.
    """
    dial = dial or Dial()
    with _attached(address, secret, segment_id, timeout_s, dial) as (sock, answer, fd):
        # Before there is a mapping: a connection that is shut down would end its lease.
        dial.done()
        kept: list[object] = []
        mapping = map_private(fd, answer.nbytes, kept)
        # From here on the connection ends with the mapping. Not at interpreter exit, where a
        # daemon thread may still run the model: the kernel closes it after the last thread.
        kept.append(closed_when_dropped(sock.detach()))
        return Lease(segment_id, answer.nbytes, mapping)


def share(address: str, secret: str, segment_id: int, timeout_s: float) -> Shared:
    """Map a segment so that both sides write to the same memory. There is no lease on it.

    Raises:
        WTransferError: As `attach`.
    """
    with _attached(address, secret, segment_id, timeout_s, Dial()) as (_, answer, fd):
        return Shared(Segment.of(os.dup(fd), answer.nbytes), answer.facts)


@contextlib.contextmanager
def _attached(
    address: str, secret: str, segment_id: int, timeout_s: float | None, dial: Dial
) -> Iterator[tuple[socket.socket, Attached, int]]:
    """Get a segment's descriptor, open within the context, over a connection of its own."""
    deadline = Deadline(LONGEST_S if timeout_s is None else timeout_s)
    if not parse_address(address).is_unix:
        raise AddressError(f"{address!r} is no Unix socket: only those carry descriptors")
    path = address.removeprefix("unix:@")
    if path.startswith("/") and os.path.exists(path):  # noqa: PTH110 (a socket's name)
        address = f"unix:{path}"
    fds: list[int] = []
    try:
        with (
            os_errors(f"attaching segment {segment_id} of {address}"),
            dialed(CODEC, address, secret, deadline, dial) as (sock, reader),
        ):
            sock.sendall(CODEC.encode(Attach(segment_id)))
            answer = next(reader.feed(b""), None)
            while answer is None:
                limit_wait(sock, deadline)
                # Not socket.recv_fds, which drops the flag: a program started by another thread
                # just now would inherit the descriptor.
                data, ancillary, _, _ = sock.recvmsg(
                    _MAX_NBYTES, _ONE_FD_NBYTES, socket.MSG_CMSG_CLOEXEC
                )
                for _, _, raw in ancillary:
                    fds += array.array("i", raw)
                if not data:
                    dial.check()
                    raise PeerLostError(f"{address} closed the connection")
                answer = next(reader.feed(data), None)
            if isinstance(answer, Gone):
                raise SegmentGoneError(
                    f"{address} does not export segment {segment_id} (any more); its round is over"
                )
            if not isinstance(answer, Attached):
                raise ProtocolError(f"{address} answered with {type(answer).__name__}")
            if not fds:
                raise DescriptorLimitError(
                    f"segment {segment_id} was exported, but no descriptor is left here to receive "
                    "it; raise the limit (ulimit -n) or close files"
                )
            yield sock, answer, fds[0]
    except WTransferError:
        raise
    except TimeoutError as error:
        raise StallError(
            f"attaching segment {segment_id}: no answer from {address} within "
            f"{deadline.seconds:g} s",
            seconds=deadline.seconds,
        ) from error
    except OSError as error:
        raise PeerLostError(
            f"attaching segment {segment_id}: {address} is gone ({error.strerror})"
        ) from error
    finally:
        for fd in fds:
            os.close(fd)
