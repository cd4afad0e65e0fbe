"""Where a worker's weights go: a module, or a state dict."""

from __future__ import annotations

from collections.abc import ItemsView, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.parameter import is_lazy

from wtransfer.engines.interface import TensorSpec, WeightTarget
from wtransfer.engines.outline import Outline
from wtransfer.engines.staged import StagedTensors
from wtransfer.errors import SchemaError
from wtransfer.transport.tensors import PLAIN_TYPES, lacks_memory
from wtransfer.weight_sync.state import (
    Group,
    Grouping,
    memory_address,
    module_tensors,
    only_tensors,
    stands_alone,
    unnamed_tensors,
)
from wtransfer.weight_sync.worker.adopting import Adopted
from wtransfer.weight_sync.worker.homes import SMALL_NBYTES
from wtransfer.weight_sync.worker.schema import MAX_LISTED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

CommitMode = Literal["adopt", "copy"]
"""How an update is applied: by pointing parameters at the staged memory, or by copying."""


class Known:
    """What follows from how a target's tensors are grouped.

    Args:
        tensors: By name.
        groups: One per storage.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], groups: tuple[Group, ...]) -> None:
        self.groups = groups
        """One per storage."""
        self.by_name = {name: group for group in groups for name in (group.name, *group.aliases)}
        """Name or alias -> group."""
        firsts = [(group, tensors[group.name]) for group in groups]
        self.schema: Mapping[str, TensorSpec] = {
            group.name: TensorSpec(tensor.dtype, tuple(tensor.shape), group.aliases)
            for group, tensor in firsts
        }
        """One spec per storage, under its first name."""
        self.outline = Outline(
            list(self.schema),
            [spec.dtype for spec in self.schema.values()],
            [spec.shape for spec in self.schema.values()],
        )
        """The same, column by column."""


class StateDictTarget:
    """A mapping of names to tensors, written so that the tensor objects stay the same.

    The mapping is read anew at every call: its owner may put other tensors in.

    Args:
        tensors: Name -> tensor. Names of the same storage are written once.
        commit: ``"adopt"`` points a tensor at the staged memory, which costs nothing and needs no
            second copy, but changes its address. A tensor of up to 16 KiB gets memory of its own
            by the first update, to which later ones are copied: that is faster; one with several
            names is written where it is. ``"copy"`` writes into the existing memory: for models
            whose addresses somebody holds (a captured graph, an optimizer's flat buffer). An update
            must not lie in the model's own memory, ever.
            Tensors that cannot adopt (on a device, not contiguous, shared with another process,
            parts of a flat buffer, made in inference mode) are copied either way. Staged tensors
            that cannot be adopted (of another dtype or device, parts of a larger buffer) are
            copied to fresh memory.

    Raises:
        SchemaError: Tensors that nothing can be written to: on the meta device, lazy, expanded,
            sparse, quantised, wrappers of others, freed ones.

    Cost: about 3 us per tensor and call, beside what is copied; 1 us to find that nothing was done
    to a model that adopts, since it adopted the last update.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], commit: CommitMode = "adopt") -> None:
        if commit not in ("adopt", "copy"):
            raise ValueError(f"commit is {commit!r}, expected 'adopt' or 'copy'")
        self._mapping = tensors
        self._commit = commit
        self._adopted = Adopted()
        self._taken: set[int] = set()
        self._grouping = Grouping()
        self._known = Known({}, ())
        self._read()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return only_tensors(self._mapping)

    def _beside(self) -> list[torch.Tensor]:
        return []

    def _read(self) -> tuple[dict[str, torch.Tensor], Known]:
        """Return the tensors of this moment, and what is known of them.

        The one moment's knowledge is another's as long as the grouping says that it is: then every
        name has the dtype, shape, strides and neighbours that it had.
        """
        tensors = self._tensors()
        groups = self._grouping.of(tensors, self._beside())
        known = self._known
        if known.groups is not groups:
            _check_writable(tensors)
            known = self._known = Known(tensors, groups)
        return tensors, known

    def schema(self) -> Mapping[str, TensorSpec]:
        """Return one spec per storage, under its first name."""
        if self._adopted.is_all_of(self._tensors(), self._known.outline):
            return dict(self._known.schema)
        return dict(self._read()[1].schema)

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write every given tensor, by its name or an alias.

        Raises:
            KeyError: A name that the schema does not have.
        """
        # The caller may be in inference mode; the model must not be bound to it by a fresh tensor.
        with torch.inference_mode(mode=False), torch.no_grad():
            if self._exchange(tensors):
                return
            own, known = self._read()
            self._taken.clear()
            adopted = self._adopted.staged(own)
            self._adopted.forget_others(known.by_name.keys())
            for name, staged in tensors.items():
                self._apply_one(known.by_name[name], own, staged, adopted)

    def _exchange(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Adopt a whole update at once if nothing has to be asked of its tensors one by one."""
        noted = tensors if isinstance(tensors, NotedTensors) else NotedTensors(tensors)
        update = noted.tensors
        return isinstance(update, StagedTensors) and self._adopted.exchange(
            self._tensors(), update, noted.note
        )

    def _apply_one(
        self,
        group: Group,
        own: Mapping[str, torch.Tensor],
        staged: torch.Tensor,
        adopted: set[int],
    ) -> None:
        tensor = own[group.name]
        if staged.shape != tensor.shape:
            raise _changed(group.name, tensor, staged)
        if self._points(group, tensor, adopted):
            self._adopt(group, own, staged)
        else:
            if not self._adopted.is_home(group.name, tensor):
                self._adopted.forget(group.name)
            _check_memory(group.name, tensor)
            _overwrite(tensor, staged)

    def present(self) -> Mapping[str, torch.Tensor]:
        """Return the present tensors as they lie, to be read before the next `apply`."""
        own, known = self._read()
        return {group.name: own[group.name].detach() for group in known.groups}

    def capture(self) -> Mapping[str, torch.Tensor]:
        """Return the present tensors: copies, or the memory that no update writes into."""
        own, known = self._read()
        adopted = self._adopted.staged(own)
        return {group.name: self._kept(group, own[group.name], adopted) for group in known.groups}

    def _kept(self, group: Group, tensor: torch.Tensor, adopted: set[int]) -> torch.Tensor:
        # A small one may be the home of another target of the same model, which writes into it.
        if self._points(group, tensor, adopted) and tensor.nbytes > SMALL_NBYTES:
            return tensor.detach()
        _check_memory(group.name, tensor)
        return _cloned(tensor.detach())

    def _points(self, group: Group, tensor: torch.Tensor, staged: set[int]) -> bool:
        """Whether an update points a tensor to other memory, and does not write into its own.

        Args:
            group: Its names.
            tensor: The one of the first name.
            staged: Where staged memory begins that the model points to.
        """
        if self._commit == "copy" or self._adopted.is_home(group.name, tensor):
            return False
        # What was adopted is never written into, whatever has come to share it since: a set that
        # may have to be restored consists of the same memory.
        if memory_address(tensor) in staged:
            return True
        if group.aliases and tensor.nbytes <= SMALL_NBYTES:
            # Else an interrupt between two names would part them, and homes do not tie them again.
            return False
        return not group.overlaps and stands_alone(tensor)

    def _adopt(self, group: Group, own: Mapping[str, torch.Tensor], staged: torch.Tensor) -> None:
        tensor = own[group.name]
        if tensor.nbytes <= SMALL_NBYTES:
            new = _copied(self._adopted.give_home(group.name, tensor), staged)
        else:
            new = self._whole(staged, tensor)
            self._adopted.enter(group.name, new.data_ptr())
        for each in group.distinct(own):
            each.data = new

    def _whole(self, staged: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return what is staged as a tensor of that kind, alone in its memory."""
        # An engine may hand out one tensor under two names; adopting it twice would tie them.
        taken = staged.data_ptr() in self._taken and staged.numel() > 0
        if taken or staged.dtype is not like.dtype or not stands_alone(staged):
            fresh = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            staged = _copied(fresh, staged)
        self._taken.add(staged.data_ptr())
        return staged


class ModuleTarget(StateDictTarget):
    """A module's parameters and persistent buffers.

    Args:
        module: The serving model; ``torch.compile`` and ``DistributedDataParallel`` wrappers are
            looked through.
        commit: As in `StateDictTarget`.
    """

    def __init__(self, module: nn.Module, commit: CommitMode = "adopt") -> None:
        self._module = module
        super().__init__({}, commit)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return module_tensors(self._module)

    def _beside(self) -> list[torch.Tensor]:
        return unnamed_tensors(self._module)


class NotedTensors(Mapping[str, torch.Tensor]):
    """A read-only mapping that notes which tensor was read last: the one at which a target failed.

    Args:
        tensors: What it holds.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.last_read: str | None = None
        self.tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        self.last_read = name
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Return pairs; a pair counts as read when it is handed out."""
        return _NotedItems(self)

    def note(self, name: str) -> None:
        """Note the tensor that is read now."""
        self.last_read = name

    def note_each(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield pairs, noting each."""
        for name, tensor in self.tensors.items():
            self.last_read = name
            yield name, tensor


class _NotedItems(ItemsView[str, "torch.Tensor"]):
    """The pairs of `NotedTensors`; Python's own view makes two calls for each."""

    _mapping: NotedTensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._mapping.note_each()


def _copied(tensor: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
    """Copy to a tensor, byte by byte where both are bool, and return it.

    Of a bool whose byte is neither 0 nor 1 torch's copy makes 1: other bytes than were proven.
    """
    plain = type(tensor) in PLAIN_TYPES and type(staged) in PLAIN_TYPES
    if plain and tensor.dtype is staged.dtype is torch.bool:
        tensor.view(torch.uint8).copy_(staged.view(torch.uint8))
        return tensor
    return tensor.copy_(staged)


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.bool and type(tensor) in PLAIN_TYPES:
        return tensor.view(torch.uint8).clone().view(torch.bool)
    return tensor.clone()


def _overwrite(tensor: torch.Tensor, staged: torch.Tensor) -> None:
    # What was made in inference mode can be written to in that mode only; others in any.
    with torch.inference_mode():
        _copied(tensor, staged)


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise unless all of a tensor's elements are there: it could be neither read nor written."""
    if lacks_memory(tensor):
        raise SchemaError(f"{name!r} is {_NO_MEMORY}", piece=name)


def _changed(name: str, tensor: torch.Tensor, staged: torch.Tensor) -> SchemaError:
    return SchemaError(
        f"{name!r} has shape {list(tensor.shape)} by now, the update has {list(staged.shape)}",
        piece=name,
    )


def as_target(
    model: nn.Module | Mapping[str, torch.Tensor] | WeightTarget, commit: CommitMode
) -> WeightTarget:
    """Return a target for what a user hands in: a module, a mapping, or a target."""
    if isinstance(model, torch.nn.Module):
        return ModuleTarget(model, commit)
    if isinstance(model, Mapping):
        return StateDictTarget(model, commit)
    if hasattr(model, "schema") and hasattr(model, "apply") and hasattr(model, "capture"):
        return model
    raise TypeError(
        f"cannot serve a {type(model).__name__}: expected a torch module, a mapping of names to "
        "tensors, or a WeightTarget with `schema`, `apply` and `capture`"
    )


def _check_writable(tensors: Mapping[str, torch.Tensor]) -> None:
    wrong = [f"{name}: {why}" for name, each in tensors.items() if (why := _unwritable(each))]
    if not wrong:
        return
    listed = "\n  ".join(wrong[:MAX_LISTED])
    more = f"\n  ... and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
    raise SchemaError(
        f"{len(wrong)} of {len(tensors)} tensors cannot take an update; make them plain ones:\n"
        f"  {listed}{more}",
        mismatches=wrong[:MAX_LISTED],
        piece=wrong[0].partition(": ")[0],
    )


def _unwritable(tensor: torch.Tensor) -> str | None:
    """Return why nothing can be written to a tensor; None if it can."""
    if is_lazy(tensor):
        return "not initialized yet (lazy)"
    if tensor.is_meta:
        return "on the meta device, without memory"
    if tensor.is_quantized:
        return f"quantised ({tensor.dtype})"
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    if type(tensor) not in PLAIN_TYPES and _only_wraps(tensor):
        return f"a {type(tensor).__name__}, which wraps others and has no memory of its own"
    return _amiss_in_memory(tensor)


def _amiss_in_memory(tensor: torch.Tensor) -> str | None:
    if _overlaps_itself(tensor):
        return "expanded: several of its elements are one"
    return _NO_MEMORY if lacks_memory(tensor) else None


_NO_MEMORY = "without all of its memory: its storage was freed or cut"


def _only_wraps(tensor: torch.Tensor) -> bool:
    # A DTensor does, too, and takes an update all the same.
    return not hasattr(tensor, "full_tensor") and memory_address(tensor) is None


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))
    span = 1 + sum((size - 1) * stride for size, stride in dims)
    return span < tensor.numel() or any(size > 1 and stride == 0 for size, stride in dims)
