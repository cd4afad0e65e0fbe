"""Staging of an update that nobody has planned: everything that the target consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.errors import SchemaError
from wtransfer.manifest import Manifest, Piece
from wtransfer.transport.digests import digest
from wtransfer.transport.layout import TensorLayout
from wtransfer.transport.tensors import dtype_name
from wtransfer.weight_sync.worker.schema import canonical_names
from wtransfer.weight_sync.worker.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from wtransfer.engines.interface import TensorSpec


class CoverageStaging(Staging):
    """Takes every tensor of a schema, under any of its names.

    No sender has digested them: what can be shown is that all of them came, and fit.

    Args:
        schema: The target's.
        cast: Whether a floating dtype may take another.
        copies: As in `Staging`.
        on_progress: As in `Staging`.
    """

    def __init__(
        self,
        schema: Mapping[str, TensorSpec],
        *,
        cast: bool,
        copies: bool,
        on_progress: Callable[[int], None],
    ) -> None:
        super().__init__(TensorLayout(manifest_of(schema)), copies=copies, on_progress=on_progress)
        self._schema = schema
        self._canonical = canonical_names(schema)
        self._cast = cast
        self._came_as: dict[str, str] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Stage tensors, as `Staging.load_weights` does."""
        return super().load_weights(self._fitted(weights))

    def prove(self) -> list[str]:
        """Return the digest of every tensor, as it arrived, in the manifest's order.

        Raises:
            IncompleteUpdateError: Some never arrived.
        """
        return self.verify([self._digests.get(name, "") for name in self._layout.names], {})

    def _fitted(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            canonical = self._canonical.get(name, name)
            fitted = self._casted(canonical, tensor)
            first = self._came_as.setdefault(canonical, name)
            if first == name:
                yield canonical, fitted
            else:
                self._check_same(canonical, (first, name), fitted)

    def _casted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        spec = self._schema.get(name)
        if spec is None or not (self._cast and tensor.is_floating_point()):
            return tensor
        return tensor.to(spec.dtype) if spec.dtype.is_floating_point else tensor

    def _check_same(self, canonical: str, names: tuple[str, str], tensor: torch.Tensor) -> None:
        if digest(tensor.detach(), self._layout.manifest.algorithm) != self._digests[canonical]:
            raise SchemaError(
                f"{names[0]!r} and {names[1]!r} are one tensor in the target (tied weights) and "
                "came with different bytes",
                piece=names[1],
            )


def manifest_of(schema: Mapping[str, TensorSpec]) -> Manifest:
    """Return the manifest of everything in a schema."""
    return Manifest(
        tuple(
            Piece(name, dtype_name(spec.dtype), tuple(spec.shape)) for name, spec in schema.items()
        )
    )
