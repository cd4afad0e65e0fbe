"""A block is the one that was asked for, or refused, whatever happens: FAULTS 26 and 32.

What the copier refuses is in `tests/kv/test_copier.py`, every bit of a header in `test_slots.py`.
"""

import threading

import numpy as np
import pytest

from wtransfer.kv.header import BlockHeader
from wtransfer.specs.arena import ArenaLoadStoreSpec


@pytest.fixture
def stored(make_rig, arena_rig):
    """A rig with block 2 of its cache in slot 3, under key 0."""
    rig = make_rig(num_layers=2, page_nbytes=(256,)).fill()
    assert rig.store([2], [3], [arena_rig.key(0)]).success
    return rig


def refused(rig, reason, *, slots=(3,), keys=None, blocks=(5,)):
    """Load, and check that it failed for a reason and that no byte of the cache has changed."""
    before = rig.snapshot()
    assert not rig.load(list(blocks), list(slots), keys).success
    assert rig.snapshot() == before
    assert rig.failures() == {f"loads_failed_{reason}": 1}


def test_a_damaged_block_is_quarantined_and_can_be_stored_again(stored, arena_rig):
    key = arena_rig.key(0)
    stored.part.slots[3, 9] ^= 1
    assert not stored.load([5], [3], [key]).success
    assert not stored.load([5], [3], [key]).success
    assert stored.failures() == {"loads_failed_checksum": 1, "loads_failed_absent": 1}
    assert stored.store([2], [3], [key]).success
    assert stored.load([5], [3], [key]).success


@pytest.mark.parametrize("changed", [{"model": "other"}, {"tokens_per_block": 32}])
def test_slot_of_another_model_or_block_size_is_refused(make_rig, arena_rig, changed):
    options = {"num_layers": 2, "page_nbytes": (256,)}
    here, there = make_rig(**options).fill(), make_rig(**options, **changed).fill()
    there.store([2], [3], [arena_rig.key(0)])
    here.part.slots[3], here.header(3)[:] = there.part.slots[3], there.header(3)
    refused(here, "geometry", keys=[arena_rig.key(0)])
    assert not here.header(3).any()


def test_a_header_with_another_length(stored, arena_rig):
    header = BlockHeader.unpack(stored.header(3).tobytes())
    for nbytes in (0, 511, 513, 1024, 2**63):
        wrong = BlockHeader(header.key, header.geometry, nbytes, header.checksum)
        stored.header(3)[:] = np.frombuffer(wrong.pack(), np.uint8)
        before = stored.snapshot()
        assert not stored.load([5], [3], [arena_rig.key(0)]).success
        assert stored.snapshot() == before
    assert stored.failures() == {"loads_failed_length": 5}


def test_without_checksums_headers_are_compared_all_the_same(make_rig, arena_rig):
    rig = make_rig(verify_checksums=False).fill()
    assert rig.store([2], [3], [arena_rig.key(0)]).success
    assert not rig.load([5], [3], [arena_rig.key(1)]).success
    assert not rig.load([5], [4], [arena_rig.key(0)]).success
    assert rig.failures() == {"loads_failed_key": 1, "loads_failed_absent": 1}
    rig.part.slots[3, 0] ^= 1
    assert rig.load([5], [3], [arena_rig.key(0)]).success, "nobody looked: that is what was asked"


def test_block_stored_without_a_checksum_is_refused_by_a_load_that_verifies(stored, arena_rig):
    """Ranks may come again with another option, and find what there was."""
    (copier,) = stored.worker.links[0].copiers
    object.__setattr__(copier, "verified", False)
    assert stored.load([5], [3], [arena_rig.key(0)]).success, "one too many does no harm"
    assert stored.store([7], [4], [arena_rig.key(1)]).success
    object.__setattr__(copier, "verified", True)
    refused(stored, "checksum", slots=[4], keys=[arena_rig.key(1)])


# -- slots that are given away too early


class Gate:
    """Pages whose first copy stops in the middle, until it is told to go on."""

    def __init__(self, pages):
        self._pages = pages
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.block_nbytes, self.num_blocks = pages.block_nbytes, pages.num_blocks
        self.device = pages.device

    def mark(self):
        return self._pages.mark()

    def gather(self, *arguments):
        self._wait()
        self._pages.gather(*arguments)

    def scatter(self, *arguments):
        self._wait()
        self._pages.scatter(*arguments)

    def _wait(self):
        if not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(10)


@pytest.fixture
def gate(stored):
    """The rig's pages, stopped; opened at the end."""
    (copier,) = stored.worker.links[0].copiers
    made = Gate(copier.pages)
    object.__setattr__(copier, "pages", made)
    yield made
    made.go_on.set()


def test_a_slot_that_is_rewritten_during_a_load(stored, gate, arena_rig):
    """By somebody who does not line up: the load sees that it was not alone."""
    number = stored.submit_load([5], [3], [arena_rig.key(0)])
    assert gate.reached.wait(10)
    opened = stored.part.open(np.array([3]))
    good = stored.header(4).copy()
    stored.part.slots[3] = 7
    stored.part.close(np.array([3]), opened, good[None])
    gate.go_on.set()
    assert not stored.result(number).success
    assert stored.failures() == {"loads_failed_reused": 1}


def test_a_store_into_the_slot_of_a_load_waits_for_it(stored, gate, arena_rig):
    load = stored.submit_load([5], [3], [arena_rig.key(0)])
    assert gate.reached.wait(10)
    store = stored.submit_store([7], [3], [arena_rig.key(1)])
    beside = stored.submit_store([8], [4], [arena_rig.key(2)])
    stored.worker.wait({beside})
    assert [each.job_id for each in stored.worker.get_finished()] == [beside]
    gate.go_on.set()
    stored.worker.wait({load, store})
    assert [each.success for each in stored.worker.get_finished()] == [True, True]
    assert stored.block(5) == stored.block(2)
    assert stored.load([6], [3], [arena_rig.key(1)]).success
    assert stored.block(6) == stored.block(7)


def test_two_stores_into_one_slot_come_one_after_the_other(stored, gate, arena_rig):
    one = stored.submit_store([7], [3], [arena_rig.key(1)])
    assert gate.reached.wait(10)
    two = stored.submit_store([8], [3], [arena_rig.key(2)])
    beside = stored.submit_store([9], [4], [arena_rig.key(3)])
    stored.worker.wait({beside})
    assert [each.job_id for each in stored.worker.get_finished()] == [beside]
    gate.go_on.set()
    stored.worker.wait({one, two})
    assert all(each.success for each in stored.worker.get_finished())
    assert stored.load([6], [3], [arena_rig.key(2)]).success
    assert stored.block(6) == stored.block(8)


def test_a_store_that_was_not_alone_in_its_slot_leaves_no_header(stored, gate, arena_rig):
    number = stored.submit_store([7], [3], [arena_rig.key(1)])
    assert gate.reached.wait(10)
    stored.part.open(np.array([3]))
    gate.go_on.set()
    assert not stored.result(number).success
    assert stored.failures() == {"stores_failed_reused": 1}
    assert not stored.header(3).any()


def test_a_store_takes_the_header_back_before_it_writes(stored, gate, arena_rig):
    """So that a kill in between leaves a slot that is refused."""
    assert stored.header(3).any()
    number = stored.submit_store([7], [3], [arena_rig.key(1)])
    assert gate.reached.wait(10)
    assert not stored.header(3).any()
    gate.go_on.set()
    assert stored.result(number).success
    assert stored.header(3).any()


def test_a_copy_that_raises_is_a_failed_job(stored, arena_rig, monkeypatch, caplog):
    def fail(*_):
        raise OSError("the bus is gone")

    monkeypatch.setattr(stored.worker.links[0].copiers[0].pages, "gather", fail)
    number = stored.submit_store([7], [3], [arena_rig.key(1)])
    assert not stored.result(number).success
    assert stored.failures() == {"stores_failed_error": 1}
    assert "store job 1 failed" in caplog.text
    monkeypatch.undo()
    before = stored.snapshot()
    assert not stored.load([5], [3], [arena_rig.key(0)]).success, "it was taken back already"
    assert stored.snapshot() == before


def test_slots_know_their_keys():
    spec = ArenaLoadStoreSpec([3, 1], [b"a", b"b"])
    assert (spec.slots, spec.block_ids, spec.keys) == ([3, 1], [3, 1], [b"a", b"b"])
    with pytest.raises(ValueError, match="1 keys for 2 slots"):
        ArenaLoadStoreSpec([3, 1], [b"a"])
