"""A live SGLang under load: many requests, many updates, and each token of the version it names."""

import secrets

import pytest
import wtransfer
from safetensors.torch import load_file
from server import TOKEN, Server
from sglang_models import wrong_tokens

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(1200)]

NUM_REQUESTS, NUM_UPDATES = 32, 50


@pytest.fixture(scope="module", params=["overlap", "no overlap"])
def loaded(request, models, tmp_path_factory):
    options = {"chunked-prefill-size": "64", "max-running-requests": "16"}
    if request.param == "no overlap":
        options["disable-overlap-schedule"] = True
    # Joins a publisher by itself, now and whenever there is one.
    join = f"unix:@wtransfer-sglang-{secrets.token_hex(6)}"
    folder = tmp_path_factory.mktemp("loaded")
    server = Server(folder, models / "llama-A", options, {"WTRANSFER_JOIN": join})
    server.join = join
    yield server.ready()
    server.close()


def test_every_token_is_of_the_version_that_it_names(loaded, models):
    held_by = [load_file(models / f"llama-{name}" / "model.safetensors") for name in "AB"]
    folders = {"default": models / "llama-A"}
    begun = []
    held = dict(held_by[0])
    with wtransfer.Publisher(held, listen=loaded.join, token=TOKEN, deadline_s=30) as publisher:
        publisher.wait_for_workers(1, timeout_s=60)
        for number in range(NUM_UPDATES):
            while len(begun) < NUM_REQUESTS * (number + 1) // NUM_UPDATES:
                prompt = [(len(begun) * 7 + place) % 251 for place in range(5 + 9 * len(begun))]
                begun.append(loaded.begin(prompt, 20 + 5 * len(begun)))
            held.update(held_by[(number + 1) % 2])
            publisher.publish(f"v{number}")
            folders[f"v{number}"] = models / f"llama-{'BA'[number % 2]}"
        answers = [each.result() for each in begun]
    assert max(answer.num_retractions for answer in answers) > 1
    assert [wrong_tokens(folders, answer) for answer in answers] == [[]] * NUM_REQUESTS
