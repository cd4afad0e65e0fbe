"""KV cache of a live SGLang belongs to the weights that computed it."""

import pytest
from publishers import publishing, pushed
from server import PROMPT
from tiny_models import wrong_tokens

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture
def no_flush(server):
    """KV cache is not flushed: blocks are told apart by their names alone."""
    server.tell("no_flush")
    yield
    server.forget("no_flush")


def test_blocks_of_other_weights_are_no_hit_and_those_of_equal_weights_are(
    server,
    folders,
    no_flush,
):
    prompt = [7, *PROMPT]
    pushed(folders["A"], server, "A")
    first = server.ask(prompt)
    pushed(folders["B"], server, "B")
    other = server.ask(prompt)
    assert other.num_cached == 0
    assert wrong_tokens(folders, other) == []
    pushed(folders["A"], server, "A")
    again = server.ask(prompt)
    assert again.num_cached == len(prompt) - 1
    assert again.tokens == first.tokens
    assert wrong_tokens(folders, again) == []


def test_requests_that_wait_or_are_retracted_file_their_blocks_under_the_new_weights(
    server,
    folders,
    no_flush,
):
    pushed(folders["A"], server, "A")
    # Four run at most: the chunked one is the last of those, and two wait.
    prompts = [[number, *PROMPT] for number in range(100, 103)]
    long = [number % 251 for number in range(600)]
    late = [[number, *PROMPT] for number in range(110, 112)]
    with publishing(server, folders["B"]) as (publisher, _):
        begun = [server.begin(prompt, 60) for prompt in prompts]
        server.hold(running=3)
        begun.append(server.begin_held(long, 20))
        server.hold(running=3, chunked=1)
        for number, prompt in enumerate(late, start=1):
            begun.append(server.begin_held(prompt, 20))
            server.hold(running=3, chunked=1, waiting=number)
        publisher.publish("B")
        answers = [each.result() for each in begun]
    met = server.last_pause()
    assert (met["chunked"], met["waiting"]) == (1, 2)
    assert [answer.num_retractions for answer in answers] == [1, 1, 1, 1, 0, 0]
    for answer in answers:
        assert answer.versions[-1][0] == "B"
        assert wrong_tokens(folders, answer) == []
    pushed(folders["A"], server, "A")
    for prompt in (*prompts, long, *late):
        back = server.ask(prompt)
        assert wrong_tokens(folders, back) == [], "a block of B was taken for one of A"
