"""Engine ``gloo``, trainer side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from wtransfer.engines.collective import JOIN_TIMEOUT_S
from wtransfer.engines.collective_trainer import (
    CollectiveTrainerEngine,
    CollectiveTrainerInitInfo,
)
from wtransfer.transport.process_group import GlooCommunicator

if TYPE_CHECKING:
    from wtransfer.transport.communicator import Communicator
    from wtransfer.transport.rendezvous import Rendezvous


@dataclass
class GlooTrainerInitInfo(CollectiveTrainerInitInfo):
    """Options of the engine."""

    backend: ClassVar[str] = "gloo"


class GlooTrainerEngine(CollectiveTrainerEngine[GlooTrainerInitInfo]):
    """Broadcasts by gloo."""

    init_info_cls = GlooTrainerInitInfo

    def form_group(self, rendezvous: Rendezvous, world_size: int) -> Communicator:
        """Form it as rank 0, at the rendezvous' own address."""
        return GlooCommunicator(
            rendezvous,
            0,
            world_size,
            host=rendezvous.host,
            timeout_s=JOIN_TIMEOUT_S,
            operation_timeout_s=self.init_info.timeout_s,
        )
