"""Connectors that are wrong in one way each. `test_connector_kit.py` runs this as a test module."""

import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from wtransfer.blocks import FENCE_NBYTES
from wtransfer.connectors.fenced import WeightReport
from wtransfer.connectors.shm import SharedMemoryConnector, SharedMemoryScheduler
from wtransfer.testing.connector import ConnectorConformance
from wtransfer.testing.fakes import (
    SHELVES,
    Item,
    Kept,
    MemoryConnector,
    MemoryMetadata,
    MemoryScheduler,
    MemoryWorker,
)

BLOCK_SIZE = 16

# The processes of the kit find what this one does.
HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "connectors")]


class Kit(ConnectorConformance):
    is_shared = True
    in_processes = False
    deadline_s = 5.0
    ends_within_s = 0.3
    outlasts = False

    def options_in(self, folder):
        return {"shelf": str(folder), "outlasts": self.outlasts}

    def damage(self, bed):
        for kept in SHELVES[str(bed.folder)].values():
            next(iter(kept.pages.values())).numpy().reshape(-1)[3] += 1
        return True


def connector(*, scheduler=MemoryScheduler, worker=MemoryWorker):
    sides = {"scheduler_cls": scheduler, "worker_cls": worker, "names_weights": True}
    return type("Broken", (MemoryConnector,), sides)


# -- what comes out


class DoesNothing(MemoryScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False


class TestDoesNothing(Kit):
    connector_cls = connector(scheduler=DoesNothing)


class LosesTheLastLayer(MemoryWorker):
    def load_block(self, name, block):
        last = list(self.caches)[-1]
        before = self.caches[last][block].clone()
        loaded = super().load_block(name, block)
        self.caches[last][block] = before
        return loaded


class TestLosesTheLastLayer(Kit):
    connector_cls = connector(worker=LosesTheLastLayer)


class KnowsBlocksOf16(MemoryScheduler):
    def save(self, tracked):
        item = super().save(tracked)
        if item is not None and self.instance.block_size != BLOCK_SIZE:
            item.block_ids = item.block_ids[::-1]
        return item


class TestKnowsBlocksOf16(Kit):
    connector_cls = connector(scheduler=KnowsBlocksOf16)


class WritesBesideTheBlock(MemoryWorker):
    def load_block(self, name, block):
        for cache in self.caches.values():
            cache[block - 1, 0, 0] += 1
        return super().load_block(name, block)

    def load(self, item):
        item.names, item.block_ids = item.names[::-1], item.block_ids[::-1]
        super().load(item)


class TestWritesBesideTheBlock(Kit):
    connector_cls = connector(worker=WritesBesideTheBlock)


class SavesThePromptAtOnce(MemoryScheduler):
    def save(self, tracked):
        num_computed = tracked.num_computed
        if tracked.num_before < tracked.request.num_prompt_tokens:
            tracked.num_computed = max(num_computed, tracked.request.num_prompt_tokens)
        return super().save(tracked)


class TestSavesThePromptAtOnce(Kit):
    connector_cls = connector(scheduler=SavesThePromptAtOnce)


class HasOneLoad(MemoryScheduler):
    def build_connector_meta(self, scheduler_output):
        self.loads = self.loads[-1:]
        return super().build_connector_meta(scheduler_output)


class TestHasOneLoad(Kit):
    connector_cls = connector(scheduler=HasOneLoad)


class RemembersFirstBlocks(MemoryScheduler):
    """A request that gave its blocks up gets others."""

    blocks: dict

    def save(self, tracked):
        blocks = self.__dict__.setdefault("blocks", {})
        mine = blocks.setdefault(tracked.request.request_id, [])
        mine += tracked.block_ids[len(mine) :]
        tracked.block_ids = mine[: len(tracked.block_ids)]
        return super().save(tracked)


class TestRemembersFirstBlocks(Kit):
    connector_cls = connector(scheduler=RemembersFirstBlocks)


class BeginsAtTheBeginning(MemoryScheduler):
    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        first, self.first[request.request_id] = self.first[request.request_id], 0
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.first[request.request_id] = first


class TestBeginsAtTheBeginning(Kit):
    connector_cls = connector(scheduler=BeginsAtTheBeginning)


class KnowsOneRank(MemoryWorker):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        self.rank, self.own_rank = 0, self.rank

    def build_connector_worker_meta(self):
        return WeightReport({self.own_rank: self.fence.version()})

    def get_handshake_metadata(self):
        self.rank, rank = self.own_rank, self.rank
        try:
            return super().get_handshake_metadata()
        finally:
            self.rank = rank


class KnowsOneRanksBlocks(MemoryScheduler):
    def is_kept(self, name):
        return (name, 0) in self.shelf


class TestKnowsOneRank(Kit):
    connector_cls = connector(scheduler=KnowsOneRanksBlocks, worker=KnowsOneRank)


# -- asking


class CountsPartsOfBlocks(MemoryScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (found - 1 if found else 0), later


class TestCountsPartsOfBlocks(Kit):
    connector_cls = connector(scheduler=CountsPartsOfBlocks)


class LeavesNoToken(MemoryScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        whole = num_computed_tokens + found + BLOCK_SIZE == request.num_tokens
        return (found + BLOCK_SIZE if found and whole else found), later


class TestLeavesNoToken(Kit):
    connector_cls = connector(scheduler=LeavesNoToken)


class AnswersOnce(MemoryScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        asked = self.__dict__.setdefault("asked", set())
        if request.request_id in asked:
            return 0, False
        asked.add(request.request_id)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class TestAnswersOnce(Kit):
    connector_cls = connector(scheduler=AnswersOnce)


class WaitsForWhomItWasAskedAbout(MemoryScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.__dict__.setdefault("asked", set()).add(request.request_id)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.asked.discard(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def has_pending_push_work(self):
        return bool(self.__dict__.get("asked"))


class TestWaitsForWhomItWasAskedAbout(Kit):
    connector_cls = connector(scheduler=WaitsForWhomItWasAskedAbout)


class LoadsWhatItOffered(MemoryScheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.__dict__.setdefault("offered", {})[request.request_id] = found
        return found, later

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        offered = self.offered[request.request_id]
        super().update_state_after_alloc(request, blocks, offered)


class TestLoadsWhatItOffered(Kit):
    outlasts = True
    connector_cls = connector(scheduler=LoadsWhatItOffered)


# -- telling


class TellsTwice(MemoryScheduler):
    def build_connector_meta(self, scheduler_output):
        loads = self.loads
        told = super().build_connector_meta(scheduler_output)
        self.loads, self.before = [], loads
        told.loads = told.loads + [x for x in self.__dict__.get("told", []) if x not in told.loads]
        self.told = loads
        return told


class TestTellsTwice(Kit):
    connector_cls = connector(scheduler=TellsTwice)


@dataclass
class WithAShape(MemoryMetadata):
    shape: object = None


class TellsAShape(MemoryScheduler):
    def build_connector_meta(self, scheduler_output):
        told = super().build_connector_meta(scheduler_output)
        return WithAShape(told.loads, told.saves, shape=lambda: self.instance)


class TestTellsAShape(Kit):
    connector_cls = connector(scheduler=TellsAShape)


class GoesOnWriting(MemoryScheduler):
    def build_connector_meta(self, scheduler_output):
        self.told = super().build_connector_meta(scheduler_output)
        return self.told

    def update_connector_output(self, connector_output):
        self.told.saves.clear()
        super().update_connector_output(connector_output)


class TestGoesOnWriting(Kit):
    connector_cls = connector(scheduler=GoesOnWriting)


class TakesItsOwn(MemoryScheduler):
    """It counts on what it told to be as it was when it told it."""

    def build_connector_meta(self, scheduler_output):
        self.told = super().build_connector_meta(scheduler_output)
        self.under_way = {load.request_id for load in self.told.loads}
        return self.told

    def update_connector_output(self, connector_output):
        assert {load.request_id for load in self.told.loads} == self.under_way
        super().update_connector_output(connector_output)


class UsesUp(MemoryWorker):
    def start_load_kv(self, forward_context, **kwargs):
        super().start_load_kv(forward_context, **kwargs)
        self.metadata.loads.clear()


class TestUsesUp(Kit):
    connector_cls = connector(scheduler=TakesItsOwn, worker=UsesUp)


@dataclass
class SaidByTheLast(WeightReport):
    last: list = field(default_factory=list)

    def aggregate(self, other):
        super().aggregate(other)
        self.last = other.last
        return self


class SpeaksLast(MemoryWorker):
    def build_connector_worker_meta(self):
        return SaidByTheLast(self.fence.report(), [self.rank])


class TestSpeaksLast(Kit):
    connector_cls = connector(worker=SpeaksLast)


class TalksInWords(MemoryWorker):
    def get_stats(self):
        return {**super().get_stats(), "state": "well"}


class TestTalksInWords(Kit):
    connector_cls = connector(worker=TalksInWords)


class CountsBackwards(MemoryWorker):
    def get_stats(self):
        return {name: -value for name, value in super().get_stats().items()}


class TestCountsBackwards(Kit):
    connector_cls = connector(worker=CountsBackwards)


class TellsTuples(SharedMemoryScheduler):
    def request_finished(self, request, block_ids):
        stays, told = super().request_finished(request, block_ids)
        if told:
            told["remote_addresses"] = tuple(told["remote_addresses"])
        return stays, told


class TestTellsTuples(Kit):
    kind = "transfer"
    connector_cls = type("Broken", (SharedMemoryConnector,), {"scheduler_cls": TellsTuples})

    def options_in(self, folder):
        return {"shelf_bytes": 2**22}


# -- being told


class NamesLoadsTwice(MemoryWorker):
    def get_finished(self, finished_req_ids):
        sent, received = super().get_finished(finished_req_ids)
        before = self.__dict__.get("before", set())
        self.before = received
        return sent, received | before


class TestNamesLoadsTwice(Kit):
    outlasts = True
    connector_cls = connector(worker=NamesLoadsTwice)


class ForgetsRefusedLoads(MemoryWorker):
    def load(self, item):
        if self.admits(item):
            super().load(item)


class TestForgetsRefusedLoads(Kit):
    outlasts = True
    connector_cls = connector(worker=ForgetsRefusedLoads)


class NamesBlocksLate(MemoryWorker):
    def get_block_ids_with_load_errors(self):
        self.late = self.__dict__.get("late", [])
        self.late.append(super().get_block_ids_with_load_errors())
        return self.late.pop(0) if len(self.late) > 3 else set()


class TestNamesBlocksLate(Kit):
    outlasts = True
    connector_cls = connector(worker=NamesBlocksLate)


class NamesEveryRequest(MemoryWorker):
    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self.received |= {save.request_id for save in connector_metadata.saves}


class TestNamesEveryRequest(Kit):
    connector_cls = connector(worker=NamesEveryRequest)


class CountsNotices(MemoryScheduler):
    pending = 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.pending += bool(num_external_tokens)

    def update_connector_output(self, connector_output):
        super().update_connector_output(connector_output)
        self.pending -= len(connector_output.finished_recving or ())

    def has_pending_push_work(self):
        return self.pending != 0


class TestCountsNotices(Kit):
    outlasts = True
    connector_cls = connector(scheduler=CountsNotices)


class KnowsEverybody(MemoryScheduler):
    def update_connector_output(self, connector_output):
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            self.names[request_id]


class TestKnowsEverybody(Kit):
    outlasts = True
    connector_cls = connector(scheduler=KnowsEverybody)


class AnswersAboutNobody(MemoryWorker):
    def get_finished(self, finished_req_ids):
        _, received = super().get_finished(finished_req_ids)
        return set(finished_req_ids), received


class TestAnswersAboutNobody(Kit):
    connector_cls = connector(worker=AnswersAboutNobody)


# -- ends of requests


class KeepsBlocks(MemoryScheduler):
    def request_finished(self, request, block_ids):
        super().request_finished(request, block_ids)
        return True, None


class TestKeepsBlocks(Kit):
    connector_cls = connector(scheduler=KeepsBlocks)


class KeepsSentBlocks(SharedMemoryScheduler):
    def request_finished(self, request, block_ids):
        _, told = super().request_finished(request, block_ids)
        return bool(told), told


class TestKeepsSentBlocks(Kit):
    kind = "transfer"
    connector_cls = type("Broken", (SharedMemoryConnector,), {"scheduler_cls": KeepsSentBlocks})

    def options_in(self, folder):
        return {"shelf_bytes": 2**22}


class KeepsBlocksOfAborted(MemoryScheduler):
    def request_finished(self, request, block_ids):
        super().request_finished(request, block_ids)
        return bool(block_ids) and not request.is_done, None


class TestKeepsBlocksOfAborted(Kit):
    connector_cls = connector(scheduler=KeepsBlocksOfAborted)


# -- steps that do not count


class SavesWhatWasNotComputed(MemoryWorker):
    """It takes every step for one that was carried out."""

    def clear_connector_metadata(self):
        for item in self.metadata.saves:
            for name, block in zip(item.names, item.block_ids, strict=True):
                pages = {layer: cache[block].clone() for layer, cache in self.caches.items()}
                self.keep(name, Kept(pages, {}))
        super().clear_connector_metadata()

    def wait_for_save(self):
        pass

    def is_whole(self, kept):
        return True


class TestSavesWhatWasNotComputed(Kit):
    connector_cls = connector(worker=SavesWhatWasNotComputed)


class KeepsLayerByLayer(MemoryWorker):
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        if layer_name == list(self.caches)[-1]:
            super().wait_for_save()


class TestKeepsLayerByLayer(Kit):
    connector_cls = connector(worker=KeepsLayerByLayer)


# -- damage


class BelievesBytes(MemoryWorker):
    def is_whole(self, kept):
        return True


class TestBelievesBytes(Kit):
    connector_cls = connector(worker=BelievesBytes)


class KeepsTheFirst(MemoryWorker):
    def load_block(self, name, block):
        kept = self.shelf.get((name, self.rank))
        loaded = super().load_block(name, block)
        if kept is not None:
            self.shelf[name, self.rank] = kept
        return loaded

    def keep(self, name, kept):
        self.shelf.setdefault((name, self.rank), kept)


class TestKeepsTheFirst(Kit):
    connector_cls = connector(worker=KeepsTheFirst)


class SaysNothingOfDamage(MemoryWorker):
    def get_block_ids_with_load_errors(self):
        self.errors.clear()
        return set()


class TestSaysNothingOfDamage(Kit):
    connector_cls = connector(worker=SaysNothingOfDamage)


class RaisesForDamage(MemoryWorker):
    def load_block(self, name, block):
        if not super().load_block(name, block):
            raise OSError("damaged")
        return True


class TestRaisesForDamage(Kit):
    connector_cls = connector(worker=RaisesForDamage)


class BelievesHashes(MemoryScheduler):
    def named(self, request_id, fingerprint):
        keys = self.names[request_id].under(fingerprint) if fingerprint else []
        return [key[FENCE_NBYTES:] + fingerprint.encode() for key in keys]


class TestBelievesHashes(Kit):
    connector_cls = connector(scheduler=BelievesHashes)


# -- salts and adapters


def ignoring(attribute):
    class Ignores(MemoryScheduler):
        def on_new_request(self, request):
            kept = getattr(request, attribute)
            setattr(request, attribute, None)
            super().on_new_request(request)
            setattr(request, attribute, kept)

    return Ignores


class TestIgnoresSalts(Kit):
    connector_cls = connector(scheduler=ignoring("cache_salt"))


class TestIgnoresAdapters(Kit):
    connector_cls = connector(scheduler=ignoring("lora_request"))


# -- weights


class NamesNoWeights(MemoryScheduler):
    def named(self, request_id, fingerprint):
        return super().named(request_id, "the weights" if fingerprint else "")


class TestNamesNoWeights(Kit):
    connector_cls = connector(scheduler=NamesNoWeights)


class ForgetsAtAChange(NamesNoWeights):
    """It hears of changes, and not of what others have left before it began."""

    def update_connector_output(self, connector_output):
        before = self.fence.current
        super().update_connector_output(connector_output)
        if before not in (None, self.fence.current):
            self.shelf.clear()


class TestForgetsAtAChange(Kit):
    connector_cls = connector(scheduler=ForgetsAtAChange)


class TestNamesByRequest(Kit):
    """A fence cannot change what has no part of the request in it."""

    connector = "ByRequestConnector"
    module_path = "by_request_connector"
    in_processes = True

    def options_in(self, folder):
        return {"folder": str(folder)}


class NamesTheWeightsOfNow(MemoryScheduler):
    """A request's blocks are what was computed when they were, not when the last one was."""

    def save(self, tracked):
        request_id = tracked.request.request_id
        began = self.fence._began.get(request_id)
        self.fence._began[request_id] = self.fence.current
        tracked.num_before = 0
        try:
            return super().save(tracked)
        finally:
            self.fence._began[request_id] = began

    def versions(self, request_id):
        return self.fence.current or ()


class TestNamesTheWeightsOfNow(Kit):
    connector_cls = connector(scheduler=NamesTheWeightsOfNow)


class LoadsWhatever(MemoryWorker):
    """The scheduler's side will know."""

    def load(self, item):
        item.versions = [self.fence.version()] * (self.rank + 1)
        super().load(item)

    def admits(self, item):
        return super().admits(item) if item.versions[0] else True


class TestLoadsWhatever(Kit):
    connector_cls = connector(worker=LoadsWhatever)


class LooksOnce(MemoryWorker):
    """Weights do not change within a step."""

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self.admitted = {}
        for item in (*connector_metadata.loads, *connector_metadata.saves):
            self.admitted[id(item)] = self.fence.admits(item.versions)

    def admits(self, item):
        return self.admitted[id(item)]


class TestLooksOnce(Kit):
    connector_cls = connector(worker=LooksOnce)


class ComparesFingerprints(MemoryWorker):
    """It knows the weights, and not that they went and came back."""

    def admits(self, item: Item):
        version = self.fence.version()
        return bool(version and item.versions) and version[0] == item.versions[self.rank][0]


class KnowsFingerprints(NamesTheWeightsOfNow):
    def save(self, tracked):
        began = self.fence._began.get(tracked.request.request_id)
        now = self.fence.current
        if not began or not now or began[0][0] != now[0][0]:
            return None
        return super().save(tracked)


class TestComparesFingerprints(Kit):
    connector_cls = connector(scheduler=KnowsFingerprints, worker=ComparesFingerprints)


# -- both sides, and their ends


class IsBothSides(MemoryConnector):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.take_events = lambda: ()
        self.get_finished = lambda _=None: (None, None)


class TestIsBothSides(Kit):
    connector_cls = IsBothSides


class WantsTheShape(MemoryWorker):
    def __init__(self, config, kv_cache_config=None):
        super().__init__(config, kv_cache_config)
        self.num_blocks = kv_cache_config.num_blocks


class TestWantsTheShape(Kit):
    connector_cls = connector(worker=WantsTheShape)


class EndsWhatNeverBegan(MemoryWorker):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        self.folder = tempfile.TemporaryDirectory()

    def shutdown(self):
        self.folder.cleanup()


class TestEndsWhatNeverBegan(Kit):
    connector_cls = connector(worker=EndsWhatNeverBegan)


class EndsOnce(MemoryScheduler):
    def shutdown(self):
        del self.shelf


class TestEndsOnce(Kit):
    connector_cls = connector(scheduler=EndsOnce)


class Lingers(MemoryWorker):
    def shutdown(self):
        time.sleep(0.5)


class TestLingers(Kit):
    connector_cls = connector(worker=Lingers)


class LeavesAThread(MemoryWorker):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        threading.Thread(target=time.sleep, args=(2.0,), daemon=True).start()


class TestLeavesAThread(Kit):
    connector_cls = connector(worker=LeavesAThread)


class LeavesAFile(MemoryWorker):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        Path(tempfile.gettempdir(), "blocks").touch()


class TestLeavesAFile(Kit):
    connector_cls = connector(worker=LeavesAFile)


class TestSharesAProcess(Kit):
    """Its sides have one dictionary, and so one process."""

    connector = "MemoryConnector"
    module_path = "wtransfer.testing.fakes"
    in_processes = True


class TestExcuses(Kit):
    connector_cls = connector(worker=BelievesBytes)

    @pytest.mark.xfail(reason="nobody damages what lies in memory", strict=True)
    def test_damaged_blocks_are_a_miss(self, bed):
        super().test_damaged_blocks_are_a_miss(bed)
