"""Serving instances as processes: what they serve, share, refuse, and how they end."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import pytest

from wtransfer.errors import (
    OffloadingOptionError,
    PeerLostError,
    StallError,
    UnknownBackendError,
)
from wtransfer.testing.leftovers import Leftovers
from wtransfer.testing.mini_engine import instance as instance_module
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.instance import Instance
from wtransfer.testing.mini_engine.router import Handed, Router

BLOCK_SIZE = 16
CONNECTORS = ("SharedMemoryConnector", "SharedStorageConnector")
SHELF_NBYTES = 4 << 20
SEED = 3
WRONG = {
    "NoSuchConnector": (UnknownBackendError, "NoSuchConnector"),
    "SharedStorageConnector": (OffloadingOptionError, "shared_storage_path"),
}
"""What cannot be made without options, and why not."""


@pytest.fixture
def prompts(kit):
    return kit.prompts(BLOCK_SIZE, 4)


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
def begin(spawn, tmp_path):
    """Maker of instances; each ends with the test."""
    made = []

    def make(name, connector=None, *, seed=SEED, **settings):
        options = {
            "SharedMemoryConnector": {"shelf_bytes": SHELF_NBYTES},
            "SharedStorageConnector": {"shared_storage_path": str(tmp_path / "shared")},
        }.get(connector, {})
        host = EngineConfig(
            cache=CacheShape(BLOCK_SIZE, 64),
            **{"connector": connector, "options": options, "engine_id": name, "seed": seed}
            | settings,
        )
        made.append(Instance(host, spawn))
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


# -- serving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [{}, pytest.param({"num_ranks": 2}, marks=pytest.mark.slow)])
def test_requests_are_collected_in_any_order(kit, begin, prompts, ranks):
    instance = begin("one", **ranks)
    numbers = [instance.submit(prompt, kit.NEW_TOKENS) for prompt in prompts]
    got = {number: instance.collect(number) for number in reversed(numbers)}
    assert [got[number].tokens for number in numbers] == kit.references(prompts, SEED)
    assert {each.state for each in got.values()} == {"finished"}
    assert all(0 < each.first_token_s < each.total_s for each in got.values())
    apart = 1 + ranks.get("num_ranks", 0)
    assert len(instance.processes) == apart
    # Asked to end, all do so by themselves.
    assert instance.close() == [0] * apart


def test_answer_has_the_counts_of_its_request(kit, begin, prompts):
    instance = begin("one")
    for cached in (0, 2 * BLOCK_SIZE):
        answer = instance.ask(prompts[0][: 2 * BLOCK_SIZE + 1], kit.NEW_TOKENS)
        assert answer.counts["tokens_cached"] == cached
        computed = 2 * BLOCK_SIZE + kit.NEW_TOKENS - cached
        assert answer.counts["tokens_computed"] == computed
    instance.forget_cache()
    answer = instance.ask(prompts[0], kit.NEW_TOKENS)
    assert answer.counts["tokens_cached"] == 0
    assert answer.load_s is None


def test_late_request_is_aborted_and_its_answer_is_dropped(kit, begin, prompts):
    instance = begin("one")
    # It would take some seconds.
    late = instance.submit(prompts[0], 900)
    with pytest.raises(StallError, match=f"request {late} of one within 0.01 s"):
        instance.collect(late, 0.01)
    assert instance.ask(prompts[1], kit.NEW_TOKENS).tokens == kit.reference(prompts[1], SEED)
    counts = instance.ask(prompts[0], kit.NEW_TOKENS).counts
    in_all = len(prompts[0]) + kit.NEW_TOKENS - 1
    assert counts["tokens_computed"] == in_all - counts["tokens_cached"], "nothing else is served"
    assert (instance._answers, instance._open) == ({}, set())
    with pytest.raises(ValueError, match=f"one has no request {late} to collect"):
        instance.collect(late)


# -- what is wrong --------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("connector", "num_ranks"), list(zip(WRONG, (2, 1), strict=True)))
def test_start_raises_the_error_of_an_invalid_configuration(begin, spawn, num_ranks, connector):
    error, text = WRONG[connector]
    with pytest.raises(error, match=text):
        begin("one", connector, options={}, num_ranks=num_ranks)
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


# -- death ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_instance_is_named_and_leaves_nothing(kit, begin, prompts, num_ranks):
    # Whatever is here once, for all.
    begin("before", "SharedMemoryConnector").close()
    leftovers = Leftovers()
    instance = begin("victim", "SharedMemoryConnector", num_ranks=num_ranks)
    processes = list(instance.processes)
    number = instance.submit(prompts[0], 900)
    instance.ask(prompts[1], 1, {"do_remote_decode": True})
    instance.kill()
    for call in (
        lambda: instance.collect(number),
        lambda: instance.submit(prompts[0], 1),
        instance.forget_cache,
    ):
        with pytest.raises(PeerLostError, match=r"victim (has ended|is gone)") as caught:
            call()
        assert caught.value.worker == "victim"
    assert all_gone(processes)
    assert len(processes) == 1 + (num_ranks if num_ranks > 1 else 0)
    assert instance.close()[0] == -signal.SIGKILL
    del caught
    assert leftovers.found() == []


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_rank_is_named_and_ends_its_instance(begin, prompts, rank):
    instance = begin("victim", num_ranks=2)
    processes = list(instance.processes)
    number = instance.submit(prompts[0], 900)
    instance.ask(prompts[1], 1)
    os.kill(processes[1 + rank].pid, signal.SIGKILL)
    with pytest.raises(PeerLostError, match=f"victim has ended: rank {rank} ") as caught:
        instance.collect(number)
    assert caught.value.worker == "victim"
    assert all_gone(processes)


def test_stopped_instance_is_late_and_is_killed_at_close(begin, prompts, monkeypatch):
    monkeypatch.setattr(instance_module, "END_S", 0.2)
    instance = begin("still")
    (process,) = instance.processes
    number = instance.submit(prompts[0], 900)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(StallError, match=f"request {number} of still within 0.1 s") as caught:
        instance.collect(number, 0.1)
    assert caught.value.worker == "still"
    assert instance.close() == [-signal.SIGKILL]


def test_closed_instance_refuses_requests(begin):
    instance = begin("one")
    instance.close()
    with pytest.raises(PeerLostError, match="one was closed"):
        instance.submit([1], 1)
    assert instance.close() == []


# -- what instances share -------------------------------------------------------------------------


def settle(folder):
    """Wait until no more blocks are written to a folder."""
    before, now = None, []
    while now != before or not now:
        time.sleep(0.3)
        before, now = now, sorted(folder.glob("*/blocks/*"))


def handed(kit, prefill, decode, prompt):
    """Let one compute a prompt and the other go on with it; return what the other has loaded."""
    routed = Router(prefill, decode).ask(prompt, kit.NEW_TOKENS)
    assert routed.handed.why is None
    assert routed.answer.state == "finished"
    return routed.answer


@pytest.mark.parametrize(
    ("connector", "ranks"),
    [
        (CONNECTORS[0], {}),
        pytest.param(CONNECTORS[0], {"num_ranks": 2}, marks=pytest.mark.slow),
        (CONNECTORS[1], {}),
    ],
)
def test_instances_of_equal_weights_share_blocks(  # noqa: PLR0917
    kit, begin, prompts, tmp_path, connector, ranks
):
    prefill, decode = (begin(name, connector, **ranks) for name in ("prefill", "decode"))
    if connector == "SharedStorageConnector":
        # It stores beside the steps: blocks may arrive after the answer.
        for prompt in prompts:
            prefill.ask(prompt, 1)
        settle(tmp_path / "shared")
    num_loaded = 0
    for prompt in prompts:
        answer = handed(kit, prefill, decode, prompt)
        assert answer.tokens == kit.reference(prompt, SEED)
        # The document is common; its end may be handed on a moment later.
        assert answer.counts["tokens_loaded"] + answer.counts["tokens_cached"] >= BLOCK_SIZE
        num_loaded += answer.counts["tokens_loaded"]
    assert num_loaded >= 2 * len(prompts) * BLOCK_SIZE


@pytest.mark.parametrize("connector", CONNECTORS)
def test_instances_of_other_weights_share_nothing(kit, begin, prompts, connector):
    prefill, decode = begin("prefill", connector), begin("decode", connector, seed=SEED + 1)
    for prompt in prompts[:2]:
        answer = handed(kit, prefill, decode, prompt)
        assert answer.tokens == kit.reference(prompt, SEED + 1)
        assert answer.counts.get("tokens_loaded", 0) == 0


def test_published_weights_equal_those_drawn_from_the_same_seed(kit, begin, trainer, prompts):
    prefill = begin("prefill", "SharedMemoryConnector", seed=0, **kit.publisher_of(trainer))
    decode = begin("decode", "SharedMemoryConnector")
    assert handed(kit, prefill, decode, prompts[0]).counts.get("tokens_loaded", 0) == 0
    trainer.begin("step-1", SEED)
    assert trainer.result()[0], "an idle instance commits"
    answer = handed(kit, prefill, decode, prompts[1])
    assert answer.tokens == kit.reference(prompts[1], SEED)
    assert answer.counts["tokens_loaded"] >= BLOCK_SIZE


# -- the router -----------------------------------------------------------------------------------


@pytest.fixture
def pair(begin):
    return [begin(name, "SharedMemoryConnector") for name in ("prefill", "decode")]


def test_router_without_prefill_instance_says_so(kit, begin, prompts):
    routed = Router(None, begin("decode")).ask(prompts[0], kit.NEW_TOKENS)
    assert routed.handed.why == "there is no prefill instance"
    assert routed.answer.tokens == kit.reference(prompts[0], SEED)


def test_router_without_prefill_instance_gives_the_same_tokens(kit, begin, pair, prompts):
    router = Router(*pair)
    pair[0].kill()
    routed = router.ask(prompts[0], kit.NEW_TOKENS)
    assert routed.answer.tokens == kit.reference(prompts[0], SEED)
    assert routed.handed.answer is None
    assert "prefill has ended" in routed.handed.why
    router.prefill = begin("prefill-2", "SharedMemoryConnector")
    routed = router.ask(prompts[1], kit.NEW_TOKENS)
    assert routed.handed.why is None
    assert routed.answer.tokens == kit.reference(prompts[1], SEED)
    assert routed.answer.counts["tokens_loaded"] >= BLOCK_SIZE


def test_prefill_instance_killed_after_its_answer_costs_no_tokens(kit, pair, prompts):
    router = Router(*pair)
    handed_over = router.hand_over(prompts[0])
    assert handed_over.answer.kv_transfer_params["remote_num_tokens"] > 0
    pair[0].kill()
    answer = router.go_on(prompts[0], kit.NEW_TOKENS, handed_over).answer
    assert answer.tokens == kit.reference(prompts[0], SEED)
    assert (answer.counts.get("tokens_loaded", 0), answer.counts["loads_failed"]) == (0, 1)


def test_parameters_of_a_failed_prefill_are_not_passed_on(kit, pair, prompts):
    """It may name what is there in part only, or what is gone by then."""
    router = Router(*pair)
    handed = router.hand_over(prompts[0])
    assert handed.answer.kv_transfer_params is not None
    routed = router.go_on(prompts[0], kit.NEW_TOKENS, Handed(handed.answer, "it has failed"))
    assert routed.answer.counts.get("tokens_loaded", 0) == 0
    assert routed.answer.tokens == kit.reference(prompts[0], SEED)


def test_stopped_prefill_instance_is_passed_over(kit, pair, prompts):
    router = Router(*pair, prefill_deadline_s=0.2)
    (process,) = pair[0].processes
    os.kill(process.pid, signal.SIGSTOP)
    routed = router.ask(prompts[0], kit.NEW_TOKENS)
    assert routed.answer.tokens == kit.reference(prompts[0], SEED)
    assert "request 0 of prefill within 0.2 s" in routed.handed.why
    os.kill(process.pid, signal.SIGCONT)
    end = time.monotonic() + 10.0
    # It was told that nobody waits any more, or has ended it by then.
    for number in itertools.count():
        routed = router.ask(prompts[1], kit.NEW_TOKENS)
        if routed.handed.why is None:
            break
        assert time.monotonic() < end, number
    assert routed.answer.tokens == kit.reference(prompts[1], SEED)


def test_router_raises_what_an_instance_refuses(pair):
    with pytest.raises(ValueError, match="prefill refuses request 0: token 0"):
        Router(*pair).ask([999], 1)
