"""Objects of plain data as messages, and back; what vLLM pickles, and this host does not.

Only objects of classes that this process has loaded are made, and only of kinds that carry data:
dataclasses, named tuples, and the metadata of connectors. None of their code is run: not when they
are made, nor because they were. So a set, and the keys of a dictionary, consist of atoms and tuples
of atoms, whose equality is Python's own. Arrays and tensors of numbers travel, too.
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
    from collections.abc import Callable, Iterable

Plain = Any
"""What msgpack can carry: an atom, or a list that begins with the kind of the rest."""

_TUPLES_OWN = tuple.__hash__, tuple.__eq__
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_NUMBERS = re.compile(r"[<>|][biuf][1248]")
_ATOMS = (bool, int, float, str, bytes, type(None))
_MARKERS = (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    KVConnectorHandshakeMetadata,
    LoadStoreSpec,
)


def to_plain(value: Any) -> Plain:
    """Return an object as plain data.

    Raises:
        TypeError: Something in it is of a kind that does not travel.
    """
    cls = type(value)
    if cls in _ATOMS:
        _check_fits(value)
        return value
    if cls in (set, frozenset, dict):
        _check_equality(value)
    if cls in _COLLECTIONS.values():
        return [cls.__name__, *map(to_plain, value)]
    if cls is dict:
        return ["dict", *([to_plain(key), to_plain(each)] for key, each in value.items())]
    return _numbers(value) or _structure(value)


def _numbers(value: Any) -> Plain | None:
    cls = type(value)
    if cls is torch.Tensor:
        return ["tensor", dtype_name(value.dtype), list(value.shape), _bytes_of(value)]
    if _is_array(cls):
        _check_has_numbers(value.dtype.str)
        return ["array", value.dtype.str, list(value.shape), value.tobytes()]
    return None


def _structure(value: Any) -> Plain:
    cls = type(value)
    _check_carries_data(cls)
    if issubclass(cls, tuple):
        return ["record", _name_of(cls), *map(to_plain, value)]
    attributes = {name: to_plain(each) for name, each in _attributes(value).items()}
    return ["object", _name_of(cls), attributes]


def from_plain(plain: Plain) -> Any:
    """Return the object.

    Raises:
        LookupError: It is of a class that this process has not loaded.
        TypeError: It is of a kind that does not travel.
    """
    if not isinstance(plain, list):
        return plain
    kind, *rest = plain or [None]
    if not isinstance(kind, str) or kind not in _MAKERS:
        raise TypeError(f"{kind!r} is no kind of plain data")
    return _MAKERS[kind](*rest)


def _collection(cls: type[Any]) -> Callable[..., Any]:
    def make(*members: Plain) -> Any:
        made = [from_plain(each) for each in members]
        if cls in (set, frozenset):
            _check_equality(made)
        return cls(made)

    return make


def _dict(*items: list[Plain]) -> dict[Any, Any]:
    made = [(from_plain(key), from_plain(value)) for key, value in items]
    _check_equality(key for key, _ in made)
    return dict(made)


def _tensor(dtype: str, shape: list[int], data: bytes) -> torch.Tensor:
    made = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    return made.view(torch_dtype(dtype)).reshape(shape)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise TypeError(
            f"a tensor on {tensor.device} of layout {tensor.layout} does not travel between "
            "scheduler and worker; give its numbers"
        )
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _array(dtype: str, shape: list[int], data: bytes) -> Any:
    import numpy as np

    _check_has_numbers(dtype)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _record(name: str, *values: Plain) -> Any:
    found = _loaded(name)
    _check_carries_data(found)
    if not issubclass(found, tuple) or len(found._fields) != len(values):  # type: ignore[attr-defined]
        raise TypeError(f"{name} has not these {len(values)} fields")
    return tuple.__new__(found, map(from_plain, values))


def _object(name: str, attributes: dict[str, Plain]) -> Any:
    found = _loaded(name)
    _check_carries_data(found)
    made: Any = object.__new__(found)
    for attribute, value in attributes.items():
        slot = inspect.getattr_static(found, attribute, None)
        # Past properties and the like, which would run.
        if isinstance(slot, types.MemberDescriptorType):
            slot.__set__(made, from_plain(value))
        else:
            vars(made)[attribute] = from_plain(value)
    return made


_COLLECTIONS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "dict": _dict,
    "array": _array,
    "tensor": _tensor,
    "record": _record,
    "object": _object,
    **{name: _collection(cls) for name, cls in _COLLECTIONS.items()},
}


def _attributes(value: Any) -> dict[str, Any]:
    attributes = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        # Those in slots are in no dictionary.
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                attributes.setdefault(name, getattr(value, name))
    return attributes


def _check_fits(atom: Any) -> None:
    """Raise unless msgpack can carry an atom."""
    if isinstance(atom, int) and not _LEAST <= atom <= _MOST:
        raise TypeError(
            f"a number of {atom.bit_length()} bits does not travel between scheduler and worker"
        )
    if isinstance(atom, str):
        try:
            atom.encode()
        except UnicodeEncodeError as error:
            raise TypeError(
                f"{atom!r:.80} does not travel between scheduler and worker, being no text: {error}"
            ) from error


def _check_equality(members: Iterable[Any]) -> None:
    """Raise unless who is equal to whom is decided by Python alone."""
    for each in members:
        cls = type(each)
        if issubclass(cls, tuple) and (cls.__hash__, cls.__eq__) == _TUPLES_OWN:
            _check_equality(each)
        elif cls not in _ATOMS:
            raise TypeError(
                f"{_name_of(cls)} does not travel between scheduler and worker in a set or "
                "as a key: these consist of atoms and tuples of atoms"
            )


def _is_array(cls: type) -> bool:
    # Specs in the seed's style have the numbers of blocks in arrays. Who has none needs no numpy.
    numpy = sys.modules.get("numpy")
    return numpy is not None and cls is numpy.ndarray


def _check_has_numbers(dtype: str) -> None:
    if not _NUMBERS.fullmatch(dtype):
        raise TypeError(f"an array of {dtype!r} does not travel between scheduler and worker")


def _check_carries_data(cls: type) -> None:
    is_record = issubclass(cls, tuple) and hasattr(cls, "_fields")
    runs_when_gone = hasattr(cls, "__del__")
    if runs_when_gone or not (
        is_record or dataclasses.is_dataclass(cls) or issubclass(cls, _MARKERS)
    ):
        raise TypeError(
            f"{_name_of(cls)} does not travel between scheduler and worker: metadata consists of "
            "numbers, texts, bytes, collections, dataclasses and named tuples"
        )


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _loaded(name: str) -> type:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # Not by `getattr`: a module may import what it is asked for.
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type) or _name_of(found) != name:
        raise LookupError(
            f"{name} is no class of this process; a connector's metadata is defined in a module "
            "that both of its sides import"
        )
    return found
