"""The identity of weights that are there already: what a round that brings them would call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.engines.digesting import DigestingSource
from wtransfer.engines.source import ModuleSource

if TYPE_CHECKING:
    from torch import nn

    from wtransfer.manifest import Algorithm


def module_fingerprint(module: nn.Module, algorithm: Algorithm = "xxh3-128") -> str:
    """Return the fingerprint that a publisher of this module gives to its weights as they are.

    Equal weights under equal names have equal fingerprints, in whichever process and whoever
    brought them.

    Args:
        module: The model: its parameters and persistent buffers, tied storage once.
        algorithm: How the publisher's engine digests: its ``digest_algorithm``.

    Raises:
        ManifestError: The module names something that no update can hold.

    Cost: one pass over the weights, at the speed of the digest.
    """
    source = DigestingSource(ModuleSource(module), algorithm)
    planned = source.plan()
    for _ in source.iter_full():
        pass  # It digests what it yields.
    return planned.fingerprint(source.digests())
