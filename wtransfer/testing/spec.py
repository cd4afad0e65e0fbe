"""The conformance kit of offloading specs; the built-in specs pass it.

Subclass it in a test module of your own::

    from wtransfer.testing.spec import SpecConformance


    class TestMine(SpecConformance):
        spec = "mine"
        size_option = "bytes_to_use"

        def options_in(self, folder):
            return {"path": str(folder)}

        def reach(self, worker, where):
            return memoryview(worker.slots[where.slots[0]])

Manager and worker run in this process, with real tensors, and everything that passes between them
is copied as it would be between processes. Tests cannot be overridden; state the tests that the
spec may fail, each with its reason::

        expected_failures = {"test_groups_of_layers_are_kept_apart": "it keeps one group only"}
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import os
import random
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import xxhash

from wtransfer.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from wtransfer.deadline import Deadline
from wtransfer.errors import BlockNotKeptError
from wtransfer.kv.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from wtransfer.kv.keys import fence_key, make_offload_key
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    ReqContext,
)
from wtransfer.specs.seed_adapter import SeedSpecAdapter
from wtransfer.testing.kit import (
    ConformanceKit,
    checked_stats,
    fallen_counters,
    recorded_unpickling,
    registered_name,
    usually,
)
from wtransfer.testing.leftovers import Leftovers
from wtransfer.testing.reachable import check_this_host_only, reachable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from wtransfer.kv.keys import OffloadKey
    from wtransfer.specs.interface import (
        LoadStoreSpec,
        PrepareStoreOutput,
        TransferResult,
    )

    MakeHost = Callable[..., "SpecHost"]


@dataclass(frozen=True)
class Geometry:
    """Shape of a cache."""

    num_layers: int = 2
    """Layers of each group."""
    page_nbytes: int = 1024
    """Bytes of a layer in one block."""
    num_groups: int = 1
    """Groups of layers; each has blocks of its own."""
    block_size: int = 16
    """Tokens per block."""
    blocks_per_chunk: int = 1
    """Blocks that are kept under one key."""
    num_blocks: int = 32
    """Blocks of the cache, of each group."""

    @property
    def chunk_nbytes(self) -> int:
        """Largest number of bytes that are kept under one key."""
        return self.num_layers * self.page_nbytes * self.num_groups * self.blocks_per_chunk


GEOMETRIES = {
    "one layer": Geometry(num_layers=1),
    "many layers of small pages": Geometry(num_layers=48, page_nbytes=64),
    "one token per block": Geometry(num_layers=4, page_nbytes=32, block_size=1, num_blocks=256),
    "large pages": Geometry(num_layers=2, page_nbytes=2**18, block_size=128, num_blocks=12),
    "pages of no round size": Geometry(num_layers=3, page_nbytes=16 * 37),
}
"""Shapes of caches."""
FEW = Geometry(num_layers=2, page_nbytes=2**15)
"""Blocks so large that headers and alignment do not count."""
NUM_FEW = 8
"""Approximate number of blocks of `FEW` that fit into a tier that is to evict."""
LARGE = Geometry(num_layers=2, page_nbytes=2**23, num_blocks=2)
"""Blocks whose copies take milliseconds: far longer than to begin one."""
_OTHER_BYTES = "other bytes were loaded than were stored"
_NOT_LOADED = "a block that was stored could not be loaded"
TINY = Geometry(num_layers=2, page_nbytes=2**12)
"""Blocks whose copies take next to no time."""
NUM_REQUESTS = 1000
"""Requests that shall leave nothing."""
NUM_CALLS = 25
"""Calls whose median is compared."""
HELD_UP_S = 5e-3
"""Median of a call that holds a scheduler up, in seconds, if it is also `HELD_UP` times as long as
one of a manager in memory."""
HELD_UP = 50
MOST_TRIES = 20
"""Most tries to see a job running: this process may be held up until the job has ended."""


class SpecConformance(ConformanceKit):
    """Subclass it with a name that starts with ``Test``, and state the spec.

    Attributes:
        spec: Name of the spec, as a user would write it.
        spec_cls: Instead of a name: the class of a spec that is not installed.
        options: Its options.
        size_option: The option that bounds the size in bytes. Without one, the tests of evictions
            are skipped.
        deadline_s: Bound on every wait, in seconds. A test that takes six times as long has
            failed: a call of the spec hangs.
        ends_within_s: Bound on a shutdown while jobs are running, and on its leftovers, in
            seconds.
    """

    spec: ClassVar[str] = ""
    spec_cls: ClassVar[type | None] = None
    options: ClassVar[dict[str, Any]] = {}
    size_option: ClassVar[str] = ""
    deadline_s: ClassVar[float] = 10.0
    ends_within_s: ClassVar[float] = 5.0

    smoke_test = "test_one_block_is_stored_and_loaded"
    _contract = (OffloadingSpec, OffloadingManager, OffloadingWorker)

    def run_test(self, test: Callable[[], None]) -> None:
        """Run a test on a thread, whose time is bounded."""
        self.run_bounded(test, "a call of the spec")

    def options_in(self, folder: Path) -> dict[str, Any]:
        """Return the spec's options.

        Args:
            folder: An empty folder of the test's own.
        """
        del folder
        return dict(self.options)

    def reach(self, worker: OffloadingWorker, where: LoadStoreSpec) -> memoryview | None:
        """Return bytes of the one block that is kept there, to be damaged by a test.

        Override it, or the kit does not test checksums. For memory return
        ``memoryview(worker.slots[where.slots[0]])``, for a file a ``mmap.mmap`` of it. None: the
        bytes cannot be reached.

        Args:
            worker: The side that has stored the block.
            where: Location of the block, as `prepare_store` has returned it.
        """
        del worker, where
        return None

    # -- fixtures

    @pytest.fixture(autouse=True)
    def _name_folder(self, tmp_path: Path) -> None:
        self._folder = tmp_path / "kept"
        self._folder.mkdir()

    @pytest.fixture
    def make_spec(self) -> Callable[[OffloadingConfig], OffloadingSpec]:
        """Make specs of the class that is tested."""
        name = self.spec or registered_name("specs", self.spec_cls)

        def make(config: OffloadingConfig) -> OffloadingSpec:
            assert isinstance(config.extra_config, dict)
            config.extra_config["spec_name"] = name
            return OffloadingSpecFactory.create_spec(config)

        return make

    @pytest.fixture
    def host(self, make_spec: Any) -> Iterator[MakeHost]:
        """Make hosts of this spec, which are closed at the end of the test."""
        closing = contextlib.ExitStack()

        def make(geometry: Geometry = FEW, num_kept: int = 64, *, num_ranks: int = 1) -> SpecHost:
            options = self._options_for(geometry, num_kept * num_ranks)
            made = SpecHost(make_spec, geometry, options, num_ranks)
            closing.callback(made.close)
            return made

        yield make
        self.end_bounded(closing.close, "shutdown()")

    @pytest.fixture
    def small_host(self, host: MakeHost) -> SpecHost:
        """Make a host whose tier is smaller than its cache."""
        if not self.size_option:
            self.skip_not_tested(
                "a full tier: size_option = ... in the subclass of the kit names the option that "
                "bounds the size in bytes"
            )
        return self.run_bounded(lambda: host(num_kept=NUM_FEW), "a constructor")

    def _options_for(self, geometry: Geometry, num_kept: int) -> dict[str, Any]:
        # Room for headers and alignment, which count with small blocks.
        nbytes = num_kept * (geometry.chunk_nbytes + 2**13) + 2**16
        size = {self.size_option: nbytes} if self.size_option else {}
        return {**self.options_in(self._folder), **size}

    # -- bytes

    def test_one_block_is_stored_and_loaded(self, host: MakeHost) -> None:
        """The block comes back in another block of the cache."""
        with self.is_smoke_test():
            self._check_one_block(host)

    @usually(
        "manager and worker do not agree on the place of a block, or that a job is never "
        "returned as successful; start here, the other tests build on it"
    )
    def _check_one_block(self, host: MakeHost) -> None:
        made = host()
        made.write(0, seed=1)
        made.store([key_of(1)], [0])
        assert made.load([key_of(1)], [1]), _NOT_LOADED
        assert made.digest(1) == made.digest(0), _OTHER_BYTES

    @usually(
        "layers are left out, pages are padded or cut, or that the order of block_ids is changed"
    )
    @pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
    def test_blocks_come_back_as_they_were(self, host: MakeHost, geometry: Geometry) -> None:
        """Blocks are loaded into any block of the cache, in any order, and into no other."""
        made = host(geometry, num_kept=8)
        keys = [key_of(number) for number in range(4)]
        for block in range(geometry.num_blocks):
            made.write(block, seed=block)
        stored = [made.digest(block) for block in (7, 1, 4, 2)]
        made.store(keys, [7, 1, 4, 2])
        expected = made.digests()
        for key, block in ((2, 9), (0, 3), (3, 0), (1, 7)):
            expected[block] = stored[key]
        assert made.load([keys[2], keys[0], keys[3], keys[1]], [9, 3, 0, 7]), _NOT_LOADED
        assert made.digests() == expected, "the cache has other bytes than those that were stored"

    @usually("a load takes the block away")
    def test_one_block_may_be_loaded_many_times(self, host: MakeHost) -> None:
        """One load may copy a block into several blocks; another load may follow."""
        made = host()
        made.write(0, seed=1)
        made.store([key_of(1)], [0])
        for blocks in ([1, 2, 3], [4]):
            assert made.load([key_of(1)] * len(blocks), blocks), _NOT_LOADED
            assert {made.digest(block) for block in blocks} == {made.digest(0)}, _OTHER_BYTES

    @usually("a view of the cache is kept in the place of a copy")
    def test_store_copies_the_block(self, host: MakeHost) -> None:
        """The cache's block is free once its store has finished."""
        made = host()
        made.write(0, seed=1)
        first = made.digest(0)
        made.store([key_of(1)], [0])
        made.write(0, seed=2)
        made.store([key_of(2)], [0])
        assert made.load([key_of(1), key_of(2)], [1, 2]), _NOT_LOADED
        assert (made.digest(1), made.digest(2)) == (first, made.digest(0)), _OTHER_BYTES

    @usually("group_sizes is not looked at: block_ids are those of all groups, one after the other")
    def test_groups_of_layers_are_kept_apart(self, host: MakeHost) -> None:
        """One job moves blocks of several groups; equal numbers mean different blocks."""
        made = host(Geometry(num_groups=2))
        keys = [key_of(1, group=0), key_of(2, group=0), key_of(1, group=1)]
        for block in range(made.geometry.num_blocks):
            made.write(block, seed=block, group=0)
            made.write(block, seed=1000 + block, group=1)
        ctx = made.request()
        prepared = made.manager.prepare_store(keys, ctx)
        assert prepared is not None
        job = made.submit_store([5, 6, 7], prepared.store_spec, group_sizes=[2, 1])
        assert made.succeeded(job)
        made.manager.complete_store(keys, ctx)
        expected = made.digests()
        second = made.geometry.num_blocks
        for destination, source in ((1, 5), (2, 6), (second + 2, second + 7)):
            expected[destination] = expected[source]
        where = made.manager.prepare_load(keys, ctx)
        assert made.succeeded(made.submit_load([1, 2, 2], where, group_sizes=[2, 1]))
        assert made.digests() == expected, "the cache has other bytes than those that were stored"

    @usually(
        "block_indices is not looked at: the first block of a load may be in the middle of its "
        "chunk"
    )
    def test_chunks_of_several_blocks(self, host: MakeHost) -> None:
        """Several blocks have one key; a load may begin in the middle of a chunk."""
        made = host(Geometry(blocks_per_chunk=2))
        blocks = [3, 8, 1, 5]
        for block in blocks:
            made.write(block, seed=block)
        ctx, keys = made.request(), [key_of(1), key_of(2)]
        prepared = made.manager.prepare_store(keys, ctx)
        assert prepared is not None
        assert made.succeeded(made.submit_store(blocks, prepared.store_spec))
        made.manager.complete_store(keys, ctx)
        where = made.manager.prepare_load(keys, ctx)
        job = made.submit_load([10, 11, 12], where, block_indices=[1])
        assert made.succeeded(job)
        assert [made.digest(block) for block in (10, 11, 12)] == [
            made.digest(b) for b in (8, 1, 5)
        ], _OTHER_BYTES

    @usually(
        "blocks have no checksum, it covers a part of them, or it is compared after the cache was "
        "written"
    )
    @pytest.mark.parametrize("place", ["first", "middle", "last"])
    def test_a_damaged_block_is_not_loaded(self, host: MakeHost, place: str) -> None:
        """The job fails, no byte of the cache is touched, and the block may be stored anew.

        Needs `reach`.
        """
        made, key, ctx = host(), key_of(1), ReqContext("request of a damaged block")
        made.manager.on_new_request(ctx)
        made.write(0, seed=1)
        prepared = made.store([key], [0])
        assert prepared is not None
        memory = self.reach(made.worker, prepared.store_spec)
        if memory is None:
            self.skip_not_tested(
                "whether damaged blocks are refused: reach() has returned None. Write "
                "`def reach(self, worker, where): return memoryview(...)` in the subclass of the "
                "kit: the bytes, in memory or in a mapped file, that the worker keeps of the block "
                "that it has stored at `where`"
            )
        assert made.load([key], [2], ctx), _NOT_LOADED
        memory[{"first": 0, "middle": len(memory) // 2, "last": len(memory) - 1}[place]] ^= 1
        before = made.digests()
        where = made.manager.prepare_load([key], ctx)
        is_loaded = made.succeeded(made.submit_load([1], where))
        assert not is_loaded, f"a block whose {place} byte was damaged was loaded"
        assert made.digests() == before, "a block that is not loaded was written to the cache"
        is_noted = made.manager.load_failed([key], ctx, suspect=True)
        made.manager.complete_load([key], ctx)
        # Else the connector asks for it under another key.
        if is_noted:
            assert made.manager.lookup(key, ctx) is not LookupResult.HIT, (
                "load_failed() has returned True, and a damaged block is still a hit"
            )
            made.store([key], [0])
            assert made.load([key], [1]), "a block is not loaded that was stored anew"
            assert made.digest(1) == made.digest(0), _OTHER_BYTES

    @usually("all ranks write to one file or one store: put `config.parallel.rank` into its name")
    def test_ranks_keep_their_own_bytes(self, host: MakeHost) -> None:
        """Two ranks of an instance store other bytes under the same keys; each loads its own."""
        made = host(num_ranks=2)
        ranks, keys = range(2), [key_of(1), key_of(2)]
        for rank in ranks:
            for block in (0, 1):
                made.write(block, seed=2 * rank + block, rank=rank)
        stored = [[made.digest(block, rank=rank) for block in (0, 1)] for rank in ranks]
        made.store(keys, [0, 1])
        assert made.load(keys, [5, 4]), "a rank could not load the blocks that it has stored"
        loaded = [[made.digest(block, rank=rank) for block in (5, 4)] for rank in ranks]
        assert loaded == stored, "a rank has loaded other bytes than it has stored"

    # -- lookups and completed stores

    @usually(
        "prepare_store() makes a block a hit, and not complete_store(); or blocks are found by a "
        "part of their keys, which begin with the weights, and end with the KV cache group"
    )
    def test_a_block_is_a_hit_when_its_store_is_complete(self, host: MakeHost) -> None:
        """Before `complete_store`, a lookup is no hit."""
        made = host()
        ctx, key = made.request(), key_of(1)
        assert made.manager.lookup(key, ctx) is LookupResult.MISS, (
            "a block is found that is not there"
        )
        prepared = made.manager.prepare_store([key], ctx)
        assert prepared is not None
        assert prepared.keys_to_store == [key], (
            "others are to be stored than those that are missing"
        )
        assert made.manager.lookup(key, ctx) is not LookupResult.HIT, (
            "a block is a hit before its store is complete"
        )
        assert made.succeeded(made.submit_store([0], prepared.store_spec))
        assert made.manager.lookup(key, ctx) is not LookupResult.HIT, (
            "a block is a hit before its store is complete"
        )
        made.manager.complete_store([key], ctx)
        assert made.manager.lookup(key, ctx) is LookupResult.HIT, (
            "a block that was stored is not found"
        )
        others = {
            "tokens": key_of(2),
            "group": key_of(1, 1),
            "weights": key_of(1, weights="others"),
        }
        for what, other in others.items():
            assert made.manager.lookup(other, ctx) is LookupResult.MISS, (
                f"a block is found that is not there: it is of other {what} than the one that is"
            )

    @usually("keys_to_store contains keys that are kept, or one of them twice")
    def test_only_new_keys_are_stored(self, host: MakeHost) -> None:
        """Keys that are not kept are stored once each, in the order of the call."""
        made = host()
        made.store([key_of(1)], [0])
        keys = [key_of(number) for number in (3, 1, 2, 3)]
        prepared = made.manager.prepare_store(keys, made.request())
        assert prepared is not None
        assert prepared.keys_to_store == [key_of(3), key_of(2)], (
            "others are to be stored than those that are missing"
        )

    @usually("complete_store() does not look at `success`")
    def test_failed_store_is_a_miss(self, host: MakeHost) -> None:
        """The block can be stored again, with other bytes."""
        made = host()
        ctx, key = made.request(), key_of(1)
        made.write(0, seed=1)
        prepared = made.manager.prepare_store([key], ctx)
        assert prepared is not None
        assert made.succeeded(made.submit_store([0], prepared.store_spec))
        made.manager.complete_store([key], ctx, success=False)
        assert made.manager.lookup(key, ctx) is LookupResult.MISS, (
            "a block is found that is not there"
        )
        made.write(0, seed=2)
        made.store([key], [0])
        assert made.load([key], [1]), _NOT_LOADED
        assert made.digest(1) == made.digest(0), _OTHER_BYTES

    @usually("the hits are pinned before all keys were looked up, or that the error is another one")
    def test_prepare_load_refuses_missing_blocks(self, host: MakeHost) -> None:
        """The error is a `BlockNotKeptError`, and the hits beside it are not pinned."""
        made = host()
        made.store([key_of(1)], [0])
        before = dict(made.manager.get_stats())
        with contextlib.suppress(BlockNotKeptError):
            made.manager.prepare_load([key_of(1), key_of(2)], made.request())
            raise AssertionError("prepare_load() has returned a place of a block that is not kept")
        assert dict(made.manager.get_stats()) == before, (
            "a prepare_load() that was refused has pinned blocks"
        )

    # -- eviction

    @usually("a slot is given to two blocks, or that an evicted key is still a hit")
    def test_evictions_leave_hits_intact(self, small_host: SpecHost) -> None:
        """Three times as many blocks as fit are stored; every hit has its bytes."""
        num_kept = len(small_host.fill())
        assert num_kept > 1, "the tier keeps one block only"
        for _ in range(2 * num_kept):
            assert small_host.store_next() is not None, "no block can be stored any more"
        ctx = small_host.request()
        found = {key: small_host.manager.lookup(key, ctx) for key in small_host.digest_of}
        hits = [key for key, result in found.items() if result is LookupResult.HIT]
        assert sorted(hits) == sorted(small_host.kept)
        for key in hits:
            assert small_host.load([key], [1]), _NOT_LOADED
            assert small_host.digest(1) == small_host.digest_of[key], _OTHER_BYTES

    @usually("loads of a block are not counted: the first that ends unpins it for all")
    def test_pinned_blocks_are_not_evicted(self, small_host: SpecHost) -> None:
        """A block stays pinned until the last of several loads has ended."""
        key = small_host.fill()[0]
        first, second = small_host.request(), small_host.request()
        where = small_host.manager.prepare_load([key], first)
        small_host.manager.prepare_load([key], second)
        for ctx in (first, second):
            small_host.press()
            assert small_host.manager.lookup(key, ctx) is LookupResult.HIT, (
                "a block that was stored is not found"
            )
            small_host.manager.complete_load([key], first)
        assert small_host.succeeded(small_host.submit_load([1], where)), _NOT_LOADED
        assert small_host.digest(1) == small_host.digest_of[key], _OTHER_BYTES

    @usually(
        "blocks are evicted one by one until no further one can be; look first whether there "
        "are enough"
    )
    def test_eviction_is_all_or_none(self, small_host: SpecHost) -> None:
        """A refusal evicts nothing, and as many blocks fit as before."""
        kept = small_host.fill()
        small_host.manager.prepare_load(kept[1:], small_host.request())
        events = list(small_host.manager.take_events())
        del events
        new = [key_of(10**6 + number) for number in range(2)]
        assert small_host.manager.prepare_store(new, small_host.request()) is None, (
            "blocks are to be stored for which there is no room"
        )
        ctx = small_host.request()
        assert {small_host.manager.lookup(key, ctx) for key in kept} == {LookupResult.HIT}, (
            "a prepare_store() that was refused has evicted blocks"
        )
        assert {small_host.manager.lookup(key, ctx) for key in new} == {LookupResult.MISS}
        assert list(small_host.manager.take_events()) == []
        prepared = small_host.manager.prepare_store(new[:1], small_host.request())
        assert prepared is not None
        assert prepared.evicted_keys == [kept[0]]

    @usually("a block is evicted in favour of those with which it was offered")
    def test_blocks_of_one_store_stay(self, small_host: SpecHost) -> None:
        """Of a request's blocks those that are kept do not give way to those that are new."""
        kept = small_host.fill()
        keys = [kept[0], key_of(10**6), kept[1]]
        prepared = small_host.store(keys, [1, 2, 3])
        assert prepared is not None, "no block can be stored any more"
        assert len(prepared.evicted_keys) == 1, "nothing gave way"
        ctx = small_host.request()
        found = [small_host.manager.lookup(key, ctx) for key in keys]
        assert found == [LookupResult.HIT] * 3, "a block of the same prepare_store() was evicted"

    @usually("a slot whose store is under way is taken for free")
    def test_blocks_being_stored_are_not_evicted(self, small_host: SpecHost) -> None:
        """The slot of a block is not reused until its store is complete."""
        ctx, key = small_host.request(), key_of(10**6)
        small_host.write(1, seed=10**6)
        prepared = small_host.manager.prepare_store([key], ctx)
        assert prepared is not None
        small_host.fill()
        small_host.press()
        assert small_host.succeeded(small_host.submit_store([1], prepared.store_spec))
        small_host.manager.complete_store([key], ctx)
        assert small_host.load([key], [2]), _NOT_LOADED
        assert small_host.digest(2) == small_host.digest(1), _OTHER_BYTES
        for other in small_host.kept:
            assert small_host.load([other], [2]), _NOT_LOADED
            assert small_host.digest(2) == small_host.digest_of[other], _OTHER_BYTES

    @usually("the worker does not keep the key beside the bytes, to compare it")
    def test_load_from_reused_slot_gives_no_other_bytes(self, small_host: SpecHost) -> None:
        """The worker checks which block a slot holds, whatever the host asks for."""
        ctx = small_host.request()
        places = {}
        for key in small_host.fill():
            places[key] = small_host.manager.prepare_load([key], ctx)
            small_host.manager.complete_load([key], ctx)
        for _ in range(3 * len(places)):
            small_host.store_next()
        gone = [key for key in places if small_host.manager.lookup(key, ctx) is LookupResult.MISS]
        assert gone, "nothing gave way"
        for key in gone:
            before = small_host.digests()
            if small_host.succeeded(small_host.submit_load([1], places[key])):
                # A place that is named by its block may still be right.
                assert small_host.digest(1) == small_host.digest_of[key], _OTHER_BYTES
                before[1] = small_host.digest_of[key]
            assert small_host.digests() == before, (
                "a block that is not loaded was written to the cache"
            )

    @usually(
        "several of the calls above do not go together; the first assertion says which block "
        "was wrong"
    )
    def test_random_requests(self, small_host: SpecHost) -> None:
        """Requests look up, load and store in any order; every hit has its bytes."""
        numbers = random.Random(7)  # noqa: S311  # no secret
        num_blocks = 3 * NUM_FEW
        num_loaded = 0
        for _ in range(200):
            ctx = small_host.request()
            first = numbers.randrange(num_blocks)
            keys = [key_of(n % num_blocks) for n in range(first, first + numbers.randint(1, 4))]
            small_host.manager.touch(keys, ctx)
            found = [small_host.manager.lookup(key, ctx) for key in keys]
            hits = [k for k, f in zip(keys, found, strict=True) if f is LookupResult.HIT]
            if hits:
                assert small_host.load(hits, range(8, 8 + len(hits)), ctx), _NOT_LOADED
                num_loaded += len(hits)
            for block, key in enumerate(hits, start=8):
                small_host.write(0, seed=int.from_bytes(key[16:48], "big"))
                assert small_host.digest(block) == small_host.digest(0), _OTHER_BYTES
            for block, key in enumerate(keys):
                small_host.write(block, seed=int.from_bytes(key[16:48], "big"))
            small_host.store(keys, range(len(keys)), ctx)
            small_host.manager.on_request_finished(ctx)
        assert num_loaded > 0, "nothing was ever found again"

    # -- completions

    @usually("a completion counts down the pin of any request; keep pins by request")
    def test_duplicate_completions_are_ignored(self, small_host: SpecHost) -> None:
        """A duplicate does not take the pin of another request."""
        key = small_host.fill()[0]
        first, second = small_host.request(), small_host.request()
        small_host.manager.prepare_load([key], first)
        small_host.manager.prepare_load([key], second)
        for _ in range(3):
            small_host.manager.complete_load([key], first)
            small_host.manager.complete_store([key], first, success=False)
        small_host.press()
        assert small_host.manager.lookup(key, second) is LookupResult.HIT, (
            "a block that was stored is not found"
        )

    @usually("a job or a key is looked up by `[]`")
    def test_unknown_completions_are_ignored(self, host: MakeHost) -> None:
        """Completions may be late, or name jobs that never were."""
        made = host()
        ctx = made.request()
        made.manager.complete_load([key_of(1)], ctx)
        made.manager.complete_store([key_of(1)], ctx)
        assert made.manager.lookup(key_of(1), ctx) is LookupResult.MISS, (
            "a block is found that is not there"
        )

    # -- jobs

    @usually("wait() returns early, or that get_finished() returns a job twice or never")
    def test_every_job_is_reported_once(self, host: MakeHost) -> None:
        """Many jobs run at a time; some are waited for."""
        made = host()
        ctx = made.request()
        jobs = []
        for number in range(20):
            made.write(number, seed=number)
            prepared = made.manager.prepare_store([key_of(number)], ctx)
            assert prepared is not None
            jobs.append(made.submit_store([number], prepared.store_spec))
        made.worker.wait(set(jobs[:5]))
        made.collect()
        assert set(jobs[:5]) <= set(made.finished), "wait() returned before its jobs had ended"
        end = time.monotonic() + self.deadline_s
        while set(made.finished) != set(jobs):
            assert time.monotonic() < end, f"only {sorted(made.finished)} were reported"
            made.collect()
        assert made.collect() == []
        assert all(made.finished.values())

    @usually(
        "submit_store() or submit_load() copies, or waits for the thread that does: the model "
        "stands still meanwhile"
    )
    @pytest.mark.parametrize("direction", ["store", "load"])
    def test_submit_does_not_copy(self, host: MakeHost, direction: str) -> None:
        """The model's thread goes on meanwhile: a job may still run when it was submitted.

        A single such try is enough: a fast job may have ended where this process was held up.
        """
        made = host(LARGE, num_kept=2)
        key, ctx = key_of(1), made.request()
        made.write(0, seed=1)
        if direction == "load":
            made.store([key], [0])
        for _ in range(MOST_TRIES):
            if direction == "load":
                where = made.manager.prepare_load([key], ctx)
                job = made.submit_load([1], where)
            else:
                prepared = made.manager.prepare_store([key], ctx)
                assert prepared is not None
                job = made.submit_store([0], prepared.store_spec)
            made.collect()
            was_running = job not in made.finished
            assert made.succeeded(job)
            if direction == "load":
                made.manager.complete_load([key], ctx)
            else:
                made.manager.complete_store([key], ctx, success=False)
            if was_running:
                return
        raise AssertionError(
            f"{MOST_TRIES} of {MOST_TRIES} jobs that {direction} {LARGE.chunk_nbytes:,} bytes had "
            f"ended when submit_{direction} had returned"
        )

    @usually("a job is reported when its copy was begun, or the last of several copies is not")
    @pytest.mark.parametrize("direction", ["store", "load"])
    def test_finished_job_has_moved_all_bytes(self, host: MakeHost, direction: str) -> None:
        """The cache is read, or written to, as soon as `get_finished` has named the job."""
        made, ctx = host(LARGE, num_kept=2), ReqContext("request of large blocks")
        made.manager.on_new_request(ctx)
        made.write(0, seed=1)
        expected = made.digest(0)

        def end(job: int) -> None:
            deadline = Deadline(self.deadline_s)
            while job not in made.finished:
                made.collect()
                deadline.check("the end of a job")
            assert made.finished[job], f"a {direction} was not successful"

        prepared = made.manager.prepare_store([key_of(1)], ctx)
        assert prepared is not None
        end(made.submit_store([0], prepared.store_spec))
        if direction == "store":
            # What comes last is gone first.
            for tensor in reversed(made.caches[0][0]):
                tensor[0].zero_()
        made.manager.complete_store([key_of(1)], ctx)
        end(made.submit_load([1], made.manager.prepare_load([key_of(1)], ctx)))
        last = bytes(made.caches[0][0][-1][1][-64:].numpy())
        made.write(0, seed=1)
        assert last == bytes(made.caches[0][0][-1][0][-64:].numpy()), (
            f"a {direction} was reported before its last bytes were there"
        )
        assert made.digest(1) == expected, f"a {direction} was reported before its bytes were there"

    @usually("a job is looked up by `[]`, though it was reported before")
    def test_wait_ignores_unknown_jobs(self, host: MakeHost) -> None:
        """Jobs that were never submitted, or were reported already, are ignored."""
        made = host()
        prepared = made.store([key_of(1)], [0])
        assert prepared is not None
        made.worker.wait({*made.finished, 10**9})
        made.worker.wait(set())
        assert made.collect() == []

    # -- resets and commits

    @usually("reset_cache() does nothing, or frees the slot of a block that is being loaded")
    def test_reset_forgets_all_blocks(self, host: MakeHost) -> None:
        """A block that is being loaded is no hit any more; its load is successful."""
        made = host()
        keys = [key_of(number) for number in range(3)]
        for block in range(3):
            made.write(block, seed=block)
        made.store(keys, [0, 1, 2])
        ctx = made.request()
        where = made.manager.prepare_load(keys[:1], ctx)
        made.manager.reset_cache()
        assert {made.manager.lookup(key, ctx) for key in keys} == {LookupResult.MISS}, (
            "a block is found after reset_cache()"
        )
        assert made.succeeded(made.submit_load([5], where))
        assert made.digest(5) == made.digest(0), _OTHER_BYTES
        made.manager.complete_load(keys[:1], ctx)
        assert made.manager.lookup(keys[0], ctx) is LookupResult.MISS, (
            "a block is found that is not there"
        )
        made.store(keys, [2, 1, 0])
        assert made.load(keys, [8, 9, 10]), _NOT_LOADED
        assert [made.digest(block) for block in (8, 9, 10)] == [
            made.digest(b) for b in (2, 1, 0)
        ], _OTHER_BYTES

    @usually(
        "weights_changed() keeps blocks that can never be hits, and pins or counts them for good"
    )
    def test_store_and_load_after_weights_change(self, small_host: SpecHost) -> None:
        """After a change, blocks are stored and loaded as before."""
        small_host.fill()
        for _ in range(3):
            small_host.manager.weights_changed()
            assert small_host.store_next() is not None, "no block can be stored any more"
            key = small_host.kept[-1]
            assert small_host.load([key], [1]), _NOT_LOADED
            assert small_host.digest(1) == small_host.digest_of[key], _OTHER_BYTES

    # -- events and statistics

    @usually("removals are not told, or are told after what took their place")
    def test_events_match_lookups(self, small_host: SpecHost) -> None:
        """Events give the same set of blocks as lookups; a spec may have no events."""
        manager, key = small_host.manager, key_of(10**6)
        small_host.fill()
        for _ in range(10):
            small_host.store_next()
        ctx, known = small_host.request(), set[bytes]()

        def compare(when: str) -> None:
            nonlocal known
            events = list(manager.take_events())
            if not events and not known:
                pytest.skip("this spec tells no events")
            for event in events:
                is_new = known.isdisjoint(event.keys)
                is_right = known.issuperset(event.keys) if event.removed else is_new
                what = (
                    "removes blocks that were not told" if event.removed else "tells blocks twice"
                )
                assert is_right, f"an event {what}, {when}"
                known = known - set(event.keys) if event.removed else known | set(event.keys)
                assert len(known) <= most, "removals come before what takes their place"
            keys = [*small_host.digest_of, key]
            hits = {each for each in keys if manager.lookup(each, ctx) is LookupResult.HIT}
            assert known == hits, f"events tell other blocks than lookup() finds, {when}"

        most = len(small_host.kept)
        compare("after evictions")
        prepared = manager.prepare_store([key], ctx)
        assert prepared is not None
        compare("while a block is being stored")
        assert small_host.succeeded(small_host.submit_store([0], prepared.store_spec))
        manager.complete_store([key], ctx, success=False)
        compare("after a store that has failed")
        again = small_host.kept[-1]
        manager.reset_cache()
        compare("after reset_cache()")
        # What becomes of slots from before says nothing of a block that is stored anew.
        small_host.store([again], [0])
        for _ in range(most - 2):
            small_host.store_next()
            compare("after blocks from before reset_cache() have given way")

    @usually("get_stats() returns text or objects, or that a counter starts again")
    def test_stats_are_numbers_and_counters_rise(self, host: MakeHost) -> None:
        """Statistics are names and numbers; counters, which end in ``_total``, never fall."""
        made = host()
        before = _stats(made)
        for number in range(3):
            made.store([key_of(number)], [0])
            assert made.load([key_of(number)], [1]), _NOT_LOADED
            made.manager.reset_cache()
        after = _stats(made)
        assert fallen_counters(before, after) == [], "counters that have fallen"
        if not after:
            pytest.skip("this spec has no statistics")

    # -- what it costs

    @usually("the call waits for the medium; look up and prepare in memory, copy on a thread")
    def test_no_call_holds_the_scheduler_up(self, host: MakeHost) -> None:
        """Medians of the calls that a step makes, beside those of a manager in memory."""
        made = host(TINY)
        made.write(0, seed=1)
        bare = CPUOffloadingManager(64)
        own, other = (_durations(each, made) for each in (made.manager, bare))
        slow = {
            name: f"{own[name] * 1e3:.1f} ms, in memory {other[name] * 1e3:.3f} ms"
            for name in own
            if own[name] > max(HELD_UP_S, HELD_UP * other[name])
        }
        assert slow == {}, "the scheduler, or the model, waits for these calls"

    @usually("what is kept for a request or a job is not dropped at its end")
    def test_requests_leave_nothing(self, host: MakeHost) -> None:
        """Memory, threads and descriptors stay, over a thousand requests."""
        made, numbers = host(TINY, num_kept=NUM_FEW), itertools.count()

        def live(num_requests: int) -> None:
            for number in itertools.islice(numbers, num_requests):
                ctx, key = made.request(), key_of(number % NUM_FEW)
                made.manager.lookup(key_of(10**6), ctx)
                made.store([key], [0], ctx)
                assert made.load([key], [1], ctx), _NOT_LOADED
                made.manager.on_request_finished(ctx)
                list(made.manager.take_events())
                made.forget_results()
                # In the rounds between, nothing is new. What forgets nothing has to have a bound.
                if self.size_option and number % (2 * NUM_FEW) == 0:
                    made.manager.reset_cache()

        with traced_memory():
            # The first requests fill caches.
            live(NUM_REQUESTS // 4)
            gc.collect()
            leftovers, before = Leftovers(), tracemalloc.get_traced_memory()[0]
            live(NUM_REQUESTS)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        leftovers.check(self.ends_within_s)
        # Less than an entry for each request; a library may lose some words with each call.
        assert grown < 192 * NUM_REQUESTS, f"{NUM_REQUESTS} requests hold {grown:,} bytes"

    # -- trust

    @usually(
        "a server is bound to no address, which is all: bind it to 127.0.0.1, or a Unix socket"
    )
    def test_only_this_host_reaches_it(self, host: MakeHost) -> None:
        """It listens at loopback addresses alone, but for those that its options name."""
        before, made = reachable(), host()
        made.store([key_of(1)], [0])
        assert made.load([key_of(1)], [1]), _NOT_LOADED
        check_this_host_only(reachable() - before, self._options_for(FEW, 64))

    @usually("blocks, places or answers pass through pickle: who writes them runs code here")
    def test_nothing_is_unpickled(self, host: MakeHost) -> None:
        """No function of `pickle` that loads is called."""
        # Imports at the first use are no concern of this test.
        host().store([key_of(1)], [0])
        with recorded_unpickling() as loads:
            made = host()
            made.store([key_of(2)], [0])
            assert made.load([key_of(2)], [1]), _NOT_LOADED
            made.manager.reset_cache()
            made.close()
        assert loads == [], "functions of the module pickle were called"

    # -- construction and shutdown

    @usually(
        "the constructor does not call super().__init__(config), or takes options out of "
        "extra_config"
    )
    def test_spec_keeps_its_config(self, make_spec: Any) -> None:
        """Hosts read the config that the constructor of `OffloadingSpec` has set."""
        geometry = Geometry(num_groups=2, blocks_per_chunk=2)
        config = config_of(geometry, self._options_for(geometry, NUM_FEW))
        made = make_spec(config)
        assert made.config is not None
        given = config.extra_config
        assert {name: made.extra_config[name] for name in given} == given
        if not isinstance(made, SeedSpecAdapter):
            assert made.tokens_per_block == (geometry.block_size,) * geometry.num_groups
            assert made.tokens_per_hash == geometry.block_size
            assert made.blocks_per_chunk == geometry.blocks_per_chunk

    @usually(
        "the constructor starts threads or takes memory; get_worker() is the place, as the "
        "scheduler's process makes a spec, too"
    )
    def test_constructor_takes_no_resources(self, make_spec: Any, host: MakeHost) -> None:
        """The scheduler's process makes a spec as well: no thread, no memory."""
        host().close()
        config = config_of(FEW, self._options_for(FEW, NUM_FEW))
        leftovers = Leftovers()
        made = make_spec(config)
        leftovers.check(0.0)
        del made

    @usually("get_manager() makes a new one each time")
    def test_each_side_is_made_once(self, make_spec: Any) -> None:
        """A second call returns the same object."""
        spec = make_spec(config_of(FEW, self._options_for(FEW, NUM_FEW)))
        manager = spec.get_manager()
        assert spec.get_manager() is manager, "get_manager() has returned another object"
        manager.shutdown()

    @usually("a second shutdown() uses what the first one has dropped")
    def test_shutdown_is_idempotent(self, host: MakeHost) -> None:
        """Sides may shut down twice, in either order, and unused."""
        made = host()
        made.close()
        made.manager.shutdown()
        made.worker.shutdown()
        used = host()
        used.store([key_of(1)], [0])
        used.close()
        used.close()

    @usually("shutdown() waits for all jobs; cancel those that have not begun")
    def test_shutdown_ends_running_work(self, host: MakeHost) -> None:
        """Jobs end, successful or not, within `ends_within_s`."""
        large, was_running = Geometry(num_layers=2, page_nbytes=2**20, num_blocks=16), False
        for _ in range(MOST_TRIES):
            made = host(large, num_kept=16)
            ctx = made.request()
            prepared = made.manager.prepare_store([key_of(number) for number in range(16)], ctx)
            assert prepared is not None
            made.submit_store(range(16), prepared.store_spec)
            was_running = not made.collect()
            begun = time.monotonic()
            made.close()
            assert time.monotonic() - begun < self.ends_within_s, (
                f"shutdown() has taken more than {self.ends_within_s:g} s"
            )
            if was_running:
                return
        self.not_tested(f"shutdown() while a job runs: {MOST_TRIES} had ended before")

    @usually("shutdown() does not join a thread, or keeps a file or shared memory open")
    def test_shutdown_leaves_nothing(self, host: MakeHost) -> None:
        """Threads, descriptors and shared memory are released within `ends_within_s`."""

        def live() -> None:
            made = host()
            made.store([key_of(1), key_of(2)], [0, 1])
            assert made.load([key_of(2)], [3]), _NOT_LOADED
            made.close()

        # A process may create resources once and keep them, such as a pool of threads.
        live()
        leftovers = Leftovers()
        live()
        live()
        leftovers.check(self.ends_within_s)


class SpecHost:
    """A spec's two sides, and caches whose blocks are stored and loaded.

    Objects that pass between the sides are copied, as they would be between processes.

    Args:
        make_spec: Makes a spec from an `OffloadingConfig`; called once for each side.
        geometry: Shape of the cache.
        options: Options of the spec.
        num_ranks: Workers, each with a cache of its own. A job is submitted to all of them.
    """

    def __init__(
        self,
        make_spec: Callable[[OffloadingConfig], OffloadingSpec],
        geometry: Geometry,
        options: dict[str, Any],
        num_ranks: int = 1,
    ) -> None:
        self.geometry = geometry
        """Shape of the cache."""
        shape = (geometry.num_blocks, geometry.page_nbytes)
        layers, groups = range(geometry.num_layers), range(geometry.num_groups)
        self.caches = [
            [[torch.zeros(shape, dtype=torch.uint8) for _ in layers] for _ in groups]
            for _ in range(num_ranks)
        ]
        """The tensors of each rank, by group and layer; all zero at first."""
        config = config_of(geometry, options)
        self.workers: list[OffloadingWorker] = []
        """The worker's sides, by rank."""
        configs = [
            dataclasses.replace(
                config, parallel=OffloadingParallelConfig(rank, num_ranks, tp_size=num_ranks)
            )
            for rank in range(num_ranks)
        ]
        self.manager = make_spec(configs[0]).get_manager()
        """The scheduler's side."""
        for each, cache in zip(configs, self.caches, strict=True):
            self.workers.append(make_spec(each).get_worker(_canonical(cache)))
        self._jobs, self._requests = itertools.count(1), itertools.count(1)
        self._results: list[dict[int, TransferResult]] = [{} for _ in range(num_ranks)]
        self.finished: dict[int, bool] = {}
        """Success of the jobs that all ranks have reported, by number."""
        self.digest_of: dict[OffloadKey, str] = {}
        """Digest of every block that `store_next` has stored, by key."""
        self.kept: list[OffloadKey] = []
        """Keys of the blocks that the manager has not evicted, in the order of their stores."""

    @property
    def worker(self) -> OffloadingWorker:
        """The worker's side of the first rank."""
        return self.workers[0]

    # -- the cache

    def write(self, block: int, seed: int, group: int = 0, *, rank: int = 0) -> None:
        """Fill a block with bytes that no other seed has."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.caches[rank][group]:
            tensor[block] = torch.randint(
                0, 256, tensor[block].shape, generator=generator, dtype=torch.uint8
            )

    def digest(self, block: int, group: int = 0, *, rank: int = 0) -> str:
        """Return the digest of a block's bytes: pytest's diff of the bytes would take minutes."""
        parts = (tensor[block].numpy().tobytes() for tensor in self.caches[rank][group])
        return xxhash.xxh3_128_hexdigest(b"".join(parts))

    def digests(self) -> list[str]:
        """Return the digests of all blocks of the first rank."""
        groups = range(self.geometry.num_groups)
        blocks = range(self.geometry.num_blocks)
        return [self.digest(block, group) for group in groups for block in blocks]

    # -- jobs

    def request(self) -> ReqContext:
        """Return a new request that the manager knows."""
        ctx = ReqContext(f"request {next(self._requests)}")
        self.manager.on_new_request(ctx)
        return ctx

    def submit_store(self, blocks: Sequence[int], where: LoadStoreSpec, **of: Any) -> int:
        """Submit a store; return its number, negative if a worker has refused it."""
        job = next(self._jobs)
        begun = [
            worker.submit_store(job, GPULoadStoreSpec(blocks, **of), copy.deepcopy(where))
            for worker in self.workers
        ]
        return job if all(begun) else -job

    def submit_load(self, blocks: Sequence[int], where: LoadStoreSpec, **of: Any) -> int:
        """Submit a load; as `submit_store`."""
        job = next(self._jobs)
        begun = [
            worker.submit_load(job, copy.deepcopy(where), GPULoadStoreSpec(blocks, **of))
            for worker in self.workers
        ]
        return job if all(begun) else -job

    def succeeded(self, job: int) -> bool:
        """Wait for a job; return whether it was accepted and was successful on all ranks."""
        if job < 0:
            return False
        if job not in self.finished:
            for worker in self.workers:
                worker.wait({job})
            self.collect()
        assert job in self.finished, f"job {job} has ended, and get_finished() does not return it"
        return self.finished[job]

    def collect(self) -> list[TransferResult]:
        """Return and record the results of get_finished()."""
        results = []
        for known, worker in zip(self._results, self.workers, strict=True):
            for result in worker.get_finished():
                assert result.job_id not in known, f"job {result.job_id} was reported twice"
                known[result.job_id] = result
                results.append(result)
        for job in {result.job_id for result in results}:
            if all(job in known for known in self._results):
                self.finished[job] = all(known[job].success for known in self._results)
        return results

    # -- whole stores and loads

    def store(
        self, keys: Collection[OffloadKey], blocks: Sequence[int], ctx: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """Store one block for each key that is not kept yet, and wait."""
        ctx = ctx or self.request()
        prepared = self.manager.prepare_store(keys, ctx)
        if prepared is not None and prepared.keys_to_store:
            block_of = dict(zip(keys, blocks, strict=True))
            job = self.submit_store(
                [block_of[key] for key in prepared.keys_to_store], prepared.store_spec
            )
            success = self.succeeded(job)
            self.manager.complete_store(prepared.keys_to_store, ctx, success)
            assert success, "a store was not successful"
        return prepared

    def load(
        self, keys: Collection[OffloadKey], blocks: Sequence[int], ctx: ReqContext | None = None
    ) -> bool:
        """Load one block for each key, and wait; return whether that was successful."""
        ctx = ctx or self.request()
        where = self.manager.prepare_load(keys, ctx)
        success = self.succeeded(self.submit_load(blocks, where))
        self.manager.complete_load(keys, ctx)
        return success

    def store_next(self) -> PrepareStoreOutput | None:
        """Store a block that was not stored before, from block 0 of the cache."""
        number = len(self.digest_of)
        key = key_of(number)
        self.write(0, seed=number)
        prepared = self.store([key], [0])
        if prepared is not None:
            self.digest_of[key] = self.digest(0)
            self.kept.append(key)
            for each in prepared.evicted_keys:
                self.kept.remove(each)
        return prepared

    def fill(self, most: int = 256) -> list[OffloadKey]:
        """Store blocks until one is evicted; return the keys of those that are kept."""
        for _ in range(most):
            prepared = self.store_next()
            if prepared is None or prepared.evicted_keys:
                return list(self.kept)
        raise AssertionError(f"none of {most} blocks was evicted: is size_option an option?")

    def press(self) -> None:
        """Store blocks until every other one has had to give way."""
        others = len(self.kept)
        num_evicted = 0
        for _ in range(3 * others):
            prepared = self.store_next()
            num_evicted += len(prepared.evicted_keys) if prepared else 0
        assert num_evicted >= others, (
            f"{3 * others} blocks were to be stored beside pinned ones, and for them only "
            f"{num_evicted} of {others} have given way"
        )

    def forget_results(self) -> None:
        """Drop what is recorded of jobs that have ended."""
        self.finished.clear()
        for known in self._results:
            known.clear()

    def close(self) -> None:
        """Shut both sides down."""
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()


_instances = itertools.count()


def _canonical(cache: list[list[torch.Tensor]]) -> CanonicalKVCaches:
    """Return a rank's tensors, by group and layer, as workers are given them."""
    tensors = [
        CanonicalKVCacheTensor(tensor, tensor.shape[1]) for group in cache for tensor in group
    ]
    refs = [CanonicalKVCacheRef(index, each.tensor.shape[1]) for index, each in enumerate(tensors)]
    ends = itertools.accumulate(map(len, cache), initial=0)
    return CanonicalKVCaches(tensors, [refs[a:b] for a, b in itertools.pairwise(ends)])


def config_of(geometry: Geometry, options: dict[str, Any]) -> OffloadingConfig:
    """Return the configuration of a spec over a cache."""
    return OffloadingConfig(
        extra_config=options,
        engine_id=f"conformance {os.getpid()} {next(_instances)}",
        worker_kv_bytes_per_block=geometry.chunk_nbytes // geometry.blocks_per_chunk,
        groups=tuple(
            OffloadingGroupConfig(geometry.block_size, _layer_names(geometry, group), group)
            for group in range(geometry.num_groups)
        ),
        model=OffloadingModelConfig("conformance", "uint8"),
        cache=OffloadingCacheConfig(geometry.block_size, geometry.blocks_per_chunk),
        enable_kv_cache_events=True,
    )


def _layer_names(geometry: Geometry, group: int) -> tuple[str, ...]:
    """Return names that, from ten layers on, do not sort as the layers run."""
    first = group * geometry.num_layers
    return tuple(f"layers.{number}" for number in range(first, first + geometry.num_layers))


def key_of(number: int, group: int = 0, weights: str = "weights of the kit") -> OffloadKey:
    """Return the key of a block, as hosts have them: fenced, with hash and group."""
    return fence_key(make_offload_key(number.to_bytes(32, "big"), group), weights)


@contextlib.contextmanager
def traced_memory() -> Iterator[None]:
    """Trace the memory that Python takes."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        yield
    finally:
        if not was_tracing:
            tracemalloc.stop()


def _durations(manager: OffloadingManager, host: SpecHost) -> dict[str, float]:
    """Return the medians of the calls of some requests, in seconds, by name.

    Args:
        manager: The manager.
        host: Workers that copy where the manager is the host's own.
    """
    taken: dict[str, list[float]] = {}

    def timed(side: Any, name: str, *args: Any) -> Any:
        began = time.perf_counter()
        found = getattr(side, name)(*args)
        taken.setdefault(name, []).append(time.perf_counter() - began)
        return found

    for number in range(NUM_CALLS):
        ctx, key = ReqContext(f"timed {number}"), key_of(1000 + number)
        timed(manager, "on_new_request", ctx)
        timed(manager, "lookup", key, ctx)
        prepared = timed(manager, "prepare_store", [key], ctx)
        if prepared is not None and manager is host.manager:
            assert host.succeeded(host.submit_store([0], prepared.store_spec))
            timed(host.worker, "get_finished")
        timed(manager, "complete_store", [key], ctx)
        timed(manager, "touch", [key], ctx)
        if prepared is not None:
            timed(manager, "prepare_load", [key], ctx)
            timed(manager, "complete_load", [key], ctx)
        timed(manager, "take_events")
        timed(manager, "get_stats")
        timed(manager, "on_request_finished", ctx)
    medians = {name: statistics.median(each) for name, each in taken.items()}
    return {"get_finished": 0.0, **medians}


def _stats(host: SpecHost) -> dict[str, float]:
    sides = ("manager", "worker")
    return {k: v for s in sides for k, v in checked_stats(getattr(host, s).get_stats(), s).items()}
