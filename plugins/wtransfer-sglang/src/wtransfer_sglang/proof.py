"""Prove that SGLang's load gives the weights that it was given, before an update relies on it.

Loading the weights that SGLang serves must give what it serves. The load goes into stand-ins for
the model's parameters, and leaves the model as it was.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from wtransfer.errors import WTransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

DEPTH = 3
"""Levels of objects beside a layer that may hold tensors: its method, the method's kernel, ..."""


class LoadError(WTransferError, RuntimeError):
    """SGLang's load does not give the loaded weights, or the result cannot be known."""


class _Parameter(NamedTuple):
    parameter: nn.Parameter
    served: torch.Tensor
    stand_in: torch.Tensor
    attributes: dict[str, Any]


def prove(model: nn.Module, load: Callable[[], object]) -> None:
    """Raise unless a load of the weights that a model serves gives these weights, bit for bit.

    Each parameter's memory is replaced by a stand-in with every bit inverted, SGLang loads, and the
    stand-ins must then equal what serves. A parameter, or a tensor beside the parameters, that the
    load puts at another address is a fault: captured graphs would go on reading the old one. So is
    a tensor of floats beside the parameters that the load leaves alone: it may have been made of
    the weights after the first load, and nothing would renew it.

    The model is not written to, and serves the same before and after.

    Args:
        model: The model. No step of it may run meanwhile.
        load: Loads the served weights into it, as an update is loaded.

    Raises:
        LoadError: The load does not; the text names layer, tensor and cause.

    Cost: one load, memory of the host for one copy of the model, one comparison.
    """
    state = _State(model)
    fault: str | None = None
    cause: Exception | None = None
    try:
        state.stand_in()
        load()
        fault = next(state.faults(), None)
    except Exception as error:
        fault, cause = f"{type(error).__name__}: {error}", error
    finally:
        state.restore()
    if fault is not None:
        raise LoadError(
            f"{type(model).__name__} takes no update, for SGLang's load of the weights that it "
            f"serves gives others: {fault}. Nothing was changed, and SGLang serves on"
        ) from cause


class _State:
    """All tensors of a model, and the objects that hold them, as they serve."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = {id(layer): name for name, layer in model.named_modules()}
        self._held: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._parameters: dict[int, _Parameter] = {}
        self._others: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors beside the parameters, by holder and name, with a copy."""
        self._names: dict[int, str] = {}
        for layer_name, layer in model.named_modules():
            self._hold(layer, layer_name, DEPTH)
        owned = {entry.served.untyped_storage().data_ptr() for entry in self._parameters.values()}
        self._others = {
            key: pair
            for key, pair in self._others.items()
            # A view of a parameter follows what is written to the parameter.
            if pair[0].untyped_storage().data_ptr() not in owned
        }

    def _hold(self, owner: Any, name: str, depth: int) -> None:
        if id(owner) in self._held:
            return
        now = vars(owner)
        # Copies of the tables as well: a load may register another parameter in its place.
        self._held[id(owner)] = (
            owner,
            {key: dict(v) if isinstance(v, dict) else v for key, v in now.items()},
        )
        self._names[id(owner)] = name
        for key, value in _entries(owner):
            if isinstance(value, torch.nn.Parameter):
                self._note_parameter(value)
            elif isinstance(value, torch.Tensor):
                self._others[id(owner), key] = (value, value.detach().clone())
            elif depth and _may_hold_tensors(value):
                self._hold(value, f"{name}.{key}", depth - 1)

    def _note_parameter(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._parameters:
            return
        served = parameter.data
        # On the host: a device has seldom room for the model a second time.
        stand_in = torch.empty_like(served, device="cpu")
        stand_in.copy_(served)
        bits = _bits(stand_in)
        bits.bitwise_not_()
        if bits.data_ptr() != stand_in.data_ptr():
            stand_in = bits.view(served.dtype).view(served.shape)
        self._parameters[id(parameter)] = _Parameter(
            parameter, served, stand_in, dict(vars(parameter))
        )

    def stand_in(self) -> None:
        """Put a stand-in into the place of each parameter's memory."""
        for entry in self._parameters.values():
            entry.parameter.data = entry.stand_in

    def faults(self) -> Iterator[str]:
        """Yield what differs, after the load, from what serves."""
        found: set[int] = set()
        for owner, held in list(self._held.values()):
            name = self._names[id(owner)]
            for key, value in _entries(owner):
                what = f"layer {name!r}, {key!r}"
                if isinstance(value, torch.nn.Parameter):
                    found.add(id(value))
                    yield from self._faults_of_parameter(value, what)
                elif isinstance(value, torch.Tensor):
                    yield from self._faults_of_other(owner, key, value, what, held)
        if missing := self._parameters.keys() - found:
            yield f"{len(missing)} of {len(self._parameters)} parameters are gone"

    def _faults_of_parameter(self, value: nn.Parameter, what: str) -> Iterator[str]:
        entry = self._parameters.get(id(value))
        if entry is None or value.data.data_ptr() != entry.stand_in.data_ptr():
            yield f"{what}: replaced, not written to"
        elif not _same_bits(value.data, entry.served):
            yield f"{what}: other bits than those that serve"

    def _faults_of_other(
        self, owner: Any, key: str, value: torch.Tensor, what: str, held: dict[str, Any]
    ) -> Iterator[str]:
        before = self._others.get((id(owner), key))
        if before is None:
            if key not in _flat(held):
                yield f"{what}: a tensor that the first load had not"
            return
        serving, copy = before
        if value.data_ptr() != serving.data_ptr():
            yield f"{what}: replaced, not written to"
        elif not _same_bits(value, copy):
            yield f"{what}: other bits than those that serve"
        elif (
            key not in getattr(owner, "_buffers", {})
            and value.is_floating_point()
            and value.numel() > 1
        ):
            yield f"{what}: whether it was made of the weights is not known"

    def restore(self) -> None:
        """Put everything back."""
        for owner, held in self._held.values():
            now = vars(owner)
            for key in now.keys() - held.keys():
                del now[key]
            for key, value in held.items():
                if isinstance(value, dict) and isinstance(now.get(key), dict):
                    # The same table: others may hold it.
                    now[key].clear()
                    now[key].update(value)
                else:
                    now[key] = value
        for entry in self._parameters.values():
            entry.parameter.data = entry.served
            vars(entry.parameter).clear()
            vars(entry.parameter).update(entry.attributes)
        for serving, copy in self._others.values():
            serving.data.copy_(copy)


def _flat(table: dict[str, Any]) -> set[str]:
    return {*table, *table.get("_parameters", {}), *table.get("_buffers", {})}


def _entries(owner: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes; of a module, its parameters and buffers as well."""
    found = list(vars(owner).items())
    if isinstance(owner, torch.nn.Module):
        found += [*owner._parameters.items(), *owner._buffers.items()]
    return [(key, value) for key, value in found if value is not None]


def _may_hold_tensors(value: object) -> bool:
    """Return whether a value is an object with attributes, and no layer, tensor, class or code."""
    others = (torch.nn.Module, torch.Tensor, type, types.FunctionType, types.ModuleType)
    return hasattr(value, "__dict__") and not isinstance(value, others)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(_bits(one.detach().cpu()), _bits(other.detach().cpu()))
