"""Faults of vLLM's reload: what a release, a kernel or a quantisation may get wrong.

Each is a function or two that stand in for those of vLLM's module ``layerwise``.
"""

import contextlib
import importlib

import torch

PROCESS, COPY = "_layerwise_process", "_copy_and_restore_kernel_tensors"


def layerwise():
    """Return vLLM's module, which a test's own process does not import."""
    return importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")


def layers(name):
    """Return a test of whether a layer is of a class, or has a parameter, of that name."""

    def is_meant(layer):
        return type(layer).__name__ == name or name in layer._parameters

    return is_meant


def unprocessed(name):
    """Load a layer, and leave out its processing for the kernel."""
    is_meant, process = layers(name), getattr(layerwise(), PROCESS)

    def stand_in(layer, info):
        if not is_meant(layer):
            return process(layer, info)
        method, layer.quant_method = layer.quant_method, None
        try:
            return process(layer, info)
        finally:
            layer.quant_method = method

    return {PROCESS: stand_in}


def uncopied(name, parameter):
    """Leave one parameter of the kernel as it is."""
    is_meant, copy = layers(name), getattr(layerwise(), COPY)

    def stand_in(layer, info):
        if is_meant(layer):
            kept = info.kernel_tensors[0][parameter]
            before = kept.data.clone()
            copy(layer, info)
            kept.data.copy_(before)
        else:
            copy(layer, info)

    return {COPY: stand_in}


def changed(name, parameter, change):
    """Copy other values than were loaded."""
    is_meant, copy = layers(name), getattr(layerwise(), COPY)

    def stand_in(layer, info):
        if is_meant(layer):
            made = getattr(layer, parameter)
            made.data.copy_(change(made.data.clone()))
        copy(layer, info)

    return {COPY: stand_in}


def misloaded(name, change):
    """Load something else than what has come for a layer."""
    is_meant, process = layers(name), getattr(layerwise(), PROCESS)

    def stand_in(layer, info):
        if is_meant(layer):
            change(info)
        process(layer, info)

    return {PROCESS: stand_in}


def swap_experts(tensor):
    """Swap the first two experts."""
    tensor[[0, 1]] = tensor[[1, 0]]
    return tensor


def flip_one_bit(tensor):
    """Flip the lowest bit of the first element."""
    tensor.view(torch.uint8).flatten()[0] ^= 1
    return tensor


def first_rows_again(tensor):
    """Put the first half of the rows into the place of the second."""
    half = len(tensor) // 2
    tensor[half : 2 * half] = tensor[:half].clone()
    return tensor


def drop_last(info):
    """Lose what came last for a layer."""
    info.loaded_weights.pop()


def swap_shards(info):
    """Load the second and third part of a fused parameter into each other's place."""
    shards = [bound for _, bound in info.loaded_weights if "loaded_shard_id" in bound.arguments]
    k, v = (bound for bound in shards if bound.arguments["loaded_shard_id"] in ("k", "v"))
    key = "loaded_weight"
    k.arguments[key], v.arguments[key] = v.arguments[key], k.arguments[key]


EXPERTS, QKV, NORM = "w13_weight", "QKVParallelLinear", "RMSNorm"
FAULTS = {
    "experts are not packed": lambda: unprocessed(EXPERTS),
    "a fused projection is not packed": lambda: unprocessed(QKV),
    "an output projection is not packed": lambda: unprocessed("RowParallelLinear"),
    "a router is not packed": lambda: unprocessed("GateLinear"),
    "norms are not copied": lambda: uncopied(NORM, "weight"),
    "an embedding is not copied": lambda: uncopied("VocabParallelEmbedding", "weight"),
    "a head is not copied": lambda: uncopied("ParallelLMHead", "weight"),
    "experts' first matrices are not copied": lambda: uncopied(EXPERTS, EXPERTS),
    "experts' second matrices are not copied": lambda: uncopied(EXPERTS, "w2_weight"),
    "two experts are swapped": lambda: changed(EXPERTS, EXPERTS, swap_experts),
    "two experts' second matrices are swapped": lambda: changed(EXPERTS, "w2_weight", swap_experts),
    "experts are scaled": lambda: changed(EXPERTS, "w2_weight", lambda t: t * 2),
    "experts are rolled": lambda: changed(EXPERTS, EXPERTS, lambda t: t.roll(1, -1)),
    "one bit of a norm is another": lambda: changed(NORM, "weight", flip_one_bit),
    "one bit of a head is another": lambda: changed("ParallelLMHead", "weight", flip_one_bit),
    "half of an embedding is there twice": lambda: changed(
        "VocabParallelEmbedding", "weight", first_rows_again
    ),
    "a part of a fused projection is lost": lambda: misloaded(QKV, drop_last),
    "keys and values are swapped": lambda: misloaded(QKV, swap_shards),
    "an expert is lost": lambda: misloaded(EXPERTS, drop_last),
    "a norm is lost": lambda: misloaded(NORM, drop_last),
    "a head is lost": lambda: misloaded("ParallelLMHead", drop_last),
    "an output projection is lost": lambda: misloaded("RowParallelLinear", drop_last),
}
"""Name -> maker of the functions that stand in."""


@contextlib.contextmanager
def standing_in(functions):
    """Put functions into vLLM's module, and take them out again."""
    module = layerwise()
    held = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in held.items():
            setattr(module, name, function)
