"""What an update consists of, column by column: many small tensors are compared by loops in C."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from wtransfer.transport.tensors import host_forms, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from wtransfer.engines.interface import ParamMeta
    from wtransfer.manifest import Manifest


class Part(NamedTuple):
    """Some tensors of an update that follow each other."""

    first: int
    """Number of the first one."""
    names: list[str]
    """Names."""
    dtypes: list[torch.dtype]
    """Dtypes."""
    shapes: list[tuple[int, ...]]
    """Shapes."""
    sizes: list[int]
    """Bytes."""
    forms: list[tuple[object, ...]]
    """Dtypes and shapes, as `have_forms` takes them."""

    @property
    def own(self) -> slice:
        """Which numbers these are."""
        return slice(self.first, self.first + len(self.names))


class Outline:
    """Names and forms of an update's tensors, by number. All columns have the same length.

    Args:
        names: Unique.
        dtypes: Of torch.
        shapes: Dimensions.
    """

    def __init__(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[tuple[int, ...]],
    ) -> None:
        self.names = list(names)
        """Names."""
        self.dtypes = list(dtypes)
        """Dtypes."""
        self.shapes = list(shapes)
        """Shapes."""
        self.numels = list(map(math.prod, self.shapes))
        """Numbers of elements."""
        self.sizes = [n * dtype.itemsize for n, dtype in zip(self.numels, dtypes, strict=True)]
        """Bytes."""
        self.forms = host_forms(self.dtypes, self.shapes)
        """Dtypes and shapes, as `have_forms` takes them."""
        self.numbers = {name: number for number, name in enumerate(self.names)}
        """Name -> number."""
        self.nbytes = sum(self.sizes)
        """Bytes of all."""
        self._parts: dict[int, list[Part]] = {}

    @classmethod
    def of_metadata(cls, metadata: Sequence[ParamMeta]) -> Outline:
        """Return the outline of what a source says that it has."""
        return cls(
            [meta.name for meta in metadata],
            [meta.dtype for meta in metadata],
            [tuple(meta.shape) for meta in metadata],
        )

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> Outline:
        """Return the outline of a valid manifest.

        Raises:
            ManifestError: This torch lacks one of the dtypes.
        """
        pieces = manifest.pieces
        return cls(
            [piece.name for piece in pieces],
            [torch_dtype(piece.dtype) for piece in pieces],
            [piece.shape for piece in pieces],
        )

    def part(self, first: int, stop: int) -> Part:
        """Return the tensors from number `first` up to `stop`, or to the end."""
        own = slice(first, stop)
        return Part(
            first,
            self.names[own],
            self.dtypes[own],
            self.shapes[own],
            self.sizes[own],
            self.forms[own],
        )

    def parts(self, number: int) -> Sequence[Part]:
        """Return everything in parts of so many tensors; made once."""
        if number not in self._parts:
            firsts = range(0, len(self), number)
            self._parts[number] = [self.part(first, first + number) for first in firsts]
        return self._parts[number]

    def __len__(self) -> int:
        return len(self.names)
