"""Serialize objects of plain data as messages; vLLM pickles them, this engine does not.

Only objects of classes that this process has loaded are made, and only of kinds that carry data:
dataclasses, named tuples, and the metadata of connectors. Their constructors and properties do not
run. Arrays and tensors of numbers are carried, too.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from wtransfer.connectors.interface import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from wtransfer.specs.interface import LoadStoreSpec
from wtransfer.transport.tensors import dtype_name, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

_COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_ATOMS = (bool, int, float, str, bytes, type(None))
_NUMBERS = re.compile(r"[<>|][biuf][1248]")
_METADATA = (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    KVConnectorHandshakeMetadata,
    LoadStoreSpec,
)


def serialize(value: Any) -> Any:
    """Return an object as plain data: an atom, or a list that begins with the kind of the rest.

    Raises:
        TypeError: Something in it is not plain data.
    """
    cls = type(value)
    if cls in _ATOMS:
        return value
    if cls in _COLLECTIONS.values():
        return [cls.__name__, *map(serialize, value)]
    if cls is dict:
        return ["dict", *([serialize(key), serialize(each)] for key, each in value.items())]
    if cls is torch.Tensor:
        return ["tensor", dtype_name(value.dtype), list(value.shape), _tensor_bytes(value)]
    # Specs in the seed's style keep block numbers in arrays; numpy is not needed without them.
    numpy = sys.modules.get("numpy")
    if numpy is not None and cls is numpy.ndarray:
        _check_numbers(value.dtype.str)
        return ["array", value.dtype.str, list(value.shape), value.tobytes()]
    _check_carries_data(cls)
    if issubclass(cls, tuple):
        return ["record", _name_of(cls), *map(serialize, value)]
    attributes = {name: serialize(each) for name, each in _attributes(value).items()}
    return ["object", _name_of(cls), attributes]


def deserialize(plain: Any) -> Any:
    """Return the object.

    Raises:
        LookupError: Its class is not loaded in this process.
        TypeError: The value is not plain data.
    """
    if not isinstance(plain, list):
        return plain
    kind, *rest = plain or [None]
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](map(deserialize, rest))
    if kind not in _MAKERS:
        raise TypeError(f"{kind!r} is not a kind of plain data")
    return _MAKERS[kind](*rest)


def _dict(*items: list[Any]) -> dict[Any, Any]:
    return {deserialize(key): deserialize(value) for key, value in items}


def _tensor(dtype: str, shape: list[int], data: bytes) -> torch.Tensor:
    made = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    return made.view(torch_dtype(dtype)).reshape(shape)


def _array(dtype: str, shape: list[int], data: bytes) -> Any:
    import numpy as np

    _check_numbers(dtype)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _record(name: str, *values: Any) -> Any:
    cls = _loaded_class(name)
    if not issubclass(cls, tuple) or len(cls._fields) != len(values):  # type: ignore[attr-defined]
        raise TypeError(f"{name} does not have these {len(values)} fields")
    return tuple.__new__(cls, map(deserialize, values))


def _object(name: str, attributes: dict[str, Any]) -> Any:
    cls = _loaded_class(name)
    made: Any = object.__new__(cls)
    for attribute, value in attributes.items():
        slot = inspect.getattr_static(cls, attribute, None)
        # Not by setattr: properties and the like would run.
        if isinstance(slot, types.MemberDescriptorType):
            slot.__set__(made, deserialize(value))
        else:
            vars(made)[attribute] = deserialize(value)
    return made


_MAKERS: dict[str, Callable[..., Any]] = {
    "dict": _dict,
    "array": _array,
    "tensor": _tensor,
    "record": _record,
    "object": _object,
}


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise TypeError(
            f"a tensor on {tensor.device} of layout {tensor.layout} does not travel between "
            "scheduler and worker; give its numbers"
        )
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _attributes(value: Any) -> dict[str, Any]:
    attributes = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        # Slots are in no dictionary.
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                attributes.setdefault(name, getattr(value, name))
    return attributes


def _check_numbers(dtype: str) -> None:
    if not _NUMBERS.fullmatch(dtype):
        raise TypeError(f"an array of {dtype!r} does not travel between scheduler and worker")


def _check_carries_data(cls: type) -> None:
    is_record = issubclass(cls, tuple) and hasattr(cls, "_fields")
    if not (is_record or dataclasses.is_dataclass(cls) or issubclass(cls, _METADATA)):
        raise TypeError(
            f"{_name_of(cls)} does not travel between scheduler and worker: metadata consists of "
            "numbers, texts, bytes, collections, dataclasses and named tuples"
        )


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _loaded_class(name: str) -> type:
    module, _, qualname = name.partition(":")
    cls: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # Not by getattr: a module may import a name that is looked up in it.
        cls = getattr(cls, "__dict__", {}).get(part)
    if not isinstance(cls, type) or _name_of(cls) != name:
        raise LookupError(
            f"{name} is no class of this process; a connector's metadata is defined in a module "
            "that both of its sides import"
        )
    _check_carries_data(cls)
    return cls
