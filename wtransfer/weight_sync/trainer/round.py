"""One round: plan, transfer, prepare, commit, finish. All or nothing until the first commit.

Three kinds of threads meet here, under one lock, the roster's: the channel's, which writes what
workers answer; the round's own, which takes the steps; and the engine's, which sends. Every wait
of the latter two goes through `Watch`. So nothing hangs, whoever dies.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from wtransfer.errors import (
    CommitError,
    DigestMismatchError,
    ForkedError,
    NonfiniteError,
    RoundAbortedError,
    RoundBusyError,
    StallError,
    WTransferError,
)
from wtransfer.registry import hooks
from wtransfer.weight_sync.messages import Abort, Data, Init, Plan, Prepare
from wtransfer.weight_sync.report import Report, WorkerReport
from wtransfer.weight_sync.trainer.seating import Seating
from wtransfer.weight_sync.trainer.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from wtransfer.engines.interface import WeightSource
    from wtransfer.transport.layout import TensorLayout
    from wtransfer.weight_sync.trainer.origin import Origin
    from wtransfer.weight_sync.trainer.roster import Roster, Worker
    from wtransfer.weight_sync.trainer.rules import Rules
    from wtransfer.weight_sync.trainer.sender import Running, Sender

logger = logging.getLogger(__name__)

REVERT_GRACE_S = 1.0
"""Seconds that ranks get to go back before the report is made; they go on afterwards."""
INTERRUPT_GRACE_S = 1.0
"""Seconds that an interrupted caller waits for the round to wind down."""


@dataclass(frozen=True)
class Sealed:
    """What a round has proven: the update that workers hold after its commit."""

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


class Round:
    """A round under way: wait for it with `packed` and `result`, end it with `abort`.

    Args:
        version: Label.
        sender: The trainer's engine.
        roster: The workers.
        instances: Which of them take part, by instance.
        rules: How to judge.
        origin: Which engine workers must have.
        sealed: An update that was committed before and is sent again; None: the source's.
        instead: What is sent, where that is not the user's source.
        dry_run: Whether to end when every worker has verified, without a commit.
        apply: Lets the hosts of these workers apply what was committed, where that takes a call.
        on_packed: Called once when the trainer may change its weights again.
        on_done: Called when the round is over, on its thread.
    """

    def __init__(
        self,
        version: str,
        *,
        sender: Sender,
        roster: Roster,
        instances: dict[str, list[Worker]],
        rules: Rules,
        origin: Origin,
        sealed: Sealed | None = None,
        instead: WeightSource | None = None,
        dry_run: bool = False,
        apply: Callable[[str, set[str]], None],
        on_packed: Callable[[], None],
        on_done: Callable[[Round], None],
    ) -> None:
        self._pid = os.getpid()
        self.version = version
        self.round_id = secrets.token_hex(8)
        self.phase = "init"
        self.sealed = sealed
        self.is_resend = sealed is not None
        self.dry_run = dry_run
        self._instead = instead
        self._apply = apply
        self._apply_error: WTransferError | None = None
        self.members = frozenset(worker for ranks in instances.values() for worker in ranks)
        self._sender = sender
        self._roster = roster
        self._rules = rules
        self._origin = origin
        self._on_packed = on_packed
        self._on_done = on_done
        self._layout = sealed.layout if sealed else None
        self._clock = Clock()
        self._packed_s: float | None = None
        self._num_sent = 0
        self._send_lock = threading.Lock()
        self._running: Running | None = None
        self._failure: WTransferError | None = None
        self._forward = False
        self.called_off = False
        """Whether `abort` ended it."""
        self.starter = threading.get_ident()
        """The thread that has called `publish`, or that serves joiners."""
        self._begun = False
        self._given_up = False
        self._report: Report | None = None
        self._done = threading.Event()
        opened = roster.open(self.round_id, self.members)
        self._seating = Seating(
            self.round_id, ([opened[worker] for worker in ranks] for ranks in instances.values())
        )
        self._watch = Watch(roster.changed, self._seating, sender, origin, rules)
        self._thread = threading.Thread(target=self._run, name="wtransfer-round", daemon=True)

    # -- for the caller

    def start(self) -> None:
        """Begin, on a thread of the round's own; called under the roster's lock."""
        self._thread.start()

    def give_up(self) -> None:
        """Let the round not begin, should its thread run yet; called under the roster's lock."""
        self._given_up = True
        self._roster.close(self.round_id)

    @property
    def was_left(self) -> bool:
        """Whether its starter was interrupted before it had a thread. Asked under the lock."""
        return not self._begun and not self._thread.is_alive()

    def packed(self, timeout_s: float | None = None) -> None:
        """Wait until the trainer may change its weights again.

        Raises:
            WTransferError: The round failed before that; the trainer may go on as well.
            StallError: `timeout_s` seconds have passed.
        """
        self._check_process()
        self._check_thread("packed")
        with self._roster.lock:
            ended = self._roster.changed.wait_for(
                lambda: self._packed_s is not None or self._done.is_set(), timeout_s
            )
        if not ended:
            raise StallError(f"not packed within {timeout_s} s", round_id=self.round_id)
        if self._packed_s is None and self._failure is not None:
            raise self._failure.with_traceback(None)

    def result(self, timeout_s: float | None = None) -> Report:
        """Wait for the end and return the report.

        Raises:
            WTransferError: The round was aborted; every worker is on its old version.
            CommitError: The publisher itself failed after the commit was sent.
            StallError: `timeout_s` seconds have passed; the round goes on.
        """
        self._check_process()
        self._check_thread("result")
        try:
            ended = self._done.wait(timeout_s)
        except BaseException as interruption:
            self.abort(f"interrupted by {type(interruption).__name__}")
            self._done.wait(INTERRUPT_GRACE_S)
            raise
        if not ended:
            raise StallError(f"the round has not ended in {timeout_s} s", round_id=self.round_id)
        if self._failure is not None:
            # Afresh: a traceback would grow with every call, and keep the callers' variables.
            raise self._failure.with_traceback(None)
        assert self._report is not None
        return self._report

    def progress(self) -> dict[str, int]:
        """Return the bytes that each worker of the round has staged so far, by its name."""
        with self._roster.lock:
            return {each.worker.name: each.nbytes for each in self._seating.exchanges()}

    def abort(self, reason: str = "aborted by the caller") -> None:
        """End the round before its commit. Later, or a second time, this does nothing."""
        self._check_process()
        with self._roster.lock:
            if self._watch.ended is None and not self._forward:
                self.called_off = True
                self._watch.ended = RoundAbortedError(
                    f"the round was aborted: {reason}", **self._facts()
                )
            self._roster.changed.notify_all()

    def _check_thread(self, method: str) -> None:
        if threading.current_thread() is self._thread:
            raise RoundBusyError(
                f"{method}() was called by an observer on the round's own thread, which would wait "
                "for itself; call it from another thread",
                **self._facts(),
            )

    def _check_process(self) -> None:
        # The thread that would end a wait, and that might hold a lock, is not in a child.
        if os.getpid() != self._pid:
            raise ForkedError(
                "this Round belongs to the parent process; fork()ed children have none"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the update; 0 until it is planned."""
        return 0 if self._layout is None else self._layout.manifest.nbytes

    @property
    def deadline_s(self) -> float:
        """Longest time in which nothing moves, in seconds."""
        return self._rules.deadline_s

    @property
    def done(self) -> bool:
        """Whether the round is over."""
        return self._done.is_set()

    @property
    def failed(self) -> bool:
        """Whether the round was ended before its commit."""
        return self._failure is not None and not self._forward

    @property
    def failure(self) -> WTransferError | None:
        """Why it was ended, or what broke after its commit was sent."""
        return self._failure

    @property
    def went_through(self) -> bool:
        """Whether it was committed, and no worker was told to let go of it before."""
        report = self._report
        if report is None or self.dry_run:
            return False
        return all(worker.outcome != "dropped" for worker in report.workers)

    @property
    def committing(self) -> bool:
        """Whether commits have been sent: from here the round only goes forward."""
        return self._forward

    # -- for the engine, by way of its client

    def init_workers(self, init_info: dict[str, Any]) -> None:
        """Have every worker make its engine; returns when all are ready."""
        self._sender.worker_init_info = init_info
        self._sender.members = self.members
        self._origin.epoch += 1
        self._send_init()

    def deliver(self, update_info: dict[str, Any]) -> None:
        """Have every worker receive once; returns when all have."""
        self.check()
        with self._send_lock:
            # Numbered and queued under one lock: every worker sees the numbers in order.
            self.check()
            number = self._num_sent
            self._num_sent += 1
            self._broadcast(Data(self.round_id, number, update_info))
        self._watch.until(lambda exchange: exchange.num_received > number, "reception of data")

    def check(self) -> None:
        """Raise if the round has failed, or is past the point where an engine may use it."""
        with self._roster.lock:
            if self._forward:
                raise RoundAbortedError(
                    "the round is over for its engine: send_weights had returned",
                    round_id=self.round_id,
                )
            self._watch.check()

    def wake(self) -> None:
        """Let the round look again: something that it waits for may have happened."""
        with self._roster.lock:
            self._roster.changed.notify_all()

    # -- the steps

    def _run(self) -> None:
        with self._roster.lock:
            if self._given_up:
                return
            self._begun = True
        try:
            try:
                self._take_steps()
            except BaseException as error:
                self._break(error)
            try:
                self._finish()
            except BaseException as error:
                self._break(error)
        finally:
            self.phase = "over"
            self._tell_done()

    def _break(self, error: BaseException) -> None:
        """Note a fault of our own: the caller hears of it rather than wait."""
        logger.error("round %s broke", self.round_id, exc_info=error)
        if self._forward:
            # Workers hold the new version, or will: an abort would claim the opposite.
            failure: WTransferError = CommitError(
                f"the publisher failed on {type(error).__name__}: {error} after its commit was "
                "sent; workers hold the new version or apply it yet: see workers()",
                restored=False,
                **self._facts(),
            )
            failure.__cause__ = error
            with self._roster.lock:
                self._seating.note_pending()
        else:
            failure = _unexpected(error)
        self._failure = self._failure or failure

    def _tell_done(self) -> None:
        try:
            self._on_done(self)
        except BaseException:
            # The round's outcome stands; a thread has nobody to raise to.
            logger.exception("what follows round %s broke", self.round_id)
        finally:
            self._done.set()
            self.wake()

    def _take_steps(self) -> None:
        try:
            hooks.notify("wtransfer_round_started", worker=None, **self._identity())
            self._init_engines()
            self._clock.lap("init")
            self._plan()
            self._transfer()
            self._prepare()
            if not self.dry_run:
                self._begin_commit()
        except BaseException as error:
            self._fail(error)
        else:
            self._commit() if not self.dry_run else self._drop_verified()

    def _init_engines(self) -> None:
        if not self._sender.started:
            # What workers still answer to an earlier attempt is no answer to this one.
            self._origin.epoch += 1
            self._supervise(self._sender.start(self), "its initialisation")
        self._send_init()

    def _send_init(self) -> None:
        origin = self._origin
        info = self._sender.worker_init_info
        if info is None:
            raise RoundAbortedError("the trainer's engine has not initialised its workers")
        seats = self._seating.live()
        for index, seat in enumerate(seats):
            for exchange in seat.exchanges:
                send_init(exchange.worker, origin, info, index, len(seats))
        self._watch.until(lambda exchange: exchange.worker.ready == origin.epoch, "engine init")

    def _plan(self) -> None:
        self.phase = "plan"
        if self.sealed is None:
            reading = self._sender.plan(self, self._instead)
            self._supervise(reading, "the source's metadata")
            self._layout = reading.result
        layout = self._known_layout()
        with self._roster.lock:
            plan = Plan(self.round_id, self.version, layout.manifest)
            self._seating.plan(plan, layout.identity)
        self._watch.until(lambda exchange: exchange.accept is not None, "the plan's acceptance")
        self._clock.lap("plan")

    def _known_layout(self) -> TensorLayout:
        if self._layout is None:
            raise RoundAbortedError("the round has no plan yet", round_id=self.round_id)
        return self._layout

    def _transfer(self) -> None:
        self.phase = "transfer"
        self._sender.source.on_packed = self._mark_packed
        send = self._sender.resend if self.is_resend else self._sender.send
        self._supervise(send(self), "the transfer")
        self._watch.transferred = True
        self._mark_packed()
        self._clock.lap("transfer")

    def _mark_packed(self) -> None:
        with self._roster.lock:
            first = self._packed_s is None
            if first:
                self._packed_s = self._clock.total()
            self._roster.changed.notify_all()
        if first and not self.is_resend:
            self._on_packed()

    def _prepare(self) -> None:
        self.phase = "prepare"
        if self.sealed is None:
            self._judge_nonfinite()
        digests = self.sealed.digests if self.sealed else self._sender.source.digests()
        self._broadcast(Prepare(self.round_id, digests))
        if self.sealed is None:
            # Beside the workers, which work out the same.
            layout = self._known_layout()
            self.sealed = Sealed(self.version, layout, digests, layout.fingerprint(digests))
        self._watch.until(lambda exchange: exchange.vote is not None, "a vote")
        self._check_votes(self.sealed.fingerprint)
        self._clock.lap("prepare")

    def _judge_nonfinite(self) -> None:
        found = self._sender.source.nonfinite
        if not found:
            return
        name, count = next(iter(found.items()))
        text = f"{len(found)} tensors hold NaN or infinity, first {name!r} with {count} elements"
        if self._rules.nonfinite == "reject":
            raise NonfiniteError(f"{text}; the policy is 'reject'", piece=name)
        logger.warning("%s: %s", self.version, text)

    def _check_votes(self, fingerprint: str) -> None:
        # A worker compares by itself. That the identity of what it has, which its own digests
        # enter, is looked at here as well means that none is believed on its word.
        for exchange in self._seating.exchanges():
            vote = exchange.vote
            if vote is None or vote.fingerprint != fingerprint:
                raise DigestMismatchError(
                    f"the vote of {exchange.worker.name} is about other bytes than were sent",
                    worker=exchange.worker.name,
                )

    def _begin_commit(self) -> None:
        with self._roster.lock:
            # Under the lock: whatever ends the round comes before this line or has come too late.
            self._watch.check()
            self.phase = "commit"
            self._forward = True

    def _commit(self) -> None:
        deadline_s = self._rules.deadline_s
        with self._roster.lock:
            self._seating.commit()
        self._apply_by_hosts()
        with self._roster.lock:
            if not self._roster.changed.wait_for(self._seating.settle, deadline_s):
                self._seating.give_up(f"not every rank has committed within {deadline_s:g} s")
                self._roster.changed.wait_for(self._seating.settle, REVERT_GRACE_S)
            self._seating.note_pending()
        self._clock.lap("commit")

    def _apply_by_hosts(self) -> None:
        """Let serving engines apply, on a thread of their own: their answer needs our release."""
        hosts = {w.hello.host for w in self.members if w.hello.host is not None}

        def call() -> None:
            try:
                self._apply(self.version, hosts)
            except WTransferError as error:
                # Receipts decide. This says why one does not come, in the host's own words.
                logger.warning("round %s: %s", self.round_id, error)
                self._apply_error = error

        if hosts:
            threading.Thread(target=call, name="wtransfer-apply", daemon=True).start()

    def _drop_verified(self) -> None:
        """End a dry run: everything has been proven, nothing is kept."""
        with self._roster.lock:
            # As after a failure: an engine's client is of no use any more.
            ended = RoundAbortedError("a dry run ends without a commit", **self._facts())
            self._watch.ended = ended
        self._broadcast(Abort(self.round_id, str(ended)))
        self._roster.close(self.round_id)
        # What has begun, for observers, must end: here as on every worker.
        hooks.notify("wtransfer_round_aborted", error=ended, worker=None, **self._identity())

    def on_ack(self) -> bool:
        """Finish or roll back what can be settled; return whether everything is.

        Called on the channel's thread for every ack and lost worker, also after the end: a
        worker whose commit was pending may still apply it.
        """
        if not self.committing:
            return False
        with self._roster.lock:
            settled = self._seating.settle()
            self._roster.changed.notify_all()
            return settled

    def _supervise(self, running: Running, what: str) -> None:
        self._running = running
        self._watch.supervise(running, what)

    def _broadcast(self, message: msgspec.Struct) -> None:
        with self._roster.lock:
            self._seating.send(message)

    # -- ending

    def _fail(self, error: BaseException) -> None:
        failure = error if isinstance(error, WTransferError) else _unexpected(error)
        failure.add_facts(**self._facts())
        self._failure = failure
        with self._roster.lock:
            # From here on the client and the source raise, which lets the engine's call end.
            self._watch.ended = self._watch.ended or failure
        self._broadcast(Abort(self.round_id, str(failure)))
        if self._running is not None:
            self._sender.unblock(self._running, str(failure))
        self._roster.close(self.round_id)
        hooks.notify("wtransfer_round_aborted", error=failure, worker=None, **self._identity())

    def _finish(self) -> None:
        if not self.is_resend:
            self._sender.finished(committed=self._forward)
        if self._failure is None:
            self._report = self._make_report()
            self._tell_committed(self._report)

    def _tell_committed(self, report: Report) -> None:
        if report.ok and not self.dry_run:
            facts = {**self._identity(), "fingerprint": report.fingerprint}
            hooks.notify("wtransfer_weights_committed", worker=None, **facts)

    def _identity(self) -> dict[str, str]:
        return {"round_id": self.round_id, "version": self.version}

    def _facts(self) -> dict[str, str]:
        return {**self._identity(), "phase": self.phase}

    def _make_report(self) -> Report:
        assert self.sealed is not None
        self._clock.lap("finish")
        self._clock.seconds["total"] = sum(self._clock.seconds.values())
        others = [w for w in self._roster.workers() if w not in self.members]
        reports = self._seating.reports(self.sealed.fingerprint, dry_run=self.dry_run)
        return Report(
            version=self.version,
            fingerprint=self.sealed.fingerprint,
            round_id=self.round_id,
            nbytes=self.nbytes,
            workers=(
                *map(self._explained, reports),
                *(_bystander(worker, self.sealed) for worker in others),
            ),
            seconds=self._clock.seconds,
            packed_s=self._packed_s or 0.0,
            nonfinite=dict(self._sender.source.nonfinite),
            dry_run=self.dry_run,
        )

    def _explained(self, report: WorkerReport) -> WorkerReport:
        """Add what its host said to a worker that has not applied what it was ordered to."""
        if report.outcome != "pending" or report.error is not None or self._apply_error is None:
            return report
        return replace(report, error=self._apply_error)


def send_init(
    worker: Worker, origin: Origin, init_info: dict[str, Any], index: int, num_instances: int
) -> None:
    """Ask a worker for the engine of this epoch, once."""
    if worker.epoch == origin.epoch and worker.refusal is None:
        return
    worker.epoch, worker.refusal = origin.epoch, None
    worker.place = index
    worker.send(
        Init(
            epoch=origin.epoch,
            engine=origin.engine,
            distribution=origin.distribution,
            engine_version=origin.engine_version,
            data_parallel_index=index,
            data_parallel_size=num_instances,
            init_info=init_info,
        )
    )


def _bystander(worker: Worker, sealed: Sealed) -> WorkerReport:
    """Report a worker that joined after the plan, or whose instance is not complete."""
    # An equal fingerprint is an equal digest of every piece, proven in an earlier round.
    current = worker.fingerprint == sealed.fingerprint
    return WorkerReport(
        worker=worker.name,
        instance=worker.hello.instance,
        rank=worker.hello.rank,
        outcome="committed" if current else "pending" if worker.set_aside else "behind",
        version=worker.version,
        fingerprint=worker.fingerprint,
        digests_equal=current,
    )


def _unexpected(error: BaseException) -> WTransferError:
    failure = RoundAbortedError(f"the round failed on {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
