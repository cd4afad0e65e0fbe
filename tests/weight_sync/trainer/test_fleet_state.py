"""The fleet under any order of events: the machine against a small model of servers.

Time is a number. The model's servers start, stop, refuse, are drained, and answer when they like.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from wtransfer.errors import (
    AuthenticationError,
    ClosedError,
    PeerLostError,
    RoundBusyError,
    StallError,
)
from wtransfer.weight_sync.messages import Hello
from wtransfer.weight_sync.trainer.fleet_state import (
    DROP_PATIENCE_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    FleetState,
)

DEADLINE_S = 30.0
# The last two names lead to one server.
SERVER_OF = {"a": 0, "b": 1, "c": 2, "also c": 2}
HOSTS = st.sampled_from(list(SERVER_OF))
SERVERS = st.integers(0, 2)


def hello(instance, host=None, host_ranks=None):
    return Hello(
        worker=instance,
        instance=instance,
        rank=0,
        num_ranks=1,
        version=None,
        fingerprint="",
        state="fresh",
        host=host,
        host_ranks=host_ranks,
    )


class Server:
    """What a server does when it is asked, as far as the publisher can tell.

    Args:
        number: Tells its workers from those of others.
        num_replicas: Workers behind it, each an instance of its own.
        tells: Who tells their number: ``answer``, ``hello`` or nobody.
        by_itself: True if its only worker joins by itself, and its answer names it.
    """

    def __init__(self, number, num_replicas, tells, *, by_itself):
        self.number, self.tells, self.by_itself = number, tells, by_itself
        self.num_replicas = 1 if by_itself else num_replicas
        self.told = set()
        self.lives = itertools.count()
        self.start()

    def start(self):
        self.up, self.refuses, self.drained, self.joined_as = True, False, False, None
        self.life = next(self.lives)
        self.workers = {}

    def names(self):
        return [f"{self.number}.{self.life}.{replica}" for replica in range(self.num_replicas)]

    def wanted(self, host):
        """Return the ranks that the publisher was told of; None: nobody has told."""
        told = self.tells == "hello" and any(each.host == host for each in self.workers.values())
        answered = self.tells == "answer" and host in self.told
        return self.num_replicas if told or answered else None

    def stop(self):
        self.up, self.joined_as = False, None
        self.workers.clear()

    def drain(self):
        self.drained, self.joined_as = True, None
        if not self.by_itself:
            self.workers.clear()

    def bring(self):
        """Let the next worker join, if there is one that may."""
        missing = [name for name in self.names() if name not in self.workers]
        if self.up and missing and (self.by_itself or self.joined_as is not None):
            ranks = self.num_replicas if self.tells == "hello" else None
            host = None if self.by_itself else self.joined_as
            self.workers[missing[0]] = hello(missing[0], host, ranks)

    def answer(self, host, *, by_hand):
        """Return why a question is answered with no; None: with yes."""
        if not self.up:
            return PeerLostError(f"cannot reach {host}")
        if self.refuses:
            return AuthenticationError(f"{host} refuses the token")
        if self.drained and not by_hand:
            return ClosedError("drained")
        if not self.by_itself and self.joined_as not in (None, host):
            return RoundBusyError(f"joined as {self.joined_as}")
        self.drained, self.joined_as = False, host
        return None


class Fleets(RuleBasedStateMachine):
    """A publisher that does at any time what it could do, and servers that do likewise."""

    @initialize(
        servers=st.lists(
            st.builds(
                lambda *args, by_itself: (args, by_itself),
                st.integers(1, 2),
                st.sampled_from(["answer", "hello", "nobody"]),
                by_itself=st.booleans(),
            ),
            min_size=3,
            max_size=3,
        ),
        named=st.lists(HOSTS, unique=True),
        have_joined=st.booleans(),
    )
    def begin(self, *, servers, named, have_joined):
        """Start, and let some hosts join: else few of them would ever be there."""
        self.now = 100.0
        self.removed = set()
        self.state = FleetState(self.removed)
        self.servers = [
            Server(number, *args, by_itself=by_itself)
            for number, (args, by_itself) in enumerate(servers)
        ]
        self.slow = set()
        self.questions = []
        self.taken_off = set()
        self.by_hand = {}
        self.answered_at, self.named, self.said, self.last_answer = {}, {}, {}, {}
        self.missing_since, self.lost_at = {}, {}
        self.absent_in_last_round = set()
        self.drained = set()
        self.here, self.seen = Counter(), Counter()
        for host in named:
            self.add(host, by_hand=True)
        if have_joined:
            self.ask()
            while self.questions:
                self.take_answer(0, is_late=False)
            for server in self.servers * 2:
                server.bring()
            self.check_promises()

    def server(self, host):
        return self.servers[SERVER_OF[host]]

    # -- the list

    @rule(host=HOSTS, by_hand=st.booleans())
    def add(self, host, by_hand):
        if host in self.state.hosts:
            before = dict(self.state.hosts)
            with pytest.raises(ValueError, match=f"host {host} is named twice"):
                self.state.add(["new", host], self.now)
            assert self.state.hosts == before
            return
        self.state.add([host], self.now, by_hand=by_hand)
        self.taken_off.discard(host)
        self.by_hand[host] = by_hand
        self.missing_since[host] = self.lost_at[host] = self.now
        self.server(host).told.discard(host)
        self.must_be_due(host, self.now)

    @rule(host=HOSTS, tells_it=st.booleans())
    def remove(self, host, tells_it):
        if host not in self.state.hosts:
            with pytest.raises(LookupError, match=f"host {host} is not on the list"):
                self.state.remove(host)
            return
        self.state.remove(host)
        self.taken_off.add(host)
        for known in (
            self.answered_at,
            self.named,
            self.said,
            self.last_answer,
            self.missing_since,
            self.here,
            self.seen,
        ):
            known.pop(host, None)
        self.absent_in_last_round.discard(host)
        self.drained.discard(host)
        server = self.server(host)
        if tells_it and server.joined_as == host and not server.by_itself:
            server.joined_as = None
            server.workers.clear()

    # -- questions and answers

    @rule()
    def invite(self):
        self.state.ask(self.state.hosts)
        self.by_hand = dict.fromkeys(self.state.hosts, True)
        # The user names them again.
        self.drained.clear()

    @rule()
    def ask(self):
        """Do what the thread that asks does."""
        for host in self.state.due(self.now):
            assert not any(asked is host for asked, _ in self.questions), "asked twice at a time"
            by_hand = self.state.begin_question(host)
            assert by_hand == self.by_hand.pop(host.name, False)
            self.questions.append((host, by_hand))

    @precondition(lambda self: self.questions)
    @rule(data=st.data(), is_late=st.booleans())
    def answer(self, data, is_late):
        """Let a server answer; too late, it does what it was asked for all the same."""
        self.take_answer(data.draw(st.integers(0, len(self.questions) - 1)), is_late=is_late)

    def take_answer(self, number, *, is_late):
        host, by_hand = self.questions.pop(number)
        server = self.server(host.name)
        error = server.answer(host.name, by_hand=by_hand)
        drained = isinstance(error, ClosedError)
        if error is None and is_late:
            error = StallError(f"{host.name} did not answer in time")
        names = server.names()
        if error is None:
            worker = (names[0], names[0]) if server.by_itself else (None, None)
            num_ranks = server.num_replicas if server.tells == "answer" else None
            self.state.said_yes(host, self.now, *worker, num_ranks=num_ranks)
            server.told.add(host.name)
        else:
            self.state.said_no(host, error, self.now, drained=drained)
        if self.state.hosts.get(host.name) is host:
            self.answered_at[host.name] = self.now
            if error is None and self.last_answer.get(host.name) == "yes":
                # Twice: no other worker is on its way.
                self.seen[host.name] = self.here[host.name]
            self.said[host.name] = "yes" if error is None else str(error)
            self.last_answer[host.name] = self.said[host.name]
            if drained:
                self.drained.add(host.name)
            if error is None:
                self.drained.discard(host.name)
                self.named[host.name] = names[0] if server.by_itself else None

    # -- the servers

    @rule(number=SERVERS)
    def worker_joins(self, number):
        self.servers[number].bring()

    @rule(number=SERVERS, what=st.sampled_from(["restart", "stop", "refuse", "drain"]))
    def server_changes(self, number, what):
        server = self.servers[number]
        if what == "restart":
            server.start()
        elif what == "stop":
            server.stop()
        elif what == "drain" and server.up:
            server.drain()
        elif server.up:
            server.refuses = not server.refuses

    @rule(number=SERVERS)
    def worker_is_lost(self, number):
        """Let a worker's connection end; its server stays, and brings it again when it is asked."""
        workers = self.servers[number].workers
        if workers:
            workers.popitem()

    @rule(number=SERVERS)
    def worker_is_slow(self, number):
        """Set a worker aside, or let it take part again."""
        self.slow ^= set(self.servers[number].names())

    @rule(seconds=st.sampled_from([0.1, 0.25, 1.0, 4.0, 30.0]))
    def time_passes(self, seconds):
        self.now += seconds

    # -- rounds

    @rule(may_drop=st.booleans(), return_s=st.sampled_from([None, 0, 7.0]))
    def round_begins(self, may_drop, return_s):
        self.state.hurry(self.now)
        absent = {host.name for host in self.state.absent()}
        for name in absent:
            self.must_be_due(name, self.now)
        waits_s = self.state.longest_wait_s(DEADLINE_S, return_s, may_drop=may_drop)
        if not may_drop:
            assert waits_s == (DEADLINE_S if return_s is None else return_s)
        elif absent <= self.absent_in_last_round:
            assert waits_s == 0, "a host that stays away costs every round a wait"
        else:
            assert waits_s == (DROP_PATIENCE_S if return_s is None else return_s)
        self.state.begin_round()
        self.absent_in_last_round = absent

    # -- the promises

    def workers(self):
        return [each for server in self.servers for each in server.workers.values()]

    def must_be_due(self, name, at):
        host = self.state.hosts[name]
        assert host.is_asked or host in self.state.due(at)

    @invariant()
    def check_promises(self):
        if not hasattr(self, "state"):
            return
        joined = self.workers()
        whole = [each for each in joined if each.instance not in self.slow]
        self.state.look(joined, whole, self.now)
        assert self.removed == self.taken_off
        ranks = Counter(self.host_of(each) for each in whole)
        for name, host in self.state.hosts.items():
            is_less = ranks[name] < self.here[name]
            self.here[name] = ranks[name]
            self.seen[name] = max(self.seen[name], ranks[name])
            wanted = self.server(name).wanted(name)
            if wanted is None:
                # Nobody has told: as many as there ever were.
                wanted = max(1, self.seen[name] if host.worker is None else 0)
            is_missing = ranks[name] < wanted
            self.what_is_missing_is_absent(host, is_missing=is_missing, is_less=is_less)
            self.who_is_missing_or_has_not_said_yes_is_asked(host, is_missing=is_missing)
        self.no_worker_counts_for_two()
        self.what_was_removed_takes_no_part()

    def host_of(self, worker):
        """Return the host that a worker counts for."""
        if worker.host is not None:
            return worker.host
        naming = [name for name in self.state.hosts if self.named.get(name) == worker.instance]
        return naming[0] if naming else None

    def what_is_missing_is_absent(self, host, *, is_missing, is_less):
        assert (host.absent_since is not None) == is_missing
        if not is_missing:
            self.missing_since.pop(host.name, None)
            self.drained.discard(host.name)
            assert host not in self.state.absent()
            return
        since = self.missing_since.get(host.name)
        if since is None:
            # Lost since the last look: the next question comes soon.
            since = self.missing_since[host.name] = self.lost_at[host.name] = self.now
            self.said.pop(host.name, None)
            if is_less:
                # Its yes was that of a process that may be gone.
                self.last_answer.pop(host.name, None)
            self.must_be_due(host.name, self.now + FIRST_PAUSE_S)
        assert (host in self.state.absent()) == (host.name not in self.drained)
        absence = host.absence(self.now, "its process is gone")
        assert absence.startswith(f"{host.name} is absent for {self.now - since:.1f} s")
        said = self.said.get(host.name, "yes")
        assert absence.endswith("its process is gone" if said == "yes" else said)

    def who_is_missing_or_has_not_said_yes_is_asked(self, host, *, is_missing):
        if is_missing or self.last_answer.get(host.name) != "yes":
            last = max(self.lost_at[host.name], self.answered_at.get(host.name, 0.0))
            self.must_be_due(host.name, last + LONGEST_PAUSE_S)
        elif not self.by_hand.get(host.name):
            assert host not in self.state.due(self.now + 1000.0), "asked, though it is there"

    def no_worker_counts_for_two(self):
        for worker in self.workers():
            assert self.state.host_of(worker) in (None, self.host_of(worker))

    def what_was_removed_takes_no_part(self):
        for name in self.taken_off:
            assert name not in self.state.hosts
            assert self.state.host_of(hello("stays", name)) == name


TestFleets = Fleets.TestCase
TestFleets.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -- sequences that are rarely found by chance


def test_host_whose_yes_came_too_late_is_asked_until_it_says_what_is_behind_it():
    state = FleetState(set())
    state.add(["a"], 0.0)
    (host,) = state.due(0.0)
    state.begin_question(host)
    state.said_no(host, StallError("no answer in time"), 1.0, drained=False)
    one = [hello("first", "a")]
    state.look(one, one, 2.0)
    assert state.absent() == []
    assert state.due(2.0) == [host]
    state.begin_question(host)
    state.said_yes(host, 3.0, num_ranks=2)
    state.look(one, one, 4.0)
    assert state.absent() == [host]
    assert host.absence(5.0) == (
        "a is absent for 1.0 s (1 of 2 ranks): it was asked to join, and its workers have not come"
    )
    both = [*one, hello("second", "a")]
    state.look(both, both, 6.0)
    assert (state.absent(), state.due(1000.0)) == ([], [])
