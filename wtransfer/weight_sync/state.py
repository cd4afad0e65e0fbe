"""The tensors that a module consists of, with tied storage counted once."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from wtransfer.transport.tensors import (
    PART,
    PLAIN_TYPES,
    FlatMemory,
    are_in_host_memory,
    are_plain,
    flat_memory,
    have_forms,
    host_forms,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from wtransfer.engines.outline import Outline

Look: TypeAlias = "tuple[Any, ...]"
"""Which memory, by number; then offset, shape, strides and dtype, or what else there is."""


@dataclass(frozen=True)
class Storage:
    """All tensors that are views of the same elements: one entry of a schema."""

    name: str
    """First name."""
    tensors: tuple[torch.Tensor, ...]
    """The distinct tensor objects, first name first."""
    aliases: tuple[str, ...]
    """Further names."""
    overlaps: bool
    """Whether another entry, or a tensor beside them, shares a part of its memory (one view of a
    flat buffer, say)."""


@dataclass(frozen=True)
class Group:
    """The names of one storage. It holds no tensor, so it may be kept from round to round."""

    name: str
    """First name."""
    aliases: tuple[str, ...]
    """Further names."""
    overlaps: bool
    """As in `Storage`."""

    def distinct(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the distinct tensor objects under these names, first name first."""
        if not self.aliases:
            return (tensors[self.name],)
        found = (tensors[name] for name in (self.name, *self.aliases))
        return tuple({id(each): each for each in found}.values())


def only_tensors(mapping: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a mapping has of tensors, the objects themselves."""
    # Through a copy: the owner may put a tensor in while another thread asks.
    found = dict(mapping)
    if are_plain(found.values()):
        return found
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> parameter or persistent buffer, the objects themselves.

    Wrappers that only rename (``torch.compile``, ``DistributedDataParallel``) are taken off, so
    that trainer and worker agree on names whichever of them is wrapped.
    """
    return only_tensors(unwrap(module).state_dict(keep_vars=True))


def unnamed_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return what a module computes with but does not name in its state.

    These are non-persistent buffers, and tensors that are mere attributes.
    """
    named = {id(tensor) for tensor in module_tensors(module).values()}
    return [
        each
        for part in unwrap(module).modules()
        for each in (
            *part.parameters(recurse=False),
            *part.buffers(recurse=False),
            *_attributes(part),
        )
        if id(each) not in named
    ]


def _attributes(module: nn.Module) -> list[torch.Tensor]:
    return [each for each in vars(module).values() if isinstance(each, torch.Tensor)]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else None
        inner = inner or getattr(module, "_orig_mod", None)
        if inner is None:
            return module
        module = inner


def group_storages(
    tensors: Mapping[str, torch.Tensor], beside: Iterable[torch.Tensor] = ()
) -> dict[str, Storage]:
    """Group names by the elements they stand for.

    Args:
        tensors: Name -> tensor.
        beside: Tensors without a name; entries that share memory with one of them overlap.

    Returns:
        First name -> entry, in the order of `tensors`.
    """
    return {
        group.name: Storage(group.name, group.distinct(tensors), group.aliases, group.overlaps)
        for group in Grouping().of(tensors, beside)
    }


class Columns(NamedTuple):
    """The looks of some tensors in host memory, column by column.

    So they are compared with those of another time by a few loops in C, and nothing is kept
    meanwhile that the cyclic collector would have to go through.
    """

    spots: Sequence[int]
    """Which memory, by number."""
    offsets: Sequence[int]
    """Elements before the first one."""
    strides: Sequence[tuple[int, ...]]
    """Distances."""
    forms: list[tuple[object, ...]]
    """Dtypes and sizes, as `have_forms` takes them."""
    itemsizes: Sequence[int]
    """Bytes of an element."""

    def agree(self, tensors: list[torch.Tensor], first: int, spots: dict[int, int]) -> bool:
        """Whether these tensors, as many as then, look as those did.

        Args:
            tensors: In the same order.
            first: Number of the first one.
            spots: Memory -> number of its first user; is added to.
        """
        own = torch.Tensor
        return (
            have_forms(tensors, self.forms)
            and all(map(operator.eq, map(own.stride, tensors), self.strides))
            and all(map(operator.eq, map(own.storage_offset, tensors), self.offsets))
            and self._agree_in_memory(list(map(own.data_ptr, tensors)), first, spots)
        )

    def _agree_in_memory(self, addresses: list[int], first: int, spots: dict[int, int]) -> bool:
        if any(self.offsets):
            before = map(operator.mul, self.offsets, self.itemsizes)
            addresses = list(map(operator.sub, addresses, before))
        found = map(spots.setdefault, addresses, itertools.count(first))
        return all(map(operator.eq, found, self.spots))


def _in_parts(tensors: list[torch.Tensor], looks: list[Look]) -> list[Columns] | None:
    """Return the columns of each `PART`; None if a tensor is not a plain one, or has no address."""
    if not are_in_host_memory(tensors) or 0 in map(torch.Tensor.data_ptr, tensors):
        return None
    starts = range(0, len(looks), PART)
    return [_columns(looks[start : start + PART]) for start in starts]


def _columns(looks: list[Look]) -> Columns:
    spots, offsets, shapes, strides, dtypes = zip(*looks, strict=True)
    itemsizes = [dtype.itemsize for dtype in dtypes]
    return Columns(spots, offsets, strides, host_forms(dtypes, shapes), itemsizes)


def _agree(parts: list[Columns], tensors: list[torch.Tensor]) -> bool:
    spots: dict[int, int] = {}
    return all(
        part.agree(tensors[start : start + PART], start, spots)
        for start, part in zip(itertools.count(0, PART), parts, strict=False)
    )


class Grouping:
    """Groups one set of tensors round after round, anew only when the outcome could be another.

    How names are grouped follows from what `_looks` yields and from nothing else. So while that
    stays equal the groups of the time before are right, whatever became of the tensors between.
    """

    def __init__(self) -> None:
        # In one piece: any thread may ask, and must not get the groups of another's looks.
        self._last = _Grouped([], [], None, (), ())

    def of(
        self, tensors: Mapping[str, torch.Tensor], beside: Iterable[torch.Tensor] = ()
    ) -> tuple[Group, ...]:
        """Return the groups, in the order of `tensors`.

        Returns:
            The very object of the call before if names, dtypes, shapes, strides, and who shares
            memory with whom, are what they were then. What follows from these may be kept with it.

        Cost: about 0.5 us per tensor, 3 us where something has changed.
        """
        names, everything, last = list(tensors), [*tensors.values(), *beside], self._last
        if names == last.names and len(everything) == len(last.looks):
            if last.parts is not None:
                same = _agree(last.parts, everything)
            else:
                # One by one, so that nothing is kept that the cyclic collector has to go through.
                same = all(map(operator.eq, _looks(everything), last.looks))
            if same:
                return last.groups
        looks = list(_looks(everything))
        groups = _groups(names, looks)
        tied = tuple(group for group in groups if group.aliases)
        self._last = _Grouped(names, looks, _in_parts(everything, looks), groups, tied)
        return groups

    def kept(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Group, ...]:
        """Return the groups of the last call while no name has parted from its group, else `of`.

        For whoever reads one tensor of each group. Names that have come to share memory meanwhile
        are not looked for: both are read then, which is as right.

        Cost: about 0.05 us per tensor, 1 us per name of a group of several.
        """
        last = self._last
        if list(tensors) == last.names and all(_is_one(tensors, each) for each in last.tied):
            return last.groups
        return self.of(tensors)


class Apart(NamedTuple):
    """Tensors no two of which begin at the same place."""

    memory: FlatMemory | None
    """Where they lie, if all lie flat."""


def look_apart(tensors: Mapping[str, torch.Tensor], outline: Outline) -> Apart | None:
    """Look whether tensors have these names and forms, and no two begin at the same place.

    Parts of one buffer are apart, as long as none begins where another does.

    Returns:
        None also where it takes a closer look: they are not plain ones in host memory, or some are
        empty.

    Cost: about 1 us per tensor.
    """
    if list(tensors) != outline.names:
        return None
    memory = FlatMemory([], [], [])
    addresses: set[int] = set()
    every = iter(tensors.values())
    for part in outline.parts(PART):
        own = list(itertools.islice(every, len(part.names)))
        flat = flat_memory(own, part.forms, part.sizes)
        if flat is not None:
            memory.extend(flat)
        elif not have_forms(own, part.forms):
            return None
        addresses.update(map(torch.Tensor.data_ptr, own) if flat is None else flat.addresses)
    if len(addresses) < len(outline) or 0 in addresses:
        return None
    return Apart(memory if len(memory.addresses) == len(outline) else None)


class _Grouped(NamedTuple):
    names: list[str]
    looks: list[Look]
    parts: list[Columns] | None
    groups: tuple[Group, ...]
    tied: tuple[Group, ...]


def _is_one(tensors: Mapping[str, torch.Tensor], group: Group) -> bool:
    looks = _looks([tensors[name] for name in (group.name, *group.aliases)])
    return len(set(looks)) == 1


def _looks(tensors: list[torch.Tensor]) -> Iterator[Look]:
    """Yield what there is to know of how each tensor lies; addresses do not enter it.

    A tensor's memory is named by the first tensor that uses it. So the same looks come out when all
    have been moved, as they are by every update that is adopted.
    """
    first: dict[object, int] = {}
    for number, each in enumerate(tensors):
        # Without a call: this loop is a good part of what a round costs per small tensor.
        if (
            type(each) in PLAIN_TYPES
            and each.is_cpu
            and each.layout is torch.strided
            and not each.is_nested
        ):
            # Nor an object: `untyped_storage` would leave one behind with every storage.
            offset, address = each.storage_offset(), each.data_ptr()
            memory = address - offset * each.itemsize if address and each.numel() else _itself(each)
            spot = first.setdefault(memory, number)
            yield (spot, offset, each.shape, each.stride(), each.dtype)
        else:
            yield (first.setdefault(_memory(each), number), *_rare_look(each))


def _rare_look(tensor: torch.Tensor) -> Look:
    kind = (type(tensor), tensor.device, tensor.layout, tensor.dtype)
    if is_lazy(tensor) or tensor.is_nested:
        return kind
    if _memory(tensor) == _itself(tensor):
        return (*kind, tensor.shape)
    return (*kind, tensor.storage_offset(), tensor.shape, tensor.stride())


def _memory(tensor: torch.Tensor) -> object:
    # These have no memory yet, or none in one piece; empty ones no address that identifies them.
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return _itself(tensor)
    if hasattr(tensor, "full_tensor") or tensor.numel() == 0:
        return _itself(tensor)
    address = memory_address(tensor)
    if address is None:
        return _itself(tensor)
    return address if tensor.is_cpu else (tensor.device, address)


def memory_address(tensor: torch.Tensor) -> int | None:
    """Return where a strided tensor's storage begins; None for one that only wraps others."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def _itself(tensor: torch.Tensor) -> object:
    return ("alone", id(tensor))


def _groups(names: list[str], looks: list[Look]) -> tuple[Group, ...]:
    alike: dict[Look, list[str]] = {}
    for name, look in zip(names, looks, strict=False):
        alike.setdefault(look, []).append(name)
    users = Counter(look[0] for look in alike)
    users.update({look[0] for look in looks[len(names) :]})
    return tuple(
        Group(found[0], tuple(found[1:]), overlaps=users[look[0]] > 1)
        for look, found in alike.items()
    )


def stands_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the whole of a private piece of CPU memory, element after element.

    Only such a tensor may be pointed elsewhere, or pointed to: of any other, a further tensor or
    another process may hold a part, which would be left behind or written along.
    """
    if not tensor.is_cpu or not tensor.is_contiguous():
        return False
    # One made in inference mode that points to other memory is broken: even `repr` fails.
    if tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and not storage.is_shared()
