"""A worker's present, previous and next weights: its state in the two-phase commit.

Every event is one method of `WeightState`, one step under one lock; no event waits, moves a byte
or touches the model.

==================  ==========  ============================  =====================================
event               thread      takes effect if               effect
==================  ==========  ============================  =====================================
plan                channel     nothing is pending            the update is the round's
data, prepare       channel     next in its order             the engine may receive, or verify
verified            engine      the round goes on             a commit may be ordered
differs             engine      the round goes on             the digests may come, and no commit
compare             channel     it means this round, which    the pieces that differ may be named
                                differs; once
failed              engine      the round goes on             staging is dropped
end_round           channel     it means this round           staging is dropped: an abort, a newer
                                                              plan, a lost publisher
commit              channel     verified, nothing pending     *pending*: the verified set
publisher_lost      channel     the instance has several      as `rollback`, of whichever round;
                                ranks                         what is staged is ended by `end_round`
begin               model       something is pending          it is being applied
applied             model                                     the set is held; ranks of several keep
                                                              the previous one; sends `Ack`
not_applied         model                                     the previous set is held, or none
                                                              (*empty*); sends `Ack`
finish              channel     it means the last commit      the previous set is dropped
rollback            channel,    it means the last commit      *pending*: the previous set
                    model       it means the pending set      dropped; sends `Ack`; once it is being
                                                              applied: as above, after `applied`
discard             model       a set is pending              dropped; sends `Ack`
weights_lost        model,                                    no set is held (*empty*); sends
                    engine                                    `Lost`; the pending set stays
forget_tensors      engine                                    the held set cannot be applied again
close               any                                       everything is dropped
==================  ==========  ============================  =====================================
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import xxhash

from wtransfer.calls import Changed
from wtransfer.errors import RoundBusyError
from wtransfer.manifest import Manifest, local_fingerprint
from wtransfer.weight_sync.messages import Ack, ErrorInfo, Lost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import msgspec
    import torch

    from wtransfer.weights import TensorSpec

ORPHANED = "the publisher was lost before every rank of the instance had committed"


@dataclass(frozen=True)
class WeightSet:
    """A set of weights."""

    version: str | None
    """Label; None for weights that no update has brought."""
    fingerprint: str
    """Identity."""
    manifest: Manifest | None = None
    """Its names, dtypes and shapes."""
    tensors: Mapping[str, torch.Tensor] | None = None
    """The weights themselves, where they can be applied again."""
    casts: str = ""
    """Digest, by `check_fit`, of the tensors that are cast as they are applied."""
    judged: Mapping[str, TensorSpec] | None = None
    """The model's schema when the set was judged; None: no schema, or no update was judged."""

    @property
    def verified(self) -> str | None:
        """How the set was proven; None for weights that no update has brought."""
        return None if self.version is None else "digests"

    @property
    def kv_name(self) -> str:
        """Identity of the weights that the model computes with, as in the names of KV cache.

        Models of different dtypes cast one update to different weights. The fingerprint does not
        show the casts, so the name contains them.
        """
        if not self.casts:
            return self.fingerprint
        return "cast:" + xxhash.xxh3_128_hexdigest(f"{self.fingerprint}\0{self.casts}".encode())

    def without_tensors(self) -> WeightSet:
        """Return the same set, which cannot be applied again."""
        return replace(self, tensors=None)

    def lost(self) -> WeightSet:
        """Return the state of a model that has lost this set: without a name, of the same form."""
        return replace(unknown_weights(), manifest=self.manifest)


def unknown_weights() -> WeightSet:
    """Return weights that no update has brought: those of a fresh worker."""
    return WeightSet(None, local_fingerprint())


class Answered(Protocol):
    """The publisher of a round: one that is dialed, or a folder."""

    address: str

    @property
    def connected(self) -> bool:
        """True if the publisher is reached right now."""

    def send(self, message: msgspec.Struct) -> None:
        """Take an answer; on any of the worker's threads."""


class Update(Protocol):
    """An update beside the model, as far as the order of events concerns it."""

    publisher: Answered
    round_id: str
    version: str
    held: WeightSet
    seconds: dict[str, float]

    def drop(self, reason: str) -> None:
        """Release all staged tensors."""


TUpdate = TypeVar("TUpdate", bound=Update)


@dataclass(frozen=True)
class Pending(Generic[TUpdate]):
    """The task of ``commit_pending``: apply a verified set, or the previous one again."""

    update: TUpdate
    """The update whose commit was ordered."""
    held: WeightSet
    """The set to apply."""
    rollback_reason: str | None = None
    """Why to roll back; None: this is a commit."""
    since: float = field(default_factory=time.monotonic)


class WeightState(Generic[TUpdate]):
    """The state machine of one worker; its events are listed above.

    Args:
        num_ranks: Ranks of the serving instance, which commit all or none.
        send: Sends a message to the publisher; must neither wait nor raise. Called under the lock:
            publishers take the last message for the held version, so messages leave in the order
            of the events that they report.
    """

    def __init__(
        self, num_ranks: int = 1, send: Callable[[msgspec.Struct], None] = lambda _message: None
    ) -> None:
        self.changed = Changed()
        """The lock; notified after every event that a thread may wait for."""
        self.held = unknown_weights()
        """The set that the model consists of."""
        self.update: TUpdate | None = None
        """The round that is being staged."""
        self.pending: Pending[TUpdate] | None = None
        """The task of the model's thread."""
        self.since = time.monotonic()
        """When `held` was last settled, by a commit or the lack of one; in monotonic seconds."""
        self.num_dropped = 0
        """Late or repeated messages that were dropped."""
        self.closed = False
        self.empty = False
        """True if the model's weights belong to no known version: the worker must not serve."""
        self._num_ranks = num_ranks
        self._send = send
        self._next_seq = 0
        self._prepared = False
        self._verified = False
        self._differs = False
        self._applying = False
        self._rollback_after: str | None = None
        """Why to roll back the set that is being applied, as soon as it is."""
        self._unfinished: Pending[TUpdate] | None = None
        """The last commit, until its `Finish`."""
        self._previous: WeightSet | None = None
        """The set that the model had before that commit."""
        self._behind = False
        self._applied = ""
        """The last round whose commit stands."""
        self._unsaid: tuple[Pending[TUpdate], str, Exception | None] | None = None
        """The outcome whose ack is not sent yet."""

    @property
    def state(self) -> str:
        """``fresh``, ``serving``, ``pending``, ``behind`` or ``empty``.

        A host reads it to decide about serving. So *empty* comes first, also while a set is pending
        that would end it.
        """
        if self.empty:
            return "empty"
        if self.pending is not None:
            return "pending"
        if self._behind:
            return "behind"
        return "fresh" if self.held.version is None else "serving"

    @property
    def state_for_publisher(self) -> str:
        """The state in messages to publishers.

        A publisher reads it to decide about sending, and nothing can be staged while a set is
        pending. So *pending* comes first; the fingerprint of an empty worker shows that it holds
        nothing.
        """
        return "pending" if self.pending is not None else self.state

    @property
    def phase(self) -> str | None:
        """``plan``, ``transfer``, ``prepare`` or ``commit``, of a publisher's round; None: none."""
        if self.pending is not None:
            return "commit"
        if self.update is None:
            return None
        if self._prepared:
            return "prepare"
        return "transfer" if self._next_seq else "plan"

    @property
    def busy(self) -> bool:
        """True if a round is being staged, or a set is pending."""
        return self.update is not None or self.pending is not None

    @property
    def finished(self) -> bool:
        """True if no publisher may still order a rollback of the last commit."""
        return self._unfinished is None

    # -- the publisher's messages

    def plan(self, update: TUpdate) -> None:
        """Begin a round.

        Raises:
            RoundBusyError: A set is pending.
        """
        with self.changed:
            if self.pending is not None:
                what = "commit" if self.pending.rollback_reason is None else "rollback"
                raise RoundBusyError(
                    f"{what} pending since {time.monotonic() - self.pending.since:.1f} s: "
                    f"{self.pending.update.version!r} of "
                    f"{self.pending.update.publisher.address} waits for commit_pending()"
                )
            assert self.update is None, "end_round() first"
            self.update = update
            self._next_seq = 0
            self._prepared = self._verified = self._differs = False

    def data(self, round_id: str, seq: int) -> TUpdate | None:
        """Return the update that takes this data; None if the message is late or repeated."""
        with self.changed:
            update = self._current(round_id, not self._prepared and seq == self._next_seq)
            self._next_seq += update is not None
            return update

    def prepare(self, round_id: str) -> TUpdate | None:
        """Return the update to verify; None if the message is late or repeated."""
        with self.changed:
            update = self._current(round_id, not self._prepared)
            self._prepared = self._prepared or update is not None
            return update

    def compare(self, round_id: str) -> TUpdate | None:
        """Return the update whose pieces to compare; None if the digests were not asked for."""
        with self.changed:
            update = self._current(round_id, self._differs)
            self._differs = self._differs and update is None
            return update

    def commit(self, round_id: str) -> None:
        """Leave the verified set to the model's thread."""
        with self.changed:
            # Never before the vote, and never in the place of a pending set: a rollback that the
            # model's thread has not seen would be forgotten.
            update = self._current(round_id, self._verified and self.pending is None)
            if update is None or self.closed:
                return
            self.update = None
            # A publisher orders the next commit when it has finished the one before.
            self._finish()
            self.pending = Pending(update, update.held)
            self.changed.notify_all()

    def finish(self, round_id: str) -> None:
        """Drop the previous set: no rollback will be ordered."""
        with self.changed:
            if self._unfinished_is(round_id) and self.pending is None:
                self._finish()
                self.changed.notify_all()

    def rollback(self, round_id: str, reason: str) -> Pending[TUpdate] | None:
        """Roll a commit back, or drop the set if the model's thread has not begun with it.

        Returns:
            The set, if it was dropped.
        """
        with self.changed:
            if self._unfinished_is(round_id):
                self._order_rollback(reason)
            elif self.pending is None or self.pending.update.round_id != round_id:
                pass
            elif self._applying:
                # The model may be half way between two sets: only `applied` can roll back.
                self._rollback_after = reason
            else:
                return self.discard()
            return None

    def publisher_lost(self) -> Pending[TUpdate] | None:
        """Choose the old version for a rank of several whose commit is not finished.

        A worker by itself keeps the pending set: it is verified and its commit was ordered. In an
        instance of several ranks no process knows any more which ranks were told to commit. So
        every rank chooses alike: a rank that has applied rolls back, any other drops the set.

        Returns:
            The set, if it was dropped.
        """
        with self.changed:
            commit = self._unfinished or self.pending
            if self._num_ranks == 1 or commit is None:
                return None
            return self.rollback(commit.update.round_id, ORPHANED)

    def end_round(self, reason: str, round_id: str | None = None) -> TUpdate | None:
        """End the round that is being staged; return its update to the caller that ended it.

        Args:
            reason: Why.
            round_id: The round to end; None: any.
        """
        with self.changed:
            update = self.update
            if update is None or round_id not in (None, update.round_id):
                return None
            self.update = None
            self._verified = False
            update.drop(reason)
            return update

    def _current(self, round_id: str, in_order: bool) -> TUpdate | None:
        if in_order and self.update is not None and self.update.round_id == round_id:
            return self.update
        self.num_dropped += 1
        return None

    # -- the engine's results

    def verified(self, update: TUpdate) -> bool:
        """Record that every piece is proven; return whether the round still goes on."""
        with self.changed:
            if self.update is not update:
                return False
            self._verified = True
            return True

    def differs(self, update: TUpdate) -> bool:
        """Record that another set has arrived than was sent; return whether the round goes on."""
        with self.changed:
            self._differs = self.update is update
            return self._differs

    def failed(self, update: TUpdate, reason: str) -> bool:
        """End the round, since staging or verifying failed; False: it had ended already."""
        with self.changed:
            return self.update is update and self.end_round(reason) is not None

    # -- the thread that owns the model

    def begin(self) -> Pending[TUpdate] | None:
        """Return the task of the model's thread; its set is being applied from here on."""
        with self.changed:
            self._applying = self.pending is not None
            return self.pending

    def applied(self, pending: Pending[TUpdate], previous: WeightSet, *, keep: bool) -> None:
        """Record that the model consists of a new set.

        Args:
            pending: The task that was done.
            previous: The set that the model had, for a rollback.
            keep: True if the set may be needed again, should the next one fail.
        """
        with self.changed:
            held, round_id, now = pending.held, pending.update.round_id, time.monotonic()
            if self.closed or not keep:
                held = held.without_tensors()
            # No call from here to the last assignment: a signal handler that raises does so before
            # all assignments or after them (see `Changed`).
            self.held = held
            if self._num_ranks > 1 and not self.closed:
                # Only another rank's failure can make a publisher order a rollback.
                self._previous, self._unfinished = previous, pending
            self._behind = self.empty = self._applying = False
            self.since = now
            self.pending = None
            self._applied = round_id
            self._unsaid = (pending, "committed", None)
            self._follow_up()

    def has_applied(self, pending: Pending[TUpdate]) -> bool:
        """Return True if `applied` was recorded: the commit stands, even if an error follows."""
        return self._applied == pending.update.round_id

    def interrupted(self) -> None:
        """Note that an interrupt has ended the apply.

        A recorded outcome is sent to the publisher, which waits for it; without one the set is
        still pending.
        """
        with self.changed:
            self._applying = False
            self._follow_up()

    def not_applied(
        self, pending: Pending[TUpdate], previous: WeightSet, error: Exception, *, restored: bool
    ) -> None:
        """Record that the model has its previous set again; or, if that failed, no named one.

        Args:
            pending: The commit that failed, or the rollback that was ordered.
            previous: The set that the model had before.
            error: Why.
            restored: True if the model has that set again, whole.
        """
        with self.changed:
            held, now = previous if restored else previous.lost(), time.monotonic()
            if self.closed:
                held = held.without_tensors()
            outcome = "restored" if pending.rollback_reason is None else "reverted"
            # As in `applied`: all assignments or none.
            self.held = held
            self.pending = self._rollback_after = None
            self._unfinished = self._previous = None
            self._applying = False
            self._behind = True
            self.empty = not restored
            self.since = now
            self._unsaid = (pending, outcome if restored else "empty", error)
            self._follow_up()

    def discard(self) -> Pending[TUpdate] | None:
        """Drop a set that is pending; return it. A rollback cannot be dropped."""
        with self.changed:
            pending = self.pending
            if pending is None or pending.rollback_reason is not None or self._applying:
                return None
            self.pending = None
            self._behind, self.since = True, time.monotonic()
            self._ack(pending, "discarded")
            return pending

    def weights_lost(self, reason: str) -> None:
        """Record that the model's weights belong to no known version, until the next commit.

        Keep the pending set: it is complete by itself, without the lost weights, or its commit
        finds that it is not.
        """
        with self.changed:
            self.held = self.held.lost()
            self.empty, self.since = True, time.monotonic()
            self._send(Lost(self.held.fingerprint, self.state_for_publisher, reason))

    def forget_tensors(self) -> None:
        """Record that the held set cannot be applied again: its tensors were written to."""
        with self.changed:
            self.held = self.held.without_tensors()

    def close(self) -> Pending[TUpdate] | None:
        """Drop everything; return the pending task, unless its set is being applied."""
        with self.changed:
            self.closed = True
            pending, self.pending = self.pending, None
            self._finish()
            self.held = self.held.without_tensors()
            self.changed.notify_all()
            return None if self._applying else pending

    def _follow_up(self) -> None:
        """Send the ack of a recorded outcome, and order the rollback that was waiting for it.

        Once for each outcome: the next call repeats a step that an interrupt has cut short. An ack
        that is sent twice says the same.
        """
        if self._unsaid is not None:
            self._ack(*self._unsaid)
            self._unsaid = None
        if self._rollback_after is not None and self.pending is None:
            self._order_rollback(self._rollback_after)
            self._rollback_after = None
        self.changed.notify_all()

    def _order_rollback(self, reason: str) -> None:
        commit, previous = self._unfinished, self._previous
        if commit is not None and previous is not None and self.pending is None:
            self.pending = Pending(commit.update, previous, reason)
            self.changed.notify_all()

    def _unfinished_is(self, round_id: str) -> bool:
        return self._unfinished is not None and self._unfinished.update.round_id == round_id

    def _finish(self) -> None:
        self._unfinished = self._previous = None

    def _ack(self, pending: Pending[TUpdate], outcome: str, error: Exception | None = None) -> None:
        self._send(
            Ack(
                round_id=pending.update.round_id,
                outcome=outcome,
                version=self.held.version,
                fingerprint=self.held.fingerprint,
                state=self.state_for_publisher,
                seconds=pending.update.seconds,
                error=None if error is None else ErrorInfo.of(error),
            )
        )
