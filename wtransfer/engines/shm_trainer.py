"""Engine ``shm``, trainer side: copies into shared memory and tells the workers as it goes."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.engines.interface import (
    ParamMeta,
    RoundSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSyncClient,
)
from wtransfer.errors import NotInitializedError
from wtransfer.transport.handover import Lender
from wtransfer.transport.memory import Segment
from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes: a cache line, and any dtype's need."""
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


class Bucket:
    """Tensors that have been copied and not been announced yet."""

    def __init__(self, segment_id: int, start: int) -> None:
        self.start = start
        self.end = start
        self._info: dict[str, Any] = {
            "segment": segment_id,
            "names": [],
            "dtype_names": [],
            "shapes": [],
            "offsets": [],
        }

    def add(self, meta: ParamMeta, offset: int, nbytes: int) -> None:
        """Add a tensor that lies at `offset`."""
        self._info["names"].append(meta.name)
        self._info["dtype_names"].append(dtype_name(meta.dtype))
        self._info["shapes"].append(list(meta.shape))
        self._info["offsets"].append(offset)
        self.end = offset + nbytes

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last tensor."""
        return self.end - self.start

    def update_info(self) -> dict[str, Any]:
        """Return what workers need to find the tensors."""
        return {**self._info, "start": self.start, "nbytes": self.nbytes}


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
        self._lender = Lender()
        self._committed: Slot | None = None
        self._next: Slot | None = None
        self._num_contents = 0

    def worker_init_info(self) -> dict[str, Any]:
        """Return where segments are handed over."""
        return {"address": self._lender.address, "secret": self._lender.secret}

    def send_weights(self) -> None:
        """Copy and announce, the one beside the other."""
        source = self.source
        if source is None:
            raise NotInitializedError("not initialized: the engine has no source to send")
        offsets, nbytes = _layout(source.metadata)
        slot = self._take_slot(nbytes)
        # One announcement under way while the next bucket is copied: worker and trainer overlap.
        with ThreadPoolExecutor(1, "wtransfer-announce") as announcer:
            futures = self._copy(source, slot, offsets, announcer)
            for future in futures:
                future.result()

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
        """Stop lending; readers keep what they have mapped."""
        self._lender.close()
        for slot in (self._committed, self._next):
            if slot is not None:
                slot.segment.close()
        self._committed = self._next = None

    def _copy(
        self,
        source: RoundSource,
        slot: Slot,
        offsets: dict[str, int],
        announcer: ThreadPoolExecutor,
    ) -> list[Future[None]]:
        memory = slot.segment.buffer.data
        futures: list[Future[None]] = []
        bucket = Bucket(slot.segment_id, 0)

        def allocate(meta: ParamMeta) -> memoryview:
            offset = offsets[meta.name]
            return memory[offset : offset + _nbytes(meta)]

        def announce() -> None:
            info = bucket.update_info()
            slot.announced.append(info)
            futures.append(announcer.submit(self.client.update_weights, info))

        for meta, copied in source.iter_into(allocate):
            bucket.add(meta, offsets[meta.name], copied.nbytes)
            if bucket.nbytes >= self.init_info.bucket_nbytes:
                announce()
                bucket = Bucket(slot.segment_id, bucket.end)
                _raise_early(futures)
        announce()
        return futures

    def _take_slot(self, nbytes: int) -> Slot:
        before, self._next = self._next, None
        segment = self._reclaim(before, nbytes) if before is not None else None
        # A number for every content: whoever asks for an older one asks in vain.
        slot = Slot(self._num_contents, segment or Segment(nbytes))
        self._num_contents += 1
        self._lender.offer(slot.segment_id, slot.segment)
        self._next = slot
        return slot

    def _reclaim(self, slot: Slot, nbytes: int) -> Segment | None:
        """Take back a segment to write to it, unless somebody still reads it."""
        # Withdrawn first: from here on no lease can be added, so "free" stays true.
        self._lender.withdraw(slot.segment_id)
        large_enough = slot.segment.nbytes >= nbytes
        if large_enough and self._lender.wait_free(slot.segment_id, RELEASE_GRACE_S):
            return slot.segment
        # Readers that still hold it keep the memory alive; it goes with the last of them.
        slot.segment.close()
        return None


def _nbytes(meta: ParamMeta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize


def _layout(metadata: Sequence[ParamMeta]) -> tuple[dict[str, int], int]:
    """Return name -> offset, and the size of the whole."""
    offsets: dict[str, int] = {}
    end = 0
    for meta in metadata:
        offsets[meta.name] = end
        end += -(-_nbytes(meta) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _raise_early(futures: list[Future[None]]) -> None:
    """Stop copying when an announcement has failed already."""
    for future in futures:
        if future.done():
            future.result()
