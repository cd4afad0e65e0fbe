"""SGLang's model as the target of updates: their form, how they are loaded, and the way back."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from wtransfer.checkpoint.served import ServedCheckpoint, find_folder
from wtransfer.errors import SchemaError, SourceError
from wtransfer.weight_sync.worker.served_target import ServedTarget
from wtransfer.weight_sync.worker.vouching import vouch_for_checkpoint
from wtransfer.weight_version import process_weights

from wtransfer_sglang.proof import LoadError, prove

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch
    from wtransfer.weights import TensorSpec

logger = logging.getLogger(__name__)

LOAD_FORMATS = frozenset({"auto", "safetensors", "fastsafetensors", "runai_streamer"})
"""Load formats with which the model consists of the contents of the safetensors files."""


def checkpoint_folder(runner: Any) -> Path:
    """Return the folder that a model was loaded from.

    Args:
        runner: SGLang's model runner.

    Raises:
        SourceError: The model was not loaded from safetensors files, or they are not on this
            machine's disk.
    """
    config, load_config = runner.model_config, runner.load_config
    return find_folder(
        str(config.model_path),
        load_config.load_format,
        LOAD_FORMATS,
        revision=config.revision,
        cache_dir=getattr(load_config, "download_dir", None),
    )


def vouch(runner: Any, target: SglangTarget, *, is_proven: bool) -> None:
    """Have KV cache named by the checkpoint, where every rank has proven that it serves it.

    The proof comes first. It has read the checkpoint from the disk, as the digests do, so one that
    was overwritten since it was loaded is not vouched for.

    Args:
        runner: SGLang's model runner.
        target: Its model, as the target of updates.
        is_proven: Whether the load of each rank gives what the rank serves.
    """

    def find() -> Path:
        if not is_proven:
            why = target.refusal or "another rank's load does not give what it serves"
            raise SourceError(f"that this server computes as its checkpoint is not proven: {why}")
        return checkpoint_folder(runner)

    vouch_for_checkpoint(target.vouched_as, find)
    # The digests are of the files as they were a moment ago: those that the proof has read.
    if target.checkpoint is not None and not target.checkpoint.unchanged():
        process_weights.weights_replaced(target.vouched_as)


class SglangTarget(ServedTarget):
    """A model that SGLang serves, updated in the form of its checkpoint.

    Args:
        runner: SGLang's model runner.
        refusal: Why the model takes no update; None: it takes them, if its load can be proven.

    Raises:
        ServedWeightsError: The proof of its load has changed what serves.
    """

    def __init__(self, runner: Any, refusal: str | None = None) -> None:
        self.vouched_as = runner.model
        """Stands for the model where KV cache is named at load."""
        self._runner = runner
        checkpoint = None
        try:
            if refusal is None:
                # Where a checkpoint has both, SGLang ties them if its configuration says so.
                tied = getattr(runner.model_config.hf_config, "tie_word_embeddings", False)
                checkpoint = ServedCheckpoint(checkpoint_folder(runner), tied=bool(tied))
        except SourceError as error:
            refusal = str(error)
        super().__init__(checkpoint)
        if checkpoint is not None:
            refusal = self._found_wrong(checkpoint)
        self.refusal = refusal and f"this SGLang takes no update: {refusal}"
        """Why the model takes no update; None: its load gives what it serves."""
        if self.refusal is not None:
            logger.warning("%s", self.refusal)

    def _found_wrong(self, checkpoint: ServedCheckpoint) -> str | None:
        """Return what the proof finds wrong with SGLang's load; None: nothing."""
        begun = time.monotonic()
        model = self._runner.model
        try:
            prove(model, lambda: self.load(self.in_form(checkpoint)))
        except LoadError as error:
            return str(error)
        name, seconds = type(model).__name__, time.monotonic() - begun
        logger.info("the load of %s gives what it serves (%.2f s)", name, seconds)
        return None

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return the checkpoint's form.

        Raises:
            SchemaError: The model takes no update; the text says why.
        """
        if self.refusal is not None:
            raise SchemaError(self.refusal)
        return super().schema()

    def read_config(self, config: dict[str, Any]) -> Mapping[str, Any]:
        """Return a configuration as the class reads it by which SGLang computes."""
        read = type(self._runner.model_config.hf_config).from_dict(config)
        found: Mapping[str, Any] = read.to_dict()
        return found

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load a whole set, by the function that has loaded the checkpoint.

        If it fails, the model is a mix, over which another whole load must follow.
        """
        import torch
        from sglang.srt.model_loader.loader import DefaultModelLoader
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        runner = self._runner
        device = torch.device(runner.device)
        with torch.no_grad(), set_default_torch_dtype(runner.model_config.dtype):
            DefaultModelLoader.restore_weights_before_loading(runner.model, device)
            DefaultModelLoader.load_weights_and_postprocess(runner.model, weights, device)
