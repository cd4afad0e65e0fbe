"""Blocks in the lower levels of SGLang's cache belong to the weights that computed them."""

import json
import sys
import time
from pathlib import Path

import pytest
from publishers import publishing, pushed
from server import PROMPT, Server, cpu_threads
from sglang_models import wrong_tokens
from test_live_kv import llama_first

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

PAGE = 4
LONG = [*PROMPT, *PROMPT[::-1], *PROMPT]
NUM_PAGES = (len(LONG) - 1) // PAGE
OPTIONS = {
    "enable-hierarchical-cache": True,
    "hicache-ratio": "2",
    "hicache-storage-prefetch-policy": "wait_complete",
    "hicache-write-policy": "write_through",
    "hicache-mem-layout": "layer_first",
    "hicache-io-backend": "direct",
    "page-size": str(PAGE),
    "max-running-requests": "2",
    # SGLang's storage tells models apart by their names: these have one.
    "served-model-name": "a-model",
}
TIER = {
    "backend_name": "wtransfer",
    "module_path": "wtransfer_sglang.storage",
    "class_name": "TierStorage",
}


class OwnFiles:
    """SGLang's own storage in files."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.backend, self.extra = "file", {}
        self.env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}

    def num_pages(self):
        return len(list(self.folder.iterdir()))

    def close(self):
        pass


class FileTier:
    """The tier `file`."""

    def __init__(self, folder):
        self.folder = folder
        self.backend, self.env = "dynamic", {}
        self.extra = {**TIER, "tier": "file", "shared_storage_path": str(folder)}

    def files(self):
        return [each for each in self.folder.rglob("*") if each.is_file()]

    def num_pages(self):
        return len(self.files())

    def close(self):
        pass


class HeldFiles(FileTier):
    """The tier `file` with loads that a test holds, and that take as long as they take."""

    def __init__(self, folder):
        super().__init__(folder)
        self.extra |= {"tier": "held-files", "deadline_s": 3600}


class ValkeyTier:
    """The tier `valkey`, over a server in a process of its own."""

    def __init__(self, _folder):
        tests = Path(__file__).resolve().parents[2] / "wtransfer-valkey" / "tests"
        sys.path.append(str(tests))
        import valkey_server

        self._server = valkey_server.Server()
        self.backend, self.env = "dynamic", {}
        self.extra = {**TIER, "tier": "valkey", "url": self._server.url}

    def num_pages(self):
        return self._server.run("DBSIZE")

    def close(self):
        self._server.close()


in_each = pytest.mark.parametrize(
    ("storage", "kind", "num_ranks"),
    [
        (OwnFiles, "llama", 1),
        (FileTier, "llama", 1),
        (ValkeyTier, "llama", 1),
        (FileTier, "moe", 1),
        (ValkeyTier, "moe", 1),
        (FileTier, "moe", 2),
    ],
    indirect=["storage"],
)
in_files = pytest.mark.parametrize("storage", [FileTier], indirect=True)


@pytest.fixture
def num_ranks():
    return 1


@pytest.fixture
def storage(request, tmp_path):
    made = request.param(tmp_path / "storage")
    yield made
    made.close()


@pytest.fixture
def start(folders, num_ranks, storage, tmp_path):
    """Starter of servers over one storage, each of which is to be awaited."""
    started = []

    def start(name):
        extra = {"prefetch_threshold": PAGE, **storage.extra}
        options = {
            **OPTIONS,
            "tp": str(num_ranks),
            "hicache-storage-backend": storage.backend,
            "hicache-storage-backend-extra-config": json.dumps(extra),
        }
        folder = tmp_path / f"server-{len(started)}"
        env = storage.env | (cpu_threads() if num_ranks > 1 else {})
        started.append(Server(folder, folders[name], options, env))
        return started[-1]

    yield start
    for server in started:
        server.close()


def kept(storage, at_least, num_ranks=1):
    """Wait until the storage has as many pages of each rank."""
    end = time.monotonic() + 60
    while storage.num_pages() < at_least * num_ranks:
        assert time.monotonic() < end
        time.sleep(0.05)


def other_and_back(server, folders, first):
    """Serve B, which finds nothing of A, and A again, which finds its own; return B's answer."""
    pushed(folders["B"], server, "B")
    other = server.ask(LONG)
    assert other.num_cached == 0
    assert wrong_tokens(folders, other) == []
    pushed(folders["A"], server, "A")
    again = server.ask(LONG)
    assert again.num_cached == NUM_PAGES * PAGE
    assert again.tokens == first.tokens
    return other


@llama_first
@in_files
def test_tier_keeps_blocks_by_their_weights_and_a_damaged_one_is_a_miss(start, storage, folders):
    server = start("A").ready()
    first = server.ask(LONG)
    assert wrong_tokens(folders, first) == []
    kept(storage, NUM_PAGES)
    of_first = storage.files()
    other_and_back(server, folders, first)

    for file in of_first:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    for name in "BA":
        pushed(folders[name], server, name)
    damaged = server.ask(LONG)
    assert damaged.num_cached == 0
    assert damaged.tokens == first.tokens
    assert "blocks refused (checksum)" in server.log.read_text()


@pytest.mark.nightly
@in_each
def test_storage_is_shared_by_equal_weights_only(start, storage, folders, num_ranks):
    server = start("A").ready()
    first = server.ask(LONG)
    assert wrong_tokens(folders, first) == []
    kept(storage, NUM_PAGES, num_ranks)
    other = other_and_back(server, folders, first)
    server.close()

    of_a, of_b = (start(name) for name in "AB")
    received = of_a.ready().ask(LONG)
    assert received.num_cached == NUM_PAGES * PAGE
    assert received.tokens == first.tokens

    found = of_b.ready().ask(LONG)
    assert wrong_tokens({"default": folders["B"]}, found) == []
    assert found.tokens == other.tokens
    assert found.num_cached == NUM_PAGES * PAGE, "what was received as B, and kept"

    # Both serve; neither finds what the other has stored meanwhile.
    for number, (storing, looking, name) in enumerate([(of_a, of_b, "B"), (of_b, of_a, "A")]):
        prompt, before = [number, *LONG], storage.num_pages()
        storing.ask(prompt)
        kept(storage, before // num_ranks + NUM_PAGES, num_ranks)
        stranger = looking.ask(prompt)
        assert stranger.num_cached == 0
        assert wrong_tokens({"default": folders[name]}, stranger) == []


@pytest.mark.nightly
@in_each
def test_requests_that_wait_and_prefetch_at_a_commit_take_and_keep_blocks_of_the_new(
    start, storage, folders, num_ranks
):
    server = start("A").ready()
    stored = [[number, *LONG] for number in range(3)]
    for prompt in stored:
        server.ask(prompt)
    kept(storage, len(stored) * (len(LONG) // PAGE), num_ranks)
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


@pytest.mark.nightly
@pytest.mark.parametrize("storage", [HeldFiles], indirect=True)
def test_tier_that_hangs_keeps_no_commit_and_no_request(start, storage, folders):
    server = start("A").ready()
    first = server.ask(LONG)
    kept(storage, NUM_PAGES)
    for name in "BA":
        pushed(folders[name], server, name)
    server.tell("hold_get")
    begun = server.begin(LONG)
    server.wait_for("getting")
    # The flush of a commit ends the threads that load.
    pushed(folders["B"], server, "B")
    answer = begun.result()
    assert answer.versions == [("B", 0, 8)]
    assert wrong_tokens(folders, answer) == []
    server.forget("hold_get")
    pushed(folders["A"], server, "A")
    again = server.ask(LONG)
    assert again.num_cached == NUM_PAGES * PAGE
    assert again.tokens == first.tokens
