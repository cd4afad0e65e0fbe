"""Modules that a model computes with and has not registered: no proof would compare them."""

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
NOT_ENTERED_NAMES = frozenset(
    {
        "sglang.srt.configs.model_config.ModelConfig",
        "sglang.srt.distributed.parallel_state.GroupCoordinator",
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
        "sglang.srt.model_executor.forward_context.ForwardContext",
        "sglang.srt.server_args.ServerArgs",
        "transformers.configuration_utils.PretrainedConfig",
    }
)
"""Names of further ones, which are not imported; their subclasses are not entered either."""


def unregistered(model: nn.Module) -> Iterator[str]:
    """Yield the modules with tensors that a model reaches, and that are none of its modules.

    A module is reached by attributes, containers, bound methods, partial functions, and what
    functions have closed over.

    Yields:
        The way to the module, and its class.
    """
    # The objects as well: the number of one that is gone is another's.
    seen: dict[int, object] = {}
    level: list[tuple[str, object]] = list(model.named_modules())
    registered = {id(each) for _, each in level}
    while level:
        below: list[tuple[str, object]] = []
        for way, value in level:
            # By type: a proxy answers for the class of what it stands for.
            if id(value) in seen or issubclass(type(value), NOT_ENTERED) or _is_named(type(value)):
                continue
            seen[id(value)] = value
            is_other = isinstance(value, nn.Module) and id(value) not in registered
            if is_other and _has_tensors(value):
                yield f"{way} ({type(value).__qualname__})"
            else:
                below += [(f"{way}.{name}".lstrip("."), each) for name, each in _held(value)]
        level = below


def _has_tensors(module: Any) -> bool:
    tables = (
        table
        for each in module.modules()
        for table in (vars(each), vars(each)["_parameters"], vars(each)["_buffers"])
    )
    return any(isinstance(value, torch.Tensor) for table in tables for value in table.values())


def _held(value: object) -> Iterator[tuple[str, Any]]:
    """Yield what a value holds, by name."""
    if isinstance(value, (dict, types.MappingProxyType)):
        yield from ((str(key), each) for key, each in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((str(number), each) for number, each in enumerate(list(value)))
    elif isinstance(value, types.MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, _content(cell)) for name, cell in cells)
        yield from (("defaults", value.__defaults__), ("kwdefaults", value.__kwdefaults__))
    yield from list(_table(value).items())
    for cls in type(value).__mro__:
        for name in _slots(cls):
            with contextlib.suppress(AttributeError):  # it has no value yet
                yield name, object.__getattribute__(value, name)


def _table(value: object) -> dict[str, Any]:
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    # Some objects show another's table.
    return table if type(table) is dict else {}


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _slots(cls: type) -> tuple[str, ...]:
    # Python's own classes have such members as well, a function its globals.
    members = vars(cls).items() if "__slots__" in vars(cls) else ()
    return tuple(name for name, each in members if isinstance(each, types.MemberDescriptorType))


def _is_named(cls: type) -> bool:
    return any(
        f"{each.__module__}.{each.__qualname__}" in NOT_ENTERED_NAMES for each in cls.__mro__
    )
