"""Policies in the form of their checkpoints, which vLLM has.

TRL hands over the tensors of its model one by one, by the model's names. transformers may hold them
in another form: the experts of a layer in one tensor.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from trl.generation.vllm_generation import VLLMGeneration
from wtransfer import ParamMeta
from wtransfer.weight_sync.checkpoint_form import StreamForm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def replace() -> None:
    """Replace the pass over a policy that TRL announces and then sends."""
    VLLMGeneration._iter_named_params = _iter_named_params  # noqa: SLF001


def form_of(model: torch.nn.Module) -> StreamForm:
    """Return the form of the model within a trainer's wrappers, whose names TRL takes off."""
    return StreamForm(next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None))


def metadata_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[ParamMeta]:
    """Return names, dtypes and shapes of tensors, none of which is kept."""
    return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in tensors]


_of_trl = inspect.unwrap(VLLMGeneration._iter_named_params)  # noqa: SLF001


@functools.wraps(_of_trl)
def _iter_named_params(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if self._weight_metadata is not None:
        yield from self._stream_form.of(_of_trl(self))
        return
    # TRL's first pass: it announces what is yielded. The pass ends before an error is raised, for
    # adapters are merged until then.
    whole = metadata_of(_of_trl(self))
    self._stream_form = form_of(self.model)
    for meta in self._stream_form.announce(whole):
        yield meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")
