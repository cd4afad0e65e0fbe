"""Engine ``nccl``, trainer side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.engines.collective import JOIN_TIMEOUT_S, CollectiveTrainerEngine

from wtransfer_nccl.devices import trainer_lane
from wtransfer_nccl.group import form
from wtransfer_nccl.infos import NCCLTrainerInitInfo
from wtransfer_nccl.memory import allocated

if TYPE_CHECKING:
    import torch
    from wtransfer.engines.interface import RoundSource, WeightSyncClient
    from wtransfer.manifest import Algorithm
    from wtransfer.transport.communicator import Communicator
    from wtransfer.transport.rendezvous import Rendezvous


class NCCLTrainerEngine(CollectiveTrainerEngine[NCCLTrainerInitInfo]):
    """Broadcasts by NCCL.

    Args:
        init_info: Options.
        client: Reaches all workers.
        source: The weights, on any device.

    Raises:
        GroupError: NCCL or a GPU is missing here.
    """

    init_info_cls = NCCLTrainerInitInfo
    digest_algorithm: ClassVar[Algorithm] = "wsum64"

    def __init__(
        self,
        init_info: NCCLTrainerInitInfo,
        *,
        client: WeightSyncClient,
        source: RoundSource | None = None,
    ) -> None:
        # First: where the device cannot be used, nothing is to be open yet.
        self._lane = trainer_lane(init_info.communicator, init_info.device)
        self.num_buckets = init_info.packed_num_buffers
        super().__init__(init_info, client=client, source=source)

    def form_group(self, rendezvous: Rendezvous, world_size: int) -> Communicator:
        """Form the group as rank 0."""
        with self._lane.entered():
            return form(
                self.init_info.communicator,
                rendezvous,
                0,
                world_size,
                device=self._lane.device,
                timeout_s=JOIN_TIMEOUT_S,
                operation_timeout_s=self.operation_timeout_s,
            )

    def worker_init_info(self) -> dict[str, Any]:
        """Return the ranks' meeting place, and the settings that they must agree on."""
        info = self.init_info
        return {
            **super().worker_init_info(),
            "packed_num_buffers": info.packed_num_buffers,
            "communicator": info.communicator,
            "atomic": info.atomic,
        }

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory of the device for all buckets.

        Raises:
            StagingMemoryError: There is not that much memory.
        """
        return allocated(nbytes, device=self._lane.device)

    def send_weights(self) -> None:
        """Announce the update, and broadcast it while the workers receive."""
        with self._lane.entered():
            # The trainer writes the weights on its own streams, which are unknown here.
            self._lane.settle()
            super().send_weights()
