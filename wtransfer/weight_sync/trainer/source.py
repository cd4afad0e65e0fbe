"""Where a trainer's weights come from: a module, or a state dict."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from wtransfer.engines.interface import ParamMeta, WeightSource
from wtransfer.engines.outline import Outline
from wtransfer.transport.tensors import PLAIN_TYPES, are_plain
from wtransfer.weight_sync.state import Group, Grouping, look_apart, module_tensors, only_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from wtransfer.transport.tensors import FlatMemory

Spread: TypeAlias = "tuple[tuple[int, ...] | None, Any, tuple[Any, ...] | None]"
"""Owners, mesh and placements."""
WHOLE: Spread = (None, None, None)
"""Those of a tensor that every rank has all of."""


class Seen(NamedTuple):
    """All tensors of a source as they were when its metadata was read: in host memory, flat.

    So who reads its metadata, and then everything, looks at each tensor but once.
    """

    tensors: list[torch.Tensor]
    """The trainer's own, in the order of the metadata."""
    memory: FlatMemory
    """Where they lie."""


def look_at(source: WeightSource) -> tuple[Sequence[ParamMeta], Seen | None]:
    """Return a source's metadata, and its tensors if it can show all of them at once."""
    # Only one of ours, as we wrote it: of others the passes may yield something else.
    look = vars(type(source)).get("_look_at_all")
    if look is None or not _CHANGED.isdisjoint(getattr(source, "__dict__", ())):
        return source.metadata, None
    found: tuple[Sequence[ParamMeta], Seen | None] = look(source)
    return found


_CHANGED = frozenset({"metadata", "iter_full"})


class StateDictSource:
    """A mapping of names to tensors. It is read anew in every round.

    Args:
        tensors: Name -> tensor. Names of the same storage are sent once, under the first name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._mapping = tensors
        self._grouping = Grouping()
        self._groups: tuple[Group, ...] = ()
        self._spreads: list[Spread] = []
        self._metadata: list[ParamMeta] = []
        self._apart: Outline | None = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        return only_tensors(self._mapping)

    def _firsts(self) -> dict[str, torch.Tensor]:
        """Return one name of every storage, with its tensor."""
        tensors = self._tensors()
        groups = self._grouping.kept(tensors)
        if len(groups) == len(tensors):
            return tensors
        return {group.name: tensors[group.name] for group in groups}

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Name, dtype and whole shape of every tensor; of a DTensor also who holds which part."""
        return self._look_at_all()[0]

    def _look_at_all(self) -> tuple[Sequence[ParamMeta], Seen | None]:
        tensors = self._tensors()
        apart = None if self._apart is None else look_apart(tensors, self._apart)
        if apart is None:
            self._group(tensors)
        memory = apart.memory if apart is not None else None
        seen = Seen(list(tensors.values()), memory) if memory is not None else None
        # The same objects as long as they are right: who compares them finds out at once.
        return list(self._metadata), seen

    def _group(self, tensors: Mapping[str, torch.Tensor]) -> None:
        groups = self._grouping.of(tensors)
        # Not among the looks by which they are grouped.
        spreads = _spreads(tensors, groups)
        if groups is not self._groups or spreads != self._spreads:
            self._metadata = [
                ParamMeta(group.name, tensor.dtype, tuple(tensor.shape), *spread)
                for group, spread in zip(groups, spreads or [WHOLE] * len(groups), strict=True)
                for tensor in (tensors[group.name],)
            ]
            self._groups, self._spreads = groups, spreads
            # Tied tensors never fit it, and are grouped every time. So are those of other types,
            # which may be sharded.
            self._apart = None if spreads else Outline.of_metadata(self._metadata)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, the trainer's own or gathered ones.

        A sharded one is gathered, which every rank must take part in.
        """
        firsts = self._firsts()
        if are_plain(firsts.values()):
            # Of a dictionary, which says that all of them are there: see `DictItems`.
            return iter(firsts.items())
        return _gathered(firsts)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank holds."""
        for name, tensor in self._firsts().items():
            to_local = getattr(tensor, "to_local", None)
            yield name, _without_grad(to_local() if to_local else tensor)


class ModuleSource(StateDictSource):
    """A module's parameters and persistent buffers, tied storage once.

    Args:
        module: The model in training; ``torch.compile`` and ``DistributedDataParallel`` wrappers
            are looked through.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__({})
        self._module = module

    def _look_at_all(self) -> tuple[Sequence[ParamMeta], Seen | None]:
        # In this class as well, since `look_at` asks the class itself.
        return super()._look_at_all()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return module_tensors(self._module)


def _has_metadata(source: object) -> bool:
    # Where the name alone tells, it is not read: that may be a look at everything that there is.
    return inspect.getattr_static(source, "metadata", None) is not None or hasattr(
        source, "metadata"
    )


def _spreads(tensors: Mapping[str, torch.Tensor], groups: tuple[Group, ...]) -> list[Spread]:
    """Return owners, mesh and placements of each storage; none where no tensor has any."""
    if are_plain(tensors.values()):
        return []
    return [_spread(tensors[group.name]) for group in groups]


def _spread(tensor: torch.Tensor) -> Spread:
    """Return owners, mesh and placements of a DTensor."""
    if type(tensor) in PLAIN_TYPES or not hasattr(tensor, "full_tensor"):
        return WHOLE
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tuple(tensor.placements)  # type: ignore[attr-defined]
    return tuple(mesh.mesh.flatten().tolist()), mesh, placements


def _gathered(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        gather = getattr(tensor, "full_tensor", None)
        yield name, _without_grad(gather() if gather else tensor)


def _without_grad(tensor: torch.Tensor) -> torch.Tensor:
    # `detach` makes a new object, which for a small tensor costs as much as sending it.
    return tensor.detach() if tensor.requires_grad else tensor


def as_source(model: nn.Module | Mapping[str, torch.Tensor] | WeightSource) -> WeightSource:
    """Return a source for what a user hands in: a module, a mapping, or a source."""
    from collections.abc import Mapping as AnyMapping

    if isinstance(model, torch.nn.Module):
        return ModuleSource(model)
    if isinstance(model, AnyMapping):
        return StateDictSource(model)
    if hasattr(model, "iter_full") and _has_metadata(model):
        return model
    raise TypeError(
        f"cannot publish a {type(model).__name__}: expected a torch module, a mapping of names to "
        "tensors, or a WeightSource with `metadata` and `iter_full`"
    )
