"""Find the modules of a model that no reload reaches, for no module has them as its own.

A reload knows the modules that are attributes of others, as `named_modules()` does. A head that a
plain mapping, a list or a function holds computes as well, and keeps the weights of the first load.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

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
