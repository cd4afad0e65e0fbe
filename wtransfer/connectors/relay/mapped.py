"""Both ends on one host: the shelf's memory is mapped by whoever fetches from it.

What a slot says of itself is copied out before it is believed, and looked at again when its pages
were copied and digested. So a mapping needs no lock against the other process: the leases only make
it likely that a block is still there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wtransfer.connectors.relay.desk import Desk
from wtransfer.connectors.relay.link import Link
from wtransfer.errors import ProtocolError
from wtransfer.transport.lease import SegmentExporter, attach
from wtransfer.transport.memory import populate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from wtransfer.connectors.relay.messages import Card
    from wtransfer.connectors.relay.shelf import Shelf
    from wtransfer.connectors.relay.taking import Taken, Wanted
    from wtransfer.transport.channel import Connection
    from wtransfer.transport.tensors import ByteArray

    Slots = npt.NDArray[np.uint8]
    """Shape ``(num_slots, stride)``."""

_SEGMENT = 0
_ATTACH_S = 5.0


class ExportingDesk(Desk):
    """Exports its shelf to processes of the same user.

    Args:
        shelf: The shelf.
        **settings: As `Desk`.
    """

    def __init__(self, shelf: Shelf, **settings: Any) -> None:
        self._exporter = SegmentExporter()
        try:
            self._exporter.export(_SEGMENT, shelf.segment)
            super().__init__(shelf, **settings)
        except BaseException:
            self._exporter.close()
            raise

    def facts(self, connection: Connection) -> dict[str, int | str]:  # noqa: ARG002
        """Return where the shelf is exported."""
        return {"exporter": self._exporter.address, "secret": self._exporter.secret}

    def close(self) -> None:
        """Export it no more; readers keep what they have mapped."""
        super().close()
        self._exporter.close()


class MappedLink(Link):
    """Reads from the other side's shelf itself."""

    _shelf: Slots | None = None
    _entered = bytearray()

    def open(self, card: Card) -> None:
        """Map the shelf."""
        try:
            exporter, secret = str(card.facts["exporter"]), str(card.facts["secret"])
        except KeyError as error:
            raise ProtocolError(
                f"{self.address} does not say where its shelf is exported"
            ) from error
        timeout_s = min(_ATTACH_S, self.here.deadline_s)
        lease = attach(exporter, secret, _SEGMENT, timeout_s)
        stride = self.here.taker.layout.stride
        num_slots = lease.nbytes // stride
        self._shelf = lease.mapping[: num_slots * stride].reshape(num_slots, stride)
        self._entered = bytearray(num_slots)

    def fetch(
        self, wanted: Sequence[Wanted], slots: Sequence[int], go_on: Callable[[], bool]
    ) -> Taken:
        """Copy out of the mapping."""
        shelf = self._shelf
        assert shelf is not None
        if any(not 0 <= slot < len(shelf) for slot in slots):
            raise ProtocolError(f"{self.address} told of slots that its shelf does not have")
        memories = [self._slot(shelf, slot) for slot in slots]
        return self.here.taker.take_at_once(wanted, memories, go_on)

    def finish(self) -> None:
        """Let go of the mapping."""
        self._shelf = None

    def _slot(self, shelf: Slots, number: int) -> ByteArray:
        slot: ByteArray = shelf[number]
        if not self._entered[number]:
            # Once for all its pages is a tenth of what their faults would cost.
            populate(slot, 0, slot.size)
            self._entered[number] = 1
        return slot
