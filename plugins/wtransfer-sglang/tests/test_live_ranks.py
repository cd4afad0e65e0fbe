"""Two tensor-parallel ranks of a live SGLang commit between the same two steps, or not at all."""

import pytest
from publishers import publishing, pushed
from server import PROMPT, Server, cpu_threads
from sglang_models import wrong_tokens
from wtransfer.errors import CommitError

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory):
    server = Server(
        tmp_path_factory.mktemp("ranks"),
        models / "llama-A",
        {"tp": "2", "chunked-prefill-size": "64", "max-running-requests": "4"},
        cpu_threads(),
    )
    yield server.ready()
    server.close()


@pytest.fixture
def folders(models):
    return {"default": models / "llama-A", "A": models / "llama-A", "B": models / "llama-B"}


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
