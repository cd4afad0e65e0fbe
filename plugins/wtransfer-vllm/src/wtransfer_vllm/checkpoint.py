"""The checkpoint that vLLM started from: what updates must look like, and a first way back."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.engines.interface import TensorSpec
from wtransfer.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from wtransfer.engines.interface import ParamMeta

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

LOAD_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"}
)
"""Load formats with which the model consists of what the safetensors files say."""


class Checkpoint:
    """Safetensors files on disk, as they were when the engine started.

    Args:
        folder: Where they are.
        tied: Whether the model's embeddings and its head are one tensor.

    Raises:
        SourceError: There are none, or they cannot be read.
    """

    def __init__(self, folder: Path, *, tied: bool = False) -> None:
        self._source = CheckpointSource(folder, sealed=False)
        self._tied = tied
        self._stamps = {file: _stamp(file) for file in sorted(folder.glob("*.safetensors"))}

    def schema(self) -> dict[str, TensorSpec]:
        """Return what the files' headers say: name -> dtype and shape."""
        metas = {meta.name: meta for meta in self._source.metadata}
        alias = _tied_head(metas) if self._tied else {}
        return {
            name: TensorSpec(meta.dtype, meta.shape, alias.get(name, ()))
            for name, meta in metas.items()
            if not any(name in names for names in alias.values())
        }

    def tensors(self) -> Mapping[str, torch.Tensor] | None:
        """Return the tensors, not read yet; None if a file is no longer the same."""
        return CheckpointTensors(self, self._source) if self.unchanged() else None

    def unchanged(self) -> bool:
        """Whether the files are those that the engine started from."""
        return all(_stamp(file) == stamp for file, stamp in self._stamps.items())


class CheckpointTensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a checkpoint, which refuse to be read once its files were changed.

    Each is read when it is asked for, into memory of its own: together they may be larger than
    what is free beside a model.

    Args:
        checkpoint: Knows its files.
        source: Reads them.
    """

    def __init__(self, checkpoint: Checkpoint, source: CheckpointSource) -> None:
        self._checkpoint = checkpoint
        self._source = source

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source.tensor(name)

    def __iter__(self) -> Iterator[str]:
        if not self._checkpoint.unchanged():
            raise SourceError(
                "the checkpoint that vLLM started from was overwritten since; there is no way back "
                "to those weights"
            )
        return (meta.name for meta in self._source.metadata)

    def __len__(self) -> int:
        return len(self._source.metadata)


def find_checkpoint(vllm_config: Any, *, tied: bool = False) -> Checkpoint | None:
    """Return the checkpoint that a model was loaded from, if it is on this machine's disk.

    Args:
        vllm_config: vLLM's own.
        tied: Whether the model's embeddings and its head are one tensor.
    """
    try:
        return Checkpoint(checkpoint_folder(vllm_config), tied=tied)
    except SourceError as error:
        logger.info("no checkpoint to go back to: %s", error)
        return None


def checkpoint_folder(vllm_config: Any) -> Path:
    """Return the folder that a model was loaded from.

    Args:
        vllm_config: vLLM's own.

    Raises:
        SourceError: The model was not loaded from safetensors files, or they are not on this
            machine's disk.
    """
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load_config.load_format, "value", None) or load_config.load_format)
    if load_format not in LOAD_FORMATS:
        raise SourceError(f"a model of load format {load_format!r} does not consist of its files")
    model = str(model_config.model)
    if os.path.isdir(model):  # noqa: PTH112  # a model's name may be no path at all
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model,
            revision=getattr(model_config, "revision", None),
            cache_dir=getattr(load_config, "download_dir", None),
            allow_patterns=["*.safetensors", "*.json"],
            local_files_only=True,
        )
    except Exception as error:
        raise SourceError(f"model {model!r} has no checkpoint on this disk: {error}") from error
    return Path(found)


def _tied_head(metas: dict[str, ParamMeta]) -> dict[str, tuple[str, ...]]:
    """Return embedding -> head where a checkpoint has both of one tensor: either will do."""
    embeddings = [name for name in metas if name.endswith("embed_tokens.weight")]
    head = metas.get("lm_head.weight")
    if head is None or len(embeddings) != 1:
        return {}
    embedding = metas[embeddings[0]]
    same = (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
    return {embedding.name: (head.name,)} if same else {}


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
