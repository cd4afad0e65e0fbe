"""Prove that SGLang's load gives the weights that it was given, before an update relies on it.

Loading the weights that SGLang serves must give what it serves. The load goes into stand-ins for
the model's tensors, and leaves the model as it was.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from wtransfer.errors import WTransferError
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.worker.unregistered import unregistered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

LEVELS = 5
"""Levels of objects that may hold tensors: a layer, its method, the method's kernel, its lists."""
TABLES = frozenset({"_parameters", "_buffers"})
"""A layer's own tables of tensors; what they hold is an attribute of the layer."""
NOT_ENTERED = (
    "sglang.srt.configs.model_config.ModelConfig",
    "sglang.srt.distributed.parallel_state.GroupCoordinator",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
    "sglang.srt.model_executor.forward_context.ForwardContext",
    "sglang.srt.server_args.ServerArgs",
)
"""Classes of SGLang's that hold more than one model."""
_SERVES_ON = "Nothing was changed, and SGLang serves on; other weights need a restart"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> dtype of its bits."""


class LoadError(WTransferError, RuntimeError):
    """SGLang's load does not give the loaded weights, or the result cannot be known."""


class ServedWeightsError(WTransferError, RuntimeError):
    """SGLang's load has written to the weights that serve, past the tensors of the model."""


class _Tensor(NamedTuple):
    what: str
    tensor: torch.Tensor
    served: torch.Tensor
    digest: str
    stand_in: torch.Tensor
    is_constant: bool


_built: weakref.WeakKeyDictionary[nn.Module, dict[str, list[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)
"""Model -> by layer, copies of the tensors beside parameters that the model was built with."""


def note_built(model: nn.Module, *_args: object, **_options: object) -> None:
    """Note the tensors of a model that has been built and not loaded: none is made of weights."""
    found = _built[model] = {}
    owned, seen = _storages_of_parameters(model), set()
    for layer, _, _, entries in _walk(model):
        for _, value in entries:
            if (
                isinstance(value, torch.Tensor)
                and not isinstance(value, torch.nn.Parameter)
                and _has_memory(value)
                and value.untyped_storage().data_ptr() not in owned
                and id(value) not in seen
            ):
                seen.add(id(value))
                found.setdefault(layer, []).append(value.detach().to("cpu", copy=True))


def prove(model: nn.Module, load: Callable[[], object]) -> None:
    """Raise unless a load of the weights that a model serves gives these weights, bit for bit.

    The memory of each of the model's tensors is replaced by a stand-in, SGLang loads, and the
    stand-ins must then equal what serves. A tensor that the load puts at another address is a
    fault: captured graphs would go on reading the old one.

    Each stand-in has every bit inverted, for what the load leaves alone must not look right. So a
    tensor beside the parameters that was made of the weights, and that no load would renew, is
    found. One that the load leaves alone is no fault where its layer was built with it, before the
    first load (`note_built`), as with tables of rotary embeddings: it was not made of the weights.
    A table that was cast or has got longer since counts as well. Tensors of integers are not
    inverted, for the load may look up memory by them; one that the first load has made is a fault.
    Copies that a step makes are seen if there was one, as where graphs have been captured. A module
    that the model computes with, and that is none of its modules, is a fault by itself.

    The model is not written to, and serves the same before and after.

    Args:
        model: The model. No step of it may run meanwhile.
        load: Loads the served weights into it, as an update is loaded.

    Raises:
        LoadError: The load does not, or could not be tried; the text names layer, tensor and cause.
        ServedWeightsError: The load has written to the memory that serves, by a way past the
            model's tensors, and has changed it. What serves is not what was loaded.

    Cost: one load, memory of the host for one copy of the model, two digests and one comparison.
    """
    state = _State(model)
    hidden: str | None = None
    fault: str | None = None
    cause: Exception | None = None
    has_begun = False
    try:
        hidden = next(unregistered(model, NOT_ENTERED), None)
        if hidden is None:
            state.stand_in()
            has_begun = True
            load()
            fault = next(state.faults(), None)
    except Exception as error:
        cause = error
    finally:
        state.restore()
    name = type(model).__name__
    if has_begun and (changed := state.changed()) is not None:
        raise ServedWeightsError(
            f"SGLang's load has written to the weights that {name} serves, past the model's own "
            f"tensors: {changed}. They are not those of the checkpoint any more, and this server "
            "ends. Without WTRANSFER_LISTEN, WTRANSFER_JOIN and a storage of KV cache its load is "
            "not tried, and it serves"
        ) from cause
    if cause is not None:
        raise LoadError(
            f"{name} takes no update, for its load could not be proven: {type(cause).__name__}: "
            f"{cause}. {_SERVES_ON}"
        ) from cause
    if hidden is not None:
        raise LoadError(
            f"{name} takes no update, for it computes with {hidden}, which is none of its "
            f"registered modules: no load is known to renew it. {_SERVES_ON}"
        )
    if fault is not None:
        raise LoadError(
            f"{name} takes no update, for SGLang's load of the weights that it serves gives "
            f"others: {fault}. {_SERVES_ON}"
        )


class _State:
    """All tensors of a model, and the objects that hold them, as they serve."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: dict[int, tuple[Any, Any]] = {}
        """Objects, and copies of their tables: a load may put another tensor in one's place."""
        self._tensors: dict[int, _Tensor] = {}
        self._views: dict[int, tuple[torch.Tensor, int]] = {}
        """Views of parameters: they follow what is written to the parameters."""
        self._places: set[str] = set()

    def stand_in(self) -> None:
        """Put a stand-in into the place of each tensor's memory."""
        found: list[tuple[str, str, str, torch.Tensor]] = []
        for layer, name, owner, entries in _walk(self._model):
            table = _table(owner)
            self._held[id(owner)] = (owner, table if isinstance(table, tuple) else table.copy())
            found += [(layer, name, key, v) for key, v in entries if isinstance(v, torch.Tensor)]
        owned = _storages_of_parameters(self._model)
        built = _built.get(self._model, {})
        for layer, name, key, tensor in found:
            self._places.add(f"{name} {key}")
            if id(tensor) in self._tensors:
                continue
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            if not is_parameter and tensor.untyped_storage().data_ptr() in owned:
                self._views[id(tensor)] = (tensor, tensor.data_ptr())
            else:
                constants = [] if is_parameter else built.get(layer, [])
                self._note(f"layer {name!r}, {key!r}", tensor, constants)
        for entry in self._tensors.values():
            entry.tensor.data = entry.stand_in

    def _note(self, what: str, tensor: torch.Tensor, constants: list[torch.Tensor]) -> None:
        served = tensor.data
        is_constant = not served.numel() or any(_begins_with(served, each) for each in constants)
        # On the host: a device has seldom room for the model a second time. A load may compute
        # with constants, which are small.
        stand_in = torch.empty_like(served, device=served.device if is_constant else "cpu")
        stand_in.copy_(served)
        before = digest(stand_in)
        if not is_constant and _can_be_inverted(tensor):
            _invert(stand_in)
        self._tensors[id(tensor)] = _Tensor(what, tensor, served, before, stand_in, is_constant)

    def faults(self) -> Iterator[str]:
        """Yield what differs, after the load, from what serves."""
        found: set[int] = set()
        for _, name, _, entries in _walk(self._model):
            for key, value in entries:
                if isinstance(value, torch.Tensor):
                    found.add(id(value))
                    fault = self._fault(value, f"{name} {key}")
                    if fault is not None:
                        yield f"layer {name!r}, {key!r}: {fault}"
        missing = [self._tensors[number] for number in self._tensors.keys() - found]
        parameters = [each for each in self._tensors.values() if _is_parameter(each)]
        if gone := sum(map(_is_parameter, missing)):
            yield f"{gone} of {len(parameters)} parameters are gone"
        for entry in missing:
            yield f"{entry.what}: gone"

    def _fault(self, value: torch.Tensor, place: str) -> str | None:
        if id(value) in self._views:
            in_place = value.data_ptr() == self._views[id(value)][1]
            return None if in_place else "replaced, not written to"
        entry = self._tensors.get(id(value))
        if entry is None and place not in self._places:
            return "a tensor that the first load had not"
        if entry is None or value.data_ptr() != entry.stand_in.data_ptr():
            return "replaced, not written to"
        if _same_bits(value, entry.served):
            if entry.is_constant or _can_be_inverted(value):
                return None
        elif _is_parameter(entry) or not _is_inverse(value, entry.served):
            return "other bits than those that serve"
        return "whether it was made of the weights is not known"

    def restore(self) -> None:
        """Put everything back."""
        # The weights first: then the rest may be as it is.
        for entry in self._tensors.values():
            entry.tensor.data = entry.served
        for owner, held in self._held.values():
            table = _table(owner)
            if isinstance(table, tuple) or _is_as_held(table, held):
                continue
            # The same table: others may hold it.
            table.clear()
            table.extend(held) if isinstance(table, list) else table.update(held)

    def changed(self) -> str | None:
        """Return the first tensor whose memory that serves has changed; None: none has."""
        made = (entry for entry in self._tensors.values() if not entry.is_constant)
        return next((each.what for each in made if digest(each.served) != each.digest), None)


def _walk(model: nn.Module) -> Iterator[tuple[str, str, Any, list[tuple[str, Any]]]]:
    """Yield the objects of a model that may hold tensors, each once.

    Yields:
        Name of the layer, the object's own name, object, and entries.
    """
    seen: set[int] = set()
    level: list[tuple[str, str, Any]] = [(name, name, it) for name, it in model.named_modules()]
    for _ in range(LEVELS):
        below: list[tuple[str, str, Any]] = []
        for layer, name, owner in level:
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            table = _table(owner)
            items = table.items() if isinstance(table, dict) else enumerate(table)
            entries = [(str(key), value) for key, value in list(items)]
            yield layer, name, owner, entries
            below += [
                (layer, name if key in TABLES else f"{name}.{key}", value)
                for key, value in entries
                if _may_hold_tensors(value)
            ]
        level = below


def _storages_of_parameters(model: nn.Module) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in model.parameters() if _has_memory(each)}


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and not tensor.is_meta and tensor.layout is torch.strided


def _table(owner: Any) -> Any:
    return owner if isinstance(owner, (dict, list, tuple)) else vars(owner)


def _may_hold_tensors(value: object) -> bool:
    """Return whether a value is a container or has attributes, and is no layer, class or code."""
    if isinstance(value, (dict, list, tuple, torch.nn.Parameter)):
        return True
    others = (
        torch.nn.Module,
        torch.Tensor,
        type,
        types.FunctionType,
        types.MethodType,
        types.ModuleType,
        functools.partial,
    )
    # Some objects show another's table, or one that cannot be written to.
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(value, others)


def _is_as_held(table: Any, held: Any) -> bool:
    """Return whether a table has the very objects that its copy has, in their places."""
    if len(table) != len(held):
        return False
    if isinstance(table, list):
        return all(one is other for one, other in zip(table, held, strict=True))
    return all(key in table and table[key] is value for key, value in held.items())


def _is_parameter(entry: _Tensor) -> bool:
    return isinstance(entry.tensor, torch.nn.Parameter)


def _can_be_inverted(tensor: torch.Tensor) -> bool:
    return (
        isinstance(tensor, torch.nn.Parameter) or tensor.is_floating_point() or tensor.is_complex()
    )


def _invert(tensor: torch.Tensor) -> None:
    tensor.view(_BITS[tensor.element_size()]).bitwise_not_()


def _is_inverse(one: torch.Tensor, other: torch.Tensor) -> bool:
    inverted = one.detach().clone()
    _invert(inverted)
    return _same_bits(inverted, other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _begins_with(tensor: torch.Tensor, built: torch.Tensor) -> bool:
    """Return whether a tensor is one that was built, in another dtype, or with further rows."""
    if tensor.dim() != built.dim() or tensor.dtype.is_floating_point != built.is_floating_point():
        return False
    first = tensor[: len(built)] if built.dim() else tensor
    return _same_bits(first, built.to(tensor.dtype))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(_bits(one), _bits(other))
