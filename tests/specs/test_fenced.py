"""The fence, between two sides of a spec that trusts everything."""

from __future__ import annotations

import itertools
import logging
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from wtransfer.blocks import fence_key, host_key
from wtransfer.config import OffloadingConfig, OffloadingParallelConfig
from wtransfer.errors import BlockNotKeptError
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.specs.fence.spoiled import SpoiledBlocks
from wtransfer.specs.fenced import (
    BlockWitnesses,
    FencedLoadStoreSpec,
    FencedManager,
    FencedSpec,
    FencedWorker,
)
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    ReqContext,
    ScheduleEndContext,
    TransferResult,
)
from wtransfer.weights import ProcessWeights, WeightsStamp, instance_fingerprint, known_stamps

PARTS = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("fence_world.py"))))
KEY = b"0123456789abcdef\0\0\0\0"


def stamp(name, epoch=1):
    return WeightsStamp(name, epoch)


@pytest.fixture
def world():
    world = PARTS.World(2)
    world.tell()
    return world


@pytest.fixture
def manager():
    manager = FencedManager(PARTS.PlainManager(8))
    manager.weights_are([stamp("A")])
    return manager


def begin(manager, *, witnesses=None):
    context = ReqContext("a request")
    if witnesses is not None:
        context.set_state(BlockWitnesses(witnesses))
    manager.on_new_request(context)
    return context


def keep(manager, key=KEY, context=None):
    context = context or begin(manager)
    output = manager.prepare_store([key], context)
    manager.complete_store([key], context)
    return output


def finds(manager, key=KEY, context=None):
    return manager.lookup(key, context or begin(manager)) is LookupResult.HIT


# -- stamps


def test_the_stamps_of_an_instance_are_known_when_those_of_all_ranks_are():
    assert known_stamps([]) is None
    assert known_stamps([stamp("A"), None]) is None
    assert (stamp("A"), stamp("B")) == known_stamps([stamp("A"), ["B", 1]])


def test_ranks_that_agree_share_blocks_with_every_instance_of_these_weights():
    assert instance_fingerprint((stamp("A", 1), stamp("A", 9))) == "A"
    mixed = {instance_fingerprint(tuple(map(stamp, names))) for names in ("AB", "BA", "AA", "AAB")}
    assert len(mixed) == 4


# -- the scheduler's side


def test_nothing_is_found_or_kept_before_the_weights_are_known():
    manager = FencedManager(PARTS.PlainManager(8))
    context = begin(manager)
    assert not manager.is_open()
    assert not finds(manager, context=context)
    assert manager.prepare_store([KEY], context) is None
    manager.weights_are([stamp("A")])
    assert keep(manager) is not None
    assert not finds(manager, context=context), "it began with nobody knows what"
    assert finds(manager)


def test_a_request_that_was_never_announced_finds_nothing(manager):
    keep(manager)
    assert not finds(manager, context=ReqContext("unheard of"))


def test_a_block_is_found_under_its_own_weights_and_no_others(manager):
    keep(manager)
    assert finds(manager)
    manager.weights_are([stamp("B", 2)])
    assert not finds(manager)
    manager.weights_are([stamp("A", 3)])
    assert finds(manager), "the way back leads to the old blocks"


def test_the_fenced_manager_sees_keys_that_contain_the_weights(manager):
    keep(manager)
    assert {fence_key(KEY, "A"): True} == manager._inner.kept


def test_a_request_that_lives_through_a_change_is_out_for_ever(manager):
    keep(manager)
    context = begin(manager)
    assert finds(manager, context=context)
    for stamps in ([stamp("B", 2)], [stamp("A", 3)]):
        manager.weights_are(stamps)
        assert manager.is_out(context)
        assert not finds(manager, context=context)
        assert manager.prepare_store([KEY + b"1"], context) is None
        with pytest.raises(BlockNotKeptError, match="did not begin with the present weights"):
            manager.prepare_load([KEY], context)


def test_nobody_is_in_while_weights_are_changing_and_stamps_that_come_back_let_nobody_in_again(
    manager,
):
    keep(manager)
    context = begin(manager)
    manager.weights_are([None])
    assert not finds(manager)
    during = begin(manager)
    manager.weights_are([stamp("A")])
    assert not finds(manager, context=context)
    assert not finds(manager, context=during)
    assert finds(manager)
    assert manager._inner.num_changes == 0, "it was no change after all"


def test_stamps_that_are_told_again_change_nothing(manager):
    context = begin(manager)
    manager.weights_are([["A", 1]])
    assert keep(manager, context=context)
    assert manager._inner.num_changes == 0


def test_a_commit_of_one_rank_is_a_change_for_all():
    manager = FencedManager(PARTS.PlainManager(8))
    manager.weights_are([stamp("A"), stamp("A")])
    keep(manager)
    context = begin(manager)
    manager.weights_are([stamp("A"), stamp("B", 2)])
    assert manager.is_out(context)
    assert not finds(manager)
    manager.weights_are([stamp("B", 2), stamp("A", 3)])
    keep(manager)
    assert [manager.is_out(begin(manager)), finds(manager)] == [False, True]
    manager.weights_are([stamp("A", 3), stamp("B", 4)])
    assert not finds(manager), "which rank has which weights is a part of it"


def test_completions_reach_what_was_prepared_though_the_weights_have_changed(manager):
    keep(manager)
    loading, storing = begin(manager), begin(manager)
    other = KEY + b"1"
    manager.prepare_load([KEY], loading)
    manager.prepare_store([other], storing)
    manager.weights_are([stamp("B", 2)])
    manager.complete_load([KEY], loading)
    manager.complete_store([other], storing)
    assert manager._inner.pins[fence_key(KEY, "A")] == 0
    assert manager._inner.kept[fence_key(other, "A")], "its bytes are of the old weights"
    assert not finds(manager, other)


def test_a_failed_store_is_forgotten_though_the_weights_have_changed(manager):
    context = begin(manager)
    manager.prepare_store([KEY], context)
    manager.weights_are([stamp("B", 2)])
    manager.complete_store([KEY], context, success=False)
    assert manager._inner.kept == {}


def test_places_carry_the_weights_that_the_request_began_with(manager):
    output = keep(manager)
    assert (stamp("A"),) == output.store_spec.stamps
    place = manager.prepare_load([KEY], begin(manager))
    assert ((stamp("A"),), [fence_key(KEY, "A")]) == (place.stamps, place.inner.keys)
    assert "A" in repr(place)
    with pytest.raises(ValueError, match="must not be prepared"):
        FencedLoadStoreSpec([None], place.inner)


def test_the_host_gets_its_own_keys_back(manager):
    keys = [KEY + bytes([number]) for number in range(10)]
    for key in keys[:8]:
        keep(manager, key)
    output = manager.prepare_store(keys[6:], begin(manager))
    assert keys[8:] == output.keys_to_store
    assert keys[:2] == output.evicted_keys


def test_no_key_is_said_to_have_gone_that_may_stand_for_another_block(manager):
    """What gave way was of other weights, or of another sequence: the host's key says neither."""
    other = KEY + b"1"
    manager._inner.capacity = 2
    keep(manager)
    manager.weights_are([stamp("B", 2)])
    keep(manager)
    assert keep(manager, other).evicted_keys == []
    assert list(manager._inner.kept) == [fence_key(KEY, "B"), fence_key(other, "B")]
    asking = begin(manager, witnesses=[(KEY, b"one")])
    assert manager.prepare_store([KEY], asking).evicted_keys == []
    assert fence_key(KEY, "B") not in manager._inner.kept


def test_old_blocks_give_way_once_per_change_and_a_manager_that_cannot_is_left_in_peace(
    manager, caplog
):
    manager.weights_are([stamp("B", 2)])
    manager.weights_are([stamp("B", 3)])
    assert manager._inner.num_changes == 1

    def fail():
        raise RuntimeError("no such thing")

    manager._inner.weights_changed = fail
    manager.weights_are([stamp("C", 4)])
    assert "weights_changed failed" in caplog.text
    assert keep(manager)
    assert finds(manager)


def test_calls_that_are_not_about_keys_pass(manager):
    inner, context = manager._inner, begin(manager)
    manager.on_request_finished(context)
    manager.on_schedule_end(ScheduleEndContext())
    manager.touch([KEY], context)
    manager.weights_changed()
    manager.reset_cache()
    assert not manager.has_pending_work()
    assert ([context], 1) == (inner.finished, inner.num_changes)
    stats = manager.get_stats()
    assert {name: stats[name] for name in ("kept", "fence_open", "fence_changes_total")} == {
        "kept": 0,
        "fence_open": 1,
        "fence_changes_total": 0,
    }
    manager.shutdown()


def test_blocks_in_use_are_touched_under_their_fenced_keys_and_only_by_those_who_are_in(manager):
    touched = []
    manager._inner.touch = lambda keys, context: touched.append(keys)
    context = begin(manager)
    manager.touch([KEY], context)
    manager.weights_are([stamp("B", 2)])
    manager.touch([KEY], context)
    assert [[fence_key(KEY, "A")]] == touched


def test_what_the_fence_refuses_is_counted(manager):
    context = begin(manager)
    manager.weights_are([stamp("B", 2)])
    manager.lookup(KEY, context)
    manager.prepare_store([KEY], context)
    stats = manager.get_stats()
    names = [f"fence_{what}_total" for what in ("changes", "misses", "stores_refused")]
    assert [stats[name] for name in names] == [1, 1, 1]


# -- a fence that fails


@pytest.mark.parametrize("fault", ["stamps", "witnesses", "note", "spoiled"])
def test_a_fence_that_fails_shuts_for_good_and_says_so_once(manager, caplog, fault):
    keep(manager)
    context = begin(manager)
    if fault == "stamps":
        manager.weights_are([7])
    elif fault == "witnesses":
        context.set_state(BlockWitnesses())
        context.get_state(BlockWitnesses).of = None
        manager.lookup(KEY, context)
    elif fault == "spoiled":
        manager.lookup(KEY, context)
        manager._spoiled = None
        manager.load_failed([KEY], context)
    else:
        manager._note = None
        manager.lookup(KEY, context)
        del manager._note
    manager.weights_are([stamp("A", 2)])
    for _ in range(3):
        assert not finds(manager)
        assert manager.prepare_store([KEY + b"1"], begin(manager)) is None
    assert manager.get_stats()["fence_open"] == 0
    assert sum("stays shut" in record.message for record in caplog.records) == 1
    assert caplog.records[0].exc_info, "the cause is in the log"


def test_an_error_of_the_fenced_manager_is_its_own(manager):
    context = begin(manager)
    with pytest.raises(BlockNotKeptError, match="not kept"):
        manager.prepare_load([KEY], context)
    assert manager.is_open()


# -- hash collisions (FAULTS 30)


def two_of_one_hash(nbits):
    """Return two sequences whose hashes of so many bits are equal."""
    world = PARTS.World(1, hash_nbits=nbits)
    seen = {}
    for tokens in itertools.product(range(40), repeat=3):
        key = world.named(tokens)[0][-1]
        if key in seen:
            return seen[key], tokens
        seen[key] = tokens
    raise AssertionError("no two sequences collide")


@pytest.mark.parametrize("with_witnesses", [True, False])
def test_a_block_of_another_sequence_with_the_same_hash_of_16_bits_is_a_miss(with_witnesses):
    one, other = two_of_one_hash(16)
    world = PARTS.World(1, hash_nbits=16, with_witnesses=with_witnesses)
    world.tell()
    first = world.start(one)
    for _ in one:
        world.compute(first)
    world.store(first)
    world.finish_all()
    assert finds(world.manager, first.names[-1], world.start(one).context)
    # Without witnesses the fence has nothing to tell them by: so it is they that do it.
    second = world.start(other)
    assert second.names[-1] == first.names[-1]
    assert finds(world.manager, second.names[-1], second.context) is not with_witnesses


def test_a_key_that_stands_for_two_blocks_of_one_request_stands_for_none(manager):
    context = begin(manager, witnesses=[(KEY, b"one")])
    keep(manager, context=context)
    assert finds(manager, context=context)
    manager.prepare_load([KEY], context)
    context.get_state(BlockWitnesses).add(KEY, b"other")
    assert not finds(manager, context=context)
    assert manager.prepare_store([KEY], context) is None
    manager.complete_load([KEY], context)
    assert manager._inner.pins.total() == 0


def test_a_block_without_a_witness_is_not_looked_up_where_others_have_one(manager):
    keep(manager)
    assert not finds(manager, context=begin(manager, witnesses=[(KEY + b"1", b"w")]))


# -- blocks that cannot be loaded


@pytest.mark.parametrize("witnesses", [None, [(KEY, b"one")]])
def test_a_block_that_could_not_be_loaded_makes_room_for_a_whole_one(manager, witnesses):
    def ask():
        return begin(manager, witnesses=witnesses)

    keep(manager, context=ask())
    for times in range(1, 4):
        context = ask()
        manager.prepare_load([KEY], context)
        manager.complete_load([KEY], context)
        assert finds(manager, context=ask())
        manager.load_failed([KEY], context)
        assert not finds(manager, context=context)
        assert not finds(manager, context=ask())
        output = keep(manager, context=context)
        assert output.keys_to_store == [KEY]
        assert finds(manager, context=ask())
        assert times == manager.get_stats()["fence_blocks_spoiled_total"]
    assert len(manager._inner.kept) == 4
    assert manager._inner.pins.total() == 0


def test_a_block_that_two_could_not_load_is_given_up_once(manager):
    keep(manager)
    contexts = [begin(manager) for _ in range(2)]
    for context in contexts:
        manager.prepare_load([KEY], context)
    for context in contexts:
        manager.complete_load([KEY], context)
        manager.load_failed([KEY], context)
        if context is contexts[0]:
            keep(manager)
    assert finds(manager), "the whole one that was stored in between"
    assert manager.get_stats()["fence_blocks_spoiled_total"] == 1


def test_a_load_that_failed_as_the_weights_had_gone_spoils_nothing(manager):
    keep(manager)
    context = begin(manager)
    manager.prepare_load([KEY], context)
    manager.weights_are([stamp("B", 2)])
    manager.complete_load([KEY], context)
    manager.load_failed([KEY], context)
    manager.weights_are([stamp("A", 3)])
    assert finds(manager)


def test_the_memory_of_spoiled_blocks_is_bounded(monkeypatch):
    monkeypatch.setattr("wtransfer.specs.fence.spoiled.MAX_SPOILED", 3)
    spoiled = SpoiledBlocks()
    keys = [fence_key(KEY, str(number)) for number in range(5)]
    spoiled.add(keys)
    assert len(spoiled) == 3
    assert [spoiled.current(key) == key for key in keys] == [True, True, False, False, False]
    renamed = spoiled.current(keys[4])
    assert host_key(renamed) == KEY
    spoiled.add(keys[4:])
    assert len({renamed, spoiled.current(keys[4]), keys[4]}) == 3


# -- events


def test_an_index_that_follows_the_events_holds_what_is_kept_of_the_present_weights(world):
    def indexed(request):
        return [key in world.index for key in request.names]

    request = world.start((1, 2))
    for _ in range(2):
        world.compute(request)
    world.store(request)
    world.finish_all()
    world.take_events()
    assert indexed(request) == [True, True]
    for rank in world.ranks:
        rank.commit("B")
    world.tell()
    world.take_events()
    assert indexed(request) == [False, False]

    # Blocks with the same keys of the host come, and then the old ones go: the index keeps them.
    again, other = world.start((1, 2)), world.start((3, 4))
    world.inner.capacity = 4
    for _ in range(2):
        world.compute(again)
        world.compute(other)
    world.store(again)
    world.finish_all()
    world.take_events()
    assert indexed(again) == [True, True]
    world.store(other)
    world.finish_all()
    (event,) = world.take_events()
    assert (event.removed, event.keys) == (False, other.names)
    assert indexed(again) == [True, True]
    assert len(world.inner.kept) == 4


@pytest.mark.parametrize("announced", ["before", "meanwhile"])
def test_an_index_that_follows_the_events_knows_of_blocks_that_could_not_be_loaded(
    world, announced
):
    def keep(request):
        world.compute(request)
        world.store(request)
        world.finish_all()

    request = world.start((1,))
    keep(request)
    (key,) = request.names
    if announced == "before":
        world.take_events()
        assert world.index == {key}
    asking = world.start((1,))
    world.manager.prepare_load([key], asking.context)
    world.manager.complete_load([key], asking.context)
    world.manager.load_failed([key], asking.context)
    assert not finds(world.manager, key, asking.context)
    # Whatever way it goes.
    damaged = fence_key(key, "A", request.witnesses[0])
    world.inner.events.append(OffloadingEvent([damaged], Medium.STORAGE, removed=False))
    world.take_events()
    assert world.index == set()

    again = world.start((1,))
    keep(again)
    world.take_events()
    assert finds(world.manager, key, again.context)
    assert world.index == {key}

    # The damaged one gives way; the whole one is kept.
    world.inner.capacity = 2
    other = world.start((2,))
    keep(other)
    assert damaged not in world.inner.kept
    world.take_events()
    assert finds(world.manager, key, again.context)
    assert world.index == {key, *other.names}


def test_a_store_that_ends_after_the_change_is_not_announced(world):
    request = world.start((1,))
    world.compute(request)
    job = world.store(request)
    for number, rank in enumerate(world.ranks):
        world.submit(job, number)
        rank.commit("B")
    world.tell()
    world.finish_all()
    assert len(world.inner.kept) == 1, "it is kept: its bytes are those of the old weights"
    assert world.take_events() == []
    for rank in world.ranks:
        rank.commit("A")
    world.tell()
    again = world.start((1,))
    assert world.load(again) is not None
    world.finish_all()
    assert world.num_loaded == 1


# -- the worker's side


@pytest.fixture
def rank():
    return PARTS.Rank(0, {})


def job_for(stamps, keys=("k",)):
    return FencedLoadStoreSpec(stamps, PARTS.NamedPlaces(list(keys)))


def test_a_worker_stores_and_loads_for_the_weights_it_has(rank):
    rank.cache[1] = "content"
    assert rank.worker.submit_store(1, GPULoadStoreSpec([1]), job_for([rank.worker.stamp()]))
    rank.worker.wait({1})
    assert rank.worker.submit_load(2, job_for([rank.worker.stamp()]), GPULoadStoreSpec([2]))
    rank.worker.wait({2})
    assert [(r.job_id, r.success) for r in rank.worker.get_finished()] == [(1, True), (2, True)]
    assert rank.cache[2] == "content"


@pytest.mark.parametrize("change", ["other", "back again", "under way", "unmarked", "fewer ranks"])
def test_a_job_for_other_weights_ends_without_success_and_touches_no_byte(rank, change):
    old = rank.worker.stamp()
    rank.inner.tier[0, "k"] = "old content"
    if change in ("other", "back again"):
        rank.commit("B")
    if change == "back again":
        rank.commit("A")
    if change == "under way":
        rank.begin_change()
    place = job_for([old]) if change != "unmarked" else PARTS.NamedPlaces(["k"])
    worker = rank.worker
    if change == "fewer ranks":
        worker = FencedWorker(rank.inner, 1, rank.weights)
    rank.cache[1] = "new content"
    assert worker.submit_store(1, GPULoadStoreSpec([1]), place)
    assert worker.submit_load(2, place, GPULoadStoreSpec([1]))
    worker.wait({1, 2})
    assert rank.inner.jobs == {}
    ended = worker.get_finished()
    assert [TransferResult(1, success=False), TransferResult(2, success=False)] == ended
    assert worker.get_finished() == []
    assert (rank.cache[1], rank.inner.tier[0, "k"]) == ("new content", "old content")
    stats = worker.get_stats()
    names = [
        f"fence_{what}_total" for what in ("stores_refused", "loads_refused", "loads_outdated")
    ]
    assert [stats[name] for name in names] == [1, 1, 0]


@pytest.mark.parametrize("when", ["while it ran", "after it ended"])
def test_a_load_whose_weights_went_before_it_was_reported_has_failed(rank, when):
    rank.inner.tier[0, "k"] = "old content"
    rank.worker.submit_load(1, job_for([rank.worker.stamp()]), GPULoadStoreSpec([1]))
    if when == "after it ended":
        rank.inner.run(1)
    rank.commit("B")
    rank.commit("A")
    rank.inner.run(1)
    assert [TransferResult(1, success=False)] == rank.worker.get_finished()
    assert rank.worker.get_stats()["fence_loads_outdated_total"] == 1


def test_a_store_that_had_begun_before_the_change_may_end(rank):
    rank.cache[1] = "old content"
    rank.worker.submit_store(1, GPULoadStoreSpec([1]), job_for([rank.worker.stamp()]))
    rank.commit("B")
    rank.inner.run(1)
    assert [result.success for result in rank.worker.get_finished()] == [True]


def test_what_the_fenced_worker_says_passes(rank):
    rank.inner.submit_load = rank.inner.submit_store = lambda *args: False
    place = job_for([rank.worker.stamp()])
    assert not rank.worker.submit_store(1, GPULoadStoreSpec([1]), place)
    assert not rank.worker.submit_load(2, place, GPULoadStoreSpec([1]))
    assert rank.worker._under_way == {}
    rank.worker.shutdown()
    assert rank.inner.is_shut_down


def test_a_worker_that_cannot_tell_its_weights_refuses_everything_and_says_so_once(rank, caplog):
    class Broken:
        def stamp(self):
            raise OSError("gone")

    worker = FencedWorker(rank.inner, 0, Broken())
    with caplog.at_level(logging.ERROR):
        for job_id in range(2):
            assert worker.submit_load(job_id, job_for([stamp("A")]), GPULoadStoreSpec([1]))
    assert [result.success for result in worker.get_finished()] == [False, False]
    assert worker.stamp() is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.parametrize("second", ["load", "store", "refused load", "refused store"])
def test_a_second_job_of_a_number_does_nothing_to_the_first(rank, kind, second):
    """Least of all does it let what was loaded for weights that have gone pass."""

    def submit(what, stamps):
        if what.endswith("load"):
            return rank.worker.submit_load(1, job_for(stamps), GPULoadStoreSpec([1]))
        return rank.worker.submit_store(1, GPULoadStoreSpec([1]), job_for(stamps))

    rank.inner.tier[0, "k"] = rank.cache[1] = "old content"
    assert submit(kind, [rank.worker.stamp()])
    rank.inner.submit_load = rank.inner.submit_store = lambda *args: False
    rank.commit("B")
    now = rank.worker.stamp() if "refused" not in second else stamp("A")
    assert not submit(second, [now])
    assert rank.worker.get_finished() == []
    rank.inner.run(1)
    (result,) = rank.worker.get_finished()
    assert (result.job_id, result.success) == (1, kind == "store")
    del rank.inner.submit_load, rank.inner.submit_store
    assert submit(second.removeprefix("refused "), [rank.worker.stamp()]), "the number is free"


def test_that_somebody_waits_for_a_load_is_passed_on_to_those_who_want_to_know(rank):
    place, told = job_for([rank.worker.stamp()]), []
    assert rank.worker.submit_load(1, place, GPULoadStoreSpec([1]), expedited=True)
    rank.inner.submit_load = lambda *args, expedited=False: told.append(expedited) or True
    assert rank.worker.submit_load(2, place, GPULoadStoreSpec([1]), expedited=True)
    assert rank.worker.submit_load(3, place, GPULoadStoreSpec([1]))
    assert told == [True, False]


# -- the spec


@pytest.mark.parametrize(("given", "rank"), [(None, 1), (0, 0)])
def test_the_rank_stands_in_the_config_of_the_spec(given, rank):
    options = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1 << 20}
    config = OffloadingConfig(
        options,
        worker_kv_bytes_per_block=64,
        parallel=OffloadingParallelConfig(rank=1, world_size=2),
    )
    inner = OffloadingSpecFactory.create_spec(config)
    inner.get_worker = PARTS.PlainSpec().get_worker
    weights = ProcessWeights()
    spec = FencedSpec(inner, rank=given, weights=weights)
    assert (spec.config, spec.extra_config, spec.tokens_per_block) == (config, options, (16,))
    worker = spec.get_worker({})
    stamps = [stamp("another rank's"), stamp("another rank's")]
    stamps[rank] = weights.stamp()
    worker.submit_store(1, GPULoadStoreSpec([1]), job_for(stamps))
    assert set(worker._inner.jobs) == {1}


def test_the_rank_of_a_spec_without_a_config_is_0():
    assert FencedSpec(PARTS.PlainSpec()).get_worker({})._rank == 0


def test_a_fenced_spec_has_one_manager_and_one_worker_and_fences_with_this_process_weights():
    inner = PARTS.PlainSpec()
    spec = FencedSpec(inner, rank=3)
    assert spec.get_manager() is spec.get_manager()
    assert spec.get_worker({}) is spec.get_worker({})
    assert spec.spec is inner
    inner.tokens_per_block = (16,)
    assert spec.tokens_per_block == (16,)
    with pytest.raises(AttributeError):
        _ = spec.no_such_thing
    from wtransfer.weights import process_weights

    assert process_weights.stamp() == spec.get_worker({}).stamp()
