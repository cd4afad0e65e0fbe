"""Two-phase commit under any interleaving: the machine against a small model of workers."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from wtransfer.errors import (
    DigestMismatchError,
    GroupError,
    PeerLostError,
    ProtocolError,
    RoundAbortedError,
    SchemaError,
    StallError,
    WTransferError,
)
from wtransfer.weight_sync.messages import (
    Abort,
    Accept,
    Ack,
    Commit,
    Compare,
    Data,
    ErrorInfo,
    Fault,
    Finish,
    Plan,
    Prepare,
    Received,
    Refuse,
    Rollback,
    Vote,
)
from wtransfer.weight_sync.trainer.round_state import RoundState

ROUND, GOOD = "round", "fingerprint of what was sent"
DIGESTS = ["digest"]
BACK = ("restored", "reverted", "discarded")


class ModelWorker:
    """What a session does, as far as the protocol goes. Its messages wait in two queues."""

    def __init__(self, name, rank=0, num_ranks=1):
        self.name, self.hello = name, SimpleNamespace(rank=rank)
        self.num_ranks = num_ranks
        self.planned = None
        self.inbox, self.outbox = deque(), deque()
        self.told = Counter()
        self.connected = True
        self.held = "old"
        self.staged = None
        self.pending = False
        self.way_back = False
        self.may_go_back = False
        self.impatient = False
        self.gets_other_bytes = False

    def say(self, message):
        if self.connected:
            self.outbox.append(message)

    def ack(self, outcome):
        self.say(Ack(ROUND, outcome, self.held, self.held, "serving", {}))

    def take(self, how):
        """Take in one message of the trainer; `how` it goes."""
        message = self.inbox.popleft()
        fault = {
            "fails": ErrorInfo("SchemaError", "no"),
            "group breaks": ErrorInfo("GroupError", "closed"),
        }.get(how)
        if isinstance(message, Plan):
            self.staged = None if fault else "nothing"
            self.say(Refuse(ROUND, fault) if fault else Accept(ROUND, []))
        elif isinstance(message, (Data, Prepare)) and self.staged is not None:
            if fault:
                self.staged = None
                self.say(Fault(ROUND, fault))
            elif isinstance(message, Data):
                self.staged = "other bytes" if self.gets_other_bytes else "new"
                self.say(Received(ROUND, message.seq))
            else:
                self.say(Vote(ROUND, GOOD if self.staged == "new" else "another", 1, {}))
        elif isinstance(message, Compare) and self.staged is not None:
            assert self.staged == "other bytes", "asked to compare what it has proven"
            self.staged = None
            self.say(Fault(ROUND, fault or ErrorInfo("DigestMismatchError", "'a' differs")))
        elif isinstance(message, Commit):
            assert self.staged == "new", "ordered to commit what it has not proven"
            self.staged, self.pending = None, True
        elif isinstance(message, Abort):
            assert not self.told[Commit], "ordered to abort what it was ordered to commit"
            self.staged = None
        elif isinstance(message, Finish):
            self.may_go_back = False
        elif isinstance(message, Rollback):
            self.roll_back()

    def roll_back(self):
        if self.may_go_back:
            self.way_back = True
        elif self.pending:
            self.pending = False
            self.ack("discarded")

    def step(self, *, applies):
        """Let the model's thread do what is left for it."""
        if self.way_back:
            self.held, self.way_back, self.may_go_back = "old", False, False
            self.ack("reverted")
        elif self.pending:
            self.pending = False
            if applies:
                self.held, self.may_go_back = "new", True
            self.ack("committed" if applies else "restored")

    def disconnect(self):
        """Lose the trainer: a single rank may apply what was ordered, one of several must not."""
        self.connected = False
        self.inbox.clear()
        self.staged = None
        if self.num_ranks > 1:
            self.roll_back()


class Rounds(RuleBasedStateMachine):
    """A coordinator that does at any time what it could do, and workers that do likewise."""

    @initialize(
        sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        may_drop=st.booleans(),
        gates=st.lists(st.booleans(), min_size=3, max_size=3),
        is_grouped=st.booleans(),
        min_instances=st.sampled_from([1, 1, 2]),
        num_good=st.integers(0, 60),
        order=st.randoms(use_true_random=False),
        spoiled=st.integers(0, 9),
        to_commit=st.booleans(),
    )
    def begin(
        self,
        *,
        sizes,
        may_drop,
        gates,
        is_grouped,
        min_instances,
        num_good,
        order,
        spoiled,
        to_commit,
    ):
        """Start, and let some steps go well: else few rounds would come to their commit."""
        self.workers = []
        instances = []
        for number, size in enumerate(sizes):
            ranks = [ModelWorker(f"{number}/{rank}", rank, size) for rank in range(size)]
            for worker in ranks:
                worker.gates = gates[number] or not any(gates[: len(sizes)])
            instances.append(ranks)
            self.workers += ranks
        for worker in self.workers[spoiled : spoiled + 1]:
            worker.gets_other_bytes = True
        self.told = Counter()
        self.coordinator_lives = True
        self.step = "init"
        self.min_instances = min_instances
        self.state = RoundState(
            ROUND,
            "v1",
            instances,
            self.send,
            min_instances=min_instances,
            may_drop=may_drop,
            is_gating=lambda workers: gates[instances.index(workers)],
            is_grouped=is_grouped,
        )
        for _ in range(400 if to_commit else num_good):
            if not (to_commit and self.state.committing):
                self.go_on([order.randrange(60)])

    def send(self, workers, message):
        kind, state = type(message), self.state
        ranks = [state.participant(worker) for worker in workers]
        if kind is Commit:
            assert ranks == list(state.ranks())
            assert all(rank.vote.fingerprint == GOOD and not rank.error for rank in ranks)
            # A lost one may have been left out, but not be taken for one that voted.
            assert not any(rank.lost for rank in ranks)
        if kind in (Finish, Rollback):
            assert self.told[Commit]
        if kind is Abort:
            assert not self.told[Commit], "aborted after the first commit"
        if kind is Finish:
            (instance,) = [each for each in state.instances if ranks[0] in each.ranks]
            assert ranks == instance.ranks, "only some ranks are told to finish"
            assert all(rank.outcome == "committed" and not rank.lost for rank in ranks)
            for worker in workers:
                assert worker.held == "new" or worker.impatient
        self.told[kind] += 1
        for worker in workers:
            worker.told[kind] += 1
            if worker.connected:
                worker.inbox.append(message)

    # -- what goes well, in any order

    @rule(order=st.lists(st.integers(0, 59), min_size=1, max_size=6))
    def go_on(self, order):
        for number in order:
            possible = list(self.possible())
            if possible:
                possible[number % len(possible)]()
                self.check_promises()

    def possible(self):
        """Yield every step that could be taken now."""
        if self.coordinator_lives and self.state.ended is None:
            step = self.next_step()
            if step is not None:
                yield step
        for worker in self.workers:
            if worker.inbox:
                yield lambda worker=worker: worker.take("well")
            if worker.outbox and self.coordinator_lives:
                yield lambda worker=worker: self.hear(worker)
            if worker.pending or worker.way_back:
                yield lambda worker=worker: worker.step(applies=True)

    def next_step(self):
        """Return what the coordinator does next, if it has the answers that it waits for."""
        ranks, state = list(self.state.ranks()), self.state
        if self.step == "init":
            return lambda: self.ask("data", state.plan, Plan(ROUND, "v1", "whole"), "identity")
        if self.step == "data" and all(rank.accept for rank in ranks):
            return lambda: self.ask("data again", state.data, {})
        if self.step == "data again":
            return lambda: self.ask("prepare", state.data, {})
        if self.step == "prepare" and all(rank.num_received == 2 for rank in ranks):
            return self.end_transfer
        if self.step == "commit" and all(rank.vote for rank in ranks):
            # What the votes are about, the machine has to look at.
            return lambda: self.ask("over", state.commit, GOOD)
        return None

    def end_transfer(self):
        self.state.is_grouped = False
        self.ask("commit", self.state.prepare, GOOD, DIGESTS)

    def ask(self, then, event, *args):
        """Feed the coordinator's event as `Coordinator` does: what it raises ends the round."""
        self.step = then
        try:
            event(*args)
        except WTransferError as error:
            self.state.abort(error)

    # -- what goes wrong

    @precondition(lambda self: self.coordinator_lives and self.step != "init")
    @rule()
    def user_aborts(self):
        self.state.abort(RoundAbortedError("the user"))

    @precondition(lambda self: self.coordinator_lives and self.state.symptom is not None)
    @rule()
    def symptom_is_believed(self):
        self.state.abort(self.state.symptom)

    @precondition(lambda self: self.coordinator_lives and self.state.committing)
    @rule()
    def deadline_passes(self):
        self.state.deadline("not in time")

    @rule(data=st.data(), how=st.sampled_from(["fails", "group breaks"]))
    def worker_fails(self, data, how):
        self.some(data, lambda worker: worker.inbox, lambda worker: worker.take(how))

    @rule(data=st.data())
    def model_refuses(self, data):
        self.some(
            data,
            lambda worker: worker.pending and not worker.way_back,
            lambda worker: worker.step(applies=False),
        )

    @precondition(lambda self: self.coordinator_lives)
    @rule(data=st.data(), heard=st.booleans())
    def connection_ends(self, data, heard):
        def cut(worker):
            while heard and worker.outbox:
                self.hear(worker)
            worker.outbox.clear()
            worker.disconnect()
            error = PeerLostError(f"{worker.name} is gone", worker=worker.name)
            self.feed(worker, lambda: self.state.lose(worker, error))

        self.some(data, lambda worker: worker.connected, cut)

    @precondition(lambda self: self.coordinator_lives and not self.state.committing)
    @rule(data=st.data())
    def worker_stalls(self, data):
        """Count as lost, though it may go on."""
        error = StallError("no progress")
        self.some(
            data,
            lambda worker: worker.connected,
            lambda worker: self.feed(worker, lambda: self.state.lose(worker, error)),
        )

    @precondition(lambda self: self.coordinator_lives and self.step != "init")
    @rule(data=st.data())
    def worker_is_late(self, data):
        def leave_out(worker):
            before, was_live = self.state.live(), self.is_live(worker)
            is_left_out = self.state.leave_out(worker, StallError("late"))
            assert self.is_live(worker) == (was_live and not is_left_out)
            assert not is_left_out or not (worker.gates or self.state.committing)
            assert not is_left_out or self.state.ended is None
            assert is_left_out or self.state.live() == before

        self.some(data, lambda worker: True, leave_out)

    @rule(data=st.data())
    def rank_waits_no_longer(self, data):
        def go_back(worker):
            worker.impatient = worker.way_back = True

        self.some(data, lambda worker: worker.may_go_back and worker.num_ranks > 1, go_back)

    @precondition(lambda self: self.coordinator_lives)
    @rule(really=st.sampled_from([False, False, False, True]))
    def coordinator_dies(self, really):
        """What it has sent arrives before its end does."""
        if not really:
            return
        self.coordinator_lives = False
        for worker in self.workers:
            while worker.inbox:
                worker.take("well")
            worker.disconnect()

    def some(self, data, condition, act):
        found = [worker for worker in self.workers if condition(worker)]
        if found:
            act(data.draw(st.sampled_from(found)))

    def hear(self, worker):
        message = worker.outbox.popleft()
        self.feed(worker, lambda: self.state.answer(worker, message), message)

    def is_live(self, worker):
        return self.state.participant(worker) in self.state.ranks()

    def feed(self, worker, event, message=None):
        """Feed an event of a worker, and judge who pays for it."""
        state = self.state
        had_ended, others = state.ended, len(state.live()) - 1
        event()
        if had_ended is not None or state.ended is None:
            return
        may_go = state.may_drop and (message is None or isinstance(message, Refuse))
        may_go = may_go and not state.participant(worker).differs
        assert not (not worker.gates or may_go) or (
            state.is_grouped or others < self.min_instances
        ), "a worker that the round could go on without has ended it"

    # -- the promises

    @invariant()
    def check_promises(self):
        self.what_is_reported_is_what_is_held()
        self.nothing_changes_before_the_commit()
        self.orders_do_not_contradict_each_other()
        self.an_ended_round_was_aborted_everywhere()
        assert self.state.live()
        self.who_was_left_out_was_not_needed()

    def who_was_left_out_was_not_needed(self):
        state = self.state
        dropped = [each for each in state.instances if each.dropped]
        assert not dropped or not state.is_grouped
        assert not dropped or len(state.live()) >= self.min_instances
        for instance in dropped:
            assert state.may_drop or not instance.ranks[0].worker.gates
        undecided = [rank for rank in state.ranks() if rank in state.undecided()]
        assert undecided == state.undecided()
        assert not state.committing or state.settled == (not undecided)

    def what_is_reported_is_what_is_held(self):
        for rank in self.state.ranks() if self.told else ():
            worker = rank.worker
            if rank.outcome == "committed" and not worker.impatient and worker.connected:
                assert worker.held == "new"
            if rank.outcome in BACK:
                assert worker.held == "old"

    def nothing_changes_before_the_commit(self):
        if not self.told[Commit]:
            assert all(worker.held == "old" and not worker.pending for worker in self.workers)

    def orders_do_not_contradict_each_other(self):
        for worker in self.workers:
            told = worker.told
            assert not (told[Finish] and told[Rollback])
            assert not (told[Abort] and told[Commit])
            assert max(told[kind] for kind in (Commit, Abort, Finish, Rollback, Compare)) <= 1
            assert not told[Compare] or (worker.gets_other_bytes and not told[Commit])

    def an_ended_round_was_aborted_everywhere(self):
        if self.state.ended is not None:
            assert not self.state.committing
            assert all(worker.told[Abort] == 1 for worker in self.workers)

    def teardown(self):
        """Let every wait end: each worker answers, or is lost at the deadline."""
        if not hasattr(self, "state"):
            return
        if self.coordinator_lives and not self.state.committing:
            self.state.abort(RoundAbortedError("at the latest"))
        self.run_down()
        if self.coordinator_lives:
            # No deadline was needed for that: every worker has answered, or is known to be lost.
            assert self.state.settled
            self.check_promises()
            for rank in self.state.ranks() if self.state.committing else ():
                assert rank.outcome != "pending"
                assert not rank.worker.may_go_back or not rank.worker.connected
        for worker in self.workers:
            assert (worker.staged, worker.pending, worker.way_back) == (None, False, False)
        for instance in self.state.instances:
            self.all_or_none(instance)

    def all_or_none(self, instance):
        held = {rank.worker.held for rank in instance.ranks}
        if not self.state.committing or instance.dropped:
            assert held == {"old"}
        elif len(held) > 1:
            # A rank that stopped waiting just as the others were told to finish; its ack says so.
            impatient = [rank for rank in instance.ranks if rank.worker.impatient]
            gone = [rank for rank in instance.ranks if not rank.worker.connected]
            assert impatient or gone
            if self.coordinator_lives and not gone:
                assert {rank.outcome for rank in instance.ranks} == {"committed", "reverted"}

    def run_down(self):
        for _ in range(40):
            for worker in self.workers:
                while worker.inbox:
                    worker.take("well")
                worker.step(applies=True)
                while worker.outbox and self.coordinator_lives:
                    self.hear(worker)


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)


# -- sequences that are rarely found by chance


class Sent:
    """A round of one instance of two ranks, played by hand; and what was sent, in order."""

    def __init__(self, **options):
        self.ranks = [ModelWorker(f"rank {rank}", rank, 2) for rank in range(2)]
        self.single = ModelWorker("single")
        self.sent = []
        self.state = RoundState(ROUND, "v1", [self.ranks, [self.single]], self.send, **options)
        self.state.prepare(GOOD, DIGESTS)
        self.sent.clear()

    def send(self, workers, message):
        self.sent += [(worker.name, type(message)) for worker in workers]

    def vote(self, *workers, fingerprint=GOOD):
        for worker in workers:
            self.state.answer(worker, Vote(ROUND, fingerprint, 1, {}))

    def commit(self):
        self.vote(*self.ranks, self.single)
        self.state.commit(GOOD)
        self.sent.clear()

    def ack(self, worker, outcome="committed"):
        self.state.answer(worker, Ack(ROUND, outcome, "v", "f", "serving", {}))

    def outcomes(self):
        return [rank.outcome for rank in self.state.ranks()]


def test_commit_that_crosses_a_rollback_is_not_finished():
    played = Sent()
    first, second = played.ranks
    played.commit()
    played.ack(played.single)
    played.ack(first)
    played.state.deadline("not every rank has committed")
    # Sent before the rollback arrived: this rank goes back all the same.
    played.ack(second)
    assert ("rank 1", Finish) not in played.sent
    assert not played.state.settled
    assert played.outcomes() == ["pending", "pending", "committed"]
    played.ack(first, "reverted")
    played.ack(second, "reverted")
    assert played.state.settled
    assert played.outcomes() == ["reverted", "reverted", "committed"]
    assert Counter(kind for _, kind in played.sent) == {Rollback: 2, Finish: 1}


def test_rank_lost_after_its_ack_takes_the_others_back():
    played = Sent()
    first, second = played.ranks
    played.commit()
    played.ack(first)
    played.state.lose(first, PeerLostError("gone"))
    played.ack(second)
    assert played.sent == [("rank 1", Rollback)]
    played.ack(second, "reverted")
    assert played.outcomes() == ["lost", "reverted", "pending"]


@pytest.mark.parametrize("missing", [None, "another"])
def test_commit_needs_every_good_vote(missing):
    played = Sent()
    played.vote(*played.ranks)
    if missing:
        played.vote(played.single, fingerprint=missing)
        assert played.sent == [("single", Compare)]
        played.sent.clear()
    with pytest.raises(DigestMismatchError, match="the vote of single is about other bytes"):
        played.state.commit(GOOD)
    assert played.sent == []
    assert not played.state.committing


def test_rank_that_votes_for_another_set_and_is_lost_before_it_names_it_ends_the_round():
    played = Sent(may_drop=True)
    played.vote(played.single, fingerprint="another")
    played.sent.clear()
    played.state.lose(played.single, PeerLostError("gone"))
    assert isinstance(played.state.ended, DigestMismatchError)
    assert "the vote of single is about other bytes" in str(played.state.ended)
    assert played.sent == [("rank 0", Abort), ("rank 1", Abort), ("single", Abort)]


def test_digests_are_sent_in_no_round_that_is_over_and_to_no_rank_that_was_dropped():
    dropped = Sent(may_drop=True)
    dropped.state.lose(dropped.ranks[0], PeerLostError("gone"))
    ended = Sent()
    ended.state.abort(RoundAbortedError("the user"))
    for played in (dropped, ended):
        played.sent.clear()
        played.vote(played.ranks[1], fingerprint="another")
        assert played.sent == []


@pytest.mark.parametrize("first", [GOOD, "another"])
def test_rank_votes_once(first):
    played = Sent()
    played.vote(played.single, fingerprint=first)
    played.sent.clear()
    for fingerprint in (GOOD, "another"):
        with pytest.raises(ProtocolError, match="single gives a second vote"):
            played.vote(played.single, fingerprint=fingerprint)
    assert played.sent == []
    played.vote(*played.ranks)
    if first != GOOD:
        with pytest.raises(DigestMismatchError):
            played.state.commit(GOOD)


def test_commit_is_refused_while_a_rank_says_that_its_group_broke():
    played = Sent()
    played.vote(*played.ranks, played.single)
    played.state.fault(played.single, GroupError("closed"))
    assert played.sent == []
    with pytest.raises(GroupError):
        played.state.commit(GOOD)
    assert played.sent == []


def test_first_failure_is_the_one_that_is_reported():
    played = Sent()
    first = SchemaError("too small")
    played.state.fault(played.single, first)
    played.state.lose(played.ranks[0], PeerLostError("gone"))
    played.state.abort(RoundAbortedError("the user"))
    assert played.state.ended is first
    assert played.sent == [("rank 0", Abort), ("rank 1", Abort), ("single", Abort)]


def test_manifest_is_named_to_workers_that_have_it_and_sent_whole_to_others():
    played = Sent()
    plans = []

    def send(workers, message):
        plans.append((workers, getattr(message, "manifest", "no plan")))

    state = RoundState(ROUND, "v1", [played.ranks], send)
    played.ranks[0].planned = "identity"
    state.plan(Plan(ROUND, "v1", "whole"), "identity")
    assert plans == [([played.ranks[0]], "identity"), ([played.ranks[1]], "whole")]
    # After a refusal the next plan brings it whole.
    state.answer(played.ranks[0], Refuse(ROUND, ErrorInfo("ProtocolError", "unknown")))
    assert [worker.planned for worker in played.ranks] == [None, "identity"]
