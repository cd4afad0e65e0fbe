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

import math
import os
import secrets
import socket
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.deadline import Deadline, checked_timeout
from wtransfer.errors import StallError
from wtransfer.weight_sync.worker.committer import Committer, Place
from wtransfer.weight_sync.worker.joined import JoinedPublisher
from wtransfer.weight_sync.worker.schema import CAST_HINT
from wtransfer.weight_sync.worker.target import CommitMode, as_target

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch
    from torch import nn
    from typing_extensions import Self

    from wtransfer.weight_sync.worker.participant import StagedUpdate
    from wtransfer.weights import WeightTarget


@dataclass(frozen=True)
class ServingHost:
    """A serving engine that opens a session for each rank of its model."""

    cast_hint: str = CAST_HINT
    """How its users allow `WorkerSession`'s ``cast``, for errors."""
    num_ranks: int | None = None
    """Ranks that it invites, where the address by which it is invited may report another number."""


def is_set(variable: str) -> bool:
    """Return whether users of a serving engine have set a switch in its environment.

    Args:
        variable: The switch: 1 is on, 0 or none is off.

    Raises:
        ValueError: It has another value.
    """
    value = os.environ.get(variable) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{variable} is {value!r}, expected 0 or 1")
    return value == "1"


@dataclass(frozen=True)
class UpdateStatus:
    """An update on its way, as its worker sees it."""

    round_id: str
    """Round that brings it."""
    version: str
    """Its label."""
    phase: str
    """``plan``, ``transfer``, ``prepare``, or ``commit`` while it waits for `commit_pending`."""
    nbytes: int
    """Bytes of it."""
    staged_nbytes: int
    """Bytes that are here so far."""
    age_s: float
    """Seconds since its plan came."""
    idle_s: float
    """Seconds since bytes of it came, or a step of the round was done."""


@dataclass(frozen=True)
class WorkerStatus:
    """A worker at one moment, as it sees itself."""

    worker: str
    """Name for people."""
    instance: str
    """Serving instance, whose ranks commit all or none."""
    rank: int
    """Rank within the instance."""
    num_ranks: int
    """Ranks of the instance."""
    version: str | None
    """Label of the weights that the model has; None before the first commit."""
    fingerprint: str
    """Identity of the weights that the model has."""
    verified: str | None
    """How these weights were proven; None for weights that no update has brought."""
    state: str
    """``fresh``, ``serving``, ``pending``, ``behind`` or ``empty``."""
    since_s: float
    """Seconds since the model's weights or this state last changed."""
    update: UpdateStatus | None
    """The update that is being received, verified or waits to be applied; None: there is none."""
    staging: str | None
    """Round whose update is being received and verified; None: there is none."""
    pending: bool
    """True if a verified update waits for `commit_pending`, whatever `state` says."""
    orphaned: bool
    """True if that update has lost its publisher. It is verified and its commit was ordered, so it
    may still be applied; no report waits for it any more."""
    publisher: str | None
    """Address by which a publisher, or a folder of versions, was joined; None: none is joined."""
    connected: bool
    """True if that publisher is reached right now."""
    refusal: Exception | None
    """Why that publisher last refused this worker (token, protocol); None if it has not."""
    last_error: Exception | None
    """Why the last update was refused or not applied; None once an update is applied."""
    num_dropped: int
    """Late or repeated messages that were dropped."""


class WorkerSession:
    """Receives weight updates for one worker process, or one rank of it.

    Keep a reference for as long as the model takes updates: a session that has joined a publisher
    closes itself once nothing refers to it, and the log names the line that made it. A model has
    one session per process; disjoint parts of a model may have one session each.

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
        serving_host: The serving engine whose plug-in opens this session; None: there is none.

    Raises:
        AuthenticationError: As `join`.
        SchemaError: The model has tensors that cannot be written to.
        TypeError: Not a model, nor a target.
        ValueError: The model, or a part of it, has a session that is not closed: the text says
            where that was made. Or an argument has no such value.
    """

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
        serving_host: ServingHost | None = None,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank is {rank}, expected 0 <= rank < num_ranks ({num_ranks})")
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise ValueError(f"deadline_s is {deadline_s}, expected a finite number above 0")
        name = name or f"{socket.gethostname()}:{os.getpid()}/{rank}"
        instance = instance or f"{name}:{secrets.token_hex(4)}"
        serving_host = serving_host or ServingHost()
        target = as_target(model_or_target, commit)
        self._joined = JoinedPublisher(token, engines)
        self._committer = Committer(
            target,
            getattr(target, "vouched_as", model_or_target),
            Place(name, instance, rank, num_ranks, serving_host.num_ranks),
            self._joined,
            keep_previous=keep_previous,
            cast=cast,
            cast_hint=serving_host.cast_hint,
            deadline_s=deadline_s,
        )
        # Threads refer to the committer, and none of them to the session.
        weakref.finalize(self, self._committer.abandon).atexit = False
        if join is not None:
            try:
                self.join(join)
            except BaseException:
                # The error may be kept, and this session with it: a notebook keeps the last one.
                self._committer.close()
                raise

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
        self._committer.check_usable()
        self._joined.join(self._committer, address, token, host)

    def leave(self, address: str) -> None:
        """Leave the publisher; the model keeps the weights that it has.

        Raises:
            ValueError: Not an address, or one that was not joined.
        """
        self._committer.check_usable()
        self._joined.leave(address)

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
        self._committer.check_between_steps()
        state = self._committer.weight_state
        state.changed.wait_for(lambda: state.pending is not None or state.closed, timeout_s)
        return self._committer.commit()

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
        self._committer.check_between_steps()
        state = self._committer.weight_state
        await state.changed.wait_for_async(
            lambda: state.pending is not None or state.closed, timeout_s
        )
        return self._committer.commit()

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
                status = self.status()
                why = status.last_error or status.refusal
                reached = "a publisher is connected" if status.connected else "none is reached"
                raise StallError(
                    f"{version!r} has not come within {timeout_s:g} s: {reached}, the model has "
                    f"{status.version!r}" + (f"; last error: {why}" if why else ""),
                    seconds=timeout_s,
                ) from why
            self.commit_pending(deadline.remaining())

    def discard_pending(self) -> bool:
        """Drop a verified update that waits for `commit_pending`; return whether there was one."""
        return self._committer.discard()

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
        self._committer.weights_lost(reason)

    def digests(self) -> dict[str, str]:
        """Return the xxh3-128 of every tensor that the model has now, computed afresh.

        Waits while an update is being applied, so the digests are those of one version.

        Raises:
            ClosedError: The session was closed.
        """
        return self._committer.digests()

    @property
    def version(self) -> str | None:
        """Label of the weights that the model has; None before the first commit."""
        return self._committer.weight_state.held.version

    @property
    def fingerprint(self) -> str:
        """Identity of the weights that the model has."""
        return self._committer.weight_state.held.fingerprint

    @property
    def state(self) -> str:
        """``fresh``, ``serving``, ``pending``, ``behind`` or ``empty``."""
        return self.status().state

    def status(self) -> WorkerStatus:
        """Return what the worker has, what it waits for, and what was refused, at one moment.

        Raises:
            ForkedError: This is another process than the one that made the session.
        """
        committer = self._committer
        committer.check_process()
        state = committer.weight_state
        # Under one lock: no update is applied, and no round begins or ends, in between.
        with state.changed:
            held, update, pending = state.held, state.update, state.pending
            publisher, now = self._joined.current, time.monotonic()
            is_pending = pending is not None and state.state == "pending"
            return WorkerStatus(
                worker=committer.name,
                instance=committer.instance,
                rank=committer.rank,
                num_ranks=committer.num_ranks,
                version=held.version,
                fingerprint=held.fingerprint,
                verified=held.verified,
                state=state.state,
                since_s=now - (pending.since if pending and is_pending else state.since),
                update=_on_its_way(update if pending is None else pending.update, state.phase, now),
                staging=None if update is None else update.round_id,
                pending=pending is not None,
                orphaned=pending is not None and not pending.update.publisher.connected,
                publisher=None if publisher is None else publisher.address,
                connected=publisher is not None and publisher.connected,
                refusal=None if publisher is None else publisher.refusal,
                last_error=committer.last_error,
                num_dropped=state.num_dropped,
            )

    def close(self) -> None:
        """Leave the publisher. The model keeps the weights that it has.

        Observers are notified of all that has happened before the call returns; one that has not
        returned within 5 s is left behind.
        """
        self._committer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _on_its_way(update: StagedUpdate | None, phase: str | None, now: float) -> UpdateStatus | None:
    if update is None or phase is None:
        return None
    manifest = update.held.manifest
    return UpdateStatus(
        round_id=update.round_id,
        version=update.version,
        phase=phase,
        nbytes=0 if manifest is None else manifest.nbytes,
        staged_nbytes=update.staged_nbytes,
        age_s=now - update.started_at,
        idle_s=now - update.moved_at,
    )
