"""Models with windows or linear attention in a live vLLM: allocation, hits and tokens."""

import contextlib
import functools
import subprocess
import sys

import pytest
import tiny_models
from kv import (
    BLOCK_SIZE,
    LOCAL_HITS,
    OFFLOADING,
    PROMPTS,
    STORAGE,
    TIERING,
    check_same,
    count_hits,
    forget_prefixes,
    start,
)
from safetensors.torch import load_file
from test_live_kv_faults import block_files, flip
from test_live_kv_weights import held_offloading, run_until
from test_live_tiers import server  # noqa: F401  # a fixture

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]

NUM_TOKENS = 24
ASKED = [*PROMPTS, PROMPTS[0][: 4 * BLOCK_SIZE + 2], (PROMPTS[0] + PROMPTS[1])[: 20 * BLOCK_SIZE]]
"""Prompts of several windows, one of little more than a window, and one that begins as another."""
KINDS = {
    "gemma3": ["FullAttentionSpec", "SlidingWindowSpec"],
    "gpt_oss": ["FullAttentionSpec", "SlidingWindowSpec"],
    "mistral": ["SlidingWindowSpec"],
    "qwen3_next": ["FullAttentionSpec", "MambaSpec"],
}
OPTIONS = {"max_model_len": 1024, "kv_cache_memory_bytes": 8 << 20}
MORE = {"qwen3_next": {"dtype": "bfloat16", "enable_prefix_caching": True}}
"""Options of a model; vLLM computes linear attention on CPUs in this dtype only."""
RECOMPUTE = {"policy": "recompute"}


def same_for(kind):
    """Return the comparison of answers: a state is rounded where a prompt is computed in parts."""
    return functools.partial(check_same, within=0.15) if kind in MORE else check_same


class Twins:
    """Two models of each configuration, A and B, made when they are asked for."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, kind, name="A"):
        model = self.folder / f"{kind}-{name}"
        if not model.exists():
            tiny_models.make_twin(model, tiny_models.HYBRID[kind], ord(name))
            command = [sys.executable, "-m", "wtransfer", "seal", str(model / "model")]
            subprocess.run(command, check=True, timeout=60)
        return model / "model"

    def weights(self, kind, name):
        return load_file(self(kind, name) / "model.safetensors")


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return Twins(tmp_path_factory.mktemp("hybrid"))


class Fresh:
    """A fresh vLLM of each model without us, asked once, and then again."""

    def __init__(self, twins, folder):
        self.twins, self.folder, self.known = twins, folder, {}

    def __call__(self, kind, name="A"):
        if (kind, name) not in self.known:
            options = OPTIONS | MORE.get(kind, {})
            engine = start(self.folder, self.twins(kind, name), **options)
            with contextlib.closing(engine):
                answers = engine.do("answer", ASKED, NUM_TOKENS)
                forget_prefixes(engine)
                again = [
                    count_hits(engine, lambda: engine.do("answer", ASKED, NUM_TOKENS), LOCAL_HITS)
                    for _ in range(2)
                ]
                self.known[kind, name] = answers, again[1][1], engine.do("kv_cache")
        return self.known[kind, name]


@pytest.fixture(scope="module")
def fresh(twins, tmp_path_factory):
    """Maker of a fresh engine's answers, the hits of its own prefix cache, and its KV cache."""
    return Fresh(twins, tmp_path_factory.mktemp("fresh"))


@pytest.fixture
def engines(twins, tmp_path):
    """Maker of engines with a connector, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(kind, connector, name="A", **options):
            env = {"WTRANSFER_CACHE": str(tmp_path / "cache")}
            options = OPTIONS | MORE.get(kind, {}) | options
            made = start(tmp_path, twins(kind, name), connector, env=env, **options)
            stack.callback(made.close)
            return made

        yield make


def answer(engine):
    return count_hits(engine, lambda: engine.do("answer", ASKED, NUM_TOKENS))


def valkey_tier(url):
    return "wtransfer-OffloadingConnector", lambda _: {"tier": "valkey", "url": url}


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (kind, place)
        for kind in KINDS
        for place in ("memory", "storage", "arena over file", "valkey")
    ],
)
def test_what_vllms_own_prefix_cache_would_hit_is_loaded_at_the_memory_of_no_connector(
    engines, fresh, request, kind, place
):
    expected, local_hits, cache = fresh(kind)
    if place == "valkey":
        connector = valkey_tier(request.getfixturevalue("server").url)
    else:
        connector = {"memory": OFFLOADING, "storage": STORAGE, "arena over file": TIERING}[place]
    engine = engines(kind, connector)
    assert engine.do("kv_cache") == cache
    assert sorted(cache[2]) == KINDS[kind]
    computed, hits = answer(engine)
    same_for(kind)(computed, expected)
    assert hits == 0
    forget_prefixes(engine)
    if place != "memory":
        engine.close()
        engine = engines(kind, connector)
    # A request that waits for what another one loads finds it in vLLM's own prefix cache.
    (loaded, hits), shared = count_hits(engine, lambda: answer(engine), LOCAL_HITS)
    same_for(kind)(loaded, expected)
    assert hits > local_hits // 2
    assert hits + shared == local_hits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [0, 1])
def test_block_of_one_group_that_is_lost_costs_hits_only(engines, fresh, tmp_path, kind, group):
    if group >= len(KINDS[kind]):
        pytest.skip("it has one group")
    expected, local_hits, _ = fresh(kind)
    answer(engines(kind, STORAGE))
    of_group = [file for file in block_files(tmp_path) if is_of(group, file)]
    for file in of_group[::2]:
        file.unlink()
    again, hits = answer(engines(kind, STORAGE))
    same_for(kind)(again, expected)
    assert hits < local_hits


def is_of(group, file):
    """Return whether a block's file is of a group: before the rank, of two bytes, at the end."""
    return file.stem[-12:-4] == f"{group:08x}"


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_blocks_are_computed(engines, fresh, tmp_path, kind):
    expected, local_hits, _ = fresh(kind)
    engine = engines(kind, STORAGE, kv=RECOMPUTE)
    answer(engine)
    for file in block_files(tmp_path)[::3]:
        flip(file)
    forget_prefixes(engine)
    same_for(kind)(answer(engine)[0], expected)
    # They were removed and stored again.
    block_files(tmp_path)
    forget_prefixes(engine)
    (again, hits), shared = count_hits(engine, lambda: answer(engine), LOCAL_HITS)
    same_for(kind)(again, expected)
    # A state is kept again where vLLM, which now computes from elsewhere, ends a step there.
    assert hits + shared == local_hits or (kind == "qwen3_next" and hits > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_load_that_is_not_reported_is_computed_in_other_blocks(engines, fresh, tmp_path, kind):
    gate = tmp_path / "gate"
    options = held_offloading(tmp_path) | {"spoils": True, "deadline_s": 1.0}
    engine = engines(kind, ("wtransfer-OffloadingConnector", lambda _: options), kv=RECOMPUTE)
    answer(engine)
    forget_prefixes(engine)
    gate.touch()
    same_for(kind)(answer(engine)[0], fresh(kind)[0])
    gate.unlink()
    same_for(kind)(answer(engine)[0], fresh(kind)[0])
    forget_prefixes(engine)
    same_for(kind)(answer(engine)[0], fresh(kind)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_too_little_memory_on_both_sides_costs_hits_only(engines, fresh, kind):
    """Requests wait for blocks and lose them; kept are blocks of some groups, and not of others."""
    few = ("wtransfer-OffloadingConnector", lambda _: {"cpu_bytes_to_use": 3 << 19})
    engine = engines(kind, few, kv_cache_memory_bytes=5 << 19)
    expected = fresh(kind)[0]
    found = []
    for _ in range(3):
        served, hits = count_hits(engine, lambda: engine.do("answer", ASKED * 5, NUM_TOKENS))
        same_for(kind)(served, expected * 5)
        forget_prefixes(engine)
        found.append(hits)
    assert sum(found) > 0


@pytest.fixture
def serving(engines, twins, changing):
    """Maker of an engine with a connector, and of what publishes to it."""

    def make(kind, connector, **options):
        engine = engines(kind, connector, weight_transfer_config={"backend": "shm"}, **options)
        return engine, changing(engine, of=functools.partial(twins.weights, kind))

    return make


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_ten_updates_under_load_leave_no_stale_token_and_end_no_request(
    serving, fresh, tmp_path, kind, policy
):
    connector = "wtransfer-OffloadingConnector", held_offloading
    engine, change_to = serving(kind, connector, kv={"policy": policy})
    expected = {name: fresh(kind, name)[0] for name in "AB"}
    same_for(kind)(answer(engine)[0], expected["A"])
    gate = tmp_path / "gate"
    for number, name in enumerate("BABABABABA"):
        forget_prefixes(engine)
        # The load of one is held, another is in the midst of its tokens, under the old weights.
        gate.touch()
        held, running = f"held load {number}", f"running {number}"
        engine.do("begin", held, ASKED[0], NUM_TOKENS)
        engine.do("begin", running, ASKED[1], 200)
        state = engine.do("step", 30)
        assert not state["tokens"][held]
        change_to(name)
        gate.unlink()
        state = run_until(engine, held, running)
        assert (state["ended"][held], state["ended"][running]) == ("length", "length")
        same_for(kind)(answer(engine)[0], expected[name])
        forget_prefixes(engine)
        served, hits = answer(engine)
        same_for(kind)(served, expected[name])
        assert hits > 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_requests_that_keep_their_kv_over_an_update_is_found(serving, fresh, kind):
    engine, change_to = serving(kind, OFFLOADING)
    engine.do("keep_in_flight", True)
    names = [f"kept {number}" for number in range(len(ASKED))]
    for name, prompt in zip(names, ASKED, strict=True):
        engine.do("begin", name, prompt, 200)
    engine.do("step", 30)
    before = engine.do("progress")
    change_to("B")
    engine.do("step", 1)
    assert engine.do("progress") == {name: number + 1 for name, number in before.items()}
    state = run_until(engine, *names)
    assert [each[4] for name in names for each in state["spans"][name]] == [False, True] * 4
    served, hits = answer(engine)
    same_for(kind)(served, fresh(kind, "B")[0])
    forget_prefixes(engine)
    served, again = answer(engine)
    same_for(kind)(served, fresh(kind, "B")[0])
    assert (hits, again > 0) == (0, True)
    change_to("A")
    forget_prefixes(engine)
    same_for(kind)(answer(engine)[0], fresh(kind, "A")[0])


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_load_what_they_have_stored(engines, kind):
    # They add in another order than one does.
    alone = engines(kind, None, ranks=2)
    expected = alone.do("answer", ASKED, NUM_TOKENS)
    alone.close()
    engine = engines(kind, OFFLOADING, ranks=2)
    computed, hits = answer(engine)
    same_for(kind)(computed, expected)
    assert hits == 0
    forget_prefixes(engine)
    loaded, hits = answer(engine)
    same_for(kind)(loaded, expected)
    assert hits > 0
