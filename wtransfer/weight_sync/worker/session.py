"""A worker's session: receives updates, proves them, and applies them when the model allows it.

A session has two sides. The channel and the engine work on threads of their own and bring an
update up to the point where it is verified; the model meanwhile serves. Only `commit_pending`,
called between two steps by the thread that owns the model, changes the model.

    fresh ──commit──> serving <──────────┐
      │                  │               │ commit_pending
      └────── T commit ──┴──> pending ───┤
                                         ├──> behind (rolled back: the old version, whole)
                                         └──> empty  (could not be restored: must not serve)

From any of them `weights_lost` leads to *empty*, and the next commit out of it. The whole state
machine is `wtransfer.weight_sync.worker.weight_state`.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from wtransfer.calls import Changed, call_apart, check_process, close_at_exit, forget_frames
from wtransfer.deadline import Deadline, checked_timeout
from wtransfer.errors import (
    AuthenticationError,
    ClosedError,
    CommitError,
    RoundAbortedError,
    RoundBusyError,
    SchemaError,
    StallError,
    WTransferError,
)
from wtransfer.manifest import local_fingerprint
from wtransfer.registry import hooks
from wtransfer.transport.address import parse_address
from wtransfer.transport.digests import digest
from wtransfer.transport.handshake import resolve_token
from wtransfer.weight_sync.messages import ErrorInfo, Hello
from wtransfer.weight_sync.worker.follower import Follower, folder_of, is_folder
from wtransfer.weight_sync.worker.participant import PublisherConnection, StagedUpdate
from wtransfer.weight_sync.worker.schema import CAST_HINT, check_has, check_unchanged, schema_of
from wtransfer.weight_sync.worker.target import (
    CommitMode,
    NotedTensors,
    StateDictTarget,
    as_target,
)
from wtransfer.weight_sync.worker.weight_state import WeightState
from wtransfer.weight_version import process_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    import msgspec
    import torch
    from torch import nn
    from typing_extensions import Self

    from wtransfer.transport.address import Address
    from wtransfer.weight_sync.worker.weight_state import Pending, WeightSet
    from wtransfer.weights import TensorSpec, WeightTarget

logger = logging.getLogger(__name__)


LOSS_GRACE_S = 0.25
"""Seconds that `WorkerSession.join` waits for the loss of a connected publisher to be noticed."""
LOSS_POLL_S = 0.005
"""Seconds between two polls of that."""


class Failure(NamedTuple):
    """The error that `commit_pending` raises once no frame with tensors in it is left."""

    error: BaseException
    """For the caller."""
    cause: BaseException | None = None
    """Its cause, if that is another error."""


class WorkerSession:
    """Receives weight updates for one worker process, or one rank of it.

    Args:
        model_or_target: A torch module, a mapping of names to tensors, or a `WeightTarget`.
        join: Address of the publisher; see `join()`.
        token: Shared secret. Default: ``WTRANSFER_TOKEN``, or the owner-only file that
            ``WTRANSFER_TOKEN_FILE`` names.
        commit: ``"adopt"`` points parameters at the staged memory (those of up to 16 KiB keep their
            own memory, which is written), ``"copy"`` writes into the existing memory.
        keep_previous: Keep the previous weights, to roll back if applying fails. Without them a
            failed commit leaves the session *empty*.
        cast: Allow updates in another floating dtype than the model's.
        engines: Engine names that a publisher may ask for. Default: every one found here.
        instance: Serving instance that this rank belongs to; its ranks commit all or none.
        rank: Rank within the instance.
        num_ranks: Ranks of the instance.
        deadline_s: Longest wait for the other ranks of the instance at a commit, in seconds. Steps
            with a publisher are bounded by the publisher's deadline.
        name: Name for people. Default: host, process id and rank.
    """

    cast_hint: str = CAST_HINT
    """How a user allows `cast`, for errors; a host that offers another way sets another text."""
    host_ranks: int | None = None
    """Ranks that this worker's host invites, where the host itself may report another number."""

    def __init__(
        self,
        model_or_target: nn.Module | Mapping[str, torch.Tensor] | WeightTarget,
        *,
        join: str | None = None,
        token: str | None = None,
        commit: CommitMode = "adopt",
        keep_previous: bool = True,
        cast: bool = False,
        engines: Collection[str] | None = None,
        instance: str | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        deadline_s: float = 30.0,
        name: str | None = None,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank is {rank}, expected 0 <= rank < num_ranks ({num_ranks})")
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise ValueError(f"deadline_s is {deadline_s}, expected a finite number above 0")
        self.cast = cast
        self.name = name or f"{socket.gethostname()}:{os.getpid()}/{rank}"
        self.rank = rank
        self.num_ranks = num_ranks
        self.weight_state = WeightState[StagedUpdate](num_ranks, self._send)
        """The worker's present, previous and next weights."""
        self.publisher: PublisherConnection | Follower | None = None
        """The publisher, or the folder of versions, that was joined and not left."""
        self._target = as_target(model_or_target, commit)
        self._token = token
        self._keep_previous = keep_previous
        self._engines = None if engines is None else frozenset(engines)
        self._instance = instance or f"{self.name}:{secrets.token_hex(4)}"
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        self._last_error: WTransferError | None = None
        # Held while a publisher is joined or left.
        self._joining = threading.RLock()
        # Held by the thread that changes the model, or decides not to: one change at a time.
        self._model = Changed()
        model = getattr(self._target, "vouched_as", model_or_target)
        self._weights = process_weights.hold(self.weight_state.held.fingerprint, model)
        self._forget_weights = weakref.finalize(self, self._weights.close)
        close_at_exit(self)
        if join is not None:
            self.join(join)

    # -- for the thread that owns the model

    def join(self, address: str, *, token: str | None = None, host: str | None = None) -> None:
        """Dial a publisher, now and again whenever the connection is lost, until closed or left.

        ``file:/path`` is the folder that engine ``file`` publishes to: the session takes its
        current version, now and later, also when no publisher lives.

        A session has one publisher. While it is connected no other can be joined; a lost publisher
        is replaced. A folder is connected while it has a version.

        Does not wait for the publisher: dialing goes on until the publisher is there.

        Args:
            address: The publisher's, or that of a folder.
            token: Its secret, where that is another than the session's. A folder has none: any
                process that may read the folder may follow it.
            host: The publisher's name of the host that it has asked to let this worker join.

        Raises:
            AuthenticationError: No token was given and none is in the environment.
            RoundBusyError: Another publisher is connected.
            ValueError: Not an address, one that was joined before, or a folder's for a rank of
                several.
        """
        self._check_usable()
        with self._joining:
            current = self.publisher
            # Before any connection: the publisher would refuse a second one as the same worker.
            if self.publisher_at(address) is not None:
                raise ValueError(f"this WorkerSession has joined {address} already; join it once")
            # A publisher that ended a moment ago is noticed within milliseconds.
            grace = Deadline(LOSS_GRACE_S)
            while current is not None and current.connected and not grace.expired:
                time.sleep(LOSS_POLL_S)
            since = None if current is None else current.connected_since
            if current is not None and since is not None:
                raise RoundBusyError(
                    f"{self.name} cannot join {address}: its publisher is {current.address}, "
                    f"connected for {time.monotonic() - since:.1f} s; leave that one, or end it"
                )
            if is_folder(address) and self.num_ranks > 1:
                raise ValueError(
                    f"a rank of {self.num_ranks} cannot follow {address}: a folder cannot see to "
                    "it that all ranks commit or none; join a publisher (it may send a kept "
                    "version)"
                )
            secret = resolve_token(self._token if token is None else token, os.environ)
            if not is_folder(address) and secret is None:
                raise AuthenticationError(
                    f"no token for {address}: pass token=, or set WTRANSFER_TOKEN to the "
                    "publisher's"
                )
            self.publisher = None
            if current is not None:
                # First: from here on no message of the old publisher can begin a round.
                current.close()
            publisher: PublisherConnection | Follower
            if secret is None or is_folder(address):
                publisher = Follower(self, address)
            else:
                publisher = PublisherConnection(self, address, secret, host, self._engines)
            # In this order: messages after the hello must reach the publisher.
            self.publisher = publisher
            try:
                publisher.start()
            except BaseException:
                self.publisher = None
                raise

    def leave(self, address: str) -> None:
        """Leave the publisher; the model keeps the weights that it has.

        Raises:
            ValueError: Not an address, or one that was not joined.
        """
        self._check_usable()
        with self._joining:
            current = self.publisher_at(address)
            if current is None:
                raise ValueError(f"this WorkerSession has not joined {address}")
            self.publisher = None
            current.close()

    def commit_pending(self, timeout_s: float = 0.0) -> bool:
        """Apply a verified update, if there is one. Call it between two steps of the model.

        For a rank of several the call returns once the other ranks have applied it too, or at
        `deadline_s`. So all ranks must call it between the same two steps: a rank that goes on into
        a collective instead would wait there for a rank that waits here.

        Args:
            timeout_s: How long to wait for an update, in seconds.

        Returns:
            True if an update was applied.

        Raises:
            CommitError: Applying failed, here or in another rank of this instance. The old version
                is whole again, unless `CommitError.restored` is false.
            RoundBusyError: Called from within the target or an observer, while it applies.
            ValueError: `timeout_s` is not a number, or less than 0.
        """
        timeout_s = checked_timeout(timeout_s)
        self._check_usable()
        self._check_not_within()
        state = self.weight_state
        state.changed.wait_for(lambda: state.pending is not None or state.closed, timeout_s)
        return self._commit_now()

    async def commit_pending_async(self, timeout_s: float = 0.0) -> bool:
        """Apply a verified update, for a model that the thread of an event loop owns.

        The wait for an update does not block the loop; applying it does, as a step of the model
        would, and takes place on the loop's thread. For a rank of several it blocks until the other
        ranks have applied it too: run each rank in a process of its own, or use `commit_pending` on
        a thread. A wait that is cancelled applies nothing.

        Args:
            timeout_s: How long to wait for an update, in seconds.

        Returns:
            True if an update was applied.

        Raises:
            CommitError: As `commit_pending`.
            RoundBusyError: As `commit_pending`.
            ValueError: As `commit_pending`.
        """
        timeout_s = checked_timeout(timeout_s)
        self._check_usable()
        self._check_not_within()
        state = self.weight_state
        await state.changed.wait_for_async(
            lambda: state.pending is not None or state.closed, timeout_s
        )
        return self._commit_now()

    def _commit_now(self) -> bool:
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

    def wait_for(self, version: str, timeout_s: float) -> None:
        """Apply updates as they come until the model has `version`; for workers that do not serve.

        Call it on the thread that owns the model, as `commit_pending`.

        Args:
            version: Label.
            timeout_s: How long to wait, in seconds.

        Raises:
            StallError: The version has not come in time; the text gives the last known error.
            CommitError: Applying an update failed; as `commit_pending`.
            ValueError: As `commit_pending`.
        """
        deadline = Deadline(checked_timeout(timeout_s))
        while self.version != version:
            if deadline.expired:
                why = self.last_error or self.refusal
                reached = "a publisher is connected" if self.connected else "none is reached"
                raise StallError(
                    f"{version!r} has not come within {timeout_s:g} s: {reached}, the model has "
                    f"{self.version!r}" + (f"; last error: {why}" if why else ""),
                    seconds=timeout_s,
                ) from why
            self.commit_pending(deadline.remaining())

    def discard_pending(self) -> bool:
        """Drop a verified update that waits for `commit_pending`; return whether there was one."""
        self._check_usable()
        self._check_not_within()
        with self._model:
            pending = self.weight_state.discard()
        if pending is not None:
            declined = RoundAbortedError("the host of the model declined the version")
            self.notify_aborted(pending, declined)
        return pending is not None

    def weights_lost(self, reason: str) -> None:
        """Declare that the model no longer holds the last commit; its weights have no name.

        For hosts whose model loses its weights by other ways than a commit: put to sleep
        without them, or reloaded from disk. Call it between two steps of the model. The session is
        *empty* until the next commit. The publisher is told, and brings the current version again
        where its engine can.

        A verified update that waits for `commit_pending` stays (`pending`): it is complete and its
        publisher has ordered its commit, so applying it is the shortest way to named weights.

        Args:
            reason: How the weights were lost, for people.

        Raises:
            RoundBusyError: Called from within the target or an observer, while it applies.
            ClosedError: The session was closed.
        """
        self._check_usable()
        self._check_not_within()
        logger.warning("%s is empty: %s", self.name, reason)
        with self._model:
            with self.weight_state.changed:
                self.weight_state.weights_lost(reason)
                self._weights.settle(self.weight_state.held.fingerprint)
            forget = getattr(self._target, "forget", None)
            if forget is not None:
                forget()

    @property
    def pending(self) -> bool:
        """True if a verified update waits for `commit_pending`, whatever `state` says."""
        check_process(self._pid, "WorkerSession")
        return self.weight_state.pending is not None

    @property
    def version(self) -> str | None:
        """Label of the weights that the model has; None before the first commit."""
        return self.weight_state.held.version

    @property
    def fingerprint(self) -> str:
        """Identity of the weights that the model has."""
        return self.weight_state.held.fingerprint

    @property
    def state(self) -> str:
        """``fresh``, ``serving``, ``pending``, ``behind`` or ``empty``."""
        check_process(self._pid, "WorkerSession")
        with self.weight_state.changed:
            return self.weight_state.state

    @property
    def connected(self) -> bool:
        """True if the publisher is reached right now."""
        publisher = self.publisher
        return publisher is not None and publisher.connected

    @property
    def orphaned(self) -> bool:
        """True if the update that waits for `commit_pending` has lost its publisher.

        The update is verified and its commit was ordered, so it may still be applied; no report
        waits for it any more.
        """
        pending = self.weight_state.pending
        return pending is not None and not pending.update.publisher.connected

    def publisher_at(self, address: str) -> PublisherConnection | Follower | None:
        """Return the publisher, if it was joined by this address; else None.

        Raises:
            AddressError: Not an address.
        """
        place, publisher = _place(address), self.publisher
        return publisher if publisher is not None and _place(publisher.address) == place else None

    @property
    def refusal(self) -> Exception | None:
        """Why the publisher last refused this worker (token, protocol); None if it has not."""
        return None if self.publisher is None else self.publisher.refusal

    @property
    def last_error(self) -> Exception | None:
        """Why the last update was refused or not applied; None once an update is applied."""
        return self._last_error

    def note_error(self, error: WTransferError) -> None:
        """Note, and log, why an update was refused here."""
        # A copy without traceback, also for the log: frames that still run hold session and model.
        self._last_error = ErrorInfo.of(error).rebuild()
        logger.warning("%s refuses an update: %s", self.name, self._last_error)

    def digests(self) -> dict[str, str]:
        """Return the xxh3-128 of every tensor that the model has now, computed afresh.

        Waits while an update is being applied, so the digests are those of one version.

        Raises:
            ClosedError: The session was closed.
        """
        self._check_usable()
        self._check_not_within()
        with self._model:
            return {name: digest(tensor) for name, tensor in (self._present() or {}).items()}

    @property
    def num_dropped(self) -> int:
        """Late or repeated messages that were dropped."""
        return self.weight_state.num_dropped

    def close(self) -> None:
        """Leave the publisher. The model keeps the weights that it has."""
        if os.getpid() == self._pid:
            call_apart(self._close, "wtransfer-close")

    def _close(self) -> None:
        with self._joining:
            if self.weight_state.closed:
                return
            pending = self.weight_state.close()
            self._forget_weights()
            if self.publisher is not None:
                self.publisher.close()
        if pending is not None:
            self.notify_aborted(pending, RoundAbortedError("the worker session was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for the publisher's thread, without waits

    def hello(self, host: str | None = None) -> Hello:
        """Return this worker's `Hello`; `host` is the endpoint that let it join."""
        state = self.weight_state
        with state.changed:
            return Hello(
                worker=self.name,
                instance=self._instance,
                rank=self.rank,
                num_ranks=self.num_ranks,
                version=state.held.version,
                fingerprint=state.held.fingerprint,
                state=state.state_for_publisher,
                host=host,
                host_ranks=self.host_ranks,
            )

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return the schema of updates; a target without one follows the last update."""
        schema = self._target.schema()
        last = self.weight_state.held.manifest
        return schema_of(last) if schema is None and last is not None else schema

    def notes(self) -> list[str]:
        """Return the notes on this worker for a publisher, before a round."""
        if self._keep_previous:
            return []
        return ["keeps no previous version: a failed commit empties it"]

    def notify_aborted(self, pending: Pending[StagedUpdate], error: WTransferError) -> None:
        """Tell observers that the model does not have an update whose commit was ordered."""
        error.add_facts(**pending.update.facts)
        hooks.notify("wtransfer_round_aborted", error=error, **pending.update.facts)

    def _send(self, message: msgspec.Struct) -> None:
        publisher = self.publisher
        if publisher is not None:
            publisher.send(message)

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
            touched = True
            self._target.apply(handed)
            pending.update.seconds["commit"] = time.monotonic() - begun
            # Inside `try`: an interrupt after `apply` would leave new weights under the old label.
            # Observers come after: the publisher waits for the ack, with a deadline.
            state.applied(pending, previous, keep=self._keep_previous)
        except BaseException as error:
            if state.has_applied(pending):
                raise
            return self._restore_previous(
                pending, previous, cause=error, touched=touched, last_read=handed.last_read
            )
        self._last_error = None
        logger.info("%s has committed %r (%s)", self.name, held.version, held.fingerprint)
        hooks.notify(
            "wtransfer_weights_committed",
            version=held.version,
            fingerprint=held.fingerprint,
            round_id=pending.update.round_id,
            worker=self.name,
        )
        return None

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
        self._last_error = ErrorInfo.of(failure).rebuild()
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

    def _check_not_within(self) -> None:
        if self._model.is_held_here():
            raise RoundBusyError(
                "this thread is applying an update already: do not call commit_pending or "
                "discard_pending from a hook or a target; call them between two steps"
            )

    def _check_usable(self) -> None:
        check_process(self._pid, "WorkerSession")
        if self.weight_state.closed:
            raise ClosedError("this WorkerSession is closed")


def _place(address: str) -> Address | Path:
    return folder_of(address) if is_folder(address) else parse_address(address)
