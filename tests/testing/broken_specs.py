"""Specs that are wrong in one way each. `test_spec_kit.py` runs this file as a test module."""

# ruff: noqa: N801 - classes that stand where the kit expects an attribute

import itertools
import threading
import time

import pytest

from wtransfer.specs.interface import LookupResult, PrepareStoreOutput
from wtransfer.specs.manager import CPUOffloadingManager
from wtransfer.specs.shared_region import ArenaLoadStoreSpec
from wtransfer.testing.fakes import MemorySpec, MemoryTierWorker
from wtransfer.testing.spec import SpecConformance


class Kit(SpecConformance):
    size_option = "memory_bytes_to_use"
    deadline_s = 1.5

    def reach(self, worker, where):
        return memoryview(worker.slots[where.slots[0]].pages[0, 1].numpy())


def spec(*, manager=CPUOffloadingManager, worker=MemoryTierWorker):
    return type("Broken", (MemorySpec,), {"manager_cls": manager, "worker_cls": worker})


# -- workers


class LosesTheLastLayer(MemoryTierWorker):
    def submit_load(self, job_id, src_spec, dst_spec):
        pages = self._pages
        self._pages = [layers[:-1] for layers in pages]
        try:
            return super().submit_load(job_id, src_spec, dst_spec)
        finally:
            self._pages = pages


class TestLosesTheLastLayer(Kit):
    spec_cls = spec(worker=LosesTheLastLayer)


class SortsBlocks(MemoryTierWorker):
    def submit_load(self, job_id, src_spec, dst_spec):
        dst_spec.block_ids.sort()
        return super().submit_load(job_id, src_spec, dst_spec)


class TestSortsBlocks(Kit):
    spec_cls = spec(worker=SortsBlocks)


class WritesBesideTheBlock(MemoryTierWorker):
    def submit_load(self, job_id, src_spec, dst_spec):
        begun = super().submit_load(job_id, src_spec, dst_spec)
        for block in dst_spec.block_ids:
            self._pages[0][0][block - 1, 0] ^= 1
        return begun


class TestWritesBesideTheBlock(Kit):
    spec_cls = spec(worker=WritesBesideTheBlock)


class KeepsViews(MemoryTierWorker):
    def submit_store(self, job_id, src_spec, dst_spec):
        super().submit_store(job_id, src_spec, dst_spec)
        for move in self.moves(src_spec, dst_spec):
            for layer, tensor in enumerate(self._pages[move.group]):
                self.slots[move.slot].pages[move.place, layer] = tensor[move.block]
        return True

    def fits(self, move):
        return True


class TestKeepsViews(Kit):
    spec_cls = spec(worker=KeepsViews)


class LoadsOnce(MemoryTierWorker):
    def submit_load(self, job_id, src_spec, dst_spec):
        begun = super().submit_load(job_id, src_spec, dst_spec)
        for slot in src_spec.slots:
            self.slots.pop(slot, None)
        return begun


class TestLoadsOnce(Kit):
    spec_cls = spec(worker=LoadsOnce)


class KnowsOneGroup(MemoryTierWorker):
    def moves(self, gpu, where):
        for move in super().moves(gpu, where):
            yield move._replace(group=0)


class TestKnowsOneGroup(Kit):
    spec_cls = spec(worker=KnowsOneGroup)


class BeginsAtTheBeginning(MemoryTierWorker):
    def moves(self, gpu, where):
        gpu.block_indices = [0] * len(gpu.group_sizes)
        return super().moves(gpu, where)


class TestBeginsAtTheBeginning(Kit):
    spec_cls = spec(worker=BeginsAtTheBeginning)


class BelievesBytes(MemoryTierWorker):
    def fits(self, move):
        kept = self.slots.get(move.slot)
        return kept is not None and kept.key == move.key


class TestBelievesBytes(Kit):
    spec_cls = spec(worker=BelievesBytes)


class BelievesNumbers(MemoryTierWorker):
    def fits(self, move):
        return move.slot in self.slots


class TestBelievesNumbers(Kit):
    spec_cls = spec(worker=BelievesNumbers)


class FailsNowAndThen(MemoryTierWorker):
    loads = 0

    def fits(self, move):
        self.loads += 1
        return self.loads % 60 != 0 and super().fits(move)


class TestFailsNowAndThen(Kit):
    spec_cls = spec(worker=FailsNowAndThen)


class HasFourSlots(MemoryTierWorker):
    def moves(self, gpu, where):
        for move in super().moves(gpu, where):
            yield move._replace(slot=move.slot % 4)


class TestHasFourSlots(Kit):
    spec_cls = spec(worker=HasFourSlots)


class ReportsTwice(MemoryTierWorker):
    said = ()

    def get_finished(self):
        finished = super().get_finished()
        again, self.said = self.said, finished
        return [*finished, *again]


class TestReportsTwice(Kit):
    spec_cls = spec(worker=ReportsTwice)


class ForgetsToReport(MemoryTierWorker):
    def get_finished(self):
        return [result for result in super().get_finished() if result.job_id % 7]


class TestForgetsToReport(Kit):
    spec_cls = spec(worker=ForgetsToReport)


class DoesNotWait(MemoryTierWorker):
    """Jobs end a while after they were begun, and it does not wait for them."""

    def get_finished(self):
        if not hasattr(self, "due"):
            self.due = time.monotonic() + 0.2
        return super().get_finished() if time.monotonic() > self.due else []


class TestDoesNotWait(Kit):
    spec_cls = spec(worker=DoesNotWait)


class WaitsForKnownJobsOnly(MemoryTierWorker):
    def wait(self, job_ids):
        known = {result.job_id for result in self._finished}
        assert job_ids <= known


class TestWaitsForKnownJobsOnly(Kit):
    spec_cls = spec(worker=WaitsForKnownJobsOnly)


class CountsBackwards(MemoryTierWorker):
    def get_stats(self):
        return {"room_total": -self._num_bytes}


class TestCountsBackwards(Kit):
    spec_cls = spec(worker=CountsBackwards)


class TalksInWords(MemoryTierWorker):
    def get_stats(self):
        return {"state": "fine"}


class TestTalksInWords(Kit):
    spec_cls = spec(worker=TalksInWords)


class ShutsDownOnce(MemoryTierWorker):
    def shutdown(self):
        del self.slots


class TestShutsDownOnce(Kit):
    spec_cls = spec(worker=ShutsDownOnce)


class Lingers(MemoryTierWorker):
    def shutdown(self):
        time.sleep(0.5)


class TestLingers(Kit):
    spec_cls = spec(worker=Lingers)
    ends_within_s = 0.3


class LeavesAThread(MemoryTierWorker):
    def shutdown(self):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


class TestLeavesAThread(Kit):
    spec_cls = spec(worker=LeavesAThread)
    ends_within_s = 0.3


# -- managers


class IsTooEarly(CPUOffloadingManager):
    def lookup(self, key, req_context):
        found = super().lookup(key, req_context)
        return LookupResult.HIT if found is LookupResult.HIT_PENDING else found


class TestIsTooEarly(Kit):
    spec_cls = spec(manager=IsTooEarly)


class StoresDuplicates(CPUOffloadingManager):
    def prepare_store(self, keys, req_context):
        prepared = super().prepare_store(keys, req_context)
        if prepared and len(prepared.keys_to_store) < len(keys) and prepared.keys_to_store:
            prepared.keys_to_store.append(prepared.keys_to_store[0])
        return prepared


class TestStoresDuplicates(Kit):
    spec_cls = spec(manager=StoresDuplicates)


class KeepsFailedStores(CPUOffloadingManager):
    def complete_store(self, keys, req_context, success=True):
        super().complete_store(keys, req_context)


class TestKeepsFailedStores(Kit):
    spec_cls = spec(manager=KeepsFailedStores)


class PinsBeforeItLooks(CPUOffloadingManager):
    def prepare_load(self, keys, req_context):
        specs = [super(PinsBeforeItLooks, self).prepare_load([k], req_context) for k in keys]
        return ArenaLoadStoreSpec([each.slots[0] for each in specs], list(keys))


class TestPinsBeforeItLooks(Kit):
    spec_cls = spec(manager=PinsBeforeItLooks)


class RaisesItsOwn(CPUOffloadingManager):
    def prepare_load(self, keys, req_context):
        for key in keys:
            assert self.lookup(key, req_context) is LookupResult.HIT
        return super().prepare_load(keys, req_context)


class TestRaisesItsOwn(Kit):
    spec_cls = spec(manager=RaisesItsOwn)


class PinsNothing(CPUOffloadingManager):
    def prepare_load(self, keys, req_context):
        prepared = super().prepare_load(keys, req_context)
        super().complete_load(keys, req_context)
        return prepared

    def complete_load(self, keys, req_context): ...


class TestPinsNothing(Kit):
    spec_cls = spec(manager=PinsNothing)


class NotesHolders(CPUOffloadingManager):
    """Knows who has pinned a block."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.holders = {}

    def prepare_load(self, keys, req_context):
        prepared = super().prepare_load(keys, req_context)
        for key in keys:
            self.holders.setdefault(key, []).append(req_context)
        return prepared


class PinsOnce(NotesHolders):
    """The first completion unpins a block, whoever else has it."""

    def complete_load(self, keys, req_context):
        for key in keys:
            for holder in self.holders.pop(key, ()):
                super().complete_load([key], holder)


class TestPinsOnce(Kit):
    spec_cls = spec(manager=PinsOnce)


class BelievesCompletions(NotesHolders):
    """A completion unpins a block once, whoever sends it."""

    def complete_load(self, keys, req_context):
        for key in keys:
            if self.holders.get(key):
                super().complete_load([key], self.holders[key].pop())


class TestBelievesCompletions(Kit):
    spec_cls = spec(manager=BelievesCompletions)


class RaisesForLateCompletions(CPUOffloadingManager):
    def complete_load(self, keys, req_context):
        self._jobs[req_context.req_id].loads[keys[0]]
        super().complete_load(keys, req_context)


class TestRaisesForLateCompletions(Kit):
    spec_cls = spec(manager=RaisesForLateCompletions)


class StoresWhatFits(CPUOffloadingManager):
    def prepare_store(self, keys, req_context):
        for count in range(len(keys), 0, -1):
            prepared = super().prepare_store(keys[:count], req_context)
            if prepared is not None:
                return prepared
        return None


class TestStoresWhatFits(Kit):
    spec_cls = spec(manager=StoresWhatFits)


class EvictsBeforeItRefuses(CPUOffloadingManager):
    def prepare_store(self, keys, req_context):
        prepared = super().prepare_store(keys, req_context)
        if prepared is None:
            for key in [k for k, block in self._blocks.items() if block.num_loads == 0]:
                self._generations.pin([key])
                self._generations.remove([key])
                self._free_slot(key)
        return prepared


class TestEvictsBeforeItRefuses(Kit):
    spec_cls = spec(manager=EvictsBeforeItRefuses)


class GivesPlacesAway(CPUOffloadingManager):
    """Hands out slots in turn, whatever is in them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.turns = itertools.count()

    def prepare_store(self, keys, req_context):
        prepared = super().prepare_store(keys, req_context)
        if prepared is None:
            return None
        slots = [next(self.turns) % (self._num_slots - 1) for _ in prepared.keys_to_store]
        for key, slot in zip(prepared.keys_to_store, slots, strict=True):
            self._blocks[key].slot = slot
        where = ArenaLoadStoreSpec(slots, prepared.keys_to_store)
        return PrepareStoreOutput(prepared.keys_to_store, where, prepared.evicted_keys)


class TestGivesPlacesAway(Kit):
    spec_cls = spec(manager=GivesPlacesAway)


class TellsNoRemovals(CPUOffloadingManager):
    def take_events(self):
        return [event for event in super().take_events() if not event.removed]


class TestTellsNoRemovals(Kit):
    spec_cls = spec(manager=TellsNoRemovals)


class TellsOfStoresFirst(CPUOffloadingManager):
    def take_events(self):
        return sorted(super().take_events(), key=lambda event: event.removed)


class TestTellsOfStoresFirst(Kit):
    spec_cls = spec(manager=TellsOfStoresFirst)


class RemembersAfterAReset(CPUOffloadingManager):
    def reset_cache(self): ...


class TestRemembersAfterAReset(Kit):
    spec_cls = spec(manager=RemembersAfterAReset)


class Ctx:
    req_id = "nobody"


class KeepsOldWeights(CPUOffloadingManager):
    """Pins what is there, for nobody."""

    def weights_changed(self):
        self.prepare_load(list(self._blocks), Ctx)


class TestKeepsOldWeights(Kit):
    spec_cls = spec(manager=KeepsOldWeights)


# -- specs


class TestTakesAThread(Kit):
    class spec_cls(MemorySpec):
        def __init__(self, config):
            super().__init__(config)
            self.thread = threading.Thread(target=time.sleep, args=(2,), daemon=True)
            self.thread.start()


class TestSaysNothing(Kit):
    class spec_cls(MemorySpec):
        def __init__(self, config):
            super().__init__(config)
            del self.extra_config


class TestMakesManagers(Kit):
    class spec_cls(MemorySpec):
        def get_manager(self):
            self._manager = None
            return super().get_manager()


class TestExcuses(Kit):
    spec_cls = spec(worker=BelievesBytes)

    @pytest.mark.xfail(reason="bytes are believed here")
    def test_a_damaged_block_is_not_loaded(self, host):
        super().test_a_damaged_block_is_not_loaded(host)
