"""Heads that are their model's embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def is_tied(model: nn.Module, model_config: Any) -> bool:
    """Return whether embedding and head are one tensor, by configuration or in fact.

    Where a checkpoint has both, vLLM configures them as two, and ties them if they came out equal.

    Args:
        model: The loaded model.
        model_config: vLLM's own.
    """
    configured = getattr(model_config.hf_config, "tie_word_embeddings", False)
    return bool(configured or list(_tied_heads(model)))


def process_tied_heads(model: nn.Module) -> None:
    """Have tied heads packed for their kernels again, which a reload by layers leaves out.

    It loads the embedding, and so the tensor that both share. What a CPU's kernel made of it for
    the head would stay as it was, and the model would speak with its old head.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for head in _tied_heads(model):
        method = getattr(head, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            process = getattr(method, "process_weights_after_loading", lambda _head: None)
            process(head)


def _tied_heads(model: nn.Module) -> Iterator[nn.Module]:
    embeddings = list(_named(model, "embed_tokens"))
    weights = {id(embedding.weight) for embedding in embeddings}
    for head in _named(model, "lm_head"):
        if head not in embeddings and id(head.weight) in weights:
            yield head


def _named(model: nn.Module, suffix: str) -> Iterator[nn.Module]:
    for name, module in model.named_modules(remove_duplicate=False):
        if name.endswith(suffix) and hasattr(module, "weight"):
            yield module
