"""KV cache of a live SGLang belongs to the weights that computed it."""

import pytest
from publishers import publishing, pushed
from server import PROMPT
from sglang_models import wrong_tokens

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

llama_first = pytest.mark.parametrize(
    "kind", ["llama", pytest.param("moe", marks=pytest.mark.nightly)]
)


@pytest.fixture
def no_flush(server):
    """KV cache is not flushed: blocks are told apart by their names alone."""
    server.tell("no_flush")
    yield
    server.forget("no_flush")


def test_loaded_weights_have_the_name_of_a_push_of_their_checkpoint(server):
    loaded, received = server.base
    assert [loaded.versions, received.versions] == [[("default", 0, 8)], [("A", 0, 8)]]
    assert loaded.num_cached == 0
    assert received.num_cached == len(PROMPT) - 1
    assert received.tokens == loaded.tokens


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


@llama_first
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
            begun.append(server.begin_held(prompt, 20, extra_key="x"))
            server.hold(running=3, chunked=1, waiting=number)
        publisher.publish("B")
        answers = [each.result() for each in begun]
    met = server.last_pause()
    assert (met["chunked"], met["waiting"]) == (1, 2)
    assert [answer.num_retractions for answer in answers] == [1, 1, 1, 1, 0, 0]
    for answer in answers:
        assert answer.versions[-1][0] == "B"
        assert wrong_tokens(folders, answer) == []
    assert server.ask(late[0]).num_cached == 0, "the new name is without the request's own key"
    assert server.ask(late[0], extra_key="x").num_cached == len(late[0]) - 1
    pushed(folders["A"], server, "A")
    for prompt in (*prompts, long, *late):
        back = server.ask(prompt)
        assert wrong_tokens(folders, back) == [], "a block of B was taken for one of A"


@llama_first
def test_requests_own_key_tells_its_blocks_apart(server, folders):
    prompt = [13, *PROMPT]
    pushed(folders["A"], server, "A")
    found = [server.ask(prompt, extra_key=key).num_cached for key in "xyx"]
    assert found == [0, 0, len(prompt) - 1]


@llama_first
def test_commit_while_sglang_is_paused_leaves_it_paused(server, folders):
    pushed(folders["A"], server, "A")
    server.post("/pause_generation", {"mode": "in_place"})
    pushed(folders["B"], server, "B")
    server.post("/pause_generation", {"mode": "in_place"})
    asked = server.begin(PROMPT)
    server.post("/continue_generation", {})
    assert asked.result().versions == [("B", 0, 8)]
    assert server.last_pause()["paused"], "the commit ended the pause"


@llama_first
def test_weights_that_sglangs_own_verb_brings_have_another_name_and_no_version(
    server, folders, no_flush
):
    prompt = [9, *PROMPT]
    pushed(folders["A"], server, "A")
    first = server.ask(prompt)
    assert server.weight_info()["state"] == "serving"
    body = {"model_path": str(folders["B"]), "flush_cache": False, "weight_version": "B"}
    assert server.post("/update_weights_from_disk", body)["success"]
    other = server.ask(prompt)
    assert other.versions == [("B", 0, 8)]
    assert other.num_cached == 0
    assert wrong_tokens(folders, other) == []
    assert server.weight_info()["state"] == "empty"
    pushed(folders["A"], server, "A")
    again = server.ask(prompt)
    assert again.tokens == first.tokens
    assert again.num_cached == len(prompt) - 1
    assert server.weight_info()["state"] == "serving"


@llama_first
def test_request_that_runs_while_sglangs_own_verb_changes_the_weights_files_no_blocks(
    server, folders, no_flush
):
    prompt = [11, *PROMPT]
    pushed(folders["A"], server, "A")
    begun = server.begin(prompt, 60)
    server.hold(running=1)
    long = server.begin_held([number % 241 for number in range(600)], 20)
    server.hold(running=1, chunked=1)
    # SGLang waits for requests to end, or keeps them as they are where it is paused in place.
    server.post_held("/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(folders["B"]), "flush_cache": False, "weight_version": "B"}
    assert server.post("/update_weights_from_disk", body)["success"]
    server.post("/continue_generation", {})
    answer, mixed = begun.result(), long.result()
    assert [version for version, _, _ in answer.versions] == ["A", "B"]
    for name in "AB":
        pushed(folders[name], server, name)
        after = server.ask(prompt + answer.tokens[:40])
        assert after.num_cached <= len(prompt), "blocks of two sets of weights are kept"
        assert wrong_tokens(folders, after) == []
        assert wrong_tokens(folders, server.ask(mixed.prompt)) == [], "a chunk of B is kept"
