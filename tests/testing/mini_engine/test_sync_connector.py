"""A connector of a third party that loads within the step: in the seed's style, found by module."""

from __future__ import annotations

import contextlib
import os

import pytest

from wtransfer.errors import UnknownBackendError
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits
from wtransfer.testing.mini_engine.model import LocalWeights
from wtransfer.testing.mini_engine.serialize import deserialize
from wtransfer.weight_version import process_weights

BLOCK_SIZE = 16


@pytest.fixture
def prompts(kit):
    return kit.prompts(BLOCK_SIZE, 4)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


@pytest.fixture
def settings(kit, prompts, folder):
    """Return settings of a host whose cache holds little more than one request."""
    largest = max(kit.blocks_for(prompt, BLOCK_SIZE) for prompt in prompts)

    def make(num_blocks=largest + 1, on_load_failure="recompute", num_ranks=1, **options):
        return EngineConfig(
            cache=CacheShape(BLOCK_SIZE, num_blocks),
            limits=Limits(max_num_batched_tokens=48),
            seed=3,
            connector="FolderConnector",
            module_path="folder_connector",
            options={"folder": str(folder), **options},
            on_load_failure=on_load_failure,
            num_ranks=num_ranks,
        )

    return make


@pytest.fixture
def change(serve):
    """Maker of a function that changes a host's weights, telling nobody but the process."""
    with contextlib.ExitStack() as stack:

        def watch(host):
            weights = LocalWeights(3, host.executor.worker.model)
            stack.callback(weights.close)
            return weights.change

        yield watch


def fill(kit, host, prompts, seed=3):
    for prompt in prompts:
        assert host.generate([prompt], kit.NEW_TOKENS) == [kit.reference(prompt, seed)]


def kept(folder):
    """Return what is kept, in the order in which it came."""
    paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return {path.name: path.read_bytes() for path in paths}


def test_connector_is_found_by_its_module_path(settings, serve):
    nowhere = EngineConfig(connector="FolderConnector", options=settings().options)
    with pytest.raises(UnknownBackendError, match="Unsupported connector type: FolderConnector"):
        serve(nowhere)
    assert serve(settings()).scheduler.connector.side is None


@pytest.mark.parametrize("lazily", [False, True])
def test_loads_within_the_step_give_the_reference_output(kit, serve, prompts, settings, lazily):
    host = serve(settings(lazily=lazily))
    for _ in range(2):
        fill(kit, host, prompts)
    counts = host.scheduler.counts
    assert counts["tokens_loaded"] > 0
    assert counts["steps_refused"] == counts["loads_failed"] == 0
    assert host.scheduler.pool.num_free == host.scheduler.pool.num_blocks
    kit.check_pool(host.scheduler.pool)


def test_step_that_needs_a_load_waits_for_it(kit, serve, prompts, settings):
    host = serve(settings())
    fill(kit, host, prompts)
    plans = kit.record(host)
    fill(kit, host, prompts[:1])
    first = next(plan for plan in plans if plan.spans)
    assert first.loads_first
    assert deserialize(first.connector_metadata).inner.loads
    assert first.spans[0].start == BLOCK_SIZE * (len(prompts[0]) // BLOCK_SIZE)
    assert [plan.loads_first for plan in plans].count(True) == 1


def test_ended_request_has_the_connectors_parameters(serve, prompts, settings):
    host = serve(settings())
    request = host.submit(prompts[0], 2, {"for": "the connector"})
    assert request.kv_transfer_params == {"for": "the connector"}
    host.run()
    said = {"seen": len(request.block_ids), "remote_weights": process_weights.version().fingerprint}
    assert request.kv_transfer_params == said


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_load_within_the_step_voids_the_step(
    kit, serve, prompts, *, settings, folder, lazily, policy
):
    """The step does not count, for nobody in it; what it has computed is not handed on."""
    host = serve(settings(num_blocks=32, on_load_failure=policy, lazily=lazily))
    fill(kit, host, prompts[:1])
    host.scheduler.pool.reset()
    # The last layer of the second block is gone: the first layers have been computed by then.
    before = kept(folder)
    name = list(before)[1]
    os.truncate(folder / name, len(before[name]) - 1)
    before[name] = before[name][:-1]
    other = host.submit(prompts[1], kit.NEW_TOKENS)
    request = host.submit(prompts[0], kit.NEW_TOKENS)
    while not host.scheduler.counts["loads_failed"]:
        saved = kept(folder)
        host.step()
    assert host.scheduler.counts["steps_refused"] == 1
    assert kept(folder) == saved, "nothing of that step is kept"
    host.run()
    assert other.output == kit.reference(prompts[1], 3)
    if policy == "fail":
        assert (request.state, request.output) == ("failed", [])
        assert request.error == "1 KV blocks could not be loaded"
    else:
        assert (request.state, request.output) == ("finished", kit.reference(prompts[0], 3))
        assert host.scheduler.counts["tokens_loaded"] == BLOCK_SIZE, "the blocks before it"
        assert kept(folder)[name] != before[name], "it is whole again"
    assert host.scheduler.pool.num_free == 32


def test_plan_of_earlier_weights_saves_nothing(kit, serve, prompts, *, settings, folder, change):
    host = serve(settings())
    to = change(host)
    fill(kit, host, prompts)
    before = kept(folder)
    request = host.submit([*prompts[0], 1], kit.NEW_TOKENS)
    plan = host.scheduler.plan()
    assert plan.loads_first
    to(4)
    (result,) = host.executor.step(plan)
    assert result.tokens is None
    assert kept(folder) == before
    host.scheduler.update(plan, [result])
    assert (request.state, request.began) == ("waiting", False)
    host.run()
    assert request.output == kit.reference([*prompts[0], 1], 4)
    fill(kit, host, prompts, seed=4)
    assert kept(folder).items() >= before.items(), "what the old weights computed is theirs"


def test_connector_without_weights_keeps_nothing_stale(
    kit, serve, prompts, *, settings, folder, change
):
    """FAULTS 47: what a request computes after a change, that began before it, is not kept."""
    host = serve(settings(num_blocks=32))
    to = change(host)
    # Some of its blocks are computed, but not all of its prompt.
    request = host.submit(prompts[0], 2 * BLOCK_SIZE)
    while not request.num_computed_tokens:
        host.step()
    assert not request.output
    before = kept(folder)
    to(4)
    host.run()
    assert request.state == "finished"
    assert kept(folder) == before
    fill(kit, host, [request.all_token_ids, *prompts], seed=4)
    assert host.scheduler.counts["tokens_loaded"] + host.scheduler.counts["tokens_cached"] > 0


def test_kept_blocks_are_found_again_when_their_weights_are_back(
    kit, serve, prompts, settings, change
):
    """FAULTS 31: promise 3 is kept also for those who do nothing about it."""
    host = serve(settings())
    to = change(host)
    counts = host.scheduler.counts
    fill(kit, host, prompts)
    to(4)
    host.step()
    before = counts["tokens_loaded"]
    fill(kit, host, prompts[:1], seed=4)
    assert counts["tokens_loaded"] == before
    to(3)
    host.step()
    fill(kit, host, prompts)
    assert counts["tokens_loaded"] > before


def test_refused_step_waits_for_its_loads(kit, serve, prompts, settings, change):
    """Its blocks go to others, into which a thread must not write then."""
    host = serve(settings(behind=True))
    to = change(host)
    for _ in range(2):
        fill(kit, host, prompts)
    assert host.scheduler.counts["tokens_loaded"] > 0
    request = host.submit([*prompts[0], 1], kit.NEW_TOKENS)
    plan = host.scheduler.plan()
    assert plan.loads_first
    to(4)
    results = host.executor.step(plan)
    assert not host.executor.worker.connector.thread.is_alive()
    host.scheduler.update(plan, results)
    host.run()
    assert request.output == kit.reference([*prompts[0], 1], 4)
    fill(kit, host, prompts, seed=4)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_step_with_a_failed_load_waits_for_the_other_loads(
    kit, serve, prompts, *, settings, folder, policy
):
    host = serve(settings(num_blocks=32, on_load_failure=policy, behind=True))
    fill(kit, host, prompts[:1])
    host.scheduler.pool.reset()
    os.truncate(folder / list(kept(folder))[1], 100)
    request = host.submit(prompts[0], kit.NEW_TOKENS)
    plan = host.scheduler.plan()
    assert plan.loads_first
    results = host.executor.step(plan)
    assert not host.executor.worker.connector.thread.is_alive()
    host.scheduler.update(plan, results)
    assert host.scheduler.counts["loads_failed"] == 1
    host.run()
    assert request.state == ("failed" if policy == "fail" else "finished")


@pytest.mark.parametrize("behind", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_load_failed_on_one_rank_is_recomputed_by_both(
    kit, serve, prompts, *, settings, folder, behind
):
    """Each rank looks after itself: one whose thread still writes would end with its step."""
    host = serve(settings(num_ranks=2, behind=behind), processes=behind)
    fill(kit, host, prompts)
    for path in folder.glob("*.1"):
        os.truncate(path, 100)
    fill(kit, host, prompts)
    counts = host.scheduler.counts
    assert (counts["tokens_loaded"], counts["loads_failed"]) == (0, len(prompts))
    # What was computed is handed on once more, by both.
    fill(kit, host, prompts)
    assert counts["loads_failed"] == len(prompts)
    assert counts["tokens_loaded"] > 0
