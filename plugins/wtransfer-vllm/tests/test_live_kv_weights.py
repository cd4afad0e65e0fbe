"""No stale KV in a live vLLM: weights A, B and A again while requests run and loads are held."""

import contextlib
import time

import pytest
from kv import (
    LOCAL_HITS,
    OFFLOADING,
    PROMPTS,
    STORAGE,
    check_same,
    count_hits,
    forget_prefixes,
    start,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

NUM_TOKENS = 40


def held_offloading(folder):
    return {
        "spec_name": "HeldSpec",
        "spec_module_path": "held_spec",
        "gate": f"{folder}/gate",
        "cpu_bytes_to_use": 64 << 20,
    }


@pytest.fixture(scope="module")
def fresh(fresh_kv_of):
    """Model's name -> the answers of a fresh vLLM of its own: tokens, and how probable they are."""
    return fresh_kv_of(NUM_TOKENS)


@pytest.fixture
def engines(sealed, tmp_path):
    """Maker of engines with model A, each with a gate for its loads."""
    with contextlib.ExitStack() as stack:

        def make(connector, **options):
            env = {"WTRANSFER_CACHE": str(tmp_path / "cache")}
            options |= {"weight_transfer_config": {"backend": "shm"}}
            engine = start(tmp_path, sealed / "A", connector, env=env, **options)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def serving(engines, changing):
    """Maker of such an engine, and of what publishes to it."""

    def make(connector, **options):
        engine = engines(connector, **options)
        return engine, changing(engine, deadline_s=10)

    return make


def run_until(engine, *names):
    """Take steps until requests have ended; return how they ended, and their tokens."""
    limit = time.monotonic() + 60
    while True:
        state = engine.do("step", 20)
        if all(name in state["ended"] for name in names):
            return state
        assert time.monotonic() < limit, f"not ended: {state['ended']}"


@pytest.mark.parametrize(
    "processes", [1, pytest.param(3, marks=pytest.mark.nightly)], ids="{} processes".format
)
@pytest.mark.parametrize("policy", ["fail", pytest.param("recompute", marks=pytest.mark.nightly)])
def test_a_commit_beside_a_held_load_leaves_no_stale_token_no_error_and_prefix_caching_on(
    serving, fresh, tmp_path, policy, processes
):
    engine, change_to = serving(
        ("wtransfer-OffloadingConnector", held_offloading),
        processes=processes,
        kv={"policy": policy},
    )
    check_same(engine.do("answer", PROMPTS, NUM_TOKENS), fresh["A"])
    gate = tmp_path / "gate"
    for number, name in enumerate("BAB"):
        forget_prefixes(engine)
        # The load of one is held, another is in the midst of its tokens, under the old weights.
        gate.touch()
        held, running = f"held load {number}", f"running {number}"
        engine.do("begin", held, PROMPTS[0], NUM_TOKENS)
        engine.do("begin", running, "something else", 200)
        state = engine.do("step", 30)
        assert not state["tokens"][held]
        assert 0 < len(state["tokens"][running]) < 200
        change_to(name)
        # Still held. What the first computes is in vLLM's own prefix cache for the second.
        before = engine.do("counters")[LOCAL_HITS]
        for each in (f"first {number}", f"second {number}"):
            engine.do("begin", each, f"A prompt of its own, {number}. " * 12, 4)
            assert held not in run_until(engine, each)["ended"]
        assert engine.do("counters")[LOCAL_HITS] > before
        gate.unlink()
        state = run_until(engine, held, running)
        assert (state["ended"][held], state["ended"][running]) == ("length", "length")
        assert state["tokens"][held] == fresh[name][0]["tokens"]
        check_same(engine.do("answer", PROMPTS, NUM_TOKENS), fresh[name])


def test_request_that_has_loaded_and_waits_for_blocks_starts_over_at_a_commit(serving, fresh):
    engine, change_to = serving(OFFLOADING)
    check_same(engine.do("answer", PROMPTS, NUM_TOKENS), fresh["A"])
    forget_prefixes(engine)
    engine.do("defer_loaded")
    engine.do("begin", "loaded", PROMPTS[0], NUM_TOKENS)
    limit = time.monotonic() + 60
    while not (state := engine.do("step", 20))["num_deferred"]:
        assert time.monotonic() < limit, "nothing was loaded"
    assert not state["tokens"]["loaded"]
    change_to("B")
    engine.do("go_on")
    assert run_until(engine, "loaded")["tokens"]["loaded"] == fresh["B"][0]["tokens"]
    check_same(engine.do("answer", PROMPTS, NUM_TOKENS), fresh["B"])


def test_weights_that_come_back_find_their_own_blocks_again_also_in_a_second_vllm(serving, fresh):
    engine, change_to = serving(STORAGE)
    check_same(engine.do("answer", PROMPTS, NUM_TOKENS), fresh["A"])
    for name, num_known in (("B", 0), ("A", 2), ("B", 2)):
        change_to(name)
        served, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS, NUM_TOKENS))
        check_same(served, fresh[name])
        assert (hits > 0) == (num_known > 0)
    second, change_second_to = serving(STORAGE)
    served, hits = count_hits(second, lambda: second.do("answer", PROMPTS, NUM_TOKENS))
    check_same(served, fresh["A"])
    assert hits > 0
    # A label names nothing: this one is that of the other weights in the first vLLM.
    change_second_to("B", label="A")
    served, hits = count_hits(second, lambda: second.do("answer", PROMPTS, NUM_TOKENS))
    check_same(served, fresh["B"])
    assert hits > 0
