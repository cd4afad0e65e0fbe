"""The checkpoint that a serving engine started from: the form of updates, and a first way back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from wtransfer.checkpoint.file_state import file_states
from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.errors import SourceError
from wtransfer.transport.digests import digest
from wtransfer.weights import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

    from wtransfer.manifest import Algorithm


class ServedCheckpoint(Mapping[str, "torch.Tensor"]):
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
        self.config = self._source.config
        """Content of its ``config.json``; None if there is none."""
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
                "the checkpoint that this engine started from was overwritten since; there is no "
                "way back to those weights"
            )

    def __iter__(self) -> Iterator[str]:
        self._check_unchanged()
        return (meta.name for meta in self._source.metadata)

    def __len__(self) -> int:
        return len(self._source.metadata)


def find_folder(
    model: str,
    load_format: object,
    formats: Collection[str],
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
) -> Path:
    """Return the folder that a serving engine has loaded a model from.

    Args:
        model: Path of the folder, or the model's name on the Hugging Face hub.
        load_format: The engine's name of how it was loaded: a text, or an enumeration's member.
        formats: Formats with which the model consists of the contents of safetensors files.
        revision: Revision of the name; None: the default one.
        cache_dir: The hub's cache; None: the default one.

    Raises:
        SourceError: The model was loaded in another format, or is not on this machine's disk.
    """
    name = getattr(load_format, "value", load_format)
    if name not in formats:
        raise SourceError(f"a model of load format {name!r} does not consist of its files")
    if os.path.isdir(model):  # noqa: PTH112  # a model's name may be no path at all
        return Path(model)
    try:
        # Serving engines bring it along.
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=["*.safetensors", "*.json"],
            local_files_only=True,
        )
    except Exception as error:
        raise SourceError(f"model {model!r} has no checkpoint on this disk: {error}") from error
    return Path(found)
