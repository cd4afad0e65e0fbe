"""KV connectors by their names in a live vLLM: hits, and the tokens of a fresh one."""

import contextlib

import pytest
from kv import (
    BLOCK_SIZE,
    PROMPTS,
    TO_A_STORE,
    TO_ANOTHER,
    check_same,
    count_hits,
    forget_prefixes,
    install_third_parties,
    start,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

IN_ONE = {"processes": 1}
IN_THREE = {"processes": 3}
TWO_RANKS = {"ranks": 2}
nightly = pytest.mark.nightly


SHORTEST = {"third-party spec", "shared memory"}


def shapes(kinds):
    """Return each kind in one process; all but the shortest are nightly."""
    found = []
    for kind in kinds:
        in_one = [] if kind in SHORTEST else [nightly]
        found += [
            pytest.param(kind, IN_ONE, id=f"{kind}, one process", marks=in_one),
            pytest.param(kind, IN_THREE, id=f"{kind}, three processes", marks=[nightly]),
        ]
        if kind not in {"third party", "third-party spec"}:
            # Those keep one file for all ranks.
            found.append(pytest.param(kind, TWO_RANKS, id=f"{kind}, two ranks", marks=[nightly]))
    return found


@pytest.fixture(scope="module")
def third_parties(tmp_path_factory):
    return install_third_parties(tmp_path_factory.mktemp("third-parties"))


@pytest.fixture(scope="module")
def fresh(fresh_kv, sealed, tmp_path_factory):
    """Maker of the answers of a fresh vLLM without us, by number of ranks; each made once."""
    made = {1: fresh_kv["A"]}

    def answers(ranks=1):
        if ranks not in made:
            engine = start(tmp_path_factory.mktemp("fresh"), sealed / "A", ranks=ranks)
            made[ranks] = engine.do("answer", PROMPTS)
            engine.close()
        return made[ranks]

    return answers


@pytest.fixture
def engines(sealed, third_parties, tmp_path):
    """Maker of engines with a connector, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(connector, *, env=None, model="A", **options):
            env = third_parties | {"WTRANSFER_CACHE": str(tmp_path / "cache")} | (env or {})
            engine = start(tmp_path, sealed / model, connector, env=env, **options)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.mark.covers("connectors", "specs", release="0.32.0", how="live")
@pytest.mark.parametrize(("kind", "shape"), shapes(TO_A_STORE))
def test_a_prefix_comes_back_by_the_connector_with_the_tokens_of_a_fresh_vllm(
    engines, fresh, kind, shape
):
    engine = engines(TO_A_STORE[kind], **shape)
    expected = fresh(shape.get("ranks", 1))
    computed, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
    check_same(computed, expected)
    assert hits == 0
    forget_prefixes(engine)
    loaded, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
    check_same(loaded, expected)
    assert hits >= len(PROMPTS) * 6 * BLOCK_SIZE


@nightly
@pytest.mark.parametrize("kind", ["offloading", "storage"])
def test_with_speculative_decoding_what_was_stored_is_found(engines, fresh, kind):
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    engine = engines(TO_A_STORE[kind], speculative_config=speculation)
    check_same(engine.do("answer", PROMPTS), fresh())
    forget_prefixes(engine)
    loaded, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
    check_same(loaded, fresh())
    assert hits >= len(PROMPTS) * 6 * BLOCK_SIZE


@pytest.mark.parametrize(("kind", "shape"), shapes(TO_ANOTHER))
def test_a_decode_instance_loads_what_the_prefill_instance_has_computed(
    engines, fresh, kind, shape
):
    # A worker of vLLM spins while it waits: two of them on one core would starve our threads.
    # Four of them on two cores are not bound, so that a thread of ours runs wherever one yields.
    bound = {1: "01", 2: ["nobind"] * 2}[shape.get("ranks", 1)]
    cores = [{} if shape == IN_ONE else {"VLLM_CPU_OMP_THREADS_BIND": core} for core in bound]
    prefill = engines(TO_ANOTHER[kind], kv={"role": "kv_producer"}, env=cores[0], **shape)
    decode = engines(TO_ANOTHER[kind], kv={"role": "kv_consumer"}, env=cores[1], **shape)
    wish = [{"do_remote_decode": True}] * len(PROMPTS)
    transfers = [each["transfer"] for each in prefill.do("answer", PROMPTS, 1, wish)]
    served, hits = count_hits(decode, lambda: decode.do("answer", PROMPTS, 16, transfers))
    check_same(served, fresh(shape.get("ranks", 1)))
    assert hits >= len(PROMPTS) * 6 * BLOCK_SIZE
