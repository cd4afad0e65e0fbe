"""Two tensor-parallel ranks of a live SGLang commit between the same two steps, or not at all."""

import contextlib
import time

import pytest
from publishers import publishing, pushed
from server import PROMPT, Server, cpu_threads
from sglang_models import wrong_tokens
from wtransfer.errors import CommitError
from wtransfer.transport.framing import FrameReader
from wtransfer.weight_sync.messages import CODEC, Commit
from wtransfer.weight_sync.trainer.workers import Worker

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ranks(models, kind, tmp_path_factory):
    server = Server(
        tmp_path_factory.mktemp("ranks"),
        models / f"{kind}-A",
        {"tp": "2", "chunked-prefill-size": "64", "max-running-requests": "4"},
        cpu_threads(),
    )
    yield server.ready()
    server.close()


def test_both_ranks_commit_beside_requests_that_run(ranks, folders):
    first = ranks.ask(PROMPT)
    assert wrong_tokens(folders, first) == []
    with publishing(ranks, folders["B"]) as (publisher, _):
        assert len(publisher.workers()) == 2
        begun = [ranks.begin([*PROMPT, number], 40) for number in range(3)]
        ranks.hold(running=3)
        report = publisher.publish("B")
        assert len(report.workers) == 2
        answers = [each.result() for each in begun]
    for answer in answers:
        assert [version for version, _, _ in answer.versions] == ["default", "B"]
        assert wrong_tokens(folders, answer) == []
    pushed(folders["A"], ranks, "A")
    assert ranks.ask(PROMPT).tokens == first.tokens


def test_load_that_fails_in_one_rank_leaves_both_with_the_weights_before(ranks, folders):
    pushed(folders["A"], ranks, "A")
    before = ranks.ask(PROMPT).tokens
    with publishing(ranks, folders["B"]) as (publisher, _):
        assert len(publisher.workers()) == 2
        ranks.tell("rank", "1")
        ranks.tell("fail_at", "5")
        with pytest.raises(CommitError, match="fails at tensor 5"):
            publisher.publish("B")
        answer = ranks.ask(PROMPT)
        assert answer.versions == [("A", 0, 8)]
        assert answer.tokens == before
        ranks.forget("fail_at")
        ranks.forget("rank")
        publisher.publish("B")
    after = ranks.ask(PROMPT)
    assert after.versions == [("B", 0, 8)]
    assert wrong_tokens(folders, after) == []


def test_server_serves_while_one_rank_alone_has_the_update(ranks, folders, monkeypatch):
    pushed(folders["A"], ranks, "A")
    send, told, served = Worker.send_frame, [], []

    def send_and_serve(worker, frame):
        (message,) = FrameReader(CODEC, "a test").feed(frame)
        if isinstance(message, Commit):
            told.append(worker)
            if len(told) == 2:
                # The first rank has been told to commit, and the other one not yet.
                end = time.monotonic() + 10
                while ranks.weight_info()["state"] != "pending":
                    assert time.monotonic() < end
                served.append(ranks.ask(PROMPT, 20))
        send(worker, frame)

    with publishing(ranks, folders["B"]) as (publisher, _):
        monkeypatch.setattr(Worker, "send_frame", send_and_serve)
        publisher.publish("B")
    (answer,) = served
    assert answer.versions == [("A", 0, 20)]
    assert wrong_tokens(folders, answer) == []
    assert ranks.ask(PROMPT).versions == [("B", 0, 8)]


def test_ranks_that_differ_after_a_commit_have_no_version(ranks, folders):
    pushed(folders["A"], ranks, "A")
    ranks.tell("lossy", "1")
    with publishing(ranks, folders["B"]) as (publisher, _), contextlib.suppress(CommitError):
        # The publisher may hear of the loss before its report, or after it.
        publisher.publish("B")
    ranks.forget("lossy")
    answer = ranks.ask(PROMPT)
    assert answer.versions == [("empty", 0, 8)]
    assert ranks.weight_info()["state"] == "empty"
    pushed(folders["A"], ranks, "A")
    after = ranks.ask(PROMPT)
    assert after.versions == [("A", 0, 8)]
    assert after.num_cached == 0
    assert wrong_tokens(folders, after) == []
    assert ranks.weight_info()["state"] == "serving"
