"""What both sides of the offloading connector tell each other, over specs of either shape."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from sides import request_of, step

from wtransfer import KVCacheConfig, KVConnectorFactory, KVTransferConfig, ServingConfig
from wtransfer.connectors.interface import KVConnectorOutput, KVConnectorRole
from wtransfer.connectors.offloading import scheduler
from wtransfer.connectors.offloading.metadata import OffloadingWorkerMetadata, Outcome
from wtransfer.errors import OffloadingOptionError
from wtransfer.specs.interface import OffloadPolicy, RequestOffloadingContext

SHAPES = {
    "today": {"spec_name": "CPUOffloadingSpec"},
    "seed": {"spec_name": "SeedSpec", "spec_module_path": "seed_spec"},
}


@pytest.fixture(autouse=True)
def seed_spec(monkeypatch):
    """The module of a spec in the seed's style, found by its name."""
    path = Path(__file__).parents[2] / "specs" / "seed_spec.py"
    spec = importlib.util.spec_from_file_location("seed_spec", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "seed_spec", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(sides):
    """Maker of both sides over a spec."""

    def make(num_ranks=1, **options):
        made = sides("OffloadingConnector", num_ranks, cpu_bytes_to_use=1 << 20, **options)
        made.manager, made.tier = made.scheduler.side._manager, made.workers[0].side._made
        return made

    return make


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_config_without_the_size_of_a_block_is_refused_by_naming_its_field(role):
    config = ServingConfig(
        kv_transfer_config=KVTransferConfig(
            "OffloadingConnector", kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20}
        ),
        cache_config=KVCacheConfig(num_blocks=64, block_size=16),
    )
    with pytest.raises(OffloadingOptionError, match=r"Set KVCacheConfig\(bytes_per_block=\.\.\.\)"):
        KVConnectorFactory.create_connector(config, role)


# -- blocks, and chunks of several


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
@pytest.mark.parametrize(("name", "num_ranks"), [("today", 1), ("today", 2), ("seed", 1)])
def test_loaded_chunks_hold_the_stored_bytes_on_every_rank(bench, name, per_chunk, num_ranks):
    rig = bench(num_ranks, block_size=4 * per_chunk, **SHAPES[name])
    rig.keep(request_of("r", 26), [7, 2, 9, 4, 11, 0, 5])
    rig.wipe()
    again = request_of("s", 26)
    whole = 6 // per_chunk * per_chunk
    assert rig.ask(again) == (4 * whole, True)
    blocks = [1, 3, 5, 6, 8, 10, 12]
    rig.allocate(again, blocks, 4 * whole)
    metadata, said = rig.step()
    (job,) = metadata.loads
    assert (job.blocks.block_ids, job.blocks.block_indices) == (blocks[:whole], [0])
    said += rig.settle()
    assert [name for each in said for name in each.received] == ["s"] * num_ranks
    for rank in range(num_ranks):
        assert rig.values(blocks[:whole], rank) == [1.0 + 100 * rank + i for i in range(whole)]
        assert rig.values(blocks[whole:], rank) == [0.0] * (7 - whole)


def test_a_chunk_whose_beginning_is_there_is_loaded_from_its_middle(bench, shape):
    rig = bench(block_size=12, **shape)
    rig.keep(request_of("r", 25), [0, 1, 2, 3, 4, 5, 6])
    rig.wipe()
    again = request_of("s", 25)
    assert rig.ask(again, 4) == (20, True)
    blocks = [15, 14, 13, 12, 11, 10, 9]
    rig.allocate(again, blocks, 20)
    metadata, _ = rig.step()
    (job,) = metadata.loads
    assert (job.blocks.block_ids, job.blocks.block_indices) == (blocks[1:6], [1])
    rig.settle()
    assert rig.values(blocks) == [0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0], "what was there is untouched"


def test_only_whole_chunks_are_stored(bench, shape):
    rig = bench(block_size=8, **shape)
    request = request_of("r", 30)
    rig.ask(request)
    rig.allocate(request, list(range(8)))
    stored = []
    for before, count in ((0, 7), (7, 2), (9, 14), (23, 1), (24, 6)):
        kind = {"new" if before == 0 else "cached": [(request, before, count)]}
        metadata, _ = rig.step(step(**kind))
        stored.append([job.blocks.block_ids for job in metadata.stores])
    assert stored == [[], [[0, 1]], [[2, 3]], [[4, 5]], []]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("num_there", "fails"), [(8, False), (8, True), (7, False)])
def test_blocks_built_on_another_requests_load_are_stored_once_every_rank_has_reported(
    bench, num_there, fails, num_ranks
):
    """Some hosts end a step whose load has failed as if nothing were wrong, and rewind later.

    Nor is a block stored of which the other one has loaded a part.
    """
    rig = bench(num_ranks)
    request = request_of("r", 17)
    assert rig.ask(request) == (0, False)
    rig.allocate(request, [0, 1, 2, 3, 4])
    metadata = rig.tell(step(new=[(request, num_there, 16 - num_there)]))
    assert metadata.stores == []
    said = rig.work(metadata)
    # A host may plan a step ahead of what the workers say.
    ahead = rig.tell(step(cached=[(request, 16, 1)]))
    assert ahead.stores == []
    rig.hear(said[:-1])
    assert num_ranks == 1 or rig.tell(step(cached=[(request, 16, 1)])).stores == []
    rig.hear(said[-1:])
    metadata = rig.tell(step(cached=[(request, 0 if fails else 16, 17 if fails else 1)]))
    (job,) = metadata.stores
    assert job.blocks.block_ids == ([0, 1, 2, 3] if fails else [2, 3])


def test_blocks_built_on_the_requests_own_load_or_the_host_cache_are_stored_at_once(bench):
    rig = bench()
    rig.keep(request_of("r", 13), [0, 1, 2, 3])
    again = request_of("s", 21)
    assert rig.ask(again, 4) == (8, True)
    rig.allocate(again, [4, 5, 6, 7, 8, 9], 8)
    rig.step()
    rig.settle()
    rig.allocate(again, [4, 5, 6, 7, 8, 9], 0)
    (job,) = rig.tell(step(new=[(again, 12, 8)])).stores
    assert job.blocks.block_ids == [7, 8]


def test_a_request_that_begins_anew_is_not_what_it_was(bench):
    """What it once loaded is no reason to trust what another loads for it."""
    rig = bench()
    rig.keep(request_of("r", 13), [0, 1, 2, 3])
    again = request_of("s", 21)
    assert rig.ask(again) == (12, True)
    rig.allocate(again, [4, 5, 6, 7, 8, 9], 12)
    rig.step()
    rig.settle()
    rig.scheduler.reset_cache()
    assert rig.ask(again) == (0, False)
    rig.allocate(again, [4, 5, 6, 7, 8, 9], 0)
    output = step(cached=[(again, 12, 8)], resumed=["s"])
    assert rig.tell(output).stores == []


@pytest.mark.parametrize("wanted", [6, 2, 0, -4])
def test_chunks_consist_of_whole_blocks(bench, wanted):
    with pytest.raises(OffloadingOptionError, match=f"block_size={wanted}"):
        bench(block_size=wanted)


def test_chunks_of_a_spec_in_the_seeds_style_consist_of_whole_blocks(bench, seed_spec):
    class Careless(seed_spec.SeedSpec):
        def __init__(self, vllm_config, kv_cache_config):
            self.manager = seed_spec.SeedManager(4, 6)

    seed_spec.Careless = Careless
    with pytest.raises(
        OffloadingOptionError, match="whole blocks of the cache, which have 4 tokens"
    ):
        bench(block_size=6, spec_name="Careless", spec_module_path="seed_spec")


# -- what the spec hears


def test_the_spec_is_told_that_blocks_are_in_use_once_they_are(bench):
    rig = bench()
    rig.keep(request_of("r", 13), [0, 1, 2, 3])
    touched, touch = [], rig.manager.touch
    rig.manager.touch = lambda keys, context: touched.append(len(keys)) or touch(keys, context)
    request = request_of("s", 13)
    for _ in range(3):
        assert rig.ask(request, 8) == (4, True)
    assert touched == []
    rig.allocate(request, [0, 1, 5, 6], 4)
    assert touched == [2]


def test_the_spec_is_told_what_the_user_said_and_what_the_step_was(bench):
    rig = bench()
    heard, steps = [], []
    rig.manager.on_new_request = lambda context: (
        heard.append((context.req_id, context.kv_transfer_params)) or RequestOffloadingContext()
    )
    rig.manager.on_schedule_end = steps.append
    request = request_of("r", 9, params={"keep": "long"})
    rig.begin(request, [0, 1, 2])
    assert heard == [("r", {"keep": "long"})]
    rig.step(step(new=[(request, 0, 9)], preempted_req_ids={"q", "p"}))
    rig.step(step(cached=[(request, 9, 1)]))
    said = [(tuple(each.new_req_ids), tuple(each.preempted_req_ids)) for each in steps]
    assert said == [(("r",), ("p", "q")), ((), ())]


# -- steps that do not count, and jobs that fail


def test_stores_of_a_discarded_step_fail_and_the_next_step_stores_the_blocks(bench, shape):
    rig = bench(**shape)
    request = request_of("r", 9)
    rig.begin(request, [0, 1, 2])
    for _ in range(2):
        metadata, (said,) = rig.step(step(new=[(request, 0, 9)]), counts=False)
        (job,) = metadata.stores
        assert said.meta.outcomes == {0: [Outcome(job.job_id, success=False)]}
        assert not rig.scheduler.has_pending_push_work()
    assert rig.ask(request_of("s", 9)) == (0, False)
    rig.fill([0, 1], 5.0)
    rig.step(step(cached=[(request, 0, 9)]))
    rig.settle()
    assert rig.ask(request_of("t", 9)) == (8, True)
    assert rig.scheduler.get_stats()["store_jobs_failed_total"] == 2


def test_store_that_the_tier_refused_is_not_submitted_again_in_later_steps(bench):
    rig = bench()
    rig.tier.submit_store = lambda *job: False
    request = request_of("r", 9)
    rig.begin(request, [0, 1, 2])
    told = [rig.step(step(new=[(request, 0, 9)]))]
    told += [rig.step(step(cached=[(request, 9 + n, 1)])) for n in range(2)]
    assert [len(metadata.stores) for metadata, _ in told] == [1, 0, 0]
    stats = rig.scheduler.get_stats()
    # Jobs of the connector are no blocks of the spec.
    assert (stats["store_jobs_failed_total"], stats["stores_failed_total"]) == (1, 2)


def test_bytes_are_counted_by_rank(bench):
    rig = bench(2)
    rig.keep(request_of("r", 9), [0, 1, 2])
    nbytes = 2 * 2 * rig.workers[0].side._spec.config.worker_kv_bytes_per_block
    stats = rig.scheduler.get_stats()
    assert (stats["stored_bytes_total"], stats["loaded_bytes_total"]) == (nbytes, 0)
    again = request_of("s", 9)
    rig.begin(again, [3, 4, 5])
    rig.settle()
    assert rig.scheduler.get_stats()["loaded_bytes_total"] == nbytes


def test_blocks_that_have_gone_are_named_at_once(bench):
    rig = bench()
    rig.keep(request_of("r", 13), [0, 1, 2, 3])
    request = request_of("s", 13)
    assert rig.ask(request) == (12, True)
    rig.scheduler.reset_cache()
    rig.allocate(request, [5, 6, 7, 8], 12)
    metadata, (said,) = rig.step()
    assert (metadata.loads, metadata.gone) == ([], {"s": [5, 6, 7]})
    assert (said.bad, said.received) == ({5, 6, 7}, {"s"})
    assert not rig.scheduler.has_pending_push_work()
    metadata, (said,) = rig.step()
    assert (metadata.gone, said.bad, said.received) == ({}, set(), set())


def test_a_load_that_fails_on_one_rank_has_failed(bench):
    rig = bench(2)
    rig.keep(request_of("r", 9), [0, 1, 2])
    rig.workers[1].side._made.submit_load = lambda *job: False
    request = request_of("s", 9)
    rig.begin(request, [3, 4, 5])
    said = [*rig.step()[1], *rig.settle()]
    assert {block for each in said[1::2] for block in each.bad} == {3, 4}
    assert {block for each in said[0::2] for block in each.bad} == set()
    assert [sorted(each.received) for each in said if each.received] == [["s"]] * 2
    assert rig.scheduler.get_stats()["load_jobs_failed_total"] == 1
    # It is not asked for again, and can be stored anew.
    assert rig.ask(request_of("t", 9)) == (0, False)


def test_repeated_and_unknown_outcomes_are_counted_and_change_no_job(bench):
    """FAULTS 28."""
    rig = bench(2)
    request = request_of("r", 9)
    rig.begin(request, [0, 1, 2])
    (job,) = rig.tell(step(new=[(request, 0, 9)])).stores

    def say(rank, job_id, success=True):
        said = OffloadingWorkerMetadata(
            rig.workers[rank].side._fence.report(), {rank: [Outcome(job_id, success, 10)]}
        )
        output = KVConnectorOutput(kv_connector_worker_meta=said)
        rig.scheduler.update_connector_output(output)

    say(0, job.job_id)
    say(0, job.job_id, success=False)
    say(1, job.job_id + 7)
    assert rig.scheduler.has_pending_push_work(), "one rank is not two"
    say(1, job.job_id)
    say(1, job.job_id)
    assert not rig.scheduler.has_pending_push_work()
    stats = rig.scheduler.get_stats()
    assert (stats["unknown_outcomes_total"], stats["stored_bytes_total"]) == (3, 20)
    assert rig.ask(request_of("s", 9)) == (8, True)
    rig.scheduler.update_connector_output(KVConnectorOutput())


def test_results_that_a_spec_says_twice_are_counted(bench):
    rig = bench()
    request = request_of("r", 9)
    rig.begin(request, [0, 1, 2])
    get_finished = rig.tier.get_finished
    rig.tier.get_finished = lambda: [each for each in get_finished() for _ in range(2)]
    rig.step(step(new=[(request, 0, 9)]))
    rig.settle()
    assert rig.workers[0].get_stats()["unknown_results_total"] == 1
    assert rig.scheduler.get_stats()["unknown_outcomes_total"] == 0


# -- whose blocks they are


def test_blocks_stay_while_they_are_stored(bench):
    rig = bench()
    request = request_of("r", 9)
    rig.begin(request, [0, 1, 2])
    get_finished, rig.tier.get_finished = rig.tier.get_finished, list
    rig.step(step(new=[(request, 0, 9)]))
    assert rig.scheduler.request_finished(request, [0, 1, 2]) == (True, None)
    for _ in range(3):
        _, (said,) = rig.step()
        assert said.sent == set()
    rig.tier.get_finished = get_finished
    said = rig.settle()
    assert [sorted(each.sent) for each in said if each.sent] == [["r"]]


def test_blocks_that_are_loaded_are_the_hosts_to_keep(bench):
    """It is named as received, and not as sent as well: hosts free its blocks by either."""
    rig = bench()
    rig.keep(request_of("r", 9), [0, 1, 2])
    request = request_of("s", 9)
    rig.begin(request, [3, 4, 5])
    assert rig.scheduler.request_finished(request, [3, 4, 5]) == (False, None)
    said = [*rig.step()[1], *rig.settle()]
    assert [(sorted(each.sent), sorted(each.received)) for each in said if each.received] == [
        ([], ["s"])
    ]
    assert all(each.sent == set() for each in said)


def test_blocks_that_are_taken_away_are_waited_for(bench):
    rig = bench()
    request, waited = request_of("r", 9), []
    rig.begin(request, [0, 1, 2])
    wait, get_finished = rig.tier.wait, rig.tier.get_finished
    rig.tier.get_finished = list
    rig.tier.wait = lambda jobs: waited.append(set(jobs)) or wait(jobs)
    metadata, _ = rig.step(step(new=[(request, 0, 9)]))
    (job,) = metadata.stores
    rig.step(step(preempted_req_ids={"somebody"}))
    assert waited == []
    rig.step(step(preempted_req_ids={"r"}))
    assert waited == [{job.job_id}]
    rig.tier.get_finished = get_finished
    # It goes on elsewhere, and has nothing to do with what it has lost.
    rig.begin(request, [7, 8, 9])
    assert rig.scheduler.request_finished(request, [7, 8, 9]) == (False, None)
    rig.settle()


def test_a_request_that_goes_on_elsewhere_stores_from_there(bench):
    rig = bench()
    request = request_of("r", 13)
    rig.begin(request, [0, 1, 2, 3])
    rig.fill([0, 1, 2, 3], 1.0)
    rig.step(step(new=[(request, 0, 9)]))
    rig.settle()
    rig.step(step(preempted_req_ids={"r"}))
    assert rig.ask(request) == (8, True)
    rig.allocate(request, [9, 8, 7, 6], 8)
    rig.settle()
    assert rig.values([9, 8]) == [1.0, 2.0]
    metadata, _ = rig.step(step(cached=[(request, 8, 5)], resumed={"r"}))
    (job,) = metadata.stores
    assert (job.blocks.block_ids, job.blocks.block_indices) == ([7], [2])


def test_blocks_that_a_resumed_request_finds_in_the_host_cache_are_not_stored_as_its_own(bench):
    """It has lost its blocks, and the host's own cache has more of it than it had itself."""
    rig = bench()
    request = request_of("r", 17)
    rig.begin(request, [0, 1, 2, 3, 4])
    rig.step(step(new=[(request, 0, 5)]))
    rig.step(step(preempted_req_ids={"r"}))
    assert rig.ask(request, 12) == (0, False)
    rig.allocate(request, [5, 6, 7, 8, 9])
    metadata, _ = rig.step(step(cached=[(request, 12, 5)], resumed={"r"}))
    (job,) = metadata.stores
    assert (job.blocks.block_ids, job.blocks.block_indices) == ([8], [3])


@pytest.mark.parametrize("policy", OffloadPolicy)
def test_a_spec_gets_what_it_wants_of_a_request(bench, policy):
    rig = bench()
    rig.manager.on_new_request = lambda context: RequestOffloadingContext(policy)
    request = request_of("r", 13)
    rig.ask(request, 8)
    rig.allocate(request, [0, 1, 2, 3])
    metadata, _ = rig.step(step(new=[(request, 8, 4)]))
    (job,) = metadata.stores
    wanted = [0, 1, 2] if policy is OffloadPolicy.REQUEST_LEVEL else [2]
    assert job.blocks.block_ids == wanted


# -- weights


def test_a_request_that_lives_through_a_change_is_stale(bench, weights):
    """FAULTS 47."""
    rig = bench()
    request = request_of("r", 13)
    rig.begin(request, [0, 1, 2, 3])
    rig.step(step(new=[(request, 0, 5)]))
    rig.settle()
    for name in ("B", "A"):
        weights.settle(name)
        rig.step()
    metadata, _ = rig.step(step(cached=[(request, 5, 8)]))
    assert metadata.stores == [], "also on the way back"
    assert rig.ask(request_of("s", 13)) == (4, True), "what it had stored before"


def test_a_request_that_has_lost_its_blocks_begins_anew(bench, weights):
    rig = bench()
    heard = []
    new, end = rig.manager.on_new_request, rig.manager.on_request_finished
    rig.manager.on_new_request = lambda context: heard.append(("new", context)) or new(context)
    rig.manager.on_request_finished = lambda context: heard.append(("end", context)) or end(context)
    request = request_of("r", 13)
    for _ in range(2):
        rig.ask(request)
    rig.allocate(request, [0, 1, 2, 3])
    rig.step(step(new=[(request, 0, 5)]))
    weights.settle("B")
    rig.step()
    rig.step(step(preempted_req_ids={"r"}))
    assert rig.ask(request) == (0, False), "kept of other weights"
    rig.allocate(request, [4, 5, 6, 7])
    metadata, _ = rig.step(step(cached=[(request, 0, 13)], resumed={"r"}))
    (job,) = metadata.stores
    assert job.blocks.block_ids == [4, 5, 6]
    rig.settle()
    assert rig.ask(request_of("s", 13)) == (12, True)
    rig.scheduler.request_finished(request, [4, 5, 6, 7])
    kinds = [kind for kind, context in heard if context.req_id == "r"]
    assert kinds == ["new", "end", "new", "end"]
    (_, first), (_, ended), (_, second), (_, last) = [
        each for each in heard if each[1].req_id == "r"
    ]
    assert first is ended is not second
    assert second is last


def test_a_load_for_weights_that_have_gone_meanwhile_is_a_miss(bench, weights):
    """FAULTS 31: the worker has the last word, also when it has ended."""
    rig = bench()
    rig.keep(request_of("r", 9), [0, 1, 2])
    request = request_of("s", 9)
    assert rig.ask(request) == (8, True)
    rig.allocate(request, [3, 4, 5], 8)
    metadata = rig.tell()
    get_finished, rig.tier.get_finished = rig.tier.get_finished, list
    said = rig.work(metadata)
    weights.settle("B")
    rig.tier.get_finished = get_finished
    rig.hear(said)
    said += rig.settle()
    assert {block for each in said for block in each.bad} == {3, 4}
    assert [sorted(each.received) for each in said if each.received] == [["s"]]


def test_the_scheduler_knows_the_weights_before_the_first_step(bench, weights):
    rig = bench()
    assert rig.scheduler.get_stats()["fence_open"] == 1
    weights.settle("B")
    assert rig.scheduler.get_stats()["fence_open"] == 1, "it has not heard yet"
    with weights.changing(lambda: "C"):
        rig.step()
        assert rig.scheduler.get_stats()["fence_open"] == 0
        assert rig.ask(request_of("r", 9)) == (0, False)
    rig.step()
    assert rig.scheduler.get_stats()["fence_open"] == 1


@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.parametrize("change", ["other", "back again", "under way"])
def test_a_job_for_other_weights_fails_and_touches_no_byte(bench, weights, *, kind, change):
    rig = bench()
    if kind == "load":
        rig.keep(request_of("left", 9), [0, 1, 2])
    request = request_of("r", 9)
    found, _ = rig.ask(request)
    rig.allocate(request, [3, 4, 5], found)
    rig.fill([3, 4, 5], 70.0)
    metadata = rig.tell(None if kind == "load" else step(new=[(request, 0, 9)]))
    assert len(metadata.loads) + len(metadata.stores) == 1
    rig.tier.submit_load = rig.tier.submit_store = lambda *job: pytest.fail("submitted")
    for name in ["B", "A"][: ["under way", "other", "back again"].index(change)]:
        weights.settle(name)
    if change == "under way":
        with weights.changing(lambda: "A"):
            (said,) = rig.work(metadata)
    else:
        (said,) = rig.work(metadata)
    assert [each.success for each in said.meta.outcomes[0]] == [False]
    assert (said.bad, said.received) == (({3, 4}, {"r"}) if kind == "load" else (set(), set()))
    assert rig.values([3, 4, 5]) == [70.0, 71.0, 72.0]
    stats = rig.workers[0].get_stats()
    names = [f"fence_{each}_total" for each in ("loads_refused", "stores_refused")]
    assert [stats[name] for name in names] == [kind == "load", kind == "store"]
    rig.hear([said])
    assert not rig.scheduler.has_pending_push_work()


def test_a_store_that_ends_after_the_change_is_kept_for_the_way_back(bench, weights):
    """Its blocks belong to it until it has ended, so its bytes are of the old weights."""
    rig = bench()
    request = request_of("r", 9)
    rig.begin(request, [0, 1, 2])
    rig.fill([0, 1, 2], 5.0)
    get_finished, rig.tier.get_finished = rig.tier.get_finished, list
    rig.step(step(new=[(request, 0, 9)]))
    weights.settle("B")
    rig.step()
    rig.tier.get_finished = get_finished
    rig.settle()
    assert rig.ask(request_of("s", 9)) == (0, False)
    weights.settle("A")
    rig.step()
    again = request_of("t", 9)
    assert rig.ask(again) == (8, True)
    rig.wipe()
    rig.allocate(again, [3, 4, 5], 8)
    rig.settle()
    assert rig.values([3, 4]) == [5.0, 6.0]


def fail_to_load(rig, request, blocks):
    """Plan a load that ends without success."""
    found, _ = rig.ask(request)
    rig.allocate(request, blocks, found)
    submit_load, rig.tier.submit_load = rig.tier.submit_load, lambda *job: False
    metadata = rig.tell()
    said = rig.work(metadata)
    rig.tier.submit_load = submit_load
    return found, said


def test_blocks_that_could_not_be_loaded_are_stored_anew_and_found_again(bench, shape):
    rig = bench(**shape)
    rig.keep(request_of("left", 9), [0, 1, 2])
    for times in range(1, 4):
        found, said = fail_to_load(rig, request_of("r", 9), [3, 4, 5])
        assert (found, said[0].bad) == (8, {3, 4})
        rig.hear(said)
        assert rig.scheduler.get_stats()["fence_blocks_invalidated_total"] == 2 * times
        assert rig.ask(request_of("s", 9)) == (0, False)
        rig.keep(request_of("t", 9), [6, 7, 8], value=10.0 * times)
        again = request_of("u", 9)
        assert rig.ask(again) == (8, True)
        rig.wipe()
        rig.allocate(again, [9, 10, 11], 8)
        rig.settle()
        assert rig.values([9, 10]) == [10.0 * times, 10.0 * times + 1]


def test_a_second_failure_to_load_a_block_does_not_invalidate_its_replacement(bench):
    rig = bench()
    rig.keep(request_of("left", 9), [0, 1, 2])
    first, second = (fail_to_load(rig, request_of(name, 9), [3, 4, 5])[1] for name in "rs")
    rig.hear(first)
    request = request_of("t", 9)
    assert rig.ask(request) == (0, False)
    rig.allocate(request, [6, 7, 8])
    (job,) = rig.step(step(new=[(request, 0, 9)]))[0].stores
    rig.tier.wait({job.job_id})
    rig.step()
    rig.hear(second)
    assert rig.scheduler.get_stats()["fence_blocks_invalidated_total"] == 2
    assert rig.ask(request_of("u", 9)) == (8, True)


def test_a_load_that_failed_as_its_weights_were_replaced_invalidates_nothing(bench, weights):
    rig = bench()
    rig.keep(request_of("left", 9), [0, 1, 2])
    request = request_of("r", 9)
    rig.begin(request, [3, 4, 5])
    metadata = rig.tell()
    weights.settle("B")
    rig.hear(rig.work(metadata))
    weights.settle("A")
    rig.step()
    assert rig.scheduler.get_stats()["load_jobs_failed_total"] == 1
    assert rig.scheduler.get_stats()["fence_blocks_invalidated_total"] == 0
    assert rig.ask(request_of("s", 9)) == (8, True)


def test_a_load_that_was_promised_under_other_weights_fails_at_once(bench, weights):
    rig = bench()
    rig.keep(request_of("left", 9), [0, 1, 2])
    request = request_of("r", 9)
    assert rig.ask(request) == (8, True)
    weights.settle("B")
    rig.step()
    rig.allocate(request, [3, 4, 5], 8)
    metadata, (said,) = rig.step()
    assert (metadata.loads, metadata.gone) == ([], {"r": [3, 4]})
    assert (said.bad, said.received) == ({3, 4}, {"r"})


def test_the_manager_is_told_of_each_change_once(bench, weights):
    rig, changes = bench(), []
    rig.manager.weights_changed = lambda: changes.append(weights)
    for name, num_changes in (("A", 0), ("B", 1), ("B", 1), ("C", 2)):
        weights.settle(name)
        rig.step()
        rig.step()
        assert len(changes) == rig.scheduler.get_stats()["fence_changes_total"] == num_changes


def test_a_manager_that_fails_at_a_change_goes_on(bench, weights, caplog):
    rig = bench()
    rig.keep(request_of("r", 9), [0, 1, 2])
    rig.manager.weights_changed = None
    weights.settle("B")
    rig.step()
    assert "weights_changed failed" in caplog.text
    assert rig.ask(request_of("s", 9)) == (0, False)
    rig.keep(request_of("t", 9), [0, 1, 2])
    assert rig.ask(request_of("u", 9)) == (8, True)


def test_stale_requests_are_counted(bench, weights):
    rig = bench()
    request = request_of("r", 13)
    rig.begin(request, [0, 1, 2, 3])
    weights.settle("B")
    rig.step()
    for before, count in ((0, 9), (9, 1), (10, 3)):
        kind = {"new" if before == 0 else "cached": [(request, before, count)]}
        assert rig.tell(step(**kind)).stores == []
    with weights.changing(lambda: "C"):
        rig.step()
        rig.ask(request_of("s", 9))
    stats = rig.scheduler.get_stats()
    names = [f"fence_{each}_total" for each in ("stores_refused", "misses", "changes")]
    assert [stats[name] for name in names] == [2, 1, 1]


def test_a_request_of_a_reused_name_begins_with_the_current_weights(bench, weights):
    rig = bench()
    rig.keep(request_of("r", 9), [0, 1, 2])
    weights.settle("B")
    rig.step()
    request = request_of("r", 9)
    rig.allocate(request, [3, 4, 5])
    (job,) = rig.tell(step(new=[(request, 0, 9)])).stores
    assert job.blocks.block_ids == [3, 4]


class Slices(list):
    """Tokens that count how many are read."""

    num_read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


def test_prompt_is_named_as_far_as_it_is_found(bench):
    made = bench(num_blocks=400)
    long = request_of("r", 1601)
    made.keep(long, range(400))
    for first, num_there in ((0, 1600), (1, 0)):
        again = request_of(f"again {first}", 1_000_001, first)
        again.all_token_ids = Slices(again.all_token_ids)
        assert made.ask(again) == (num_there, num_there > 0)
        assert again.all_token_ids.num_read <= 4 * num_there + 1000


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 5, 8])
def test_any_number_of_leading_blocks_is_found_whatever_is_named_at_once(
    bench, monkeypatch, num_blocks
):
    monkeypatch.setattr(scheduler, "LOOKUP_BATCH", 1)
    made = bench()
    made.keep(request_of("r", 4 * num_blocks + 1), range(num_blocks + 1))
    assert made.ask(request_of("s", 41))[0] == 4 * num_blocks
