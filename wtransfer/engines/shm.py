"""Engine ``shm``: one staged copy per host in shared memory, mapped by every worker.

1. T (`ShmTrainerEngine`) copies each tensor into a segment of anonymous shared memory, digested in
   the same pass, and announces each bucket while it copies the next.
2. W (`ShmWeightTransferEngine`) attaches the segment by descriptor, maps it privately and afresh
   for each round, and passes views on.
3. The session digests the views. When it adopts them, parameters of the model point into the
   mapping.
4. The lease ends when the last view is gone; only then does T write to that segment again.

Linux, one host, one user. Memory has no name in the file system, so none can be left behind. Where
the publisher listens at a path, a socket beside it serves containers that share its folder.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from wtransfer.calls import Announcer
from wtransfer.engines.interface import (
    RoundSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSyncClient,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from wtransfer.errors import NotInitializedError
from wtransfer.transport.channel import Dial
from wtransfer.transport.lease import SegmentExporter, attach
from wtransfer.transport.memory import PopulatingAhead, Segment, populate

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.config import HasBackend, ParallelConfig
    from wtransfer.transport.layout import Bucket, TensorLayout
    from wtransfer.transport.tensors import ByteArray
    from wtransfer.weights import LoadWeights

NUM_UNDER_WAY = 2
"""Announced buckets that workers have not answered yet: with one, a worker waits between two."""
RELEASE_GRACE_S = 0.5
"""Seconds to wait for readers of the older segment before a new one is made."""


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Address at which segments are attached."""

    address: str
    """Abstract Unix socket of the trainer; the name may be a path at which it listens, too."""
    secret: str
    """Proves that the trainer told the worker the address."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: tensors of the layout that are in the segment."""

    segment: int
    """Number of the segment: one for all buckets of a round."""
    first: int
    """Number of the first tensor."""
    last: int
    """Number behind the last one."""


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Maps the update that the trainer has staged on this host.

    Args:
        config: Names the backend.
        parallel_config: Not used: every worker maps the same memory.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    trainer_cls = "wtransfer.engines.shm:ShmTrainerEngine"
    tensors_valid_until: ClassVar[Literal["return", "round"]] = "round"
    writes_after_return: ClassVar[bool] = False
    contract_version: ClassVar[str] = "1.0"

    def __init__(self, config: HasBackend, parallel_config: ParallelConfig) -> None:
        super().__init__(config, parallel_config)
        self._exporter: ShmInitInfo | None = None
        self._layout: TensorLayout | None = None
        self._dial = Dial()
        # Weak: the views of the round keep the mapping. Without them the lease ends, also when the
        # round is aborted: an engine that is not receiving at that time is not notified.
        self._mapping: weakref.ref[ByteArray] | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Record the address at which the trainer exports segments; each round connects there."""
        self._exporter = init_info

    def set_layout(self, layout: TensorLayout) -> None:
        """Take the layout of the round's tensors."""
        self._layout = layout

    def start_weight_update(self) -> None:
        """Drop the mapping of the round before: each round maps afresh.

        A page that this process wrote to is its own from then on; the old mapping would go on
        showing it after the trainer has rewritten the segment. An abort so far was of an earlier
        round.
        """
        self._mapping = None
        self._dial = Dial()

    def receive_weights(self, update_info: ShmUpdateInfo, load_weights: LoadWeights) -> None:
        """Pass views of one bucket on.

        Raises:
            PeerLostError: The trainer is gone, or on another host.
            ProtocolError: The update has no such tensors.
            TruncatedError: The segment is smaller than the update.
        """
        exporter, layout = self._exporter, self._layout
        if exporter is None or layout is None:
            raise NotInitializedError("not initialized: no trainer to map memory of, or no layout")
        bucket = layout.bucket(update_info.first, update_info.last)
        mapping = None if self._mapping is None else self._mapping()
        if mapping is None:
            mapping = attach(
                exporter.address, exporter.secret, update_info.segment, dial=self._dial
            ).mapping
            self._mapping = weakref.ref(mapping)
        # In bulk, and only the written range: a page fault per 4 KiB would cost more.
        populate(mapping, bucket.start, bucket.nbytes)
        load_weights(layout.views(mapping, bucket))

    def abort_weight_update(self) -> None:
        """Call the attaching off, which waits for the trainer for as long as the round lasts."""
        self._dial.call_off()

    def shutdown(self) -> None:
        """Disconnect; memory that a model points to stays leased."""
        self._dial.call_off()
        self._exporter = None


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    """Options of the engine."""

    backend: ClassVar[str] = "shm"

    bucket_nbytes: int = 32 << 20
    """Bytes announced at a time. Smaller: workers start earlier; larger: fewer messages."""

    def __post_init__(self) -> None:
        if type(self.bucket_nbytes) is not int or self.bucket_nbytes <= 0:
            raise ValueError(
                f"bucket_nbytes is {self.bucket_nbytes!r}, expected > 0, a whole number"
            )


@dataclass
class Slot:
    """A segment with one content, and the announcements of it."""

    segment_id: int
    segment: Segment
    memory: PopulatingAhead
    announced: list[dict[str, Any]] = field(default_factory=list)


class ShmTrainerEngine(TrainerWeightTransferEngine[ShmTrainerInitInfo]):
    """Stages each update once per host.

    Two segments take turns: the committed one, which models may point to and joiners are served
    from, and the next. A segment is written only while no reader has a lease on it. If a reader
    keeps its lease, it keeps that memory to itself and the next update takes a new segment.

    Args:
        init_info: Options.
        client: Client of all workers.
        source: The weights.
    """

    init_info_cls = ShmTrainerInitInfo

    def __init__(
        self,
        init_info: ShmTrainerInitInfo,
        *,
        client: WeightSyncClient,
        source: RoundSource | None = None,
    ) -> None:
        super().__init__(init_info, client=client, source=source)
        self._exporter = SegmentExporter(beside=getattr(client, "address", None))
        self._committed: Slot | None = None
        self._next: Slot | None = None
        self._num_contents = 0

    def worker_init_info(self) -> dict[str, Any]:
        """Return the address at which segments are attached."""
        return {"address": self._exporter.address, "secret": self._exporter.secret}

    def send_weights(self) -> None:
        """Copy bucket by bucket, and announce each while the next is copied."""
        source = self.source
        if source is None:
            raise NotInitializedError("not initialized: the engine has no source to send")
        slot = self._take_slot(source.layout.nbytes, source.note_progress)

        def place_of(bucket: Bucket) -> ByteArray:
            slot.memory.wait(bucket.stop)
            return slot.segment.buffer[bucket.start : bucket.stop]

        with Announcer(self.client.update_weights, NUM_UNDER_WAY) as announcer:
            for bucket in source.iter_buckets(self.init_info.bucket_nbytes, place_of):
                info = {"segment": slot.segment_id, "first": bucket.first, "last": bucket.last}
                slot.announced.append(info)
                announcer.announce(info)

    def resend(self, client: WeightSyncClient) -> None:
        """Announce the committed segment again."""
        if self._committed is None:
            raise NotInitializedError("not initialized: nothing has been committed yet")
        for info in self._committed.announced:
            client.update_weights(info)

    def round_finished(self, *, committed: bool) -> None:
        """Keep the committed segment; the one before it is the next to be written."""
        if committed:
            self._committed, self._next = self._next, self._committed

    def shutdown(self) -> None:
        """Revoke all segments; readers keep their mappings."""
        self._exporter.close()
        for slot in (self._committed, self._next):
            if slot is not None:
                slot.segment.close()
        self._committed = self._next = None

    def _take_slot(self, nbytes: int, on_step: Callable[[], None]) -> Slot:
        before, self._next = self._next, None
        if before is not None and self._reclaim(before, nbytes):
            segment, memory = before.segment, before.memory
        else:
            segment = Segment(nbytes, populated=False)
            memory = PopulatingAhead(segment, on_step)
        # A number for every content: a late request for an older one fails.
        slot = Slot(self._num_contents, segment, memory)
        self._num_contents += 1
        self._exporter.export(slot.segment_id, slot.segment)
        self._next = slot
        return slot

    def _reclaim(self, slot: Slot, nbytes: int) -> bool:
        """Take back a segment to write to it, unless a reader still has a lease."""
        # Revoked first: from here on no lease can be added, so "free" stays true.
        self._exporter.revoke(slot.segment_id)
        usable = slot.segment.nbytes >= nbytes and not slot.memory.failed
        if usable and self._exporter.wait_free(slot.segment_id, RELEASE_GRACE_S):
            return True
        # Remaining readers keep the memory alive; it goes with the last of them.
        slot.segment.close()
        return False
