"""The contract of a policy: in which order kept blocks give way.

A policy knows keys and nothing else: neither slots nor bytes. The manager calls it, on one thread,
and sees to it that every key is handed over in this order::

    insert -> release -> [touch]* -> [pin -> release]* -> evict, or remove at any point

A block is a *candidate* from `release` to `pin`: only candidates may give way. Lists of keys are in
the order of their use, the one used last at the end; the manager hands them over so that the head
of a sequence counts as used after its tail, for a tail is worth nothing without its head.

Policies are found by name, ``lru`` and ``arc``, or by place, ``my_package.policy:MyPolicy``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from wtransfer.blocks import OffloadKey


class CachePolicy(ABC):
    """Orders the blocks of one cache. A method's cost must not grow with their number.

    Args:
        capacity: Most blocks that are kept at a time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Most blocks that are kept at a time."""

    @abstractmethod
    def insert(self, keys: Sequence[OffloadKey]) -> None:
        """Take in blocks that are new here. They are being stored: no candidates until `release`.

        Where room had to be made for them, `evict` was called right before.
        """

    @abstractmethod
    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Make blocks candidates that were inserted or pinned."""

    @abstractmethod
    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Make candidates none until `release`: they are being loaded, which is a use."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note that candidates are in use."""

    def reorder(self, keys: Sequence[OffloadKey]) -> None:
        """Make candidates the ones used last, the last of `keys` last of all.

        It is no further use: blocks of one request, stored over several steps, get the order of
        their places in it. A policy that counts uses has a method of its own for this.
        """
        self.touch(keys)

    @abstractmethod
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks, candidates or not, that are gone for another reason than `evict`."""

    @abstractmethod
    def evict(
        self, count: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Let candidates give way: exactly so many, or none at all.

        Args:
            count: How many, at least one.
            protected: Candidates that must stay. To look one up takes no time.
            incoming: The blocks that will be inserted next, at least `count`. Some policies learn
                from it that they let one go too early.

        Returns:
            Who gives way, forgotten from now on; None if there are not so many candidates that are
            not protected, and then nothing has changed.
        """
