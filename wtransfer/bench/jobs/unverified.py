"""What a round costs without its digests: only the bench can find out, in its own processes.

No option of the product turns verification off. Here the hash functions are replaced by constants
before anything runs, in a child that is used for this and nothing else. Everything around them
stays: the passes over the tensors, their pieces, the count of what is not finite, the messages.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import xxhash

from wtransfer import manifest
from wtransfer.errors import ChecksumError

if TYPE_CHECKING:
    from collections.abc import Collection

_CONSTANT = "0" * 32


class _Constant:
    """Stands in for a hasher."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def update(self, _data: object) -> None:
        """Do not look at it."""

    def hexdigest(self) -> str:
        """Return what every hasher of its kind does."""
        return _CONSTANT


def switch_off() -> None:
    """Let every digest in this process be the same, and cost nothing."""
    replaced: Any = xxhash
    identities: Any = manifest
    # The fingerprint hashes digests, not weights. It stays real, so that it gives away whether
    # the digests were constants: see `check_constant`.
    identities.xxhash = SimpleNamespace(**vars(xxhash))
    replaced.xxh3_128 = _Constant
    replaced.xxh3_128_hexdigest = lambda _data: _CONSTANT


def check_constant(fingerprints: Collection[str]) -> None:
    """See to it that rounds with different weights had equal digests.

    Raises:
        ChecksumError: They had not: something was digested after all.
    """
    if len(set(fingerprints)) != 1:
        raise ChecksumError(
            "weights were digested though the bench had replaced the hash functions of xxhash; "
            "what replaces them now has to be replaced in wtransfer.bench.jobs.unverified"
        )


def check_changing(fingerprints: Collection[str]) -> None:
    """See to it that every round brought other weights, by their identities.

    Raises:
        ChecksumError: Two rounds brought the same.
    """
    if len(set(fingerprints)) != len(fingerprints):
        raise ChecksumError("two rounds of the bench have one fingerprint; each must bring others")
