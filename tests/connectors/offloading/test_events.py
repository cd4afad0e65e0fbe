"""Events of blocks by the host's own hashes: what is told is what a look-up finds now."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
from sides import BLOCK_SIZE, request_of, step

from wtransfer.config import KVCacheGroup
from wtransfer.connectors.offloading import events
from wtransfer.deadline import Deadline
from wtransfer.kv.keys import hash_blocks
from wtransfer.specs import tier_manager
from wtransfer.specs.arena import ArenaLayout
from wtransfer.specs.file import FORMAT
from wtransfer.specs.interface import Medium
from wtransfer.testing.mini_engine.contract import Request

PATIENCE_S = 60.0


def room_for(num_slots, per_chunk=1):
    """Return the bytes of an arena with so many slots."""
    return ArenaLayout(num_slots, per_chunk * 2 * BLOCK_SIZE * 8 * 4, 1).used_nbytes


def prompt(name, num_tokens, first=0, per_hash=BLOCK_SIZE, **particulars):
    """Return a request with the hashes of its host, which knows no weights."""
    request = request_of(name, num_tokens, first, **particulars)
    request.block_hashes = list(hash_blocks(request.all_token_ids, per_hash, b"the host's"))
    return request


def branch(name, first, other, num_tokens=21):
    """Return a prompt that shares its first block with those that differ in `other` only."""
    tokens = [first, *range(1, num_tokens)]
    tokens[BLOCK_SIZE] = 1000 + other
    request = Request(name, tokens, 100)
    request.block_hashes = list(hash_blocks(tokens, BLOCK_SIZE, b"the host's"))
    return request


class Listener:
    """Keeps a model of what is told; a block is stored once, and removed if it was stored."""

    def __init__(self):
        self.has = {}

    def hear(self, told):
        for event in told:
            blocks = event.blocks
            names = [(event.medium, blocks.group, each) for each in blocks.block_hashes]
            for name in names:
                assert (name in self.has) == event.removed
                if event.removed:
                    del self.has[name]
                else:
                    self.has[name] = blocks


@pytest.fixture
def rig(sides):
    """Maker of both sides for a host that takes events; `listener` hears them."""

    def make(num_ranks=1, connector="OffloadingConnector", **options):
        if connector == "OffloadingConnector":
            options = {"cpu_bytes_to_use": 1 << 20, **options}
        made = sides(connector, num_ranks, **{"tells": True, **options})
        made.listener = Listener()
        made.worker = getattr(made.workers[0].side, "_made", None)
        return made

    return make


def advertised(made, medium=Medium.CPU):
    """Return the hashes that a listener takes for kept."""
    made.listener.hear(made.told)
    made.told.clear()
    return [block_hash for each, _, block_hash in made.listener.has if each is medium]


# -- as the host names them


@pytest.mark.parametrize(("per_chunk", "num_ranks"), [(1, 1), (3, 1), (1, 2)])
def test_stored_blocks_are_told_by_the_hosts_hashes(rig, per_chunk, num_ranks):
    made = rig(num_ranks, block_size=BLOCK_SIZE * per_chunk)
    request = prompt("r", 26)
    made.keep(request, [7, 2, 9, 4, 11, 0, 5])
    assert advertised(made) == request.block_hashes[:6]
    for number, blocks in enumerate(list(made.listener.has.values())[::per_chunk]):
        first = number * per_chunk
        of_blocks = request.block_hashes[first : first + per_chunk]
        parent = request.block_hashes[first - 1] if number else None
        tokens = request.all_token_ids[4 * first : 4 * (first + per_chunk)]
        assert (blocks.block_hashes, blocks.parent_block_hash) == (of_blocks, parent)
        assert (list(blocks.token_ids), blocks.block_size, blocks.group) == (tokens, 4, 0)


def test_block_has_the_hash_of_its_last_part_where_the_host_hashes_smaller_ones(rig):
    made = rig()
    made.scheduler.bind_gpu_block_pool(SimpleNamespace(hash_block_size=2))
    request = prompt("r", 9, per_hash=2)
    made.keep(request, [0, 1, 2])
    assert advertised(made) == [request.block_hashes[1], request.block_hashes[3]]
    second = made.listener.has[Medium.CPU, 0, request.block_hashes[3]]
    assert second.parent_block_hash == request.block_hashes[1]


def test_each_group_is_told_by_its_number(rig):
    made = rig(groups=(KVCacheGroup(("a",)), KVCacheGroup(("b",), 6)))
    blocks = [SimpleNamespace() for _ in range(16)]
    pool = SimpleNamespace(blocks=blocks, touch=lambda _: None, free_blocks=lambda _: None)
    made.scheduler.bind_gpu_block_pool(pool)
    request = prompt("r", 9)
    made.ask(request)
    made.allocate(request, ([0, 1, 2], [3, 4, 5]))
    made.step(step(new=[(request, 0, 9)]))
    made.settle()
    advertised(made)
    assert [name[1:] for name in made.listener.has] == [
        (group, each) for group in (0, 1) for each in request.block_hashes
    ]


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_salt_is_told_of_the_first_block_which_it_concerns(rig, per_chunk):
    made = rig(block_size=BLOCK_SIZE * per_chunk)
    made.keep(prompt("r", 17, cache_salt="a tenant"), [0, 1, 2, 3, 4])
    advertised(made)
    told = [each for blocks in made.listener.has.values() for each in blocks.extra_keys]
    assert told[:: per_chunk * per_chunk] == [("a tenant",), None, None, None][::per_chunk]
    made.keep(prompt("plain", 17, first=1), [0, 1, 2, 3, 4])
    advertised(made)
    assert list(made.listener.has.values())[-1].extra_keys == [None] * per_chunk


def test_blocks_of_requests_with_pictures_are_not_told(rig):
    made = rig()
    for name in ("one", "two"):
        position = SimpleNamespace(offset=6, length=5)
        feature = SimpleNamespace(identifier=name, mm_position=position)
        # The same hash of the first block, before the picture; other keys of ours.
        request = prompt(name, 17, mm_features=[feature])
        made.keep(request, [0, 1, 2, 3, 4])
        assert made.ask(prompt(f"{name} again", 17, mm_features=[feature])) == (16, True)
    assert advertised(made) == []
    plain = prompt("plain", 17)
    made.keep(plain, [0, 1, 2, 3, 4])
    assert advertised(made) == plain.block_hashes


def test_block_without_a_hash_of_the_host_is_not_told(rig):
    made = rig()
    request = prompt("r", 13)
    del request.block_hashes[2:]
    made.keep(request, [0, 1, 2, 3])
    made.keep(request_of("none at all", 9, first=1), [0, 1, 2])
    assert advertised(made) == request.block_hashes


def test_host_that_takes_no_events_is_told_none(rig):
    made = rig(tells=False)
    made.keep(prompt("r", 9), [0, 1, 2])
    assert made.told == []
    assert not made.scheduler.has_pending_push_work()


def test_instance_that_loads_nothing_tells_nothing(rig):
    made = rig(role="kv_producer")
    made.keep(prompt("r", 9), [0, 1, 2])
    assert advertised(made) == []
    assert not made.scheduler.has_pending_push_work()


def test_several_connectors_under_one_tell_each_its_medium(rig, in_folder):
    names = ("OffloadingConnector", "SharedStorageConnector")
    options = ({"cpu_bytes_to_use": 1 << 20}, {**in_folder(), "tier": "file"})
    parts = [
        {"kv_connector": name, "kv_connector_extra_config": each}
        for name, each in zip(names, options, strict=True)
    ]
    made = rig(connector="MultiConnector", connectors=parts)
    request = prompt("r", 9)
    made.keep(request, [0, 1, 2])
    assert advertised(made) == advertised(made, Medium.STORAGE) == request.block_hashes


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_block_of_two_arenas_is_told_until_both_have_evicted_it(rig, weights, per_chunk):
    options = (
        {"cpu_bytes_to_use": room_for(5)},
        {"cpu_bytes_to_use": 1 << 20, "block_size": BLOCK_SIZE * per_chunk},
    )
    parts = [
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": each}
        for each in options
    ]
    made = rig(connector="MultiConnector", connectors=parts)
    prompts = [prompt(f"r{number}", 21, first=number) for number in range(6)]
    for each in prompts:
        made.keep(each, [0, 1, 2, 3, 4, 5])
    stats = made.scheduler.get_stats()
    assert stats["0_OffloadingConnector_evictions_total"]
    assert not stats.get("1_OffloadingConnector_evictions_total")
    there = set(advertised(made))
    # The arena with room has all whole chunks.
    whole = 5 // per_chunk * per_chunk
    assert {block for each in prompts for block in each.block_hashes[:whole]} <= there
    for blocks in made.listener.has.values():
        assert len(blocks.token_ids) == BLOCK_SIZE * len(blocks.block_hashes)
        assert len(blocks.extra_keys) == len(blocks.block_hashes)
    weights.settle("B")
    made.meet()
    made.settle()
    assert advertised(made) == []


@pytest.mark.parametrize("evicted", [0, 1])
def test_block_that_two_chunks_begin_with_is_told_until_both_are_gone(rig, evicted):
    made = rig(block_size=2 * BLOCK_SIZE)
    prompts = [branch(f"r{number}", 0, number, 9) for number in range(2)]
    for each in prompts:
        made.keep(each, [0, 1, 2])
    assert sorted(advertised(made)) == sorted({*prompts[0].block_hashes, *prompts[1].block_hashes})

    def lose(request):
        found, _ = made.ask(request)
        made.allocate(request, [0, 1, 2], found)
        submit_load, made.worker.submit_load = made.worker.submit_load, lambda *job: False
        made.step()
        made.worker.submit_load = submit_load

    lose(branch("lost", 0, evicted, 9))
    assert advertised(made) == prompts[1 - evicted].block_hashes
    assert made.ask(branch("other", 0, 1 - evicted, 9)) == (8, True)
    lose(branch("lost too", 0, 1 - evicted, 9))
    assert advertised(made) == []


# -- what is there


def test_blocks_that_are_evicted_or_could_not_be_loaded_are_told_as_removed(rig):
    made = rig(cpu_bytes_to_use=room_for(5))
    prompts = [prompt(f"r{number}", 17, first=number) for number in range(6)]
    for each in prompts:
        made.keep(each, [0, 1, 2, 3, 4])
    there = advertised(made)
    assert len(there) == made.scheduler.get_stats()["slots"] < 24
    assert set(prompts[-1].block_hashes) <= set(there)
    again = prompt("again", 17, first=5)
    found, _ = made.ask(again)
    made.allocate(again, [0, 1, 2, 3, 4], found)
    submit_load, made.worker.submit_load = made.worker.submit_load, lambda *job: False
    made.step()
    made.worker.submit_load = submit_load
    assert set(advertised(made)) == set(there) - set(again.block_hashes)
    made.keep(prompt("anew", 17, first=5), [0, 1, 2, 3, 4])
    assert set(again.block_hashes) <= set(advertised(made))


def test_of_an_arena_without_bounds_the_blocks_told_last_are_told(rig, weights, monkeypatch):
    monkeypatch.setattr(events, "MAX_KEPT", 4)
    made = rig()
    first, second = prompt("r", 13), prompt("s", 13, first=1)
    made.keep(first, [0, 1, 2, 3])
    made.keep(second, [0, 1, 2, 3])
    assert advertised(made) == [first.block_hashes[2], *second.block_hashes]
    # Those of weights that come back are among them.
    weights.settle("B")
    made.meet()
    third = prompt("t", 13)
    made.keep(third, [0, 1, 2, 3])
    assert advertised(made) == third.block_hashes
    weights.settle("A")
    made.meet()
    made.settle()
    assert advertised(made) == second.block_hashes[-1:]


def test_new_instance_tells_nothing_until_it_has_stored_something(rig):
    rig().keep(prompt("r", 9), [0, 1, 2])
    second = rig(engine_id="another")
    second.step()
    assert advertised(second) == []


def test_change_of_weights_is_told_without_a_request(rig, weights):
    made = rig()
    request = prompt("r", 9)
    made.keep(request, [0, 1, 2])
    assert advertised(made) == request.block_hashes
    assert not made.scheduler.has_pending_push_work()
    weights.settle("B")
    made.meet()
    assert made.scheduler.has_pending_push_work(), "the host takes a step"
    made.settle()
    assert advertised(made) == []
    # Under other weights, the same hash; on the way back, what is there of those.
    made.keep(prompt("s", 5), [0, 1])
    assert advertised(made) == request.block_hashes[:1]
    weights.settle("A")
    made.meet()
    made.settle()
    assert sorted(advertised(made)) == sorted(request.block_hashes)


def take_steps(made, *steps):
    """Take steps until nothing is to be told; return what each step has told."""
    steps, told = list(steps), []
    while steps or made.scheduler.has_pending_push_work():
        made.step(*steps[:1])
        del steps[:1]
        told.append([*made.told])
        made.listener.hear(made.told)
        made.told.clear()
    return told


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_change_of_weights_is_told_over_several_steps_and_first_what_is_gone(
    rig, weights, monkeypatch, per_chunk
):
    monkeypatch.setattr(events, "BLOCKS_PER_STEP", 4)
    made = rig(block_size=BLOCK_SIZE * per_chunk)
    of_a, of_b = prompt("r", 45), prompt("s", 13, first=1)
    made.keep(of_a, range(12))
    num_a = len(advertised(made))
    assert num_a >= 10
    weights.settle("B")
    made.meet()
    # Blocks that are stored meanwhile wait until no other weights' are told.
    made.ask(of_b)
    made.allocate(of_b, [0, 1, 2, 3])
    told = take_steps(made, step(new=[(of_b, 0, 13)]))
    assert all(sum(len(each.blocks.block_hashes) for each in some) <= 4 for some in told)
    removed = [each.removed for some in told for each in some]
    assert removed == sorted(removed, reverse=True)
    assert removed.count(True) * per_chunk == num_a
    assert advertised(made) == of_b.block_hashes[: 3 // per_chunk * per_chunk]
    # On the way back as well; from the first block of a prompt on.
    weights.settle("A")
    made.meet()
    told = take_steps(made)
    assert all(sum(len(each.blocks.block_hashes) for each in some) <= 4 for some in told)
    assert [each.removed for some in told for each in some][-num_a // per_chunk :].count(True) == 0
    assert advertised(made) == of_a.block_hashes[:num_a]


def test_weights_that_come_back_before_all_is_told_keep_what_is_still_told(
    rig, weights, monkeypatch
):
    made = rig()
    request = prompt("r", 45)
    made.keep(request, range(12))
    there = advertised(made)
    monkeypatch.setattr(events, "BLOCKS_PER_STEP", 4)
    weights.settle("B")
    made.meet()
    made.step()
    # At any time a listener has the beginning of a prompt.
    assert advertised(made) == there[:-4]
    weights.settle("A")
    made.meet()
    assert [len(each) for each in take_steps(made)] == [4]
    assert advertised(made) == there
    for name in "BA":
        weights.settle(name)
        made.meet()
        take_steps(made)
    assert advertised(made) == there
    weights.settle("B")
    made.meet()
    made.step()
    made.scheduler.reset_cache()
    made.step()
    assert advertised(made) == []
    assert not made.scheduler.has_pending_push_work()


def test_nothing_is_told_while_weights_change(rig, weights):
    made = rig()
    request = prompt("r", 9)
    made.keep(request, [0, 1, 2])

    def look():
        made.meet()
        made.settle()
        assert advertised(made) == []
        return "A"

    with weights.changing(look):
        made.meet()
        made.settle()
        assert advertised(made) == []
    made.meet()
    made.settle()
    assert sorted(advertised(made)) == sorted(request.block_hashes)


def test_store_that_ends_under_other_weights_is_told_on_the_way_back(rig, weights):
    made = rig()
    request = prompt("r", 9)
    made.ask(request)
    made.allocate(request, [0, 1, 2])
    get_finished, made.worker.get_finished = made.worker.get_finished, list
    (job,) = made.step(step(new=[(request, 0, 9)]))[0].stores
    weights.settle("B")
    made.meet()
    made.worker.get_finished = get_finished
    made.worker.wait({job.job_id})
    made.settle()
    assert advertised(made) == []
    weights.settle("A")
    made.meet()
    made.settle()
    assert advertised(made) == request.block_hashes


def test_nothing_is_told_of_a_spec_that_is_asked_for_nothing(rig):
    made = rig(deadline_s=0.2)
    request, number = prompt("r", 9), 0
    while not advertised(made):  # a store may take longer than that
        made.keep(prompt(f"r{number}", 9), [0, 1, 2])
        number += 1
    other = prompt("s", 9, first=1)
    made.ask(other)
    made.allocate(other, [3, 4, 5])
    get_finished, made.worker.get_finished = made.worker.get_finished, list
    made.step(step(new=[(other, 0, 9)]))
    while advertised(made):
        made.step()
    assert made.ask(prompt("t", 9)) == (0, False)
    made.worker.get_finished = get_finished
    while not advertised(made):
        made.step()
    assert made.ask(prompt("u", 9)) == (8, True)
    assert set(request.block_hashes) == set(advertised(made))


# -- in a tier below


def find(made, request):
    """Return how many tokens are found, once the tier has answered."""
    limit = Deadline(PATIENCE_S)
    while True:
        found, _ = made.ask(request)
        if found is not None:
            return found
        assert not limit.expired, "the tier does not answer"
        made.step()
        time.sleep(0.001)  # for the thread that asks the tier


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Maker of options of a tier that is waited for, however slow it is."""
    monkeypatch.setattr(tier_manager, "LOOKUP_S", 60.0)
    options = {"shared_storage_path": str(tmp_path), "skip_slow_loads": False}
    return lambda room=0: {"tier": "file", "cpu_bytes_to_use": room, **options}


def block_files(tmp_path):
    return [each for each in (tmp_path / FORMAT / "blocks").rglob("*") if each.is_file()]


def test_blocks_of_a_tier_are_told_once_they_are_put_or_found(rig, in_folder):
    first, second = rig(**in_folder()), rig(engine_id="another", **in_folder())
    request = prompt("r", 9)
    first.keep(request, [0, 1, 2])
    assert advertised(first, Medium.STORAGE) == request.block_hashes
    second.step()
    assert advertised(second, Medium.STORAGE) == []
    assert find(second, prompt("s", 9)) == 8
    second.step()
    assert advertised(second, Medium.STORAGE) == request.block_hashes
    blocks = [
        each.listener.has[Medium.STORAGE, 0, request.block_hashes[1]] for each in (first, second)
    ]
    assert blocks[0] == blocks[1]


def test_blocks_that_others_have_removed_from_a_tier_are_told_so_once_that_is_known(
    rig, in_folder, tmp_path, weights
):
    made = rig(**in_folder())
    request = prompt("r", 9)
    made.keep(request, [0, 1, 2])
    for each in block_files(tmp_path):
        each.unlink()
    assert find(made, prompt("s", 9)) == 0
    made.step()
    there = advertised(made, Medium.STORAGE)
    assert request.block_hashes[0] not in there
    # As of any other medium: a change of weights takes back what is left.
    weights.settle("B")
    made.meet()
    made.step()
    assert advertised(made, Medium.STORAGE) == []


def test_block_of_a_tier_that_could_not_be_loaded_is_told_as_removed_until_it_is_put_anew(
    rig, in_folder, tmp_path
):
    made = rig(**in_folder())
    request = prompt("r", 9)
    made.keep(request, [0, 1, 2])
    again = prompt("s", 9)
    found = find(made, again)
    made.allocate(again, [3, 4, 5], found)
    for each in block_files(tmp_path):
        each.write_bytes(bytes(each.stat().st_size))
    made.settle()
    assert advertised(made, Medium.STORAGE) == []
    made.keep(prompt("t", 9), [6, 7, 8])
    assert advertised(made, Medium.STORAGE) == request.block_hashes


def test_block_that_could_not_be_put_is_not_told(rig, in_folder):
    made = rig(**in_folder())
    made.worker.submit_store = lambda *job: False
    made.keep(prompt("r", 9), [0, 1, 2])
    assert advertised(made, Medium.STORAGE) == []


@pytest.mark.parametrize("num_told", [1 << 16, 0])
def test_block_that_comes_back_to_the_arena_is_told_in_either_medium(
    rig, in_folder, monkeypatch, num_told
):
    monkeypatch.setattr(tier_manager, "MAX_TOLD", num_told)
    made = rig(**in_folder(room_for(1)))
    prompts = [prompt(f"r{number}", 17, first=number) for number in range(6)]
    for each in prompts:
        made.keep(each, [0, 1, 2, 3, 4])
    lost = set(prompts[0].block_hashes)
    assert not lost & set(advertised(made)) | set(advertised(made, Medium.STORAGE))
    again = prompt("again", 17)
    assert find(made, again) == 16
    made.allocate(again, [0, 1, 2, 3, 4], 16)
    made.settle()
    assert lost <= set(advertised(made))
    assert set(advertised(made, Medium.STORAGE)) == (lost if num_told else set())


def test_of_a_tier_without_bounds_the_blocks_told_last_are_told(rig, in_folder, monkeypatch):
    monkeypatch.setattr(tier_manager, "MAX_TOLD", 4)
    made = rig(**in_folder())
    first, second = prompt("r", 13), prompt("s", 13, first=1)
    made.keep(first, [0, 1, 2, 3])
    made.keep(second, [0, 1, 2, 3])
    assert advertised(made, Medium.STORAGE) == [first.block_hashes[2], *second.block_hashes]


# -- in any order


@pytest.fixture(params=[(Medium.CPU, 1), (Medium.CPU, 2), (Medium.STORAGE, 1)])
def kept(request, rig, in_folder):
    """A medium, blocks per chunk, and both sides over it."""
    medium, per_chunk = request.param
    room = {"cpu_bytes_to_use": room_for(1, per_chunk), "block_size": BLOCK_SIZE * per_chunk}
    if medium is Medium.STORAGE:
        room = in_folder()
    return medium, per_chunk, rig(**room)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_told_is_what_a_lookup_finds_in_any_order_of_events(
    kept, weights, monkeypatch, seed
):
    monkeypatch.setattr(events, "BLOCKS_PER_STEP", 3)
    medium, per_chunk, made = kept
    rng = random.Random(seed)

    def compute(name, number):
        request = branch(name, *divmod(number, 2))
        found = find(made, request)
        made.allocate(request, [0, 1, 2, 3, 4, 5], found)
        if found and rng.random() < 0.3:
            submit_load, made.worker.submit_load = made.worker.submit_load, lambda *job: False
            made.step()
            made.worker.submit_load = submit_load
        made.settle()
        made.step(step(new=[(request, 0, 21)]))
        made.settle()
        made.scheduler.request_finished(request, [])

    for number in range(30):
        change = rng.random()
        if change < 0.2:
            weights.settle(rng.choice("ABC"))
            made.meet()
        elif change < 0.25:
            made.scheduler.reset_cache()
        else:
            compute(f"r{number}", rng.randrange(8))
        made.settle()
        made.step()
        there = set(advertised(made, medium))
        for asked in range(8):
            request = branch(f"ask{number}-{asked}", *divmod(asked, 2))
            told = [each in there for each in request.block_hashes] + [False]
            assert 4 * (told.index(False) // per_chunk * per_chunk) == find(made, request)
            made.scheduler.request_finished(request, [])
    if medium is Medium.CPU:
        assert made.scheduler.get_stats()["evictions_total"]
