"""SGLang's own verbs beside the updates of publishers: what the weights are called, and when."""

import urllib.error

import pytest
from publishers import publishing, pushed
from server import PROMPT
from sglang_models import wrong_tokens

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture
def kind():
    return "llama"


@pytest.fixture
def no_flush(server):
    """KV cache is not flushed: blocks are told apart by their names alone."""
    server.tell("no_flush")
    yield
    server.forget("no_flush")


def test_weights_that_came_without_a_label_have_none(server, folders):
    pushed(folders["A"], server, "A")
    assert server.post("/update_weights_from_disk", {"model_path": str(folders["B"])})["success"]
    answer = server.ask(PROMPT)
    assert answer.versions == [("empty", 0, 8)]
    assert wrong_tokens({"empty": folders["B"]}, answer) == []


def test_weights_that_the_checker_draws_have_no_version(server, folders, no_flush):
    pushed(folders["A"], server, "A")
    first = server.ask(PROMPT)
    assert server.post("/weights_checker", {"action": "checksum"})["success"]
    assert server.weight_info()["state"] == "serving"
    assert server.post("/weights_checker", {"action": "reset_tensors"})["success"]
    assert server.weight_info()["state"] == "empty"
    drawn = server.ask(PROMPT)
    assert drawn.versions == [("empty", 0, 8)]
    assert drawn.num_cached == 0
    pushed(folders["A"], server, "A")
    again = server.ask(PROMPT)
    assert (again.tokens, again.versions) == (first.tokens, [("A", 0, 8)])


def test_label_of_a_caller_does_not_rename_weights_of_a_publisher(server, folders):
    def name(label):
        assert server.post("/update_weight_version", {"new_version": label})["success"]
        return server.ask(PROMPT).versions

    pushed(folders["A"], server, "A")
    assert name("B") == [("A", 0, 8)]
    # Weights that no publisher has named are the caller's to name.
    assert server.post("/update_weights_from_disk", {"model_path": str(folders["B"])})["success"]
    assert name("mine") == [("mine", 0, 8)]
    pushed(folders["A"], server, "A")
    assert server.ask(PROMPT).versions == [("A", 0, 8)]


@pytest.mark.nightly
def test_request_that_is_retracted_after_a_verb_takes_no_blocks_of_the_weights_before(
    server, folders, no_flush
):
    prompt = [13, *PROMPT * 5]
    pushed(folders["A"], server, "A")
    server.ask(prompt, 2)
    begun = server.begin(prompt, 60)
    server.hold(running=1)
    server.post_held("/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(folders["B"]), "flush_cache": False, "weight_version": "B"}
    assert server.post("/update_weights_from_disk", body)["success"]
    server.post("/pause_generation", {"mode": "retract"})
    server.post("/continue_generation", {})
    answer = begun.result()
    assert answer.num_retractions == 1
    assert [version for version, _, _ in answer.versions] == ["A", "B"]
    # SGLang counts the token that was under way when it was paused in place to the weights after.
    assert set(wrong_tokens(folders, answer)) <= {answer.versions[0][2]}


@pytest.mark.nightly
def test_update_waits_while_sglang_is_amid_one_of_its_own(server, folders):
    pushed(folders["A"], server, "A")
    assert server.post("/begin_weight_update", {})["success"]
    begun = server.begin([15, *PROMPT], 60)
    with publishing(server, folders["B"]) as (publisher, _):
        # The scheduler stands still until the update waits for its commit.
        server.hold(running=1)
        published = server.call(publisher.publish, "B")
        answer = begun.result()
        assert answer.versions == [("empty", 0, 60)]
        assert wrong_tokens({"empty": folders["A"]}, answer) == []
        assert server.post("/end_weight_update", {})["success"]
        assert published.result().ok
    assert server.ask(PROMPT).versions == [("B", 0, 8)]


def test_beam_searches_that_run_are_ended_by_a_commit_and_their_clients_told(server, folders):
    def search(prompt, num_tokens):
        sampling = {"max_new_tokens": num_tokens, "beam_width": 2, "n": 2, "ignore_eos": True}
        return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})

    pushed(folders["A"], server, "A")
    long = [number % 251 for number in range(600)]
    for label, prompt, wanted in (
        ("B", PROMPT, {"running": 2}),
        # The first chunk of the prompt is under way.
        ("A", long, {"running": 1, "chunked": 1}),
    ):
        with publishing(server, folders[label]) as (publisher, _):
            other = server.begin([17, *PROMPT], 200)
            server.hold(running=1)
            searching = server.call_held(search, prompt, 200)
            server.hold(**wanted)
            publisher.publish(label)
            with pytest.raises(urllib.error.HTTPError, match="503") as told:
                searching.result()
            assert "ended by an update of the weights" in told.value.read().decode()
            answer = other.result()
            assert answer.versions[-1][0] == label
            assert wrong_tokens(folders, answer) == []
        assert len(search(PROMPT, 8)["output_ids"]) == 8
        assert wrong_tokens(folders, server.ask(PROMPT)) == []


@pytest.mark.nightly
def test_prefill_that_was_aborted_before_a_commit_does_not_go_on_after_it(server, folders):
    pushed(folders["A"], server, "A")
    sampling = {"max_new_tokens": 20, "ignore_eos": True}
    body = {"input_ids": [3] * 600, "sampling_params": sampling, "rid": "aborted"}
    begun = server.call(server.post, "/generate", body)
    server.hold(chunked=1)
    server.forget("arrived")
    paused = server.call(server.post, "/pause_generation", {"mode": "in_place"})
    server.wait_for("arrived")
    server.forget("hold")
    paused.result()
    server.post("/abort_request", {"rid": "aborted"})
    pushed(folders["B"], server, "B")
    server.post("/continue_generation", {})
    assert begun.result()["meta_info"]["finish_reason"]["type"] == "abort"
