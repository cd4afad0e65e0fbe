"""Engine ``nccl``: weights from the trainer's GPU to the workers', on one or several hosts.

`wtransfer.engines.collective` describes how engines move tensors by collectives. This engine adds
memory of devices, a stream of its own, digests that are computed on the device (``wsum64``), and a
group by NCCL, or by gloo (`communicator`) where there is no GPU: all else is the same code.

Tensors are neither encrypted nor authenticated on their way: use a network of your own.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from wtransfer.engines.collective import (
    JOIN_TIMEOUT_S,
    NUM_AHEAD,
    CollectiveWeightTransferEngine,
)
from wtransfer.errors import NotInitializedError
from wtransfer.transport.memory import require_memory

from wtransfer_nccl.infos import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ClassVar

    from wtransfer.config import HasBackend, ParallelConfig
    from wtransfer.engines.collective import CollectiveUpdateInfo, RecvBuffers
    from wtransfer.transport.communicator import Communicator
    from wtransfer.transport.layout import TensorLayout
    from wtransfer.transport.rendezvous import Rendezvous
    from wtransfer.weights import LoadWeights

    from wtransfer_nccl.devices import Lane


class NCCLWeightTransferEngine(CollectiveWeightTransferEngine[NCCLWeightTransferInitInfo]):
    """Receives by NCCL broadcasts.

    Args:
        config: Names the backend.
        parallel_config: This worker's place, and thereby its rank in the group.
    """

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    trainer_cls = "wtransfer_nccl.trainer:NCCLTrainerEngine"
    writes_after_return: ClassVar[bool] = False
    contract_version: ClassVar[str] = "1.0"
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")

    @staticmethod
    def available() -> None:
        """Raise unless NCCL can be used on this machine, for ``wtransfer plugins show``.

        Raises:
            GroupError: NCCL cannot be used; everything that is missing is named.
        """
        from wtransfer_nccl.devices import require_nccl

        require_nccl()

    def __init__(self, config: HasBackend, parallel_config: ParallelConfig) -> None:
        super().__init__(config, parallel_config)
        self._info: NCCLWeightTransferInitInfo | None = None
        self._lane: Lane | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Meet the other ranks and form the group.

        Raises:
            GroupError: NCCL or a GPU is missing here, this engine cannot meet that way, the
                workers' places do not add up to the group, or a rank is taken.
            PeerLostError: The trainer's rendezvous is gone.
            StallError: Ranks are missing.
        """
        from wtransfer_nccl.devices import worker_lane

        init_info.check_joinable()
        self._lane = worker_lane(init_info.communicator, self.parallel_config.rank)
        self._info = init_info
        # The class's value for all but one way to stage, which is known only now.
        self.tensors_valid_until = (  # type: ignore[misc]
            "return" if init_info.atomic == "none" else "round"
        )
        with self._lane.entered():
            super().init_transfer_engine(init_info)

    def form_group(
        self, rendezvous: Rendezvous, init_info: NCCLWeightTransferInitInfo, rank: int
    ) -> Communicator:
        """Join the trainer's group."""
        from wtransfer_nccl.group import form

        return form(
            init_info.communicator,
            rendezvous,
            rank,
            init_info.world_size,
            device=self._entered_lane().device,
            timeout_s=JOIN_TIMEOUT_S,
            operation_timeout_s=init_info.timeout_s,
        )

    def make_room(self, nbytes: int) -> str:
        """Check the memory that an update is to be staged in, and return its name."""
        lane, info = self._entered_lane(), self._joined()
        what = "staging an update"
        if info.atomic == "pinned":
            require_memory(nbytes, what)
            return f"stages {nbytes} bytes in pinned host memory (atomic=pinned)"
        if info.atomic == "none":
            own = min(nbytes, (1 + NUM_AHEAD) * info.packed_buffer_size_bytes)
            lane.require_room(nbytes + own, what)
            return f"stages {nbytes} bytes beside the engine, which has its buckets (atomic=none)"
        lane.require_room(nbytes, what)
        return f"stages {nbytes} bytes on {lane.device} (atomic=device)"

    def recv_buffers(
        self, layout: TensorLayout, note_progress: Callable[[], object]
    ) -> RecvBuffers:
        """Return the memory that one update is received into."""
        from wtransfer_nccl.memory import BucketBuffers, DeviceBuffers, PinnedBuffers

        note_progress()
        lane, info = self._entered_lane(), self._joined()
        if info.atomic == "none":
            return BucketBuffers(layout, info.packed_buffer_size_bytes, lane)
        if info.atomic == "pinned":
            return PinnedBuffers(layout, info.packed_buffer_size_bytes, lane)
        return DeviceBuffers(layout, lane)

    def receive_weights(self, update_info: CollectiveUpdateInfo, load_weights: LoadWeights) -> None:
        """Receive the whole update on the private stream, and hand out views bucket by bucket.

        Raises:
            GroupError: A rank is gone, or the group was aborted.
            NotInitializedError: There is no group yet.
            StagingMemoryError: There is no memory for the update.
        """
        lane = self._lane
        with contextlib.nullcontext() if lane is None else lane.entered():
            super().receive_weights(update_info, load_weights)
        if lane is not None:
            # The tensors' next reader works on another stream.
            lane.finish()

    def _entered_lane(self) -> Lane:
        if self._lane is None:
            raise NotInitializedError("not initialized: call init_transfer_engine first")
        return self._lane

    def _joined(self) -> NCCLWeightTransferInitInfo:
        if self._info is None:
            raise NotInitializedError("not initialized: call init_transfer_engine first")
        return self._info
