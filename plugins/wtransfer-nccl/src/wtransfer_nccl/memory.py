"""Memory that an update is received into on a worker, beside the model or in pinned host memory."""

from __future__ import annotations

import bisect
import functools
from typing import TYPE_CHECKING, Any

import torch
from wtransfer.engines.collective import NUM_AHEAD
from wtransfer.transport.memory import is_out_of_memory, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.transport.layout import Bucket, TensorLayout

    from wtransfer_nccl.devices import Lane


class DeviceBuffers:
    """Memory of a device, in which every tensor stays where it was received.

    Args:
        layout: The update.
        lane: The device.

    Raises:
        StagingMemoryError: There is not that much memory.
    """

    def __init__(self, layout: TensorLayout, lane: Lane) -> None:
        self._layout = layout
        self._memory = allocated(layout.nbytes, device=lane.device)
        # The memory may be that of an earlier update, which the model's streams may still use.
        lane.settle()

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes themselves."""
        return self._memory[start:stop]

    def received(self, start: int, stop: int) -> None:
        """Do nothing: the bytes are in place."""

    def views(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views that keep the whole memory alive."""
        return self._layout.views(self._memory, bucket)


class BucketBuffers:
    """Memory of a device for the buckets that are under way, and no more.

    A tensor keeps its bytes until the next bucket is there.

    Args:
        layout: The update.
        nbytes: Bytes of a bucket, about; the same as the root's.
        lane: The device.
    """

    def __init__(self, layout: TensorLayout, nbytes: int, lane: Lane) -> None:
        self._layout = layout
        self._buckets = list(layout.buckets(nbytes))
        self._starts = [bucket.start for bucket in self._buckets]
        self._lane = lane
        self._memory: dict[int, torch.Tensor] = {}
        lane.settle()

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the memory that these bytes of their bucket are received into.

        Raises:
            StagingMemoryError: There is no room for the bucket.
        """
        number = self._number(start)
        bucket = self._buckets[number]
        if number not in self._memory:
            self._memory[number] = allocated(bucket.nbytes, device=self._lane.device)
        return self._memory[number][start - bucket.start : stop - bucket.start]

    def received(self, start: int, stop: int) -> None:  # noqa: ARG002  # the first byte tells enough
        """Release the earlier buckets, which have been taken over."""
        number = self._number(start)
        for before in [each for each in self._memory if each < number]:
            del self._memory[before]

    def views(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the last bucket that has arrived."""
        if bucket.nbytes:
            memory = self._memory[self._number(bucket.start)]
        else:
            memory = allocated(0, device=self._lane.device)
        return self._layout.views(memory, bucket, bucket.start)

    def _number(self, start: int) -> int:
        return bisect.bisect_right(self._starts, start) - 1


class PinnedBuffers:
    """Pinned host memory, to which a few parts on the device, in turn, are copied.

    The device holds some buckets then, and not the update.

    Args:
        layout: The update.
        part_nbytes: Bytes of the largest part.
        lane: The device; where it is the CPU, the memory is not pinned.

    Raises:
        StagingMemoryError: There is not that much memory.
    """

    def __init__(self, layout: TensorLayout, part_nbytes: int, lane: Lane) -> None:
        self._layout = layout
        self._memory = allocated(layout.nbytes, device="cpu", pin_memory=lane.on_cuda)
        self._lane = lane
        # As many as are under way at a time; a part's turn ends before its slot's next begins.
        take = functools.partial(allocated, min(part_nbytes, layout.nbytes), device=lane.device)
        self._slots = [take() for _ in range(NUM_AHEAD + 1)]
        self._next = 0
        self._taken: dict[int, torch.Tensor] = {}
        lane.settle()

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the next slot."""
        slot = self._slots[self._next % len(self._slots)][: stop - start]
        self._next += 1
        self._taken[start] = slot
        return slot

    def received(self, start: int, stop: int) -> None:
        """Copy a slot to its place, and wait for the copy; other parts travel meanwhile."""
        self._memory[start:stop].copy_(self._taken.pop(start), non_blocking=True)
        self._lane.finish()

    def views(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views that keep the whole memory alive."""
        return self._layout.views(self._memory, bucket)


def allocated(nbytes: int, **options: Any) -> torch.Tensor:
    """Return uninitialised memory: uint8, shape ``(nbytes,)``.

    Args:
        nbytes: Bytes.
        **options: Options of ``torch.empty``.

    Raises:
        StagingMemoryError: There is not that much memory.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, **options)
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(nbytes, error) from error
        raise
