"""KV cache from prefill to decode on one host, through shared memory.

Both instances name this connector; no option is needed. Each worker stages ``staging_bytes`` in
anonymous memory, and exports it to processes of the same user that have the token which travels
with a request. D maps it, so a load is one copy.

The mapping needs no lock against P: D copies a slot's head before it trusts it, and compares it
again after the pages. Leases only make it likely that a block is still there.

There is no list of allowed peers. A worker connects only to random names that workers of this kind
listen at, and sends nothing to a process of another user, for which the kernel vouches. A process
of the same user could read this one's memory without a connector; and no list could hold random
names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wtransfer.connectors.interface import KVConnectorBase_V1
from wtransfer.connectors.p2p.buffer import SlotMemory
from wtransfer.connectors.p2p.client import P2PClient
from wtransfer.connectors.p2p.scheduler import P2PScheduler
from wtransfer.connectors.p2p.server import P2PServer
from wtransfer.connectors.p2p.worker import P2PWorker
from wtransfer.errors import ProtocolError
from wtransfer.transport.address import RANDOM_PREFIX
from wtransfer.transport.lease import SegmentExporter, attach
from wtransfer.transport.memory import populate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wtransfer.connectors.p2p.buffer import StagingBuffer
    from wtransfer.connectors.p2p.client import PendingLoad
    from wtransfer.connectors.p2p.protocol import Hello
    from wtransfer.transport.channel import Connection

_SEGMENT = 0
_ATTACH_S = 5.0


class SharedMemoryServer(P2PServer):
    """Exports its staging buffer to processes of the same user."""

    def __init__(self, buffer: StagingBuffer, *args: Any) -> None:
        self._exporter = SegmentExporter()
        try:
            self._exporter.export(_SEGMENT, buffer.segment)
            super().__init__(buffer, *args)
        except BaseException:
            self._exporter.close()
            raise

    def open_transport(self, connection: Connection) -> None:
        """Send the client the place at which the buffer is exported."""
        where: dict[str, int | str] = {
            "exporter": self._exporter.address,
            "secret": self._exporter.secret,
        }
        self.say_hello(connection, where)

    def close(self) -> None:
        """Stop exporting; readers keep what they have mapped."""
        super().close()
        self._exporter.close()


class SharedMemoryClient(P2PClient):
    """Maps the other side's staging buffer."""

    _mapped: SlotMemory | None = None

    def open_transport(self, hello: Hello) -> None:
        """Map the buffer."""
        exporter, secret = (hello.transport.get(name) for name in ("exporter", "secret"))
        if not (isinstance(exporter, str) and isinstance(secret, str)):
            raise ProtocolError(f"{self.address} does not name an exported staging buffer")
        timeout_s = min(_ATTACH_S, self.loads.options.deadline_s)
        lease = attach(exporter, secret, _SEGMENT, timeout_s)
        self._mapped = SlotMemory(lease.mapping, self.loads.geometry.nbytes)
        self._copier = self.loads.copier(self._mapped)
        self._populated = bytearray(len(self._mapped.slots))

    def fetch(self, job: PendingLoad, part: slice, slots: Sequence[int]) -> str | None:
        """Copy from the mapping."""
        mapped = self._mapped
        assert mapped is not None
        if any(not 0 <= slot < len(mapped.slots) for slot in slots):
            raise ProtocolError(f"{self.address} named slots that its staging buffer does not have")
        for slot in slots:
            if not self._populated[slot]:
                # One call for all pages of a slot costs a tenth of their faults.
                populate(mapped.used[slot], 0, mapped.used.shape[1])
                self._populated[slot] = 1
        return self.load(self._copier, job, part, slots)

    def close_transport(self) -> None:
        """Release the mapping."""
        self._mapped = None
        vars(self).pop("_copier", None)


class SharedMemoryScheduler(P2PScheduler):
    """The scheduler's side."""

    def is_address(self, address: str) -> bool:
        """Return whether a worker of this kind could listen there."""
        return address.startswith(RANDOM_PREFIX)


class SharedMemoryWorker(P2PWorker):
    """The worker's side."""

    server_cls = SharedMemoryServer
    client_cls = SharedMemoryClient


class SharedMemoryConnector(KVConnectorBase_V1):
    """Prefill and decode on one host."""

    scheduler_cls = SharedMemoryScheduler
    worker_cls = SharedMemoryWorker
    names_weights = True
    options_cls = "wtransfer.connectors.p2p.protocol:P2POptions"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Return False: blocks come and go whole, all layers at once."""
        return False
