"""Where the workers of other instances ask for blocks: the side of the shelf."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from wtransfer.connectors.relay.messages import CODEC, Ask, Card, Done, Found, Over
from wtransfer.connectors.relay.saving import request_holder
from wtransfer.transport.channel import Listener

if TYPE_CHECKING:
    from collections.abc import Hashable

    import msgspec

    from wtransfer.connectors.relay.shelf import Shelf
    from wtransfer.errors import WTransferError
    from wtransfer.transport.channel import Connection


class _Visitor:
    """What one connection has asked for."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.highest = -1
        self.requests: set[str] = set()


class Desk:
    """Answers questions about one shelf, on a thread of its own. A base: kinds move bytes.

    Leases end when the asker says so, when its connection ends, or when they run out. Whatever is
    said twice, late or out of turn is counted and changes nothing.

    Args:
        shelf: The shelf.
        engine_id: Whose it is.
        rank: Of its worker.
        address: Where to listen; None: a random abstract Unix address.
        token: What askers have to know; None: a new one.
        lease_s: How long what was found is kept for an asker that does not say more.
        deadline_s: Silence after which an asker is given up.
        allow_remote: Whether the address may be one that other hosts can reach.

    Raises:
        AddressError: The address is not valid, or not this machine's.
        AddressInUseError: Somebody listens there.
    """

    def __init__(
        self,
        shelf: Shelf,
        *,
        engine_id: str,
        rank: int,
        address: str | None,
        token: str | None,
        lease_s: float,
        deadline_s: float,
        allow_remote: bool = False,
    ) -> None:
        self._shelf = shelf
        self._engine_id, self._rank = engine_id, rank
        self._lease_s = lease_s
        self._visitors: dict[Connection, _Visitor] = {}
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._listener = Listener(
            CODEC,
            address=address,
            token=token,
            on_open=self._opened,
            on_message=self._heard,
            on_close=self._closed,
            deadline_s=deadline_s,
            allow_remote=allow_remote,
        )

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._listener.address

    @property
    def token(self) -> str:
        """What askers have to know."""
        return self._listener.token

    def counts(self) -> dict[str, int]:
        """Return what has happened so far."""
        with self._lock:
            return {**self._counts, "askers": len(self._visitors)}

    def close(self) -> None:
        """Send everybody away; a second call does nothing."""
        self._listener.close()

    # -- what kinds may add; all on the listener's thread, and none may wait

    def facts(self, connection: Connection) -> dict[str, int | str]:  # noqa: ARG002
        """Return how an asker gets at the bytes."""
        return {}

    def found(self, connection: Connection, ask: Ask, slots: list[int]) -> None:
        """Hear what was leased to an asker, which has been told."""

    def gone(self, connection: Connection) -> None:
        """Hear that an asker is gone; its leases have ended."""

    # -- the channel

    def _opened(self, connection: Connection) -> None:
        with self._lock:
            self._visitors[connection] = _Visitor()
        geometry = self._shelf.layout.geometry
        connection.send(
            Card(
                self._engine_id,
                self._rank,
                geometry.block_size,
                geometry.pages,
                geometry.num_ranks,
                geometry.model,
                self.facts(connection),
            )
        )

    def _heard(self, connection: Connection, message: msgspec.Struct) -> None:
        visitor = self._visitors[connection]
        if isinstance(message, Ask):
            self._asked(connection, visitor, message)
        elif isinstance(message, Done):
            known = message.number in visitor.open
            visitor.open.discard(message.number)
            self._shelf.release(_holder(connection, message.number))
            self._count("done" if known else "done_unknown")
        elif isinstance(message, Over):
            visitor.requests.discard(message.request_id)
            known = self._shelf.release(request_holder(message.request_id))
            self._count("over" if known else "over_unknown")
        else:
            self._count("messages_out_of_turn")

    def _asked(self, connection: Connection, visitor: _Visitor, ask: Ask) -> None:
        if ask.number <= visitor.highest:
            self._count("asked_again")
            return
        visitor.highest = ask.number
        visitor.open.add(ask.number)
        visitor.requests.add(ask.request_id)
        holder = _holder(connection, ask.number)
        slots = self._shelf.lease(holder, ask.names, self._lease_s)
        self._count("asked")
        connection.send(Found(ask.number, slots))
        self.found(connection, ask, slots)

    def _closed(self, connection: Connection, error: WTransferError | None) -> None:  # noqa: ARG002
        with self._lock:
            visitor = self._visitors.pop(connection)
        for number in visitor.open:
            self._shelf.release(_holder(connection, number))
        for request_id in visitor.requests:
            self._shelf.release(request_holder(request_id))
        self._count("askers_gone")
        self.gone(connection)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def _holder(connection: Connection, number: int) -> Hashable:
    return connection, number
