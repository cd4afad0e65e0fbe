"""Layout of an update's tensors: one range of bytes, computed alike on both sides."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from wtransfer.errors import ProtocolError, TruncatedError
from wtransfer.manifest import Identities, Manifest, Piece
from wtransfer.transport.tensors import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from wtransfer.transport.tensors import ByteArray

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes: a cache line, and enough for any dtype."""
MIN_BUCKET_NBYTES = 1 << 20
"""Size below which the last buckets of an update get no smaller."""
MAX_BUCKET_TENSORS = 2048
"""Most tensors of a bucket: small ones cost by their number."""


def aligned(nbytes: int) -> int:
    """Return the next place at which a tensor may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Bucket(NamedTuple):
    """Consecutive tensors, sent together.

    They are the tensors ``first`` up to, without, ``last``, in the bytes ``start`` up to ``stop``
    of the layout.
    """

    first: int
    """Number of the first tensor."""
    last: int
    """Number behind the last tensor."""
    start: int
    """First byte in the layout."""
    stop: int
    """Byte behind the last one."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


class TensorLayout:
    """Names, dtypes, shapes, sizes and offsets of an update's tensors, by number.

    A tensor's number is its place in the manifest, and its index in ``names``, ``dtypes``,
    ``shapes``, ``sizes`` (bytes) and ``starts`` (first byte; gaps align the tensors). ``numbers``
    has the number of each name, ``nbytes`` the size of all with the gaps. Trainer and worker
    compute the layout from the same manifest, so messages need only name byte ranges.

    Args:
        manifest: The pieces; `Manifest.check` has accepted it.

    Raises:
        ManifestError: This torch lacks one of the dtypes.
    """

    def __init__(self, manifest: Manifest) -> None:
        pieces = manifest.pieces
        self.manifest = manifest
        self.names = [piece.name for piece in pieces]
        self.dtypes = [torch_dtype(piece.dtype) for piece in pieces]
        self.shapes = [piece.shape for piece in pieces]
        self.sizes = [piece.nbytes for piece in pieces]
        """Bytes of each tensor."""
        self.numbers = {name: number for number, name in enumerate(self.names)}
        """Name -> number."""
        self.starts: list[int] = []
        """First byte of each tensor."""
        end = 0
        for nbytes in self.sizes:
            start = aligned(end)
            self.starts.append(start)
            end = start + nbytes
        self.nbytes = end
        """Bytes of the range, gaps included."""

    @classmethod
    def of_columns(
        cls, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> Self:
        """Return the layout of an update info that names its own tensors (seed contract).

        Raises:
            ManifestError: A name, dtype or shape that no update can have.
            ValueError: The lists have different lengths.
        """
        rows = zip(names, dtype_names, map(tuple, shapes), strict=True)
        manifest = Manifest(tuple(Piece(*row) for row in rows))
        manifest.check()
        return cls(manifest)

    @cached_property
    def identity(self) -> str:
        """Identity of the manifest."""
        return self.manifest.identity()

    @cached_property
    def _identities(self) -> Identities:
        return Identities(self.manifest)

    def fingerprint(self, digests: Sequence[str]) -> str:
        """Return the fingerprint of the weights whose pieces have these digests, in order."""
        return self._identities.fingerprint(digests)

    def buckets(self, nbytes: int) -> Iterator[Bucket]:
        """Yield buckets of whole tensors of about `nbytes`; a larger tensor makes a larger bucket.

        Towards the end each bucket takes half of the rest: nothing overlaps with the last one.
        """
        first = 0
        while first < len(self.sizes):
            start = self.starts[first]
            enough = start + min(nbytes, max(MIN_BUCKET_NBYTES, (self.nbytes - start) // 2))
            most = min(len(self.sizes), first + MAX_BUCKET_TENSORS)
            reached = bisect_left(range(most), enough, first, key=self._stop)
            last = min(reached + 1, most)
            yield self.bucket(first, last)
            first = last

    def bucket(self, first: int, last: int) -> Bucket:
        """Return the bucket of tensors `first` up to `last`, as a peer has named them.

        Raises:
            ProtocolError: The update has no such tensors.
        """
        if not 0 <= first <= last <= len(self.sizes):
            raise ProtocolError(
                f"tensors {first} to {last} were announced of an update of {len(self.sizes)}"
            )
        if first == last:
            return Bucket(first, last, 0, 0)
        return Bucket(first, last, self.starts[first], self._stop(last - 1))

    def _stop(self, number: int) -> int:
        """Return the byte behind a tensor."""
        return self.starts[number] + self.sizes[number]

    def view(self, memory: ByteArray | torch.Tensor, number: int, base: int = 0) -> torch.Tensor:
        """Return a tensor as a view of memory, which it keeps alive.

        Args:
            memory: uint8, one dimension; host memory or a tensor of any device.
            number: Number of the tensor.
            base: Byte of the layout at which the memory begins.

        Cost: about 1 us, and 1 us more for a tensor of another number of dimensions than one.
        """
        shape, dtype = self.shapes[number], self.dtypes[number]
        start = self.starts[number] - base
        if isinstance(memory, torch.Tensor):
            return memory[start : start + self.sizes[number]].view(dtype).view(shape)
        if self.sizes[number] == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        numel = self.sizes[number] // dtype.itemsize
        flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)
        return flat if len(shape) == 1 else flat.view(shape)

    def views(
        self, memory: ByteArray | torch.Tensor, bucket: Bucket, base: int = 0
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and view of each tensor of a bucket (see `view`).

        Raises:
            TruncatedError: The bucket does not lie within the memory.
        """
        if bucket.stop - base > len(memory):
            raise TruncatedError(
                f"bytes {bucket.start} to {bucket.stop} of an update do not lie within "
                f"{len(memory)} bytes of memory"
            )
        for number in range(bucket.first, bucket.last):
            yield self.names[number], self.view(memory, number, base)
