"""Engine ``gloo``: several hosts, tensors in host memory, TCP between the hosts.

`wtransfer.engines.collective` describes the protocol. The trainer listens at one address, which
the workers must reach (``-o host=...``, default loopback); each worker listens, for the other ranks
of the group, at the address from which it reaches the trainer.

Traffic is neither encrypted nor authenticated, as with every process group of torch: use a network
of your own. Nothing is unpickled, and every tensor's digest is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from wtransfer.engines.collective import (
    JOIN_TIMEOUT_S,
    MAX_ABANDONED,
    CollectiveInitInfo,
    CollectiveTrainerEngine,
    CollectiveTrainerInitInfo,
    CollectiveWeightTransferEngine,
)

if TYPE_CHECKING:
    from wtransfer.transport.communicator import Communicator
    from wtransfer.transport.rendezvous import Rendezvous


class GlooWeightTransferEngine(CollectiveWeightTransferEngine[CollectiveInitInfo]):
    """Receives by gloo broadcasts."""

    init_info_cls = CollectiveInitInfo
    trainer_cls = "wtransfer.engines.gloo:GlooTrainerEngine"
    writes_after_return: ClassVar[bool] = False
    contract_version: ClassVar[str] = "1.0"

    def form_group(
        self, rendezvous: Rendezvous, init_info: CollectiveInitInfo, rank: int
    ) -> Communicator:
        """Join the trainer's group."""
        from wtransfer.transport.process_group import GlooCommunicator
        from wtransfer.transport.rendezvous import own_address

        return GlooCommunicator(
            rendezvous,
            rank,
            init_info.world_size,
            host=own_address(rendezvous.host, rendezvous.port),
            timeout_s=JOIN_TIMEOUT_S,
            operation_timeout_s=init_info.timeout_s,
            max_abandoned=MAX_ABANDONED,
        )


@dataclass
class GlooTrainerInitInfo(CollectiveTrainerInitInfo):
    """Options of the engine."""

    backend: ClassVar[str] = "gloo"


class GlooTrainerEngine(CollectiveTrainerEngine[GlooTrainerInitInfo]):
    """Broadcasts by gloo."""

    init_info_cls = GlooTrainerInitInfo

    def form_group(self, rendezvous: Rendezvous, world_size: int) -> Communicator:
        """Form the group as rank 0, at the rendezvous' own address."""
        from wtransfer.transport.process_group import GlooCommunicator

        return GlooCommunicator(
            rendezvous,
            0,
            world_size,
            host=rendezvous.host,
            timeout_s=JOIN_TIMEOUT_S,
            operation_timeout_s=self.operation_timeout_s,
            max_abandoned=MAX_ABANDONED,
        )
