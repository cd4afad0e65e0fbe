"""The worker's side of a commit as a state machine: any order of events, without sockets."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import wtransfer
from wtransfer.errors import CommitError, RoundBusyError
from wtransfer.registry import hooks
from wtransfer.weight_sync.messages import Ack, Lost
from wtransfer.weight_sync.worker.committer import Committer, Place
from wtransfer.weight_sync.worker.weight_state import WeightSet, WeightState

ENDS = (
    ["committed"],
    ["committed", "reverted"],
    ["committed", "empty"],
    ["restored"],
    ["empty"],
    ["discarded"],
)
"""What a publisher may be told of a round whose commit it has ordered."""
SEEN = Counter()
"""How often a step applied a set, and else restored the one before."""


class Update:
    """An update that is staged: no bytes, only what the state machine asks of it."""

    def __init__(self, number, publisher):
        self.publisher = publisher
        self.round_id = f"round-{number}"
        self.version = f"v{number}"
        tensors = {"a": number, "b": number}
        self.held = WeightSet(self.version, f"fingerprint-{number}", None, tensors)
        self.seconds = {}
        self.facts = {"round_id": self.round_id, "version": self.version, "worker": "w"}
        self.dropped = None
        self.next_seq, self.prepared, self.proven = 0, False, False
        self.differs, self.asks = False, False

    def drop(self, reason):
        assert self.dropped is None, "dropped twice"
        self.dropped = reason


class Model:
    """A target of two numbers, which are equal unless it is a mixture of two versions."""

    def __init__(self, *, captures):
        self.values = {"a": 0, "b": 0}
        self.captures = captures
        self.applied = []
        self.midway = lambda: None
        self.failures = 0

    def schema(self):
        return None

    def capture(self):
        return dict(self.values) if self.captures else None

    def apply(self, tensors):
        self.applied.append(tensors["a"])
        self.values["a"] = tensors["a"]
        midway, self.midway = self.midway, lambda: None
        midway()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the model says no")
        self.values["b"] = tensors["b"]


class AtOnce:
    """Stand-in for `hooks.Notifications`: observers are notified within the event.

    So what the machine does after a commit comes at the same place in every run.
    """

    def __init__(self, state):
        self.state = state

    def notify(self, hook_name, **facts):
        # Else the plan of the next round could be notified first.
        assert self.state.changed.is_held_here() or self.state.closed
        hooks.notify(hook_name, **facts)

    def calls_here(self):
        return False

    def close(self, *, wait): ...


class WorkerMachine(RuleBasedStateMachine):
    """One worker, its model's thread, and a publisher that need not keep to the protocol."""

    def __init__(self, *, several):
        super().__init__()
        self.several = several

    @initialize(keeps=st.sampled_from([True, True, False]), captures=st.booleans())
    def begin(self, keeps, captures):
        self.keeps = keeps
        self.model = Model(captures=captures)
        self.publisher = SimpleNamespace(address="unix:@played", connected=True, send=self.hear)
        self.committer = Committer(
            self.model,
            self.model,
            Place("worker", "instance", 0, 1 + self.several, None),
            SimpleNamespace(send=self.hear, lock=threading.RLock(), close=lambda: None),
            keep_previous=keeps,
            cast=False,
            cast_hint="",
            deadline_s=0.001,
        )
        self.state = self.committer.weight_state
        self.committer.observers = AtOnce(self.state)
        self.told = (None, self.state.held.fingerprint, "fresh")
        self.acks = {}
        self.updates = []
        self.ordered = set()
        self.after_commit = lambda: None
        wtransfer.hooks.register(self)

    @wtransfer.hookimpl
    def wtransfer_weights_committed(self):
        after, self.after_commit = self.after_commit, lambda: None
        after()

    def hear(self, message):
        assert isinstance(message, (Ack, Lost))
        self.told = (getattr(message, "version", None), message.fingerprint, message.state)
        if isinstance(message, Ack):
            self.acks.setdefault(message.round_id, []).append(message.outcome)

    def update(self, age):
        """Return the update of a round: 0 the last one, 1 the one before."""
        return self.updates[-1 - age] if age < len(self.updates) else Update(-1, self.publisher)

    # -- the publisher's and the engine's events

    @rule()
    def plan(self):
        update = Update(len(self.updates) + 1, self.publisher)
        before, pending = self.state.update, self.state.pending
        ended = self.state.end_round("superseded")
        assert ended is before
        if pending is None:
            self.state.plan(update)
            self.updates.append(update)
        else:
            with pytest.raises(RoundBusyError, match="pending since"):
                self.state.plan(update)

    @rule()
    def arrive(self):
        """Bring a round to its vote, as most do."""
        self.plan()
        update = self.state.update
        if update is not None:
            assert self.state.data(update.round_id, 0) is update
            assert self.state.prepare(update.round_id) is update
            assert self.state.verified(update)
            update.next_seq, update.prepared, update.proven = 1, True, True

    @rule()
    def order(self):
        """Bring a round to its commit."""
        self.arrive()
        self.commit(0)

    @rule(age=st.integers(0, 1), seq=st.integers(0, 2))
    def data(self, age, seq):
        dropped = self.state.num_dropped
        update = self.state.data(self.update(age).round_id, seq)
        assert (update is None) == (self.state.num_dropped == dropped + 1)
        if update is not None:
            # Once, in order, and none of a round that is over.
            assert (update, update.dropped) == (self.state.update, None)
            assert seq == update.next_seq
            assert not update.prepared
            update.next_seq = seq + 1

    @rule(age=st.integers(0, 1))
    def prepare(self, age):
        update = self.state.prepare(self.update(age).round_id)
        if update is not None:
            assert update is self.state.update
            assert not update.prepared
            update.prepared = True

    @rule(age=st.integers(0, 1), as_sent=st.sampled_from([True, True, False]))
    def verified(self, age, as_sent):
        """Vote, once in a round; and hear the digests, which not every vote asks for."""
        update = self.update(age)
        current = update is self.state.update
        if as_sent and not update.differs:
            assert self.state.verified(update) is current
            update.proven |= current
        elif not (as_sent or update.proven or update.differs):
            assert self.state.differs(update) is current
            update.differs = update.asks = current
            self.commit(age)
        else:
            self.compare(age)

    def compare(self, age):
        dropped, update = self.state.num_dropped, self.update(age)
        found = self.state.compare(update.round_id)
        assert (found is None) == (self.state.num_dropped == dropped + 1)
        # Once, and none of a round that is over.
        assert found is (update if update.asks and update is self.state.update else None)
        update.asks = update.asks and found is None

    @rule(age=st.integers(0, 1))
    def failed(self, age):
        update = self.update(age)
        current = update is self.state.update
        assert self.state.failed(update, "a flipped bit") is current

    @rule(age=st.integers(0, 1))
    def commit(self, age):
        update, pending = self.update(age), self.state.pending
        proven = update.proven and update is self.state.update
        self.state.commit(update.round_id)
        if proven and pending is None:
            assert self.state.pending.held is update.held
            self.ordered.add(update.round_id)
        else:
            assert self.state.pending is pending

    @rule(age=st.integers(0, 1))
    def finish(self, age):
        self.state.finish(self.update(age).round_id)

    @rule(age=st.integers(0, 1))
    def rollback(self, age):
        self.state.rollback(self.update(age).round_id, "another rank failed")

    @rule(age=st.integers(0, 1))
    def abort(self, age):
        self.state.end_round("aborted", self.update(age).round_id)

    @rule()
    def lose_publisher(self):
        update, pending = self.state.update, self.state.pending
        self.state.end_round("the publisher was lost")
        self.state.publisher_lost()
        assert update is None or update.dropped
        if pending is not None and pending.rollback_reason is None and not self.state._applying:
            # A worker by itself may still apply it; ranks of an instance all choose the old one.
            assert (self.state.pending is pending) is not self.several

    # -- the model's thread

    @rule()
    def discard(self):
        pending = self.state.pending
        assert self.committer.discard() is (pending is not None)

    @rule()
    def lose_weights(self):
        self.model.values = {"a": -1, "b": -2}
        self.committer.weights_lost("asleep")
        assert (self.state.held.version, self.state.state) == (None, "empty")

    @rule(
        ordered=st.booleans(),
        failures=st.sampled_from([0, 0, 1, 2]),
        midway=st.lists(
            st.sampled_from(["rollback", "lose_publisher", "plan", "finish"]), max_size=2
        ),
        after=st.sampled_from(
            ["finish", "finish", "rollback", "overtake", "lose_publisher", "nothing"]
        ),
        age=st.sampled_from([0, 0, 0, 1]),
    )
    def step(self, ordered, failures, midway, after, age):
        """Apply what is pending, with events in the middle of it and after it."""
        if ordered:
            self.order()
        pending, before = self.state.pending, dict(self.model.values)
        was_empty, held = self.state.empty, self.state.held
        can_return = held.tensors is not None or (
            self.keeps and self.model.captures and not was_empty
        )
        self.model.applied.clear()
        self.model.failures = failures

        def events():
            for name in midway:
                getattr(self, name)(*([age] if name in ("rollback", "finish") else []))
            assert self.state.pending is pending, "no event may take what is being applied"

        self.model.midway = events

        def after_commit():
            if after in ("rollback", "finish"):
                getattr(self, after)(age)
            elif after == "overtake":
                # The next round is staged; its commit may not take the place of the rollback.
                self.arrive()
                self.state.rollback(pending.update.round_id, "another rank failed")
                self.commit(0)
            elif after != "nothing":
                getattr(self, after)()

        self.after_commit = after_commit
        try:
            applied = self.committer.commit()
        except CommitError as error:
            applied, restored = False, error.restored
        else:
            restored = True
        self.model.failures = 0
        self.model.midway = self.after_commit = lambda: None
        if pending is None:
            assert (applied, self.model.values) == (False, before)
            return
        # Only what was ordered has been applied, and what the model had before.
        number = pending.held.tensors["a"]
        assert pending.update.round_id in self.ordered
        assert set(self.model.applied) <= {number, before["a"]}
        current = self.update(age).round_id == pending.update.round_id
        asked_back = "lose_publisher" in midway or ("rollback" in midway and current)
        finished = not self.several or (after == "finish" and current and not asked_back)
        assert applied is (failures == 0 and finished)
        if applied:
            assert self.model.values == {"a": number, "b": number}
            assert self.state.held.version == pending.update.version
            assert self.state.state == ("pending" if self.state.pending else "serving")
        elif can_return and failures < 2:
            assert (restored, self.model.values) == (True, before)
            assert (self.state.held.version, self.state.state) == (held.version, "behind")
        elif not can_return:
            assert (restored, self.state.state) == (False, "empty")
        SEEN[applied, restored] += 1

    # -- the promises

    @invariant()
    def no_mixture_is_served(self):
        if hasattr(self, "model") and self.state.state != "empty":
            assert self.model.values["a"] == self.model.values["b"]

    @invariant()
    def only_what_was_applied_is_claimed(self):
        if hasattr(self, "model") and self.state.held.version is not None:
            number = self.model.values["a"]
            claimed = (self.state.held.version, self.state.held.fingerprint)
            assert claimed == (f"v{number}", f"fingerprint-{number}")
            assert f"round-{number}" in self.ordered

    @invariant()
    def the_publisher_was_told_what_is_held(self):
        if hasattr(self, "model"):
            assert self.told[:2] == (self.state.held.version, self.state.held.fingerprint)

    @invariant()
    def a_round_is_staged_dropped_or_ordered(self):
        for update in getattr(self, "updates", ()):
            kept = update is self.state.update or update.round_id in self.ordered
            assert (update.dropped is None) is kept

    def teardown(self):
        if not hasattr(self, "committer"):
            return
        try:
            while self.state.pending is not None:
                self.step(ordered=False, failures=0, midway=[], after="finish", age=0)
                self.only_what_was_applied_is_claimed()
            for round_id in self.ordered:
                assert self.acks.get(round_id) in ENDS, self.acks
        finally:
            wtransfer.hooks.unregister(self)
            self.committer.close()


@pytest.mark.parametrize("num_examples", [120, pytest.param(5000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("several", [False, True], ids=["alone", "rank of several"])
def test_any_order_of_events_keeps_the_promises(num_examples, several):
    SEEN.clear()
    run_state_machine_as_test(
        lambda: WorkerMachine(several=several),
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # The witness: sets were applied, the one before was restored, and it could not be.
    assert min(SEEN[True, True], SEEN[False, True], SEEN[False, False]) > 0, SEEN


def test_closed_state_keeps_no_tensors():
    state, held = WeightState(num_ranks=2), WeightSet("v1", "f", None, {})
    update = Update(1, None)
    state.plan(update)
    state.verified(update)
    state.commit(update.round_id)
    pending = state.begin()
    assert state.close() is None, "it is being applied"
    state.applied(pending, held, keep=True)
    assert (state.held.version, state.held.tensors, state._previous) == ("v1", None, None)
    state.not_applied(pending, held, RuntimeError("no"), restored=True)
    assert state.held.tensors is None
    late = Update(2, None)
    state.plan(late)
    state.verified(late)
    state.commit(late.round_id)
    assert state.pending is None, "nothing will apply it: it would only keep its memory"
