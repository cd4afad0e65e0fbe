"""A live SGLang takes updates of a publisher: what its requests compute, and what is undone."""

import pytest
import wtransfer
from publishers import publishing, pushed, pushed_by_command
from server import PROMPT
from tiny_models import wrong_tokens
from wtransfer.errors import CommitError, WTransferError

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_pushed_weights_are_those_that_compute(server, folders):
    pushed(folders["A"], server, "first")
    first = server.ask(PROMPT)
    assert wrong_tokens({"first": folders["A"]}, first) == []
    for label, push in (("B", pushed_by_command), ("A", pushed)):
        push(folders[label], server, label)
        answer = server.ask(PROMPT)
        assert answer.versions == [(label, 0, 8)]
        assert answer.num_cached == 0
        assert wrong_tokens(folders, answer) == []
        assert (answer.tokens == first.tokens) == (label == "A")


def test_requests_that_run_keep_their_tokens_and_go_on_with_the_new_weights(server, folders):
    pushed(folders["A"], server, "A")
    with publishing(server, folders["B"]) as (publisher, _):
        begun = [server.begin([*PROMPT, number], 60) for number in range(3)]
        server.hold(running=3)
        publisher.publish("B")
        answers = [each.result() for each in begun]
    for answer in answers:
        (old, zero, at), (new, begin, end) = answer.versions
        assert (old, zero, new, begin, end) == ("A", 0, "B", at, 60)
        assert answer.num_retractions == 1
        assert wrong_tokens(folders, answer) == []


def test_wrong_token_is_refused(server, folders):
    with (
        pytest.raises(WTransferError, match="token"),
        wtransfer.Publisher({}, hosts=[server.address], token="another", deadline_s=10),
    ):
        pass


def test_load_that_fails_at_any_tensor_leaves_the_weights_before(server, folders, kind):
    pushed(folders["A"], server, "A")
    before = server.ask(PROMPT).tokens
    with publishing(server, folders["B"]) as (publisher, held):
        last = len(held) - 1
        for number in range(len(held)) if kind == "llama" else (0, last // 2, last):
            server.tell("fail_at", str(number))
            with pytest.raises(CommitError, match=f"fails at tensor {number}"):
                publisher.publish(f"B-{number}")
            answer = server.ask([*PROMPT, number], 2)
            assert answer.versions == [("A", 0, 2)]
            assert wrong_tokens(folders, answer) == []
        again = server.ask(PROMPT)
        assert again.tokens == before
        server.forget("fail_at")
        publisher.publish("B")
    assert server.ask(PROMPT).versions == [("B", 0, 8)]
