"""Parse addresses, listen at them and connect to them.

==================  ============================================================================
``unix:@name``      abstract Unix socket: leaves nothing behind after a kill
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
import re
import secrets
import socket
import stat
import struct
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.errors import (
    AddressError,
    AddressInUseError,
    AuthenticationError,
    DescriptorLimitError,
    PeerLostError,
    StallError,
    called_from,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.deadline import Deadline

_BACKLOG = 512  # TCP peers that find it full wait for a second and more: a flood must not fill it
_MAX_UNIX_NBYTES = 107
_MAX_PORT = 65535
_LOCK_PATIENCE_S = 2.0  # listeners that start hold it for microseconds, on a busy host longer
_LONGEST_WAIT_S = 1e6
_BESIDE_NBYTES = 1 + 1 + 8  # a dot and eight digits, and the NUL of an abstract name
_QUEUE_PATIENCE = struct.pack("ll", 0, 200_000)  # struct timeval: seconds, microseconds
_ALL = frozenset({"0.0.0.0", "::"})  # noqa: S104  # nothing listens there
_CREDENTIALS = struct.Struct("3i")

_ABSTRACT = (
    " If it is, it has another network namespace, in which alone this name is known: share one, or "
    "let the publisher listen at a path on a volume that both sides mount (listen='unix:/path')"
)

RANDOM_PREFIX = "unix:@wtransfer-"
"""Prefix of the addresses of `random_address`."""


@dataclass(frozen=True)
class Address:
    """A parsed address."""

    family: socket.AddressFamily
    """AF_UNIX, AF_INET or AF_INET6."""
    target: str | tuple[str, int]
    """Argument of `bind` and `connect`; abstract names start with a NUL."""
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
        """True if the kernel can vouch for the peer's user."""
        return self.family == socket.AF_UNIX

    @property
    def is_local(self) -> bool:
        """True if only this host can reach the address."""
        if isinstance(self.target, str):
            return True
        return ipaddress.ip_address(self.target[0].partition("%")[0]).is_loopback


def random_address() -> str:
    """Return an abstract Unix address with a random name."""
    return f"{RANDOM_PREFIX}{secrets.token_hex(8)}"


def address_beside(address: str | None) -> str | None:
    """Return a random path beside a listener's, and remove the sockets that dead ones left there.

    Args:
        address: Address of a listener of this process: only its own may be dead beside it.

    Returns:
        None where the listener has no path, or a longer one would be no address.

    Raises:
        AddressInUseError: The folder is locked.
    """
    path = parse_address(address).path if address and address.startswith("unix:") else None
    if path is None or len(os.fsencode(path)) + _BESIDE_NBYTES > _MAX_UNIX_NBYTES:
        return None
    folder, name = os.path.split(path)
    beside = re.compile(re.escape(name) + r"\.[0-9a-f]{8}")
    with _locked_folder(path):
        for found in os.listdir(folder):  # noqa: PTH208 (see remove_file)
            if beside.fullmatch(found) and _is_stale(each := os.path.join(folder, found)):  # noqa: PTH118
                os.unlink(each)  # noqa: PTH108 (see remove_file)
    return f"unix:{path}.{secrets.token_hex(4)}"


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
        at: Address to listen at.
        allow_remote: Whether TCP beyond loopback is wanted.

    Raises:
        AddressError: The address is not valid, not ours, or remote without `allow_remote`.
        AddressInUseError: Another process listens there, or this one: the text says where what
            listens was made.
        DescriptorLimitError: No descriptor is left.
    """

    def __init__(self, at: str | Address, *, allow_remote: bool = False) -> None:
        address = parse_address(at) if isinstance(at, str) else at
        text = address.text
        if not address.is_local and not allow_remote:
            raise AddressError(
                f"{text!r} can be reached from other hosts; listen on loopback or a Unix socket, "
                "or pass allow_remote=True"
            )
        self._identity: tuple[int, int] | None = None  # device and inode of the socket's file
        with descriptor_errors(f"listening at {text!r}"):
            self.socket = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            self._listen(address)
        except BaseException:
            self.socket.close()
            raise
        self.socket.setblocking(False)
        name = self.socket.getsockname()
        self.is_unix = address.is_unix
        self._target = address.target if address.is_unix else (name[0], name[1])
        self.address = text if address.is_unix else tcp_text((name[0], name[1]))
        self.made_at = called_from()
        """``FILE:LINE`` of the code that has made the socket, outside of this package."""
        # In the place of one that is closed, whose number the kernel has given to this one.
        _listening[self.socket.fileno()] = weakref.ref(self)

    def remove_file(self) -> None:
        """Remove the socket's file, if there is one and it is still its own; before closing it.

        An open socket keeps its inode from being given to a successor's file, so equal inodes mean
        that the file is ours. Once the socket is closed that is no longer true, and the call does
        nothing.
        """
        path = self.address.removeprefix("unix:")
        is_open = self.socket.fileno() >= 0
        if is_open and self._identity is not None and self._identity == _identity(path):
            with contextlib.suppress(OSError):  # left behind, it is replaced at the next start
                os.unlink(path)  # noqa: PTH108 (paths here are socket names, not files to read)

    def holds(self, address: Address) -> bool:
        """Return whether no other socket can listen at an address, because this one does."""
        if self.socket.fileno() < 0:
            return False
        if address.path is not None:
            # By the file: it has many paths.
            return self._identity is not None and self._identity == _identity(address.path)
        own, other = self._target, address.target
        if isinstance(own, tuple) and isinstance(other, tuple):
            return own[1] == other[1] and (own[0] == other[0] or bool(_ALL & {own[0], other[0]}))
        return own == other

    def _listen(self, address: Address) -> None:
        try:
            if address.path is None:
                self._bind(address)
                return
            # The folder's lock makes "no listener, remove, bind, listen" one step among all
            # listeners: without it two could each remove the file that the other just bound.
            with _locked_folder(address.path):
                if _is_stale(address.path):
                    os.unlink(address.path)  # noqa: PTH108 (see remove_file)
                # Before bind: the file is created with this mode, it is never open to others.
                os.fchmod(self.socket.fileno(), 0o600)
                self._bind(address)
                self._identity = _identity(address.path)
        except (AddressInUseError, DescriptorLimitError):
            raise
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _in_use(address) from error
            raise AddressError(f"cannot listen at {address.text!r}: {error}") from error

    def _bind(self, address: Address) -> None:
        if not address.is_unix:
            # A restarted trainer takes its port back while old connections still time out.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(address.target)
        self.socket.listen(_BACKLOG)


_listening: dict[int, weakref.ref[ListeningSocket]] = {}
"""Descriptor -> the socket that was last made with it in this process, for errors."""


def _in_use(address: Address) -> AddressInUseError:
    for each in list(_listening.values()):
        if (other := each()) is not None and other.holds(address):
            return AddressInUseError(
                f"this process listens at {address.text!r} already, made at {other.made_at}; close "
                "what listens there, or choose another address",
                made_at=other.made_at,
            )
    return AddressInUseError(
        f"another process listens at {address.text!r} already; choose another address"
    )


@contextlib.contextmanager
def _locked_folder(path: str) -> Iterator[None]:
    folder = os.path.dirname(path) or "/"  # noqa: PTH120 (see remove_file)
    with descriptor_errors(f"listening at 'unix:{path}'"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise AddressInUseError(
                        f"the folder of 'unix:{path}' is locked by another listener that starts; "
                        "try again or choose another address"
                    ) from None
                time.sleep(0.001)
        yield
    finally:
        os.close(fd)


def _identity(path: str) -> tuple[int, int] | None:
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
        # Any other answer (connected, backlog full, no permission) comes from a living listener.
        return probe.connect_ex(path) == errno.ECONNREFUSED


def connect(sock: socket.socket, address: Address, deadline: Deadline) -> None:
    """Connect a new socket, and make sure that a Unix listener belongs to the same user.

    Afterwards the socket's time-out is the rest of the deadline.

    Raises:
        PeerLostError: No process listens there. Its cause is a `BlockingIOError` where a Unix
            listener's queue was full for 0.2 s; then the same socket may try again.
        StallError: No answer before the deadline.
        AuthenticationError: The listener belongs to another user.
    """
    try:
        if address.is_unix:
            # The kernel keeps the order of peers that wait for a place in the queue; a peer that
            # asks again and again instead of waiting can lose every time.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _QUEUE_PATIENCE)
            sock.connect(address.target)
            check_same_user(sock)
        else:
            limit_wait(sock, deadline)
            sock.connect(address.target)
            # Dialing a free port of the ephemeral range on loopback can pick that very port as its
            # own end and succeed; such a dialer would keep the listener's port taken for ever.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            no_delay(sock)
        limit_wait(sock, deadline)
    except AuthenticationError:
        raise
    except TimeoutError as error:
        raise StallError(
            f"no answer from {address.text} within {deadline.seconds:g} s", seconds=deadline.seconds
        ) from error
    except OSError as error:
        raise PeerLostError(
            f"cannot reach {address.text}: {error.strerror or error}; is the trainer running?"
            + (_ABSTRACT if address.is_unix and address.path is None else "")
        ) from error


def limit_wait(sock: socket.socket, deadline: Deadline) -> None:
    """Let the socket's next wait end at the deadline."""
    # A time-out of zero would mean: do not block. The kernel's counter ends after 24 days.
    sock.settimeout(min(max(deadline.remaining(), 0.001), _LONGEST_WAIT_S))


def no_delay(sock: socket.socket) -> None:
    """Send small messages of a TCP connection at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a Unix socket, as the kernel states them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def check_same_user(sock: socket.socket) -> int:
    """Refuse a Unix-socket peer of another user; the kernel vouches for the answer.

    Returns:
        The peer's process id.

    Raises:
        AuthenticationError: The peer runs as another user.
    """
    pid, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise AuthenticationError(
            f"process {pid} belongs to user {uid}, this one to user {os.geteuid()}, and a Unix "
            "socket is for one user"
        )
    return pid


@contextlib.contextmanager
def descriptor_errors(what: str) -> Iterator[None]:
    """Turn the kernel's "too many open files" into `DescriptorLimitError`.

    Args:
        what: The operation, to start the sentence.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise DescriptorLimitError(
            f"{what} failed: {error.strerror}; raise the limit (ulimit -n) or close files"
        ) from error
