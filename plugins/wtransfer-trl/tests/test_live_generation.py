"""TRL's generation by a live vLLM, whose weights are replaced while it generates."""

import re
from contextlib import closing, contextmanager

import httpx
import pytest
import transformers
from accelerate import Accelerator
from server import ServerOfWords
from trl.generation.vllm_generation import VLLMGeneration

import wtransfer_trl

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

PROMPT = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def shared_token(restored, monkeypatch, token):
    monkeypatch.setenv("WTRANSFER_TOKEN", token["WTRANSFER_TOKEN"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@contextmanager
def generating(server, models, before_answer):
    """TRL's generation by policy B; the server has started with A.

    Args:
        before_answer: Called one by one, within a generation and before its request.
    """
    wtransfer_trl.install()
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "B")
    generation = VLLMGeneration(
        model,
        Accelerator(cpu=True),
        None,
        mode="server",
        server_base_url=server.url,
        temperature=0,
        logprobs=None,  # TRL does not read those that vLLM 0.32 gives by its route of token ids
    )
    client = generation.vllm_client
    generate = client.generate

    def generate_after(**arguments):
        next(before_answer, lambda _: None)(client.communicator)
        return generate(**arguments)

    client.generate = generate_after
    # The model takes no pictures; they choose the route.
    client.image_features = lambda images: [None for _ in images]
    with closing(client.communicator):
        generation.sync_weights()
        yield generation


def tokens_of(generation, images=None):
    _, tokens, _, _ = generation.generate([PROMPT], images, num_generations=1)
    return tokens


def test_generation_while_the_server_loads_its_checkpoint_is_repeated(server, models, caplog):
    def reload(_):
        order = {"method": "reload_weights"}
        httpx.post(f"{server.url}/collective_rpc", json=order, timeout=60).raise_for_status()

    # Another test may have left a policy.
    reload(None)
    of_a = server.tokens([PROMPT])
    with generating(server, models, iter([reload])) as generation:
        assert tokens_of(generation) == server.tokens([PROMPT]) != of_a
        assert re.fullmatch(r"trl-\w+-2", server.label())
    # By its label, or where the publisher was faster than the generation, by its loss.
    assert re.search(r"the vLLM server (holds|has lost) .*, expected trl-\w+-1", caplog.text)


@pytest.mark.nightly
def test_spans_of_an_answer_need_no_further_question(server_words, models, token, tmp_path):
    def unanswered():
        raise AssertionError("asked which weights it holds")

    def answer_no_more(sync):
        sync._held = unanswered

    words = f"{server_words} --enable-scale-out"
    with closing(ServerOfWords(tmp_path, words, token)) as server:
        of_a = server.tokens([PROMPT])
        with generating(server, models, iter([answer_no_more])) as generation:
            assert tokens_of(generation, [["a picture"]]) == server.tokens([PROMPT]) != of_a
