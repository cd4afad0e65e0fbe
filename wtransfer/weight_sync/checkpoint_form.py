"""Form of a model's weights on the wire: names and shapes of its checkpoint.

A model in training may hold its weights in another form than its checkpoint: transformers keeps the
experts of a layer in one tensor where checkpoints, and serving engines with them, have one tensor
per expert; wrappers add prefixes. The wire has the checkpoint's form, and each side keeps its own:
the tensors of the form are views of the model's memory, read by a trainer and written by a worker.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from wtransfer.errors import SourceError
from wtransfer.weight_sync.storages import group_storages, memory_of, only_tensors, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    Form: TypeAlias = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
    """Names and tensors of a model -> names and views of the form on the wire."""

OWN_FORM = "form=dict sends a model's own names and shapes"
"""Advice for a trainer whose workers have the form of its model."""
_COMPILED = re.compile(r"\b_orig_mod\.")
"""Part of names that compiled modules within a model add."""


class Formed(NamedTuple):
    """Tensors in the form on the wire."""

    tensors: dict[str, torch.Tensor]
    """Name -> a tensor of the model, or a view of one."""
    copied: list[str]
    """Names of tensors that are copies instead: read by a trainer, of no use to a worker."""


def module_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> parameter or persistent buffer, the objects themselves.

    ``torch.compile`` and ``DistributedDataParallel`` around the module are taken off.
    """
    return only_tensors(unwrap(module).state_dict(keep_vars=True))


def module_form(module: nn.Module) -> Formed:
    """Return a module's parameters and persistent buffers in the form of its checkpoint.

    Wrappers are taken off (``torch.compile``, ``DistributedDataParallel``, PEFT), so that
    trainer and worker agree on names whichever of them is wrapped. Models of transformers have the
    form that ``save_pretrained`` writes; all others are their own form.

    Raises:
        SourceError: The form of the checkpoint cannot be had: adapters that are not merged,
            sharded tensors that would be split, a release of transformers that has changed.
    """
    model, tensors = _without_adapters(unwrap(module))
    tensors = {_COMPILED.sub("", name): each for name, each in tensors.items()}
    modeling = sys.modules.get("transformers.modeling_utils")
    # Releases before 5 hold models in the form of their checkpoints.
    if (
        modeling is None
        or not hasattr(modeling, "revert_weight_conversion")
        or not isinstance(model, modeling.PreTrainedModel)
        or getattr(model, "hf_quantizer", None) is not None
    ):
        return Formed(tensors, [])
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        tensors.pop(name, None)
    try:
        return in_form(tensors, lambda each: _reverted(model, each))
    except SourceError as error:
        error.message = f"{type(model).__name__}: {error.message}; {OWN_FORM}"
        raise


def in_form(tensors: Mapping[str, torch.Tensor], form: Form) -> Formed:
    """Return tensors in a form, of which no element is lost and none is there twice.

    Args:
        tensors: Name -> tensor.
        form: Returns names and views; other names of one tensor stand for the same memory.

    Raises:
        SourceError: The form raised, or has lost or doubled a part of a tensor, or changes a
            sharded tensor, which would be gathered for that.
    """
    # A sharded tensor can be renamed. Any operation would be a collective on one rank alone.
    stand_ins = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in tensors.items()
        if hasattr(each, "full_tensor")
    }
    sharded = {id(each): name for name, each in stand_ins.items()}
    given = {**tensors, **stand_ins}
    try:
        with torch.no_grad(), _Views():
            found = only_tensors(form(dict(given)))
    except Exception as error:
        raise SourceError(
            f"the form of the weights cannot be had ({type(error).__name__}: {error})"
        ) from error
    _check_whole(given, found)
    if changed := [
        name for name, each in found.items() if each.is_meta and id(each) not in sharded
    ]:
        raise SourceError(
            f"{changed[0]!r} is a part of a tensor that is sharded over ranks; publish whole "
            "tensors",
            piece=changed[0],
        )
    own = {memory_of(each) for each in given.values()}
    return Formed(
        {
            name: tensors[sharded[id(each)]] if id(each) in sharded else each
            for name, each in found.items()
        },
        [name for name, each in found.items() if memory_of(each) not in own],
    )


def _without_adapters(model: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the model inside PEFT's, and its state without adapters, by the model's own names.

    Raises:
        SourceError: The adapters are not merged: the model computes with more than its weights.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model, module_state(model)
    if model.active_peft_config.is_prompt_learning:
        raise SourceError(f"{model.peft_type} adapts prompts, which are no weights of the model")
    base = model.get_base_model()
    tensors = module_state(base)
    for prefix, part in base.named_modules():
        if hasattr(part, "base_layer") and hasattr(part, "merged"):
            if not part.merged and not part.disable_adapters:
                raise SourceError(
                    f"the adapter of {prefix!r} is not merged; publish between "
                    "`model.merge_adapter()` and `model.unmerge_adapter()`",
                    piece=prefix,
                )
            own = f"{prefix}.base_layer."
        elif hasattr(part, "original_module") and hasattr(part, "modules_to_save"):
            own = f"{prefix}.modules_to_save.{part.active_adapter}."
        else:
            continue
        inside = {
            name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{prefix}.")
        }
        tensors |= {
            f"{prefix}.{name.removeprefix(own)}": each
            for name, each in inside.items()
            if name.startswith(own)
        }
    return base, tensors


class _Views(TorchFunctionMode):
    """Lets a form consist of views: `contiguous`, with which conversions for files end, copies."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _reverted(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what transformers would write, in the order of the model, tied names last.

    transformers sorts by name. The first name of tied ones is the one that the model lists first.
    """
    storages = group_storages(tensors)
    ties = {name: each for tied in storages.ties.values() for name, each in tied.items()}
    revert = sys.modules["transformers.modeling_utils"].revert_weight_conversion
    place = {memory_of(each): number for number, each in enumerate(storages.tensors.values())}
    found = revert(model, dict(storages.tensors))
    ordered = sorted(found, key=lambda name: place.get(memory_of(found[name]), len(place)))
    return {**{name: found[name] for name in ordered}, **(revert(model, ties) if ties else {})}


def _check_whole(given: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Raise unless a form has each element of the tensors once; a copy may stand for any."""
    wanted, had = _elements(given), _elements(found)
    names = {memory_of(each): name for name, each in reversed(list(given.items()))}
    spare = sum(number for place, number in had.items() if place not in wanted)
    for place, number in wanted.items():
        missing = number - had[place]
        spare -= max(0, missing)
        if missing < 0 or spare < 0:
            what = "has twice" if missing < 0 else "has lost"
            raise SourceError(
                f"the form {what} {abs(missing):,} elements of {names[place]!r}", piece=names[place]
            )


def _elements(tensors: Mapping[str, torch.Tensor]) -> Counter[object]:
    """Return the number of elements in each memory, those of tied names once."""
    found: Counter[object] = Counter()
    for each in group_storages(tensors).tensors.values():
        found[memory_of(each)] += each.numel()
    return found
