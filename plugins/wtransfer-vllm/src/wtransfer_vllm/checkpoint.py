"""The checkpoint that vLLM started from: the form of updates, and a first way back."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wtransfer.checkpoint.file_state import file_states
from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.errors import SourceError
from wtransfer.transport.digests import digest
from wtransfer.weights import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from wtransfer.manifest import Algorithm

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

LOAD_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"}
)
"""Load formats with which the model consists of the contents of the safetensors files."""


class Checkpoint(Mapping[str, "torch.Tensor"]):
    """The tensors of safetensors files on disk, as they were when the engine started.

    A tensor is read when it is asked for, into memory of its own: together they may be larger than
    the memory that a model leaves free. Once the files were changed, they are not read any more.

    Args:
        folder: Folder of the files.
        tied: True if the model's embeddings and its head are one tensor.

    Raises:
        SourceError: There are no such files, or they cannot be read.
    """

    def __init__(self, folder: Path, *, tied: bool = False) -> None:
        self._source = CheckpointSource(folder, sealed=False)
        self._tied = tied
        self._states = file_states(self._source.files)
        self._names = frozenset(meta.name for meta in self._source.metadata)
        self._digests: dict[tuple[str, Algorithm], str] = {}

    def schema(self) -> dict[str, TensorSpec]:
        """Return name -> dtype and shape, by the files' headers.

        Where a checkpoint has both parts of one tensor, embedding and head, either name will do.
        """
        specs = {meta.name: TensorSpec(meta.dtype, meta.shape) for meta in self._source.metadata}
        head = "lm_head.weight"
        spec = specs.get(head)
        # Models name their embedding in many ways: it is the other tensor of that form.
        embeddings = [name for name, other in specs.items() if name != head and other == spec]
        if self._tied and spec is not None and len(embeddings) == 1:
            del specs[head]
            specs[embeddings[0]] = TensorSpec(spec.dtype, spec.shape, (head,))
        return specs

    def unchanged(self) -> bool:
        """Return whether the files are those that the engine started from."""
        try:
            return file_states(self._source.files) == self._states
        except SourceError:
            return False

    def digest(self, name: str, algorithm: Algorithm) -> str:
        """Return a tensor's digest, read once.

        Raises:
            SourceError: The files were changed since.
        """
        self._check_unchanged()
        if (name, algorithm) not in self._digests:
            self._digests[name, algorithm] = digest(self._source.tensor(name), algorithm)
        return self._digests[name, algorithm]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source.tensor(name)

    def _check_unchanged(self) -> None:
        if not self.unchanged():
            raise SourceError(
                "the checkpoint that vLLM started from was overwritten since; there is no way back "
                "to those weights"
            )

    def __iter__(self) -> Iterator[str]:
        self._check_unchanged()
        return (meta.name for meta in self._source.metadata)

    def __len__(self) -> int:
        return len(self._source.metadata)


def find_checkpoint(vllm_config: Any, *, tied: bool = False) -> Checkpoint | None:
    """Return the checkpoint that a model was loaded from, if it is on this machine's disk.

    Args:
        vllm_config: vLLM's own.
        tied: True if the model's embeddings and its head are one tensor.
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
