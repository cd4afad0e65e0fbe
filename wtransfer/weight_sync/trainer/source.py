"""Sources of a trainer's weights: a module, or a state dict."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch

from wtransfer.transport.tensors import PLAIN_TYPES
from wtransfer.weight_sync.checkpoint_form import Formed, KnownForm, ModuleForm
from wtransfer.weight_sync.storages import group_storages, only_tensors, unwrap
from wtransfer.weight_sync.trainer.quantised import quantised
from wtransfer.weights import ParamMeta, WeightSource

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from wtransfer.weight_sync.checkpoint_form import Form

logger = logging.getLogger(__name__)


class StateDictSource:
    """A mapping of names to tensors, read anew in every round.

    Args:
        tensors: Name -> tensor. Names of the same storage are sent once, under the first name.
        form: Returns the names and views that travel. Default: the tensors as they are.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], form: Form | None = None) -> None:
        self._mapping = tensors
        self._form = None if form is None else KnownForm(form)
        self._told_of_copies = False

    def _formed(self) -> Formed:
        tensors = only_tensors(self._mapping)
        return Formed(tensors, []) if self._form is None else self._form.of(tensors)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors, copied = self._formed()
        if copied and not self._told_of_copies:
            self._told_of_copies = True
            nbytes = sum(tensors[name].nbytes for name in copied)
            logger.warning(
                "the form of the weights copies %d of %d tensors in every round (%s bytes, first "
                "%r); a form of views costs no memory",
                *(len(copied), len(tensors), f"{nbytes:,}", copied[0]),
            )
        return tensors

    @property
    def tied_names(self) -> list[str]:
        """Further names of tensors that travel, under which they do not."""
        ties = group_storages(self._tensors()).ties.values()
        return [name for tied in ties for name in tied]

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Name, dtype and whole shape of every tensor; of a DTensor also its sharding."""
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape), *_sharding(tensor))
            for name, tensor in group_storages(self._tensors()).tensors.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, the trainer's own or gathered ones.

        A sharded tensor is gathered, which every rank must take part in.
        """
        for name, tensor in group_storages(self._tensors()).tensors.items():
            gather = getattr(tensor, "full_tensor", None)
            yield name, gather() if gather else tensor

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parts."""
        for name, tensor in group_storages(self._tensors()).tensors.items():
            to_local = getattr(tensor, "to_local", None)
            yield name, to_local() if to_local else tensor


class ModuleSource(StateDictSource):
    """A module's parameters and persistent buffers, tied storage once.

    Args:
        module: The model in training; wrappers (``torch.compile``, ``DistributedDataParallel``,
            PEFT) are looked through.
        form: As in `StateDictSource`. Default: the form of the model's checkpoint.
    """

    def __init__(self, module: nn.Module, form: Form | None = None) -> None:
        super().__init__({})
        self._module = module
        self._module_form = ModuleForm(module, form)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Configuration as transformers saves it; None: the model is none of transformers."""
        config: Any = getattr(unwrap(self._module), "config", None)
        if not hasattr(config, "to_diff_dict"):
            return None
        try:
            found: Mapping[str, Any] = config.to_diff_dict()
        except Exception:
            # A class that cannot be made without arguments has no defaults to leave out.
            found = config.to_dict()
        return found

    def _formed(self) -> Formed:
        return self._module_form.formed()


def _has_metadata(source: object) -> bool:
    # Not read where the name alone tells: reading may cost a pass over all tensors.
    return inspect.getattr_static(source, "metadata", None) is not None or hasattr(
        source, "metadata"
    )


def _sharding(tensor: torch.Tensor) -> tuple[tuple[int, ...] | None, Any, tuple[Any, ...] | None]:
    """Return owners, mesh and placements of a DTensor; three None for a whole tensor."""
    if type(tensor) in PLAIN_TYPES or not hasattr(tensor, "full_tensor"):
        return None, None, None
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tuple(tensor.placements)  # type: ignore[attr-defined]
    return tuple(mesh.mesh.flatten().tolist()), mesh, placements


def as_source(
    model: nn.Module | Mapping[str, torch.Tensor] | WeightSource,
    form: Form | None = None,
    base: str | os.PathLike[str] | None = None,
) -> WeightSource:
    """Return a source for a user's argument: a module, a mapping, or a source.

    Raises:
        TypeError: None of these; a form that is no function, or one of a source, which yields the
            form that it wants.
        SourceError: The checkpoint `base` is none, or quantised in a way that cannot be made.
    """
    source = _source_of(model, form)
    return source if base is None else quantised(source, base)


def _source_of(
    model: nn.Module | Mapping[str, torch.Tensor] | WeightSource, form: Form | None
) -> WeightSource:
    from collections.abc import Mapping as AnyMapping

    if form is not None and not callable(form):
        raise TypeError(f"form is {form!r:.100}, expected a function of names and tensors")
    if isinstance(model, torch.nn.Module):
        return ModuleSource(model, form)
    if isinstance(model, AnyMapping):
        return StateDictSource(model, form)
    if hasattr(model, "iter_full") and _has_metadata(model):
        if form is not None:
            raise TypeError(
                f"form= is for a module or a mapping; a {type(model).__name__} yields what travels"
            )
        return model
    raise TypeError(
        f"cannot publish a {type(model).__name__}: expected a torch module, a mapping of names to "
        "tensors, or a WeightSource with `metadata` and `iter_full`"
    )
