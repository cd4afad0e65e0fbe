"""What a worker holds, held before, and is about to hold: the one place where its threads meet."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import xxhash

from wtransfer.errors import RoundBusyError
from wtransfer.manifest import Manifest, local_fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec
    import torch

    from wtransfer.engines.interface import TensorSpec


ORPHANED = "the publisher was lost before every rank of the instance had committed"

Proof: TypeAlias = Literal["digests", "coverage"]
"""How it is known what a set of weights is: every piece has the digest that its sender computed,
or merely every piece has arrived."""


class Holder(Protocol):
    """Whoever brings an update: the link to a publisher, say. Compared by identity."""

    @property
    def address(self) -> str:
        """Who that is, for errors."""

    def send(self, message: msgspec.Struct) -> None:
        """Take the ack. Called by the model's thread; must neither wait nor raise."""


@dataclass(frozen=True)
class Held:
    """A set of weights."""

    version: str | None
    """Label; None for weights that no update has brought."""
    fingerprint: str
    """Identity."""
    manifest: Manifest | None = None
    """Its names, dtypes and shapes."""
    tensors: Mapping[str, torch.Tensor] | None = None
    """The weights themselves, where they can be applied again."""
    verified: Proof | None = None
    """How that was proven; None for weights that no update has brought."""
    casts: str = ""
    """What `check_fit` says of the tensors that are cast as they are applied."""

    @property
    def kv_name(self) -> str:
        """Identity of what the model computes with, as KV cache is named by it.

        Cast, one update is other weights in models of other dtypes; its fingerprint is the same.
        """
        if not self.casts:
            return self.fingerprint
        return "cast:" + xxhash.xxh3_128_hexdigest(f"{self.fingerprint}\0{self.casts}".encode())

    def without_tensors(self) -> Held:
        """Return the same, no longer to be applied."""
        return replace(self, tensors=None)

    def lost(self) -> Held:
        """Return what is known of a model that had these weights and has them no more: its form."""
        return replace(unknown_weights(), manifest=self.manifest)


def unknown_weights() -> Held:
    """Return weights that no update has brought: what a fresh worker has."""
    return Held(None, local_fingerprint())


@dataclass(frozen=True)
class Claim:
    """The round that may stage in this session."""

    link: Holder
    """Whose round it is."""
    round_id: str
    """Round."""
    version: str
    """Its label."""
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        age = time.monotonic() - self.since
        return f"round {self.round_id} ({self.version!r}) of {self.link.address}, {age:.1f} s old"


@dataclass(frozen=True)
class Pending:
    """What ``commit_pending`` has to do: apply a verified set, or go back to the previous one."""

    link: Holder
    """Who gets the ack."""
    round_id: str
    """Round."""
    held: Held
    """What the model shall consist of."""
    seconds: dict[str, float]
    """Seconds by stage so far."""
    rollback_reason: str | None = None
    """Why to go back; None: it is a commit."""
    since: float = field(default_factory=time.monotonic)
    schema: Mapping[str, TensorSpec] | None = None
    """What the model was when the update was judged; None: any complete update was taken."""


class Ledger:
    """The books of one session. Each method is one step under one lock; none of them waits.

    The links' threads enter what has arrived, the model's thread what it has applied.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Notified whenever somebody may have waited for what was entered."""
        self.held = unknown_weights()
        """What the model consists of."""
        self.pending: Pending | None = None
        """What the model's thread has to do."""
        self.closed = False
        """Whether the session is closed."""
        self.num_changes = 0
        """How often the model's thread has begun or ended to change the model, or has lost it."""
        self._claim: Claim | None = None
        self._applying: Pending | None = None
        self._dropped_because = ORPHANED
        self._previous: Held | None = None
        self._unreleased: str | None = None
        self._behind = False
        self._empty = False

    @property
    def state(self) -> str:
        """``fresh``, ``serving``, ``pending``, ``behind`` or ``empty``.

        A host asks whether it may serve. So *empty* comes first, also while a set waits that would
        end it.
        """
        if self._empty:
            return "empty"
        if self.pending is not None:
            return "pending"
        if self._behind:
            return "behind"
        return "fresh" if self.held.version is None else "serving"

    @property
    def standing(self) -> str:
        """The state as publishers are told it.

        They ask whether they may send, and nothing can be staged while a set waits. So *pending*
        comes first; that an empty worker holds nothing, they see by its fingerprint.
        """
        return "pending" if self.pending is not None else self.state

    @property
    def empty(self) -> bool:
        """Whether the model consists of nothing that could be named."""
        return self._empty

    @property
    def released(self) -> bool:
        """Whether no publisher may still ask to go back."""
        return self._unreleased is None

    @property
    def busy(self) -> bool:
        """Whether a round is active, or a set waits to be applied."""
        return self._claim is not None or self.pending is not None

    @property
    def at_rest(self) -> bool:
        """Whether nothing is being applied, nor waits to be, nor is staged."""
        return not self.busy and self._applying is None

    # -- entered by links

    def claim(self, link: Holder, round_id: str, version: str) -> None:
        """Take the session for one round.

        Raises:
            RoundBusyError: Another round is active, or a commit is pending.
        """
        with self.changed:
            if self.pending is not None:
                age = time.monotonic() - self.pending.since
                raise RoundBusyError(
                    f"commit pending since {age:.1f} s: {self.pending.held.version!r} of "
                    f"{self.pending.link.address} waits for commit_pending()"
                )
            if self._claim is not None and self._claim.link is not link:
                raise RoundBusyError(f"another round is active: {self._claim}")
            self._claim = Claim(link, round_id, version)

    def free(self, round_id: str) -> None:
        """End a round's claim."""
        with self.changed:
            if self._claim is not None and self._claim.round_id == round_id:
                self._claim = None

    def offer(self, pending: Pending) -> None:
        """Leave a verified set, whose commit has been ordered, for the model's thread."""
        with self.changed:
            self._claim = None
            if self.closed:
                # Nobody will apply it: it would only keep its memory.
                return
            self.pending = pending
            self.changed.notify_all()

    def release(self, round_id: str) -> None:
        """Drop the previous set: nobody will ask to go back to it."""
        with self.changed:
            if self._unreleased == round_id:
                self._unreleased = None
                self._previous = None
                self.changed.notify_all()

    def rollback(self, link: Holder, round_id: str, reason: str) -> Pending | None:
        """Take a commit back: leave the way back for the model's thread, or drop the set.

        Returns:
            The set, if it was dropped before the model's thread had begun with it. If that thread
            is applying it now, `committed` finds that it was dropped, and leaves the way back.
        """
        with self.changed:
            if self._unreleased == round_id:
                previous = self._previous or unknown_weights()
                self.pending = Pending(link, round_id, previous, {}, reason)
                self.changed.notify_all()
                return None
            if self.pending is None or self.pending.round_id != round_id:
                return None
            self._dropped_because = reason
            dropped = self.discard()
            return None if dropped is self._applying else dropped

    def orphan(self, link: Holder, round_id: str) -> None:
        """Choose the old version for a rank whose publisher was lost before it was released.

        Nobody knows any more which ranks of the instance were told to commit, and did. Each of
        them chooses alike: who has applied goes back, who has not drops the set. While the model's
        thread is applying it, `committed` finds that the set was dropped, and leaves the way back.
        """
        with self.changed:
            self.rollback(link, round_id, ORPHANED)
            self.changed.notify_all()

    # -- entered by the model's thread

    def begin(self) -> Pending | None:
        """Return what the model's thread has to do, and enter that it does so now."""
        with self.changed:
            self._applying = self.pending
            self._dropped_because = ORPHANED
            self.num_changes += self.pending is not None
            return self.pending

    def committed(self, pending: Pending, previous: Held, *, keep: bool) -> None:
        """Enter that the model consists of a new set.

        Args:
            pending: What was applied.
            previous: What the model had, for a rollback.
            keep: Whether the set may be needed again, should the next one fail.
        """
        with self.changed:
            self.num_changes += 1
            keep = keep and not self.closed
            self.held = pending.held if keep else pending.held.without_tensors()
            self._previous = None if self.closed else previous
            self._unreleased = pending.round_id
            self._behind = self._empty = False
            dropped = self.pending is not pending
            self.pending = self._applying = None
            if dropped and not self.closed:
                self.rollback(pending.link, pending.round_id, self._dropped_because)

    def put_back(self, previous: Held, *, restored: bool) -> None:
        """Enter that the model has its previous set again, or, if that failed, nothing."""
        with self.changed:
            self.num_changes += 1
            self.held = previous if restored else previous.lost()
            if self.closed:
                self.held = self.held.without_tensors()
            self.pending = self._applying = None
            self._previous = None
            self._unreleased = None
            self._behind = True
            self._empty = not restored
            self.changed.notify_all()

    def lose(self) -> None:
        """Enter that the model consists of nothing that could be named, until the next commit.

        What waits to be applied stays: it is whole, and does not rest on what was lost.
        """
        with self.changed:
            self.num_changes += 1
            self.held = self.held.lost()
            self._empty = True

    def discard(self) -> Pending | None:
        """Drop a set that waits to be applied; return it. A way back cannot be dropped."""
        with self.changed:
            pending = self.pending
            if pending is None or pending.rollback_reason is not None:
                return None
            self.pending = None
            self._behind = True
            return pending

    def close(self) -> bool:
        """Enter that the session is closed; return whether it was open."""
        with self.changed:
            was_open = not self.closed
            self.closed = True
            self.pending = None
            self._previous = None
            self.held = self.held.without_tensors()
            self.changed.notify_all()
            return was_open
