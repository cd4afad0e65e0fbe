"""Hang up TCP connections that a library holds in this process.

Gloo cannot be told to stop: an operation that waits for a stopped peer waits for its time-out, and
so does the destructor of its group. A connection that ends, however, it notices at once. So
aborting means to end the group's connections under it: found by their addresses, since gloo does
not show its descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

Endpoint: TypeAlias = "tuple[str, int]"
"""Host and port; IPv4 hosts without the prefix that they have on IPv6 sockets."""

_DESCRIPTORS = "/dev/fd"


def hang_up(endpoints: Collection[Endpoint]) -> int:
    """End every connection of this process that begins or ends at one of these endpoints.

    Their sockets stay open, and their owner's: reading gives end-of-file, as if the peer had gone,
    whereupon gloo and torch's store close them. Writing goes on until then: gloo forgets an
    operation whose first write fails, and whoever waits for that waits for ever.

    Returns:
        How many there were.

    Raises:
        OSError: No descriptor is left to look with; those that could be looked at have ended.
    """
    wanted = set(endpoints)
    count = 0
    for connection in _sockets():
        # On a duplicate, so that the socket looked at is the one shut down, whoever closes it.
        with connection, contextlib.suppress(OSError):
            if not _listens(connection) and wanted & {_local(connection), _peer(connection)}:
                connection.shutdown(socket.SHUT_RD)
                count += 1
    return count


def listening() -> set[Endpoint]:
    """Return where this process listens.

    Raises:
        OSError: No descriptor is left to look with.
    """
    found = set()
    for listener in _sockets():
        with listener, contextlib.suppress(OSError):
            if _listens(listener):
                found.add(_local(listener))
    return found


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every TCP socket of this process; the caller closes it.

    Raises:
        OSError: At the end, if there were any that could not be duplicated.
    """
    shortage = 0
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 (descriptors, not files)
        try:
            duplicate = os.dup(int(name))
        except OSError as error:
            if error.errno != errno.EBADF:  # closed meanwhile, or the listing's own
                shortage = error.errno or errno.EMFILE
            continue
        try:
            # Given this type, Python leaves the mode of the socket alone. Otherwise it would make
            # it non-blocking for its owner, too, where `socket.setdefaulttimeout` was called.
            found = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=duplicate)
        except OSError:  # no socket
            os.close(duplicate)
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6) and _is_stream(found):
            yield found
        else:
            found.close()
    if shortage:
        raise OSError(shortage, os.strerror(shortage))


def _is_stream(found: socket.socket) -> bool:
    return found.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _local(connection: socket.socket) -> Endpoint:
    return _endpoint(connection.getsockname())


def _peer(connection: socket.socket) -> Endpoint:
    return _endpoint(connection.getpeername())


def _endpoint(name: tuple[Any, ...]) -> Endpoint:
    # Torch's store dials IPv4 hosts through IPv6 sockets.
    return str(name[0]).removeprefix("::ffff:"), int(name[1])
