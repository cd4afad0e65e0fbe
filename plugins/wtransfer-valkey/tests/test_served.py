"""The tier where it is used: an engine's tokens are those of a fresh model, whatever happens."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from valkey_server import PATIENCE_S, until
from wtransfer.testing.connector import SMALL, RecordedInstance
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.contract import OVER
from wtransfer.testing.mini_engine.instance import MODULES, Instance
from wtransfer.testing.mini_engine.model import LocalWeights
from wtransfer.testing.mini_engine.reference import reference_output
from wtransfer.testing.zygote import Zygote
from wtransfer.weight_version import process_weights

PROMPT = list(range(30))
BLOCK_SIZE = 4
NUM_BLOCKS = 7


def config(url, connector="OffloadingConnector", **options):
    return EngineConfig(
        model=SMALL,
        cache=CacheShape(BLOCK_SIZE, 64),
        connector=connector,
        options={"spec_name": "valkey", "url": url, **options},
    )


class Host(RecordedInstance):
    """An engine that compares all that it serves with a fresh model."""

    def __init__(self, weights, url, connector="OffloadingConnector", **options):
        super().__init__(config(url, connector, **options), weights)
        # The scheduler learns the weights by a step.
        self.step()

    @property
    def stats(self):
        total = {}
        for side in self.sides:
            for name, number in side.side.get_stats().items():
                total[name] = total.get(name, 0) + number
        return total

    def serve(self, prompt, count=3):
        """Serve a prompt, with nothing in the engine's own cache; return the blocks it loaded."""
        self.clear_cache()
        before = self.counts["tokens_loaded"]
        request = self.submit(prompt, count)
        end = time.monotonic() + PATIENCE_S
        while request.state not in OVER:
            assert time.monotonic() < end
            self.step()
        self.run(PATIENCE_S)
        self.check(request)
        return (self.counts["tokens_loaded"] - before) // BLOCK_SIZE


@pytest.fixture
def weights():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # A model of an earlier test would change their name as soon as the collector finds it.
    process_weights.begin_anew()
    made = LocalWeights(0)
    yield made
    made.close()
    torch.set_num_threads(threads)


@pytest.fixture
def host(weights, monkeypatch):
    """Maker of engines, which are closed with the test."""
    # A machine that is busy turns no hit into a miss.
    monkeypatch.setattr("wtransfer.specs.tier_manager.LOOKUP_S", PATIENCE_S)
    made = []

    def make(url, *arguments, **options):
        made.append(Host(weights, url, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("connector", ["OffloadingConnector", "SharedStorageConnector"])
def test_another_engine_loads_what_was_computed(host, server, connector):
    one, other = host(server.url, connector), host(server.url, connector)
    assert one.serve(PROMPT) == 0
    assert other.serve(PROMPT) == NUM_BLOCKS
    assert one.serve(PROMPT) == NUM_BLOCKS
    assert server.run("DBSIZE") >= NUM_BLOCKS


def test_another_process_loads_what_was_computed(server):
    expected = reference_output(PROMPT, 3, 0, SMALL).output
    with Zygote(preload=["torch", *MODULES]) as zygote:
        found = []
        for _ in range(2):
            with Instance(config(server.url), zygote.spawn) as instance:
                answer = instance.ask(PROMPT, 3)
                # All that was computed is stored beside the steps.
                until(lambda: server.run("DBSIZE") == NUM_BLOCKS + 1, "all blocks")
            assert (answer.state, answer.tokens) == ("finished", expected)
            found.append(answer.counts.get("tokens_loaded", 0) // BLOCK_SIZE)
    assert found == [0, NUM_BLOCKS]


@pytest.fixture
def _no_pause(monkeypatch):
    """Let a server be tried again at once after failures."""
    monkeypatch.setattr("wtransfer.specs.tier.PAUSE_S", 0.0)


@pytest.mark.usefixtures("_no_pause")
def test_the_server_is_killed_and_restarted(host, server):
    made = host(server.url)
    made.serve(PROMPT)
    assert made.serve(PROMPT) == NUM_BLOCKS
    server.kill()
    assert made.serve(PROMPT) == 0
    assert made.serve(PROMPT[::-1]) == 0
    server.start()
    # It has come back empty.
    made.serve(PROMPT)
    assert made.serve(PROMPT) == NUM_BLOCKS


@pytest.mark.usefixtures("_no_pause")
def test_the_server_is_lost_between_a_hit_and_its_load(host, server):
    made = host(server.url)
    made.serve(PROMPT)

    def kill(own, request, blocks, num_external_tokens):
        if num_external_tokens:
            server.kill()
        return own(request, blocks, num_external_tokens)

    made.scheduler_side.instead["update_state_after_alloc"] = kill
    assert made.serve(PROMPT) == 0
    made.scheduler_side.instead.clear()
    assert made.stats["loads_failed_total"] == 1
    server.start()
    made.serve(PROMPT)
    assert made.serve(PROMPT) == NUM_BLOCKS


def test_the_server_is_stopped(host, server):
    made = host(server.url, timeout_s=0.1)
    made.serve(PROMPT)
    server.stop()
    assert made.serve(PROMPT) == 0
    server.go_on()
    made.serve(PROMPT)
    end = time.monotonic() + PATIENCE_S
    while made.serve(PROMPT) != NUM_BLOCKS:
        assert time.monotonic() < end


@pytest.mark.usefixtures("_no_pause")
def test_no_step_waits_for_a_server_that_is_lost_under_load(host, server, monkeypatch):
    # The client waits for longer than any step may take.
    made = host(server.url, timeout_s=PATIENCE_S, deadline_s=1.0)
    monkeypatch.setattr("wtransfer.specs.tier_manager.LOOKUP_S", 0.2)
    prompts = [[number, *PROMPT] for number in range(6)]
    steps = []

    def serve_all(act=lambda: None):
        """Serve all prompts at once, and act beside them; return the blocks that were loaded."""
        made.clear_cache()
        before, end = made.counts["tokens_loaded"], time.monotonic() + PATIENCE_S
        requests = [made.submit(prompt, 3) for prompt in prompts]
        while any(request.state not in OVER for request in requests):
            begun = time.monotonic()
            assert begun < end
            made.step()
            steps.append(time.monotonic() - begun)
            act()
            act = bool
        for request in requests:
            made.check_output(request)
        return (made.counts["tokens_loaded"] - before) // BLOCK_SIZE

    def serve_until_found():
        end = time.monotonic() + PATIENCE_S
        while not serve_all():
            assert time.monotonic() < end

    serve_until_found()
    for lose, bring_back in ((server.stop, server.go_on), (server.kill, server.start)):
        serve_all(lose)
        assert serve_all() == 0
        bring_back()
        serve_until_found()
    assert max(steps) < PATIENCE_S / 4


def test_other_weights_in_the_midst_of_a_conversation(host, server, weights):
    one, other = host(server.url), host(server.url)
    one.serve(PROMPT)
    assert one.serve([*PROMPT, 1, 2, 3, 4]) >= NUM_BLOCKS
    weights.change(1)
    # The schedulers learn of it by a step.
    one.step()
    other.step()
    # Its last block has a token that is left to compute.
    turn = [*PROMPT, 1, 2, 3, 4, 5, 6]
    assert one.serve(turn) == 0
    assert other.serve(turn) == len(turn) // BLOCK_SIZE - 1
    # The way back, where the blocks still are.
    weights.change(0)
    one.step()
    assert one.serve(PROMPT) == NUM_BLOCKS


def test_weights_change_within_a_request(host, server, weights):
    made = host(server.url)
    made.clear_cache()
    made.submit(PROMPT, 20)
    for _ in range(4):
        made.step()
    weights.change(1)
    made.run(PATIENCE_S)
    made.serve(PROMPT)
    assert made.serve(PROMPT) == NUM_BLOCKS


def _warnings(caplog):
    return [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.usefixtures("_no_pause")
def test_a_full_server_costs_hits_and_one_warning(host, serve, caplog):
    # There is no room for anything.
    server = serve(maxmemory="1", maxmemory_policy="noeviction")
    made = host(server.url)
    for prompt in (PROMPT, PROMPT[::-1], PROMPT):
        assert made.serve(prompt) == 0
    assert made.stats["put_failures_OutOfMemoryError_total"] >= 3
    assert len(_warnings(caplog)) == 1
    server.run("CONFIG", "SET", "maxmemory", "0")
    made.serve(PROMPT)
    assert made.serve(PROMPT) == NUM_BLOCKS


def test_a_read_only_replica_serves_what_it_has(host, server, caplog):
    made = host(server.url)
    made.serve(PROMPT)
    server.run("REPLICAOF", "127.0.0.1", "1")
    assert made.serve(PROMPT) == NUM_BLOCKS
    assert made.serve(PROMPT[::-1]) == 0
    assert made.serve(PROMPT[::-1]) == 0
    assert made.stats["put_failures_ReadOnlyError_total"] >= 2
    assert len(_warnings(caplog)) == 1


def test_a_damaged_block_is_computed(host, server):
    made = host(server.url)
    made.serve(PROMPT)
    with server.client() as client:
        names = client.keys("wtransfer:*")
        assert len(names) >= NUM_BLOCKS
        for name in names:
            value = bytearray(client.get(name))
            value[-1] ^= 1
            client.set(name, bytes(value))
    assert made.serve(PROMPT) == 0
    made.serve(PROMPT)
    assert made.serve(PROMPT) == NUM_BLOCKS


def test_nothing_of_the_url_is_logged_or_told(host, serve, caplog):
    caplog.set_level(logging.DEBUG)
    server = serve(requirepass="right")
    made = host(f"unix://{server.socket}?password=hunter2")
    assert made.serve(PROMPT) == 0
    assert made.stats["put_failures_AuthenticationError_total"] >= 1
    assert "hunter2" not in caplog.text
