"""Read addresses, listen at them and dial them.

==================  ============================================================================
``unix:@name``      abstract Unix socket: leaves nothing behind, whoever is killed
``unix:/path``      Unix socket in a folder, for its owner only; removed on close
``tcp:host:port``   TCP; port 0 = chosen by the kernel; IPv6 hosts in brackets
==================  ============================================================================
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import secrets
import socket
import stat
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.errors import AddressError, AddressInUseError

if TYPE_CHECKING:
    from collections.abc import Iterator

_BACKLOG = 512  # TCP peers that find it full wait for a second and more: a flood must not fill it
_MAX_UNIX_NBYTES = 107
_MAX_PORT = 65535
_LOCK_PATIENCE_S = 0.05
_QUEUE_PATIENCE = struct.pack("ll", 0, 200_000)  # struct timeval: seconds, microseconds

RANDOM_PREFIX = "unix:@wtransfer-"
"""How addresses of `random_address` begin."""
UnixIdentity = tuple[int, int]
"""Device and inode of a socket file."""


@dataclass(frozen=True)
class Address:
    """A parsed address."""

    family: socket.AddressFamily
    """AF_UNIX, AF_INET or AF_INET6."""
    target: str | tuple[str, int]
    """What `bind` and `connect` take; abstract names start with a NUL."""
    text: str
    """The address as people write it."""

    @property
    def path(self) -> str | None:
        """File of the socket; None for abstract and TCP addresses."""
        if isinstance(self.target, str) and not self.target.startswith("\0"):
            return self.target
        return None

    @property
    def is_unix(self) -> bool:
        """Whether the kernel can vouch for the peer's user."""
        return self.family == socket.AF_UNIX

    @property
    def is_local(self) -> bool:
        """Whether only this host can reach it."""
        if isinstance(self.target, str):
            return True
        return ipaddress.ip_address(self.target[0].partition("%")[0]).is_loopback


def random_address() -> str:
    """Return an abstract Unix address that nobody else has."""
    return f"{RANDOM_PREFIX}{secrets.token_hex(8)}"


def parse_address(text: str) -> Address:
    """Read an address; a host name is looked up, which may block.

    Raises:
        AddressError: The text is no address, or its host is not known.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest.startswith(("@", "/")):
        return _parse_unix(text, rest)
    if scheme == "tcp":
        return _parse_tcp(text, rest)
    raise AddressError(
        f"{text!r} is no address; expected 'unix:@name', 'unix:/path' or 'tcp:host:port'"
    )


def _parse_unix(text: str, rest: str) -> Address:
    target = "\0" + rest[1:] if rest.startswith("@") else rest
    if "\0" in rest or rest == "@" or not len(os.fsencode(target)) <= _MAX_UNIX_NBYTES:
        raise AddressError(
            f"{text!r} is no Unix address: the name must have 1 to {_MAX_UNIX_NBYTES - 1} bytes, "
            "none of them NUL"
        )
    return Address(socket.AF_UNIX, target, text)


def _parse_tcp(text: str, rest: str) -> Address:
    host, _, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    plain_port = port.isascii() and port.isdigit() and int(port) <= _MAX_PORT
    if not host or not plain_port or (":" in host and not bracketed):
        raise AddressError(
            f"{text!r} is no TCP address; expected 'tcp:host:port' with a port of 0 to "
            f"{_MAX_PORT} and IPv6 hosts in brackets"
        )
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"host {host!r} of {text!r} is not known: {error}") from error
    family, _, _, _, target = found[0]
    return Address(family, (str(target[0]), int(target[1])), text)


def tcp_text(target: tuple[str, int]) -> str:
    """Return the address of a host and port."""
    host, port = target
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


class ListeningSocket:
    """A bound, listening, non-blocking socket with its real address.

    Args:
        text: Address to listen at.
        allow_remote: Whether TCP beyond loopback is wanted.

    Raises:
        AddressError: The address is not valid, not ours, or remote without `allow_remote`.
        AddressInUseError: Somebody listens there.
    """

    def __init__(self, text: str, *, allow_remote: bool = False) -> None:
        address = parse_address(text)
        if not address.is_local and not allow_remote:
            raise AddressError(
                f"{text!r} can be reached from other hosts; listen on loopback or a Unix socket, "
                "or pass allow_remote=True"
            )
        self._identity: UnixIdentity | None = None
        self.socket = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            self._listen(address)
        except BaseException:
            self.socket.close()
            raise
        self.socket.setblocking(False)
        name = self.socket.getsockname()
        self.is_unix = address.is_unix
        self.address = text if address.is_unix else tcp_text((name[0], name[1]))

    def remove_file(self) -> None:
        """Remove the socket's file, if it has one and it is still its own; before closing it.

        An open socket keeps its inode from being given to a successor's file, so equal inodes mean
        that the file is ours. Once it is closed that is no longer true, and this does nothing.
        """
        path = self.address.removeprefix("unix:")
        is_open = self.socket.fileno() >= 0
        if is_open and self._identity is not None and self._identity == _identity(path):
            with contextlib.suppress(OSError):  # left behind, it is replaced at the next start
                os.unlink(path)  # noqa: PTH108 (paths here are socket names, not files to read)

    def _listen(self, address: Address) -> None:
        try:
            if address.path is None:
                self._listen_plainly(address)
            else:
                self._listen_at_path(address, address.path)
        except AddressInUseError:
            raise
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(
                    f"somebody listens at {address.text!r} already; choose another address"
                ) from error
            raise AddressError(f"cannot listen at {address.text!r}: {error}") from error

    def _listen_plainly(self, address: Address) -> None:
        if not address.is_unix:
            # A restarted trainer takes its port back while old connections still time out.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(address.target)
        self.socket.listen(_BACKLOG)

    def _listen_at_path(self, address: Address, path: str) -> None:
        # The folder's lock makes "nobody listens, remove, bind, listen" one step among all
        # listeners: without it two of them could each remove the file that the other just bound.
        with _locked_folder(path):
            if _is_stale(path):
                os.unlink(path)  # noqa: PTH108 (see remove_file)
            # Before bind: the file is created with this mode, it is never open to others.
            os.fchmod(self.socket.fileno(), 0o600)
            self._listen_plainly(address)
            self._identity = _identity(path)


@contextlib.contextmanager
def _locked_folder(path: str) -> Iterator[None]:
    folder = os.path.dirname(path) or "/"  # noqa: PTH120 (see remove_file)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd, path)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: str) -> None:
    end = time.monotonic() + _LOCK_PATIENCE_S
    while not _try_lock(fd):
        if time.monotonic() >= end:
            raise AddressInUseError(
                f"the folder of 'unix:{path}' is locked by another listener that starts; "
                "try again or choose another address"
            )
        time.sleep(0.001)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _identity(path: str) -> UnixIdentity | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def _is_stale(path: str) -> bool:
    """Return whether `path` is a socket file whose listener is dead."""
    if _identity(path) is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # Any other answer (connected, backlog full, no permission) comes from somebody alive.
        return probe.connect_ex(path) == errno.ECONNREFUSED


def connect(sock: socket.socket, address: Address) -> int:
    """Start to connect a new socket and make it non-blocking.

    On Unix sockets it waits for a place in the listener's queue, for at most 0.2 s: a waiting
    peer is served in order, where one that asks again and again can lose every time.

    Returns:
        0, or the error's number; ``EINPROGRESS`` on TCP if the answer is still to come.
    """
    if not address.is_unix:
        sock.setblocking(False)
        return sock.connect_ex(address.target)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _QUEUE_PATIENCE)
    number = sock.connect_ex(address.target)
    sock.setblocking(False)
    return number


def is_self_connected(sock: socket.socket) -> bool:
    """Return whether a TCP socket reached itself.

    Dialing a free port of the ephemeral range on loopback can pick that very port as its own end
    and succeed: without this check a dialer would keep the trainer's port taken for ever.
    """
    return sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername()


def no_delay(sock: socket.socket) -> None:
    """Send small messages of a TCP connection at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
