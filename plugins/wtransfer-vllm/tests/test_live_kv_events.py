"""Blocks of our tiers in vLLM's own KV events, as a router hears them by ZMQ."""

import contextlib

import pytest
from kv import BLOCK_SIZE, OFFLOADING, PROMPTS, STORAGE, count_hits, forget_prefixes, start
from router import CPU, GPU, TIER, Router
from test_live_hybrid import OPTIONS, twins  # noqa: F401  # a fixture

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]

SMALL = ("wtransfer-OffloadingConnector", lambda _: {"cpu_bytes_to_use": 1 << 20})
"""An arena with room for the prompts under two sets of weights, and for little more."""


@pytest.fixture
def routers():
    """Maker of routers."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(Router()))


@pytest.fixture
def engines(tmp_path):
    """Maker of engines that publish to a router."""
    with contextlib.ExitStack() as stack:

        def make(router, model, connector, **options):
            env = {"WTRANSFER_CACHE": str(tmp_path / "cache")}
            made = start(tmp_path, model, connector, env=env, **router.options, **options)
            stack.callback(made.close)
            return made

        yield make


def hits_of(engine, prompt):
    """Return the number of blocks that the connector loads for a prompt."""
    forget_prefixes(engine)
    _, hits = count_hits(engine, lambda: engine.do("answer", [prompt], 2))
    return hits // BLOCK_SIZE


def leading(chain, told):
    """Return how many blocks of a prompt are told, from the first on."""
    return ([each in told for each in chain] + [False]).index(False)


@pytest.mark.parametrize("processes", [1, 3])
def test_router_hears_what_a_tier_has_of_the_present_weights(
    routers, engines, changing, sealed, processes
):
    router = routers()
    weight_config = {"weight_transfer_config": {"backend": "shm"}}
    engine = engines(router, sealed / "A", SMALL, processes=processes, **weight_config)
    publish_to = changing(engine, deadline_s=10)

    def change_to(name):
        publish_to(name)
        # An engine core of its own takes a step for the events alone; here the test takes it, with
        # less than a block.
        if processes == 1:
            engine.do("answer", ["."], 2)

    engine.do("answer", PROMPTS, 2)
    # Block by block what vLLM says of its own cache: hash, parent, tokens, kind of group.
    router.wait_until(lambda: len(router.has[CPU]) == len(router.has[GPU]) >= 12)
    assert router.has[CPU] == router.has[GPU]
    chains = [router.chain(CPU, engine.do("tokens_of", each)) for each in PROMPTS]
    assert sum(map(len, chains)) == len(router.has[CPU])

    change_to("B")
    router.wait_until(lambda: not router.has[CPU] and not router.has[GPU])
    engine.do("answer", PROMPTS[:1], 2)
    router.wait_until(lambda: router.has[CPU])
    assert set(chains[0]) >= router.hashes(CPU), "a hash says nothing of the weights"

    # On the way back: what is there of those, and nothing of the weights between.
    change_to("A")
    router.wait_until(lambda: router.hashes(CPU) >= set(chains[1]))
    assert not router.has[GPU]
    assert router.hashes(CPU) == {*chains[0], *chains[1]}
    for prompt, chain in zip(PROMPTS, chains, strict=True):
        assert hits_of(engine, prompt) == len(chain)

    # Evicted blocks are told as removed: loaded are those that are still told.
    number = 0
    while leading(chains[1], router.hashes(CPU)) == len(chains[1]):
        engine.do("answer", [f"{number}, another prompt. " * 12], 2)
        number += 1
        router.listen()
    for prompt, chain in zip(PROMPTS, chains, strict=True):
        forget_prefixes(engine)
        router.listen()
        told = leading(chain, router.hashes(CPU))
        assert hits_of(engine, prompt) == told


def test_after_a_restart_blocks_of_a_folder_are_told_once_they_are_found(routers, engines, sealed):
    first, second = routers(), routers()
    engine = engines(first, sealed / "A", STORAGE)
    engine.do("answer", PROMPTS, 2)
    forget_prefixes(engine)
    first.wait_until(lambda: len(first.has[TIER]) >= 12)
    engine.close()
    engine = engines(second, sealed / "A", STORAGE)
    engine.do("answer", ["."], 2)
    second.listen()
    assert not second.has[TIER]
    _, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS[:1], 2))
    second.wait_until(lambda: second.has[TIER])
    assert hits // BLOCK_SIZE == len(second.has[TIER])
    assert second.has[TIER].items() <= first.has[TIER].items()
    assert second.has[TIER].items() <= second.has[GPU].items()


def test_groups_of_a_hybrid_model_are_told_apart(routers, engines, twins):  # noqa: F811
    router = routers()
    engine = engines(router, twins("gemma3"), OFFLOADING, **OPTIONS)
    engine.do("answer", PROMPTS, 2)
    router.wait_until(lambda: {group for group, _ in router.has[CPU]} == {0, 1})
    ours, theirs = router.has[CPU], router.has[GPU]
    common = ours.keys() & theirs.keys()
    assert {group for group, _ in common} == {0, 1}
    for each in common:
        # What vLLM says of a window's blocks may be their kind alone.
        assert ours[each][: len(theirs[each])] == theirs[each]
    # A hash is of a prefix, whatever the group.
    of_both = {block_hash for group, block_hash in ours if (1 - group, block_hash) in ours}
    assert of_both
    for block_hash in of_both:
        assert ours[0, block_hash][1:] == ours[1, block_hash][1:]
