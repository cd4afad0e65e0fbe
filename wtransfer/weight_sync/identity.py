"""The identity of existing weights: the fingerprint that a round with them would have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.source import as_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

    from wtransfer.manifest import Algorithm
    from wtransfer.weights import WeightSource


def module_fingerprint(
    module: nn.Module | Mapping[str, torch.Tensor] | WeightSource,
    algorithm: Algorithm = "xxh3-128",
) -> str:
    """Return the fingerprint that a publisher of this model gives to its weights as they are.

    Equal weights under equal names have equal fingerprints, in every process, whatever brought
    them.

    Args:
        module: The model, as a `Publisher` takes it: of a module its parameters and persistent
            buffers, tied storage once.
        algorithm: How the publisher's engine digests: its ``digest_algorithm``.

    Raises:
        ManifestError: The module names a tensor that no update can hold.

    Cost: one pass over the weights, at the speed of the digest.
    """
    source = DigestingSource(as_source(module), algorithm, screen=False)
    layout = source.plan()
    for _ in source.iter_full():
        pass  # The source digests each tensor that it yields.
    return layout.fingerprint(source.digests())
