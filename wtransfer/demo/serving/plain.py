"""Objects of plain data as messages, and back; what vLLM pickles, and this host does not.

Only objects of classes that this process has loaded are made, and only of kinds that carry data:
dataclasses, named tuples, and the metadata of connectors. None of their code is run.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from wtransfer.connectors.interface import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from wtransfer.specs.interface import LoadStoreSpec

Plain = Any
"""What msgpack can carry: an atom, or a list that begins with the kind of the rest."""

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
    if type(value) in _ATOMS:
        return value
    if type(value) in (list, tuple, set, frozenset):
        return [type(value).__name__, *map(to_plain, value)]
    if type(value) is dict:
        return ["dict", *([to_plain(key), to_plain(each)] for key, each in value.items())]
    _check_carries_data(type(value))
    if isinstance(value, tuple):
        return ["record", _name_of(type(value)), *map(to_plain, value)]
    attributes = {name: to_plain(each) for name, each in _attributes(value).items()}
    return ["object", _name_of(type(value)), attributes]


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
    if kind == "dict":
        return {from_plain(key): from_plain(value) for key, value in rest}
    name, *content = rest
    found = _loaded(name)
    _check_carries_data(found)
    if kind == "record":
        return tuple.__new__(found, map(from_plain, content))
    made: Any = object.__new__(found)
    for attribute, value in content[0].items():
        object.__setattr__(made, attribute, from_plain(value))
    return made


_COLLECTIONS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return dict(vars(value))


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
        found = getattr(found, part, None)
    if not isinstance(found, type) or _name_of(found) != name:
        raise LookupError(f"{name} is no class of this process")
    return found
