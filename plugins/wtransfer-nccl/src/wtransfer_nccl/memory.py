"""Where an update lies: in buckets of the trainer's device, and beside the model of a worker."""

from __future__ import annotations

import bisect
import functools
from typing import TYPE_CHECKING, Any

import torch
from wtransfer.engines.incoming import NUM_AHEAD
from wtransfer.engines.outgoing import Outgoing, Stream
from wtransfer.transport.tensors import torch_dtype
from wtransfer.weight_sync.worker.staging import is_out_of_memory, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wtransfer.engines.interface import ParamMeta
    from wtransfer.manifest import Piece
    from wtransfer.transport.buckets import Layout
    from wtransfer.transport.communicator import Communicator

    from wtransfer_nccl.devices import Lane


class DeviceOutgoing(Outgoing):
    """Places for the tensors of one round, in buckets of a device.

    Args:
        metadata: The tensors of the round.
        communicator: This rank is the root.
        nbytes: Bytes of a bucket, about.
        memory: Of an earlier round, to be used again where it is large enough.
        on_part: Called whenever something has left; may raise.
        num_buckets: Buckets in memory.
        device: Where they lie.
        stream: Of an earlier round, to be used again where it is the same.
    """

    # Of `Places` it keeps all but the kind of memory: a tensor, for which slicing is the same.
    memory: Any

    def __init__(
        self,
        metadata: Sequence[ParamMeta],
        communicator: Communicator,
        nbytes: int,
        memory: torch.Tensor | None,
        on_part: Callable[[], object],
        *,
        num_buckets: int,
        device: torch.device,
        stream: Stream | None = None,
    ) -> None:
        self._device = device
        super().__init__(
            metadata,
            communicator,
            nbytes,
            _any(memory),
            on_part,
            num_buckets=num_buckets,
            stream=stream,
        )

    def __call__(self, meta: ParamMeta) -> Any:
        """Return the place of a tensor, as uint8 of the device."""
        return self.memory[self[meta.name]]

    def _enough(self, memory: Any, nbytes: int) -> Any:
        if memory is not None and memory.numel() >= nbytes:
            return memory
        return allocated(nbytes, device=self._device)

    def _content(self, start: int, stop: int) -> torch.Tensor:
        content: torch.Tensor = self.memory[start:stop]
        return content


class DeviceLanding:
    """Memory of a device, in which everything stays where it was received.

    Args:
        nbytes: Bytes of the update.
        lane: The device.

    Raises:
        StagingMemoryError: There is not that much.
    """

    def __init__(self, nbytes: int, lane: Lane) -> None:
        self._memory = allocated(nbytes, device=lane.device)
        # It may be that of an earlier update, which the model's streams have not done with yet.
        lane.settle()

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes themselves."""
        return self._memory[start:stop]

    def arrived(self, start: int, stop: int) -> None:
        """Do nothing: they are there."""

    def view(self, start: int, piece: Piece) -> torch.Tensor:
        """Return a tensor that keeps the whole memory alive."""
        return _typed(self._memory, start, piece)


class BucketLanding:
    """Memory of a device for the buckets that are under way, and no more.

    A tensor keeps its bytes until the next bucket is there.

    Args:
        layout: The stream.
        nbytes: Bytes of a bucket, about; the same as the root's.
        lane: The device.
    """

    def __init__(self, layout: Layout, nbytes: int, lane: Lane) -> None:
        self._buckets = list(layout.cut(nbytes))
        self._starts = [bucket.start for bucket in self._buckets]
        self._lane = lane
        self._memory: dict[int, torch.Tensor] = {}
        lane.settle()

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return where these bytes of their bucket are to be received.

        Raises:
            StagingMemoryError: There is no room for the bucket.
        """
        number = self._number(start)
        bucket = self._buckets[number]
        if number not in self._memory:
            self._memory[number] = allocated(bucket.nbytes, device=self._lane.device)
        return self._memory[number][start - bucket.start : stop - bucket.start]

    def arrived(self, start: int, stop: int) -> None:  # noqa: ARG002  # the first byte tells enough
        """Let go of the buckets before, which have been taken over."""
        number = self._number(start)
        for before in [each for each in self._memory if each < number]:
            del self._memory[before]

    def view(self, start: int, piece: Piece) -> torch.Tensor:
        """Return a tensor of the bucket that has arrived last."""
        if not piece.nbytes:
            return _typed(allocated(0, device=self._lane.device), 0, piece)
        number = self._number(start)
        return _typed(self._memory[number], start - self._starts[number], piece)

    def _number(self, start: int) -> int:
        return bisect.bisect_right(self._starts, start) - 1


class PinnedLanding:
    """Pinned host memory, to which a few parts on the device, in turn, are copied.

    The device holds some buckets then, and not the update.

    Args:
        nbytes: Bytes of the update.
        part_nbytes: Bytes of the largest part.
        lane: The device; where it is the CPU, the memory is not pinned.

    Raises:
        StagingMemoryError: There is not that much.
    """

    def __init__(self, nbytes: int, part_nbytes: int, lane: Lane) -> None:
        self._memory = allocated(nbytes, device="cpu", pin_memory=lane.on_cuda)
        self._lane = lane
        # As many as are under way at a time; a part's turn ends before its slot's next begins.
        take = functools.partial(allocated, min(part_nbytes, nbytes), device=lane.device)
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

    def arrived(self, start: int, stop: int) -> None:
        """Copy a slot to its place, and wait until that is done; others travel meanwhile."""
        self._memory[start:stop].copy_(self._taken.pop(start), non_blocking=True)
        self._lane.finish()

    def view(self, start: int, piece: Piece) -> torch.Tensor:
        """Return a tensor that keeps the whole memory alive."""
        return _typed(self._memory, start, piece)


def allocated(nbytes: int, **options: Any) -> torch.Tensor:
    """Return memory with anything in it: uint8, shape ``(nbytes,)``.

    Args:
        nbytes: Bytes.
        **options: Of ``torch.empty``.

    Raises:
        StagingMemoryError: There is not that much.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, **options)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise out_of_memory(nbytes, error) from error
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise out_of_memory(nbytes, error) from error
        raise


def _typed(memory: torch.Tensor, start: int, piece: Piece) -> torch.Tensor:
    content = memory[start : start + piece.nbytes]
    return content.view(torch_dtype(piece.dtype)).view(piece.shape)


def _any(memory: torch.Tensor | None) -> Any:
    return memory
