"""Sources in the form of a quantised checkpoint: weights are quantised as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from wtransfer.checkpoint.quantisation import QuantisedTensor, read_quantised, scales_of
from wtransfer.errors import SourceError
from wtransfer.weights import ParamMeta

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from wtransfer.checkpoint.quantisation import QuantisedForm, Scheme
    from wtransfer.weights import WeightSource


def quantised(source: WeightSource, base: str | os.PathLike[str]) -> WeightSource:
    """Return a source in the form of a checkpoint: itself, where that is not quantised.

    Args:
        source: The weights in training.
        base: Folder of the checkpoint that the workers were started with.

    Raises:
        SourceError: No such checkpoint, or one that cannot be made of weights alone.
    """
    found = read_quantised(base)
    return source if found is None else QuantisedSource(source, *found)


class QuantisedSource:
    """Quantises the weights that a checkpoint has quantised; all others travel as they are.

    Scales come before their weight, which is computed as an engine reads it into its memory: beside
    the trainer's weights there are the scales of one of them, and the part that is in work. A
    weight that is sharded over ranks is gathered before.

    Args:
        source: The weights in training.
        scheme: The checkpoint's.
        forms: Name -> form of each weight that the checkpoint has quantised.
    """

    def __init__(
        self, source: WeightSource, scheme: Scheme, forms: Mapping[str, QuantisedForm]
    ) -> None:
        self.scheme = scheme.name
        """Canonical text of the scheme, for the plan."""
        self.source = source
        """The weights in training."""
        self._made = scheme
        self._forms = forms

    @property
    def tied_names(self) -> Sequence[str]:
        """Further names of tensors that travel."""
        return getattr(self.source, "tied_names", ())

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Configuration of the model in training."""
        return getattr(self.source, "config", None)

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Name, dtype and shape of what travels.

        Raises:
            SourceError: The weights do not fit the checkpoint.
        """
        found: list[ParamMeta] = []
        num_fitting = 0
        metadata = self.source.metadata
        names = {meta.name for meta in metadata}
        for meta in metadata:
            form = self._forms.get(meta.name)
            num_fitting += form is not None
            if form and meta.dtype == form.weight.dtype and form.scale.name not in names:
                raise SourceError(
                    f"{meta.name!r} is quantised already in the model, which lacks its scale "
                    f"{form.scale.name!r}",
                    piece=form.scale.name,
                )
            if form is None or meta.dtype == form.weight.dtype:
                found.append(meta)
                continue
            _check(meta, form)
            # With owners and mesh: they tell that ranks must take part.
            ranks = (meta.owners, meta.mesh, meta.placements)
            found += [ParamMeta(each.name, each.dtype, each.shape, *ranks) for each in form]
        if self._forms and not num_fitting:
            raise SourceError(
                f"the model has none of the {len(self._forms)} weights that the checkpoint has "
                f"quantised, first {min(self._forms)!r}; its names can be mapped to those of the "
                "checkpoint, Publisher(form=...)",
                piece=min(self._forms),
            )
        return found

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, quantised ones in memory of their own."""
        for name, each in self.iter_unread():
            yield name, each if isinstance(each, torch.Tensor) else each.load()
            # Freed before the next is made: a gathered tensor may be large.
            del each

    def iter_unread(self) -> Iterator[tuple[str, Any]]:
        """Yield as `iter_full`; in place of a quantised weight an object that computes it."""
        tensors: Iterator[tuple[str, Any]]
        tensors = getattr(self.source, "iter_unread", self.source.iter_full)()
        for name, each in tensors:
            form = self._forms.get(name)
            if form is None or each.dtype == form.weight.dtype:
                yield name, each
            else:
                yield from self._quantised(each, form)
            del each

    def _quantised(self, each: Any, form: QuantisedForm) -> Iterator[tuple[str, Any]]:
        weight = each if isinstance(each, torch.Tensor) else each.load()
        scale = scales_of(weight, self._made, form.scale)
        yield form.scale.name, scale
        yield form.weight.name, QuantisedTensor(weight, scale, self._made)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same as `iter_full`: quantised weights are whole."""
        return self.iter_full()

    def stop_waiting(self) -> None:
        """End a pass that waits for other ranks."""
        stop_waiting = getattr(self.source, "stop_waiting", None)
        if stop_waiting is not None:
            stop_waiting()

    def reading(self, source: WeightSource) -> QuantisedSource:
        """Return the same of another source of the weights, as of one that gathers them."""
        return QuantisedSource(source, self._made, self._forms)


def _check(meta: ParamMeta, form: QuantisedForm) -> None:
    if not meta.dtype.is_floating_point or meta.dtype.itemsize == 1:
        raise SourceError(
            f"{meta.name!r} is {meta.dtype} in the model; only floats of 16 bits and more are "
            "quantised",
            piece=meta.name,
        )
    if tuple(meta.shape) != tuple(form.weight.shape):
        raise SourceError(
            f"{meta.name!r} has shape {list(meta.shape)} in the model and "
            f"{list(form.weight.shape)} in the checkpoint; its form can be mapped, "
            "Publisher(form=...)",
            piece=meta.name,
        )
