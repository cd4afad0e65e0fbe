"""vLLM's model as the target of a session."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import TYPE_CHECKING, Any

from wtransfer_vllm.casting import in_form
from wtransfer_vllm.checkpoint import find_checkpoint
from wtransfer_vllm.layerwise import reloading
from wtransfer_vllm.tying import is_tied

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn
    from wtransfer.engines.interface import TensorSpec


class VllmTarget:
    """A model that vLLM serves, updated in the form of its checkpoint.

    What an update must consist of is read from the headers of the checkpoint that the model was
    loaded from, never from what ``load_weights`` returns: that names the same fused parameters when
    a part of them is missing. Without a checkpoint on disk the first complete update sets the form.

    The way back before the first commit is that checkpoint, too. Where it is not on disk, or was
    changed since, there is none, and a failed first commit leaves the worker *empty*.

    Args:
        model: The module.
        vllm_config: vLLM's own.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self.vouched_as = vllm_config.model_config
        """Stands for the model: what vouches for it at load has no module at hand."""
        self._model = model
        self._vllm_config = vllm_config
        self._checkpoint = find_checkpoint(
            vllm_config, tied=is_tied(model, vllm_config.model_config)
        )
        self._schema = None if self._checkpoint is None else self._checkpoint.schema()
        self._applied: Mapping[str, torch.Tensor] | None = None
        self._touched = False

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return the checkpoint's form; None: that of the last whole update."""
        return self._schema

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a whole set, and have vLLM process every layer for its kernels."""
        from vllm.config import set_current_vllm_config

        self._touched = True
        self._applied = None
        with (
            set_current_vllm_config(self._vllm_config),
            reloading(self._model, self._vllm_config.model_config),
            _as_an_update(),
        ):
            weights = in_form(tensors, self._schema)
            self._model.load_weights(weights)  # type: ignore[operator]  # vLLM's own
        self._applied = tensors

    def capture(self) -> Mapping[str, torch.Tensor] | None:
        """Return what was applied last; before that, the checkpoint on disk."""
        if self._touched:
            return self._applied
        return None if self._checkpoint is None else self._checkpoint.tensors()

    def forget(self) -> None:
        """Drop what was applied last: the model does not hold it any more."""
        self._touched = True
        self._applied = None


def _as_an_update() -> contextlib.AbstractContextManager[None]:
    """Accept that an update has no weights of heads that predict several tokens, as vLLM does."""
    name = "vllm.model_executor.model_loader.mtp_validation"
    if importlib.util.find_spec(name) is None:
        return contextlib.nullcontext()
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    check: contextlib.AbstractContextManager[None] = disable_mtp_completeness_check()
    return check
