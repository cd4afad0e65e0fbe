"""A serving engine's model as the target of updates: their form, and the way back.

The engine's package says how a set is loaded; the form and the first way back are those of the
checkpoint that the engine started from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from wtransfer.weight_sync.worker.schema import canonical_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from wtransfer.checkpoint.served import ServedCheckpoint
    from wtransfer.weights import TensorSpec


class ServedTarget(ABC):
    """A `WeightTarget` that a serving engine loads as it has loaded its checkpoint.

    The required contents of an update are read from the headers of the checkpoint, never from the
    result of the engine's ``load_weights``, which says nothing where a tensor is missing. Without a
    checkpoint on disk the first complete update sets the form, and before it there is no way back.

    Args:
        checkpoint: The checkpoint that the engine started from; None: it is not on this disk.
    """

    def __init__(self, checkpoint: ServedCheckpoint | None) -> None:
        self.checkpoint = checkpoint
        """The checkpoint that the engine started from."""
        self.applied: Mapping[str, torch.Tensor] | None = None
        """The set of which the model consists; None: none was applied, or one in part."""
        self._schema = None if checkpoint is None else checkpoint.schema()
        self._touched = False

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return the checkpoint's form; None: that of the last whole update."""
        return self._schema

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a whole set. If that fails, another whole load must follow."""
        self._touched = True
        self.applied = None
        self.load(self.in_form(tensors))
        self.applied = tensors

    @abstractmethod
    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Have the engine load a whole set, on the thread that owns the model.

        Args:
            weights: The set, in the dtypes of the checkpoint.
        """

    def in_form(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors in the dtypes of the checkpoint, one by one.

        Cast here and not in the model's loaders: some loaders compare or keep their input, and each
        layer's kernels shall see the very bytes that a checkpoint would have had.
        """
        schema = self._schema or {}
        canonical = canonical_names(schema)
        for name, tensor in tensors.items():
            spec = schema.get(canonical.get(name, name))
            yield name, tensor if spec is None else tensor.to(spec.dtype)

    def base(self) -> Mapping[str, torch.Tensor] | None:
        """Return the checkpoint on disk; None: it is not there, or was changed since."""
        if self.checkpoint is None or not self.checkpoint.unchanged():
            return None
        return self.checkpoint

    def capture(self) -> Mapping[str, torch.Tensor] | None:
        """Return the last applied set; before the first, the checkpoint on disk."""
        return self.applied if self._touched else self.base()

    def forget(self) -> None:
        """Drop the last applied set: the model does not hold it any more."""
        self._touched = True
        self.applied = None
