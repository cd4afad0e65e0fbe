"""Targets of a worker's weights: a module, or a state dict."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from wtransfer.errors import SchemaError, SourceError
from wtransfer.transport.tensors import PLAIN_TYPES, byte_view, lacks_memory
from wtransfer.weight_sync.checkpoint_form import ModuleForm
from wtransfer.weight_sync.storages import (
    Storages,
    covered_nbytes,
    group_storages,
    memory_address,
    memory_of,
    num_holders,
    only_tensors,
    stands_alone,
    unwrap,
)
from wtransfer.weight_sync.worker.schema import MAX_LISTED
from wtransfer.weights import TensorSpec, WeightTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

# Most of a model's tensors have the form of others.
_spec = functools.lru_cache(maxsize=4096)(TensorSpec)

SMALL_NBYTES = 16 << 10
"""Tensors up to this size are copied, also by ``commit="adopt"``."""
CommitMode = Literal["adopt", "copy"]
"""How an update is applied: by pointing parameters at the staged memory, or by copying."""


class StateDictTarget:
    """A mapping of names to tensors, written so that the tensor objects stay the same.

    The mapping is read anew at every call: its owner may put other tensors in.

    Args:
        tensors: Name -> tensor. Names of the same storage are written once.
        commit: ``"adopt"`` points a tensor at the staged memory, which costs nothing and needs no
            second copy, but changes its address; tensors of up to 16 KiB are copied. ``"copy"``
            writes into the existing memory: for models
            whose addresses are in use (by a captured graph, an optimizer's flat buffer). An update
            must not lie in the model's own memory, ever.
            Tensors that cannot adopt (on a device, not contiguous, shared with another process,
            parts of a flat buffer, made in inference mode) are copied either way, and so are
            tensors whose memory anything else in this process holds: a view of it computes with
            the new weights, too. Staged tensors that cannot be adopted (of another dtype or device,
            parts of a larger buffer) are copied to fresh memory.

    Raises:
        SchemaError: Tensors that cannot be written to: on the meta device, lazy, expanded,
            sparse, quantised, wrappers of others, freed ones.

    Cost: about 5 us per tensor, beside the copies.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], commit: CommitMode = "adopt") -> None:
        if commit not in ("adopt", "copy"):
            raise ValueError(f"commit is {commit!r}, expected 'adopt' or 'copy'")
        self._mapping = tensors
        self._commit = commit
        self._adopted: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """Memory that tensors were pointed to: its address -> versions' tensors in it."""
        self._storages()

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return name -> tensor that an update writes, the objects themselves."""
        return only_tensors(self._mapping)

    def _storages(self) -> Storages:
        tensors = self.own_tensors()
        _check_writable(tensors)
        return group_storages(tensors)

    def schema(self) -> Mapping[str, TensorSpec]:
        """Return one spec per storage, under its first name."""
        storages = self._storages()
        return {
            name: _spec(tensor.dtype, tuple(tensor.shape), tuple(storages.ties.get(name, ())))
            for name, tensor in storages.tensors.items()
        }

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write every given tensor, by its name or an alias.

        Raises:
            KeyError: A name that the schema does not have.
            SchemaError: A tensor has another shape by now, or no memory to write to.
        """
        # The caller may be in inference mode; a new tensor must not be bound to it.
        with torch.inference_mode(mode=False), torch.no_grad():
            storages = self._storages()
            first_names = {tied: name for name, ties in storages.ties.items() for tied in ties}
            self._adopted = self._still_adopted(storages)
            taken: set[int] = set()
            for name, staged in tensors.items():
                first_name = first_names.get(name, name)
                tensor = storages.tensors[first_name]
                if staged.shape != tensor.shape:
                    raise SchemaError(
                        f"{name!r} has shape {list(tensor.shape)} by now, the update has "
                        f"{list(staged.shape)}",
                        piece=name,
                    )
                if _is_at(tensor, staged):
                    continue  # It stays, and has nothing to be written.
                if self._points(first_name, storages):
                    self._point(first_name, storages, staged, taken)
                else:
                    self._move_versions(tensor)
                    _overwrite(tensor, staged)
            # `parametrize.cached()` keeps weights that were computed from the old ones.
            parametrize._cache.clear()  # noqa: SLF001

    def present(self) -> Mapping[str, torch.Tensor]:
        """Return the present tensors as they lie, to be read before the next `apply`."""
        return {name: tensor.detach() for name, tensor in self._storages().tensors.items()}

    def capture(self) -> Mapping[str, torch.Tensor]:
        """Return the present tensors: copies, or the memory that no update writes into."""
        with torch.inference_mode(mode=False), torch.no_grad():
            storages = self._storages()
            self._adopted = self._still_adopted(storages)
            found: dict[str, torch.Tensor] = {}
            for name, tensor in storages.tensors.items():
                points, own = self._points(name, storages), tensor.detach()
                found[name] = own if points else _copied(torch.empty_like(own), own)
                if points:
                    # As after an update with the capture, which then does not count as a holder.
                    self._point(name, storages, own, set())
        return found

    def _still_adopted(self, storages: Storages) -> dict[int, list[weakref.ref[torch.Tensor]]]:
        if not self._adopted:
            return {}
        found = map(memory_address, storages.tensors.values())
        return {each: self._adopted[each] for each in found if each in self._adopted}

    def _points(self, name: str, storages: Storages) -> bool:
        """Return True if an update points a tensor to staged memory; False: it is written."""
        if self._commit == "copy":
            return False
        tensor = storages.tensors[name]
        is_adopted = memory_address(tensor) in self._adopted
        # To copy a small tensor takes no longer than to point it elsewhere.
        if not is_adopted and (tensor.nbytes <= SMALL_NBYTES or not stands_alone(tensor)):
            return False
        # Any other holder of the memory would be left behind, with the old weights.
        return num_holders(tensor) == len({id(each) for each in _named(name, storages)})

    def _point(self, name: str, storages: Storages, staged: torch.Tensor, taken: set[int]) -> None:
        """Point a tensor and its ties at the memory of a staged one, of which a version consists.

        The memory gets a storage of its own, so that its holders are those of the model.
        """
        new = _whole(staged, storages.tensors[name], taken)
        if new.data_ptr() == staged.data_ptr():
            # Before the tensors: an interrupt in between must not lead to a write there.
            self._adopted.setdefault(new.data_ptr(), []).append(weakref.ref(staged))
        for each in _named(name, storages):
            each.data = new

    def _move_versions(self, tensor: torch.Tensor) -> None:
        """Copy the versions that consist of a tensor's memory elsewhere: it will be written to."""
        address = memory_address(tensor)
        if address not in self._adopted:
            return
        for each in self._adopted[address]:
            version = each()
            if version is not None:
                version.data = _copied(torch.empty_like(version), version)
        del self._adopted[address]


class ModuleTarget(StateDictTarget):
    """A module's parameters and persistent buffers.

    Args:
        module: The serving model; updates have the form of its checkpoint, and wrappers
            (``torch.compile``, ``DistributedDataParallel``, PEFT) are looked through.
        commit: As in `StateDictTarget`.

    Raises:
        SchemaError: As for `StateDictTarget`; also a module whose ``state_dict()`` has entries
            that no update reaches (extra state, packed weights, copies that a hook makes), or
            whose weights are folded into compiled code.
    """

    def __init__(self, module: nn.Module, commit: CommitMode = "adopt") -> None:
        self._module = module
        self._form = ModuleForm(module)
        super().__init__({}, commit)
        _check_reached(module)

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return name -> parameter or buffer in the checkpoint's form, or a view of a part of one.

        Raises:
            SchemaError: The module has no such form, or is folded into compiled code.
        """
        _check_not_folded()
        try:
            tensors, copied = self._form.formed()
        except SourceError as error:
            raise SchemaError(error.message, piece=error.piece) from error
        if copied:
            raise _schema_error(
                f"{len(copied)} of {len(tensors)} tensors of the checkpoint's form are no parts of "
                "the module's; give the session a WeightTarget, or a mapping of what is to be "
                "written, as dict(module.named_parameters())",
                [f"{name}: a copy that the conversion makes" for name in copied],
            )
        return tensors

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write every given tensor, then call the hooks that ``load_state_dict`` would have called.

        The hooks are those of ``Module.register_load_state_dict_post_hook``: a module derives its
        values from the present weights, also after a commit that was undone.

        Raises:
            KeyError: A name that the schema does not have.
            SchemaError: A tensor has another shape by now, or no memory to write to.
        """
        super().apply(tensors)
        with torch.inference_mode(mode=False), torch.no_grad():
            for part in unwrap(self._module).modules():
                for hook in getattr(part, "_load_state_dict_post_hooks", {}).values():
                    hook(part, _IncompatibleKeys([], []))


class NotedTensors(Mapping[str, torch.Tensor]):
    """A read-only mapping that notes the tensor read last: the one at which a target failed.

    Args:
        tensors: The tensors.
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


def _named(name: str, storages: Storages) -> list[torch.Tensor]:
    return [storages.tensors[name], *storages.ties.get(name, {}).values()]


def _whole(staged: torch.Tensor, like: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """Return a staged tensor in the dtype of the model's, alone in its memory."""
    # An engine may deliver one tensor under two names; adopted twice, it would tie them.
    is_taken = staged.data_ptr() in taken and staged.numel() > 0
    if is_taken or staged.dtype is not like.dtype or not stands_alone(staged):
        fresh = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        staged = _copied(fresh, staged)
    elif staged.numel():
        # A storage of its own: an in-place move of the model's (`share_memory`, sending it to
        # another process) must not move the version that a rollback would apply.
        staged = torch.from_numpy(byte_view(staged)).view(staged.dtype).view(staged.shape)
    taken.add(staged.data_ptr())
    return staged


def _is_at(tensor: torch.Tensor, staged: torch.Tensor) -> bool:
    """Return whether a staged tensor of the same shape is the very memory of the model's."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.data_ptr() == staged.data_ptr()
        and tensor.dtype is staged.dtype
        and tensor.stride() == staged.stride()
    )


def _overwrite(tensor: torch.Tensor, staged: torch.Tensor) -> None:
    # A tensor that was made in inference mode can be written to in that mode only.
    with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
        _copied(tensor, staged)


def _copied(tensor: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
    """Copy to a tensor, byte by byte where both are bool, and return it.

    Torch copies a bool whose byte is neither 0 nor 1 as 1: other bytes than were verified.
    """
    both_bool = tensor.dtype is staged.dtype is torch.bool
    if both_bool and type(tensor) in PLAIN_TYPES and type(staged) in PLAIN_TYPES:
        tensor.view(torch.uint8).copy_(staged.view(torch.uint8))
        return tensor
    return tensor.copy_(staged)


def as_target(
    model: nn.Module | Mapping[str, torch.Tensor] | WeightTarget, commit: CommitMode
) -> WeightTarget:
    """Return a target for a user's argument: a module, a mapping, or a target."""
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
    if wrong:
        raise _schema_error(
            f"{len(wrong)} of {len(tensors)} tensors cannot take an update; make them plain ones",
            wrong,
        )


def _check_reached(module: nn.Module) -> None:
    """Raise unless writes to the tensors of a module's state reach the module."""
    state, again = (unwrap(module).state_dict(keep_vars=True) for _ in range(2))
    wrong = [
        f"{name}: {why}"
        for name, each in state.items()
        if (why := _unreached(each, again.get(name)))
    ]
    if wrong:
        raise _schema_error(
            f"no update reaches {len(wrong)} of {len(state)} entries of the module's state_dict(), "
            "and it would compute with what it has there; give the session a WeightTarget that "
            "loads them, or a mapping of what shall be written, as dict(module.named_parameters())",
            wrong,
        )


def _unreached(entry: object, again: object) -> str | None:
    """Return why no update reaches an entry of a state; None if one does.

    Args:
        entry: The state's entry under a name.
        again: The entry of a second ``state_dict()`` under that name.
    """
    if entry is again and isinstance(entry, torch.Tensor):
        return None
    if not isinstance(entry, torch.Tensor) or not isinstance(again, torch.Tensor):
        return None if entry is None else f"a {type(entry).__name__}, and only tensors are sent"
    if not entry.numel() or memory_of(entry) == memory_of(again):
        return None
    return "a copy that state_dict() makes (extra state, or in a hook)"


def _check_not_folded() -> None:
    # Not imported here: the import is slow, and without it torch has compiled nothing.
    config = sys.modules.get("torch._inductor.config")
    if getattr(config, "freezing", False):
        raise SchemaError(
            "torch._inductor.config.freezing is set: compiled code would compute with the weights "
            "of the time when it was compiled; unset it (TORCHINDUCTOR_FREEZING) where weights are "
            "updated"
        )


def _schema_error(text: str, wrong: list[str]) -> SchemaError:
    listed = "\n  ".join(wrong[:MAX_LISTED])
    more = f"\n  ... and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
    return SchemaError(
        f"{text}:\n  {listed}{more}",
        mismatches=wrong[:MAX_LISTED],
        piece=wrong[0].partition(": ")[0],
    )


def _unwritable(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be written to; None if it can."""
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
    if _overlaps_itself(tensor):
        return "expanded: several of its elements are one"
    return _NO_MEMORY if lacks_memory(tensor) else None


_NO_MEMORY = "without all of its memory: its storage was freed or cut"


def _only_wraps(tensor: torch.Tensor) -> bool:
    """Return whether writes to a tensor go elsewhere: a DTensor, a FakeTensor, other wrappers."""
    # Asked first: torch warns where the address of a FakeTensor is read.
    return tensor.untyped_storage().device.type == "meta" or memory_address(tensor) is None


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return False
    reached = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        # Dimensions that lie beside each other share nothing; others are looked at in full.
        if size > 1 and stride < reached:
            return covered_nbytes([tensor]) < tensor.nbytes
        reached += stride * (size - 1)
    return False
