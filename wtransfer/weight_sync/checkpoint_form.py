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
from wtransfer.weight_sync.storages import (
    covered_nbytes,
    group_storages,
    memory_of,
    merged,
    num_bytes,
    only_tensors,
    spans_of,
    unwrap,
)
from wtransfer.weights import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    Form: TypeAlias = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
    """Names and tensors of a model -> names and views of the form on the wire."""

OWN_FORM = "form=dict sends a model's own names and shapes"
"""Advice for a trainer whose workers have the form of its model."""
KEEPS = (
    "a form keeps every element, in its dtype; weights that are to be cast, cut or padded are so "
    "before: publish a mapping of such tensors, without form="
)
"""What a form may do, and advice for what it may not."""
QUANTISING = "transformers.integrations."
"""Where transformers has its conversions of quantised weights."""
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


class ModuleForm:
    """A module's parameters and persistent buffers in the form on the wire.

    Args:
        module: The model. By default wrappers are taken off (``torch.compile``,
            ``DistributedDataParallel``, PEFT), so that trainer and worker agree on names whichever
            of them is wrapped; models of transformers have the form that ``save_pretrained``
            writes, and all others are their own form.
        form: Another form, of the names and tensors of ``state_dict()``.
    """

    def __init__(self, module: nn.Module, form: Form | None = None) -> None:
        self._module = module
        self._given = None if form is None else KnownForm(form)
        self._own = KnownForm(lambda tensors: _reverted(self._inner, tensors))
        self._inner: Any = module

    def formed(self) -> Formed:
        """Return the tensors as they are now.

        Raises:
            SourceError: The form cannot be had: adapters that are not merged, sharded tensors that
                would be split, a release of transformers that has changed, or as `in_form`.
        """
        if self._given is not None:
            return self._given.of(module_state(self._module))
        model, tensors = _without_adapters(unwrap(self._module))
        tensors = {_COMPILED.sub("", name): each for name, each in tensors.items()}
        if not _has_form(model):
            return Formed(tensors, [])
        for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
            tensors.pop(name, None)
        self._inner = model
        try:
            return self._own.of(tensors)
        except SourceError as error:
            error.message = f"{type(model).__name__}: {error.message}; {OWN_FORM}"
            raise


class KnownForm:
    """A form, asked again only when names, shapes or strides of the tensors are others.

    A form of views is a matter of these alone: the parts are known from the first time.

    Args:
        form: As of `in_form`.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
        # In one piece: threads ask at the same time.
        self._known: tuple[object, dict[str, Part]] | None = None

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Formed:
        """Return tensors in the form. Raises as `in_form`."""
        layout, known = _layout_of(tensors), self._known
        if known is None or known[0] != layout:
            formed = in_form(tensors, self._form)
            parts = _parts_of(tensors, formed.tensors)
            # A form that makes more than views is asked each time.
            self._known = (layout, parts) if parts.keys() == formed.tensors.keys() else None
            return formed
        with torch.no_grad():
            return Formed({name: part.of(tensors) for name, part in known[1].items()}, [])


class StreamForm:
    """The form of whole tensors that pass one after the other, such as gathered ones.

    A tensor that has passed is gone: so the parts of all are found before, on stand-ins.

    Args:
        model: The model that the tensors are of, under the names that it has for them. Of a model
            of transformers they pass in the form that ``save_pretrained`` writes, and of any other
            as they are.
    """

    def __init__(self, model: object) -> None:
        self._model = model
        self._whole: dict[str, ParamMeta] = {}
        self._parts: dict[str, list[tuple[str, Part]]] = {}
        """Name of a whole tensor -> its parts, by their names."""

    def announce(self, whole: Iterable[ParamMeta]) -> list[ParamMeta]:
        """Return the tensors of the form: parts of one tensor are neighbours.

        Args:
            whole: The tensors that will pass, in their order. The parts of equal ones are known
                from the first time.

        Raises:
            SourceError: A tensor of the form is not a part of one that passes, or as `in_form`.
        """
        announced = list(whole)
        if not _has_form(self._model):
            return announced
        by_name = {meta.name: meta for meta in announced}
        if by_name != self._whole:
            self._whole, self._parts = by_name, self._found(by_name)
        return [
            ParamMeta(name, meta.dtype, meta.shape if part.place is None else part.place[0])
            for meta in announced
            for name, part in self._parts[meta.name]
        ]

    def _found(self, whole: Mapping[str, ParamMeta]) -> dict[str, list[tuple[str, Part]]]:
        try:
            tensors = {name: _untouched(meta) for name, meta in whole.items()}
            formed = in_form(tensors, lambda each: _reverted(self._model, each)).tensors
            parts = _parts_of(tensors, formed)
            if others := [name for name in formed if name not in parts]:
                raise SourceError(
                    f"{others[0]!r} is no view of one tensor, and here they pass one after the "
                    "other; only a wtransfer.Publisher of the whole model can send it",
                    piece=others[0],
                )
        except SourceError as error:
            error.message = f"{type(self._model).__name__}: {error.message}"
            raise
        found: dict[str, list[tuple[str, Part]]] = {name: [] for name in whole}
        for name, part in parts.items():
            found[part.own].append((name, part))
        return found

    def of(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a stream in the form that was announced, by views of each tensor.

        A tensor that was announced otherwise passes as it is, for its reader to refuse.
        """
        for name, tensor in stream:
            meta, parts = self._whole.get(name), self._parts.get(name)
            if meta is None or parts is None or tensor.shape != meta.shape:
                yield name, tensor
                continue
            if any(part.place for _, part in parts):
                # Places of parts are those in a tensor without gaps.
                tensor = tensor.detach().contiguous()  # noqa: PLW2901
            for part_name, part in parts:
                yield part_name, part.of({name: tensor})


class Part(NamedTuple):
    """A tensor of a form, as a part of one of the model's."""

    own: str
    """Name of the model's."""
    place: tuple[tuple[int, ...], tuple[int, ...], int] | None
    """Shape, strides, and offset in elements; None: all of it."""

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the tensor: the model's own, or a view of it."""
        whole = tensors[self.own]
        if self.place is None:
            return whole
        shape, strides, offset = self.place
        return whole.as_strided(shape, strides, whole.storage_offset() + offset)


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
        with torch.no_grad():
            found = only_tensors(form(dict(given)))
    except Exception as error:
        raise SourceError(
            f"the form of the weights cannot be had ({type(error).__name__}: {error})"
        ) from error
    _check_whole(given, found)
    known = {id(each) for each in given.values()}
    changed = [name for name, each in found.items() if each.is_meta and id(each) not in known]
    if changed and stand_ins:
        raise SourceError(
            f"{changed[0]!r} is a part of a tensor that is sharded over ranks; publish whole "
            "tensors",
            piece=changed[0],
        )
    own = {memory_of(each) for each in given.values()}
    copied = [name for name, each in found.items() if each.numel() and memory_of(each) not in own]
    for name, each in found.items():
        if id(each) in sharded:
            found[name] = tensors[sharded[id(each)]]
    return Formed(found, copied)


def _layout_of(tensors: Mapping[str, torch.Tensor]) -> object:
    """Return all that parts depend on: equal layouts, and equal parts wherever the memory lies."""
    first: dict[object, tuple[int, int]] = {}
    rows: list[object] = []
    for number, (name, each) in enumerate(tensors.items()):
        strided = each.layout is torch.strided and not each.is_nested
        offset = int(each.storage_offset()) if strided else 0
        beside, begin = first.setdefault(memory_of(each), (number, offset))
        strides = each.stride() if strided else None
        rows.append((name, each.dtype, each.shape, strides, beside, offset - begin))
    return rows


def _untouched(meta: ParamMeta) -> torch.Tensor:
    """Return a tensor that has addresses, and no memory before it is touched.

    Raises:
        SourceError: This host has no addresses for it.
    """
    # `torch.empty` fills it where a trainer has asked torch for deterministic algorithms.
    try:
        storage = torch.UntypedStorage(meta.nbytes, device="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise SourceError(
            f"the form of {meta.name!r} cannot be had: {error}", piece=meta.name
        ) from error
    empty = torch.empty(0, dtype=meta.dtype, device="cpu")
    return empty.set_(storage).view(meta.shape)


def _parts_of(
    tensors: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> dict[str, Part]:
    """Return those tensors of a form that are parts of the model's: all, if it makes only views."""
    objects = {id(each): name for name, each in tensors.items()}
    holders = {memory_of(each): name for name, each in reversed(list(tensors.items()))}
    parts: dict[str, Part] = {}
    for name, each in found.items():
        if id(each) in objects:
            parts[name] = Part(objects[id(each)], None)
            continue
        own = holders.get(memory_of(each))
        if own is None or each.dtype != tensors[own].dtype:
            continue
        offset = int(each.storage_offset()) - int(tensors[own].storage_offset())
        parts[name] = Part(own, (tuple(each.shape), each.stride(), offset))
    return parts


def _has_form(model: object) -> bool:
    """Return whether transformers may hold a model in another form than its checkpoint's.

    A model that was dequantised as it was loaded is its own form: what transformers would write is
    quantised again.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    # Releases before 5 hold models in the form of their checkpoints.
    return (
        modeling is not None
        and hasattr(modeling, "revert_weight_conversion")
        and isinstance(model, modeling.PreTrainedModel)
        and getattr(model, "hf_quantizer", None) is None
        and not any(map(_quantises, getattr(model, "_weight_conversions", None) or ()))
    )


def _quantises(conversion: Any) -> bool:
    """Return whether the way back of one of transformers' conversions quantises."""
    return any(
        type(each).__module__.startswith(QUANTISING)
        and type(each.reverse_op).__module__.startswith(QUANTISING)
        for each in getattr(conversion, "operations", ())
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
    # The inner one first, where a wrapper has another within.
    for prefix, part in reversed(list(base.named_modules())):
        if hasattr(part, "base_layer") and hasattr(part, "merged"):
            if not part.merged and not part.disable_adapters:
                raise SourceError(
                    f"the adapter of {prefix!r} is not merged; publish between "
                    "`model.merge_adapter()` and `model.unmerge_adapter()`",
                    piece=prefix,
                )
            own = f"{prefix}.base_layer."
        elif hasattr(part, "token_adapter"):
            own = f"{prefix}.token_adapter."
        elif hasattr(part, "original_module"):
            trained = f"modules_to_save.{part.active_adapter}"
            own = f"{prefix}.{'original_module' if part.disable_adapters else trained}."
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
    """Lets transformers' form consist of views: its conversions for files end with `contiguous`."""

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
    with _Views():
        found = revert(model, dict(storages.tensors))
        tied = revert(model, ties) if ties else {}
    ordered = sorted(found, key=lambda name: place.get(memory_of(found[name]), len(place)))
    return {**{name: found[name] for name in ordered}, **tied}


def _check_whole(given: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Raise unless a form has each element of the tensors once; a copy may stand for any."""
    wanted, had = _by_memory(given), _by_memory(found)
    names = {memory_of(each): name for name, each in reversed(list(given.items()))}
    copies = {memory_of(each): name for name, each in reversed(list(found.items()))}
    lost: list[tuple[torch.dtype, int, str]] = []
    for place, tensors in wanted.items():
        parts, name = had.pop(place, []), names[place]
        if list(map(id, parts)) == list(map(id, tensors)):
            continue
        nbytes, had_nbytes = _nbytes(tensors), _nbytes(parts)
        if not parts:
            lost.append((tensors[0].dtype, nbytes, name))
            continue
        spans, had_spans = spans_of(tensors), spans_of(parts)
        covered, had_covered = num_bytes(spans), num_bytes(had_spans)
        overlap = had_nbytes - had_covered - (nbytes - covered)
        in_both = num_bytes(merged(spans, had_spans))
        if overlap > 0:
            raise _not_whole(f"has {overlap:,} bytes of {name!r} twice", name)
        if in_both > covered:
            beside = in_both - covered
            raise _not_whole(f"has {beside:,} bytes beside {name!r}, of the same memory", name)
        if in_both > had_covered or nbytes > had_nbytes:
            num_lost = max(in_both - had_covered, nbytes - had_nbytes)
            lost.append((tensors[0].dtype, num_lost, name))
    spare: Counter[torch.dtype] = Counter()
    for place, tensors in had.items():
        nbytes, covered = _nbytes(tensors), covered_nbytes(tensors)
        if nbytes > covered:
            name = copies[place]
            raise _not_whole(f"has {nbytes - covered:,} bytes of the copy {name!r} twice", name)
        spare[tensors[0].dtype] += nbytes
    _check_cast(lost, {each[0].dtype: copies[place] for place, each in reversed(had.items())})
    for dtype, nbytes, name in lost:
        spare[dtype] -= nbytes
        if spare[dtype] < 0:
            raise _not_whole(f"has lost {nbytes:,} bytes of {name!r}", name)
    doubled = +spare
    if doubled:
        name = next(
            n for n, each in found.items() if memory_of(each) in had and each.dtype in doubled
        )
        raise _not_whole(f"has {doubled.total():,} bytes too many, as copies, first {name!r}", name)


def _check_cast(
    lost: Sequence[tuple[torch.dtype, int, str]], copied: Mapping[torch.dtype, str]
) -> None:
    """Raise if copies have a dtype that nothing has for which they may stand."""
    dtypes = {dtype for dtype, _, _ in lost}
    cast = [(dtype, name) for dtype, name in copied.items() if dtype not in dtypes]
    if cast and dtypes:
        dtype, name = cast[0]
        told = ", ".join(sorted(map(str, dtypes)))
        raise _not_whole(f"has {name!r} as a copy of {dtype}, in place of {told}", name)


def _not_whole(text: str, name: str) -> SourceError:
    return SourceError(f"the form {text}; {KEEPS}", piece=name)


def _by_memory(tensors: Mapping[str, torch.Tensor]) -> dict[object, list[torch.Tensor]]:
    """Return the tensors in each memory, those of tied names once."""
    found: dict[object, list[torch.Tensor]] = {}
    for each in group_storages(tensors).tensors.values():
        found.setdefault(memory_of(each), []).append(each)
    return found


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    # Of a sparse tensor torch states no bytes.
    return sum(each.numel() * each.itemsize for each in tensors)
