"""What the fence writes down: what a request began with, and what a job was prepared under."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wtransfer.blocks import fence_key
from wtransfer.specs.interface import LoadStoreSpec
from wtransfer.weights import known_stamps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from wtransfer.blocks import OffloadKey
    from wtransfer.specs.fence.spoiled import SpoiledBlocks
    from wtransfer.weights import Stamps


class BlockWitnesses:
    """What tells the blocks of one request from others of the same hash.

    A host that can, gives it to the fence with ``req_context.set_state``. From then on a block
    without a witness is never looked up, nor stored.

    Args:
        witnesses: Keys of the host, each with what `wtransfer.blocks.witness_blocks` says of it.
    """

    def __init__(self, witnesses: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._witnesses: dict[bytes, bytes | None] = {}
        for key, witness in witnesses:
            self.add(key, witness)

    def add(self, key: bytes, witness: bytes) -> None:
        """Enter one block.

        Two blocks of one request may have the same key, where the hash is weak. Nobody can tell
        then which of them is meant, so neither has a witness.
        """
        known = self._witnesses.setdefault(key, witness)
        if known != witness:
            self._witnesses[key] = None

    def of(self, key: bytes) -> bytes | None:
        """Return what was entered for a key; None if that is nothing, or two things."""
        return self._witnesses.get(key)


@dataclass(eq=False)
class FenceNote:
    """What a request began with, which never changes, and what its blocks are kept under."""

    stamps: Stamps | None
    """What the ranks computed with, as far as the scheduler knew; None: it did not know."""
    fingerprint: str
    """Identity of that."""
    _fenced: dict[bytes, OffloadKey] = field(default_factory=dict, repr=False)

    def fence(
        self, key: bytes, witnesses: BlockWitnesses | None, spoiled: SpoiledBlocks
    ) -> OffloadKey | None:
        """Return the key under which a block of this request is kept; None if there is none."""
        if self.stamps is None:
            return None
        witness = b"" if witnesses is None else witnesses.of(key)
        if witness is None:
            return None
        known = self._fenced.get(key)
        if known is None:
            fenced = fence_key(key, self.fingerprint, witness)
            known = self._fenced[key] = spoiled.current(fenced)
        return known

    def fenced(self, key: bytes) -> OffloadKey | None:
        """Return what `fence` returned for a key, whatever has become known since."""
        return self._fenced.get(key)

    def spoil(
        self, keys: Iterable[bytes], witnesses: BlockWitnesses | None, spoiled: SpoiledBlocks
    ) -> list[OffloadKey]:
        """Give up what blocks were kept under, now that nothing is under way for them.

        Returns:
            What they were kept under, without those that others have given up before.
        """
        given_up = []
        for key in keys:
            kept_under = self._fenced.pop(key, None)
            witness = b"" if witnesses is None else witnesses.of(key)
            if kept_under is None or witness is None:
                continue
            fenced = fence_key(key, self.fingerprint, witness)
            if spoiled.current(fenced) == kept_under:
                spoiled.add([fenced])
                given_up.append(kept_under)
        return given_up


class FencedLoadStoreSpec(LoadStoreSpec):
    """Where blocks are, and the weights that they belong to.

    Args:
        stamps: What each rank must compute with for the job to be done there, in order of rank.
        inner: Where they are, as the tier's own spec has it.
    """

    def __init__(self, stamps: Iterable[Sequence[str | int]], inner: LoadStoreSpec) -> None:
        known = known_stamps(stamps)
        if known is None:
            raise ValueError("a job whose weights are not known: it must not be prepared")
        self.stamps = known
        """What each rank must compute with."""
        self.inner = inner
        """Where the blocks are."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.stamps)}, {self.inner!r})"
