"""vLLM's model as the target of updates: their form, how they are loaded, and the way back.

`wtransfer_vllm.reload` runs vLLM's reload of a model, and `wtransfer_vllm.proof` proves it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from wtransfer.checkpoint.quantisation import scheme_name
from wtransfer.weight_sync.worker.served_target import ServedTarget

from wtransfer_vllm.checkpoint import find_checkpoint
from wtransfer_vllm.proof import prove
from wtransfer_vllm.reach import check_reach
from wtransfer_vllm.reload import ReloadError, forget_parts, reload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch
    from torch import nn
    from wtransfer.weights import TensorSpec

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it


class VllmTarget(ServedTarget):
    """A model that vLLM serves, updated in the form of its checkpoint.

    Where the checkpoint is not on disk, or was changed since, there is no way back before the first
    commit, and one that fails leaves the worker *empty*.

    Args:
        model: The module.
        vllm_config: vLLM's own.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self.vouched_as = vllm_config.model_config
        """Stands for the model where KV cache is named at load, with no module at hand."""
        self._model = model
        self._vllm_config = vllm_config
        # Where a checkpoint has both, vLLM configures them as two, and ties them if they came out
        # equal.
        configured = getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False)
        tied = bool(configured or _shares_matrix(model))
        super().__init__(find_checkpoint(vllm_config, tied=tied))
        settings = getattr(vllm_config.model_config.hf_config, "quantization_config", None)
        self.scheme = scheme_name(settings if isinstance(settings, dict) else None)
        """How the checkpoint's weights are quantised; empty also where vLLM quantises floats."""
        self._refusal: str | None = None
        self.proven = False
        """True once the result of `apply` is known to equal the update that was sent."""

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load a whole set, and have vLLM process every layer for its kernels.

        If the load fails, incomplete layers have their old weights, and complete ones have new
        weights: a mix, over which another whole load must follow.
        """
        reload(self._model, self._vllm_config, weights)

    def read_config(self, config: dict[str, Any]) -> Mapping[str, Any]:
        """Return a configuration as the class reads it by which vLLM computes."""
        read = type(self._vllm_config.model_config.hf_config).from_dict(config)
        found: Mapping[str, Any] = read.to_dict()
        return found

    def prove(self) -> None:
        """Raise unless the result of `apply` is the update that was sent.

        To be called on the model's thread while the weights have memory. The first answer stands
        for the life of the process: later changes of the weights do not change how they are
        reloaded, and a layer that receives nothing is found at every `apply`.

        Raises:
            ReloadError: The result differs, or the weights that vLLM serves are not known.

        Cost: the first time as `wtransfer_vllm.proof.prove`.
        """
        if self._refusal is None and not self.proven:
            begun = time.monotonic()
            try:
                self._check_replicas()
                check_reach(self._model)
                prove(self._model, self._vllm_config, self._served())
            except ReloadError as error:
                self._refusal = str(error)
            else:
                self.proven = True
                name, seconds = type(self._model).__name__, time.monotonic() - begun
                logger.info("the reload of %s gives what it serves (%.2f s)", name, seconds)
        if self._refusal is not None:
            raise ReloadError(self._refusal)

    def _served(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """Return the weights that vLLM serves, as an update brings them; None: its dummies.

        Of a checkpoint on disk those are its safetensors, though vLLM may have read more at the
        first load (`secondary_weights` of a model): no update has that, nor has the way back.
        """
        if self.applied is not None:
            return self.in_form(self.applied)
        if self.checkpoint is not None:
            base = self.base()
            if base is None:
                raise ReloadError(
                    "this worker takes no update: whether vLLM's reload gives what was loaded is "
                    "found out with the checkpoint that it serves, which was overwritten since; "
                    "restart vLLM"
                )
            return self.in_form(base)
        from vllm.model_executor.model_loader import get_model_loader

        load_config = self._vllm_config.load_config
        loader: Any = get_model_loader(load_config)
        if getattr(self._model, "secondary_weights", ()):
            raise ReloadError(
                f"{type(self._model).__name__} takes no update: vLLM reads weights of it from "
                "further files, which no update has"
            )
        if hasattr(loader, "get_all_weights"):
            found: Iterable[tuple[str, torch.Tensor]]
            found = loader.get_all_weights(self._vllm_config.model_config, self._model)
            return found
        if load_config.load_format == "dummy":
            return None
        raise ReloadError(
            f"this worker takes no update: vLLM reads weights of load format "
            f"{load_config.load_format!r} once only, so it cannot be found out whether its reload "
            "gives what was loaded"
        )

    def _check_replicas(self) -> None:
        """Refuse replicas that share their experts: they would commit one after the other."""
        for layer in self._model.modules():
            num = getattr(getattr(layer, "moe_config", None), "dp_size", 1)
            if num > 1:
                raise ReloadError(
                    f"{type(self._model).__name__} takes no update: its experts are spread over "
                    f"{num} data-parallel replicas, each of which commits by itself, so a token "
                    "could pass experts of two versions. Run replicas as servers of their own, or "
                    "tensor-parallel ranks"
                )


class SeedTarget:
    """A model of the seed era, which can be reached only while vLLM reloads it.

    Neither the checkpoint nor the model's configuration is known: the first complete update sets
    the form, and before the first commit there is no way back. Nor can the reload be proven.
    """

    proven = False
    """False, so KV cache after a commit has a name that only this process knows."""

    def __init__(self) -> None:
        self._load_weights: Callable[..., Any] | None = None
        self._applied: Mapping[str, torch.Tensor] | None = None
        self._loaded_before = False

    @contextlib.contextmanager
    def within(self, load_weights: Callable[..., Any]) -> Iterator[None]:
        """Let `apply` use vLLM's loader within."""
        self._load_weights = load_weights
        self._loaded_before = False
        try:
            yield
        finally:
            self._load_weights = None

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return None: the form is that of the last whole update."""
        return None

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a whole set, within the reload that vLLM has begun and will end."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        load_weights: Any = self._load_weights
        assert load_weights is not None
        if self._loaded_before:
            # The way back after a load that failed: begin the reload again.
            forget_parts(load_weights.__self__)
            initialize_layerwise_reload(load_weights.__self__)
        self._loaded_before = True
        self._applied = None
        load_weights(list(tensors.items()))
        self._applied = tensors

    def capture(self) -> Mapping[str, torch.Tensor] | None:
        """Return the last applied set, if any."""
        return self._applied

    def forget(self) -> None:
        """Drop the last applied set: the model does not hold it any more."""
        self._applied = None


def _shares_matrix(model: nn.Module) -> bool:
    """Return whether two layers have one matrix, as an embedding and its head do.

    A layer that its model has under two names, as routers and parts of MLA, counts once.
    """
    matrices = [
        id(parameter)
        for layer in model.modules()
        for parameter in layer.parameters(recurse=False)
        if parameter.ndim > 1
    ]
    return len(set(matrices)) < len(matrices)
