"""SGLang's model as the target of updates: their form, how they are loaded, and the way back."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from wtransfer.checkpoint.served import ServedCheckpoint, find_folder
from wtransfer.errors import SchemaError, SourceError
from wtransfer.weight_sync.worker.schema import canonical_names

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
    load_format = str(getattr(load_config.load_format, "value", load_config.load_format))
    if load_format not in LOAD_FORMATS:
        raise SourceError(f"a model of load format {load_format!r} does not consist of its files")
    return find_folder(
        str(config.model_path),
        revision=config.revision,
        cache_dir=getattr(load_config, "download_dir", None),
    )


class SglangTarget:
    """A model that SGLang serves, updated in the form of its checkpoint.

    The required contents of an update are read from the headers of the checkpoint that the model
    was loaded from: SGLang's ``load_weights`` says nothing where a tensor is missing. The way back
    before the first commit is that checkpoint, too.

    Args:
        runner: SGLang's model runner.
        refusal: Why the model takes no update; None: it takes them, if its load can be proven.
    """

    def __init__(self, runner: Any, refusal: str | None = None) -> None:
        self.vouched_as = runner.model
        """Stands for the model where KV cache is named at load."""
        self._runner = runner
        self._checkpoint: ServedCheckpoint | None = None
        self._schema: Mapping[str, TensorSpec] = {}
        self._applied: Mapping[str, torch.Tensor] | None = None
        self._touched = False
        self._refusal = refusal
        if refusal is None:
            try:
                self._prove()
            except (SourceError, LoadError) as error:
                self._refusal = str(error)
        if self._refusal is not None:
            logger.warning("this SGLang takes no update: %s", self._refusal)

    def _prove(self) -> None:
        begun = time.monotonic()
        model, config = self._runner.model, self._runner.model_config
        # Where a checkpoint has both, SGLang ties them if its configuration says so.
        tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
        checkpoint = ServedCheckpoint(checkpoint_folder(self._runner), tied=tied)
        self._checkpoint, self._schema = checkpoint, checkpoint.schema()
        prove(model, lambda: self._load(checkpoint))
        name, seconds = type(model).__name__, time.monotonic() - begun
        logger.info("the load of %s gives what it serves (%.2f s)", name, seconds)

    def schema(self) -> Mapping[str, TensorSpec]:
        """Return the checkpoint's form.

        Raises:
            SchemaError: The model takes no update; the text says why.
        """
        if self._refusal is not None:
            raise SchemaError(self._refusal)
        return self._schema

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a whole set, as SGLang has loaded its checkpoint.

        If the load fails, the model is a mix, over which another whole load must follow.
        """
        self._touched = True
        self._applied = None
        self._load(tensors)
        self._applied = tensors

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        import torch
        from sglang.srt.model_loader.loader import DefaultModelLoader
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        runner = self._runner
        device = torch.device(runner.device)
        with torch.no_grad(), set_default_torch_dtype(runner.model_config.dtype):
            DefaultModelLoader.restore_weights_before_loading(runner.model, device)
            DefaultModelLoader.load_weights_and_postprocess(
                runner.model, self._in_form(tensors), device
            )

    def _in_form(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors in the dtypes of the checkpoint, one by one."""
        canonical = canonical_names(self._schema)
        for name, tensor in tensors.items():
            spec = self._schema.get(canonical.get(name, name))
            yield name, tensor if spec is None else tensor.to(spec.dtype)

    def base(self) -> Mapping[str, torch.Tensor] | None:
        """Return the checkpoint on disk; None: it is not there, or was changed since."""
        if self._checkpoint is None or not self._checkpoint.unchanged():
            return None
        return self._checkpoint

    def capture(self) -> Mapping[str, torch.Tensor] | None:
        """Return the last applied set; before the first, the checkpoint on disk."""
        return self._applied if self._touched else self.base()

    def forget(self) -> None:
        """Drop the last applied set: the model does not hold it any more."""
        self._touched = True
        self._applied = None
