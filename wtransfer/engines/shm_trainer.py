"""Engine ``shm``, trainer side: copies into shared memory and tells the workers as it goes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.engines.interface import (
    ParamMeta,
    RoundSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSyncClient,
)
from wtransfer.engines.places import Places
from wtransfer.errors import NotInitializedError
from wtransfer.transport.buckets import Layout
from wtransfer.transport.lease import SegmentExporter
from wtransfer.transport.memory import Segment
from wtransfer.transport.tensors import dtype_name
from wtransfer.weight_sync.trainer.announcing import Announcer
from wtransfer.weight_sync.trainer.digesting import same_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wtransfer.transport.tensors import ByteArray

MAX_BUCKET_TENSORS = 2048
"""Most tensors announced at a time: small ones cost workers by their number."""
NUM_UNDER_WAY = 2
"""Announcements that workers may have in their hands."""
RELEASE_GRACE_S = 0.5
"""How long to wait for readers of the older segment before taking a fresh one, in seconds."""


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    """Options of the engine."""

    backend: ClassVar[str] = "shm"

    bucket_nbytes: int = 32 << 20
    """Bytes announced at a time. Smaller: workers start earlier; larger: fewer messages."""

    def __post_init__(self) -> None:
        # The CLI hands over strings.
        self.bucket_nbytes = int(self.bucket_nbytes)
        if self.bucket_nbytes <= 0:
            raise ValueError(f"bucket_nbytes is {self.bucket_nbytes}, expected > 0")


@dataclass
class Slot:
    """A segment with one content, and what was announced of it."""

    segment_id: int
    segment: Segment
    announced: list[dict[str, Any]] = field(default_factory=list)


class SegmentLayout(Layout):
    """Where each tensor of an update lies in a segment, in the words of an announcement.

    Args:
        metadata: The update.
    """

    def __init__(self, metadata: Sequence[ParamMeta]) -> None:
        super().__init__([meta.nbytes for meta in metadata])
        self.metadata = tuple(metadata)
        self._names = [meta.name for meta in metadata]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._dtype_names = [dtype_name(meta.dtype) for meta in metadata]
        self._shapes = [list(meta.shape) for meta in metadata]

    def places(self, memory: ByteArray) -> Places:
        """Return the place of each tensor in a segment's memory."""
        return Places(memory, self._numbers, self.starts, self.stops)

    def edges(self, nbytes: int) -> Iterator[int]:
        """Yield the number behind the last tensor of each announcement of `nbytes` or a few more.

        Even of no tensors there is one: workers are told the segment.
        """
        first = 0
        for stop, end in enumerate(self.stops, 1):
            if end - self.starts[first] >= nbytes or stop - first >= MAX_BUCKET_TENSORS:
                yield stop
                first = stop
        if first < len(self.stops) or not self.stops:
            yield len(self.stops)

    def start(self, number: int) -> int:
        """Return the first byte of a tensor, or the end of the last one."""
        return self.starts[number] if number < len(self.starts) else self.nbytes

    def announcement(self, segment_id: int, first: int, stop: int) -> dict[str, Any]:
        """Return what workers need to find the tensors from number `first` up to `stop`."""
        start = self.start(first)
        end = self.stops[stop - 1] if stop > first else start
        return {
            "segment": segment_id,
            "names": self._names[first:stop],
            "dtype_names": self._dtype_names[first:stop],
            "shapes": self._shapes[first:stop],
            "offsets": self.starts[first:stop],
            "start": start,
            "nbytes": end - start,
        }


class ShmTrainerEngine(TrainerWeightTransferEngine[ShmTrainerInitInfo]):
    """Stages each update once per host.

    Two segments take turns: the committed one, which models may point to and joiners are served
    from, and the next. A segment is written only when no reader has a lease on it. If one does not
    let go, it keeps that memory to itself and the next update takes a fresh segment.

    Args:
        init_info: Options.
        client: Reaches all workers.
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
        self._exporter = SegmentExporter()
        self._committed: Slot | None = None
        self._next: Slot | None = None
        self._num_contents = 0
        self._layout = SegmentLayout(())

    def worker_init_info(self) -> dict[str, Any]:
        """Return where segments are exported."""
        return {"address": self._exporter.address, "secret": self._exporter.secret}

    def send_weights(self) -> None:
        """Copy and announce, the one beside the other."""
        source = self.source
        if source is None:
            raise NotInitializedError("not initialized: the engine has no source to send")
        layout = self._layout_of(source.metadata)
        slot = self._take_slot(layout.nbytes, source.note_progress)
        # More than one under way, since a worker that has to wait for the next is idle.
        with Announcer(self.client.update_weights, NUM_UNDER_WAY) as announcer:
            self._copy(source, slot, layout, announcer)

    def resend(self, client: WeightSyncClient) -> None:
        """Announce the committed segment again."""
        if self._committed is None:
            raise NotInitializedError("not initialized: nothing has been committed yet")
        for info in self._committed.announced:
            client.update_weights(info)

    def round_finished(self, *, committed: bool) -> None:
        """Keep what was committed; the segment before it is the next to be written."""
        if committed:
            self._committed, self._next = self._next, self._committed

    def shutdown(self) -> None:
        """Stop exporting; readers keep what they have mapped."""
        self._exporter.close()
        for slot in (self._committed, self._next):
            if slot is not None:
                slot.segment.close()
        self._committed = self._next = None

    def _copy(
        self, source: RoundSource, slot: Slot, layout: SegmentLayout, announcer: Announcer
    ) -> None:
        edges = layout.edges(self.init_info.bucket_nbytes)
        first, edge = 0, next(edges)
        copied = source.copy_into(layout.places(slot.segment.buffer))
        # Also when there is nothing to copy at all.
        for there in itertools.chain([0], copied):
            while first <= edge <= there:
                info = layout.announcement(slot.segment_id, first, edge)
                slot.announced.append(info)
                announcer.announce(info)
                first, edge = edge, next(edges, -1)

    def _layout_of(self, metadata: Sequence[ParamMeta]) -> SegmentLayout:
        if not same_metadata(metadata, self._layout.metadata):
            self._layout = SegmentLayout(metadata)
        return self._layout

    def _take_slot(self, nbytes: int, on_step: Callable[[], None]) -> Slot:
        before, self._next = self._next, None
        segment = self._reclaim(before, nbytes) if before is not None else None
        # A number for every content: whoever asks for an older one asks in vain.
        slot = Slot(self._num_contents, segment or Segment(nbytes, on_step))
        self._num_contents += 1
        self._exporter.export(slot.segment_id, slot.segment)
        self._next = slot
        return slot

    def _reclaim(self, slot: Slot, nbytes: int) -> Segment | None:
        """Take back a segment to write to it, unless somebody still reads it."""
        # Withdrawn first: from here on no lease can be added, so "free" stays true.
        self._exporter.revoke(slot.segment_id)
        large_enough = slot.segment.nbytes >= nbytes
        if large_enough and self._exporter.wait_free(slot.segment_id, RELEASE_GRACE_S):
            return slot.segment
        # Readers that still hold it keep the memory alive; it goes with the last of them.
        slot.segment.close()
        return None
