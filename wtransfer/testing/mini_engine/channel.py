"""Processes of an engine: start them, exchange messages or an error with them, end them."""

from __future__ import annotations

import contextlib
import secrets
import select
import signal
import socket
import struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.errors import PeerError, PeerLostError, StallError, from_wire, to_wire
from wtransfer.transport.address import check_same_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wtransfer.testing.zygote import Child

PATIENCE_S = 60.0
"""Longest wait for the peer, in seconds: to start, or to answer."""
END_S = 10.0
"""Time for a process to end, in seconds, before it is killed, and after."""
_HEAD = struct.Struct("<I?")  # length, and whether the message is an error
_POLL_S = 0.05
_ERRORS = msgspec.msgpack.Decoder(tuple[str, str, dict[str, Any]])

_T = TypeVar("_T")


class Channel:
    """One end of a connected socket.

    Args:
        connection: The socket; closed with this object.
        peer: Name of the peer, for errors.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._connection = connection
        self._peer = peer
        self.is_lost = False
        """True once the peer is known to be gone."""
        connection.settimeout(PATIENCE_S)

    def wait_forever(self) -> None:
        """Wait without bound from now on: the peer may have nothing to say."""
        self._connection.settimeout(None)

    def poll(self, within_s: float) -> bool:
        """Return whether a message has arrived, or the peer is gone, within some seconds."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            PeerLostError: The peer is gone.
        """
        self._send(message, is_error=False)

    def send_error(self, error: BaseException) -> None:
        """Raise an error where the peer receives its next message, if the peer is there."""
        with contextlib.suppress(PeerLostError):
            self._send(to_wire(error), is_error=True)

    def receive(self, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
        """Return the next message.

        Raises:
            PeerLostError: The peer is gone.
            StallError: No message came in time.
            WTransferError: The peer has sent an error.
        """
        length, is_error = _HEAD.unpack(self._read(_HEAD.size))
        body = self._read(length)
        if is_error:
            raise from_wire(*_ERRORS.decode(body))
        return decoder.decode(body)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _send(self, message: object, *, is_error: bool) -> None:
        body = msgspec.msgpack.encode(message)
        try:
            self._connection.sendall(_HEAD.pack(len(body), is_error) + body)
        except OSError as error:
            raise self._lost(f"is gone ({error})") from error

    def _read(self, length: int) -> bytearray:
        read = bytearray()
        while len(read) < length:
            try:
                part = self._connection.recv(length - len(read))
            except TimeoutError as error:
                raise StallError(
                    f"{self._peer} said nothing for {PATIENCE_S:g} s", seconds=PATIENCE_S
                ) from error
            except OSError as error:
                raise self._lost(f"is gone ({error})") from error
            if not part:
                raise self._lost("has ended")
            read += part
        return read

    def _lost(self, how: str) -> PeerLostError:
        self.is_lost = True
        return PeerLostError(f"{self._peer} {how}")


def start_process(name: str, spawn: Callable[[str], object]) -> Channel:
    """Start a process, and return the channel that it opens.

    Args:
        name: Name of the process, for errors.
        spawn: Starts a process that calls `open_channel` with the address that it is given. If the
            returned object has a ``poll``, as those of `subprocess`, an early end is noticed.

    Raises:
        PeerLostError: The process ended before it opened the channel.
        StallError: The process did not open the channel in time.
    """
    # Abstract: leaves no file behind, and cannot be guessed.
    address = f"\0wtransfer-mini-{secrets.token_hex(8)}"
    deadline = Deadline(PATIENCE_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(_POLL_S)
        poll = getattr(spawn(address), "poll", lambda: None)
        while True:
            # Before accept: the process may connect, and end, in between.
            ended = poll()
            try:
                connection, _ = listener.accept()
                break
            except TimeoutError:
                if ended is not None:
                    raise PeerLostError(f"{name} has ended ({ended}) before it began") from None
                deadline.check(f"the start of {name}")
    check_same_user(connection)
    return Channel(connection, name)


@contextlib.contextmanager
def open_channel(address: str, peer: str) -> Iterator[Channel]:
    """Yield the channel to the process that has started this one.

    An error in the block is raised there as well; if the peer is gone, the block ends silently.

    Args:
        address: Address that this process was given.
        peer: Name of the peer, for errors.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    check_same_user(connection)
    channel = Channel(connection, peer)
    try:
        yield channel
    except Exception as error:
        if channel.is_lost:
            return
        channel.send_error(error)
        raise
    finally:
        channel.close()


def wait_for_end(process: Child, deadline: Deadline) -> int:
    """Wait for the end of a process, kill it at the deadline, and return its return code."""
    try:
        return process.wait(deadline.remaining())
    except StallError:
        process.kill()
        return process.wait(END_S)
    except PeerError:
        # The zygote is gone, and the kernel has killed the process.
        return -signal.SIGKILL
