"""Engine ``gloo``: several hosts, tensors in host memory, TCP between the hosts.

How it works is said in `wtransfer.engines.collective`. The trainer listens at one address, which
the workers must reach (``-o host=...``, loopback if nothing is said); each worker listens at the
address from which it reaches the trainer, for the other ranks of the group.

What travels is neither encrypted nor authenticated, as with every process group of torch: use a
network of your own. Nothing is unpickled, and every tensor's digest is compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.engines.collective import (
    JOIN_TIMEOUT_S,
    CollectiveInitInfo,
    CollectiveWeightTransferEngine,
)

if TYPE_CHECKING:
    from wtransfer.transport.communicator import Communicator
    from wtransfer.transport.rendezvous import Rendezvous


class GlooWeightTransferEngine(CollectiveWeightTransferEngine[CollectiveInitInfo]):
    """Receives by gloo broadcasts."""

    init_info_cls = CollectiveInitInfo
    trainer_cls = "wtransfer.engines.gloo_trainer:GlooTrainerEngine"

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
        )
