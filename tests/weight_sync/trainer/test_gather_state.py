"""The agreement before gathers under any interleaving: both machines against a model of a group."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wtransfer.errors import EngineError, PeerLostError, StallError, WTransferError
from wtransfer.weight_sync.messages import ErrorInfo
from wtransfer.weight_sync.trainer.gather_group import PUBLISHER, Ended
from wtransfer.weight_sync.trainer.gather_state import GatherFollower, GatherLeader


class Board:
    """States on their way through the store, to be written or read."""

    def __init__(self, key, store):
        self.key, self.store = key, store
        self.posted, self.view = {}, {}
        self.silent = set()

    def post(self, state, key=None):
        self.posted[key or self.key] = state

    def heard(self, key):
        return self.view.get(key)

    def is_alive(self, key):
        return key in self.view

    def lost(self, key, what):
        is_lost = key in self.silent and key in self.view
        return PeerLostError(f"{what} was lost") if is_lost else None

    @property
    def is_written(self):
        return all(self.store.get(key) == state for key, state in self.posted.items())


class Rank:
    """One rank's program: it publishes every version in turn, whatever became of the last.

    `collectives` are those that it has entered, which meet in order with those of the others; one
    that it has left on an error goes on on its thread.
    """

    def __init__(self, world, number, versions, num_buckets, num_passes=1):
        self.world, self.number = world, number
        self.versions, self.num_buckets, self.num_passes = versions, num_buckets, num_passes
        self.board = Board(str(number) if number else PUBLISHER, world.store)
        self.index, self.at, self.passes, self.count = 0, "idle", 0, 0
        self.collectives, self.outcomes, self.prepared = [], [], []
        self.given_up = self.dead = False
        self.failed_in = self.fault = None

    @property
    def bucket(self):
        return self.versions[self.index], self.passes, self.count

    def check_in_step(self):
        if self.given_up and not self.is_complete:
            raise StallError(f"rank {self.number} hangs")

    @property
    def is_complete(self):
        num = len(self.collectives)
        return all(len(each.collectives) >= num for each in self.world.ranks)

    def enter(self):
        self.given_up = False
        self.collectives.append(self.bucket)
        self.at = "gather"

    def over(self, outcome):
        self.outcomes.append((self.versions[self.index], str(outcome)))
        self.index, self.at, self.passes = self.index + 1, "idle", 0

    def events(self):
        """Return the events that may happen next, by name."""
        if self.dead:
            return {}
        found = {}
        if not self.board.is_written:
            found["write"] = lambda: self.world.store.update(self.board.posted)
        others = {k: s for k, s in self.world.store.items() if k not in self.board.posted}
        if {k: s for k, s in self.board.view.items() if k in others} != others:
            found["read"] = lambda: self.board.view.update(self.world.store)
        if self.at == "gather" and self.is_complete:
            # What happens after a gather does not break it; that a rank is lost is said of any.
            assert isinstance(self.machine.broken(), (PeerLostError, type(None)))
            found["end of gather"] = self.gathered
        elif self.at == "gather" and self.machine.broken() is not None:
            found["give up"] = lambda: self.tear(self.machine.broken())
        elif self.at != "gather" and (step := self.step()) is not None:
            found["step"] = step
        return found

    def faults(self):
        """Return the faults that may happen next, by name."""
        if self.dead or self.at in ("idle", "over"):
            return {}
        found = {"dies": self.die}
        error = EngineError(f"fault of rank {self.number}")
        if self.at == "gather" and not self.is_complete:
            found["fails inside"] = lambda: self.fail_inside(error)
        elif self.at in ("wait", "part", "between"):
            found["fails outside"] = lambda: self.fail(error)
        return found

    def note(self, fault):
        self.failed_in, self.fault = self.versions[self.index], fault

    def die(self):
        self.dead = True
        self.note("dies")
        for each in self.world.ranks:
            each.board.silent.add(self.board.key)

    def fail_inside(self, error):
        # The worst: it never got to the collective in which the others wait.
        self.collectives.pop()
        self.note("fails")
        self.tear(error, entered=False)


class Leader(Rank):
    def __init__(self, world, num_ranks, **program):
        super().__init__(world, 0, **program)
        self.machine = GatherLeader("epoch", self.board, self.check_in_step)
        self.machine.meet(0, range(1, num_ranks))
        self.begun = []

    def step(self):
        if self.at == "idle" and self.index < len(self.versions):
            return self.begin
        if self.at == "begun":
            return self.begin_pass
        if self.at == "wait":
            return self.look if self.world.tried(self.look) else None
        if self.at == "written" and self.board.is_written:
            return self.enter
        return self.end if self.at == "packed" else None

    def begin(self):
        self.machine.begin(self.versions[self.index])
        self.at = "begun"

    def begin_pass(self):
        begun = self.machine.begin_pass("layout")
        for earlier in self.begun:
            with pytest.raises(WTransferError):
                self.machine.may_gather(earlier, 1)
        self.begun.append(begun)
        self.passes, self.count, self.at = self.passes + 1, 1, "wait"

    def look(self):
        try:
            if not self.machine.may_gather(self.begun[-1], self.count):
                return False
        except WTransferError as error:
            self.end(error)
        else:
            assert all(self.bucket in each.prepared for each in self.world.ranks[1:])
            self.at = "written"
        return True

    def gathered(self):
        self.count, self.at = self.count + 1, "wait"
        if self.count > self.num_buckets and self.passes < self.num_passes:
            self.at = "begun"
        elif self.count > self.num_buckets:
            self.machine.packed()
            self.at = "packed"

    def tear(self, error, *, entered=True):
        self.given_up = entered
        self.machine.tear(self.begun[-1])
        self.end(self.machine.lost() or self.machine.failed() or error)

    def faults(self):
        found = super().faults()
        if self.at == "wait":
            return found | {"is stopped": self.stop, "refuses": self.refuse}
        return found

    def stop(self):
        self.note("stopped")
        self.machine.stop()

    def refuse(self):
        # A second call of `publish`, which leaves the round that is under way alone.
        self.machine.refuse("v3", ErrorInfo.of(EngineError("there is a round")))

    def fail(self, error):
        self.note("fails")
        self.end(error)

    def end(self, error=None):
        self.machine.end(None if error is None else ErrorInfo.of(error), "fingerprint")
        self.over(error)

    def time_out(self):
        if self.at == "wait":
            self.end(StallError(self.machine.awaited(self.begun[-1], self.count, "a bucket")))
            return True
        return False


class Follower(Rank):
    def __init__(self, world, number, **program):
        super().__init__(world, number, **program)
        self.machine = GatherFollower(self.board, self.check_in_step)

    def step(self):
        if self.at == "idle":
            return self.arrive if self.index < len(self.versions) else None
        if self.at == "between":
            return self.take
        look = {"turn": self.turn, "part": self.next, "cause": self.told}[self.at]
        return look if self.world.tried(look) else None

    def arrive(self):
        self.at = "turn"

    def turn(self):
        if self.board.heard(PUBLISHER) is None or not self.machine.is_last_over():
            return False
        try:
            found = self.machine.turn(self.versions[self.index])
        except WTransferError as error:
            self.over(error)
            return True
        if isinstance(found, Ended):
            self.over(found.error and found.error.message)
        elif found is not None:
            self.at, self.count = "part", 0
        return found is not None

    def next(self):
        try:
            found = self.machine.next(wait=True)
            if isinstance(found, Ended):
                self.machine.leave()
                self.over(found.error and found.error.message)
            elif found == "pass":
                self.machine.begin_pass()
                self.passes, self.count, self.at = self.passes + 1, 1, "between"
            elif found == "gather":
                self.enter()
        except WTransferError as error:
            self.machine.fail(error)
            self.over(error)
            return True
        return found is not None

    def gathered(self):
        self.machine.gathered()
        self.count, self.at = self.count + 1, "between"

    def take(self):
        in_hand = self.count <= self.num_buckets
        try:
            self.machine.ready(in_hand=in_hand)
        except WTransferError as error:
            self.machine.fail(error)
            self.over(error)
        else:
            self.prepared += [self.bucket] if in_hand else []
            self.at = "part"

    def tear(self, error, *, entered=True):
        self.given_up, self.at = entered, "cause"
        self.machine.fail(error, left=False)

    def told(self):
        error = self.machine.over()
        if error is not None:
            self.machine.fail(error)
            self.over(error)
        return error is not None

    def fail(self, error):
        self.note("fails")
        self.machine.fail(error)
        self.over(error)

    def time_out(self):
        if self.at == "turn":
            self.over("no round")
            return True
        return False


def copied(attributes):
    """Return the plain data of an object, which later changes do not reach."""
    kinds = (str, int, bool, type(None), tuple, msgspec.Struct)
    copied = {name: each for name, each in attributes.items() if isinstance(each, kinds)}
    for name, each in attributes.items():
        if isinstance(each, (dict, set, list)) and name not in ("ranks", "parts"):
            copied[name] = each.copy()
    return copied


class World:
    """Ranks over one store, with so many faults to come."""

    def __init__(self, num_ranks, num_faults, **program):
        self.store = {}
        self.num_faults = num_faults
        self.ranks = []
        self.ranks.append(Leader(self, num_ranks, **program))
        self.ranks += [Follower(self, number, **program) for number in range(1, num_ranks)]
        self.parts = [self]
        for each in self.ranks:
            self.parts += [each, each.board, each.machine]

    def snapshot(self):
        """Return all that changes, of the world and of each rank, its board and its machine."""
        return [copied(vars(part)) for part in self.parts]

    def restore(self, state):
        """Be as when the state was taken."""
        for part, kept in zip(self.parts, state, strict=True):
            vars(part).update(copied(kept))
        for each in self.ranks:
            each.board.store = self.store

    def tried(self, look):
        """Return what a look would, and undo it."""
        state = self.snapshot()
        found = look()
        self.restore(state)
        return found

    def choices(self):
        """Return the names of what may happen next."""
        found = [(r.number, name) for r in self.ranks for name in r.events()]
        if found and self.num_faults:
            found += [(r.number, name) for r in self.ranks for name in r.faults()]
        return found

    def happen(self, number, name):
        rank = self.ranks[number]
        event = rank.events().get(name)
        if event is None:
            event = rank.faults()[name]
            self.num_faults -= 1
        event()
        self.check()

    def check(self):
        """Check that collectives which meet are of one version, and of one bucket of it."""
        for number, meeting in enumerate(zip(*(r.collectives for r in self.ranks), strict=False)):
            assert len(set(meeting)) == 1, (number, meeting)

    def settle(self):
        """Let a deadline pass where nothing else happens; return False where all is over."""
        for each in self.ranks:
            assert each.dead or each.at not in ("written", "gather"), (each.number, each.at)
        return any(not each.dead and each.time_out() for each in self.ranks)

    def judge(self):
        """Check that every rank that a fault has reached knows which rank has failed."""
        faulty = next((each for each in self.ranks if each.failed_in is not None), None)
        for each in self.ranks:
            assert each.dead or each.at == "idle", (each.number, each.at)
            outcomes = dict(each.outcomes)
            assert faulty or set(outcomes.values()) == {"None"}, outcomes
            if faulty in (None, each):
                continue
            text, number = outcomes.get(faulty.failed_in, "None"), faulty.number
            if text == "None":
                # It was over for this rank: the other may have failed when all was gathered.
                assert faulty.fault != "stopped"
                continue
            named = {"fails": [f"fault of rank {number}"], "stopped": ["the round is over"]}
            named["dies"] = [f"trainer rank {number} was lost", f"of trainer ranks [{number}]"]
            if number == 0:
                named["dies"] = ["the publishing rank of this trainer was lost", "no round"]
            assert any(name in text for name in named[faulty.fault]), text


def explore(**setting):
    """Walk through every order of events; return the number of states that were met."""
    world = World(**setting)
    first = world.snapshot()
    seen, left = {str(first)}, [first]
    while left:
        state = left.pop()
        world.restore(state)
        choices = world.choices()
        for choice in choices or [None]:
            world.restore(state)
            if choice is not None:
                world.happen(*choice)
            elif not world.settle():
                world.judge()
            if (key := str(found := world.snapshot())) not in seen:
                seen.add(key)
                left.append(found)
    return len(seen)


@pytest.mark.parametrize(
    ("num_faults", "versions", "num_buckets", "num_passes"),
    [
        (0, ("v1", "v2"), 2, 2),
        (1, ("v1",), 2, 1),
        pytest.param(1, ("v1", "v2"), 1, 1, marks=pytest.mark.slow),
        (1, ("v1",), 1, 2),
    ],
)
def test_no_order_of_events_lets_a_rank_wait_alone_or_gather_parts_of_two_versions(
    num_faults, versions, num_buckets, num_passes
):
    setting = {"versions": versions, "num_buckets": num_buckets, "num_passes": num_passes}
    assert explore(num_ranks=2, num_faults=num_faults, **setting) > 100


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_three_ranks_agree_in_orders_that_are_drawn(data):
    world = World(3, 1, versions=("v1", "v2"), num_buckets=2, num_passes=2)
    while True:
        while choices := world.choices():
            world.happen(*data.draw(st.sampled_from(choices)))
        if not world.settle():
            return world.judge()
