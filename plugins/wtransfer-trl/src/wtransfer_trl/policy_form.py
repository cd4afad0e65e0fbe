"""Policies in the form of their checkpoints, which vLLM has.

TRL hands over the tensors of its model one by one, by the model's names. transformers may hold them
in another form: the experts of a layer in one tensor.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from trl.generation.vllm_generation import VLLMGeneration
from wtransfer.weight_sync.checkpoint_form import StreamForm

from wtransfer_trl.policy_sync import metadata_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer_trl.weight_transfer import WeightTransfer


def replace() -> None:
    """Replace the pass over a policy that TRL announces and then sends."""
    VLLMGeneration._iter_named_params = _iter_named_params  # noqa: SLF001


def form_of(model: torch.nn.Module) -> StreamForm:
    """Return the form of the model within a trainer's wrappers, whose names TRL takes off."""
    return StreamForm(next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None))


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


def replace_passes(transfer: type[WeightTransfer]) -> None:
    """Replace the pass over a policy that TRL's asynchronous trainers send.

    Args:
        transfer: Class of ``weight_transfer`` of those trainers that send by it.
    """
    for kind, name in _ASYNCHRONOUS.items():
        module = sys.modules.get(f"trl.experimental.{kind}.{kind}_trainer")
        # A trainer that is not loaded calls nobody.
        if module is not None:
            trainer = getattr(module, name)
            of_trl = inspect.unwrap(trainer._streaming_iter)  # noqa: SLF001
            trainer._streaming_iter = _formed_pass(of_trl, module, transfer)  # noqa: SLF001


_ASYNCHRONOUS = {
    "async_grpo": "AsyncGRPOTrainer",
    "async_distillation": "AsyncDistillationTrainer",
}


def _formed_pass(of_trl: Any, module: Any, transfer: type[WeightTransfer]) -> Any:
    @functools.wraps(of_trl)
    def streaming_iter(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        # The main process has it; the others read the pass, which gathers, beside it.
        if not isinstance(sender := getattr(self, "weight_transfer", None), transfer):
            yield from of_trl(self)
            return
        model = self.accelerator.unwrap_model(self.model)
        if sender.form is None:
            sender.form = form_of(model)
        try:
            # Shapes of sharded tensors are whole ones. Nothing is gathered.
            sender.form.announce(metadata_of(module._iter_vllm_named_params(model)))  # noqa: SLF001
        except BaseException:
            for _ in of_trl(self):
                pass
            raise
        yield from sender.form.of(of_trl(self))

    return streaming_iter
