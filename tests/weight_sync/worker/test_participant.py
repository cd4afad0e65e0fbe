"""A worker against a publisher that is played by hand."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback

import pytest

import wtransfer
from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.errors import CommitError, RoundBusyError
from wtransfer.manifest import Manifest
from wtransfer.registry import hooks
from wtransfer.testing.fakes import MemoryEngine
from wtransfer.transport import rendezvous
from wtransfer.transport.channel import Listener
from wtransfer.transport.rendezvous import host_rendezvous
from wtransfer.weight_sync.messages import (
    CODEC,
    Abort,
    Accept,
    Ack,
    Commit,
    Hello,
    Init,
    Plan,
    Prepare,
    Ready,
    Refuse,
    Refused,
    Rollback,
    Vote,
)

TIMEOUT_S = 10


class Gates:
    """What holds up the engine and the target of a test, in the order in which they come by."""

    def __init__(self):
        self.init = queue.SimpleQueue()
        self.apply = None
        self.applying = threading.Event()


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
        gate, GATES.apply = GATES.apply, None
        GATES.applying.set()
        if gate is not None:
            assert gate.wait(TIMEOUT_S)


class PlayedPublisher:
    """A publisher that says what it is told to, and notes what it hears."""

    def __init__(self):
        self.heard = queue.SimpleQueue()
        self.connection = None
        self.listener = Listener(
            CODEC,
            on_open=lambda _connection: None,
            on_message=self._on_message,
            on_close=lambda _connection, _error: None,
        )

    def _on_message(self, connection, message):
        if isinstance(message, Hello):
            self.connection = connection
        self.heard.put(message)

    def send(self, message):
        self.connection.send(message)

    def hear(self, kind):
        """Return the next message, which must be one of that kind."""
        message = self.heard.get(timeout=TIMEOUT_S)
        assert isinstance(message, kind), message
        return message

    def init(self):
        self.send(Init(1, "tests-gated", None, None, 0, 1, {"shelf": "nothing is on it"}))

    def order_commit(self, round_id="r"):
        """Bring a round of no tensors to its commit."""
        self.init()
        self.hear(Ready)
        self.send(Plan(round_id, "v1", Manifest(())))
        self.hear(Accept)
        self.send(Prepare(round_id, []))
        self.hear(Vote)
        self.send(Commit(round_id))


@pytest.fixture(scope="module", autouse=True)
def gated_engine():
    WeightTransferEngineFactory.register_engine("tests-gated", GatedEngine)


@pytest.fixture
def publisher():
    played = PlayedPublisher()
    yield played
    played.listener.close()


@pytest.fixture
def join(publisher):
    sessions = []

    def make(**options):
        token = publisher.listener.token
        session = wtransfer.WorkerSession(
            AnyTarget(), join=publisher.listener.address, token=token, **options
        )
        sessions.append(session)
        publisher.hear(Hello)
        return session

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


def wait_until_pending(session):
    eventually(lambda: session.pending)


# -- a commit that is rolled back


def test_a_commit_that_is_rolled_back_before_it_is_applied_is_dropped(publisher, join):
    session = join(instance="i", rank=0, num_ranks=2)
    publisher.order_commit()
    wait_until_pending(session)
    publisher.send(Rollback("r", "rank 1 never committed"))
    ack = publisher.hear(Ack)
    assert (ack.outcome, ack.version, ack.state) == ("discarded", None, "behind")
    assert session.state == "behind"
    assert not session.commit_pending()


def test_a_commit_that_is_rolled_back_while_it_is_applied_is_undone(publisher, join):
    session = join(instance="i", rank=0, num_ranks=2)
    publisher.order_commit()
    GATES.apply = gate = threading.Event()
    GATES.applying.clear()
    errors = []

    def step():
        try:
            session.commit_pending(TIMEOUT_S)
        except CommitError as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    assert GATES.applying.wait(TIMEOUT_S)
    publisher.send(Rollback("r", "rank 1 was lost"))
    # Answered after the rollback was taken; nothing can be staged before it is done.
    publisher.send(Plan("next", "v2", Manifest(())))
    assert "commit pending since" in publisher.hear(Refuse).error.message
    gate.set()
    thread.join(TIMEOUT_S)
    # Never "discarded": the model was being changed.
    assert [publisher.hear(Ack).outcome for _ in range(2)] == ["committed", "reverted"]
    assert "rank 1 was lost" in str(errors[0])
    assert (session.version, session.state) == (None, "behind")


def test_a_rank_that_is_not_released_in_time_goes_back(publisher, join):
    session = join(instance="i", rank=0, num_ranks=2, deadline_s=0.2)
    publisher.order_commit()
    with pytest.raises(CommitError, match=r"not released within 0\.2 s") as caught:
        session.commit_pending(TIMEOUT_S)
    assert caught.value.restored
    assert [publisher.hear(Ack).outcome for _ in range(2)] == ["committed", "reverted"]
    assert (session.version, session.state) == (None, "behind")


# -- plans and engines


def test_a_target_without_a_schema_takes_whole_updates_only(publisher, join):
    join()
    publisher.init()
    publisher.hear(Ready)
    publisher.send(Plan("r", "v1", Manifest((), coverage="patch", base="whatever")))
    refusal = publisher.hear(Refuse)
    assert (refusal.error.kind, "'patch'" in refusal.error.message) == ("ManifestError", True)


def test_the_answer_to_an_init_goes_to_the_publisher_that_sent_it(publisher, join):
    join()
    failing = threading.Event()

    def fail_late():
        failing.wait(TIMEOUT_S)
        raise ConnectionError("the first publisher is gone")

    GATES.init.put(fail_late)
    publisher.init()
    publisher.connection.close()
    publisher.hear(Hello)
    publisher.init()
    failing.set()
    # Both count their epochs from one: only the second one's answer may arrive.
    assert isinstance(publisher.hear((Ready, Refused)), Ready)


@pytest.mark.usefixtures("libuv")
@pytest.mark.parametrize("end", ["worker leaves", "publisher is lost", "round is aborted"])
def test_group_that_forms_is_called_off_with_its_round(publisher, join, end):
    session, meeting = join(), host_rendezvous("127.0.0.1")
    at = {"master_address": meeting.host, "master_port": meeting.port, "rendezvous": meeting.name}
    publisher.send(Init(1, "gloo", None, None, 0, 1, {**at, "world_size": 2}))
    eventually(lambda: meeting.store.check(["rank1"]))
    assert num_waiting_for_ranks() == 1
    begun = time.monotonic()
    if end == "worker leaves":
        session.close()
    elif end == "publisher is lost":
        publisher.connection.close()
    else:
        publisher.send(Abort("r", "another worker was refused"))
    eventually(lambda: not num_waiting_for_ranks())
    assert time.monotonic() - begun < 1.0
    meeting.close()


def num_waiting_for_ranks():
    """Return the number of engine threads that are within a rendezvous."""
    frames = sys._current_frames()
    engines = [each.ident for each in threading.enumerate() if each.name == "wtransfer-engine"]
    stacks = [traceback.walk_stack(frames[ident]) for ident in engines if ident in frames]
    files = [{frame.f_code.co_filename for frame, _ in stack} for stack in stacks]
    return sum(rendezvous.__file__ in each for each in files)


def eventually(holds):
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_process_that_ends_closes_its_session_though_it_gets_no_more_threads(
    publisher, join, monkeypatch
):
    """As Python refuses them from 3.12 on."""
    session, gate = join(), threading.Event()
    GATES.init.put(lambda: gate.wait(TIMEOUT_S))
    publisher.init()
    eventually(GATES.init.empty)

    def refuse(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as ending:
        ending.setattr(threading.Thread, "start", refuse)
        session.close()
    gate.set()
    eventually(lambda: "wtransfer-engine" not in [each.name for each in threading.enumerate()])


# -- closing and joining


def test_an_address_is_joined_once(publisher, join):
    session = join()
    with pytest.raises(ValueError, match=r"has joined .* already"):
        session.join(publisher.listener.address)


def test_an_address_that_cannot_be_read_starts_nothing():
    with pytest.raises(ValueError, match="nowhere"):
        wtransfer.WorkerSession(AnyTarget(), join="nowhere", token="t" * 64)


@pytest.mark.parametrize("deadline_s", [0, -1.0, float("inf"), float("nan")])
def test_a_deadline_is_a_finite_number_above_zero(deadline_s):
    with pytest.raises(ValueError, match="deadline_s"):
        wtransfer.WorkerSession(AnyTarget(), deadline_s=deadline_s)


# -- observers


def test_observers_of_an_abort_do_not_hold_up_the_channel(publisher, join, observe):
    class Slow:
        threads: queue.SimpleQueue[str] = queue.SimpleQueue()

        @wtransfer.hookimpl
        def wtransfer_round_aborted(self):
            self.threads.put(threading.current_thread().name)

    slow = observe(Slow())
    join()
    publisher.init()
    publisher.hear(Ready)
    publisher.send(Plan("r", "v1", Manifest(())))
    publisher.hear(Accept)
    publisher.send(Abort("r", "no more"))
    assert slow.threads.get(timeout=TIMEOUT_S) == "wtransfer-engine"


def test_the_publisher_hears_of_a_commit_before_observers_do(publisher, join, observe):
    class Waiting:
        outcome = None

        @wtransfer.hookimpl
        def wtransfer_weights_committed(self):
            self.outcome = publisher.hear(Ack).outcome

    waiting = observe(Waiting())
    session = join()
    publisher.order_commit()
    assert session.commit_pending(TIMEOUT_S)
    assert waiting.outcome == "committed"


def test_an_observer_that_commits_gets_an_error_and_no_deadlock(publisher, join, observe):
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
    publisher.order_commit()
    assert session.commit_pending(TIMEOUT_S)
    assert len(refused) == 2
    assert not session.commit_pending()
