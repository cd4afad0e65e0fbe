"""One round: plan, transfer, prepare, commit, finish. All or nothing until the first commit.

`RoundState` decides what may be sent; the threads here only feed it and wait on it. Three kinds of
threads meet, under one lock, the publisher's: the channel's, which takes in the workers' answers;
the round's own, which takes the steps; and the engine's, which sends. Every wait of the latter two
ends on an answer, a fault, a lost peer, an abort, or the deadline. So no wait hangs, whichever
process dies.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import math
import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from wtransfer.calls import check_process
from wtransfer.deadline import Deadline
from wtransfer.errors import (
    CommitError,
    GroupError,
    NonfiniteError,
    PeerLostError,
    RemoteError,
    RoundAbortedError,
    StallError,
    WTransferError,
)
from wtransfer.registry import hooks
from wtransfer.weight_sync.messages import Plan, RoundStatus
from wtransfer.weight_sync.report import Report, WorkerReport, commit_error, is_ok
from wtransfer.weight_sync.trainer.round_state import RoundState
from wtransfer.weight_sync.trainer.workers import send_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wtransfer.transport.layout import TensorLayout
    from wtransfer.weight_sync.report import WorkerInfo
    from wtransfer.weight_sync.trainer.engine_runner import EngineCall, EngineRunner, Origin
    from wtransfer.weight_sync.trainer.membership import Membership
    from wtransfer.weight_sync.trainer.round_state import Instance, RankAnswers
    from wtransfer.weight_sync.trainer.workers import Worker
    from wtransfer.weights import WeightSource

logger = logging.getLogger(__name__)

LostPolicy = Literal["abort", "drop"]
"""Effect of the loss of a worker before the commit."""
NonfinitePolicy = Literal["allow", "warn", "reject"]
"""Effect of NaN or infinity in the weights."""

CAUSE_GRACE_S = 0.3
"""Seconds for the cause of a broken group to show, before the break itself counts as the cause."""
JOINER_PATIENCE_S = 1.0
"""Seconds that rounds wait for a worker that has joined by itself and never held a version, beyond
their wait for the others; and for one that is just being brought up to date to commit."""
ROLLBACK_GRACE_S = 1.0
"""Seconds that ranks get to roll back before the report is made; they go on afterwards."""

_HELD = ("committed", "verified")


@dataclass(frozen=True)
class Rules:
    """A publisher's rules for its rounds.

    Raises:
        ValueError: A choice that does not exist, or a number out of range.
    """

    min_workers: int = 1
    """Fewest instances that a round may have."""
    on_lost_worker: LostPolicy = "abort"
    """``"drop"`` lets the others commit, as long as `min_workers` remain."""
    nonfinite: NonfinitePolicy = "allow"
    """``"allow"`` does not look for NaN and infinity, ``"warn"`` logs and counts them,
    ``"reject"`` ends the round."""
    deadline_s: float = 30.0
    """Longest time without progress, in seconds."""
    return_s: float | None = None
    """Longest wait of a round for a named host that is absent, in seconds; None: the default."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("on_lost_worker", ("abort", "drop")),
            ("nonfinite", ("allow", "warn", "reject")),
        ):
            value = getattr(self, name)
            if value not in choices:
                expected = ", ".join(map(repr, choices))
                raise ValueError(f"{name} is {value!r}, expected one of {expected}")
        # bool is an int to isinstance; True workers are a mistake all the same.
        if type(self.min_workers) is not int or self.min_workers < 1:
            raise ValueError(f"min_workers is {self.min_workers!r}, expected an integer >= 1")
        if type(self.deadline_s) not in (int, float) or not 0 < self.deadline_s < math.inf:
            raise ValueError(
                f"deadline_s is {self.deadline_s!r}, expected a finite number of seconds > 0"
            )
        if self.return_s is not None and not (
            type(self.return_s) in (int, float) and 0 <= self.return_s < math.inf
        ):
            raise ValueError(
                f"return_s is {self.return_s!r}, expected a finite number of seconds >= 0, or None"
            )


@dataclass(frozen=True)
class ProvenUpdate:
    """An update that every worker of a round has proven to have, and holds after the commit."""

    version: str
    """Label."""
    layout: TensorLayout
    """Pieces."""
    digests: list[str]
    """In plan order."""
    fingerprint: str
    """Identity."""


@dataclass
class Clock:
    """Seconds by phase."""

    begun: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    def lap(self, phase: str) -> None:
        """Note the end of a phase, which began with the end of the one before."""
        self.seconds[phase] = self.total() - sum(self.seconds.values())

    def total(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self.begun


class Coordinator:
    """Takes the steps of one round, on a thread of its own.

    Callers have its face, `Round`; an engine and its calls have it as `RoundSteps`.

    Args:
        version: Label.
        runner: The trainer's engine.
        membership: The workers.
        instances: The workers that take part, by instance.
        rules: The publisher's rules.
        origin: The engine that workers must have.
        proven: An update that was committed before and is sent again; None: the source's.
        instead: Source to send from; None: the user's source.
        dry_run: True to end when every worker has verified, without a commit.
        is_gating: Returns whether the round waits for an instance, by its workers.
        absent: Returns the named hosts whose workers have not all joined, and why. Called under the
            lock, as the report is made.
        apply: Lets these hosts apply the committed update, where that takes a call; reports each
            host that has answered, and returns the errors of hosts whose call failed.
        on_planned: Called when the metadata of the source was read, on the round's thread.
        on_packed: Called once when the trainer may change its weights again.
        on_done: Called when the round is over, on its thread.
    """

    def __init__(
        self,
        version: str,
        *,
        runner: EngineRunner,
        membership: Membership,
        instances: dict[str, list[Worker]],
        rules: Rules,
        origin: Origin,
        proven: ProvenUpdate | None = None,
        instead: WeightSource | None = None,
        dry_run: bool = False,
        is_gating: Callable[[list[Worker]], bool],
        absent: Callable[[], Mapping[str, WTransferError]],
        apply: Callable[[str, set[str], Callable[[str], None]], dict[str, WTransferError]],
        on_planned: Callable[[Coordinator], None],
        on_packed: Callable[[], None],
        on_done: Callable[[Coordinator], None],
    ) -> None:
        self.pid = os.getpid()
        self.version = version
        self.round_id = secrets.token_hex(8)
        self.phase = "init"
        self.proven = proven
        self.is_resend = proven is not None
        self.is_own = proven is None and instead is None
        """True if the weights are read from the user's source."""
        self.dry_run = dry_run
        self.members = frozenset(worker for ranks in instances.values() for worker in ranks)
        self.called_off = False
        """True if `abort` ended the round."""
        self._instead = instead
        self._runner = runner
        self._membership = membership
        self._lock = self.changed = membership.changed
        self._rules = rules
        self._origin = origin
        self._absent = absent
        self._apply = apply
        self._unanswered: set[str] = set()
        """Hosts that have not answered the call in which their workers apply the update."""
        self._apply_errors: dict[str, WTransferError] = {}
        self._on_planned = on_planned
        self._on_packed = on_packed
        self._on_done = on_done
        self._layout = proven.layout if proven else None
        self._clock = Clock()
        self.packed_s: float | None = None
        """Seconds until the trainer could change its weights again; None: not yet."""
        self._call: EngineCall | None = None
        self.failure: WTransferError | None = None
        """Why the round was ended, or the error after its commit was sent."""
        self.report: Report | None = None
        """The report; None until the end, and of a round that was aborted."""
        self._num_waiting = 0
        self._waited_at = 0.0
        self._broken_at: float | None = None
        self._late_s = 0.0
        """Seconds that the round has waited for joiners alone."""
        self.state = RoundState(
            self.round_id,
            version,
            instances.values(),
            send_to,
            min_instances=rules.min_workers,
            # In a group all are lost with one; the next round gives the rest another group.
            may_drop=rules.on_lost_worker == "drop",
            is_gating=is_gating,
            is_grouped=origin.needs_generation,
        )
        self._call_off: str | None = None
        """Why `abort` was called; the round's thread acts on it."""
        self.done = False
        """True if the round is over."""
        # In the caller's context: observers may note the trace in which the round was begun.
        run = functools.partial(contextvars.copy_context().run, self._run)
        self._thread = threading.Thread(target=run, name="wtransfer-round", daemon=True)
        if not runner.started:
            for worker in self.members:
                # A late answer to an earlier attempt is no answer to this one.
                worker.epoch = 0
        membership.open(self.state)

    # -- for its publisher and for callers

    def start(self) -> None:
        """Begin, on a thread of the round's own; called under the publisher's lock."""
        self._thread.start()

    def give_up(self) -> None:
        """Forget a round that has got no thread; called under the lock."""
        self._membership.close(self.state)

    def progress(self) -> dict[str, int]:
        """Return the bytes that each worker of the round has staged so far, by its name."""
        with self._lock:
            return {rank.worker.name: rank.nbytes for rank in self.state.ranks()}

    @property
    def host_by_worker(self) -> dict[str, str]:
        """Host that let a worker of the round join, by the worker's name."""
        return {w.name: w.host for w in self.members if w.host is not None}

    def status(self) -> RoundStatus:
        """Return how far the round is."""
        with self._lock:
            moved = (rank.moved_at for rank in self.state.ranks())
            return RoundStatus(
                round_id=self.round_id,
                version=self.version,
                phase=self.phase,
                nbytes=self.nbytes,
                age_s=self._clock.total(),
                idle_s=_idle_s(self._clock.begun, self._runner.source.moved_at, *moved),
                is_catch_up=self.is_resend,
            )

    def abort(self, reason: str) -> None:
        """End the round before its commit. Later, or a second time, do nothing."""
        check_process(self.pid, "Round")
        # Only a note: a signal handler may raise on this thread, and an abort that reaches half of
        # the workers would be none.
        self._call_off = self._call_off or reason
        self.changed.notify_all()

    def end_if_called_off(self) -> None:
        """End the round if its abort was called for in time."""
        with self._lock:
            if self._call_off and self.state.ended is None and not self.state.committing:
                self.called_off = True
                self.state.abort(
                    RoundAbortedError(f"the round was aborted: {self._call_off}", **self._facts())
                )

    def runs_on(self, thread: threading.Thread) -> bool:
        """Return True if a thread is the round's own."""
        # An observer has a thread of its own, for which the round's waits.
        return hooks.caller_of(thread) is self._thread

    @property
    def nbytes(self) -> int:
        """Bytes of the update; 0 until it is planned."""
        return 0 if self._layout is None else self._layout.manifest.nbytes

    @property
    def num_workers(self) -> int:
        """Workers that take part, without lost ones that the round goes on without."""
        return sum(1 for _ in self.state.ranks())

    @property
    def deadline_s(self) -> float:
        """Longest time in which nothing moves, in seconds."""
        return self._rules.deadline_s

    @property
    def failed(self) -> bool:
        """True if the round was ended before its commit."""
        return self.failure is not None and not self.state.committing

    @property
    def went_through(self) -> bool:
        """True if the round was committed, and no instance was dropped before."""
        if self.report is None or self.dry_run:
            return False
        return not any(instance.dropped for instance in self.state.instances)

    @property
    def committing(self) -> bool:
        """True if commits have been sent: from here the round only goes forward."""
        return self.state.committing

    # -- for the engine, by way of its client

    def init_workers(self, init_info: dict[str, Any]) -> None:
        """Have every worker make its engine; returns when all are ready."""
        with self._lock:
            # An engine that was left behind must not count up the epoch of a later round.
            self._check_state()
            self._runner.worker_init_info = init_info
            self._runner.members = self.members
            self._origin.epoch += 1
        self._send_init()

    def deliver(self, update_info: dict[str, Any]) -> None:
        """Have every worker receive once; returns when all have."""
        with self._lock:
            self.check()
            number = self.state.data(update_info)
        self._await(lambda rank: rank.num_received > number, "reception of data")

    def check(self) -> None:
        """Raise if the round has failed, or has sent its commits."""
        with self._lock:
            if self.state.committing:
                raise RoundAbortedError(
                    "the round is over for its engine: send_weights had returned",
                    round_id=self.round_id,
                )
            self._check_state()

    def wake(self) -> None:
        """Let the round check its waits again: a condition may have changed."""
        self.changed.notify_all()

    # -- the steps

    def _run(self) -> None:
        try:
            try:
                self._take_steps()
            except BaseException as error:
                self._break(error)
            try:
                if not self.is_resend:
                    self._runner.finished(committed=self.state.committing)
                if self.failure is None:
                    report = self.report = self._make_report()
                    if not self.dry_run and not report.holders:
                        self.failure = commit_error(report)
                    elif is_ok(report, left_out=True) and not self.dry_run:
                        facts = {**self._identity(), "fingerprint": report.fingerprint}
                        self._notify("wtransfer_weights_committed", worker=None, **facts)
            except BaseException as error:
                self._break(error)
        finally:
            try:
                self._notify_ended()
            finally:
                self.phase = "over"
                self._tell_done()

    def _notify(self, hook_name: str, **facts: object) -> None:
        """Call observers; one that hangs costs the round its deadline once, and not for ever."""
        hooks.notify_within(self._rules.deadline_s, hook_name, **facts)

    def _break(self, error: BaseException) -> None:
        """Note a fault of the publisher itself: the caller gets an error rather than wait."""
        logger.error("round %s broke", self.round_id, exc_info=error)
        self.report = None
        if self.state.committing:
            # Workers hold the new version, or will: an abort would claim the opposite.
            failure: WTransferError = CommitError(
                f"the publisher failed on {type(error).__name__}: {error} after its commit was "
                "sent; workers hold the new version or apply it yet: see workers()",
                restored=False,
                **self._facts(),
            )
            failure.__cause__ = error
            self._note_pending()
        else:
            failure = _unexpected(error)
            with self._lock:
                self.state.abort(failure)
        self.failure = self.failure or failure

    def _notify_ended(self) -> None:
        report, clock = self.report, self._clock
        if "total" not in clock.seconds:
            if self.phase not in clock.seconds:
                clock.lap(self.phase)
            clock.seconds["total"] = sum(clock.seconds.values())
        without = "failed" if self.state.committing else "aborted"
        outcome = without if report is None else report.outcome
        head = f"round {self.round_id} ({self.version!r})"
        if report is None or self.failure is not None:
            # The caller gets an exception; a failure after the commit was logged by `_break`.
            logger.info("%s %s: %s", head, outcome, self.failure)
        elif outcome == "mixed":
            logger.warning("%s is mixed:\n%s", head, report)
        else:
            total_s, num = report.seconds["total"], len(self.members)
            logger.info("%s %s by %d workers in %.3f s", head, outcome, num, total_s)
        self._notify(
            "wtransfer_round_ended",
            outcome=outcome,
            report=report,
            error=self.failure,
            seconds=clock.seconds,
            nbytes=self.nbytes,
            num_workers=len(self.members),
            is_catch_up=self.is_resend,
            **self._identity(),
        )

    def _tell_done(self) -> None:
        self._membership.close(self.state)
        try:
            self._on_done(self)
        except BaseException:
            # The round's outcome stands; a thread has no caller to raise to.
            logger.exception("what follows round %s broke", self.round_id)
        finally:
            self.done = True
            self.wake()

    def _take_steps(self) -> None:
        try:
            self._notify("wtransfer_round_started", worker=None, **self._identity())
            self._init_engines()
            self._clock.lap("init")
            self._plan()
            self._clock.lap("plan")
            self._transfer()
            self._clock.lap("transfer")
            proven = self._prepare()
            self._clock.lap("prepare")
            if not self.dry_run:
                with self._lock:
                    # Under the lock: an event that ends the round comes before this line, or too
                    # late.
                    self._check_state()
                    self.phase = "commit"
                    self.state.commit(proven.fingerprint)
                    # Before any ack, which may be lost: its worker says in a hello what it holds.
                    self._membership.note_published(proven.fingerprint)
        except BaseException as error:
            if self.state.committing:
                raise
            self._fail(error)
            return
        if self.dry_run:
            self._drop_verified()
        else:
            self._await_acks()
            self._clock.lap("commit")

    def _init_engines(self) -> None:
        if not self._runner.started:
            self._supervise(self._runner.start(self), "its initialisation")
        self._send_init()

    def _send_init(self) -> None:
        info, epoch = self._runner.worker_init_info, self._origin.epoch
        if info is None:
            raise RoundAbortedError("the trainer's engine has not initialised its workers")
        with self._lock:
            self._check_state()
            live = self.state.live()
            for index, instance in enumerate(live):
                for rank in instance.ranks:
                    self._origin.send_init(rank.worker, info, index, len(live))
        self._await(lambda rank: rank.worker.ready == epoch, "engine init")

    def _plan(self) -> None:
        self.phase = "plan"
        if self.proven is None:
            reading = self._runner.plan(self, self._instead)
            self._supervise(reading, "the source's metadata")
            self._layout = reading.result
            self._on_planned(self)
        layout = self._known_layout()
        with self._lock:
            self.state.plan(Plan(self.round_id, self.version, layout.manifest), layout.identity)
        # All accept before any byte moves.
        self._await(lambda rank: rank.accept is not None, "the plan's acceptance")

    def _known_layout(self) -> TensorLayout:
        if self._layout is None:
            raise RoundAbortedError("the round has no plan yet", round_id=self.round_id)
        return self._layout

    def _transfer(self) -> None:
        self.phase = "transfer"
        self._runner.source.on_packed = self._mark_packed
        send = self._runner.resend if self.is_resend else self._runner.send
        self._supervise(send(self), "the transfer")
        with self._lock:
            # Every byte has arrived: no group is needed any more.
            self.state.is_grouped = False
        self._mark_packed()

    def _mark_packed(self) -> None:
        with self._lock:
            first = self.packed_s is None
            if first:
                self.packed_s = self._clock.total()
            self.changed.notify_all()
        if first and not self.is_resend:
            self._on_packed()

    def _prepare(self) -> ProvenUpdate:
        self.phase = "prepare"
        proven = self.proven
        if proven is None:
            self._judge_nonfinite()
            layout, digests = self._known_layout(), self._runner.source.digests()
            proven = ProvenUpdate(self.version, layout, digests, layout.fingerprint(digests))
        with self._lock:
            self.state.prepare(proven.fingerprint, proven.digests)
        self._await(lambda rank: rank.vote is not None, "a vote")
        with self._lock:
            self.state.verify(proven.fingerprint)
        self.proven = proven
        return proven

    def _judge_nonfinite(self) -> None:
        found = self._runner.source.nonfinite
        if not found:
            return
        name, count = next(iter(found.items()))
        text = f"{len(found)} tensors hold NaN or infinity, first {name!r} with {count} elements"
        if self._rules.nonfinite == "reject":
            raise NonfiniteError(f"{text}; the policy is 'reject'", piece=name)
        logger.warning("%s: %s", self.version, text)

    def _await_acks(self) -> None:
        deadline_s = self._rules.deadline_s
        reason = f"not every rank has committed within {deadline_s:g} s"
        late_since: float | None = None

        def over() -> bool:
            nonlocal late_since
            if self.state.settled or self._is_left_alone():
                return True
            late_since = self._late_since(self.state.undecided(), late_since)
            return self._is_beyond_patience(late_since)

        # A host's call may take as long as its start and its finish.
        answered_by = Deadline(2 * deadline_s)
        self._apply_by_hosts()
        self.changed.wait_for(over, deadline_s)
        with self._lock:
            is_left_alone = self._is_left_alone()
            if self._is_beyond_patience(late_since):
                reason = f"its instance was more than {JOINER_PATIENCE_S:g} s behind the others"
                for rank in self.state.undecided():
                    # Before the rollback, which every rank answers.
                    if rank.ack is None:
                        rank.error = rank.error or _late(rank.worker, "the commit")
        if is_left_alone:
            reason = "the host failed in the call that lets its ranks commit"
            # An ack may be under way on another connection than the host's answer.
            self.changed.wait_for(lambda: self.state.settled, ROLLBACK_GRACE_S)
        with self._lock:
            if not (is_settled := self.state.settled):
                self.state.deadline(reason)
        if not is_settled:
            self.changed.wait_for(over, ROLLBACK_GRACE_S)
        # An ack is sent within its host's call, before the engine drops old KV cache.
        self.changed.wait_for(lambda: not self._awaited_hosts(), answered_by.remaining())
        self._note_pending()

    def _awaited_hosts(self) -> set[str]:
        """Return the hosts that have not answered, while all their ranks have; under the lock.

        A host with a rank that is pending or lost may never answer, and is reported by that rank.
        """
        ranks = [each for each in self.state.ranks() if each.outcome in ("pending", "lost")]
        silent = {rank.worker.host or "" for rank in ranks}
        return self._unanswered - self._apply_errors.keys() - silent

    def _is_left_alone(self) -> bool:
        """Return True if no pending rank can commit in this round; called under the lock.

        A host whose call was not answered in time may still be applying the update, and a rank that
        rolls back needs no call.
        """
        pending = [rank for rank in self.state.ranks() if rank.outcome == "pending"]
        errors = [self._apply_errors.get(rank.worker.host or "") for rank in pending]
        return bool(pending) and not any(
            rank.rolled_back or error is None or isinstance(error, StallError)
            for rank, error in zip(pending, errors, strict=True)
        )

    def _note_pending(self) -> None:
        """Mark the workers that have not answered the commit as pending, until their ack."""
        with self._lock:
            for rank in self.state.ranks():
                if rank.outcome == "pending":
                    worker = rank.worker
                    worker.holds(worker.version, worker.fingerprint, "pending")
                    # It takes no plan before it has applied this update.
                    worker.set_aside = worker.set_aside or not self.state.gates(worker)

    def _apply_by_hosts(self) -> None:
        """Let serving engines apply, on a thread of its own: their answer needs the `Finish`."""
        hosts = {worker.host for worker in self.members if worker.host is not None}

        def answered(host: str) -> None:
            with self._lock:
                self._unanswered.discard(host)
                self.changed.notify_all()

        def call() -> None:
            failed = self._apply(self.version, hosts, answered)
            for error in failed.values():
                # Acks decide. The log line says why one is missing, in the host's own words.
                logger.warning("round %s: %s", self.round_id, error)
            with self._lock:
                self._apply_errors = failed
                self.changed.notify_all()

        if hosts:
            # Before any ack: the round must not end between an ack and its host's answer.
            self._unanswered = set(hosts)
            threading.Thread(target=call, name="wtransfer-apply", daemon=True).start()

    def _drop_verified(self) -> None:
        """End a dry run: every worker has verified, and drops the set."""
        # As after a failure: the engine's client raises from now on.
        ended = RoundAbortedError("a dry run ends without a commit", **self._facts())
        with self._lock:
            self.state.abort(ended)
        # A round that observers saw begin must end for them, here as on every worker.
        self._notify("wtransfer_round_aborted", error=ended, worker=None, **self._identity())

    def _fail(self, error: BaseException) -> None:
        failure = error if isinstance(error, WTransferError) else _unexpected(error)
        failure.add_facts(**self._facts())
        with self._lock:
            # From here on the client and the source raise, which lets the engine's call end. An
            # earlier error that ended the round is the cause of this one.
            self.state.abort(failure)
            failure = self.state.ended or failure
        failure.add_facts(**self._facts())
        self.failure = failure
        if self._call is not None:
            self._runner.unblock(self._call, str(failure))
        self._set_misfits_aside()
        self._membership.close(self.state)
        self._notify("wtransfer_round_aborted", error=failure, worker=None, **self._identity())

    def _set_misfits_aside(self) -> None:
        """Let later rounds go on without joiners that have ended this one, where all form a group.

        Such a worker takes part again once it joins anew: no group can leave it out half way.
        """
        with self._lock:
            for instance in self.state.instances if self.state.is_grouped else ():
                errors = [rank.error for rank in instance.ranks if rank.error is not None]
                if not isinstance(self.failure, GroupError):
                    # The cause is known, and a rank that reports a broken group is not to blame.
                    errors = [each for each in errors if not isinstance(each, GroupError)]
                if instance.gates or not errors:
                    continue
                for rank in instance.ranks:
                    rank.worker.set_aside = True
                    rank.worker.log_once(
                        f"{rank.worker.name} has ended a round, and takes part in none until it "
                        "joins anew",
                        errors[0],
                    )

    # -- the waits

    def _await(self, done: Callable[[RankAnswers], bool], what: str) -> None:
        """Wait until `done` holds for every worker of the round; raise the error that ends it."""
        begun = time.monotonic()
        late_since: float | None = None

        def all_done() -> bool:
            nonlocal late_since
            self._check_state()
            waiting = [rank for rank in self.state.ranks() if not done(rank)]
            if waiting:
                self._check_stall(waiting, begun, what)
                late_since = self._late_since(waiting, late_since)
                if self._is_beyond_patience(late_since):
                    for rank in waiting:
                        self.state.leave_out(rank.worker, _late(rank.worker, what))
            return not waiting

        with self._lock:
            self._num_waiting += 1
        try:
            self.changed.wait_for(all_done)
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._late_s += 0.0 if late_since is None else _idle_s(late_since)
                # The engine's own time counts from the end of the wait.
                self._waited_at = time.monotonic()

    def _supervise(self, call: EngineCall, what: str) -> None:
        """Wait for a call into the trainer's engine; raise the error that ends the round."""
        self._call = call
        begun = time.monotonic()

        def has_returned() -> bool:
            is_done = call.done.is_set()
            # A worker's fault is the cause of the engine's error, not the other way round.
            self._check_state()
            moved = (rank.moved_at for rank in self.state.ranks())
            idle_s = _idle_s(begun, self._runner.source.moved_at, self._waited_at, *moved)
            # An engine that waits for workers does not count as stalled.
            if not (is_done or self._num_waiting) and idle_s > self._rules.deadline_s:
                name, plugin = self._runner.name, self._runner.plugin
                raise self._stall(f"the trainer's engine {name!r}", what, plugin=plugin)
            return is_done

        self.changed.wait_for(has_returned)
        if call.error is not None:
            raise call.error

    def _check_state(self) -> None:
        """Raise the error that ended the round, if any; called under the lock.

        Engines whose workers form a group need a second look at the cause. A killed rank makes the
        others report a broken group, often before its own loss is known. So a broken group counts
        only when no other error has shown for `CAUSE_GRACE_S`.
        """
        self.end_if_called_off()
        self.state.check()
        symptom = self.state.symptom
        if symptom is not None:
            self._broken_at = self._broken_at or time.monotonic()
            if _idle_s(self._broken_at) > CAUSE_GRACE_S:
                self.state.abort(symptom)
                raise symptom

    def _late_since(self, waiting: list[RankAnswers], since: float | None) -> float | None:
        """Return since when only joiners are waited for in a wait; None: others are."""
        if any(self.state.gates(rank.worker) for rank in waiting):
            return None
        return time.monotonic() if since is None else since

    def _is_beyond_patience(self, late_since: float | None) -> bool:
        """Return True if joiners alone have held up the round for longer than is allowed."""
        if late_since is None:
            return False
        return self._late_s + _idle_s(late_since) > JOINER_PATIENCE_S

    def _check_stall(self, waiting: list[RankAnswers], begun: float, what: str) -> None:
        """Lose a worker that neither makes progress nor is fed by a trainer that does."""
        deadline_s = self._rules.deadline_s
        fed_at = max(begun, self._runner.source.moved_at)
        stalled = [rank for rank in waiting if _idle_s(rank.moved_at, fed_at) > deadline_s]
        if not stalled:
            return
        if not self.state.is_grouped:
            for rank in stalled:
                name = rank.worker.name
                self.state.lose(rank.worker, self._stall(name, what, worker=name))
        elif self._runner.source.reading:
            # For every wait: the engine's own wait ends with the round's, and its error would be
            # taken for the cause.
            self.state.abort(self._stall("the trainer's source", "the next tensor"))
        else:
            # A stopped rank leaves the others waiting for bytes, and stands still like them. The
            # control channel tells them apart: a live process answers there, whatever its engine
            # waits for. So the silent rank is to blame, even if it was the last to make progress.
            # Where all answer, the engine of one hangs; a rank that is ahead is not the one, but
            # the hanging one cannot be told for certain, so all are named.
            blamed = max(waiting, key=lambda rank: rank.worker.connection.last_heard_s)
            names, hint = blamed.worker.name, ""
            # A live peer sends several times in this span.
            if blamed.worker.connection.last_heard_s <= deadline_s / 2:
                stalled.sort(key=lambda rank: (rank.num_received, rank.nbytes, rank.moved_at))
                blamed, names = stalled[0], ", ".join(rank.worker.name for rank in stalled)
                if len(stalled) > 1:
                    hint = " (all of them answer: the engine of one hangs)"
            error = self._stall(f"{names}{hint}", what, worker=blamed.worker.name)
            self.state.lose(blamed.worker, error)
        self._check_state()

    def _stall(self, subject: str, what: str, **facts: str) -> StallError:
        deadline_s = self._rules.deadline_s
        return StallError(
            f"{subject} made no progress on {what} for {deadline_s:g} s",
            seconds=deadline_s,
            **facts,
        )

    # -- the report

    def _identity(self) -> dict[str, str]:
        return {"round_id": self.round_id, "version": self.version}

    def _facts(self) -> dict[str, str]:
        return {**self._identity(), "phase": self.phase}

    def _make_report(self) -> Report:
        assert self.proven is not None
        self._clock.lap("finish")
        self._clock.seconds["total"] = sum(self._clock.seconds.values())
        with self._lock:
            # First: which worker is behind which host is found out as hosts are looked at.
            absent = self._absent()
            self._note_left_out()
            fingerprint = self.proven.fingerprint
            workers = [
                self._report_rank(instance, rank, fingerprint)
                for instance in self.state.instances
                for rank in instance.ranks
            ]
            membership = self._membership
            others = [
                worker
                for worker in membership.workers()
                if worker not in self.members and worker.host not in membership.without
            ]
            workers += [_report_bystander(worker, fingerprint) for worker in others]
            reported = {(each.instance, each.rank) for each in workers}
            workers += [
                _report_gone(info)
                for info in membership.left()
                if (info.instance, info.rank) not in reported
            ]
            told = {each.host for each in workers if each.error or each.outcome not in _HELD}
            workers += [
                WorkerReport(host, host, 0, "dropped", None, "", error=error, host=host)
                for host, error in absent.items()
                # Else the row of its worker says so.
                if host not in told
            ]
        return Report(
            version=self.version,
            fingerprint=fingerprint,
            round_id=self.round_id,
            nbytes=self.nbytes,
            workers=tuple(workers),
            seconds=self._clock.seconds,
            packed_s=self.packed_s or 0.0,
            nonfinite=dict(self._runner.source.nonfinite),
            dry_run=self.dry_run,
            with_config=self._layout is not None and bool(self._layout.manifest.config),
        )

    def _note_left_out(self) -> None:
        """Note why joiners were left out of the round; each reason is logged once."""
        for instance in self.state.instances:
            is_held = self.dry_run or all(each.outcome == "committed" for each in instance.ranks)
            if instance.gates or (is_held and not instance.dropped):
                continue
            errors = [instance.error, *(rank.error for rank in instance.ranks)]
            late = _late(instance.ranks[0].worker, "the commit")
            error = next((each for each in errors if each is not None), late)
            for rank in instance.ranks:
                rank.error = rank.error or error
                rank.worker.last_error = error.message
                rank.worker.log_once(f"{rank.worker.name} was left out of {self.version!r}", error)

    def _report_rank(self, instance: Instance, rank: RankAnswers, fingerprint: str) -> WorkerReport:
        worker, vote, ack = rank.worker, rank.vote, rank.ack
        error, outcome = rank.why, rank.outcome
        if instance.dropped:
            # A rank may have no error of its own.
            outcome = "dropped" if instance.gates else "behind"
            error = error or instance.error
        elif self.dry_run:
            outcome = "verified"
        elif outcome == "committed" and worker.state == "empty":
            # The worker committed and has lost its weights since: not updated.
            outcome = "empty"
        elif outcome != "committed" and not instance.gates:
            outcome = "behind"
        host = worker.host or ""
        if outcome == "pending" and error is None:
            # The host's error says why the worker has not applied the update.
            error = self._apply_errors.get(host)
        elif outcome == "committed" and host in self._unanswered:
            # The worker holds the update; its engine may still have old KV cache.
            outcome, error = "pending", self._apply_errors.get(host) or self._no_answer(host)
        return WorkerReport(
            worker=worker.name,
            instance=worker.hello.instance,
            rank=worker.hello.rank,
            outcome=outcome,
            version=worker.version,
            fingerprint=worker.fingerprint,
            digests_equal=vote is not None and vote.fingerprint == fingerprint,
            nbytes=vote.nbytes if vote else 0,
            seconds={**(vote.seconds if vote else {}), **(ack.seconds if ack else {})},
            notes=rank.accept.notes if rank.accept else [],
            error=error,
            host=worker.host,
        )

    def _no_answer(self, host: str) -> StallError:
        deadline_s = self._rules.deadline_s
        return StallError(
            f"{host} did not return within {deadline_s:g} s from the call in which its workers "
            "commit; until it does, it may compute with KV cache of other weights",
            seconds=deadline_s,
            worker=host,
        )


def _report_bystander(worker: Worker, fingerprint: str) -> WorkerReport:
    """Report a worker that joined after the plan, was set aside, or whose instance is torn."""
    # An equal fingerprint is an equal digest of every piece, proven in an earlier round.
    current = worker.fingerprint == fingerprint
    host, error = worker.host, worker.refusal
    if error is None and worker.last_error is not None:
        error = RemoteError(worker.last_error, worker=worker.name)
    outcome = "behind"
    if current:
        outcome = "committed"
    elif worker.state == "pending" and (host is not None or worker.has_held):
        outcome = "pending"
    elif host is not None:
        # A named host counts, also where it has come back too late.
        outcome = "dropped"
    return WorkerReport(
        worker=worker.name,
        instance=worker.hello.instance,
        rank=worker.hello.rank,
        outcome=outcome,
        version=worker.version,
        fingerprint=worker.fingerprint,
        digests_equal=current,
        error=None if current else error,
        host=host,
    )


def _report_gone(info: WorkerInfo) -> WorkerReport:
    """Report a worker that joined by itself and has left."""
    error = PeerLostError(f"{info.last_error}", worker=info.worker)
    return WorkerReport(
        info.worker, info.instance, info.rank, "gone", info.version, info.fingerprint, error=error
    )


def _late(worker: Worker, what: str) -> StallError:
    return StallError(
        f"{worker.name} was more than {JOINER_PATIENCE_S:g} s behind the others on {what}, and the "
        "round went on without it",
        seconds=JOINER_PATIENCE_S,
        worker=worker.name,
    )


def _idle_s(*moments: float) -> float:
    return time.monotonic() - max(moments)


def _unexpected(error: BaseException) -> WTransferError:
    failure = RoundAbortedError(f"the round failed on {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
