"""Modules that a model computes with and has not registered: no update reaches them.

Engines load, and proofs compare, what `named_modules` shows. A head that a plain dictionary, a list
or a function holds computes as well, and keeps the weights of the first load.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_ENTERED = (
    weakref.ProxyType,
    weakref.CallableProxyType,
    weakref.ReferenceType,
    type,
    types.BuiltinFunctionType,
    types.CodeType,
    types.ModuleType,
    torch.distributed.ProcessGroup,
)
"""Types of what holds no part of a model."""
NAMES_NOT_ENTERED = (
    "logging",
    "torch._dynamo",
    "torch._inductor",
    "torch.fx",
    "torch.jit",
    "transformers.configuration_utils",
)
"""Packages and classes of further ones, which may not be there."""
CONTAINERS = (list, tuple, set, frozenset, deque)
LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Types of what holds nothing at all."""
TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold what it has registered."""


def unregistered(model: nn.Module, not_entered: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the modules with tensors that a model reaches, and that are none of its modules.

    A module is reached by attributes, containers, bound methods, partial functions, and what
    functions have closed over.

    Args:
        model: The model.
        not_entered: Names of packages and of classes of the serving engine whose objects, and those
            of their subclasses, hold more than the model.

    Yields:
        The way to the module, and its class, such as ``pooler.heads.embed (Linear)``.
    """
    names = NAMES_NOT_ENTERED + not_entered
    is_entered: dict[type, bool] = {}
    # The objects as well: the number of one that is gone is another's.
    seen: dict[int, object] = {}
    level: list[tuple[str, object]] = list(model.named_modules())
    registered = {id(each) for _, each in level}
    while level:
        below: list[tuple[str, object]] = []
        for way, value in level:
            cls = type(value)  # a proxy answers for the class of what it stands for
            if cls not in is_entered:
                is_entered[cls] = _is_entered(cls, names)
            if id(value) in seen or not is_entered[cls]:
                continue
            seen[id(value)] = value
            is_other = issubclass(cls, nn.Module) and id(value) not in registered
            if is_other and _has_tensors(value):
                yield f"{way} ({cls.__qualname__})"
            below += [
                (f"{way}.{name}".lstrip("."), each)
                for name, each in _held(value)
                if type(each) not in LEAVES
            ]
        level = below


def _has_tensors(module: Any) -> bool:
    """Return whether a module has tensors of its own, with memory: its parts may be registered.

    Buffers that no state has are computed from settings, as the tables of positions are.
    """
    computed = _table(module).get("_non_persistent_buffers_set", ())
    return any(
        isinstance(value, torch.Tensor) and not value.is_meta
        for name, value in _attributes(module)
        if name not in computed
    )


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value holds, by name."""
    cls = type(value)
    if issubclass(cls, dict):
        yield from ((_shown(key), each) for key, each in list(dict.items(value)))
    elif issubclass(cls, types.MappingProxyType):
        yield from ((_shown(key), each) for key, each in list(value.items()))
    elif issubclass(cls, CONTAINERS):
        (kind,) = (each for each in CONTAINERS if issubclass(cls, each))
        yield from ((str(number), each) for number, each in enumerate(list(kind.__iter__(value))))
    elif issubclass(cls, types.MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif issubclass(cls, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif issubclass(cls, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, _content(cell)) for name, cell in cells)
        yield from (("defaults", value.__defaults__), ("kwdefaults", value.__kwdefaults__))
    yield from _attributes(value)


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object; of a module what it has registered as well."""
    table = _table(value)
    if issubclass(type(value), nn.Module):
        for name in TABLES:
            yield from list(table.get(name, {}).items())
    yield from ((name, each) for name, each in list(table.items()) if name not in TABLES)
    for cls in type(value).__mro__:
        for name in _slots(cls):
            with contextlib.suppress(AttributeError):  # it has no value yet
                yield name, object.__getattribute__(value, name)


def _table(value: object) -> dict[str, Any]:
    try:
        table = object.__getattribute__(value, "__dict__")
    except Exception:
        # It has none, or shows one by code of its own.
        return {}
    # Some objects show another's table.
    return table if type(table) is dict else {}


def _shown(key: object) -> str:
    return str(key) if type(key) in LEAVES else type(key).__qualname__


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _slots(cls: type) -> tuple[str, ...]:
    # Python's own classes have such members as well, a function its globals.
    members = vars(cls).items() if "__slots__" in vars(cls) else ()
    return tuple(name for name, each in members if isinstance(each, types.MemberDescriptorType))


def _is_entered(cls: type, names: tuple[str, ...]) -> bool:
    own = [f"{each.__module__}.{each.__qualname__}." for each in cls.__mro__]
    is_named = any(each.startswith(f"{name}.") for each in own for name in names)
    return not is_named and not issubclass(cls, NOT_ENTERED)
