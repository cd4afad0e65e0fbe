"""vLLM's model as the target of updates: their form, how they are loaded, and the way back.

vLLM packs, fuses and quantises parameters after loading. Its layerwise reload takes a model back to
the form of the checkpoint, loads, and processes each layer again as soon as it is complete.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import TYPE_CHECKING, Any

from wtransfer.weight_sync.worker.schema import canonical_names

from wtransfer_vllm.checkpoint import find_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
        """Stands for the model where KV cache is named at load, with no module at hand."""
        self._model = model
        self._vllm_config = vllm_config
        # Where a checkpoint has both, vLLM configures them as two, and ties them if they came out
        # equal.
        configured = getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False)
        tied = bool(configured or list(_tied_heads(model)))
        self._checkpoint = find_checkpoint(vllm_config, tied=tied)
        self._schema = None if self._checkpoint is None else self._checkpoint.schema()
        self._applied: Mapping[str, torch.Tensor] | None = None
        self._touched = False

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return the checkpoint's form; None: that of the last whole update."""
        return self._schema

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a whole set, and have vLLM process every layer for its kernels.

        If that fails, layers that are not complete have their old weights, and those that are have
        new ones: a mix, over which another whole load must follow.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        self._touched = True
        self._applied = None
        model: Any = self._model
        with set_current_vllm_config(self._vllm_config), _without_mtp_check():
            initialize_layerwise_reload(model)
            try:
                model.load_weights(self._in_form(tensors))
            except BaseException:
                _forget_parts(model)
                raise
            finally:
                finalize_layerwise_reload(model, self._vllm_config.model_config)
            _process_tied_heads(model)
        self._applied = tensors

    def _in_form(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors in the dtypes of the checkpoint, one by one.

        Here and not in the model's loaders: some compare or keep what they are given, and each
        layer's kernels shall see the very bytes that a checkpoint would have had.
        """
        schema = self._schema or {}
        canonical = canonical_names(schema)
        for name, tensor in tensors.items():
            spec = schema.get(canonical.get(name, name))
            yield name, tensor if spec is None else tensor.to(spec.dtype)

    def capture(self) -> Mapping[str, torch.Tensor] | None:
        """Return what was applied last; before that, the checkpoint on disk."""
        if self._touched:
            return self._applied
        if self._checkpoint is None or not self._checkpoint.unchanged():
            return None
        return self._checkpoint

    def forget(self) -> None:
        """Drop what was applied last: the model does not hold it any more."""
        self._touched = True
        self._applied = None


class SeedTarget:
    """A model of the seed era, which can be reached only while vLLM reloads it.

    Neither the checkpoint nor the model's configuration is known: the first complete update sets
    the form, and before the first commit there is no way back.
    """

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
            _forget_parts(load_weights.__self__)
            initialize_layerwise_reload(load_weights.__self__)
        self._loaded_before = True
        self._applied = None
        load_weights(list(tensors.items()))
        self._applied = tensors

    def capture(self) -> Mapping[str, torch.Tensor] | None:
        """Return what was applied last, if anything."""
        return self._applied

    def forget(self) -> None:
        """Drop what was applied last: the model does not hold it any more."""
        self._applied = None


def _forget_parts(model: nn.Module) -> None:
    """Forget what incomplete layers have received so far in a layerwise reload.

    Otherwise the end of the reload would complete them over uninitialised memory, and a second load
    would count the first one's elements as its own.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0


def _process_tied_heads(model: nn.Module) -> None:
    """Have tied heads packed for their kernels again, which a reload by layers leaves out.

    It loads the embedding, and so the tensor that both share. What a CPU's kernel made of it for
    the head would stay as it was, and the model would speak with its old head.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for head in _tied_heads(model):
        method = getattr(head, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(head)


def _tied_heads(model: nn.Module) -> Iterator[nn.Module]:
    modules = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if hasattr(module, "weight")
    ]
    embeddings = [module for name, module in modules if name.endswith("embed_tokens")]
    weights = {id(embedding.weight) for embedding in embeddings}
    for name, module in modules:
        is_head = name.endswith("lm_head") and module not in embeddings
        if is_head and id(module.weight) in weights:
            yield module


def _without_mtp_check() -> contextlib.AbstractContextManager[None]:
    """Accept that an update has no weights of heads that predict several tokens, as vLLM does."""
    if importlib.util.find_spec("vllm.model_executor.model_loader.mtp_validation") is None:
        return contextlib.nullcontext()
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    check: contextlib.AbstractContextManager[None] = disable_mtp_completeness_check()
    return check
