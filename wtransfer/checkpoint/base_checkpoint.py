"""The checkpoint that trainer and workers began with: what a trainer does not hold stays."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wtransfer.checkpoint.file_state import file_states
from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.errors import SourceError
from wtransfer.manifest import KeptPiece, Piece
from wtransfer.transport.digests import digest
from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping, Sequence

    from wtransfer.manifest import Algorithm
    from wtransfer.weights import ParamMeta


class BaseCheckpoint:
    """A checkpoint, of which each tensor that stays is read once.

    Args:
        folder: Folder of its safetensors files, which must not change meanwhile.

    Raises:
        SourceError: The folder holds no whole checkpoint.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not Path(folder).is_dir():
            raise SourceError(f"base is {str(folder)!r}, expected the folder of a checkpoint")
        # Not by its seal: each of these tensors is read, once.
        self._source = CheckpointSource(folder, sealed=False)
        self._metas = {meta.name: meta for meta in self._source.metadata}
        self._digests: dict[tuple[str, Algorithm], str] = {}
        self._files = file_states(self._source.files)

    def config(self, own: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the configuration of the whole: the checkpoint's, with the trainer's own in it.

        Args:
            own: Configuration of the model in training, which may be a part of the whole.

        Raises:
            SourceError: The checkpoint's cannot be read.
        """
        whole = self._own_config
        if own is None or whole is None:
            return own if whole is None else whole
        kind = own.get("model_type")
        if whole.get("model_type") == kind:
            return own
        parts = [name for name, each in whole.items() if isinstance(each, dict)]
        mine = [name for name in parts if whole[name].get("model_type", "") == kind]
        if mine:
            return {**whole, mine[0]: own}
        # Written flat: entries of the part stand beside those of the whole.
        same = {name: each for name, each in own.items() if name in whole and name != "model_type"}
        return {**whole, **same}

    @functools.cached_property
    def _own_config(self) -> Mapping[str, Any] | None:
        return self._source.config

    def kept(
        self,
        sent: Sequence[ParamMeta],
        tied: Collection[str],
        algorithm: Algorithm,
        on_progress: Callable[[], None],
    ) -> tuple[KeptPiece, ...]:
        """Return the tensors that stay, beside those that are sent.

        Args:
            sent: Tensors that travel.
            tied: Further names of these.
            algorithm: How tensors are digested.
            on_progress: Called after each tensor that was read.

        Raises:
            SourceError: A tensor that travels is another one in the checkpoint, or is not in it; or
                one that stays cannot be read.

        Cost: the first time reads what stays.
        """
        if not sent:
            raise SourceError("the model has no tensor, and all of the base would stay as it is")
        for meta in sent:
            self._check(meta)
        travelling = {*(meta.name for meta in sent), *tied}
        found = []
        for meta in self._metas.values():
            if meta.name in travelling:
                continue
            key = (meta.name, algorithm)
            if key not in self._digests:
                self._digests[key] = digest(self._source.tensor(meta.name), algorithm)
                if file_states(self._source.files) != self._files:
                    raise SourceError(
                        f"the base was changed since the publisher was made, before {meta.name!r} "
                        "was read",
                        piece=meta.name,
                    )
                on_progress()
            piece = Piece(meta.name, dtype_name(meta.dtype), tuple(meta.shape))
            found.append(KeptPiece(piece, self._digests[key]))
        return tuple(found)

    def _check(self, sent: ParamMeta) -> None:
        own = self._metas.get(sent.name)
        if own is None:
            # By its right name it would stay, and never be updated.
            raise SourceError(
                f"the model has {sent.name!r}, which the base does not have (its first name is "
                f"{next(iter(self._metas), None)!r}); names can be mapped, Publisher(form=...)",
                piece=sent.name,
            )
        # A trainer may hold wider floats than the checkpoint; workers judge whether they cast.
        floats = own.dtype.is_floating_point and sent.dtype.is_floating_point
        if tuple(own.shape) != tuple(sent.shape) or not (floats or own.dtype == sent.dtype):
            raise SourceError(
                f"the model has {sent.name!r} as {dtype_name(sent.dtype)} {list(sent.shape)}, the "
                f"base as {dtype_name(own.dtype)} {list(own.shape)}",
                piece=sent.name,
            )
