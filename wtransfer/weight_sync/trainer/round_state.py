"""Two-phase commit of a round as a state machine, without sockets, threads or clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from wtransfer.errors import (
    DigestMismatchError,
    GroupError,
    ProtocolError,
    WTransferError,
)
from wtransfer.weight_sync.messages import (
    Abort,
    Accept,
    Ack,
    Commit,
    Compare,
    Data,
    Fault,
    Finish,
    Plan,
    Prepare,
    Progress,
    Received,
    Refuse,
    Rollback,
    Vote,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from wtransfer.weight_sync.trainer.workers import Worker


@dataclass(eq=False)
class RankAnswers:
    """Answers of one worker in one round."""

    worker: Worker
    accept: Accept | None = None
    proven_nbytes: int = 0
    """Bytes that do not travel and that the worker has proven so far, before it accepts."""
    num_received: int = 0
    nbytes: int = 0
    """Bytes that the worker has staged so far."""
    vote: Vote | None = None
    """The worker's vote for the set that was sent."""
    differs: bool = False
    """True if the worker has voted for another set: its answer to `Compare` ends the round."""
    ack: Ack | None = None
    error: WTransferError | None = None
    lost: bool = False
    rolled_back: bool = False
    """True if a `Rollback` was sent to the worker."""
    moved_at: float = 0.0
    """Time of its last progress in the round; kept by the threads that feed the machine."""

    @property
    def outcome(self) -> str:
        """Outcome of the commit, as in `WorkerReport`."""
        # An ack of the commit, sent before the rollback arrived at the worker: another follows.
        outdated = self.rolled_back and self.ack is not None and self.ack.outcome == "committed"
        if self.ack is None or outdated:
            return "lost" if self.lost else "pending"
        return self.ack.outcome

    @property
    def why(self) -> WTransferError | None:
        """Why its worker does not hold the update; in its own words, once it has given an ack."""
        if self.ack is not None and self.ack.error is not None:
            return self.ack.error.rebuild(worker=self.worker.name)
        return self.error


@dataclass(eq=False)
class Instance:
    """The ranks that commit all or none."""

    ranks: list[RankAnswers]
    gates: bool = True
    """False: it has joined by itself and has never held a version: the round goes on without it."""
    dropped: bool = False
    """True if the instance was left out before the commit."""
    settled: bool = False
    """True if its ranks agree, after the commit, on the version that they hold."""
    rolling_back: bool = False

    @property
    def error(self) -> WTransferError | None:
        """Why one of its ranks does not hold the update; None: no rank says so."""
        return next((why for rank in self.ranks if (why := rank.why) is not None), None)


class RoundState:
    """The state of one round, changed by events; the messages that follow are sent at once.

    ===================  =========================  ============================  ==============
    event                open                       committing                    ended
    ===================  =========================  ============================  ==============
    plan, data, prepare  the message to all         (the coordinator is past it)  raises why
    accept, received,    noted                      noted                         noted
    progress, vote
    vote for another     Compare to that rank       protocol error: a second      noted
    set                                             vote
    refuse (the plan)    Abort to all -> ended;     noted                         noted
                         if it may be dropped:
                         Abort to its instance
    fault                Abort to all -> ended;     noted                         noted
                         if it does not gate:
                         Abort to its instance
    fault: GroupError    noted as the `symptom`     noted                         noted
    lose (connection     Abort to all -> ended;     settle its instance           noted
    lost, or stalled)    if it may be dropped, and
                         has not voted for another
                         set: Abort to its instance
    leave out (late)     if it does not gate:       nothing                       nothing
                         Abort to its instance
    abort                Abort to all -> ended      nothing: it comes too late    nothing
    commit               every vote is good:        (once)                        raises why
                         Commit to all ->
                         committing; else raises
    ack                  protocol error             settle its instance           protocol error
    deadline             nothing                    Rollback to undecided         nothing
                                                    instances of several ranks
    ===================  =========================  ============================  ==============

    "All" are the ranks that are still in the round. An instance may be dropped if the rules say so,
    or if it does not gate, as long as enough instances remain and no group needs it. To settle an
    instance: once every rank has answered the commit or is lost,

    * all have committed -> `Finish` to all, settled;
    * no rank has committed -> settled;
    * a part has -> `Rollback` to these; each answers with another ack, and the last one settles.

    Why this is safe. A worker changes its model only after `Commit`, which no rank gets before
    every rank has proven that it holds the same bytes; and there is one way only out of
    *committing*, so no rank is told to abort an update that another was told to commit. A rank
    drops its previous version only on `Finish`, which no rank gets before all ranks of its instance
    have committed; and once one rank was told to roll back, no rank is told to finish.

    Not thread-safe: the callers hold the publisher's lock.

    Args:
        round_id: Identity of the round.
        version: Its label.
        instances: The workers of each instance, by rank.
        send: Sends one message to several workers; `lose` reports a lost worker.
        min_instances: Fewest instances that may remain when others are dropped.
        may_drop: True: the loss of a worker, or its refusal of the plan, leaves its instance out;
            False: it ends the round.
        is_gating: Returns whether the round waits for an instance, by its workers.
        is_grouped: True as long as all workers form one group, which needs every one of them.
    """

    def __init__(
        self,
        round_id: str,
        version: str,
        instances: Iterable[Iterable[Worker]],
        send: Callable[[list[Worker], msgspec.Struct], None],
        *,
        min_instances: int = 1,
        may_drop: bool = False,
        is_gating: Callable[[list[Worker]], bool] = lambda _workers: True,
        is_grouped: bool = False,
    ) -> None:
        self.round_id = round_id
        self.version = version
        self.instances = []
        for workers in map(list, instances):
            ranks = [RankAnswers(worker) for worker in workers]
            self.instances.append(Instance(ranks, gates=is_gating(workers)))
        if not any(instance.gates for instance in self.instances):
            # The first round of a fleet, say: somebody must have the update.
            for instance in self.instances:
                instance.gates = True
        self.may_drop = may_drop
        self.is_grouped = is_grouped
        self.committing = False
        """True once commits were sent: from here the round only goes forward."""
        self.ended: WTransferError | None = None
        """Why the round was ended before its commit."""
        self._send = send
        self._min_instances = min_instances
        self._num_sent = 0
        self._sent: tuple[str, list[str]] | None = None
        """Fingerprint and digests of the sent set, once workers have the `Prepare`."""
        self._places: dict[Worker, tuple[Instance, RankAnswers]] = {
            rank.worker: (instance, rank) for instance in self.instances for rank in instance.ranks
        }

    # -- asked by the coordinator

    def live(self) -> list[Instance]:
        """Return the instances that are still in the round."""
        return [instance for instance in self.instances if not instance.dropped]

    def ranks(self) -> Iterator[RankAnswers]:
        """Yield the ranks that are still in the round."""
        return (rank for instance in self.live() for rank in instance.ranks)

    def undecided(self) -> list[RankAnswers]:
        """Return the ranks of instances that are not settled, after the commit."""
        live = (instance for instance in self.live() if not instance.settled)
        return [rank for instance in live for rank in instance.ranks]

    def participant(self, worker: Worker) -> RankAnswers | None:
        """Return a worker's answers; None if the round began without this worker."""
        place = self._places.get(worker)
        return None if place is None else place[1]

    def gates(self, worker: Worker) -> bool:
        """Return whether the round waits for a worker's instance, however long it takes."""
        return self._places[worker][0].gates

    @property
    def settled(self) -> bool:
        """True if a round that is over has no message left to be sent."""
        return not self.committing or all(instance.settled for instance in self.live())

    @property
    def symptom(self) -> GroupError | None:
        """A rank's report that its group broke; the cause of the break may be reported later."""
        errors = (rank.error for rank in self.ranks())
        return next((error for error in errors if isinstance(error, GroupError)), None)

    def check(self) -> None:
        """Raise the error that ended the round, if any."""
        if self.ended is not None:
            raise self.ended

    # -- the trainer's events

    def plan(self, plan: Plan, identity: str) -> None:
        """Send a plan: whole, or naming its manifest to workers that were sent it before.

        Raises:
            LimitError: The plan is larger than it may be.
        """
        self.check()
        workers = [rank.worker for rank in self.ranks()]
        by_name = msgspec.structs.replace(plan, manifest=identity)
        self._send([each for each in workers if each.planned == identity], by_name)
        self._send([each for each in workers if each.planned != identity], plan)
        for worker in workers:
            worker.planned = identity

    def data(self, update_info: dict[str, Any]) -> int:
        """Send an engine's data; return its number in the round.

        Raises:
            LimitError: The message is larger than it may be.
        """
        self.check()
        # Numbered and queued in one step: every worker sees the numbers in order.
        number, self._num_sent = self._num_sent, self._num_sent + 1
        self._to_all(Data(self.round_id, number, update_info))
        return number

    def prepare(self, fingerprint: str, digests: list[str]) -> None:
        """Send the identity of the sent set; keep the digests for a rank that has another set."""
        self.check()
        self._sent = (fingerprint, digests)
        self._to_all(Prepare(self.round_id, fingerprint))

    def verify(self, fingerprint: str) -> None:
        """Raise unless every rank has proven that it holds the update.

        A worker votes with the fingerprint that it computed from its own digests. The comparison
        is made here, whatever the worker concluded, so a vote is proof and not a claim.

        Raises:
            DigestMismatchError: A vote is about other bytes than were sent, or is missing.
        """
        self.check()
        for rank in self.ranks():
            if rank.vote is None or rank.vote.fingerprint != fingerprint:
                raise _other_bytes(rank.worker)
            if rank.error is not None:
                raise rank.error

    def commit(self, fingerprint: str) -> None:
        """Order every rank to commit; from here the round only goes forward."""
        self.verify(fingerprint)
        self.committing = True
        self._to_all(Commit(self.round_id))

    def abort(self, error: WTransferError) -> None:
        """End the round before its commit; later, or a second time, do nothing."""
        if self.committing or self.ended is not None:
            return
        # First: the round is over even if the send fails.
        self.ended = error
        error.add_facts(round_id=self.round_id, version=self.version)
        self._to_all(Abort(self.round_id, str(error)))

    def deadline(self, reason: str) -> None:
        """Order a rollback in every instance whose ranks have not all committed.

        A rank that has committed goes back; a pending rank drops the set that it was to apply.
        """
        for instance in self.live() if self.committing else ():
            if not (instance.settled or instance.rolling_back) and len(instance.ranks) > 1:
                ranks = [r for r in instance.ranks if r.outcome in ("committed", "pending")]
                self._roll_back(instance, ranks, reason)

    # -- the workers' events

    def answer(self, worker: Worker, message: msgspec.Struct) -> bool:
        """Take in an answer; return True if it brings the round on.

        Only progress restarts the deadline for a stalled worker; repeated messages do not.

        Raises:
            ProtocolError: A worker does not send such a message, or not now.
        """
        instance, rank = self._places[worker]
        if isinstance(message, Accept):
            advances, rank.accept = rank.accept is None, message
            return advances
        if isinstance(message, Received):
            # Answers come in the order of the data; a repeated one changes nothing.
            before, rank.num_received = rank.num_received, max(rank.num_received, message.seq + 1)
            return rank.num_received > before
        if isinstance(message, Progress) and rank.accept is None:
            before = rank.proven_nbytes
            rank.proven_nbytes = max(before, message.nbytes)
            return rank.proven_nbytes > before
        if isinstance(message, Progress):
            before, rank.nbytes = rank.nbytes, max(rank.nbytes, message.nbytes)
            return rank.nbytes > before
        if isinstance(message, Vote):
            self._vote(instance, rank, message)
        elif isinstance(message, Ack):
            if not self.committing:
                raise ProtocolError(f"{worker.name} gives an ack before the commit")
            rank.ack = message
            self._settle(instance)
        elif isinstance(message, (Refuse, Fault)):
            refused = isinstance(message, Refuse)
            if refused:
                # The worker may have rejected that manifest: the next plan brings it whole.
                worker.planned = None
            phase = "plan" if refused else None
            error = message.error.rebuild(worker=worker.name, phase=phase)
            self._fault(worker, error, may_drop=refused and self.may_drop)
        else:
            raise ProtocolError(f"a worker does not send {type(message).__name__}")
        return True

    def _vote(self, instance: Instance, rank: RankAnswers, vote: Vote) -> None:
        name = rank.worker.name
        if self._sent is None:
            raise ProtocolError(f"{name} votes before it was asked to")
        if rank.vote is not None or rank.differs:
            raise ProtocolError(f"{name} gives a second vote in one round")
        fingerprint, digests = self._sent
        if vote.fingerprint == fingerprint:
            rank.vote = vote
            return
        rank.differs = True
        if self.ended is None and not instance.dropped:
            # Only to this rank, and once: the digests are as many as the pieces.
            self._send([rank.worker], Compare(self.round_id, digests))

    def fault(self, worker: Worker, error: WTransferError) -> None:
        """Note that a worker cannot go on with the round."""
        self._fault(worker, error, may_drop=False)

    def lose(self, worker: Worker, error: WTransferError) -> None:
        """Note that a worker's connection has ended, or that the worker counts as stalled."""
        instance, rank = self._places[worker]
        rank.lost = True
        if self.committing:
            rank.error = rank.error or error
            if not instance.settled and len(instance.ranks) > 1:
                # Without `Finish` the worker rolls back by itself: its ack no longer counts.
                rank.ack = None
            self._settle(instance)
        elif rank.differs:
            # Its vote has ended the round, with or without the names of the pieces.
            mismatch = _other_bytes(worker)
            mismatch.__cause__ = error
            self.fault(worker, mismatch)
        else:
            self._fault(worker, error, may_drop=self.may_drop)

    def leave_out(self, worker: Worker, error: WTransferError) -> bool:
        """Go on without a worker that holds up the round; return False if the round needs it."""
        instance, rank = self._places[worker]
        is_over = self.committing or self.ended is not None
        if instance.gates or is_over or not self._can_go_without(instance):
            return False
        rank.error = rank.error or error
        self._drop(instance, str(error))
        return True

    def _fault(self, worker: Worker, error: WTransferError, *, may_drop: bool) -> None:
        instance, rank = self._places[worker]
        rank.error = rank.error or error
        if self.committing or self.ended is not None or instance.dropped:
            return
        if (may_drop or not instance.gates) and self._can_go_without(instance):
            self._drop(instance, str(rank.error))
        elif not isinstance(rank.error, GroupError):
            self.abort(rank.error)

    def _can_go_without(self, instance: Instance) -> bool:
        left = sum(each is not instance for each in self.live())
        return not self.is_grouped and left >= self._min_instances

    def _drop(self, instance: Instance, reason: str) -> None:
        if not instance.dropped:
            instance.dropped = True
            # To all its ranks: a rank that only stalled may go on, and must drop its set.
            self._send([each.worker for each in instance.ranks], Abort(self.round_id, reason))

    # -- what follows

    def _settle(self, instance: Instance) -> None:
        ranks = instance.ranks
        if instance.dropped or instance.settled or any(each.outcome == "pending" for each in ranks):
            return
        committed = [each for each in ranks if each.outcome == "committed"]
        if len(committed) == len(ranks):
            instance.settled = True
            self._send([each.worker for each in ranks], Finish(self.round_id))
        elif not committed:
            instance.settled = True
        else:
            failed = next(each for each in ranks if each.outcome != "committed")
            reason = f"rank {failed.worker.hello.rank} of the instance: {failed.outcome}"
            self._roll_back(instance, committed, reason)

    def _roll_back(self, instance: Instance, ranks: list[RankAnswers], reason: str) -> None:
        instance.rolling_back = True
        for each in ranks:
            each.rolled_back = True
        self._send([each.worker for each in ranks], Rollback(self.round_id, reason))

    def _to_all(self, message: msgspec.Struct) -> None:
        self._send([rank.worker for rank in self.ranks()], message)


def _other_bytes(worker: Worker) -> DigestMismatchError:
    return DigestMismatchError(
        f"the vote of {worker.name} is about other bytes than were sent", worker=worker.name
    )
