"""A digest of a live model that shares nothing with the one that the sessions compute.

Sessions digest bytes as they arrive; this reads the tensors that the model computes with, under
every name of its state dict, with another hash. Where both ends agree on it, the weights that
serve are the weights that were published.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn


class LiveDigest:
    """Digests a model a few tensors at a time, so that serving need not stand still for it.

    Args:
        model: Must not change until the digest is done.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = sorted(model.state_dict(), reverse=True)
        self._hash = hashlib.sha256()

    def advance(self, seconds: float) -> str | None:
        """Digest at least one more tensor, and further ones while time is left.

        Args:
            seconds: Time to spend.

        Returns:
            The digest in hexadecimal once all tensors are in it, before that None.
        """
        end = time.monotonic() + seconds
        tensors = self._model.state_dict()
        while self._names:
            self._add(self._names.pop(), tensors)
            if time.monotonic() >= end:
                break
        return None if self._names else self._hash.hexdigest()

    def _add(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors[name].detach()
        self._hash.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        self._hash.update(tensor.reshape(-1).view(torch.uint8).numpy().data)


def weights_digest(model: nn.Module) -> str:
    """Return the digest of all tensors of a model at once."""
    digest = LiveDigest(model).advance(float("inf"))
    assert digest is not None
    return digest
