"""Tensors of an update that did not travel: the worker has them, and proves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from wtransfer.errors import DigestMismatchError
from wtransfer.transport.digests import digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from wtransfer.manifest import Manifest


class KeptTensors(Mapping[str, "torch.Tensor"]):
    """The tensors that stay, each digested whenever it is read: no others can be applied.

    Args:
        manifest: Names them, with their digests.
        own: The worker's tensors by name. A mapping with a method ``digest(name, algorithm)``
            tells digests that it knows.
        names: Name or alias -> the worker's name.
    """

    def __init__(
        self, manifest: Manifest, own: Mapping[str, torch.Tensor], names: Mapping[str, str]
    ) -> None:
        self._digests = {each.piece.name: each.digest for each in manifest.kept}
        self._algorithm = manifest.algorithm
        self._own = own
        self._names = names

    def prove(self) -> None:
        """Raise unless the worker has every one of them.

        Raises:
            DigestMismatchError: The first that is missing, or has other bytes.
        """
        known = getattr(self._own, "digest", None)
        for name in self:
            if known is None:
                self[name]
            else:
                self._check(name, known(self._own_name(name), self._algorithm))

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._own[self._own_name(name)]
        self._check(name, digest(tensor, self._algorithm))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def _own_name(self, name: str) -> str:
        if name not in self._digests:
            raise KeyError(name)
        for own in (name, self._names.get(name, name)):
            if own in self._own:
                return own
        raise DigestMismatchError(f"{name!r} is not sent, and this worker lacks it", piece=name)

    def _check(self, name: str, found: str) -> None:
        if found != self._digests[name]:
            raise DigestMismatchError(
                f"{name!r} is not sent, and this worker has other bytes than the publisher's base: "
                "start it with that checkpoint, or publish all tensors",
                piece=name,
            )
