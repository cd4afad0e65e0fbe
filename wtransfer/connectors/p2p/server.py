"""P's end of a connection: answers lookups in the staging buffer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from wtransfer.connectors.p2p.protocol import CODEC, Hello, Lookup, LookupReply, ReleaseRequest
from wtransfer.transport.channel import Listener

if TYPE_CHECKING:
    import msgspec

    from wtransfer.connectors.p2p.buffer import StagingBuffer
    from wtransfer.connectors.p2p.protocol import P2POptions
    from wtransfer.connectors.serving_config import Instance
    from wtransfer.errors import WTransferError
    from wtransfer.transport.channel import Connection


class P2PServer:
    """Answers the clients of one staging buffer, on the channel's thread. A base.

    A client loads one request after the other, so a connection has one lease at most, whatever it
    sends. The lease ends with the request, the next one or the connection, or when it expires.

    Args:
        buffer: The staging buffer.
        instance: The instance it belongs to.
        options: Options of the connector.
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
        # Request that each client looks up; empty: none.
        self._request_ids: dict[Connection, str] = {}
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
        """Address at which the server listens."""
        self.new_token = "" if token else self._listener.token
        """The token that was made; empty: it was given."""

    def get_stats(self) -> dict[str, int]:
        """Return counters (``_total``) and the number of clients."""
        # Another thread than the channel's: a copy of a dict is one step for it.
        return {**self._counts, "clients": len(self._request_ids)}

    def close(self) -> None:
        """Close all connections. A second call does nothing."""
        self._listener.close()

    def say_hello(self, connection: Connection, transport: dict[str, int | str]) -> None:
        """Send the first message. Any thread may call it.

        Args:
            connection: Connection of the new client.
            transport: Access of the client to the bytes.

        Raises:
            PeerLostError: The client is gone.
        """
        instance = self._instance
        connection.send(Hello(instance.engine_id, instance.rank, self.buffer.geometry, transport))

    # -- for subclasses; on the channel's thread, must not block

    def open_transport(self, connection: Connection) -> None:
        """Prepare for a new client, then `say_hello`, here or on another thread."""
        raise NotImplementedError

    def send_slots(self, connection: Connection, slots: list[int]) -> None:
        """Send slots that a client has leased and been told of, in the order of its lookup."""

    def close_transport(self, connection: Connection) -> None:
        """Release what a lost client had; its leases have ended."""

    # -- the channel

    def _on_open(self, connection: Connection) -> None:
        self._request_ids[connection] = ""
        self.open_transport(connection)

    def _on_message(self, connection: Connection, message: msgspec.Struct) -> None:
        if isinstance(message, Lookup):
            if message.request_id != self._request_ids[connection]:
                self.buffer.release(connection)
                self._request_ids[connection] = message.request_id
            slots = self.buffer.lease(connection, message.keys, self._lease_s)
            self._counts["lookups_total"] += 1
            connection.send(LookupReply(slots))
            self.send_slots(connection, slots)
        elif isinstance(message, ReleaseRequest):
            self._request_ids[connection] = ""
            self.buffer.release(connection)
            # The lease may have expired, or been released before.
            self._counts["releases_unknown_total"] += not self.buffer.release(message.request_id)

    def _on_close(self, connection: Connection, error: WTransferError | None) -> None:  # noqa: ARG002
        self.buffer.release(connection)
        self.buffer.release(self._request_ids.pop(connection))
        self.close_transport(connection)
