"""P's end of a connection: answers lookups in the staging buffer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from wtransfer.connectors.p2p.protocol import (
    CODEC,
    Hello,
    Lookup,
    LookupReply,
    ReleaseRequest,
    TransferDone,
)
from wtransfer.errors import LimitError
from wtransfer.transport.channel import Listener

if TYPE_CHECKING:
    import msgspec

    from wtransfer.connectors.p2p.buffer import StagingBuffer
    from wtransfer.connectors.p2p.protocol import P2POptions
    from wtransfer.connectors.settings import Instance
    from wtransfer.errors import WTransferError
    from wtransfer.transport.channel import Connection


MAX_LOOKUPS = 64
"""Lookups of one connection that may be open; a client makes one at a time."""
MAX_REQUESTS = 4096
"""Requests that one connection may have looked up and not released."""


class _Client:
    """What one connection has leased."""

    def __init__(self) -> None:
        self.lookups: set[int] = set()
        self.last_lookup = -1
        self.request_ids: set[str] = set()


class P2PServer:
    """Answers the clients of one staging buffer, on the channel's thread. A base.

    A lease ends when the client says so, when its connection is lost, or when it expires. Messages
    that are repeated, late or out of turn are counted and change nothing. A connection with too
    many open lookups or requests is closed.

    Args:
        buffer: The staging buffer.
        instance: The instance it belongs to.
        options: Of the connector.
        token: Secret that clients must prove to know; None: a new one.
        address: Where to listen; None: a random abstract Unix address.

    Raises:
        AddressError: The address is not valid, or not this machine's.
        AddressInUseError: The address is taken.
    """

    def __init__(
        self,
        buffer: StagingBuffer,
        instance: Instance,
        options: P2POptions,
        token: str | None,
        address: str | None = None,
    ) -> None:
        self.buffer = buffer
        self._instance = instance
        self._lease_s = options.lease_s
        self._clients: dict[Connection, _Client] = {}
        self._counts: Counter[str] = Counter()
        self._listener = Listener(
            CODEC,
            address=address,
            token=token,
            on_open=self._on_open,
            on_message=self._on_message,
            on_close=self._on_close,
            deadline_s=options.deadline_s,
            allow_remote=address is not None,
        )
        self.address = self._listener.address
        """Where it listens."""
        self.new_token = "" if token else self._listener.token
        """The token that was made; empty: it was given."""

    def get_stats(self) -> dict[str, int]:
        """Return counters (``_total``) and the number of clients."""
        # Another thread than the channel's: a copy of a dict is one step for it.
        return {**self._counts, "clients": len(self._clients)}

    def close(self) -> None:
        """Close all connections. A second call does nothing."""
        self._listener.close()

    # -- for subclasses; on the channel's thread, must not block

    def open_transport(self, connection: Connection) -> dict[str, int | str]:
        """Return how a new client gets at the bytes."""
        raise NotImplementedError

    def send_slots(self, connection: Connection, slots: list[int]) -> None:
        """Send slots that a client has leased and been told of, in the order of its lookup."""

    def close_transport(self, connection: Connection) -> None:
        """Release what a lost client had; its leases have ended."""

    # -- the channel

    def _on_open(self, connection: Connection) -> None:
        self._clients[connection] = _Client()
        geometry = self.buffer.geometry
        connection.send(
            Hello(
                self._instance.engine_id,
                self._instance.rank,
                geometry.block_size,
                geometry.pages,
                geometry.num_ranks,
                geometry.model,
                self.open_transport(connection),
            )
        )

    def _on_message(self, connection: Connection, message: msgspec.Struct) -> None:
        client = self._clients[connection]
        if isinstance(message, Lookup) and message.number > client.last_lookup:
            client.last_lookup = message.number
            client.lookups.add(message.number)
            client.request_ids.add(message.request_id)
            if len(client.lookups) > MAX_LOOKUPS or len(client.request_ids) > MAX_REQUESTS:
                self._counts["clients_refused_total"] += 1
                connection.drop(
                    LimitError(
                        f"{connection.peer} has {len(client.lookups)} open lookups and "
                        f"{len(client.request_ids)} requests; at most {MAX_LOOKUPS} and "
                        f"{MAX_REQUESTS} are allowed"
                    )
                )
                return
            holder = (connection, message.number)
            slots = self.buffer.lease(holder, message.keys, self._lease_s)
            self._counts["lookups_total"] += 1
            connection.send(LookupReply(message.number, slots))
            self.send_slots(connection, slots)
        elif isinstance(message, Lookup):
            self._counts["lookups_repeated_total"] += 1
        elif isinstance(message, TransferDone):
            known = message.number in client.lookups
            client.lookups.discard(message.number)
            self.buffer.release((connection, message.number))
            self._counts["transfers_done_total" if known else "transfers_done_unknown_total"] += 1
        elif isinstance(message, ReleaseRequest):
            client.request_ids.discard(message.request_id)
            known = self.buffer.release(message.request_id)
            self._counts["releases_total" if known else "releases_unknown_total"] += 1
        else:
            self._counts["messages_out_of_turn_total"] += 1

    def _on_close(self, connection: Connection, error: WTransferError | None) -> None:  # noqa: ARG002
        client = self._clients.pop(connection)
        for number in client.lookups:
            self.buffer.release((connection, number))
        for request_id in client.request_ids:
            self.buffer.release(request_id)
        self._counts["clients_gone_total"] += 1
        self.close_transport(connection)
