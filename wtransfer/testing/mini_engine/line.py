"""The line between two processes of a host: messages over a Unix socket, or an error instead."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.errors import PeerLostError, StallError, from_wire, to_wire
from wtransfer.transport.address import check_same_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 60.0
"""Longest wait for the other end, in seconds: to start, or to answer."""
_HEAD = struct.Struct("<I?")  # length, and whether it is an error
_POLL_S = 0.05
_ERRORS: msgspec.msgpack.Decoder[tuple[str, str, dict[str, Any]]] = msgspec.msgpack.Decoder(
    tuple[str, str, dict[str, Any]]
)

_T = TypeVar("_T")


class Line:
    """One end of the socket between two processes of a host.

    Args:
        connection: Connected; closed with this object.
        name: Of the other end, for errors.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name
        self.is_lost = False
        """Whether the other end is known to be gone."""
        connection.settimeout(PATIENCE_S)

    def wait_for_ever(self) -> None:
        """Wait for messages without bound: the other end may have nothing to say."""
        self._connection.settimeout(None)

    def has_news(self, within_s: float) -> bool:
        """Return whether there is a message, or the other end is gone.

        Args:
            within_s: How long to wait for it.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            PeerLostError: The other end is gone.
        """
        self._send(message, is_error=False)

    def fail(self, error: BaseException) -> None:
        """Let the other end raise an error where it waits for a message, if it is there."""
        with contextlib.suppress(PeerLostError):
            self._send(to_wire(error), is_error=True)

    def receive(self, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
        """Return the next message.

        Raises:
            PeerLostError: The other end is gone.
            StallError: Nothing came in time.
            WTransferError: What the other end failed with.
        """
        length, is_error = _HEAD.unpack(self._read(_HEAD.size))
        body = self._read(length)
        if is_error:
            raise from_wire(*_ERRORS.decode(body))
        return decoder.decode(body)

    def close(self) -> None:
        """Hang up."""
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
                    f"{self._name} said nothing for {PATIENCE_S:g} s", seconds=PATIENCE_S
                ) from error
            except OSError as error:
                raise self._lost(f"is gone ({error})") from error
            if not part:
                raise self._lost("has ended")
            read += part
        return read

    def _lost(self, how: str) -> PeerLostError:
        self.is_lost = True
        return PeerLostError(f"{self._name} {how}")


def called_back(name: str, spawn: Callable[[str], object]) -> Line:
    """Start a process, and return the line on which it calls.

    Args:
        name: Of the process, for errors.
        spawn: Starts a process that calls `call` with the address that it is given. If what it
            returns has a ``poll``, as those of `subprocess` have, an early end is noticed at once.

    Raises:
        PeerLostError: It has ended before it called.
        StallError: It did not call in time.
    """
    # Abstract: nothing to leave behind, and nobody can guess it.
    address = f"\0wtransfer-line-{secrets.token_hex(8)}"
    deadline = Deadline(PATIENCE_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(_POLL_S)
        poll = getattr(spawn(address), "poll", lambda: None)
        while True:
            ended = poll()
            try:
                connection, _ = listener.accept()
                break
            except TimeoutError:
                # Asked before the socket was: it may have called, and ended since.
                if ended is not None:
                    raise PeerLostError(f"{name} has ended ({ended}) before it began") from None
                deadline.check(f"the start of {name}")
    check_same_user(connection)
    return Line(connection, name)


@contextlib.contextmanager
def call(address: str, name: str) -> Iterator[Line]:
    """Yield the line to the process that has started this one.

    What fails meanwhile is raised at the other end too; with the other end gone, all is over.

    Args:
        address: What this process was given.
        name: Of the other end, for errors.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    check_same_user(connection)
    line = Line(connection, name)
    try:
        yield line
    except Exception as error:
        if line.is_lost:
            return
        line.fail(error)
        raise
    finally:
        line.close()
