"""A worker's model and its commits: how a verified update is applied, and how it is undone.

The channel and the engine work on threads of their own and bring an update up to the point where it
is verified; the model meanwhile serves. Only the thread that owns the model changes it, between two
of its steps. The order of the events is `wtransfer.weight_sync.worker.weight_state`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections import ChainMap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.calls import (
    Changed,
    call_apart,
    check_process,
    close_at_exit,
    forget_frames,
    start_in_finaliser,
)
from wtransfer.errors import (
    ClosedError,
    CommitError,
    DigestMismatchError,
    RoundAbortedError,
    RoundBusyError,
    SchemaError,
    WTransferError,
    called_from,
)
from wtransfer.manifest import local_fingerprint
from wtransfer.registry import hooks
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.messages import ErrorInfo, Hello
from wtransfer.weight_sync.storages import shared_memory
from wtransfer.weight_sync.worker.held_memory import HeldMemory
from wtransfer.weight_sync.worker.kept import KeptTensors
from wtransfer.weight_sync.worker.participant import StagedUpdate
from wtransfer.weight_sync.worker.schema import (
    canonical_names,
    check_has,
    check_unchanged,
    schema_of,
)
from wtransfer.weight_sync.worker.target import ModuleTarget, NotedTensors, StateDictTarget
from wtransfer.weight_sync.worker.weight_state import WeightState
from wtransfer.weight_version import process_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from wtransfer.manifest import Manifest
    from wtransfer.weight_sync.worker.joined import JoinedPublisher
    from wtransfer.weight_sync.worker.weight_state import Pending, WeightSet
    from wtransfer.weights import TensorSpec, WeightTarget

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """A worker's name and place among others, as publishers are told them."""

    name: str
    """Name for people."""
    instance: str
    """Serving instance, whose ranks commit all or none."""
    rank: int
    """Rank within the instance."""
    num_ranks: int
    """Ranks of the instance."""
    host_ranks: int | None
    """Ranks that the worker's host invites, where the host may report another number."""


class Failure(NamedTuple):
    """The error that `commit_pending` raises once no frame with tensors in it is left."""

    error: BaseException
    """For the caller."""
    cause: BaseException | None = None
    """Its cause, if that is another error."""


_made: dict[int, weakref.ref[Committer]] = {}
"""The committers of this process by id, in the order in which they were made."""


class Committer:
    """Applies verified updates to a worker's model, and restores it where applying fails.

    It is the worker, as far as rounds concern it: a `participant.Member`.

    Args:
        target: The model.
        vouched_as: The object by which the process knows the model.
        place: The worker's.
        joined: The worker's publisher, which is told every outcome.
        keep_previous: True to keep the previous weights for a rollback.
        cast: True to allow updates in another floating dtype than the model's.
        cast_hint: How a user allows that, for errors.
        deadline_s: Longest wait for the other ranks of the instance at a commit, in seconds.

    Raises:
        ValueError: The model, or a part of it, is another committer's.
    """

    def __init__(
        self,
        target: WeightTarget,
        vouched_as: object,
        place: Place,
        joined: JoinedPublisher,
        *,
        keep_previous: bool,
        cast: bool,
        cast_hint: str,
        deadline_s: float,
    ) -> None:
        self.name = place.name
        self.instance = place.instance
        self.rank = place.rank
        self.num_ranks = place.num_ranks
        self.cast = cast
        self.cast_hint = cast_hint
        self.joined = joined
        self.weight_state = WeightState[StagedUpdate](place.num_ranks, joined.send)
        """The worker's present, previous and next weights."""
        self.observers = hooks.Notifications(hooks.board)
        """Notifies observers of the worker's rounds."""
        self.last_error: WTransferError | None = None
        """Why the last update was refused or not applied; None once an update is applied."""
        self._made_at = called_from()
        self._is_abandoned = False
        self._vouched_as = vouched_as
        self._target = target
        self._place = place
        self._keep_previous = keep_previous
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        # Held by the thread that changes the model, or decides not to: one change at a time.
        self._model = Changed()
        self._enter()
        self._weights = process_weights.hold(self.weight_state.held.fingerprint, vouched_as)
        self._forget_weights = weakref.finalize(self, self._weights.close)
        close_at_exit(self)

    def _enter(self) -> None:
        """Raise if the model, or a part of it, is that of a committer that was made before."""
        number = id(self)
        # Taken out before another object can have the number; the reference is pop's default.
        _made[number] = weakref.ref(self, functools.partial(_made.pop, number))
        try:
            # In this order: of two that are made at once, the later one sees the earlier.
            for each in list(_made.values()):
                if (other := each()) is self:
                    return
                if other is not None:
                    self._check_apart(other)
        except BaseException:
            del _made[number]
            raise

    def _check_apart(self, other: Committer) -> None:
        if other._pid != self._pid or (other.weight_state.closed and not other._is_abandoned):
            return
        shared = self._shares(other)
        if shared is not None and not other._is_abandoned:
            raise ValueError(
                f"{shared} has a WorkerSession already, made at {other._made_at}: two sessions "
                "would each change it, and neither could say which weights it has; use that "
                "session, or close() it first"
            )
        if shared is not None:
            # Its end is under way. After it, and not before, its publisher hears of this one.
            other.close()

    def _shares(self, other: Committer) -> str | None:
        """Return what of this model is another committer's too, in words; None: nothing."""
        if self._vouched_as is not None and self._vouched_as is other._vouched_as:
            return "this model"
        found = None
        # A model that cannot be read takes no update either.
        with contextlib.suppress(Exception):
            found = shared_memory(_written(self._target), _written(other._target))
        if found is None:
            return None
        name, their_name = found
        also = "" if name == their_name else f", {their_name!r} there,"
        return f"{name!r} of this model{also}"

    # -- for the thread that owns the model

    def check_process(self) -> None:
        """Raise in a forked child.

        Raises:
            ForkedError: This is another process than the one that made the worker.
        """
        check_process(self._pid, "WorkerSession")

    def check_usable(self) -> None:
        """Raise where nothing can be joined or committed any more.

        Raises:
            ClosedError: The worker was closed.
            ForkedError: This is another process than the one that made the worker.
        """
        self.check_process()
        if self.weight_state.closed:
            raise ClosedError("this WorkerSession is closed")

    def check_between_steps(self) -> None:
        """Raise where the model cannot be changed: closed, or within a change of it.

        Raises:
            RoundBusyError: Called from within the target or an observer, while it applies.
            ClosedError: As `check_usable`.
            ForkedError: As `check_usable`.
        """
        self.check_usable()
        # An observer has a thread of its own, which does not own the model.
        if self._model.is_held_here() or self.observers.calls_here():
            raise RoundBusyError(
                "this is called within an update: do not call commit_pending or discard_pending "
                "from a hook or a target; call them between two steps"
            )

    def commit(self) -> bool:
        """Apply the pending update, if there is one; `WorkerSession.commit_pending`."""
        with self._model:
            done, failure = self._do_pending()
        if failure is None:
            return done
        forget_frames(failure.error)
        forget_frames(failure.cause)
        try:
            if failure.cause is None:
                raise failure.error
            raise failure.error from failure.cause
        finally:
            # Else the error, by its traceback and this frame, would keep itself alive.
            del failure

    def discard(self) -> bool:
        """Drop the pending update; return whether there was one."""
        self.check_between_steps()
        with self._model, self.weight_state.changed:
            pending = self.weight_state.discard()
            if pending is not None:
                declined = RoundAbortedError("the host of the model declined the version")
                self.notify_aborted(pending, declined)
        return pending is not None

    def weights_lost(self, reason: str) -> None:
        """Record that the model has no version any more, until the next commit."""
        self.check_between_steps()
        logger.warning("%s is empty: %s", self.name, reason)
        with self._model:
            with self.weight_state.changed:
                self.weight_state.weights_lost(reason)
                self._weights.settle(self.weight_state.held.fingerprint)
            forget = getattr(self._target, "forget", None)
            if forget is not None:
                forget()

    def digests(self) -> dict[str, str]:
        """Return the digest of every tensor of the model, those of one version."""
        self.check_between_steps()
        with self._model:
            return {name: digest(tensor) for name, tensor in (self._present() or {}).items()}

    def close(self) -> None:
        """Leave the publisher and drop what is pending; observers are notified of it first.

        They are waited for as `hooks.WITHIN_S` says, but not by one of themselves.
        """
        if os.getpid() == self._pid:
            wait = not self.observers.calls_here()
            call_apart(lambda: self._close(wait), "wtransfer-close")

    def abandon(self) -> None:
        """Close a worker that nobody can reach any more; called as its session is collected.

        One that has joined no publisher has no threads, and goes with the session.
        """
        self._is_abandoned = True
        is_over = self.weight_state.closed or not self.joined.has_joined
        if os.getpid() == self._pid and not is_over:
            start_in_finaliser(self._end, "wtransfer-close")

    def _end(self) -> None:
        # To the log, which notebooks show: Python drops a ResourceWarning by default.
        logger.warning(
            "%s is closed: nothing refers to its WorkerSession any more, made at %s; keep a "
            "reference for as long as the model takes updates, then close() it",
            self.name,
            self._made_at,
        )
        self._close(wait=True)

    def _close(self, wait: bool) -> None:
        with self.joined.lock:
            if self.weight_state.closed:
                return
            pending = self.weight_state.close()
            # A model that nothing else refers to is collected now, and its name forgotten.
            self._vouched_as = None
            self._forget_weights()
            self.joined.close()
        if pending is not None:
            self.notify_aborted(pending, RoundAbortedError("the worker session was closed"))
        self.observers.close(wait=wait)

    # -- for the publisher's thread, without waits

    def hello(self, host: str | None = None) -> Hello:
        """Return this worker's `Hello`; `host` is the endpoint that let it join."""
        state, place = self.weight_state, self._place
        with state.changed:
            return Hello(
                worker=place.name,
                instance=place.instance,
                rank=place.rank,
                num_ranks=place.num_ranks,
                version=state.held.version,
                fingerprint=state.held.fingerprint,
                state=state.state_for_publisher,
                host=host,
                host_ranks=place.host_ranks,
            )

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return the schema of updates; a target without one follows the last update."""
        schema = self._target.schema()
        last = self.weight_state.held.manifest
        return schema_of(last) if schema is None and last is not None else schema

    @property
    def scheme(self) -> str:
        """How the target's weights are quantised; empty where it does not say."""
        return getattr(self._target, "scheme", "")

    def check_config(self, config: str) -> list[str]:
        """Raise if the target computes by another configuration than that of an update.

        Args:
            config: The update's; empty where it has none.

        Returns:
            Notes for the publisher's report.

        Raises:
            SchemaError: The entries that differ.
        """
        check = getattr(self._target, "check_config", None)
        return list(check(config)) if config and check is not None else []

    def prove_kept(self, manifest: Manifest, on_progress: Callable[[int], None]) -> None:
        """Raise unless this worker has every tensor of an update that does not travel.

        Args:
            manifest: The update.
            on_progress: Called with the bytes that were proven so far.

        Raises:
            DigestMismatchError: The first that it lacks, or has with other bytes.
            SchemaError: The target does not tell what it has.
        """
        self._kept(manifest, self.weight_state.held.tensors)[0].prove(on_progress)

    def _kept(
        self, manifest: Manifest, held: Mapping[str, torch.Tensor] | None
    ) -> tuple[KeptTensors, bool]:
        """Return an update's tensors that did not travel, and whether they are in memory.

        Args:
            manifest: The update.
            held: The set that the model consists of; None: it is not kept.
        """
        lives_on = getattr(self._target, "base", None)
        base = lives_on() if callable(lives_on) else None
        own: Mapping[str, torch.Tensor] | None = held if base is None else base
        if own is None and isinstance(self._target, StateDictTarget):
            own = self._target.present()
        if own is None:
            raise SchemaError(
                f"{manifest.kept[0].piece.name!r} is not sent, and whether this worker has the "
                "publisher's cannot be told: the checkpoint that it began with is not there or was "
                "changed, and no update has brought it"
            )
        return KeptTensors(manifest, own, canonical_names(self.schema() or {})), base is None

    def held_memory(self) -> HeldMemory:
        """Return the memory of the weights that this worker has by an update."""
        held = self.weight_state.held
        if held.version is None:
            return HeldMemory({})
        # Kept for a rollback: what the model has adopted is the same memory.
        return HeldMemory(_written(self._target) if held.tensors is None else held.tensors)

    def held_was_hit(self, tensor: torch.Tensor, reason: str) -> str | None:
        """Note that an engine has written to that memory; return the sentence for the error.

        Nobody can say any more which bytes the weights have: the worker is *empty*. One that has
        copied them into its model serves them on, and cannot go back to the set that it kept.
        """
        state = self.weight_state
        with state.changed:
            held, memory = state.held, self.held_memory()
            names = memory.names_at(tensor)
            if not names:
                return None
            # What a target of another class does with a set is not known.
            is_known = type(self._target).apply in (StateDictTarget.apply, ModuleTarget.apply)
            own = _written(self._target).values()
            serves = not is_known or any(map(memory.has_any, own))
            text = (
                f"{reason} in the memory of {names[0]!r} of version {held.version!r}, which this "
                f"worker {'serves' if serves else 'keeps for a rollback'}: tensors_valid_until = "
                "'round' means valid until the worker releases them, which may be many rounds "
                "later; receive each round into memory that no tensor refers to any more, or "
                "declare 'return'"
            )
            if serves:
                logger.warning("%s is empty: %s", self.name, text)
                state.weights_lost(text)
                self._weights.settle(state.held.fingerprint)
            else:
                state.forget_tensors()
        return text

    def notes(self) -> list[str]:
        """Return the notes on this worker for a publisher, before a round."""
        if self._keep_previous:
            return []
        return ["keeps no previous version: a failed commit empties it"]

    def note_error(self, error: WTransferError) -> None:
        """Note why an update was refused here, and log it unless the last one was for the same."""
        known, self.last_error = self.last_error, ErrorInfo.of(error).rebuild()
        # Without its facts, of which the round is another one each time.
        if known is None or known.message != error.message:
            # The copy, without traceback: frames that still run hold worker and model.
            logger.warning("%s refuses an update: %s", self.name, self.last_error)

    def notify_aborted(self, pending: Pending[StagedUpdate], error: WTransferError) -> None:
        """Notify that the model does not have an update whose commit was ordered."""
        error.add_facts(**pending.update.facts)
        self.observers.notify("wtransfer_round_aborted", error=error, **pending.update.facts)

    def _present(self) -> Mapping[str, torch.Tensor] | None:
        target = self._target
        if isinstance(target, StateDictTarget) and type(target).capture is StateDictTarget.capture:
            # As they lie: `capture` may copy all of them.
            return target.present()
        return target.capture()

    # -- applying

    def _do_pending(self) -> tuple[bool, Failure | None]:
        try:
            pending = self.weight_state.begin()
            if pending is None:
                return False, None
            # From here on serve no KV cache of the old weights, nor any that is not surely new.
            self._weights.change()
            try:
                if pending.rollback_reason is not None:
                    return False, self._restore_previous(pending, pending.held)
                failure = self._apply(pending)
                if failure is None and self.num_ranks > 1:
                    failure = self._await_finish(pending)
                return True, failure
            finally:
                self._weights.settle(self._kv_name())
        except BaseException:
            # An interrupt: errors of the target and the model have become a `Failure`.
            self.weight_state.interrupted()
            raise

    def _kv_name(self) -> str:
        # A host that cannot prove that its model computes with the given weights shares no KV.
        proven = getattr(self._target, "proven", True)
        return self.weight_state.held.kv_name if proven else local_fingerprint()

    def _apply(self, pending: Pending[StagedUpdate]) -> Failure | None:
        begun = time.monotonic()
        pending.update.seconds["wait"] = begun - pending.since
        state, held = self.weight_state, pending.held
        assert held.tensors is not None
        handed = NotedTensors(held.tensors)
        previous = state.held
        if previous.judged is None:
            # The first weights have the form that the model had when an update was first judged.
            previous = replace(previous, judged=held.judged)
        touched = False
        try:
            if held.judged is not None:
                # Coverage was proven for the model as it was when the plan was judged.
                check_unchanged(held.judged, self.schema())
            if self._keep_previous and previous.tensors is None and not state.empty:
                previous = replace(previous, tensors=self._target.capture())
            if held.manifest is not None and held.manifest.kept:
                try:
                    handed.tensors = self._whole(held, previous)
                except DigestMismatchError:
                    # It is not the set before any more that the model computes with.
                    touched, previous = True, replace(previous, tensors=None)
                    raise
                pending = replace(pending, held=replace(held, tensors=handed.tensors))
            touched = True
            self._target.apply(handed)
            pending.update.seconds["commit"] = time.monotonic() - begun
            # Inside `try`: an interrupt after `apply` would leave new weights under the old label.
            with state.changed:
                state.applied(pending, previous, keep=self._keep_previous)
                self.last_error = None
                # Under one lock: the ack is sent, and the plan that it lets come is notified later.
                self.observers.notify(
                    "wtransfer_weights_committed",
                    version=held.version,
                    fingerprint=held.fingerprint,
                    round_id=pending.update.round_id,
                    worker=self.name,
                )
        except BaseException as error:
            if state.has_applied(pending):
                raise
            return self._restore_previous(
                pending, previous, cause=error, touched=touched, last_read=handed.last_read
            )
        logger.info("%s has committed %r (%s)", self.name, held.version, held.fingerprint)
        return None

    def _whole(self, held: WeightSet, previous: WeightSet) -> Mapping[str, torch.Tensor]:
        """Return all tensors of a set: those that did not travel as the set before has them."""
        assert held.manifest is not None
        assert held.tensors is not None
        found, is_in_memory = self._kept(held.manifest, previous.tensors)
        # In memory: the tensors themselves, without the sets before that they came with.
        kept: Any = dict(found) if is_in_memory else found
        return ChainMap(dict(held.tensors), kept)

    def _restore_previous(
        self,
        pending: Pending[StagedUpdate],
        previous: WeightSet,
        *,
        cause: BaseException | None = None,
        touched: bool = True,
        last_read: str | None = None,
    ) -> Failure:
        """Apply the previous set again, and return the failure for the caller of `commit_pending`.

        Args:
            pending: The commit that failed, or the rollback that was ordered.
            previous: The set that the model had.
            cause: Why the commit failed; None: the publisher has ordered a rollback.
            touched: True if the model may have been changed.
            last_read: The tensor that the target had read last.
        """
        undone = pending.update.version
        # An empty worker whose model was not touched is as empty as before.
        restored = previous.tensors is not None if touched else not self.weight_state.empty
        if restored:
            try:
                if touched:
                    assert previous.tensors is not None
                    self._target.apply(previous.tensors)
                # Also where nothing was touched here: others may have changed the model.
                self._check_has(previous)
            except BaseException:
                logger.exception("%s could not restore %r", self.name, previous.version)
                restored = False
        not_restored = "the old version could not be restored: this worker must not serve"
        if cause is None:
            piece = None
            text = f"{undone!r} was rolled back: {pending.rollback_reason}"
            text += "" if restored else f"; {not_restored}"
        else:
            piece = getattr(cause, "piece", None) or last_read
            back = f"{previous.version!r}" if previous.version else "its first weights"
            text = (
                f"applying {undone!r} failed{f' after reading {piece!r}' if piece else ''} "
                f"({type(cause).__name__}: {cause}); "
                f"{f'the worker has {back} again' if restored else not_restored}"
            )
        failure = CommitError(
            text,
            worker=self.name,
            round_id=pending.update.round_id,
            version=undone,
            phase="commit",
            piece=piece,
        )
        failure.restored = restored
        self.last_error = ErrorInfo.of(failure).rebuild()
        with self.weight_state.changed:
            # As in `_apply`.
            self.weight_state.not_applied(pending, previous, failure, restored=restored)
            self.notify_aborted(pending, failure)
        if cause is None or isinstance(cause, Exception):
            return Failure(failure, cause)
        return Failure(cause)

    def _check_has(self, held: WeightSet) -> None:
        try:
            schema = self._target.schema()
        except SchemaError as error:
            if error.piece is not None:
                raise
            # The target takes no update at all: no statement about any tensor.
            return
        if held.judged is not None and schema is not None:
            check_has(held.judged, held.tensors, schema, self._present)

    def _await_finish(self, committed: Pending[StagedUpdate]) -> Failure | None:
        """Wait until every rank has committed; no step may run while ranks differ."""
        state = self.weight_state

        def settled() -> bool:
            return state.finished or state.pending is not None or state.closed

        state.changed.wait_for(settled, self._deadline_s)
        with state.changed:
            if not settled():
                # Other ranks may not have committed: this one must not serve new weights alone.
                reason = f"not released within {self._deadline_s:g} s"
                state.rollback(committed.update.round_id, reason)
            # Else the commit was finished, and the next one may be pending already.
            rollback = state.pending
            if rollback is None or rollback.rollback_reason is None:
                return None
            state.begin()
        return self._restore_previous(rollback, rollback.held)


def _written(target: WeightTarget) -> Mapping[str, torch.Tensor]:
    """Return the tensors that a target writes; none where only a user's code knows them."""
    return target.own_tensors() if isinstance(target, StateDictTarget) else {}
