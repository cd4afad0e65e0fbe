"""The control channel: authenticated messages between one trainer and its workers.

How a connection lives, and on which side each step happens:

1. trainer: a `Listener` binds its address (Unix socket by default) and accepts
2. worker: a `Dialer` dials, with back-off, until somebody answers
3. both: on Unix sockets the kernel says whether the peer is the same user; if not, the end
4. both: Challenge, Auth, Welcome (see `wtransfer.transport.auth`); the whole of it within 1 s,
   with frames of at most 1 KiB
5. both: `on_open`, then the application's messages in order, in frames that are checked and limited
   before they are read (see `wtransfer.transport.frames`)
6. both: whoever has been silent for half of `heartbeat_s` says a ping; whoever has heard nothing
   for `deadline_s` gives the peer up (`StallError`). A killed peer shows at once (`PeerLostError`)
7. either: `close`; what is queued is sent first, for at most 0.5 s
8. both: `on_close`, exactly once; the worker goes back to step 2

Nothing that a peer sends is unpickled, evaluated or imported. After a ``fork()`` the child's copies
of all sockets are closed, and the objects raise `ForkedError` there.
"""

from __future__ import annotations

from wtransfer.transport.addresses import random_address
from wtransfer.transport.auth import PROTOCOL, new_token, resolve_token
from wtransfer.transport.connection import Connection
from wtransfer.transport.dialer import Dialer
from wtransfer.transport.frames import Codec, MessageType
from wtransfer.transport.listener import Listener

__all__ = [
    "PROTOCOL",
    "Codec",
    "Connection",
    "Dialer",
    "Listener",
    "MessageType",
    "new_token",
    "random_address",
    "resolve_token",
]
