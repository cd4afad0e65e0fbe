"""Specs that are broken in one way each. `test_kits.py` runs this file as a test module."""

import io
import itertools
import os
import pickle
import socket
import threading
import time
from collections import defaultdict
from concurrent.futures import Future, wait
from operator import itemgetter
from typing import ClassVar

from wtransfer.kv.header import checksum
from wtransfer.kv.keys import FENCE_NBYTES
from wtransfer.scaffold.memory_spec import MemorySpec, MemorySpecWorker
from wtransfer.specs.arena import ArenaLoadStoreSpec
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import LookupResult, Medium, OffloadingEvent, PrepareStoreOutput
from wtransfer.testing.spec import SpecConformance


class MadeOf(MemorySpec):
    """A spec of other sides than the healthy ones."""

    def get_manager(self):
        if self.manager is None:
            events = self.config.enable_kv_cache_events
            self.manager = self.manager_cls(self.num_slots, enable_events=events)
        return self.manager

    def get_worker(self, kv_caches):
        if self.worker is None:
            self.worker = self.worker_cls(kv_caches, self.blocks_per_chunk)
        return self.worker


class Kit(SpecConformance):
    size_option = "memory_bytes_to_use"
    deadline_s = 10.0
    manager = CPUOffloadingManager
    worker = MemorySpecWorker

    def __init_subclass__(cls):
        super().__init_subclass__()
        if "spec_cls" not in vars(cls):
            sides = {"manager_cls": cls.manager, "worker_cls": cls.worker}
            cls.spec_cls = type(f"{cls.__name__}Spec", (MadeOf,), sides)

    def reach(self, worker, where):
        return worker.kept[where.slots[0], 0].data.numpy().data


def broken(caught_by=None, **attributes):
    """Have the kit run with a class that overrides a part of a healthy spec."""

    def make(cls):
        sides = {MemorySpec: "spec_cls", CPUOffloadingManager: "manager"}
        side = next((sides[base] for base in sides if issubclass(cls, base)), "worker")
        return type(cls.__name__, (Kit,), {"caught_by": caught_by, side: cls, **attributes})

    return make


# -- workers


@broken("test_one_block_is_stored_and_loaded", says="a block that was stored could not be loaded")
class TestDropsBlocks(MemorySpecWorker):
    def store(self, cache, slots):
        nbytes = super().store(cache, slots)
        self.kept.clear()
        return nbytes


@broken(
    "test_blocks_come_back_as_they_were[many layers of small pages]",
    says="the cache has other bytes than those that were stored",
)
class TestDropsLastLayer(MemorySpecWorker):
    def load(self, cache, slots):
        pages = self.pages
        self.pages = [layers[:-1] for layers in pages]
        try:
            return super().load(cache, slots)
        finally:
            self.pages = pages


@broken(
    "test_blocks_come_back_as_they_were[one token per block]",
    says="the cache has other bytes than those that were stored",
)
class TestSortsBlocks(MemorySpecWorker):
    def submit_load(self, job_id, src_spec, dst_spec):
        dst_spec.block_ids.sort()
        return super().submit_load(job_id, src_spec, dst_spec)


@broken(
    "test_blocks_come_back_as_they_were[one layer]",
    says="the cache has other bytes than those that were stored",
)
class TestWritesToOtherBlocks(MemorySpecWorker):
    def load(self, cache, slots):
        nbytes = super().load(cache, slots)
        for block in cache.block_ids:
            self.pages[0][0][block - 1, 0] ^= 1
        return nbytes


@broken("test_store_copies_the_block", says="other bytes were loaded than were stored")
class TestStoresViews(MemorySpecWorker):
    """Loads what the blocks hold by then that were stored."""

    def store(self, cache, slots):
        self.views = [*getattr(self, "views", ()), (cache, slots)]
        return super().store(cache, slots)

    def load(self, cache, slots):
        for view in self.views:
            super().store(*view)
        return super().load(cache, slots)


@broken(
    "test_store_copies_the_block",
    says="other bytes were loaded than were stored",
    passes=("test_one_block_is_stored_and_loaded",),
)
class TestReportsStoresBeforeTheyEnd(MemorySpecWorker):
    def store(self, cache, slots):
        time.sleep(0.05)
        return super().store(cache, slots)

    def submit_store(self, job_id, src_spec, dst_spec):
        self.thread.submit(self.store, src_spec, dst_spec)
        job = self.jobs[job_id] = Future()
        job.set_result(0)
        return True


@broken(
    "test_one_block_may_be_loaded_many_times", says="a block that was stored could not be loaded"
)
class TestLoadsOnce(MemorySpecWorker):
    def load(self, cache, slots):
        nbytes = super().load(cache, slots)
        for slot in slots.slots:
            self.kept.pop((slot, 0), None)
        return nbytes


@broken(
    "test_groups_of_layers_are_kept_apart",
    says="the cache has other bytes than those that were stored",
    passes=("test_random_requests",),
)
class TestIgnoresGroups(MemorySpecWorker):
    def blocks(self, cache, slots):
        for block in super().blocks(cache, slots):
            yield block._replace(group=0)


@broken("test_chunks_of_several_blocks", says="other bytes were loaded than were stored")
class TestIgnoresBlockIndices(MemorySpecWorker):
    def blocks(self, cache, slots):
        cache.block_indices = [0] * len(cache.group_sizes)
        return super().blocks(cache, slots)


@broken(
    "test_a_damaged_block_is_not_loaded[middle]",
    says="a block whose middle byte was damaged was loaded",
    passes=("test_random_requests",),
)
class TestSkipsChecksums(MemorySpecWorker):
    def fits(self, block):
        kept = self.kept.get((block.slot, block.place))
        return kept is not None and kept.key == block.key


@broken(
    "test_a_damaged_block_is_not_loaded[first]",
    says="a block that is not loaded was written to the cache",
    passes=("test_random_requests",),
)
class TestComparesAfterItWrites(MemorySpecWorker):
    def load(self, cache, slots):
        nbytes = super().load(cache, slots)
        if not all(MemorySpecWorker.fits(self, block) for block in self.blocks(cache, slots)):
            raise ValueError("damaged")
        return nbytes

    def fits(self, block):
        kept = self.kept.get((block.slot, block.place))
        return kept is not None and kept.key == block.key


class ChecksOnePart(MemorySpecWorker):
    """Checksums cover a part of a block."""

    part = slice(None)

    def store(self, cache, slots):
        nbytes = super().store(cache, slots)
        for place, kept in self.kept.items():
            self.kept[place] = kept._replace(checksum=checksum(kept.data[self.part].numpy()))
        return nbytes

    def fits(self, block):
        kept = self.kept.get((block.slot, block.place))
        if kept is None or kept.key != block.key:
            return False
        return checksum(kept.data[self.part].numpy()) == kept.checksum


@broken(
    "test_a_damaged_block_is_not_loaded[last]",
    says="a block whose last byte was damaged was loaded",
    passes=("test_a_damaged_block_is_not_loaded[first]",),
    hints="blocks have no checksum, it covers a part of them",
)
class TestChecksTheFirstPage(ChecksOnePart):
    part = slice(2**15)


@broken(
    "test_a_damaged_block_is_not_loaded[first]",
    says="a block whose first byte was damaged was loaded",
    passes=(
        "test_a_damaged_block_is_not_loaded[middle]",
        "test_a_damaged_block_is_not_loaded[last]",
    ),
)
class TestSkipsAHeader(ChecksOnePart):
    part = slice(64, None)


@broken(
    "test_finished_job_has_moved_all_bytes[load]",
    says="a load was reported before its last bytes were there",
    passes=("test_one_block_is_stored_and_loaded", "test_random_requests"),
)
class TestReportsLargeLoadsAtOnce(MemorySpecWorker):
    """Of small ones the copy is over by the time anybody looks."""

    def submit_load(self, job_id, src_spec, dst_spec):
        begun = super().submit_load(job_id, src_spec, dst_spec)
        if self.pages[0][0][0].nbytes < 2**20:
            wait([self.jobs[job_id]])
        self.jobs[job_id] = Future()
        self.jobs[job_id].set_result(0)
        return begun

    def load(self, cache, slots):
        # As long as a slow disk takes.
        time.sleep(0.2 if self.pages[0][0][0].nbytes >= 2**20 else 0)
        return super().load(cache, slots)


@broken(
    "test_finished_job_has_moved_all_bytes[store]",
    says="a store was reported before its last bytes were there",
    passes=("test_store_copies_the_block", "test_submit_does_not_copy[store]"),
)
class TestReportsAStoreAtItsFirstPage(MemorySpecWorker):
    def submit_store(self, job_id, src_spec, dst_spec):
        begun = Future()

        def store():
            if self.pages[0][0][0].nbytes < 2**20:
                begun.set_result(self.store(src_spec, dst_spec))
                return
            time.sleep(0.005)
            begun.set_result(0)
            time.sleep(0.2)
            self.store(src_spec, dst_spec)

        self.thread.submit(store)
        self.jobs[job_id] = begun
        return True


@broken(
    "test_blocks_come_back_as_they_were[many layers of small pages]",
    says="the cache has other bytes than those that were stored",
    passes=("test_blocks_come_back_as_they_were[pages of no round size]",),
)
class TestLoadsLayersByName(MemorySpec):
    def get_worker(self, kv_caches):
        worker = super().get_worker(kv_caches)
        groups, load, in_order = self.config.groups, worker.load, worker.pages
        by_name = [
            [
                page
                for _, page in sorted(zip(group.layer_names, pages, strict=True), key=itemgetter(0))
            ]
            for group, pages in zip(groups, in_order, strict=True)
        ]

        def load_by_name(cache, slots):
            worker.pages = by_name
            try:
                return load(cache, slots)
            finally:
                worker.pages = in_order

        worker.load = load_by_name
        return worker


@broken(
    "test_nothing_is_unpickled",
    says="functions of the module pickle were called",
    passes=("test_random_requests",),
)
class TestUnpicklesBlocks(MemorySpecWorker):
    def load(self, cache, slots):
        for block in self.blocks(cache, slots):
            kept = self.kept.get((block.slot, block.place))
            pickle.Unpickler(io.BytesIO(pickle.dumps(kept and kept.key))).load()
        return super().load(cache, slots)


@broken(
    "test_only_this_host_reaches_it",
    says="which other hosts reach, and none of the options",
    passes=("test_shutdown_leaves_nothing",),
)
class TestListensEverywhere(MemorySpecWorker):
    def __init__(self, *args):
        super().__init__(*args)
        self.server = socket.create_server(("", 0))

    def shutdown(self):
        super().shutdown()
        self.server.close()


@broken(
    "test_requests_leave_nothing",
    says=" x descriptor of ",
    passes=("test_random_requests",),
    ends_within_s=0.3,
)
class TestOpensAFileForEachJob(MemorySpecWorker):
    def store(self, cache, slots):
        self.opened = getattr(self, "opened", [])
        self.opened += [os.open(os.devnull, os.O_RDONLY)] if len(self.opened) < 300 else []
        return super().store(cache, slots)

    def shutdown(self):
        super().shutdown()
        for fd in getattr(self, "opened", ()):
            os.close(fd)


@broken(
    "test_submit_does_not_copy[store]",
    says=" jobs that store 16,777,216 bytes had ended when submit_store had returned",
    passes=("test_submit_does_not_copy[load]",),
)
class TestStoresWithinSubmit(MemorySpecWorker):
    def submit_store(self, job_id, src_spec, dst_spec):
        begun = super().submit_store(job_id, src_spec, dst_spec)
        self.wait({job_id})
        return begun


@broken(
    "test_submit_does_not_copy[load]",
    says=" jobs that load 16,777,216 bytes had ended when submit_load had returned",
    passes=("test_submit_does_not_copy[store]",),
)
class TestLoadsWithinSubmit(MemorySpecWorker):
    def submit_load(self, job_id, src_spec, dst_spec):
        self.load(dst_spec, src_spec)
        job = self.jobs[job_id] = Future()
        job.set_result(0)
        return True


@broken(
    "test_load_from_reused_slot_gives_no_other_bytes",
    says="other bytes were loaded than were stored",
)
class TestTrustsSlots(MemorySpecWorker):
    def fits(self, block):
        return (block.slot, block.place) in self.kept


@broken("test_random_requests", says="a block that was stored could not be loaded")
class TestFailsSometimes(MemorySpecWorker):
    loads = 0

    def fits(self, block):
        self.loads += 1
        return self.loads % 60 != 0 and super().fits(block)


@broken("test_evictions_leave_hits_intact", says="a block that was stored could not be loaded")
class TestHasFourSlots(MemorySpecWorker):
    def blocks(self, cache, slots):
        for block in super().blocks(cache, slots):
            yield block._replace(slot=block.slot % 4)


@broken("test_every_job_is_reported_once", says="job 1 was reported twice")
class TestReportsTwice(MemorySpecWorker):
    said = ()

    def get_finished(self):
        finished = super().get_finished()
        again, self.said = self.said, finished
        return [*finished, *again]


@broken(
    "test_every_job_is_reported_once",
    says=" were reported",
    passes=("test_one_block_may_be_loaded_many_times",),
    deadline_s=1.5,
)
class TestOmitsResults(MemorySpecWorker):
    def get_finished(self):
        return [result for result in super().get_finished() if result.job_id % 7]


@broken("test_every_job_is_reported_once", says="wait() returned before its jobs had ended")
class TestReturnsFromWaitEarly(MemorySpecWorker):
    """Jobs end after a while."""

    def get_finished(self):
        if not hasattr(self, "due"):
            self.due = time.monotonic() + 0.2
        return super().get_finished() if time.monotonic() > self.due else []


@broken("test_wait_ignores_unknown_jobs", says="assert {1, 1000000000} <=")
class TestRaisesForUnknownJobs(MemorySpecWorker):
    def wait(self, job_ids):
        assert job_ids <= self.jobs.keys()
        super().wait(job_ids)


@broken("test_stats_are_numbers_and_counters_rise", says="counters that have fallen")
class TestDecreasesCounters(MemorySpecWorker):
    def get_stats(self):
        return {"room_total": -self.copied_nbytes}


@broken(
    "test_stats_are_numbers_and_counters_rise", says="state of the worker is 'fine', not a number"
)
class TestReportsTextStats(MemorySpecWorker):
    def get_stats(self):
        return {"state": "fine"}


@broken(
    "test_shutdown_is_idempotent",
    says="has no attribute 'kept'",
    hints="the code itself has a mistake, at broken_specs.py:",
)
class TestShutsDownOnce(MemorySpecWorker):
    def shutdown(self):
        del self.kept


@broken(
    "test_shutdown_ends_running_work",
    says="shutdown() has taken more than 0.3 s",
    ends_within_s=0.3,
)
class TestShutsDownSlowly(MemorySpecWorker):
    def shutdown(self):
        time.sleep(0.5)


@broken("test_shutdown_leaves_nothing", says="after 0.3 s these are left:", ends_within_s=0.3)
class TestLeaksThread(MemorySpecWorker):
    def shutdown(self):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


# -- managers


@broken(
    "test_a_block_is_a_hit_when_its_store_is_complete",
    says="a block is a hit before its store is complete",
)
class TestHitsPendingBlocks(CPUOffloadingManager):
    def lookup(self, key, req_context):
        found = super().lookup(key, req_context)
        return LookupResult.HIT if found is LookupResult.HIT_PENDING else found


@broken(
    "test_a_block_is_a_hit_when_its_store_is_complete",
    says="a block is found that is not there: it is of other weights than the one that is",
    hints="or blocks are found by a part of their keys",
    passes=("test_only_new_keys_are_stored",),
)
class TestFindsBlocksOfOtherWeights(CPUOffloadingManager):
    def lookup(self, key, req_context):
        of_all = {each[FENCE_NBYTES:]: each for each in self._blocks}
        return super().lookup(of_all.get(key[FENCE_NBYTES:], key), req_context)


@broken("test_only_new_keys_are_stored", says="others are to be stored than those that are missing")
class TestStoresDuplicates(CPUOffloadingManager):
    def prepare_store(self, keys, req_context):
        prepared = super().prepare_store(keys, req_context)
        if prepared and len(prepared.keys_to_store) < len(keys) and prepared.keys_to_store:
            prepared.keys_to_store.append(prepared.keys_to_store[0])
        return prepared


@broken("test_failed_store_is_a_miss", says="a block is found that is not there")
class TestKeepsFailedStores(CPUOffloadingManager):
    def complete_store(self, keys, req_context, success=True):
        super().complete_store(keys, req_context)


@broken(
    "test_prepare_load_refuses_missing_blocks",
    says="a prepare_load() that was refused has pinned blocks",
)
class TestPinsBeforeLookup(CPUOffloadingManager):
    def prepare_load(self, keys, req_context):
        specs = [CPUOffloadingManager.prepare_load(self, [k], req_context) for k in keys]
        return ArenaLoadStoreSpec([each.slots[0] for each in specs], list(keys))


@broken(
    "test_prepare_load_refuses_missing_blocks",
    says="assert <LookupResult.MISS: 1> is <LookupResult.HIT: 2>",
)
class TestRaisesAssertionError(CPUOffloadingManager):
    def prepare_load(self, keys, req_context):
        for key in keys:
            assert self.lookup(key, req_context) is LookupResult.HIT
        return super().prepare_load(keys, req_context)


@broken("test_pinned_blocks_are_not_evicted", says="a block that was stored is not found")
class TestPinsNothing(CPUOffloadingManager):
    def prepare_load(self, keys, req_context):
        prepared = super().prepare_load(keys, req_context)
        super().complete_load(keys, req_context)
        return prepared

    def complete_load(self, keys, req_context): ...


class HolderManager(CPUOffloadingManager):
    """Knows which requests have pinned a block."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.holders = {}

    def prepare_load(self, keys, req_context):
        prepared = super().prepare_load(keys, req_context)
        for key in keys:
            self.holders.setdefault(key, []).append(req_context)
        return prepared


@broken(
    "test_pinned_blocks_are_not_evicted",
    says="a block that was stored is not found",
    passes=("test_blocks_being_stored_are_not_evicted",),
)
class TestPinsOnce(HolderManager):
    """The first completion unpins a block that several requests have pinned."""

    def complete_load(self, keys, req_context):
        for key in keys:
            for holder in self.holders.pop(key, ()):
                super().complete_load([key], holder)


@broken("test_duplicate_completions_are_ignored", says="a block that was stored is not found")
class TestCountsDuplicateCompletions(HolderManager):
    """A duplicate completion takes the pin of another request."""

    def complete_load(self, keys, req_context):
        for key in keys:
            if self.holders.get(key):
                super().complete_load([key], self.holders[key].pop())


@broken("test_unknown_completions_are_ignored", says="KeyError:")
class TestRaisesForLateCompletions(CPUOffloadingManager):
    def complete_load(self, keys, req_context):
        self._jobs[req_context.req_id].loads[keys[0]]
        super().complete_load(keys, req_context)


@broken("test_eviction_is_all_or_none", says="blocks are to be stored for which there is no room")
class TestStoresPartially(CPUOffloadingManager):
    def prepare_store(self, keys, req_context):
        for count in range(len(keys), 0, -1):
            prepared = super().prepare_store(keys[:count], req_context)
            if prepared is not None:
                return prepared
        return None


@broken(
    "test_eviction_is_all_or_none", says="a prepare_store() that was refused has evicted blocks"
)
class TestEvictsBeforeRefusal(CPUOffloadingManager):
    def prepare_store(self, keys, req_context):
        prepared = super().prepare_store(keys, req_context)
        if prepared is None:
            self.forget([k for k, block in self._blocks.items() if block.num_loads == 0])
        return prepared


@broken(
    "test_blocks_being_stored_are_not_evicted", says="a block that was stored could not be loaded"
)
class TestReusesSlotsInUse(CPUOffloadingManager):
    """Allocates slots in turn, also slots in use."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.turns = itertools.count()

    def prepare_store(self, keys, req_context):
        prepared = super().prepare_store(keys, req_context)
        if prepared is None:
            return None
        slots = [next(self.turns) % (self.num_slots - 1) for _ in prepared.keys_to_store]
        for key, slot in zip(prepared.keys_to_store, slots, strict=True):
            self._blocks[key].slot = slot
        where = ArenaLoadStoreSpec(slots, prepared.keys_to_store)
        return PrepareStoreOutput(prepared.keys_to_store, where, prepared.evicted_keys)


@broken(
    "test_events_match_lookups",
    says="removals come before what takes their place",
    passes=("test_eviction_is_all_or_none",),
)
class TestOmitsRemovalEvents(CPUOffloadingManager):
    def take_events(self):
        return [event for event in super().take_events() if not event.removed]


@broken("test_events_match_lookups", says="removals come before what takes their place")
class TestReordersEvents(CPUOffloadingManager):
    def take_events(self):
        return sorted(super().take_events(), key=lambda event: event.removed)


class Events(CPUOffloadingManager):
    """Tells further events."""

    def tell(self, keys, *, removed):
        self._events += [OffloadingEvent(list(keys), Medium.CPU, removed)] if keys else []


@broken(
    "test_events_match_lookups",
    says="events tell other blocks than lookup() finds, while a block is being stored",
    passes=("test_random_requests",),
)
class TestTellsBlocksBeforeTheyAreStored(Events):
    def prepare_store(self, keys, req_context):
        prepared = super().prepare_store(keys, req_context)
        self.tell(prepared.keys_to_store if prepared else [], removed=False)
        return prepared

    def _keep(self, keys):
        events, self._events = self._events, []
        super()._keep(keys)
        self._events = events


@broken(
    "test_events_match_lookups",
    says="events tell other blocks than lookup() finds, after a store that has failed",
    passes=("test_failed_store_is_a_miss",),
)
class TestTellsStoresThatHaveFailed(Events):
    def complete_store(self, keys, req_context, success=True):
        super().complete_store(keys, req_context, success)
        self.tell([] if success else keys, removed=False)


@broken(
    "test_events_match_lookups",
    says="events tell other blocks than lookup() finds, after reset_cache()",
    passes=("test_reset_forgets_all_blocks",),
)
class TestTellsNoReset(Events):
    def reset_cache(self):
        events = self._events
        super().reset_cache()
        self._events = events[: len(events) - 1]


@broken(
    "test_events_match_lookups",
    says="an event removes blocks that were not told, after blocks from before reset_cache() have",
    passes=("test_reset_forgets_all_blocks",),
)
class TestTellsRemovalsOfBeforeAReset(Events):
    former = ()

    def reset_cache(self):
        self.former = list(self._blocks)[:1]
        super().reset_cache()

    def complete_store(self, keys, req_context, success=True):
        super().complete_store(keys, req_context, success)
        self.tell(self.former, removed=True)


@broken(
    "test_blocks_of_one_store_stay",
    says="a block of the same prepare_store() was evicted",
    passes=("test_random_requests", "test_eviction_is_all_or_none"),
)
class TestEvictsWhatIsOffered(CPUOffloadingManager):
    def prepare_store(self, keys, req_context):
        new = [key for key in keys if key not in self._blocks]
        return super().prepare_store(new, req_context)


@broken(
    "test_pinned_blocks_are_not_evicted",
    says=" have given way",
    passes=("test_evictions_leave_hits_intact",),
    hints="loads of a block are not counted",
)
class TestStoresNothingBesideALoad(CPUOffloadingManager):
    def prepare_store(self, keys, req_context):
        if self.get_stats()["blocks_loading"]:
            return None
        return super().prepare_store(keys, req_context)


@broken(
    "test_a_damaged_block_is_not_loaded[middle]",
    says="load_failed() has returned True, and a damaged block is still a hit",
    passes=("test_random_requests",),
)
class TestNotesNoFailedLoad(CPUOffloadingManager):
    def load_failed(self, keys, req_context, suspect):
        return True


@broken(
    "test_a_damaged_block_is_not_loaded[middle]",
    says="a damaged block is still a hit",
    passes=("test_failed_store_is_a_miss",),
)
class TestForgetsSuspectsAfterTheNextStore(CPUOffloadingManager):
    suspects: ClassVar = []

    def load_failed(self, keys, req_context, suspect):
        self.suspects += keys
        return True

    def complete_store(self, keys, req_context, success=True):
        self.forget(self.suspects)
        super().complete_store(keys, req_context, success)


@broken(
    "test_no_call_holds_the_scheduler_up",
    says="'lookup': '",
    passes=("test_a_block_is_a_hit_when_its_store_is_complete",),
    hints="the call waits for the medium",
)
class TestAsksTheMediumInLookup(CPUOffloadingManager):
    def lookup(self, key, req_context):
        time.sleep(0.02)
        return super().lookup(key, req_context)


@broken(
    "test_no_call_holds_the_scheduler_up",
    says="'get_stats': '",
    passes=("test_stats_are_numbers_and_counters_rise",),
)
class TestAsksTheMediumForStats(CPUOffloadingManager):
    def get_stats(self):
        time.sleep(0.02)
        return super().get_stats()


@broken(
    "test_requests_leave_nothing",
    says="1000 requests hold ",
    passes=("test_random_requests",),
)
class TestRemembersEachRequest(CPUOffloadingManager):
    def on_new_request(self, req_context):
        self.requests = getattr(self, "requests", {})
        self.requests[req_context.req_id] = (req_context, [])
        return super().on_new_request(req_context)


@broken("test_reset_forgets_all_blocks", says="a block is found after reset_cache()")
class TestIgnoresReset(CPUOffloadingManager):
    def reset_cache(self): ...


class Ctx:
    req_id = "none"


@broken("test_store_and_load_after_weights_change", says="no block can be stored any more")
class TestPinsOldWeights(CPUOffloadingManager):
    """Pins all blocks for good."""

    def weights_changed(self):
        self.prepare_load(list(self._blocks), Ctx)


# -- specs


@broken("test_constructor_takes_no_resources", says="after 0 s these are left:")
class TestStartsThreadInConstructor(MemorySpec):
    def __init__(self, config):
        super().__init__(config)
        self.thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        self.thread.start()


STORES = defaultdict(dict)


@broken(
    "test_ranks_keep_their_own_bytes",
    says="a rank has loaded other bytes than it has stored",
    passes=("test_random_requests",),
)
class TestKeepsOneStoreForAllRanks(MemorySpec):
    """As files do that are named by their key alone."""

    def get_worker(self, kv_caches):
        worker = super().get_worker(kv_caches)
        worker.kept = STORES[self.config.engine_id]
        return worker


@broken(
    "test_ranks_keep_their_own_bytes",
    says="a rank could not load the blocks that it has stored",
    passes=("test_random_requests",),
)
class TestStoresOnFirstRankOnly(MemorySpec):
    def get_worker(self, kv_caches):
        worker = super().get_worker(kv_caches)
        if self.config.parallel.rank:
            worker.store = lambda cache, slots: 0
        return worker


@broken("test_spec_keeps_its_config", says="has no attribute 'extra_config'")
class TestDropsConfig(MemorySpec):
    def __init__(self, config):
        super().__init__(config)
        del self.extra_config


@broken("test_each_side_is_made_once", says="get_manager() has returned another object")
class TestMakesNewManagers(MemorySpec):
    def get_manager(self):
        self.manager = None
        return super().get_manager()


class TestExcused(Kit):
    passes = ("test_random_requests",)
    expected_failures: ClassVar = {
        "test_a_damaged_block_is_not_loaded[last]": "there are no checksums"
    }

    worker = TestSkipsChecksums.worker
