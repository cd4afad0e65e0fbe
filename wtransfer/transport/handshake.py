"""Prove both ways that trainer and worker know the same token, without ever sending it.

1. trainer: `Challenge` with its protocol number and a nonce
2. worker: `Auth` with its protocol number, a nonce of its own and a proof over both nonces
3. trainer: `Welcome` with its own proof over both nonces, or `Reject`

A proof is HMAC-SHA256 keyed with the token; it names the side that made it, so that neither side's
proof can be sent back as the other's. Protocol numbers are compared first: peers of different
versions part before any token work, and each names both. `TrainerHandshake` and `WorkerHandshake`
hold no sockets: they take a message and return the answer; `shake_hands` is the worker's side on a
blocking socket.

The bytes that follow are neither encrypted nor bound to the proof: against an attacker that alters
packets between two hosts use a tunnel.

Source: challenge-response as in RFC 2195 and in ``multiprocessing.connection``, made mutual.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import stat
import threading
from collections import Counter
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from wtransfer.errors import (
    AuthenticationError,
    PeerError,
    PeerLostError,
    ProtocolError,
    StallError,
    from_wire,
)
from wtransfer.transport.address import limit_wait
from wtransfer.transport.framing import Codec, FrameReader, MessageType

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from wtransfer.deadline import Deadline
    from wtransfer.errors import WTransferError

PROTOCOL = 5
"""Version of the frames, the handshake and the messages; peers must have the same one."""

NONCE_NBYTES = 32
MAX_HANDSHAKE_NBYTES = 1024
"""Longest frame body of a peer that has proven nothing yet."""

_TOKEN_VARIABLE = "WTRANSFER_TOKEN"  # noqa: S105 (a variable's name)
_TOKEN_FILE_VARIABLE = "WTRANSFER_TOKEN_FILE"  # noqa: S105 (a variable's name)
_MAX_TOKEN_NBYTES = 4096
_DAY_S = 86_400
_MAX_REASON = 200  # characters: fits the limit above whatever they encode to

Seconds = Annotated[float, msgspec.Meta(gt=0, le=_DAY_S)]


class Challenge(msgspec.Struct):
    """Open the handshake. In every future version `protocol` stays a field of it."""

    protocol: int
    """Number of the trainer's protocol."""
    nonce: bytes = b""
    """32 random bytes."""


class Auth(msgspec.Struct):
    """Answer a challenge. In every future version `protocol` stays a field of it."""

    protocol: int
    """Number of the worker's protocol."""
    nonce: bytes = b""
    """32 random bytes."""
    proof: bytes = b""
    """Proof of the worker."""


class Welcome(msgspec.Struct):
    """Accept the worker and prove the trainer."""

    proof: bytes
    """Proof of the trainer."""
    heartbeat_s: Seconds | None
    """Longest silence that either side shall keep, in seconds; None: without heartbeats."""
    deadline_s: Seconds | None
    """Silence after which either side gives the other up, in seconds; None: never."""


class Reject(msgspec.Struct):
    """Refuse the other side; either side may send it."""

    protocol: int
    """Number of the sender's protocol."""
    error: str
    """Class of the error."""
    reason: str
    """Its sentence."""


HANDSHAKE = Codec(
    [
        MessageType(0xFF00, Challenge, MAX_HANDSHAKE_NBYTES),
        MessageType(0xFF01, Auth, MAX_HANDSHAKE_NBYTES),
        MessageType(0xFF02, Welcome, MAX_HANDSHAKE_NBYTES),
        MessageType(0xFF03, Reject, MAX_HANDSHAKE_NBYTES),
    ]
)


class Handshake:
    """Base of both sides: the protocol number, and the meaning of a `Reject`."""

    role: ClassVar[str]
    peer_role: ClassVar[str]

    def __init__(
        self, token: str, protocol: int, heartbeat_s: float | None, deadline_s: float | None
    ) -> None:
        self.complete = False
        """True if both proofs are good and the application's messages may follow."""
        self.heartbeat_s = heartbeat_s
        """Longest silence to keep, in seconds; valid once complete."""
        self.deadline_s = deadline_s
        """Silence that ends the connection, in seconds; valid once complete."""
        self._token = token
        self._protocol = protocol
        self._rejected = False
        self._nonce = secrets.token_bytes(NONCE_NBYTES)

    def receive(self, message: msgspec.Struct) -> msgspec.Struct | None:
        """Take the peer's message and return the answer.

        Raises:
            PeerError: The peer is refused, or refuses this side.
        """
        raise NotImplementedError

    def refusal(self, error: PeerError) -> Reject | None:
        """Return the message that tells the peer the reason for a refusal; None: it refused us."""
        if self._rejected:
            return None
        return Reject(self._protocol, type(error).__name__, str(error)[:_MAX_REASON])

    def _check_protocol(self, theirs: int) -> None:
        if theirs != self._protocol:
            raise ProtocolError(
                f"the {self.peer_role} speaks protocol {theirs}, this {self.role} speaks protocol "
                f"{self._protocol}; install the same wtransfer on both sides"
            )

    def _check_proof(self, theirs: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(theirs, expected):
            raise AuthenticationError(
                f"the {self.peer_role} could not prove that it knows the token of this "
                f"{self.role}; give both the same token"
            )

    def _unexpected(self, message: msgspec.Struct) -> PeerError:
        if isinstance(message, Reject):
            self._rejected = True
            self._check_protocol(message.protocol)
            error = from_wire(message.error, f"the {self.peer_role} says: {message.reason!r}", {})
            return error if isinstance(error, PeerError) else AuthenticationError(error.message)
        return ProtocolError(
            f"the {self.peer_role} sent {type(message).__name__} at the wrong point of the "
            "handshake; expected the order Challenge, Auth, Welcome"
        )


class TrainerHandshake(Handshake):
    """The listening side, which opens with `start`.

    Args:
        token: Shared secret.
        heartbeat_s: Longest silence that either side shall keep, in seconds; None: any.
        deadline_s: Silence that ends the connection, in seconds; None: none does.
        protocol: This side's protocol number.
        admit: Called when the worker's proof is good; may raise a `PeerError` to refuse it still.
    """

    role = "trainer"
    peer_role = "worker"

    def __init__(
        self,
        token: str,
        *,
        heartbeat_s: float | None,
        deadline_s: float | None,
        protocol: int = PROTOCOL,
        admit: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(token, protocol, heartbeat_s, deadline_s)
        self._admit = admit

    def start(self) -> Challenge:
        """Return the message that opens the handshake."""
        return Challenge(self._protocol, self._nonce)

    def receive(self, message: msgspec.Struct) -> Welcome:
        """See `Handshake.receive`."""
        if not isinstance(message, Auth):
            raise self._unexpected(message)
        self._check_protocol(message.protocol)
        _check_nonce(message.nonce)
        nonces = self._nonce, message.nonce
        self._check_proof(message.proof, _proof(self._token, self.peer_role, *nonces))
        self._admit()
        self.complete = True
        return Welcome(_proof(self._token, self.role, *nonces), self.heartbeat_s, self.deadline_s)


class WorkerHandshake(Handshake):
    """The dialing side.

    Args:
        token: Shared secret.
        protocol: This side's protocol number.
    """

    role = "worker"
    peer_role = "trainer"

    def __init__(self, token: str, *, protocol: int = PROTOCOL) -> None:
        super().__init__(token, protocol, None, None)
        self._expected: bytes | None = None

    def receive(self, message: msgspec.Struct) -> Auth | None:
        """See `Handshake.receive`."""
        if isinstance(message, Challenge) and self._expected is None:
            self._check_protocol(message.protocol)
            _check_nonce(message.nonce)
            nonces = message.nonce, self._nonce
            self._expected = _proof(self._token, self.peer_role, *nonces)
            return Auth(self._protocol, self._nonce, _proof(self._token, self.role, *nonces))
        if isinstance(message, Welcome) and self._expected is not None:
            self._check_proof(message.proof, self._expected)
            self.heartbeat_s, self.deadline_s = message.heartbeat_s, message.deadline_s
            self.complete = True
            return None
        raise self._unexpected(message)


def shake_hands(
    sock: socket.socket, handshake: WorkerHandshake, deadline: Deadline, listener: str
) -> FrameReader:
    """Prove the token to a listener over a blocking socket, and check the listener's proof.

    Args:
        sock: Connected; its time-out changes.
        handshake: Complete afterwards.
        deadline: Bounds the whole handshake.
        listener: Its address, as named in errors.

    Returns:
        The reader of the connection; it may hold bytes that followed the handshake.

    Raises:
        PeerError: One side refuses the other, or the listener is gone.
        StallError: The deadline has passed.
    """
    reader = FrameReader(HANDSHAKE, listener)
    try:
        while True:
            deadline.check(f"the handshake with {listener}")
            limit_wait(sock, deadline)
            data = sock.recv(MAX_HANDSHAKE_NBYTES)
            if not data:
                raise PeerLostError(f"{listener} is gone: it closed the connection or has ended")
            for message in reader.feed(data):
                answer = handshake.receive(message)
                if answer is not None:
                    # A listener that has closed may have said why before.
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        sock.sendall(HANDSHAKE.encode(answer))
                if handshake.complete:
                    return reader  # what follows is the application's
    except PeerError as error:
        reject = handshake.refusal(error)
        if reject is not None:
            with contextlib.suppress(OSError):
                sock.sendall(HANDSHAKE.encode(reject))
        raise
    except StallError:
        raise
    except TimeoutError as error:
        raise StallError(
            f"{listener} did not finish the handshake within {deadline.seconds:g} s",
            seconds=deadline.seconds,
        ) from error
    except OSError as error:
        raise PeerLostError(f"{listener} is gone: {error.strerror}") from error


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_NBYTES:
        raise ProtocolError(f"a nonce has {NONCE_NBYTES} bytes, got {len(nonce)}")


def _proof(token: str, role: str, trainer_nonce: bytes, worker_nonce: bytes) -> bytes:
    # The nonces have a fixed length and the role is one of two words: no two inputs collide.
    text = b"|".join((b"wtransfer", role.encode(), trainer_nonce, worker_nonce))
    return hmac.digest(token.encode(errors="surrogateescape"), text, "sha256")


def new_token() -> str:
    """Return a new random token: 43 URL-safe characters, 256 bits."""
    return secrets.token_urlsafe(32)


def resolve_token(token: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Find the token: the argument, else ``WTRANSFER_TOKEN``, else ``WTRANSFER_TOKEN_FILE``.

    Args:
        token: Token given in the program; wins where it is given.
        environ: Environment to look in.

    Returns:
        The token, or None where none is given anywhere.

    Raises:
        AuthenticationError: The token file cannot be trusted or read, or is empty.
    """
    if token:
        return token
    if value := environ.get(_TOKEN_VARIABLE):
        return value
    path = environ.get(_TOKEN_FILE_VARIABLE)
    return _token_from_file(path) if path else None


def _token_from_file(path: str) -> str:
    try:
        # Not through a link, and without waiting for the writer of a FIFO.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = "is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
        raise AuthenticationError(
            f"token file {path!r} ({_TOKEN_FILE_VARIABLE}) cannot be opened: {what}"
        ) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AuthenticationError(f"token file {path!r} is not a regular file")
        is_own = status.st_uid == os.geteuid()
        if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
            advice = f"run chmod 600 {path!r}" if is_own else "run this as that user"
            raise AuthenticationError(
                f"token file {path!r} must belong to this user and be readable by its owner only; "
                f"it belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):03o}: "
                f"{advice}"
            )
        text = os.read(fd, _MAX_TOKEN_NBYTES + 1).strip()
    finally:
        os.close(fd)
    if not text or len(text) > _MAX_TOKEN_NBYTES:
        raise AuthenticationError(
            f"token file {path!r} must hold 1 to {_MAX_TOKEN_NBYTES} bytes of text"
        )
    return text.decode(errors="surrogateescape")


class Refusals:
    """Counts, since the process began, the peers that were refused or have refused it.

    For metrics: a count costs nothing, however many strangers come.
    """

    def __init__(self) -> None:
        # At 0 from the start: the rate of a series does not show its first count.
        first = AuthenticationError.__name__
        self._counts = Counter({(door, first): 0 for door in ("listener", "dialer", "http")})
        self._lock = threading.Lock()

    def add(self, door: str, error: WTransferError) -> None:
        """Count a refusal.

        Args:
            door: ``listener``, ``dialer`` or ``http``.
            error: Why.
        """
        with self._lock:
            self._counts[door, type(error).__name__] += 1

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the numbers, by door and class of the error."""
        with self._lock:
            return dict(self._counts)


refusals = Refusals()
"""Refusals of this process."""
