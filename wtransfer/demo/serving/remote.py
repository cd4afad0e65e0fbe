"""Ranks of a host as processes of their own: each takes its plans from one Unix socket."""

from __future__ import annotations

import secrets
import socket
import struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from wtransfer.demo.serving.build import HostSettings  # noqa: TC001  (msgspec reads it)
from wtransfer.demo.serving.messages import Ready, StepPlan, StepResult
from wtransfer.errors import PeerLostError, StallError
from wtransfer.transport.auth import check_same_user
from wtransfer.transport.rendezvous import host_rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

HOST = "127.0.0.1"
"""Where the ranks' group listens."""
PATIENCE_S = 60.0
"""Longest wait for a rank, in seconds: to start, or to take a step."""
_LENGTH = struct.Struct("<I")

_T = TypeVar("_T")


class Meeting(msgspec.Struct, frozen=True):
    """Where the ranks form their group."""

    port: int
    """At `HOST`."""
    name: str
    """Of the rendezvous."""


class Start(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    rank: int
    """Which it is."""
    settings: HostSettings
    """Of the host."""
    meeting: Meeting | None
    """None: it is the only one."""


class Line:
    """One end of the socket between scheduler and rank.

    Args:
        connection: Connected; closed with this object.
        name: Of the other end, for errors.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._name = name
        connection.settimeout(PATIENCE_S)

    def wait_for_ever(self) -> None:
        """Wait for messages without bound: the scheduler may have nothing to do."""
        self._connection.settimeout(None)

    def send(self, message: Start | Ready | StepPlan | StepResult) -> None:
        """Send a message.

        Raises:
            PeerLostError: The other end is gone.
        """
        body = msgspec.msgpack.encode(message)
        try:
            self._connection.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise PeerLostError(f"{self._name} is gone ({error})") from error

    def receive(self, cls: type[_T]) -> _T:
        """Return the next message.

        Raises:
            PeerLostError: The other end is gone.
            StallError: Nothing came in time.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return msgspec.msgpack.decode(self._read(length), type=cls)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

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
                raise PeerLostError(f"{self._name} is gone ({error})") from error
            if not part:
                raise PeerLostError(f"{self._name} has ended")
            read += part
        return read


class RemoteWorkers:
    """All ranks of a host, each in a process of its own.

    Args:
        settings: Of the host.
        spawn: Starts a process that calls `wtransfer.demo.serving.rank_process.main` with the
            address that it is given.
    """

    def __init__(self, settings: HostSettings, spawn: Callable[[str], object]) -> None:
        self._lines: list[Line] = []
        self._rendezvous = host_rendezvous(HOST) if settings.num_ranks > 1 else None
        meeting = (
            Meeting(self._rendezvous.port, self._rendezvous.name) if self._rendezvous else None
        )
        try:
            for rank in range(settings.num_ranks):
                line = _started(f"rank {rank}", spawn)
                self._lines.append(line)
                line.send(Start(rank, settings, meeting))
            # Only now: they wait for each other.
            self._ready = [line.receive(Ready) for line in self._lines]
        except BaseException:
            self.close()
            raise

    def handshakes(self) -> list[Any]:
        """Return what each rank's side of the connector says before the first step."""
        return [ready.handshake for ready in self._ready]

    def step(self, plan: StepPlan) -> list[StepResult]:
        """Let every rank take a step."""
        for line in self._lines:
            line.send(plan)
        return [line.receive(StepResult) for line in self._lines]

    def close(self) -> None:
        """Hang up; the ranks end by themselves."""
        for line in self._lines:
            line.close()
        if self._rendezvous is not None:
            self._rendezvous.close()


def _started(name: str, spawn: Callable[[str], object]) -> Line:
    # Abstract: nothing to leave behind, and nobody can guess it.
    address = f"\0wtransfer-rank-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(PATIENCE_S)
        spawn(address)
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise StallError(f"{name} did not start", seconds=PATIENCE_S) from error
    check_same_user(connection)
    return Line(connection, name)
