"""What a worker receives by broadcasts, bucket by bucket, straight into its place."""

from __future__ import annotations

import collections
import math
import operator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from wtransfer.manifest import DTYPES, Piece
from wtransfer.transport.buckets import Layout, slices
from wtransfer.transport.host_tensors import HostTensors
from wtransfer.transport.tensors import tensor_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from wtransfer.transport.buckets import Bucket
    from wtransfer.transport.communicator import Communicator, Pending
    from wtransfer.transport.tensors import ByteArray

NUM_AHEAD = 3
"""Parts asked for in advance, so that the next arrive while one is digested."""


class Incoming:
    """What a trainer has announced: the tensors of an update in the order of their stream.

    Args:
        names: Names.
        dtype_names: Wire dtypes, all known.
        shapes: Dimensions, none of them negative.
    """

    def __init__(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        self._announced = names, dtype_names, shapes
        self.names = names
        """Names."""
        self.dtype_names = dtype_names
        """Wire dtypes."""
        self.shapes = list(map(tuple, shapes))
        """Dimensions."""
        sizes = map(DTYPES.__getitem__, dtype_names)
        self.layout = Layout(list(map(operator.mul, map(math.prod, self.shapes), sizes)))
        """Where each lies in the stream."""

    def is_of(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> bool:
        """Whether the same was announced."""
        return (names, dtype_names, shapes) == self._announced

    @cached_property
    def pieces(self) -> list[Piece]:
        """The tensors one by one, for who views each by itself."""
        return list(map(Piece, self.names, self.dtype_names, self.shapes))

    def landed(self, bucket: Bucket, landing: Landing) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the tensors of a bucket that has arrived."""
        own, starts = slice(bucket.first, bucket.last), self.layout.starts
        if isinstance(landing, HostLanding):
            columns = (self.names[own], self.dtype_names[own], self.shapes[own], starts[own])
            return HostTensors(landing.memory, *columns)
        rows = zip(starts[own], self.pieces[own], strict=True)
        return ((piece.name, landing.view(start, piece)) for start, piece in rows)


class Landing(Protocol):
    """Memory for one update. Bytes are counted from the start of its stream."""

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return where some bytes are to be received; at most `NUM_AHEAD` + 1 parts at a time.

        Returns:
            uint8, shape ``(stop - start,)``, contiguous, of the communicator's kind of memory.
        """

    def arrived(self, start: int, stop: int) -> None:
        """Note that the bytes are in their part; called in the order of the stream."""

    def view(self, start: int, piece: Piece) -> torch.Tensor:
        """Return a tensor whose bytes have all arrived."""


class HostLanding:
    """Host memory, in which everything stays where it was received.

    Args:
        memory: uint8 array of the stream's size.
    """

    def __init__(self, memory: ByteArray) -> None:
        self.memory = memory
        """Where everything stays."""
        self._content = torch.from_numpy(memory)

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes themselves."""
        return self._content[start:stop]

    def arrived(self, start: int, stop: int) -> None:
        """Do nothing: they are there."""

    def view(self, start: int, piece: Piece) -> torch.Tensor:
        """Return a tensor that keeps the whole memory alive."""
        return tensor_from(self.memory, start, piece.dtype, piece.shape)


class _Part(NamedTuple):
    start: int
    stop: int
    pending: Pending
    ends: Bucket | None


def receive(
    layout: Layout,
    landing: Landing,
    communicator: Communicator,
    nbytes: int,
    on_part: Callable[[], object],
) -> Iterator[Bucket]:
    """Receive a stream of tensors from rank 0; yield each bucket once it is there.

    Args:
        layout: The stream.
        landing: Where to.
        communicator: This rank and the root.
        nbytes: Bytes of a bucket, about; the same as the root's.
        on_part: Called whenever something has arrived.
    """
    under_way: collections.deque[_Part] = collections.deque()
    for bucket in layout.cut(nbytes):
        for part in slices(bucket, nbytes):
            start, stop = bucket.start + part.start, bucket.start + part.stop
            pending = communicator.broadcast(landing.part(start, stop), 0)
            ends = bucket if part.stop == bucket.nbytes else None
            under_way.append(_Part(start, stop, pending, ends))
            if len(under_way) > NUM_AHEAD:
                yield from _arrived(under_way, landing, on_part)
        if not bucket.nbytes:
            yield bucket
    while under_way:
        yield from _arrived(under_way, landing, on_part)


def _arrived(
    under_way: collections.deque[_Part], landing: Landing, on_part: Callable[[], object]
) -> Iterator[Bucket]:
    part = under_way.popleft()
    part.pending.wait()
    landing.arrived(part.start, part.stop)
    on_part()
    if part.ends is not None:
        yield part.ends
