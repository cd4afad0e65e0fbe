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
    from collections.abc import Iterator

    from torch import nn

_PART_NBYTES = 1 << 20


class LiveDigest:
    """Digests a model a part at a time, so that serving need not stand still for it.

    Args:
        model: Must not change until the digest is done.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hash = hashlib.sha256()
        self._parts = _parts(model)

    def advance(self, seconds: float) -> str | None:
        """Digest at least one more part, and further ones while time is left.

        Args:
            seconds: Time to spend.

        Returns:
            The digest in hexadecimal once everything is in it, before that None.
        """
        end = time.monotonic() + seconds
        for part in self._parts:
            self._hash.update(part)
            if time.monotonic() >= end:
                return None
        return self._hash.hexdigest()


def _parts(model: nn.Module) -> Iterator[bytes | memoryview]:
    for name, tensor in sorted(model.state_dict().items()):
        yield f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()
        for part in tensor.reshape(-1).view(torch.uint8).split(_PART_NBYTES):
            yield part.numpy().data


def weights_digest(model: nn.Module) -> str:
    """Return the digest of all tensors of a model at once."""
    digest = LiveDigest(model).advance(float("inf"))
    assert digest is not None
    return digest
