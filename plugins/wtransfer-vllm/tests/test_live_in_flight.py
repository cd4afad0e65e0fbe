"""Requests that keep their KV over a commit: nothing is computed again, nor found by another."""

import contextlib
import random

import pytest
from kv import (
    BLOCK_SIZE,
    LOCAL_HITS,
    MULTI,
    OFFLOADING,
    STORAGE,
    TIERING,
    check_same,
    count_hits,
    forget_prefixes,
    start,
)
from test_live_kv_faults import block_files
from test_live_kv_weights import run_until

from wtransfer_vllm import in_flight

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

NUM_TOKENS = 16
"""Tokens of the answers that are compared."""
NUM_KEPT = 8
STEP_TOKENS = 128
"""Most tokens that a step computes."""
CONNECTORS = {
    "storage": STORAGE,
    "offloading": OFFLOADING,
    "arena over file": TIERING,
    "multi": MULTI,
}


def texts_of(prompts, tokens):
    """Return the texts of requests that have ended, and others that begin as they do."""
    whole = [prompts[name] + tokens[name] for name in prompts]
    cuts = [each[: len(each) - cut] for cut in range(1, 13) for each in whole]
    return whole, [[*each, 7, number % 200 + 3] for number, each in enumerate(cuts)]


def as_prompts(texts):
    return [{"prompt_token_ids": each} for each in texts]


@pytest.fixture
def engines(sealed, tmp_path):
    """Maker of engines, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(name, connector=None, **options):
            env = {"WTRANSFER_CACHE": str(tmp_path / "cache"), in_flight.VARIABLE: "keep"}
            engine = start(tmp_path, sealed / name, connector, env=env, **options)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def serving(engines, changing):
    """Maker of an engine with model A, and of what publishes to it."""

    def make(connector, **options):
        options |= {"max_num_batched_tokens": STEP_TOKENS}
        config = {"backend": "shm"}
        engine = engines("A", connector, weight_transfer_config=config, **options)
        return engine, changing(engine)

    return make


def begin(engine):
    """Begin requests of different lengths; return their prompts. Half of the last is computed."""
    chosen = random.Random(0)
    prompts = {}
    for number in range(NUM_KEPT):
        name = f"kept {number}"
        is_last = number == NUM_KEPT - 1
        length = 3 * STEP_TOKENS if is_last else 20 + 25 * number
        prompts[name] = chosen.choices(range(3, 250), k=length)
        if is_last:
            engine.do("step", 40)
        engine.do("begin", name, {"prompt_token_ids": prompts[name]}, 100)
    engine.do("step", 2)
    return prompts


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param(kind, policy, marks=[pytest.mark.nightly] if kind != "storage" else [])
        for kind, policy in [
            ("storage", "recompute"),
            ("offloading", "fail"),
            ("arena over file", "recompute"),
            ("multi", "recompute"),
        ]
    ],
)
def test_kept_requests_compute_nothing_again_and_nothing_of_theirs_is_found(
    serving, engines, tmp_path, kind, policy
):
    engine, change_to = serving(CONNECTORS[kind], kv={"policy": policy})
    fresh = {name: engines(name) for name in "AB"}

    def files():
        return block_files(tmp_path) if kind == "storage" else None

    def ask(texts, of=engine):
        return of.do("answer", as_prompts(texts), NUM_TOKENS)

    prompts = begin(engine)
    before, stored = engine.do("progress"), files()
    change_to("B")
    assert engine.do("progress") == before
    engine.do("step", 1)
    after = engine.do("progress")
    num_new = [after[name] - before[name] for name in before]
    assert num_new == [1] * (NUM_KEPT - 1) + [STEP_TOKENS - NUM_KEPT + 1]
    state = run_until(engine, *prompts)
    on_older_kv = [[each[4] for each in state["spans"][name]] for name in prompts]
    assert on_older_kv == [[False, True]] * (NUM_KEPT - 1) + [[True]]
    assert files() == stored
    whole, shared = texts_of(prompts, state["tokens"])
    expected = {name: ask(whole + shared, each) for name, each in fresh.items()}
    # At first those that share nothing with each other.
    (served, local), hits = count_hits(
        engine, lambda: count_hits(engine, lambda: ask(whole), LOCAL_HITS)
    )
    assert (local, hits) == (0, 0)
    check_same(served, expected["B"][:NUM_KEPT])
    check_same(ask(shared), expected["B"][NUM_KEPT:])
    # Blocks that were full before the commit are of the weights before, and found with them.
    change_to("A")
    forget_prefixes(engine)
    served, hits = count_hits(engine, lambda: ask(whole))
    check_same(served, expected["A"][:NUM_KEPT])
    assert 0 < hits <= sum(number // BLOCK_SIZE * BLOCK_SIZE for number in before.values())
    assert engine.do("counters")["vllm:num_preemptions"] == 0
