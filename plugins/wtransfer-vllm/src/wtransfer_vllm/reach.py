"""What a model computes with and no reload reaches: such a model takes no update.

* A module that no other has registered: a head in a plain dictionary, a list or a function.
* A copy of weights that a layer makes once, at its first step or as it is loaded first.
* What a model makes once it is loaded, in a method that vLLM calls after the first load only.

`wtransfer_vllm.proof` compares what a reload does reach.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from typing import TYPE_CHECKING, Any

from torch import nn

from wtransfer_vllm.reload import ReloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

FINISHING = "process_weights_after_loading"
"""Method of a model that vLLM calls after the first load only."""
MADE_ONCE = (
    "_combined_gate_weight",
    "_merged_conv_weight",
    "_transformed_l1_weights",
    "_wp_fp32",
)
"""Attributes of vLLM's layers that are copies of weights, unless they are None."""
SCALES_MADE_ONCE = ("bmm1_scale", "bmm2_scale", "softmax_scale")
"""Attributes of attention kernels that have the scales of a quantised KV cache in them."""

NOT_ENTERED = (
    "logging",
    "torch",
    "transformers.configuration_utils",
    "transformers.modeling_rope_utils",
    "vllm.compilation",
    "vllm.config",
    "vllm.forward_context",
    "weakref",
)
"""Packages of classes that hold no module of a model but by way of the whole engine."""
CONTAINERS = (list, tuple, set, frozenset, deque)


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
    for path, module in find_unregistered(model):
        raise ReloadError(
            f"{refused}{path} ({type(module).__name__}) is no registered module of it, so neither "
            "an update nor vLLM's reload reaches it, and it would compute with its old weights"
        )
    for name, layer in model.named_modules():
        for attribute in made_once(layer):
            raise ReloadError(
                f"{refused}layer {name!r} keeps {attribute}, made of weights once and by no reload"
            )


def made_once(layer: nn.Module) -> Iterator[str]:
    """Yield the attributes of a layer that are made of weights and never made anew."""
    held = vars(layer)
    yield from (name for name in MADE_ONCE if held.get(name) is not None)
    scales = (held.get(f"_{each}_scale_float") for each in "qkv")
    if any(scale not in (None, 1.0) for scale in scales):
        kernel = getattr(held.get("impl"), "__dict__", {})
        yield from (f"impl.{name}" for name in SCALES_MADE_ONCE if kernel.get(name) is not None)


def find_unregistered(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with tensors that are reachable from a model and not registered in it.

    Attributes are followed, and what dictionaries, sequences, sets, bound methods, partial
    functions and closures hold.

    Args:
        model: The model.

    Yields:
        The way to it, such as ``pooler.heads['embed']``, and the module; each once.
    """
    registered = set(model.modules())
    seen: set[int] = set()
    todo: deque[tuple[str, Any]] = deque(
        (f"{name}.{key}".lstrip("."), value)
        for name, module in model.named_modules()
        for key, value in _attributes(module)
    )
    while todo:
        path, value = todo.popleft()
        if id(value) in seen or (isinstance(value, nn.Module) and value in registered):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module) and _has_tensors(value):
            yield path, value
        todo.extend((path + step, held) for step, held in _held_by(value))


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the way to each object that one holds, and the object."""
    if isinstance(value, dict) and _is_entered(value):
        yield from ((f"[{key!r}]", held) for key, held in list(dict.items(value)))
    elif isinstance(value, CONTAINERS):
        yield from ((f"[{index}]", held) for index, held in enumerate(list(value)))
    elif isinstance(value, functools.partial):
        yield from (("()", held) for held in (value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((f".{value.__name__}", held) for held in (value.__self__, value.__func__))
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f":{name}", cell.cell_contents) for name, cell in cells if _is_set(cell))
        yield from ((f":{value.__name__}", held) for held in value.__defaults__ or ())
    elif isinstance(value, nn.Module) or _is_entered(value):
        yield from ((f".{name}", held) for name, held in _attributes(value))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object; of a module also those that are registered."""
    own = getattr(value, "__dict__", {})
    yield from list(own.items())
    if isinstance(value, nn.Module):
        yield from value.named_children()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(value, name):
                yield name, getattr(value, name)


def _is_entered(value: Any) -> bool:
    """Return whether an object may hold modules of a model and of nothing else."""
    if isinstance(value, type | types.ModuleType):
        return False
    packages = {cls.__module__ for cls in type(value).__mro__}
    return not any(
        name == package or name.startswith(f"{package}.")
        for name in packages
        for package in NOT_ENTERED
    )


def _has_tensors(module: nn.Module) -> bool:
    """Return whether a module has tensors of its own, with memory: its parts may be registered."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return not all(tensor.is_meta for tensor in own)


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # a cell that is not set yet raises
    except ValueError:
        return False
    return True
