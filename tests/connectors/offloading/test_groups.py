"""Caches with several groups: prefixes that are kept in part, chunks, states, blocks of a store.

Bytes, keys and gain are the kit's.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from sides import BLOCK_SIZE, request_of, step

from wtransfer.config import KVCacheGroup
from wtransfer.deadline import Deadline
from wtransfer.errors import CacheLayoutError, ConnectorOptionError
from wtransfer.kv.groups import first_needed, longest_prefix
from wtransfer.specs.interface import LookupResult

WINDOW = 6
"""Reaches two blocks back."""
GROUPS = (KVCacheGroup(("a",)), KVCacheGroup(("b",), WINDOW))
FULL, LAST = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]


class Pool:
    """A host's block pool, as far as connectors call it."""

    def __init__(self, num_blocks=16):
        self.blocks = [SimpleNamespace(number=number, count=0) for number in range(num_blocks)]

    def touch(self, blocks):
        for block in blocks:
            block.count += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.count -= 1

    @property
    def held(self):
        return [block.number for block in self.blocks if block.count]


@pytest.fixture
def rig(sides):
    """Both sides over a cache with a group of full attention, and one with a window."""

    def make(groups=GROUPS, num_ranks=1, **options):
        options.setdefault("cpu_bytes_to_use", 1 << 20)
        made = sides("OffloadingConnector", num_ranks, groups=groups, **options)
        made.pool = Pool()
        made.scheduler.bind_gpu_block_pool(made.pool)
        made.manager = made.scheduler.side._manager
        return made

    return make


def blocks_of(made, rank=0, layer="b"):
    """Return the first number in each block of a layer."""
    return made.caches[rank][layer][:, 0, 0].tolist()


def write(made, blocks, values, layer):
    for rank, cache in enumerate(made.caches):
        for block, value in zip(blocks, values, strict=True):
            cache[layer][block] = value + 100 * rank


def keep(made, name="r", num_tokens=24):
    """Compute a prompt at once, and let it be kept."""
    request = request_of(name, num_tokens)
    made.ask(request)
    made.allocate(request, (FULL, LAST))
    write(made, FULL, range(1, 7), "a")
    write(made, LAST, range(11, 17), "b")
    made.step(step(new=[(request, 0, num_tokens)]))
    made.settle()
    assert made.scheduler.request_finished(request, [*FULL, *LAST]) == (False, None)


# -- the rule, without a host


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9, 40])
def test_a_window_needs_the_blocks_that_the_next_token_attends_to(window):
    for num_tokens in range(40):
        first_token = max(0, num_tokens - window + 1)
        assert first_needed(window, num_tokens, BLOCK_SIZE) == first_token // BLOCK_SIZE
    assert first_needed(None, 39, BLOCK_SIZE) == 0


def brute_force(windows, first, last, kept):
    """Return the longest prefix all of whose needed blocks are kept."""
    return max(
        end
        for end in range(first, last + 1)
        if all(
            block in kept[group]
            for group, window in enumerate(windows)
            for block in range(max(first, first_needed(window, end * BLOCK_SIZE, BLOCK_SIZE)), end)
        )
    )


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (9, None), (5, 12), (None, 6, 11)])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_longest_prefix_is_the_longest_one_of_which_every_group_has_what_it_needs(windows, first):
    count = 5 if len(windows) < 3 else 4
    sets = [
        set(itertools.compress(range(count), mask))
        for mask in itertools.product((0, 1), repeat=count)
    ]
    for kept in itertools.product(sets, repeat=len(windows)):
        found = longest_prefix(
            windows, BLOCK_SIZE, first, count, lambda group, block, kept=kept: block in kept[group]
        )
        assert found == (brute_force(windows, first, count, kept), False)


def test_what_is_not_known_yet_counts_as_kept_and_the_answer_is_pending_only_where_it_matters():
    asked = []

    def look_up(states):
        def is_kept(group, block):
            asked.append((group, block))
            return states.get((group, block), True)

        return is_kept

    found = longest_prefix((None, 6), BLOCK_SIZE, 0, 4, look_up({(0, 1): None, (1, 3): None}))
    assert found == (4, True)
    needed = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    # A store that has to ask is asked about all windows at once, not about one in each step.
    assert asked == [*needed, (1, 0), (1, 1), (1, 2), (1, 3)]
    states = {(0, 3): None, (1, 2): False}
    assert longest_prefix((None, 6), BLOCK_SIZE, 0, 4, look_up(states)) == (2, False)


# -- both sides


def test_prefix_that_the_host_has_is_not_loaded_again(rig):
    made = rig()
    keep(made)
    again = request_of("s", 24)
    assert made.ask(again, 16) == (4, True)
    made.allocate(again, ([1, 2, 3, 4, 13, 14], [0, 0, 0, 10, 15, 0]), 4)
    metadata, _ = made.step()
    (job,) = metadata.loads
    assert (job.blocks.block_ids, job.blocks.block_indices) == ([13, 15], [4, 4])
    made.settle()


@pytest.mark.parametrize(
    ("group", "lost", "found"),
    [(0, 2, 2), (0, 0, 0), (1, 4, 4), (1, 3, 3), (1, 2, 5), (1, 0, 5)],
)
def test_block_of_one_group_that_is_lost_shortens_the_prefix_where_the_group_needs_it(
    rig, group, lost, found
):
    made = rig()
    stored = []
    prepare = made.manager.prepare_store
    made.manager.prepare_store = lambda keys, ctx: stored.extend(keys) or prepare(keys, ctx)
    keep(made)
    gone = stored[6 * group + lost]
    lookup = made.manager.lookup
    made.manager.lookup = lambda key, ctx: LookupResult.MISS if key == gone else lookup(key, ctx)
    assert made.ask(request_of("s", 24))[0] == found * BLOCK_SIZE


def test_blocks_of_a_window_are_held_until_they_are_stored(rig):
    made = rig(num_ranks=2)
    request = request_of("r", 24)
    made.ask(request)
    made.allocate(request, (FULL, LAST))
    metadata = made.tell(step(new=[(request, 0, 24)]))
    assert made.pool.held == LAST, "the host may give them away once the next step is planned"
    assert made.scheduler.has_pending_block_frees(), "a host waits, and preempts no request"
    said = made.work(metadata)
    made.hear(said[:1])
    assert made.pool.held == LAST, "one rank still reads"
    made.hear(said[1:])
    made.settle()
    assert made.pool.held == []
    assert not made.scheduler.has_pending_block_frees()


def test_blocks_of_a_window_are_free_again_after_a_step_that_did_not_count(rig):
    made = rig()
    request = request_of("r", 24)
    made.ask(request)
    made.allocate(request, (FULL, LAST))
    made.step(step(new=[(request, 0, 24)]), counts=False)
    assert made.pool.held == []
    made.step(step(cached=[(request, 0, 24)]))
    made.settle()
    assert made.ask(request_of("s", 24))[0] == 20


def test_blocks_that_the_window_has_passed_are_not_stored(rig):
    """Where a chunk ends in a later step than it began; whose they are, the host does not say."""
    made = rig(block_size=3 * BLOCK_SIZE)
    request = request_of("r", 24)
    made.ask(request)
    made.allocate(request, (FULL, LAST))
    first, _ = made.step(step(new=[(request, 0, 11)]))
    # The window has passed the first of the chunk's three blocks, and then ends its last one.
    second, _ = made.step(step(cached=[(request, 11, 1)]))
    third, _ = made.step(step(cached=[(request, 12, 12)]))
    sizes = [[job.blocks.group_sizes for job in each.stores] for each in (first, second, third)]
    assert sizes == [[], [[3, 0]], [[3, 3]]]
    made.settle()
    # Three blocks of the tail: their window reaches no further.
    assert made.ask(request_of("s", 25))[0] == 24


STATES = (KVCacheGroup(("a",)), KVCacheGroup(("b",), has_states=True))


def keep_states(made, *num_tokens, name="r"):
    """Compute a prompt; the host tells of states after so many tokens, in the blocks from 8 on."""
    request = request_of(name, 24)
    made.ask(request)
    made.allocate(request, (FULL, [0] * 6))
    write(made, FULL, range(1, 7), "a")
    told = [(1, 7 + each // BLOCK_SIZE, each) for each in num_tokens]
    write(made, [block for _, block, _ in told], [10 + each for each in num_tokens], "b")
    output = step(new=[(request, 0, 24)])
    output.kv_connector_block_state = SimpleNamespace(boundary_state_offloads={name: told})
    metadata = made.tell(output)
    assert made.pool.held == [block for _, block, each in told if each % BLOCK_SIZE == 0]
    made.hear(made.work(metadata))
    made.settle()
    assert made.pool.held == []
    made.scheduler.request_finished(request, FULL)


def test_state_that_the_host_tells_of_is_what_a_prefix_ends_at(rig):
    made = rig(STATES)
    keep_states(made, 8, 16)
    made.wipe()
    again = request_of("s", 24)
    assert made.ask(again) == (16, True)
    made.allocate(again, ([6, 5, 4, 3, 2, 1], [0, 0, 0, 14, 0, 0]), 16)
    metadata, _ = made.step()
    (job,) = metadata.loads
    assert job.blocks.block_ids == [6, 5, 4, 3, 14]
    assert (job.blocks.group_sizes, job.blocks.block_indices) == ([4, 1], [0, 3])
    made.settle()
    assert blocks_of(made)[14] == 26
    assert made.ask(request_of("shorter", 16))[0] == 8
    assert made.ask(request_of("too short", 8))[0] == 0
    assert made.ask(request_of("there already", 24), 16)[0] == 0


def test_state_within_a_block_is_not_kept(rig):
    made = rig(STATES)
    keep_states(made, 8, 18)
    assert made.ask(request_of("s", 24))[0] == 8


def test_states_are_kept_by_single_blocks(rig):
    with pytest.raises(ConnectorOptionError, match="are kept by single blocks; leave the option"):
        rig(STATES, block_size=2 * BLOCK_SIZE)


def test_without_a_pool_no_block_of_a_window_is_read_after_its_step(sides):
    made = sides("OffloadingConnector", 1, groups=GROUPS, cpu_bytes_to_use=1 << 20)
    keep(made)
    assert made.ask(request_of("s", 24))[0] == 0


def test_cache_with_other_groups_shares_no_block(rig, tmp_path):
    tier = {"tier": "file", "shared_storage_path": str(tmp_path)}
    first = rig(**tier)
    keep(first)
    again = rig(**tier)
    other = rig((KVCacheGroup(("b",)), KVCacheGroup(("a",), WINDOW)), **tier)

    def found(made):
        asked = request_of("s", 24)
        for _ in range(2000):
            number, _ = made.ask(asked)
            if number is not None:
                return number
            made.step()
        raise AssertionError

    assert found(again) == 20
    assert found(other) == 0
    assert found(rig((KVCacheGroup(),), **tier)) == 0


def test_layer_that_no_group_has_is_refused(rig):
    with pytest.raises(CacheLayoutError, match=r"the layers \['b'\] belong to no group"):
        rig((KVCacheGroup(("a",)), KVCacheGroup(("a",), WINDOW)))


def test_request_of_another_number_of_groups_is_refused(rig):
    made = rig()
    keep(made)
    again = request_of("s", 24)
    assert made.ask(again)[0]
    text = "has 1 KV cache groups; this connector moves the 2 of its KVCacheConfig"
    with pytest.raises(ConnectorOptionError, match=text):
        made.allocate(again, [1, 2, 3, 4, 5, 6], 20)


def test_seed_spec_is_refused_where_its_handlers_would_mix_up_groups():
    from wtransfer.errors import OffloadingOptionError
    from wtransfer.kv.canonical import CanonicalKVCaches, CanonicalKVCacheTensor
    from wtransfer.specs.seed_adapter import seed_caches

    tensor = CanonicalKVCacheTensor(torch.zeros((4, 64), dtype=torch.uint8), 64)
    with pytest.raises(
        OffloadingOptionError, match="know one group of layers; this KV cache has 2"
    ):
        seed_caches(CanonicalKVCaches([tensor], [[], []]), SimpleNamespace(gpu_block_size=4))


def test_layer_that_shares_the_cache_of_another_is_kept_with_that(rig):
    made = rig()
    caches = made.caches[0]
    side = made.workers[0].side
    side.register_kv_caches(caches | {"c": caches["b"]})
    with pytest.raises(CacheLayoutError, match=r"the layers \['d'\] belong to no group"):
        side.register_kv_caches(caches | {"c": caches["b"], "d": caches["b"].clone()})


def test_blocks_that_an_overdue_store_only_reads_are_given_back(rig):
    made = rig(deadline_s=0.05)
    made.workers[0].side._worker.get_finished = list  # it reports nothing
    request = request_of("r", 24)
    made.ask(request)
    made.allocate(request, (FULL, LAST))
    made.step(step(new=[(request, 0, 24)]))
    assert made.pool.held == LAST
    deadline = Deadline(10.0)
    while made.pool.held:
        deadline.check("the end of the store")
        made.step()
    assert not made.scheduler.has_pending_block_frees()
    stats = made.scheduler.get_stats()
    assert (stats["overdue_jobs_total"], stats["overdue_blocks_held"]) == (1, 0)
