"""A serving engine's model as the target of updates: their form, and the way back.

The engine's package says how a set is loaded; the form and the first way back are those of the
checkpoint that the engine started from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from wtransfer.checkpoint.model_config import (
    CONFIG_NAME,
    canonical_config,
    compared,
    differences,
    parse_config,
)
from wtransfer.errors import SchemaError
from wtransfer.weight_sync.worker.schema import MAX_LISTED, canonical_names
from wtransfer.weight_sync.worker.session import is_set

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from wtransfer.checkpoint.served import ServedCheckpoint
    from wtransfer.weights import TensorSpec


CONFIG_VARIABLE = "WTRANSFER_CONFIG_MAY_DIFFER"
"""Variable of a serving engine's environment: 1 takes updates of another configuration."""


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
        self._compared: tuple[str, list[str]] = "", []
        """The last configuration of an update, and how it differs."""
        self._touched = False

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return the checkpoint's form; None: that of the last whole update."""
        return self._schema

    def check_config(self, text: str) -> list[str]:
        """Raise if an update was trained by another configuration than the checkpoint's.

        Both are compared as they are written, without the overrides of the engine's user.

        Args:
            text: The update's, as JSON.

        Returns:
            Notes: what differs, where users of the engine allow that.

        Raises:
            SchemaError: The entries that differ, with both values (first 20); or it cannot be read.
            ValueError: `CONFIG_VARIABLE` is neither 0 nor 1.
        """
        if self.checkpoint is None or self.checkpoint.config is None:
            return []
        if text != self._compared[0]:
            self._compared = text, self._config_differences(self.checkpoint.config, text)
        wrong = self._compared[1]
        if not wrong:
            return []
        more = f"; and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
        shown = "; ".join(wrong[:MAX_LISTED]) + more
        if is_set(CONFIG_VARIABLE):
            return [f"computes by another configuration: {shown}"]
        raise SchemaError(
            f"the update's {CONFIG_NAME} is not that of the checkpoint: {shown}; so this server "
            "would compute otherwise than one that starts with the update. "
            f"{CONFIG_VARIABLE}=1 in the environment of the serving engine allows it",
            mismatches=wrong[:MAX_LISTED],
        )

    def _config_differences(self, own: dict[str, Any], text: str) -> list[str]:
        try:
            if text == canonical_config(own):
                return []
            received = parse_config(text)
            # Read by one class, both would have its type.
            kind = received.get("model_type") or None
            kinds = [{"model_type": each} for each in (own.get("model_type") or kind, kind)]
            return differences(*kinds) or differences(
                *(self.read_config(compared(each)) for each in (own, received))
            )
        except Exception as error:
            # The class of another library may raise anything for what it does not expect.
            return [f"it cannot be read ({type(error).__name__}: {error})"]

    def read_config(self, config: dict[str, Any]) -> Mapping[str, Any]:
        """Return a configuration with the engine's defaults and names, as its class reads it.

        Args:
            config: Entries of a ``config.json``, without those that are not compared.
        """
        return config

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
