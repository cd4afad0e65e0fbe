"""Whatever a peer sends over the channel is refused, or dropped and counted; never obeyed."""

from __future__ import annotations

import queue
import time

import msgspec
import pytest
import torch

from wtransfer.errors import (
    DigestMismatchError,
    EngineError,
    PeerError,
    ProtocolError,
    StallError,
)
from wtransfer.manifest import Manifest, Piece, fingerprint
from wtransfer.testing.contents import contents
from wtransfer.testing.fakes import MemoryEngine, MemoryTrainerEngine
from wtransfer.transport.channel import Dialer, Listener
from wtransfer.transport.digests import digest
from wtransfer.transport.framing import pack_frame
from wtransfer.weight_sync.messages import (
    CODEC,
    Abort,
    Accept,
    Ack,
    Commit,
    Data,
    ErrorInfo,
    Fault,
    Finish,
    Hello,
    Init,
    Plan,
    Prepare,
    Progress,
    Ready,
    Received,
    Refuse,
    Refused,
    Rollback,
    Vote,
)
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.worker.session import WorkerSession

PATIENCE_S = 5.0
WEIGHTS = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}
MANIFEST = Manifest((Piece("a", "float32", (4,)), Piece("b", "float32", (2, 2))))
DIGESTS = [digest(tensor) for tensor in WEIGHTS.values()]
FINGERPRINT = fingerprint(MANIFEST, DIGESTS)


class Mail:
    """What came in, in order."""

    def __init__(self):
        self.connections = queue.Queue()
        self.messages = queue.Queue()
        self.closed = queue.Queue()

    def callbacks(self):
        return {
            "on_open": self.connections.put,
            "on_message": lambda _connection, message: self.messages.put(message),
            "on_close": lambda _connection, error: self.closed.put(error),
        }

    def expect(self, cls):
        """Return the next message that wants an answer, or is one; it must be of this class."""
        while isinstance(message := self.messages.get(timeout=PATIENCE_S), Progress):
            pass
        assert type(message) is cls, message
        return message

    def nothing(self, within_s=0.1):
        with pytest.raises(queue.Empty):
            self.messages.get(timeout=within_s)


@pytest.fixture
def shelf(monkeypatch):
    """Tensors that memory engines deliver."""
    import wtransfer.testing.fakes as module

    monkeypatch.setitem(module._SENT, "rogue", WEIGHTS)
    return {"shelf": "rogue"}


class RoguePublisher:
    """The trainer's end of a channel, saying whatever a test wants."""

    def __init__(self, engine):
        self.mail = Mail()
        self.listener = Listener(CODEC, **self.mail.callbacks())
        self.engine = engine
        self.epoch = 0

    def meet(self, model):
        """Let a worker dial in; return its session."""
        session = WorkerSession(model, join=self.listener.address, token=self.listener.token)
        self.connection = self.mail.connections.get(timeout=PATIENCE_S)
        self.mail.expect(Hello)
        return session

    def say(self, *messages):
        for message in messages:
            self.connection.send(message)

    def init(self, info, engine=None):
        self.epoch += 1
        name = self.engine if engine is None else engine
        self.say(Init(self.epoch, name, None, None, 0, 1, info))

    def say_raw(self, code, fields, entries=0):
        self.connection.send_frame(pack_frame(code, entries, msgspec.msgpack.encode(fields)))


@pytest.fixture
def worker_model():
    return {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}


@pytest.fixture
def rogue(engines, shelf):
    publisher = RoguePublisher(engines["memory"])
    yield publisher
    publisher.listener.close()


@pytest.fixture
def session(rogue, worker_model, shelf):
    """A session whose engine is ready."""
    session = rogue.meet(worker_model)
    rogue.init(shelf)
    rogue.mail.expect(Ready)
    yield session
    session.close()


def deliver(rogue, round_id, version, manifest=MANIFEST):
    """Take a round up to its vote."""
    rogue.say(Plan(round_id, version, manifest))
    rogue.mail.expect(Accept)
    rogue.say(Data(round_id, 0, {"names": ["a", "b"]}))
    rogue.mail.expect(Received)
    rogue.say(Prepare(round_id, DIGESTS))
    return rogue.mail.expect(Vote)


# -- a rogue publisher


def test_a_publisher_that_keeps_to_the_protocol_is_obeyed(rogue, session, worker_model):
    vote = deliver(rogue, "r1", "v1")
    assert (vote.fingerprint, vote.nbytes) == (FINGERPRINT, 32)
    assert contents(worker_model) != contents(WEIGHTS)
    rogue.say(Commit("r1"))
    assert session.commit_pending(PATIENCE_S)
    assert rogue.mail.expect(Ack).outcome == "committed"
    assert contents(worker_model) == contents(WEIGHTS)


# FAULTS 2, 3, 4
@pytest.mark.parametrize(
    ("piece", "error"),
    [
        (["a", "load", [4], "whole"], "ManifestError"),
        (["a", "__class__", [4], "whole"], "ManifestError"),
        (["a", "x" * 2**20, [4], "whole"], "ManifestError"),
        (["a", "float32", [-4], "whole"], "ManifestError"),
        (["a", "float32", [2**62], "whole"], "ManifestError"),
        (["a", "float32", [0, 2**64 - 1], "whole"], "ManifestError"),
        (["b", "float32", [2, 2], "whole"], "ManifestError"),
        (["", "float32", [4], "whole"], "ManifestError"),
        (["a", "float32", [4], "0:2"], "ManifestError"),
        (["a", "float64", [4], "whole"], "SchemaError"),
        (["a", "float32", [2, 2], "whole"], "SchemaError"),
        (["c", "float32", [4], "whole"], "SchemaError"),
    ],
)
def test_a_plan_that_nobody_could_take_is_refused_and_the_next_is_taken(
    rogue, session, piece, error
):
    other = ["b", "float32", [2, 2], "whole"]
    plan = {"round_id": "bad", "version": "v", "manifest": {"pieces": [piece, other]}}
    rogue.say_raw(20, plan, entries=2)
    refusal = rogue.mail.expect(Refuse)
    assert (refusal.round_id, refusal.error.kind) == ("bad", error)
    assert len(refusal.error.message) < 2000
    assert session.state == "fresh"
    deliver(rogue, "r1", "v1")


# FAULTS 4: what no field of the message could hold ends the connection, and the worker redials.
@pytest.mark.parametrize("size", [True, 1.0, "4", None, [4], 2**64 - 1 + 0.5])
def test_a_plan_that_is_none_ends_the_connection_only(rogue, session, shelf, size):
    plan = {
        "round_id": "bad",
        "version": "v",
        "manifest": {"pieces": [["a", "float32", [size], "whole"]]},
    }
    rogue.say_raw(20, plan, entries=1)
    assert isinstance(rogue.mail.closed.get(timeout=PATIENCE_S), PeerError)
    rogue.connection = rogue.mail.connections.get(timeout=PATIENCE_S)
    assert rogue.mail.expect(Hello).state == "fresh"
    rogue.init(shelf)
    rogue.mail.expect(Ready)
    deliver(rogue, "r1", "v1")
    assert session.state == "fresh"


# FAULTS 10
def test_late_and_replayed_messages_are_dropped_and_counted(rogue, session, worker_model):
    deliver(rogue, "r7", "v7")
    rogue.say(Commit("r7"))
    assert session.commit_pending(PATIENCE_S)
    rogue.mail.expect(Ack)
    held = contents(worker_model)
    rogue.say(Plan("r8", "v8", MANIFEST))
    rogue.mail.expect(Accept)
    stale = [Data("r7", 1, {"names": ["a"]}), Prepare("r7", DIGESTS), Commit("r7")]
    rogue.say(*stale, Data("r8", 1, {"names": ["a"]}), Data("r8", 0, {"names": ["a", "b"]}))
    assert rogue.mail.expect(Received).seq == 0
    rogue.say(Data("r8", 0, {"names": ["a", "b"]}), Commit("r8"))
    rogue.mail.nothing()
    assert session.num_dropped == len(stale) + 3
    assert session.state == "serving"
    assert contents(worker_model) == held


# FAULTS 10
def test_a_seal_that_comes_twice_is_answered_once(rogue, session):
    deliver(rogue, "r1", "v1")
    rogue.say(Prepare("r1", DIGESTS), Prepare("r1", ["0" * 32] * 2))
    rogue.mail.nothing()
    rogue.say(Commit("r1"), Commit("r1"))
    assert session.commit_pending(PATIENCE_S)
    assert rogue.mail.expect(Ack).outcome == "committed"
    assert not session.commit_pending(0.1)


@pytest.mark.parametrize(
    "message", [Commit("r1"), Finish("r1"), Rollback("r1", ""), Abort("r1", "")]
)
def test_orders_without_a_round_change_nothing(rogue, session, worker_model, message):
    before = contents(worker_model)
    rogue.say(message)
    rogue.mail.nothing()
    assert not session.commit_pending(0.05)
    assert (session.state, contents(worker_model)) == ("fresh", before)


def test_a_commit_before_the_vote_is_dropped(rogue, session, worker_model):
    before = contents(worker_model)
    rogue.say(Plan("r1", "v1", MANIFEST))
    rogue.mail.expect(Accept)
    rogue.say(Data("r1", 0, {"names": ["a"]}), Commit("r1"))
    rogue.mail.expect(Received)
    assert not session.commit_pending(0.1)
    assert contents(worker_model) == before


@pytest.mark.parametrize(
    "digests", [[], DIGESTS[:1], [*DIGESTS, DIGESTS[0]], ["", ""], DIGESTS[::-1]]
)
def test_a_seal_that_does_not_prove_the_bytes_is_a_fault(rogue, session, digests):
    rogue.say(Plan("r1", "v1", MANIFEST))
    rogue.mail.expect(Accept)
    rogue.say(Data("r1", 0, {"names": ["a", "b"]}))
    rogue.mail.expect(Received)
    rogue.say(Prepare("r1", digests))
    assert rogue.mail.expect(Fault).error.kind in ("ManifestError", "DigestMismatchError")
    rogue.say(Commit("r1"))
    assert not session.commit_pending(0.1)


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        ({"names": ["c"]}, "EngineError"),
        ({"names": [["a"]]}, "EngineError"),
        ({"nimes": ["a"]}, "EngineError"),
        ({}, "IncompleteUpdateError"),
        ({"names": ["a", "a"]}, "ManifestError"),
    ],
)
def test_update_infos_that_mislead_the_engine_are_a_fault(rogue, session, info, kind):
    rogue.say(Plan("r1", "v1", MANIFEST))
    rogue.mail.expect(Accept)
    rogue.say(Data("r1", 0, info))
    if kind == "IncompleteUpdateError":
        rogue.mail.expect(Received)
        rogue.say(Prepare("r1", DIGESTS))
    assert rogue.mail.expect(Fault).error.kind == kind
    deliver(rogue, "r2", "v2")


# Promise 5: a peer's name selects among what is discovered here; it is never a path.
@pytest.mark.parametrize(
    "engine",
    ["os:system", "../shm", "wtransfer.engines.shm:ShmWeightTransferEngine", "", "x" * 10_000],
)
def test_an_engine_name_is_never_a_path(rogue, worker_model, shelf, engine):
    session = rogue.meet(worker_model)
    rogue.init(shelf, engine=engine)
    refused = rogue.mail.expect(Refused)
    assert refused.error.kind in ("UnknownBackendError", "PluginNotInstalledError")
    rogue.say(Plan("r1", "v1", MANIFEST))
    assert rogue.mail.expect(Refuse).error.kind == "NotInitializedError"
    session.close()


def test_a_plan_before_any_engine_is_refused(rogue, worker_model):
    session = rogue.meet(worker_model)
    rogue.say(Plan("r1", "v1", MANIFEST))
    assert rogue.mail.expect(Refuse).error.kind == "NotInitializedError"
    session.close()


# -- manifests that are named


OTHER = Manifest((Piece("a", "float32", (4,)), Piece("b", "float32", (4,))))


def test_a_manifest_that_came_before_need_only_be_named(rogue, session, worker_model):
    rogue.say(Plan("r0", "v0", MANIFEST))
    rogue.mail.expect(Accept)
    for number in range(1, 3):
        vote = deliver(rogue, f"r{number}", f"v{number}", MANIFEST.identity())
        assert vote.fingerprint == FINGERPRINT
        rogue.say(Commit(f"r{number}"))
        assert session.commit_pending(PATIENCE_S)
        assert rogue.mail.expect(Ack).version == f"v{number}"
        assert contents(worker_model) == contents(WEIGHTS)


@pytest.mark.parametrize("name", ["", "0" * 32, OTHER.identity(), "x" * 2**19])
def test_a_manifest_that_is_not_here_is_refused_by_its_name(rogue, session, name):
    deliver(rogue, "r0", "v0")
    rogue.say(Plan("r1", "v1", name))
    refusal = rogue.mail.expect(Refuse)
    assert (refusal.round_id, refusal.error.kind) == ("r1", "ProtocolError")
    assert MANIFEST.identity() in refusal.error.message
    assert len(refusal.error.message) < 2000
    assert session.state == "fresh"
    deliver(rogue, "r2", "v2", MANIFEST.identity())


def test_no_manifest_can_be_named_before_one_has_come(rogue, session):
    rogue.say(Plan("r1", "v1", MANIFEST.identity()))
    assert rogue.mail.expect(Refuse).error.kind == "ProtocolError"
    assert session.state == "fresh"
    deliver(rogue, "r2", "v2")


def test_only_the_manifest_that_came_last_can_be_named(rogue, session):
    deliver(rogue, "r0", "v0")
    rogue.say(Plan("r1", "v1", OTHER))
    assert rogue.mail.expect(Refuse).error.kind == "SchemaError"
    rogue.say(Plan("r2", "v2", MANIFEST.identity()))
    assert rogue.mail.expect(Refuse).error.kind == "ProtocolError"
    rogue.say(Plan("r3", "v3", OTHER.identity()))
    assert rogue.mail.expect(Refuse).error.kind == "SchemaError"
    assert session.state == "fresh"


def test_what_was_refused_is_not_taken_for_its_name(rogue, session):
    bad = Manifest((Piece("a", "load", (4,)), Piece("b", "float32", (2, 2))))
    deliver(rogue, "r0", "v0")
    for number, manifest in enumerate((bad, bad.identity(), MANIFEST.identity()), 1):
        rogue.say(Plan(f"r{number}", "v", manifest))
        refusal = rogue.mail.expect(Refuse)
        assert (refusal.round_id, refusal.error.kind) == (f"r{number}", "ManifestError")
    assert session.state == "fresh"


def test_a_new_connection_knows_no_manifest(rogue, session, shelf):
    deliver(rogue, "r0", "v0")
    rogue.connection.close()
    rogue.connection = rogue.mail.connections.get(timeout=PATIENCE_S)
    rogue.mail.expect(Hello)
    rogue.init(shelf)
    rogue.mail.expect(Ready)
    rogue.say(Plan("r1", "v1", MANIFEST.identity()))
    assert rogue.mail.expect(Refuse).error.kind == "ProtocolError"
    assert session.state == "fresh"
    deliver(rogue, "r2", "v2")


def test_what_is_named_is_held_against_the_model_of_the_moment(rogue, session, worker_model):
    deliver(rogue, "r0", "v0")
    rogue.mail.nothing()
    worker_model["a"] = torch.zeros(5)
    rogue.say(Plan("r1", "v1", MANIFEST.identity()))
    assert rogue.mail.expect(Refuse).error.kind == "SchemaError"
    assert session.state == "fresh"


@pytest.mark.parametrize(
    "message", [Ready(1), Accept("r", []), Hello("w", "i", 0, 1, None, "", "")]
)
def test_a_publisher_that_speaks_like_a_worker_is_left(rogue, session, message):
    rogue.say(message)
    assert isinstance(rogue.mail.closed.get(timeout=PATIENCE_S), PeerError)
    rogue.mail.connections.get(timeout=PATIENCE_S)
    assert rogue.mail.expect(Hello).state == "fresh"


# -- a rogue worker


class RogueWorker:
    """The worker's end of a channel."""

    def __init__(self, publisher, **hello):
        self.mail = Mail()
        self.dialer = Dialer(
            CODEC,
            address=publisher.address,
            token=publisher.token,
            redial=False,
            **self.mail.callbacks(),
        )
        self.mail.connections.get(timeout=PATIENCE_S)
        facts = {"worker": "rogue", "instance": "rogue", "rank": 0, "num_ranks": 1}
        self.hello = Hello(
            **{**facts, "version": None, "fingerprint": "local:0", "state": "fresh", **hello}
        )

    def say(self, *messages):
        for message in messages:
            self.dialer.send(message)


@pytest.fixture
def publisher(engines):
    with Publisher(WEIGHTS, engine=engines["memory"], deadline_s=1.0) as publisher:
        yield publisher


@pytest.fixture
def rogue_worker(publisher):
    workers = []

    def make(**hello):
        workers.append(RogueWorker(publisher, **hello))
        return workers[-1]

    yield make
    for worker in workers:
        worker.dialer.close()


@pytest.fixture
def joined(publisher, rogue_worker):
    worker = rogue_worker()
    worker.say(worker.hello)
    publisher.wait_for_workers(1, PATIENCE_S)
    return worker


def through(worker, held=FINGERPRINT):
    """Answer like a worker up to the vote; return the round's id."""
    worker.say(Ready(worker.mail.expect(Init).epoch))
    round_id = worker.mail.expect(Plan).round_id
    worker.say(Accept(round_id, []))
    worker.mail.expect(Data)
    worker.say(Received(round_id, 0))
    worker.mail.expect(Prepare)
    worker.say(Vote(round_id, held, 32, {}))
    return round_id


# Promise 2: nobody is believed on his word.
def test_a_vote_about_other_bytes_ends_the_round(publisher, joined):
    round_ = publisher.publish("v1", wait=False)
    through(joined, fingerprint(MANIFEST, DIGESTS[::-1]))
    with pytest.raises(DigestMismatchError, match="the vote of rogue is about other bytes"):
        round_.result(PATIENCE_S)


def test_a_ack_for_other_weights_is_no_success(publisher, joined):
    round_ = publisher.publish("v1", wait=False)
    round_id = through(joined)
    joined.mail.expect(Commit)
    joined.say(Ack(round_id, "committed", "v1", "f" * 32, "serving", {}))
    report = round_.result(PATIENCE_S)
    assert not report.ok
    assert report.workers[0].fingerprint == "f" * 32


def play(publisher, worker, version, *, first=False, manifest=MANIFEST):
    """Play a whole round as a worker; return its plan."""
    round_ = publisher.publish(version, wait=False)
    if first:
        worker.say(Ready(worker.mail.expect(Init).epoch))
    plan = worker.mail.expect(Plan)
    worker.say(Accept(plan.round_id, []))
    worker.mail.expect(Data)
    worker.say(Received(plan.round_id, 0))
    held = fingerprint(manifest, worker.mail.expect(Prepare).digests)
    worker.say(Vote(plan.round_id, held, 32, {}))
    worker.mail.expect(Commit)
    worker.say(Ack(plan.round_id, "committed", version, held, "serving", {}))
    assert round_.result(PATIENCE_S).ok
    worker.mail.expect(Finish)
    return plan


@pytest.fixture
def source():
    return {name: tensor.clone() for name, tensor in WEIGHTS.items()}


@pytest.fixture
def joined_to(engines, source):
    """A publisher of weights that may change, and a worker that is played."""
    with Publisher(source, engine=engines["memory"], deadline_s=1.0) as publisher:
        worker = RogueWorker(publisher)
        worker.say(worker.hello)
        publisher.wait_for_workers(1, PATIENCE_S)
        yield publisher, worker
        worker.dialer.close()


def test_a_manifest_is_sent_whole_when_it_is_new_and_named_afterwards(joined_to, source):
    publisher, worker = joined_to
    assert play(publisher, worker, "v1", first=True).manifest == MANIFEST
    assert play(publisher, worker, "v2").manifest == MANIFEST.identity()
    source["b"] = torch.ones(4)
    assert play(publisher, worker, "v3", manifest=OTHER).manifest == OTHER
    assert play(publisher, worker, "v4", manifest=OTHER).manifest == OTHER.identity()
    # In place, behind the mapping's back.
    source["b"].data = torch.ones(2, 2)
    assert play(publisher, worker, "v5").manifest == MANIFEST


def test_who_refuses_a_manifest_is_sent_it_whole(joined_to):
    publisher, worker = joined_to
    play(publisher, worker, "v1", first=True)
    round_ = publisher.publish("v2", wait=False)
    plan = worker.mail.expect(Plan)
    assert plan.manifest == MANIFEST.identity()
    worker.say(Refuse(plan.round_id, ErrorInfo("ProtocolError", "I do not know that one")))
    with pytest.raises(ProtocolError, match="I do not know that one"):
        round_.result(PATIENCE_S)
    worker.mail.expect(Abort)
    assert play(publisher, worker, "v3").manifest == MANIFEST


def test_a_worker_that_comes_again_is_sent_the_manifest_whole(joined_to):
    publisher, worker = joined_to
    play(publisher, worker, "v1", first=True)
    worker.dialer.close()
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: not publisher.workers(), PATIENCE_S)
    # It has what was committed last, so it is not served between two rounds.
    again = RogueWorker(publisher, version="v1", fingerprint=publisher.fingerprint, state="serving")
    again.say(again.hello)
    publisher.wait_for_workers(1, PATIENCE_S)
    assert play(publisher, again, "v2", first=True).manifest == MANIFEST
    again.dialer.close()


# FAULTS 10
def test_answers_to_other_rounds_are_dropped_and_counted(publisher, joined):
    round_ = publisher.publish("v1", wait=False)
    stale = [
        Accept("r0", []),
        Received("r0", 0),
        Vote("r0", FINGERPRINT, 32, {}),
        Ready(99),
        Refuse("r0", ErrorInfo("SchemaError", "of another round")),
    ]
    joined.say(*stale)
    round_id = through(joined)
    joined.mail.expect(Commit)
    joined.say(Ack(round_id, "committed", "v1", round_.proven.fingerprint, "serving", {}))
    assert round_.result(PATIENCE_S).ok
    assert publisher.num_dropped == len(stale)


@pytest.mark.parametrize(
    "hello",
    [{"rank": 1}, {"rank": -1, "num_ranks": 1}, {"num_ranks": 0}, {"rank": 5, "num_ranks": 2}],
)
def test_a_place_that_does_not_exist_is_refused(publisher, rogue_worker, hello):
    worker = rogue_worker(**hello)
    worker.say(worker.hello)
    assert isinstance(worker.mail.closed.get(timeout=PATIENCE_S), PeerError)
    assert publisher.workers() == []


def test_a_place_that_is_taken_is_refused(publisher, joined, rogue_worker):
    second = rogue_worker()
    second.say(second.hello)
    assert isinstance(second.mail.closed.get(timeout=PATIENCE_S), PeerError)
    assert len(publisher.workers()) == 1


@pytest.mark.parametrize("message", [Ready(1), Accept("r", []), Commit("r"), Abort("r", "")])
def test_who_has_not_said_hello_is_not_heard(publisher, rogue_worker, message):
    worker = rogue_worker()
    worker.say(message)
    assert isinstance(worker.mail.closed.get(timeout=PATIENCE_S), PeerError)
    assert publisher.workers() == []


@pytest.mark.parametrize("message", [Commit("r"), Abort("r", ""), Plan("r", "v", MANIFEST)])
def test_a_worker_that_speaks_like_a_publisher_is_not_obeyed(publisher, joined, message):
    joined.say(message)
    round_ = publisher.publish("v1", wait=False)
    round_id = through(joined)
    joined.mail.expect(Commit)
    joined.say(Ack(round_id, "committed", "v1", round_.proven.fingerprint, "serving", {}))
    assert round_.result(PATIENCE_S).ok
    assert publisher.num_dropped == 1


def test_a_ack_before_the_commit_is_not_believed(publisher, joined):
    round_ = publisher.publish("v1", wait=False)
    joined.say(Ready(joined.mail.expect(Init).epoch))
    round_id = joined.mail.expect(Plan).round_id
    joined.say(Ack(round_id, "committed", "v1", "f" * 32, "serving", {}))
    with pytest.raises(PeerError, match="rogue gives an ack before the commit"):
        round_.result(PATIENCE_S)


def test_a_second_vote_does_not_replace_the_first(publisher, joined):
    round_ = publisher.publish("v1", wait=False)
    joined.say(Ready(joined.mail.expect(Init).epoch))
    round_id = joined.mail.expect(Plan).round_id
    vote = Vote(round_id, FINGERPRINT, 32, {})
    joined.say(vote, vote)
    with pytest.raises(PeerError, match="rogue gives a second vote"):
        round_.result(PATIENCE_S)


def test_a_second_hello_ends_the_connection(publisher, joined):
    joined.say(Hello("other", "elsewhere", 0, 1, None, "local:0", "fresh"))
    assert isinstance(joined.mail.closed.get(timeout=PATIENCE_S), PeerError)
    assert publisher.workers() == []


def test_lost_worker_is_named_by_the_url_that_it_was_invited_by(publisher, rogue_worker):
    worker = rogue_worker(host="http://host:8000")
    worker.say(worker.hello)
    publisher.wait_for_workers(1, PATIENCE_S)
    round_ = publisher.publish("v1", wait=False)
    worker.mail.expect(Init)
    worker.dialer.close()
    with pytest.raises(PeerError, match=r"^http://host:8000: .* is gone"):
        round_.result(PATIENCE_S)


def test_commit_that_comes_after_the_report_is_finished(publisher, joined):
    round_ = publisher.publish("v1", wait=False)
    round_id = through(joined)
    joined.mail.expect(Commit)
    assert [each.outcome for each in round_.result(PATIENCE_S).workers] == ["pending"]
    joined.say(Ack(round_id, "committed", "v1", round_.proven.fingerprint, "serving", {}))
    assert joined.mail.expect(Finish).round_id == round_id


# FAULTS 14: what does not bring the round on is no sign of life.
def test_a_worker_cannot_talk_a_deadline_away(publisher, joined):
    round_ = publisher.publish("v1", wait=False)
    joined.say(Ready(joined.mail.expect(Init).epoch))
    round_id = joined.mail.expect(Plan).round_id
    joined.say(Accept(round_id, []))
    begun = time.monotonic()
    while not round_.done and time.monotonic() - begun < PATIENCE_S:
        joined.say(Progress(round_id, 0), Accept(round_id, []), Received(round_id, -1))
        time.sleep(0.05)
    # While it was still talking.
    assert round_.done
    with pytest.raises(StallError, match="rogue made no progress"):
        round_.result(PATIENCE_S)


@pytest.mark.parametrize("cls", [Commit, Finish])
def test_a_worker_that_gives_orders_in_its_round_is_dropped_from_it(publisher, joined, cls):
    round_ = publisher.publish("v1", wait=False)
    joined.say(Ready(joined.mail.expect(Init).epoch))
    joined.say(cls(joined.mail.expect(Plan).round_id))
    with pytest.raises(PeerError, match=f"a worker does not send {cls.__name__}"):
        round_.result(PATIENCE_S)
    assert publisher.workers() == []


def test_the_engine_of_these_tests_takes_from_a_shelf(shelf):
    assert MemoryEngine.init_info_cls(**shelf).shelf == "rogue"


class SlowTrainer(MemoryTrainerEngine):
    """Takes its time before it asks the workers, so that a round looks at them before that."""

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        time.sleep(0.1)
        return super().trainer_init(init_info, client=client, source=source)


@pytest.fixture
def slow_publisher(engines):
    with Publisher(
        WEIGHTS, engine=engines["memory"], trainer=SlowTrainer, deadline_s=2.0
    ) as publisher:
        yield publisher


def test_a_late_refusal_of_an_earlier_attempt_does_not_end_the_next_round(slow_publisher):
    publisher = slow_publisher
    workers = [RogueWorker(publisher, worker=name, instance=name) for name in ("first", "second")]
    for worker in workers:
        worker.say(worker.hello)
    publisher.wait_for_workers(2, PATIENCE_S)
    round_ = publisher.publish("v1", wait=False)
    first, second = (worker.mail.expect(Init) for worker in workers)
    workers[0].say(Refused(first.epoch, ErrorInfo("EngineError", "no engine here")))
    with pytest.raises(EngineError, match="no engine here"):
        round_.result(PATIENCE_S)
    workers[1].say(Refused(second.epoch, ErrorInfo("EngineError", "nor here")))
    eventually_refused(publisher, "second")
    round_ = publisher.publish("v2", wait=False)
    # Once more, while the engine of the next attempt is made.
    workers[1].say(Refused(second.epoch, ErrorInfo("EngineError", "nor here")))
    for worker in workers:
        worker.mail.expect(Abort)
        assert worker.mail.expect(Init).epoch > first.epoch
    round_.abort("seen enough")
    for worker in workers:
        worker.dialer.close()


def eventually_refused(publisher, name):
    (worker,) = [each for each in publisher._membership.workers() if each.name == name]
    end = time.monotonic() + PATIENCE_S
    while worker.refusal is None:
        assert time.monotonic() < end
        time.sleep(0.01)
