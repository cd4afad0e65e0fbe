"""Load weights into a model that vLLM has processed for its kernels, layer by layer.

vLLM packs, fuses and quantises parameters after loading. Its layerwise reload takes a model back to
the form of the checkpoint, loads, and processes each layer again as soon as it is complete.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from wtransfer_vllm.tying import process_tied_heads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextlib.contextmanager
def reloading(model: nn.Module, model_config: Any) -> Iterator[None]:
    """Let ``model.load_weights`` within take whole checkpoints.

    If that fails, layers that are not complete have their old weights when this is left, and those
    that are have new ones: a mix, over which another whole load must follow.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    try:
        yield
    except BaseException:
        forget_parts(model)
        raise
    finally:
        finalize_layerwise_reload(model, model_config)
    process_tied_heads(model)


def begin_again(model: nn.Module) -> None:
    """Within a reload that somebody else has begun and will end: start it from the beginning."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    forget_parts(model)
    initialize_layerwise_reload(model)


def forget_parts(model: nn.Module) -> None:
    """Forget what layers have received so far that are not complete.

    Otherwise the end of the reload would complete them over uninitialised memory, and a second load
    would count the first one's elements as its own.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
