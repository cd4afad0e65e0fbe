"""A worker that has joined a publisher: its connection, and the state it reported last."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.errors import PeerError
from wtransfer.weight_sync.messages import CODEC
from wtransfer.weight_sync.report import WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Iterable

    import msgspec

    from wtransfer.errors import WTransferError
    from wtransfer.transport.channel import Connection
    from wtransfer.weight_sync.messages import Hello

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Worker:
    """A joined worker: its connection, and the state it reported last."""

    connection: Connection
    hello: Hello
    epoch: int = 0
    """Epoch of the last `Init` sent to the worker; 0: answers to earlier ones are late."""
    ready: int = 0
    """Epoch of its last `Ready`."""
    refusal: WTransferError | None = None
    """Why the worker refused the last `Init`."""
    lost: WTransferError | None = None
    """Set when the connection has ended."""
    version: str | None = None
    fingerprint: str = ""
    place: int = 0
    """Its instance's place among all, as its engine was last told."""
    state: str = "fresh"
    num_failed: int = 0
    """Failed attempts in a row to bring the worker up to date."""
    planned: str | None = None
    """Identity of the manifest last sent over this connection; None: the worker needs one."""
    since: float = 0.0
    """When the held weights or the state last changed, in monotonic seconds."""
    last_error: str | None = None
    """Why the last update was refused or not applied; None once one is applied."""
    set_aside: bool = False
    """True if rounds go on without the worker: an update sent between rounds is not applied yet, or
    it has ended the round of a group."""
    logged: str | None = None
    """Error of the worker that was logged last."""
    has_held: bool = False
    """True if it has held a version of this publisher since it joined, or when it did."""
    host: str | None = None
    """Named host that it is behind, as the publisher last looked; None: it joined by itself."""

    def __post_init__(self) -> None:
        self.host = self.hello.host
        self.holds(self.hello.version, self.hello.fingerprint, self.hello.state)

    @property
    def name(self) -> str:
        """Name for people."""
        return self.hello.worker

    def holds(self, version: str | None, fingerprint: str, state: str) -> None:
        """Note the weights that the worker holds, and its state."""
        if (version, fingerprint, state) != (self.version, self.fingerprint, self.state):
            self.since = time.monotonic()
        self.version, self.fingerprint, self.state = version, fingerprint, state

    @property
    def info(self) -> WorkerInfo:
        """The worker as shown to users."""
        hello = self.hello
        return WorkerInfo(
            worker=hello.worker,
            instance=hello.instance,
            rank=hello.rank,
            num_ranks=hello.num_ranks,
            version=self.version,
            fingerprint=self.fingerprint,
            state=self.state,
            since_s=time.monotonic() - self.since,
            host=self.host,
            last_error=self.last_error,
        )

    def log_once(self, text: str, error: WTransferError) -> None:
        """Warn of an error that keeps the worker out of rounds, unless the same was said before."""
        if error.message != self.logged:
            # Without its facts, of which the round is another one each time.
            self.logged = error.message
            # The text alone: a log handler that keeps records would keep the error's traceback.
            logger.warning("%s: %s", text, str(error))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message; the end of the connection reports a lost worker."""
        try:
            self.connection.send_frame(frame)
        except PeerError as error:
            logger.info("a message was not sent to %s: %s", self.name, error)


def send_to(workers: Iterable[Worker], message: msgspec.Struct) -> None:
    """Send one message to several workers.

    Raises:
        LimitError: The message is larger than its type may be.
    """
    # Encoded once, and before the first send: a plan of many pieces is the same for all.
    frame = CODEC.encode(message)
    for worker in workers:
        worker.send_frame(frame)
