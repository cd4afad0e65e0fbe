"""Blocks in the lower levels of SGLang's cache belong to the weights that computed them."""

import json
import time

import pytest
from publishers import publishing, pushed
from server import PROMPT, Server
from tiny_models import wrong_tokens

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(1200)]

PAGE = 4
LONG = [*PROMPT, *PROMPT[::-1], *PROMPT]
OPTIONS = {
    "enable-hierarchical-cache": True,
    "hicache-ratio": "2",
    "hicache-storage-backend": "file",
    "hicache-storage-prefetch-policy": "wait_complete",
    "hicache-storage-backend-extra-config": json.dumps({"prefetch_threshold": PAGE}),
    "hicache-write-policy": "write_through",
    "hicache-mem-layout": "layer_first",
    "hicache-io-backend": "direct",
    "page-size": str(PAGE),
    "max-running-requests": "2",
    # SGLang's storage tells models apart by their names: these have one.
    "served-model-name": "a-model",
}


@pytest.fixture
def folders(models):
    return {"default": models / "llama-A", "A": models / "llama-A", "B": models / "llama-B"}


@pytest.fixture
def start(models, tmp_path):
    """Maker of servers over one storage."""
    started = []
    storage = tmp_path / "storage"
    storage.mkdir()

    def start(name):
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(storage)}
        folder = tmp_path / f"server-{len(started)}"
        started.append(Server(folder, models / f"llama-{name}", OPTIONS, env))
        return started[-1].ready()

    start.storage = storage
    yield start
    for server in started:
        server.close()


def kept(start, at_least):
    """Wait until the storage has as many pages."""
    end = time.monotonic() + 60
    while len(list(start.storage.iterdir())) < at_least:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_storage_is_shared_by_equal_weights_only(start, folders):
    server = start("A")
    first = server.ask(LONG)
    assert wrong_tokens(folders, first) == []
    num_pages = (len(LONG) - 1) // PAGE
    kept(start, num_pages)
    pushed(folders["B"], server, "B")
    other = server.ask(LONG)
    assert other.num_cached == 0
    assert wrong_tokens(folders, other) == []
    pushed(folders["A"], server, "A")
    again = server.ask(LONG)
    assert again.num_cached == num_pages * PAGE
    assert again.tokens == first.tokens
    server.close()

    restarted = start("A")
    received = restarted.ask(LONG)
    assert received.num_cached == num_pages * PAGE
    assert received.tokens == first.tokens
    restarted.close()

    of_b = start("B")
    found = of_b.ask(LONG)
    assert wrong_tokens({"default": folders["B"]}, found) == []
    assert found.tokens == other.tokens
    assert found.num_cached == num_pages * PAGE, "what was received as B, and kept"


def test_requests_that_wait_and_prefetch_at_a_commit_take_and_keep_blocks_of_the_new(
    start, folders
):
    server = start("A")
    stored = [[number, *LONG] for number in range(3)]
    for prompt in stored:
        server.ask(prompt)
    kept(start, len(stored) * (len(LONG) // PAGE))
    # Blocks of A, by storage alone.
    pushed(folders["B"], server, "B")
    pushed(folders["A"], server, "A")
    with publishing(server, folders["B"]) as (publisher, _):
        begun = [server.begin([100 + number, *PROMPT], 60) for number in range(2)]
        server.hold(running=2)
        for number, prompt in enumerate(stored, start=1):
            begun.append(server.begin_held(prompt, 20))
            server.hold(running=2, waiting=number)
        publisher.publish("B")
        answers = [each.result() for each in begun]
    assert server.last_pause()["waiting"] == 3
    for answer in answers:
        assert answer.versions[-1][0] == "B"
        assert wrong_tokens(folders, answer) == []
    pushed(folders["A"], server, "A")
    for prompt in stored:
        back = server.ask(prompt)
        assert back.num_cached > 0
        assert wrong_tokens(folders, back) == [], "a block of B was taken for one of A"
