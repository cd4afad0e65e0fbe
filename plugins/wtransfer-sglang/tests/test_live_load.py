"""A live SGLang under load: many requests, many updates, and each token of the version it names."""

import secrets

import pytest
import wtransfer
from safetensors.torch import load_file
from server import TOKEN, Server, cpu_threads
from sglang_models import wrong_tokens

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(1200)]

NUM_REQUESTS, NUM_UPDATES = 32, 50
LOAD_S = 900.0
"""Longest wait for an answer: two ranks on a busy machine compute few tokens a second."""


CASES = {
    "overlap": (1, {}),
    "no overlap": (1, {"disable-overlap-schedule": True}),
    "two ranks, overlap": (2, {}),
    "two ranks, no overlap": (2, {"disable-overlap-schedule": True}),
}


@pytest.fixture(scope="module", params=CASES)
def loaded(request, models, kind, tmp_path_factory):
    num_ranks, more = CASES[request.param]
    options = {"chunked-prefill-size": "64", "max-running-requests": "16", "tp": str(num_ranks)}
    # Joins a publisher by itself, now and whenever there is one.
    join = f"unix:@wtransfer-sglang-{secrets.token_hex(6)}"
    env = {"WTRANSFER_JOIN": join} | (cpu_threads() if num_ranks > 1 else {})
    folder = tmp_path_factory.mktemp("loaded")
    server = Server(folder, models / f"{kind}-A", {**options, **more}, env)
    server.join, server.num_ranks = join, num_ranks
    yield server.ready()
    server.close()


def test_every_token_is_of_the_version_that_it_names(loaded, folders):
    held_by = [load_file(folders[name] / "model.safetensors") for name in "AB"]
    begun = []
    held = dict(held_by[0])
    with wtransfer.Publisher(held, listen=loaded.join, token=TOKEN, deadline_s=30) as publisher:
        publisher.wait_for_workers(1, timeout_s=60)
        assert len(publisher.workers()) == loaded.num_ranks
        for number in range(NUM_UPDATES):
            while len(begun) < NUM_REQUESTS * (number + 1) // NUM_UPDATES:
                prompt = [(len(begun) * 7 + place) % 251 for place in range(5 + 9 * len(begun))]
                begun.append(loaded.begin(prompt, 20 + 5 * len(begun), wait_s=LOAD_S))
            held.update(held_by[(number + 1) % 2])
            publisher.publish(f"v{number}")
            folders[f"v{number}"] = folders["BA"[number % 2]]
        answers = [each.result() for each in begun]
    assert max(answer.num_retractions for answer in answers) > 1
    assert [wrong_tokens(folders, answer) for answer in answers] == [[]] * NUM_REQUESTS
