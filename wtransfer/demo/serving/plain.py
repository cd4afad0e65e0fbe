"""Objects of plain data as messages, and back; what vLLM pickles, and this host does not.

Only objects of classes that this process has loaded are made, and only of kinds that carry data:
dataclasses, named tuples, and the metadata of connectors. None of their code is run. Arrays of
numbers travel, too.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from typing import Any

from wtransfer.connectors.interface import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from wtransfer.specs.interface import LoadStoreSpec

Plain = Any
"""What msgpack can carry: an atom, or a list that begins with the kind of the rest."""

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
        return value
    if cls in _COLLECTIONS.values():
        return [cls.__name__, *map(to_plain, value)]
    if cls is dict:
        return ["dict", *([to_plain(key), to_plain(each)] for key, each in value.items())]
    if _is_array(cls):
        _check_has_numbers(value.dtype.str)
        return ["array", value.dtype.str, list(value.shape), value.tobytes()]
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
    kind, *rest = plain
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](map(from_plain, rest))
    if kind not in _MAKERS:
        raise TypeError(f"{kind!r} is no kind of plain data")
    return _MAKERS[kind](*rest)


def _dict(*items: list[Plain]) -> dict[Any, Any]:
    return {from_plain(key): from_plain(value) for key, value in items}


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
_MAKERS: dict[str, Any] = {"dict": _dict, "array": _array, "record": _record, "object": _object}


def _attributes(value: Any) -> dict[str, Any]:
    attributes = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        # Those in slots are in no dictionary.
        names = [each.name for each in dataclasses.fields(value)]
        attributes |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return attributes


def _is_array(cls: type) -> bool:
    # Specs in the seed's style have the numbers of blocks in arrays. Who has none needs no numpy.
    numpy = sys.modules.get("numpy")
    return numpy is not None and cls is numpy.ndarray


def _check_has_numbers(dtype: str) -> None:
    if not _NUMBERS.fullmatch(dtype):
        raise TypeError(f"an array of {dtype!r} does not travel between scheduler and worker")


def _check_carries_data(cls: type) -> None:
    is_record = issubclass(cls, tuple) and hasattr(cls, "_fields")
    if not (is_record or dataclasses.is_dataclass(cls) or issubclass(cls, _MARKERS)):
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
        raise LookupError(f"{name} is no class of this process")
    return found
