"""Engine ``shm``, worker side: one staged copy per host, mapped by every worker.

1. T (`ShmTrainerEngine`) copies each tensor into a segment of anonymous shared memory, digesting
   it in the same pass, and announces bucket after bucket while it goes on copying.
2. W attaches the segment by descriptor, maps it privately and afresh, and hands out views.
3. The session digests the views. By adopting them, the model's parameters point into the mapping.
4. The lease ends when the last view is gone; only then does T write to that segment again.

Linux, one host, one user. Nothing has a name in the file system, so nothing can be left behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from wtransfer.engines.interface import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from wtransfer.engines.update_lists import check_dtypes, check_lengths
from wtransfer.errors import NotInitializedError
from wtransfer.transport.host_tensors import HostTensors
from wtransfer.transport.lease import attach
from wtransfer.transport.memory import populate

if TYPE_CHECKING:
    from wtransfer.config import HasBackend, ParallelConfig
    from wtransfer.engines.interface import LoadWeights
    from wtransfer.transport.tensors import ByteArray

CONNECT_TIMEOUT_S = 10.0
"""Longest wait for the trainer's process when a segment is attached."""


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Where segments are exported."""

    address: str
    """Abstract Unix socket of the trainer's exporter."""
    secret: str
    """Proves that the worker was told the address by the trainer."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: tensors that lie in a segment. All lists have the same length."""

    segment: int
    """Which segment."""
    names: list[str] = field(default_factory=list)
    """Names of the tensors."""
    dtype_names: list[str] = field(default_factory=list)
    """Wire dtypes."""
    shapes: list[list[int]] = field(default_factory=list)
    """Shapes."""
    offsets: list[int] = field(default_factory=list)
    """First byte of each tensor in the segment."""
    start: int = 0
    """First byte of the bucket."""
    nbytes: int = 0
    """Bytes of the bucket."""

    def __post_init__(self) -> None:
        check_lengths(self, ("dtype_names", "shapes", "offsets"))
        check_dtypes(self.dtype_names)

    def tensors_in(self, mapping: ByteArray) -> HostTensors:
        """Return the tensors as they lie in the segment."""
        shapes = list(map(tuple, self.shapes))
        return HostTensors(mapping, self.names, self.dtype_names, shapes, self.offsets)


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Maps what the trainer has staged on this host.

    Args:
        config: Names the backend.
        parallel_config: Not needed: every worker maps the same memory.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    trainer_cls = "wtransfer.engines.shm_trainer:ShmTrainerEngine"
    tensors_valid_until: ClassVar[Literal["return", "round"]] = "round"

    def __init__(self, config: HasBackend, parallel_config: ParallelConfig) -> None:
        super().__init__(config, parallel_config)
        self._exporter: ShmInitInfo | None = None
        self._mapped: tuple[int, ByteArray] | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Take note of the trainer's exporter; each round connects to it."""
        self._exporter = init_info

    def start_weight_update(self) -> None:
        """Forget the mapping of the round before: each round maps afresh.

        A page that this process wrote to is its own from then on; the old mapping would go on
        showing it after the trainer has rewritten the segment.
        """
        self._mapped = None

    def receive_weights(self, update_info: ShmUpdateInfo, load_weights: LoadWeights) -> None:
        """Hand out views of one bucket."""
        mapping = self._mapping(update_info.segment)
        # In bulk, and only what has been written: a page fault per 4 KiB would cost more.
        populate(mapping, update_info.start, update_info.nbytes)
        load_weights(update_info.tensors_in(mapping))

    def finish_weight_update(self) -> None:
        """Let go of the mapping: from here it lives as long as the views."""
        self._mapped = None

    def shutdown(self) -> None:
        """Disconnect; memory that a model still points to stays leased."""
        self._mapped = None
        self._exporter = None

    def _mapping(self, segment: int) -> ByteArray:
        exporter = self._exporter
        if exporter is None:
            raise NotInitializedError("not initialized: call init_transfer_engine first")
        if self._mapped is None or self._mapped[0] != segment:
            lease = attach(exporter.address, exporter.secret, segment, CONNECT_TIMEOUT_S)
            self._mapped = (segment, lease.mapping)
        return self._mapped[1]
