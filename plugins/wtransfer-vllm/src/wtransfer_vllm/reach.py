"""What a model computes with and no reload reaches: such a model takes no update.

* A module that no other has registered: a head in a plain dictionary, a list or a function.
* A copy of weights that a layer makes once, at its first step or as it is loaded first.
* A buffer that was a view of a parameter, until a kernel for CPUs packed that.
* What a model makes once it is loaded, in a method that vLLM calls after the first load only.

`wtransfer_vllm.proof` compares what a reload does reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.weight_sync.worker.unregistered import unregistered

from wtransfer_vllm.reload import ReloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

FINISHING = "process_weights_after_loading"
"""Method of a model that vLLM calls after the first load only."""
MADE_ONCE = (
    "_combined_gate_weight",
    "_merged_conv_weight",
    "_transformed_l1_weights",
    "_wp_fp32",
)
"""Attributes of vLLM's layers that are copies of weights, unless they are None."""
FLAGS = {"update_cache": "cos_sin_cache"}
"""Flag of a layer of vLLM's, cleared by its first step -> what that step makes of weights."""
SCALES_MADE_ONCE = ("bmm1_scale", "bmm2_scale", "softmax_scale")
"""Attributes of attention kernels that have the scales of a quantised KV cache or output in them.
"""
NOT_ENTERED = ("vllm.compilation", "vllm.config", "vllm.forward_context")
"""Packages of vLLM's whose objects hold more than one model."""


def check_reach(model: nn.Module) -> None:
    """Raise if a model computes with something that no reload reaches.

    Args:
        model: The model, after its first step.

    Raises:
        ReloadError: It does; the text names it.
    """
    refused = f"{type(model).__name__} takes no update: "
    if hasattr(model, FINISHING):
        raise ReloadError(
            f"{refused}vLLM calls its {FINISHING}() after the first load only, so what that makes "
            "of the weights would stay that of the old ones"
        )
    try:
        found = next(unregistered(model, NOT_ENTERED), None)
    except Exception as error:
        # An object of a model may raise anything as it is looked at.
        why = f"{type(error).__name__}: {error}"
        raise ReloadError(f"{refused}its modules could not be searched: {why}") from error
    if found is not None:
        raise ReloadError(
            f"{refused}{found} is no registered module of it, so neither an update nor vLLM's "
            "reload reaches it, and it would compute with its old weights"
        )
    for name, buffer in detached_views(model):
        raise ReloadError(
            f"{refused}buffer {buffer!r} of layer {name!r} was a view of a parameter that its "
            "kernel has packed since, so no reload reaches it"
        )
    for name, layer in model.named_modules():
        for attribute in made_once(layer):
            raise ReloadError(
                f"{refused}layer {name!r} keeps {attribute}, made of weights once and by no reload"
            )


def detached_views(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield layer and name of each buffer whose parameter has got other memory since.

    vLLM's reload leaves a buffer that is a view of a parameter to that parameter, and takes no note
    of it. Only kernels for CPUs give a parameter other memory.
    """
    from vllm.model_executor.model_loader.reload import meta
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    memory = {each.untyped_storage().data_ptr() for each in model.parameters()}
    for name, layer in model.named_modules():
        noted = get_layerwise_info(layer)
        if noted.restore_device.type != "cpu" or type(layer).__name__ in meta.SKIP_MODULES:
            continue
        unsaved = layer._non_persistent_buffers_set  # noqa: SLF001  # torch has no other way
        unnoted = unsaved - noted.restore_metadata[1].keys() - meta.SKIP_TENSORS
        for buffer, tensor in layer.named_buffers(recurse=False):
            if buffer in unnoted and tensor.untyped_storage().data_ptr() not in memory:
                yield name, buffer


def made_once(layer: nn.Module) -> Iterator[str]:
    """Yield the attributes of a layer that are made of weights and never made anew."""
    held = vars(layer)
    yield from (name for name in MADE_ONCE if held.get(name) is not None)
    yield from (made for flag, made in FLAGS.items() if flag in held)
    scales = (held.get(f"_{each}_scale_float") for each in "qkvo")
    if any(scale not in (None, 1.0) for scale in scales):
        kernel = getattr(held.get("impl"), "__dict__", {})
        yield from (f"impl.{name}" for name in SCALES_MADE_ONCE if kernel.get(name) is not None)
