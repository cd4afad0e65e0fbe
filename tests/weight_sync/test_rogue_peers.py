"""Whatever a peer sends over the channel is refused, or dropped and counted; never obeyed."""

from __future__ import annotations

import contextlib
import itertools
import time

import pytest
import torch

from wtransfer.errors import (
    CommitError,
    DigestMismatchError,
    EngineError,
    PeerError,
    PeerLostError,
    StallError,
)
from wtransfer.manifest import KeptPiece, Manifest, Piece, fingerprint
from wtransfer.testing.contents import contents
from wtransfer.testing.fakes import MemoryTrainerEngine
from wtransfer.transport.channel import Dialer
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.messages import (
    CODEC,
    MAX_OBSERVED_NBYTES,
    Abort,
    Accept,
    Ack,
    Commit,
    Compare,
    Data,
    ErrorInfo,
    Fault,
    Finish,
    FleetStatus,
    Hello,
    Init,
    Lost,
    Observe,
    Plan,
    Prepare,
    Progress,
    Ready,
    Received,
    Refuse,
    Refused,
    Vote,
)
from wtransfer.weight_sync.observer import observe
from wtransfer.weight_sync.trainer.membership import MAX_LOST
from wtransfer.weight_sync.trainer.publisher import Publisher

PATIENCE_S = 5.0
WEIGHTS = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}
MANIFEST = Manifest((Piece("a", "float32", (4,)), Piece("b", "float32", (2, 2))))
DIGESTS = [digest(tensor) for tensor in WEIGHTS.values()]
FINGERPRINT = fingerprint(MANIFEST, DIGESTS)


@pytest.fixture
def shelf(monkeypatch):
    """Tensors that memory engines deliver."""
    import wtransfer.testing.fakes as module

    monkeypatch.setitem(module._SENT, "rogue", WEIGHTS)
    return {"shelf": "rogue"}


@pytest.fixture
def worker_model():
    return {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}


@pytest.fixture
def rogue(engines, shelf, play_publisher):
    return play_publisher(engines["memory"])


@pytest.fixture
def session(rogue, worker_model, shelf):
    """A session whose engine is ready."""
    session = rogue.meet(worker_model)
    rogue.init(shelf)
    rogue.mail.expect(Ready)
    yield session
    session.close()


def deliver(rogue, round_id, version, manifest=MANIFEST, sent=FINGERPRINT):
    """Take a round up to its vote, having announced `sent` as the set's fingerprint."""
    rogue.say(Plan(round_id, version, manifest))
    rogue.mail.expect(Accept)
    rogue.say(Data(round_id, 0, {"names": ["a", "b"]}))
    rogue.mail.expect(Received)
    rogue.say(Prepare(round_id, sent))
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
def test_a_plan_that_is_invalid_or_does_not_fit_is_refused_and_the_next_is_taken(
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


# FAULTS 10
def test_late_and_replayed_messages_are_dropped_and_counted(rogue, session, worker_model):
    deliver(rogue, "r7", "v7")
    rogue.say(Commit("r7"))
    assert session.commit_pending(PATIENCE_S)
    rogue.mail.expect(Ack)
    held = contents(worker_model)
    rogue.say(Plan("r8", "v8", MANIFEST))
    rogue.mail.expect(Accept)
    stale = [
        Data("r7", 1, {"names": ["a"]}),
        Prepare("r7", FINGERPRINT),
        Compare("r7", DIGESTS),
        Commit("r7"),
    ]
    rogue.say(*stale, Data("r8", 1, {"names": ["a"]}), Data("r8", 0, {"names": ["a", "b"]}))
    assert rogue.mail.expect(Received).seq == 0
    rogue.say(Data("r8", 0, {"names": ["a", "b"]}), Commit("r8"))
    rogue.mail.nothing()
    assert session.status().num_dropped == len(stale) + 3
    assert session.state == "serving"
    assert contents(worker_model) == held


# FAULTS 10
def test_digests_are_compared_once_and_only_by_a_worker_that_has_asked_for_them(
    rogue, session, worker_model
):
    asked_for = Compare("r1", [DIGESTS[0], DIGESTS[0]])
    rogue.say(Plan("r1", "v1", MANIFEST), asked_for, Data("r1", 0, {"names": ["a", "b"]}))
    rogue.mail.expect(Accept)
    rogue.mail.expect(Received)
    rogue.say(asked_for, Prepare("r1", FINGERPRINT))
    assert rogue.mail.expect(Vote).fingerprint == FINGERPRINT
    # It holds what was sent.
    rogue.say(asked_for, Commit("r1"))
    assert session.commit_pending(PATIENCE_S)
    rogue.mail.expect(Ack)
    assert session.status().num_dropped == 3
    held = contents(worker_model)

    assert deliver(rogue, "r2", "v2", sent="another set").fingerprint == FINGERPRINT
    # Nothing that a publisher orders can make it commit that, and another round's is not its own.
    rogue.say(Commit("r2"), Prepare("r2", FINGERPRINT), Compare("r1", DIGESTS), Commit("r2"))
    rogue.say(Compare("r2", [DIGESTS[0], DIGESTS[0]]), Compare("r2", DIGESTS))
    fault = rogue.mail.expect(Fault)
    assert (fault.round_id, fault.error.kind) == ("r2", "DigestMismatchError")
    assert fault.error.facts["pieces"] == ["b"]
    rogue.mail.nothing()
    assert session.status().num_dropped == 3 + 5
    assert (session.state, session.version, contents(worker_model)) == ("serving", "v1", held)
    deliver(rogue, "r3", "v3")


@pytest.mark.parametrize(
    ("digests", "kind"),
    [(DIGESTS, "ProtocolError"), (DIGESTS[:1], "ManifestError"), ([], "ManifestError")],
)
def test_digests_that_prove_nothing_are_a_fault(rogue, session, digests, kind):
    deliver(rogue, "r1", "v1", sent="")
    rogue.say(Compare("r1", digests))
    assert rogue.mail.expect(Fault).error.kind == kind
    assert session.state == "fresh"
    deliver(rogue, "r2", "v2")


# FAULTS 13
@pytest.mark.parametrize("end", ["abort", "lost", "superseded"])
def test_worker_that_has_asked_for_digests_does_not_wait_for_them(
    rogue, session, shelf, until, end
):
    deliver(rogue, "r1", "v1", sent="another set")
    assert session.status().staging == "r1"
    if end == "lost":
        rogue.connection.close()
        reconnect(rogue, shelf)
    elif end == "abort":
        rogue.say(Abort("r1", "another worker has failed"))
    if end != "superseded":
        until(lambda: session.status().staging is None)
    rogue.say(*([Compare("r1", DIGESTS)] if end != "superseded" else []))
    assert deliver(rogue, "r2", "v2").fingerprint == FINGERPRINT
    assert session.status().num_dropped == (end != "superseded")
    rogue.say(Commit("r2"))
    assert session.commit_pending(PATIENCE_S)


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
        rogue.say(Prepare("r1", FINGERPRINT))
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


OTHER = Manifest((Piece("a", "float32", (4,)), Piece("b", "float32", (4,))))
BAD = Manifest((Piece("a", "load", (4,)), Piece("b", "float32", (2, 2))))


def reconnect(rogue, shelf):
    """Wait until the worker has dialed again, and give it an engine."""
    assert rogue.accept().state == "fresh"
    rogue.init(shelf)
    rogue.mail.expect(Ready)


# FAULTS 2
@pytest.mark.parametrize(
    ("num_sent", "kept", "error"),
    [
        (2, KeptPiece(Piece("b", "float32", (2, 2)), "0" * 32), "ManifestError"),
        (1, KeptPiece(Piece("b", "float32", (2, 2)), "zero"), "ManifestError"),
        (1, KeptPiece(Piece("b", "load", (2, 2)), "0" * 32), "ManifestError"),
        (1, KeptPiece(Piece("b", "float32", (2, 2), "0:2"), "0" * 32), "ManifestError"),
        (1, KeptPiece(Piece("b", "float32", (2, 2)), "0" * 32), "DigestMismatchError"),
        (1, KeptPiece(Piece("b", "float32", (5,)), "0" * 32), "SchemaError"),
        (2, KeptPiece(Piece("c", "float32", (4,)), "0" * 32), "SchemaError"),
    ],
)
def test_a_plan_of_kept_pieces_that_the_worker_lacks_is_refused(
    rogue, session, num_sent, kept, error
):
    rogue.say(Plan("r1", "v1", Manifest(MANIFEST.pieces[:num_sent], kept=(kept,))))
    assert rogue.mail.expect(Refuse).error.kind == error
    assert deliver(rogue, "r2", "v2").fingerprint == FINGERPRINT


def test_only_the_last_manifest_of_a_connection_can_be_named(rogue, session, worker_model, shelf):
    numbers = itertools.count()

    def plan(manifest, error):
        round_id = f"r{next(numbers)}"
        if error is None:
            assert deliver(rogue, round_id, "v", manifest).fingerprint == FINGERPRINT
            return
        rogue.say(Plan(round_id, "v", manifest))
        refusal = rogue.mail.expect(Refuse)
        assert (refusal.round_id, refusal.error.kind) == (round_id, error)
        assert len(refusal.error.message) < 2000
        assert session.state == "fresh"

    for manifest, error in [
        (MANIFEST.identity(), "ProtocolError"),
        (MANIFEST, None),
        (MANIFEST.identity(), None),
        *((name, "ProtocolError") for name in ("", "0" * 32, OTHER.identity(), "x" * 2**19)),
        (OTHER, "SchemaError"),
        (MANIFEST.identity(), "ProtocolError"),
        (OTHER.identity(), "SchemaError"),
        # What is no manifest is not taken for the name of the one before.
        *((each, "ManifestError") for each in (BAD, BAD.identity(), MANIFEST.identity())),
        (MANIFEST, None),
    ]:
        plan(manifest, error)
    rogue.connection.close()
    reconnect(rogue, shelf)
    plan(MANIFEST.identity(), "ProtocolError")
    plan(MANIFEST, None)
    # It is compared with the model of the moment.
    worker_model["a"] = torch.zeros(5)
    plan(MANIFEST.identity(), "SchemaError")


def raw_plan(size):
    pieces = [["a", "float32", [size], "whole"]]
    return {"round_id": "bad", "version": "v", "manifest": {"pieces": pieces}}


# FAULTS 4: what no field of the message could hold ends the connection, and the worker redials.
@pytest.mark.parametrize(
    "message",
    [
        *(raw_plan(size) for size in (True, 1.0, "4", None, [4], 2**64 - 1 + 0.5)),
        Ready(1),
        Accept("r", []),
        Hello("w", "i", 0, 1, None, "", ""),
    ],
    ids=str,
)
def test_message_that_no_publisher_sends_ends_the_connection_only(rogue, session, shelf, message):
    if isinstance(message, dict):
        rogue.say_raw(20, message, entries=1)
    else:
        rogue.say(message)
    assert isinstance(rogue.mail.closed.get(timeout=PATIENCE_S), PeerError)
    reconnect(rogue, shelf)
    deliver(rogue, "r1", "v1")
    assert session.state == "fresh"


# -- a rogue worker


class RogueWorker:
    """The worker's end of a channel."""

    def __init__(self, publisher, mail, **hello):
        self.mail = mail
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
    with Publisher(WEIGHTS, engine=engines["memory"], deadline_s=20.0) as publisher:
        yield publisher


@pytest.fixture
def rogue_worker(publisher, mail):
    workers = []

    def make(**hello):
        workers.append(RogueWorker(publisher, mail(), **hello))
        return workers[-1]

    yield make
    for worker in workers:
        worker.dialer.close()


@pytest.fixture
def rogue_worker_of(mail):
    """Makes workers that have joined a publisher."""
    workers = []

    def make(publisher, name="rogue"):
        others = len(publisher.workers())
        workers.append(RogueWorker(publisher, mail(), worker=name, instance=name))
        workers[-1].say(workers[-1].hello)
        publisher.wait_for_workers(others + 1, PATIENCE_S)
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


def through(worker, held=FINGERPRINT, *, first=True, others=()):
    """Answer like a worker up to the vote, as others do that do not vote; return the plan."""
    if first:
        worker.say(Ready(worker.mail.expect(Init).epoch))
    plans = [each.mail.expect(Plan) for each in (*others, worker)]
    round_id = plans[-1].round_id
    for each in (*others, worker):
        each.say(Accept(round_id, []))
    for each in (*others, worker):
        each.mail.expect(Data)
        each.say(Received(round_id, 0))
    for each in (*others, worker):
        each.mail.expect(Prepare)
    worker.say(Vote(round_id, held, 32, {}))
    return plans[-1]


# Promise 2: a vote is proof, and not a claim.
@pytest.mark.parametrize("policy", ["abort", "drop"])
@pytest.mark.parametrize("then", ["is silent", "is lost", "names them", "votes again"])
def test_a_vote_about_other_bytes_ends_the_round(engines, rogue_worker_of, then, policy):
    options = {"deadline_s": 1.0 if then == "is silent" else 20.0, "on_lost_worker": policy}
    with Publisher(WEIGHTS, engine=engines["memory"], **options) as publisher:
        worker = rogue_worker_of(publisher)
        round_ = publisher.publish("v1", wait=False)
        round_id = through(worker, fingerprint(MANIFEST, DIGESTS[::-1])).round_id
        assert worker.mail.expect(Compare) == Compare(round_id, DIGESTS)
        text = "the vote of rogue is about other bytes"
        if then == "is lost":
            worker.dialer.close()
        elif then == "names them":
            text = "it is b"
            worker.say(Fault(round_id, ErrorInfo("DigestMismatchError", text)))
        elif then == "votes again":
            # The connection ends, and the first vote stands.
            worker.say(Vote(round_id, FINGERPRINT, 32, {}))
        with pytest.raises(DigestMismatchError, match=text) as caught:
            round_.result(PATIENCE_S)
        assert (caught.value.worker, caught.value.round_id) == ("rogue", round_id)


def test_a_ack_for_other_weights_is_no_success(publisher, joined, report_of):
    round_ = publisher.publish("v1", wait=False)
    round_id = through(joined).round_id
    joined.mail.expect(Commit)
    joined.say(Ack(round_id, "committed", "v1", "f" * 32, "serving", {}))
    report = report_of(round_.result, PATIENCE_S)
    assert report.workers[0].fingerprint == "f" * 32
    with pytest.raises(CommitError, match="rogue committed: it holds other weights"):
        report.raise_unless_ok()


# FAULTS 10
def test_answers_to_other_rounds_are_dropped_and_counted(publisher, joined):
    round_ = publisher.publish("v1", wait=False)
    stale = [
        Accept("r0", []),
        Received("r0", 0),
        Vote("r0", FINGERPRINT, 32, {}),
        Ready(99),
        Commit("r0"),
        Refuse("r0", ErrorInfo("SchemaError", "of another round")),
    ]
    joined.say(*stale)
    round_id = through(joined).round_id
    joined.mail.expect(Commit)
    joined.say(Ack(round_id, "committed", "v1", FINGERPRINT, "serving", {}))
    assert round_.result(PATIENCE_S).ok
    assert publisher.num_dropped == len(stale)


def test_manifest_is_sent_whole_when_it_is_new_and_named_afterwards(engines, mail):
    source = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    sent = []
    with Publisher(source, engine=engines["memory"]) as publisher:
        worker = RogueWorker(publisher, mail())
        worker.say(worker.hello)
        publisher.wait_for_workers(1, PATIENCE_S)
        for number, manifest in enumerate((MANIFEST, MANIFEST, OTHER, OTHER)):
            if manifest is OTHER:
                # In place, behind the mapping's back.
                source["b"].data = torch.ones(4)
            version, held = f"v{number}", fingerprint(manifest, DIGESTS)
            round_ = publisher.publish(version, wait=False)
            plan = through(worker, held, first=not number)
            worker.mail.expect(Commit)
            worker.say(Ack(plan.round_id, "committed", version, held, "serving", {}))
            assert round_.result(PATIENCE_S).ok
            worker.mail.expect(Finish)
            sent.append(plan.manifest)
        worker.dialer.close()
    assert sent == [MANIFEST, MANIFEST.identity(), OTHER, OTHER.identity()]


@pytest.mark.parametrize(
    "place",
    [
        {"num_ranks": 2},  # taken
        {"instance": "other", "rank": 1},
        {"instance": "other", "rank": -1},
        {"instance": "other", "num_ranks": 0},
        {"instance": "other", "rank": 5, "num_ranks": 2},
    ],
)
def test_place_that_is_taken_or_does_not_exist_is_refused(publisher, joined, rogue_worker, place):
    worker = rogue_worker(**place)
    worker.say(worker.hello)
    assert isinstance(worker.mail.closed.get(timeout=PATIENCE_S), PeerError)
    assert len(publisher.workers()) == 1


@pytest.mark.parametrize(
    "messages", [[Ready(1)], [Abort("r", "")], [None, Hello("a", "b", 0, 1, None, "", "fresh")]]
)
def test_anything_but_one_hello_first_ends_the_connection(publisher, rogue_worker, messages):
    worker = rogue_worker()
    worker.say(*(message or worker.hello for message in messages))
    assert isinstance(worker.mail.closed.get(timeout=PATIENCE_S), PeerError)
    assert publisher.workers() == []


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda r: [Ack(r, "committed", "v1", "f", "serving", {})], "an ack before the commit"),
        (lambda r: [Commit(r)], "a worker does not send Commit"),
        (lambda r: [Vote(r, FINGERPRINT, 32, {})], "rogue votes before it was asked to"),
    ],
)
def test_message_out_of_place_ends_the_round_and_the_connection(publisher, joined, make, text):
    round_ = publisher.publish("v1", wait=False)
    joined.say(Ready(joined.mail.expect(Init).epoch))
    joined.say(*make(joined.mail.expect(Plan).round_id))
    with pytest.raises(PeerError, match=text):
        round_.result(PATIENCE_S)
    assert publisher.workers() == []


def test_second_vote_ends_the_round_and_the_connection(engines, rogue_worker_of):
    with Publisher(WEIGHTS, engine=engines["memory"], deadline_s=20.0) as publisher:
        worker, other = rogue_worker_of(publisher), rogue_worker_of(publisher, name="other")
        round_ = publisher.publish("v1", wait=False)
        other.say(Ready(other.mail.expect(Init).epoch))
        round_id = through(worker, others=[other]).round_id
        # The other's vote is still awaited.
        worker.say(Vote(round_id, FINGERPRINT, 32, {}))
        with pytest.raises(PeerError, match="rogue gives a second vote"):
            round_.result(PATIENCE_S)
        assert [each.worker for each in publisher.workers()] == ["other"]


def test_lost_worker_is_named_by_the_url_that_it_was_invited_by(publisher, rogue_worker):
    worker = rogue_worker(host="http://host:8000")
    worker.say(worker.hello)
    publisher.wait_for_workers(1, PATIENCE_S)
    round_ = publisher.publish("v1", wait=False)
    worker.mail.expect(Init)
    worker.dialer.close()
    with pytest.raises(PeerError, match=r"^http://host:8000: .* is gone"):
        round_.result(PATIENCE_S)


def test_commit_that_comes_after_the_report_is_finished(publisher, joined, judged, report_of):
    with judged(publisher, 0.5):
        round_ = publisher.publish("v1", wait=False)
    round_id = through(joined).round_id
    joined.mail.expect(Commit)
    assert [each.outcome for each in report_of(round_.result, PATIENCE_S).workers] == ["pending"]
    joined.say(Ack(round_id, "committed", "v1", FINGERPRINT, "serving", {}))
    assert joined.mail.expect(Finish).round_id == round_id


# FAULTS 14: what does not bring the round on is no sign of life.
def test_a_worker_cannot_talk_a_deadline_away(publisher, joined, judged, later):
    with judged(publisher, 10.0):
        round_ = publisher.publish("v1", wait=False)
    joined.say(Ready(joined.mail.expect(Init).epoch))
    round_id = joined.mail.expect(Plan).round_id
    joined.say(Accept(round_id, []))
    for _ in range(40):
        joined.say(Progress(round_id, 0), Accept(round_id, []), Received(round_id, -1))
        time.sleep(0.05)
        later(1)
        if round_.done:
            break
    # While it was still talking.
    assert round_.done
    with pytest.raises(StallError, match="rogue made no progress"):
        round_.result(PATIENCE_S)


class SlowTrainer(MemoryTrainerEngine):
    """Takes its time before it asks the workers, so that a round looks at them before that."""

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        time.sleep(0.1)
        return super().trainer_init(init_info, client=client, source=source)


@pytest.fixture
def slow_publisher(engines):
    with Publisher(WEIGHTS, engine=engines["memory"], trainer=SlowTrainer) as publisher:
        yield publisher


def test_a_late_refusal_of_an_earlier_attempt_does_not_end_the_next_round(
    slow_publisher, mail, until
):
    publisher = slow_publisher
    workers = [
        RogueWorker(publisher, mail(), worker=name, instance=name) for name in ("first", "second")
    ]
    for worker in workers:
        worker.say(worker.hello)
    publisher.wait_for_workers(2, PATIENCE_S)
    round_ = publisher.publish("v1", wait=False)
    first, second = (worker.mail.expect(Init) for worker in workers)
    workers[0].say(Refused(first.epoch, ErrorInfo("EngineError", "no engine here")))
    with pytest.raises(EngineError, match="no engine here"):
        round_.result(PATIENCE_S)
    workers[1].say(
        Refused(second.epoch, ErrorInfo("EngineError", "nor here")), Lost("local:1", "fresh", "")
    )
    until(lambda: "local:1" in [each.fingerprint for each in publisher.workers()])
    round_ = publisher.publish("v2", wait=False)
    # Once more, while the engine of the next attempt is made.
    workers[1].say(Refused(second.epoch, ErrorInfo("EngineError", "nor here")))
    for worker in workers:
        worker.mail.expect(Abort)
        assert worker.mail.expect(Init).epoch > first.epoch
    round_.abort("seen enough")
    for worker in workers:
        worker.dialer.close()


# -- observers


def test_whatever_workers_say_an_observer_gets_it_cut(publisher, rogue_worker_of):
    rogue_worker_of(publisher, "\u20ac" * 100_000)
    status = observe(publisher.address, publisher.token)
    (shown,) = status.workers
    assert shown.worker.startswith("\u20ac" * 100)
    assert len(shown.worker.encode()) <= MAX_OBSERVED_NBYTES
    assert publisher.workers()[0].worker == "\u20ac" * 100_000


def test_observer_joins_nothing_and_gets_one_answer(publisher, rogue_worker):
    observer = rogue_worker()
    observer.say(Observe())
    # The answer to the first closes the connection, at once perhaps: these may come too late.
    with contextlib.suppress(PeerLostError):
        observer.say(Observe(), observer.hello)
    assert observer.mail.expect(FleetStatus).workers == []
    observer.mail.closed.get(timeout=PATIENCE_S)
    assert observer.mail.messages.empty()
    assert (publisher.workers(), publisher.status().lost) == ([], [])


def test_workers_that_are_gone_are_remembered_up_to_a_number(publisher, rogue_worker_of, until):
    for i in range(MAX_LOST + 2):
        rogue_worker_of(publisher, f"w{i}").dialer.close()
        until(lambda: not publisher.workers())
    lost = publisher.status().lost
    assert [each.worker for each in lost] == [f"w{i}" for i in range(2, MAX_LOST + 2)]
    assert {each.state for each in lost} == {"lost"}
