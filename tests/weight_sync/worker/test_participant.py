"""A worker against a publisher that is played by hand."""

from __future__ import annotations

import queue
import sys
import threading
import traceback

import pytest

import wtransfer
from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.errors import CommitError, RoundBusyError
from wtransfer.manifest import Manifest, fingerprint
from wtransfer.registry import hooks
from wtransfer.testing.fakes import MemoryEngine
from wtransfer.transport import rendezvous
from wtransfer.transport.rendezvous import host_rendezvous
from wtransfer.weight_sync.messages import (
    Abort,
    Accept,
    Ack,
    Commit,
    Init,
    Plan,
    Prepare,
    Ready,
    Refuse,
    Vote,
)

TIMEOUT_S = 10
SHELF = {"shelf": "nothing is on it"}


class Gates:
    """What holds up the engine of a test, in the order in which it comes by."""

    def __init__(self):
        self.init = queue.SimpleQueue()


GATES = Gates()


class GatedEngine(MemoryEngine):
    """An engine whose initialisation does what a test has queued: waits for it, and may raise."""

    def init_transfer_engine(self, init_info):
        if not GATES.init.empty():
            GATES.init.get()()
        super().init_transfer_engine(init_info)


class AnyTarget:
    """A target without a schema."""

    def schema(self):
        return None

    def capture(self):
        return {}

    def apply(self, tensors):
        """Keep nothing."""


def order_commit(publisher, round_id="r"):
    """Bring a round of no tensors to its commit."""
    publisher.init(SHELF)
    publisher.mail.expect(Ready)
    publisher.say(Plan(round_id, "v1", Manifest(())))
    publisher.mail.expect(Accept)
    publisher.say(Prepare(round_id, fingerprint(Manifest(()), [])))
    publisher.mail.expect(Vote)
    publisher.say(Commit(round_id))


@pytest.fixture(scope="module", autouse=True)
def gated_engine():
    WeightTransferEngineFactory.register_engine("tests-gated", GatedEngine)


@pytest.fixture
def publisher(play_publisher):
    return play_publisher("tests-gated")


@pytest.fixture
def join(publisher):
    sessions = []

    def make(**options):
        sessions.append(publisher.meet(AnyTarget(), **options))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


@pytest.fixture
def observe():
    observers = []

    def register(observer):
        hooks.register(observer)
        observers.append(observer)
        return observer

    yield register
    for observer in observers:
        hooks.unregister(observer)


def test_a_rank_that_is_not_released_in_time_goes_back(publisher, join):
    session = join(instance="i", rank=0, num_ranks=2, deadline_s=0.2)
    order_commit(publisher)
    with pytest.raises(CommitError, match=r"not released within 0\.2 s") as caught:
        session.commit_pending(TIMEOUT_S)
    assert caught.value.restored
    assert [publisher.mail.expect(Ack).outcome for _ in range(2)] == ["committed", "reverted"]
    assert (session.version, session.state) == (None, "behind")


# -- plans and engines


def test_a_target_without_a_schema_takes_whole_updates_only(publisher, join):
    join()
    publisher.init(SHELF)
    publisher.mail.expect(Ready)
    publisher.say(Plan("r", "v1", Manifest((), coverage="patch", base="whatever")))
    refusal = publisher.mail.expect(Refuse)
    assert (refusal.error.kind, "'patch'" in refusal.error.message) == ("ManifestError", True)


def test_the_answer_to_an_init_goes_to_the_publisher_that_sent_it(publisher, join):
    join()
    failing = threading.Event()

    def fail_late():
        failing.wait(TIMEOUT_S)
        raise ConnectionError("the first publisher is gone")

    GATES.init.put(fail_late)
    publisher.init(SHELF)
    publisher.connection.close()
    publisher.accept()
    publisher.epoch = 0
    publisher.init(SHELF)
    failing.set()
    # Both count their epochs from one: only the second one's answer may arrive.
    publisher.mail.expect(Ready)


@pytest.mark.usefixtures("libuv")
@pytest.mark.parametrize("end", ["worker leaves", "publisher is lost", "round is aborted"])
def test_group_that_forms_is_called_off_with_its_round(publisher, join, end, until):
    session, meeting = join(), host_rendezvous("127.0.0.1")
    at = {"master_address": meeting.host, "master_port": meeting.port, "rendezvous": meeting.name}
    publisher.say(Init(1, "gloo", None, None, 0, 1, {**at, "world_size": 2}))
    until(lambda: meeting.store.check(["rank1"]))
    assert num_waiting_for_ranks() == 1
    if end == "worker leaves":
        session.close()
    elif end == "publisher is lost":
        publisher.connection.close()
    else:
        publisher.say(Abort("r", "another worker was refused"))
    # Long before a rank gives the meeting up.
    until(lambda: not num_waiting_for_ranks())
    meeting.close()


def num_waiting_for_ranks():
    """Return the number of engine threads that are within a rendezvous."""
    frames = sys._current_frames()
    engines = [each.ident for each in threading.enumerate() if each.name == "wtransfer-engine"]
    stacks = [traceback.walk_stack(frames[ident]) for ident in engines if ident in frames]
    files = [{frame.f_code.co_filename for frame, _ in stack} for stack in stacks]
    return sum(rendezvous.__file__ in each for each in files)


def test_a_process_that_ends_closes_its_session_though_it_gets_no_more_threads(
    publisher, join, monkeypatch, until
):
    """As Python refuses them from 3.12 on."""
    session, gate = join(), threading.Event()
    GATES.init.put(lambda: gate.wait(TIMEOUT_S))
    publisher.init(SHELF)
    until(GATES.init.empty)

    def refuse(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as ending:
        ending.setattr(threading.Thread, "start", refuse)
        session.close()
    gate.set()
    until(lambda: "wtransfer-engine" not in [each.name for each in threading.enumerate()])


# -- closing and joining


def test_an_address_is_joined_once(publisher, join):
    session = join()
    with pytest.raises(ValueError, match=r"has joined .* already"):
        session.join(publisher.listener.address)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        *(({"deadline_s": each}, "deadline_s") for each in (0, -1.0, float("inf"), float("nan"))),
        ({"rank": 2, "num_ranks": 2}, "rank is 2, expected 0 <= rank < num_ranks"),
        ({"join": "nowhere", "token": "t"}, "nowhere"),
    ],
)
def test_invalid_session_option_is_refused_at_once(options, text):
    with pytest.raises(ValueError, match=text):
        wtransfer.WorkerSession(AnyTarget(), **options)


# -- observers


def test_observers_of_an_abort_do_not_hold_up_the_channel(publisher, join, observe):
    class Slow:
        threads: queue.SimpleQueue[str] = queue.SimpleQueue()

        @wtransfer.hookimpl
        def wtransfer_round_aborted(self):
            self.threads.put(threading.current_thread().name)

    slow = observe(Slow())
    join()
    publisher.init(SHELF)
    publisher.mail.expect(Ready)
    publisher.say(Plan("r", "v1", Manifest(())))
    publisher.mail.expect(Accept)
    publisher.say(Abort("r", "no more"))
    assert slow.threads.get(timeout=TIMEOUT_S) == "wtransfer-observer"


def test_every_round_that_ends_had_begun_for_observers(publisher, join, observe):
    class Blocking:
        told: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        go_on = threading.Event()

        @wtransfer.hookimpl
        def wtransfer_round_started(self, round_id):
            self.told.put(("started", round_id))

        @wtransfer.hookimpl
        def wtransfer_round_aborted(self, round_id):
            self.told.put(("aborted", round_id))
            assert self.go_on.wait(TIMEOUT_S)

    blocking = observe(Blocking())
    join()
    publisher.init(SHELF)
    publisher.mail.expect(Ready)
    publisher.say(Plan("first", "v1", Manifest(())))
    publisher.mail.expect(Accept)
    # Its abort keeps the engine's thread, so the next plan cannot be judged before it is ended.
    publisher.say(Abort("first", "no more"))
    publisher.say(Plan("second", "v2", Manifest(())))
    publisher.say(Abort("second", "no more"))
    publisher.say(Plan("third", "v3", "a manifest that was never sent"))
    assert [blocking.told.get(timeout=TIMEOUT_S) for _ in range(2)] == [
        ("started", "first"),
        ("aborted", "first"),
    ]
    blocking.go_on.set()
    # The second plan is judged before its abort is read, or not at all.
    publisher.mail.expect(Refuse, past=(Accept,))
    assert [blocking.told.get(timeout=TIMEOUT_S) for _ in range(4)] == [
        ("started", "second"),
        ("aborted", "second"),
        ("started", "third"),
        ("aborted", "third"),
    ]


def test_the_publisher_hears_of_a_commit_before_observers_do(publisher, join, observe, until):
    class Waiting:
        outcome = None

        @wtransfer.hookimpl
        def wtransfer_weights_committed(self):
            self.outcome = publisher.mail.expect(Ack).outcome

    waiting = observe(Waiting())
    session = join()
    order_commit(publisher)
    assert session.commit_pending(TIMEOUT_S)
    until(lambda: waiting.outcome)
    assert waiting.outcome == "committed"


def test_an_observer_that_commits_gets_an_error_and_no_deadlock(publisher, join, observe, until):
    refused = []

    class Committing:
        @wtransfer.hookimpl
        def wtransfer_weights_committed(self):
            for call in (session.commit_pending, session.discard_pending):
                with pytest.raises(RoundBusyError, match="between two steps"):
                    call()
                refused.append(call)

    observe(Committing())
    session = join()
    order_commit(publisher)
    assert session.commit_pending(TIMEOUT_S)
    until(lambda: len(refused) == 2)
    assert not session.commit_pending()
