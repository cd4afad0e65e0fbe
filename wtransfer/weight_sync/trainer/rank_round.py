"""Who takes part in a round of a trainer's ranks, and with what: for the rank that publishes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from wtransfer.errors import PeerError
from wtransfer.weight_sync.trainer.rank_messages import Arrive, Begin, End, Packed

if TYPE_CHECKING:
    import msgspec

    from wtransfer.errors import WTransferError
    from wtransfer.transport.channel import Connection
    from wtransfer.weight_sync.messages import ErrorInfo
    from wtransfer.weight_sync.trainer.shards import Layout

logger = logging.getLogger(__name__)


class Visit:
    """One call of `TrainerRank.publish` in another process.

    Args:
        connection: To that process.
        arrive: What it said.
    """

    def __init__(self, connection: Connection, arrive: Arrive) -> None:
        self.connection = connection
        self.arrive = arrive
        self.ready: tuple[int, int] | None = None
        """Pass and tensor that it is ready to gather."""
        self.layout: Layout | None = None
        """How its tensors lie, once it was asked."""
        self.error: WTransferError | None = None
        """Why it cannot go on."""

    def send(self, message: msgspec.Struct) -> None:
        """Send; a process that is gone shows on its connection, which is where it is looked for."""
        try:
            self.connection.send(message)
        except PeerError as error:
            logger.info("%s was not sent: %s", type(message).__name__, error)

    def end(self, error: ErrorInfo | None, fingerprint: str = "") -> None:
        """Tell it the end; nobody keeps it after that."""
        self.send(End(self.arrive.call, error, fingerprint))


class RankRound:
    """What is known of the round that is under way.

    Args:
        version: Its label.
        unheard: Errors of earlier rounds that ranks have yet to hear.
    """

    def __init__(self, version: str, unheard: dict[tuple[int, str], ErrorInfo]) -> None:
        self.version = version
        self.visits: dict[int, Visit] = {}
        """Who takes part, by rank: each with one call, however that ended."""
        self.packed = False
        """Whether nothing more is gathered."""
        self.stopped = False
        """Whether nobody shall wait any more."""
        self.unheard_before = unheard.copy()
        """What earlier rounds have left."""

    def take(self, visit: Visit) -> None:
        """Let a rank take part."""
        self.visits[visit.arrive.rank] = visit
        visit.send(Begin(visit.arrive.call))
        if self.packed:
            # Nobody waited for it.
            visit.send(Packed(visit.arrive.call))
