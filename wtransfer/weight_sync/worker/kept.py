"""Tensors of an update that did not travel: the worker has them, and proves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from wtransfer.errors import DigestMismatchError
from wtransfer.transport.digests import digest
from wtransfer.transport.tensors import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from wtransfer.manifest import Manifest


class KeptTensors(Mapping[str, "torch.Tensor"]):
    """The tensors that stay, each compared with its digest whenever it is read.

    Args:
        manifest: Names them, with their digests.
        own: The worker's tensors by name. A mapping on disk may have ``digest(name, algorithm)``,
            which returns the digest of a tensor, computed once, as long as its files are unchanged.
        names: Name or alias -> the worker's name.
    """

    def __init__(
        self, manifest: Manifest, own: Mapping[str, torch.Tensor], names: Mapping[str, str]
    ) -> None:
        self._kept = {each.piece.name: each for each in manifest.kept}
        self._algorithm = manifest.algorithm
        self._own = own
        self._names = names

    def prove(self, on_progress: Callable[[int], None]) -> None:
        """Raise unless the worker has every one of them.

        Args:
            on_progress: Called with the bytes that were proven so far.

        Raises:
            DigestMismatchError: The first that is missing, or has other bytes.
        """
        nbytes = 0
        for name, kept in self._kept.items():
            known = self._known_digest(name)
            if known is None:
                self[name]
            else:
                self._check(name, known)
            nbytes += kept.piece.nbytes
            on_progress(nbytes)

    def __getitem__(self, name: str) -> torch.Tensor:
        piece = self._kept[name].piece
        tensor = self._own[self._own_name(name)]
        if tuple(tensor.shape) != piece.shape:
            self._check(name, "")
        # An update in another floating dtype was cast as it was applied.
        tensor = tensor.to(torch_dtype(piece.dtype))
        self._check(name, self._known_digest(name) or digest(tensor, self._algorithm))
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _known_digest(self, name: str) -> str | None:
        known = getattr(self._own, "digest", None)
        return None if known is None else known(self._own_name(name), self._algorithm)

    def _own_name(self, name: str) -> str:
        for own in (name, self._names.get(name, name)):
            if own in self._own:
                return own
        raise DigestMismatchError(f"{name!r} is not sent, and this worker lacks it", piece=name)

    def _check(self, name: str, found: str) -> None:
        if found != self._kept[name].digest:
            raise DigestMismatchError(
                f"{name!r} is not sent, and this worker has other bytes than the publisher's base: "
                "give both the same checkpoint, or publish all tensors",
                piece=name,
            )
