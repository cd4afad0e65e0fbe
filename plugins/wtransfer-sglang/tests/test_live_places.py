"""A live SGLang: what it keeps of weights beside the model is renewed by a commit, or refused."""

from contextlib import closing

import pytest
from publishers import publishing, pushed
from safetensors.torch import load_file
from server import PROMPT, Server
from test_live_proof import refusal

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]
NUM_TOKENS = 24


def by_embeddings(server, embeddings):
    """Return the answer to a prompt of embeddings: tokens, spans and log probabilities."""
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    body = {"input_embeds": embeddings, "sampling_params": sampling, **options}
    found = server.post("/generate", body)
    meta = found["meta_info"]
    spans = [(each["version"], each["start"], each["end"]) for each in meta["weight_versions"]]
    rows = {name: meta[name] for name in ("input_token_logprobs", "output_token_logprobs")}
    return found["output_ids"], spans, rows


def distance(rows, others):
    """Return the greatest difference of two lists of log probabilities of the same tokens."""
    assert [row[1] for row in rows] == [row[1] for row in others]
    pairs = [(row[0], other[0]) for row, other in zip(rows, others, strict=True)]
    return max(abs(one - other) for one, other in pairs if one is not None)


def test_request_by_embeddings_has_nothing_of_the_weights_before(models, tmp_path):
    table = load_file(models / "llama-A" / "model.safetensors")["model.embed_tokens.weight"]
    embeddings = table[PROMPT].float().tolist()
    server = Server(tmp_path, models / "llama-A", {"disable-radix-cache": True})
    with closing(server):
        server.ready()
        pushed(models / "llama-A", server, "A")
        with publishing(server, models / "llama-B") as (publisher, _):
            begun = server.call(by_embeddings, server, embeddings)
            server.hold(running=1)
            publisher.publish("B")
            tokens, spans, rows = begun.result()
        expected, _, expected_rows = by_embeddings(server, embeddings)
    assert spans == [("B", 0, NUM_TOKENS)]
    assert tokens == expected
    for name, found in rows.items():
        assert distance(found, expected_rows[name]) < 0.05, name


def test_places_that_would_outlive_a_commit_are_refused_by_their_options(models, tmp_path):
    options = {"enable-return-hidden-states": True, "enable-streaming-session": True}
    with closing(Server(tmp_path, models / "llama-A", options)) as server:
        told = refusal(server.ready(), models / "llama-B")
        log = server.log.read_text()
    for option in options:
        assert f"start it without --{option}: " in told
        assert f"start it without --{option}: " in log, "told at the start"
