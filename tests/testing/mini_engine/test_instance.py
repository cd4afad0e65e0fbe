"""Serving instances as processes: what they serve and refuse, and how they end; their router."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from wtransfer.errors import OffloadingOptionError, PeerLostError, StallError, UnknownBackendError
from wtransfer.testing.leftovers import Leftovers
from wtransfer.testing.mini_engine import instance as instance_module
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.instance import Instance
from wtransfer.testing.mini_engine.reference import some_prompts
from wtransfer.testing.mini_engine.router import Handed, Router

BLOCK_SIZE = 16
SEED = 3
ONE, OTHER = some_prompts(2)
SHM = {"connector": "SharedMemoryConnector", "options": {"staging_bytes": 4 << 20}}


@pytest.fixture
def spawn(zygote, tmp_path):
    """Starts processes as an instance wants them, and notes them."""
    started = []

    def start(target, address):
        log = tmp_path / f"process-{len(started)}.log"
        started.append(zygote.spawn(target, address, stdout=log, stderr=log))
        return started[-1]

    start.started = started
    return start


@pytest.fixture
def begin(spawn):
    """Maker of instances; each ends with the test."""
    made = []

    def make(name, **settings):
        cache = CacheShape(BLOCK_SIZE, 64)
        config = EngineConfig(**{"cache": cache, "engine_id": name, "seed": SEED, **settings})
        made.append(Instance(config, spawn))
        return made[-1]

    yield make
    for each in made:
        # An interpreter's exit is a second of CPU, and spared but where it is looked at.
        for process in each.processes:
            process.kill()
        each.close()


def is_there(process):
    return Path(f"/proc/{process.pid}").exists()


def all_gone(processes, within_s=10.0):
    end = time.monotonic() + within_s
    while any(map(is_there, processes)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_there, processes))


def kill_soon(process):
    """Kill a process while its instance is serving."""
    threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL)).start()


# -- serving


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_answer_has_the_counts_and_times_of_its_request(kit, begin, num_ranks):
    instance = begin("one", num_ranks=num_ranks)
    num_cached = []
    for step in range(3):
        if step == 2:
            instance.forget_cache()
        answer = instance.ask(ONE, kit.NEW_TOKENS)
        assert (answer.state, answer.tokens) == ("finished", kit.reference(ONE, SEED))
        assert 0 < answer.first_token_s < answer.total_s
        assert answer.load_s is None
        num_cached.append(answer.counts["tokens_cached"])
        in_all = len(ONE) + kit.NEW_TOKENS - 1
        assert answer.counts["tokens_computed"] == in_all - num_cached[-1]
    assert num_cached == [0, (len(ONE) - 1) // BLOCK_SIZE * BLOCK_SIZE, 0]
    # Asked to end, all processes do so by themselves.
    assert instance.close() == [0] * (1 + num_ranks if num_ranks > 1 else 1)
    with pytest.raises(PeerLostError, match="one was closed"):
        instance.ask([1], 1)
    assert instance.close() == []


def test_late_request_is_aborted_and_its_answer_is_dropped(kit, begin, monkeypatch):
    instance = begin("one")
    # It would take some seconds.
    with pytest.raises(StallError, match=r"request 0 of one within 0.01 s"):
        instance.ask(ONE, 900, deadline_s=0.01)
    assert instance.ask(OTHER, kit.NEW_TOKENS).tokens == kit.reference(OTHER, SEED)
    counts = instance.ask(ONE, kit.NEW_TOKENS).counts
    in_all = len(ONE) + kit.NEW_TOKENS - 1
    assert counts["tokens_computed"] == in_all - counts["tokens_cached"], "nothing else is served"
    # One that ends before its abort: its answer arrives with the next.
    with monkeypatch.context() as patch:
        patch.setattr(instance._channel, "poll", lambda within_s: time.sleep(0.5))
        with pytest.raises(StallError):
            instance.ask([1], 1, deadline_s=0.1)
    assert instance.ask(OTHER, kit.NEW_TOKENS).tokens == kit.reference(OTHER, SEED)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_published_weights_equal_those_drawn_from_the_same_seed(kit, begin, trainer, num_ranks):
    settings = {"num_ranks": num_ranks, **SHM}
    prefill = begin("prefill", **{**settings, "seed": 0, **trainer.settings})
    router = Router(prefill, begin("decode", **settings))
    assert router.ask(ONE, 2).answer.counts.get("tokens_loaded", 0) == 0
    published = trainer.publish("step-1", SEED)
    assert published.result().ok, "an idle instance commits"
    answer = router.ask(OTHER, kit.NEW_TOKENS).answer
    assert answer.tokens == kit.reference(OTHER, SEED)
    assert answer.counts["tokens_loaded"] >= BLOCK_SIZE


# -- what is wrong


@pytest.mark.parametrize(
    ("prompt", "count", "reason"),
    [
        ([], 4, "request 'request-0' has no prompt"),
        ([1, 2], 0, "or nothing to generate"),
        ([1] * (64 * BLOCK_SIZE), 2, "needs 65 blocks; the cache has 64"),
        ([1, 2, 256], 4, "token 2 of the prompt is 256; the model knows 0 to 255"),
        ([1, -1], 4, "token 1 of the prompt is -1"),
        (["one"], 4, "that is no request: Expected `int`, got `str`"),
        ([1.5], 4, "that is no request: Expected `int`, got `float`"),
    ],
)
def test_invalid_request_is_refused_and_the_next_is_served(kit, begin, prompt, count, reason):
    instance = begin("one")
    with pytest.raises(ValueError, match=reason):
        instance.ask(prompt, count)
    assert instance.ask([7], kit.NEW_TOKENS).tokens == kit.reference([7], SEED)


@pytest.mark.parametrize(
    ("connector", "num_ranks", "error", "text"),
    [
        ("NoSuchConnector", 2, UnknownBackendError, "NoSuchConnector"),
        ("SharedStorageConnector", 1, OffloadingOptionError, "shared_storage_path"),
    ],
)
def test_start_raises_the_error_of_an_invalid_configuration(  # noqa: PLR0917
    begin, spawn, connector, num_ranks, error, text
):
    with pytest.raises(error, match=text):
        begin("one", connector=connector, num_ranks=num_ranks)
    assert len(spawn.started) == (1 if num_ranks == 1 else 1 + num_ranks)
    assert not any(map(is_there, spawn.started))


def test_process_that_ends_at_once_fails_the_start(zygote, tmp_path):
    def spawn(target, address):
        log = tmp_path / "log"
        return zygote.spawn("no_such_module:main", address, stdout=log, stderr=log)

    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"early has ended .1. before it began"):
        Instance(EngineConfig(engine_id="early"), spawn)
    assert time.monotonic() - began < instance_module.PATIENCE_S / 2


# -- death


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_instance_is_named_and_leaves_nothing(begin, num_ranks):
    # What a process has once and keeps.
    begin("before", **SHM).close()
    leftovers = Leftovers()
    instance = begin("victim", num_ranks=num_ranks, **SHM)
    processes = list(instance.processes)
    instance.ask(OTHER, 1, {"do_remote_decode": True})
    kill_soon(processes[0])
    for call in (lambda: instance.ask(ONE, 900), instance.forget_cache):
        with pytest.raises(PeerLostError, match=r"victim (has ended|is gone)") as caught:
            call()
        assert caught.value.worker == "victim"
    assert all_gone(processes)
    assert len(processes) == (1 + num_ranks if num_ranks > 1 else 1)
    assert instance.close()[0] == -signal.SIGKILL
    del caught
    assert leftovers.found() == []


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_rank_is_named_and_ends_its_instance(begin, rank):
    instance = begin("victim", num_ranks=2)
    processes = list(instance.processes)
    instance.ask(OTHER, 1)
    kill_soon(processes[1 + rank])
    with pytest.raises(PeerLostError, match=f"victim has ended: rank {rank} ") as caught:
        instance.ask(ONE, 900)
    assert caught.value.worker == "victim"
    assert all_gone(processes)


def test_stopped_instance_is_late_and_is_killed_at_close(begin, monkeypatch):
    monkeypatch.setattr(instance_module, "END_S", 0.2)
    instance = begin("still")
    os.kill(instance.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(StallError, match=r"request 0 of still within 0.1 s") as caught:
        instance.ask(ONE, 900, deadline_s=0.1)
    assert caught.value.worker == "still"
    assert instance.close() == [-signal.SIGKILL]


# -- the router; with a prefill instance that is killed, or missing, it is proven by the demo


@pytest.fixture
def pair(begin):
    return [begin(name, **SHM) for name in ("prefill", "decode")]


def test_parameters_of_a_failed_prefill_are_not_passed_on(kit, pair):
    """Its blocks may be there in part only, or be gone by then."""
    router = Router(*pair)
    handed = router.hand_over(ONE)
    assert handed.answer.kv_transfer_params is not None
    routed = router.go_on(ONE, kit.NEW_TOKENS, Handed(handed.answer, "it has failed"))
    assert routed.answer.counts.get("tokens_loaded", 0) == 0
    assert routed.answer.tokens == kit.reference(ONE, SEED)


def test_stopped_prefill_instance_is_passed_over(kit, pair):
    router = Router(*pair, prefill_deadline_s=0.2)
    (process,) = pair[0].processes
    os.kill(process.pid, signal.SIGSTOP)
    routed = router.ask(ONE, kit.NEW_TOKENS)
    assert routed.answer.tokens == kit.reference(ONE, SEED)
    assert "request 0 of prefill within 0.2 s" in routed.handed.why
    os.kill(process.pid, signal.SIGCONT)
    end = time.monotonic() + 10.0
    while (routed := router.ask(OTHER, kit.NEW_TOKENS)).handed.why is not None:
        assert time.monotonic() < end
    assert routed.answer.tokens == kit.reference(OTHER, SEED)


def test_router_raises_what_an_instance_refuses(pair):
    with pytest.raises(ValueError, match="prefill refuses request 0: token 0"):
        Router(*pair).ask([999], 1)
