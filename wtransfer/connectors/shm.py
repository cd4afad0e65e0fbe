"""KV cache from prefill to decode on one host, through shared memory.

Both instances name this connector. Nothing needs to be set: each worker takes ``shelf_bytes`` of
anonymous memory, listens at a Unix socket without a file, and hands on only to processes of the
same user that know the token which travels with a request.

There is no list of allowed peers. A worker dials nothing but the random names that workers like it
listen at, and tells nothing to a process of another user, for which the kernel vouches. A process
of the same user needs no connector to read the memory of this one; and no list could hold random
names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.connectors.interface import KVConnectorBase_V1
from wtransfer.connectors.relay.mapped import ExportingDesk, MappedLink
from wtransfer.connectors.relay.scheduler import RelayScheduler
from wtransfer.connectors.relay.worker import RelayWorker
from wtransfer.transport.address import RANDOM_PREFIX
from wtransfer.transport.channel import resolve_token

if TYPE_CHECKING:
    from wtransfer.connectors.relay.desk import Desk
    from wtransfer.connectors.relay.link import Here
    from wtransfer.connectors.relay.shelf import Shelf


class SharedMemoryScheduler(RelayScheduler):
    """The scheduler's side."""

    def dials(self, address: str) -> bool:
        """Return whether it is a name that a worker of this kind listens at."""
        return address.startswith(RANDOM_PREFIX)


class SharedMemoryWorker(RelayWorker):
    """The worker's side."""

    def make_desk(self, shelf: Shelf) -> Desk:
        """Listen at a Unix socket, and lend the shelf."""
        return ExportingDesk(
            shelf,
            engine_id=self.instance.engine_id,
            rank=self.instance.rank,
            address=None,
            token=resolve_token(self.options.token),
            lease_s=self.options.lease_s,
            deadline_s=self.options.deadline_s,
        )

    def make_link(self, address: str, token: str, here: Here) -> MappedLink:
        """Map the shelf of another process."""
        return MappedLink(address, resolve_token(self.options.token) or token, here)

    def told_token(self, desk: Desk) -> str:
        """Let the request carry the token that was made up; one that was given stays here."""
        return "" if resolve_token(self.options.token) else desk.token


class SharedMemoryConnector(KVConnectorBase_V1):
    """Prefill and decode on one host."""

    scheduler_cls = SharedMemoryScheduler
    worker_cls = SharedMemoryWorker
    names_weights = True
