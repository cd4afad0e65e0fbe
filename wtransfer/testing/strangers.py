"""Peers that dial an engine without its token."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Speak = Callable[[socket.socket], None]

LET_IN_S = 2.0
"""Time that a peer with the right token waits for an answer, in seconds."""
STRANGER_READS = 1 << 20
"""Most bytes that a stranger reads at a time."""
STRANGER_FDS = 64
"""Most descriptors that a stranger accepts with them."""


class Strangers:
    """Peers that dial each socket at which this process listens from now on, one for each speech.

    Args:
        stack: Closes them.
        speaks: What they do once they are connected.
    """

    def __init__(self, stack: contextlib.ExitStack, speaks: Sequence[Speak]) -> None:
        self.found: list[str] = []
        """Where it listens."""
        self.sockets: list[socket.socket] = []
        """The peers that were connected."""
        self._stack, self._speaks = stack, speaks
        self._dialled = _listening()
        self._lock = threading.Lock()

    def dial(self) -> None:
        """Dial each new socket."""
        with self._lock:
            new = _listening() - self._dialled
            self._dialled |= new
            for family, kind, address in new:
                self.found.append(str(address))
                for speak in self._speaks:
                    peer = self._stack.enter_context(socket.socket(family, kind))
                    peer.settimeout(5)
                    # The listener is closed by now, or turns a stranger away at once.
                    with contextlib.suppress(OSError):
                        peer.connect(address)
                        self.sockets.append(peer)
                        speak(peer)

    def check(self, weights: bytes) -> None:
        """Fail if a peer was sent these bytes, as many, or a descriptor of a file with them."""
        for peer in self.sockets:
            peer.settimeout(0.05)
            received = b""
            with contextlib.suppress(OSError):
                while True:
                    part, fds, *_ = socket.recv_fds(peer, STRANGER_READS, STRANGER_FDS)
                    try:
                        given = any(_contains(fd, weights) for fd in fds)
                    finally:
                        for fd in fds:
                            os.close(fd)
                    assert not given, "a stranger was given a descriptor of weights"
                    if not part:
                        break
                    received += part
            assert weights[:64] not in received, "a stranger was sent weights"
            # Random bytes do not get fewer by compression or encryption.
            assert len(received) < len(weights) // 2, (
                f"a stranger was sent {len(received):,} bytes, of weights of {len(weights):,}"
            )


def _listening() -> set[tuple[int, int, Any]]:
    """Return family, type and a reachable address of each listening socket of this process."""
    found: set[tuple[int, int, Any]] = set()
    for file in Path("/proc/self/fd").iterdir():
        # A descriptor may be closed meanwhile, or be no socket.
        with contextlib.suppress(OSError), _socket_of(int(file.name)) as own:
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                # A wildcard address reaches this host, too.
                found.add((own.family, own.type, own.getsockname()))
    return found


def _socket_of(fd: int) -> socket.socket:
    """Return another object of a socket.

    Raises:
        OSError: The descriptor is no socket.
    """
    own = os.dup(fd)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _contains(fd: int, sought: bytes) -> bool:
    """Return whether a file contains these bytes; False if it cannot be read at an offset."""
    offset, tail = 0, b""
    with contextlib.suppress(OSError):
        while part := os.pread(fd, STRANGER_READS, offset):
            if sought in tail + part:
                return True
            offset, tail = offset + len(part), part[-len(sought) :]
    return False


def send_noise(peer: socket.socket) -> None:
    peer.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)


def no_tokens(token: Any, another: Any) -> list[Any]:
    """Return tokens that are none: empty, cut, another's, right in the first half, too long."""
    # An even number: digits come in pairs.
    half = len(token) // 4 * 2
    return [token[:0], token[:half], another, token[:half] + another[half:], another + another]


def answer_of(peer: socket.socket) -> str:
    """Close a peer; return whether it was "sent" something, "closed", or nothing for a while."""
    with peer:
        peer.settimeout(LET_IN_S)
        try:
            return "sent" if peer.recv(1) else "closed"
        except TimeoutError:
            return ""
        except OSError:
            return "closed"
