"""The shelf alone: what it keeps, for whom, and what it gives up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wtransfer.blocks import HEADER_NBYTES, BlockGeometry, checksum
from wtransfer.connectors.relay.layout import HEAD, SlotLayout
from wtransfer.connectors.relay.shelf import MISSING, Shelf
from wtransfer.errors import ConnectorOptionError

LAYOUT = SlotLayout(BlockGeometry(4, (("uint8", 32), ("uint8", 48)), 1, "m"))
SLOTS = 4


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shelf(clock, leaves_nothing):
    made = Shelf(LAYOUT, SLOTS * LAYOUT.stride + 100, 0, clock)
    yield made
    made.close()


def put(shelf, name, fill=7):
    slot = shelf.open(name)
    if slot is not None:
        memory = shelf.slot(slot)
        memory[LAYOUT.payload] = fill
        shelf.keep(name, checksum(memory[LAYOUT.payload].tobytes()))
    return slot


def holds(shelf, slot, name):
    head = shelf.slot(slot)[HEAD].tobytes()
    return not isinstance(LAYOUT.look(head, name, 0), str)


def test_a_shelf_has_room_for_a_block_at_least():
    with pytest.raises(ConnectorOptionError, match=r"shelf_bytes=10 has no room for one block"):
        Shelf(LAYOUT, 10, 0)


def test_pages_lie_behind_each_other_and_the_head_before_them():
    assert slice(0, HEADER_NBYTES + 8) == HEAD
    assert LAYOUT.payload == slice(192, 272)
    assert LAYOUT.pages == [slice(192, 224), slice(224, 272)]
    assert (LAYOUT.nbytes, LAYOUT.stride) == (272, 4096)


def test_a_slot_that_was_filled_again_with_the_same_block_has_another_head(shelf):
    heads = []
    for _ in range(2):
        slot = shelf.slot(put(shelf, b"a"))
        heads.append(slot[HEAD].tobytes())
        shelf.withdraw([b"a"])
        assert not any(slot[:HEADER_NBYTES])
        heads.append(slot[HEAD].tobytes())
    assert len(set(heads)) == len({each[HEADER_NBYTES:] for each in heads}) == 4
    assert [LAYOUT.look(head, b"a", 0).key for head in heads[::2]] == [b"a", b"a"]


def test_what_is_not_kept_yet_is_not_found(shelf):
    slot = shelf.open(b"a")
    assert shelf.lease("x", [b"a"]) == [MISSING]
    assert shelf.open(b"a") is None
    shelf.discard(b"a")
    assert shelf.open(b"a") == slot


def test_the_longest_unused_makes_room_and_its_header_goes_first(shelf):
    slots = {name: put(shelf, name) for name in (b"a", b"b", b"c", b"d")}
    assert shelf.lease("x", [b"a"]) == [slots[b"a"]]
    shelf.release("x")
    assert shelf.open(b"e") == slots[b"b"]
    assert not holds(shelf, slots[b"b"], b"b")
    assert not shelf.slot(slots[b"b"])[:HEADER_NBYTES].any()
    assert shelf.lease("x", [b"b", b"a"]) == [MISSING, slots[b"a"]]


def test_what_somebody_has_leased_stays_until_the_last_one_lets_go(shelf):
    for name in (b"a", b"b", b"c", b"d"):
        put(shelf, name)
    names = [b"a", b"b", b"c", b"d"]
    shelf.lease("x", names)
    shelf.lease("y", names)
    assert shelf.release("x")
    assert shelf.open(b"e") is None
    assert shelf.release("y")
    assert not shelf.release("y")
    assert shelf.open(b"e") is not None


def test_a_lease_runs_out_at_its_time_and_not_before(shelf, clock):
    for name in (b"a", b"b", b"c", b"d"):
        put(shelf, name)
    shelf.lease("x", [b"a", b"b", b"c", b"d"], 10.0)
    clock.now = 9.9
    assert shelf.open(b"e") is None
    clock.now = 10.0
    assert shelf.open(b"e") is not None
    assert shelf.counts()["leases_expired"] == 1


def test_a_lease_without_an_end_gets_one(shelf, clock):
    put(shelf, b"a")
    shelf.lease("x", [b"a"])
    clock.now = 1e6
    assert shelf.counts()["leases"] == 1
    assert shelf.last("x", 1.0)
    assert not shelf.last("y", 1.0)
    clock.now += 1.0
    assert shelf.counts()["leases"] == 0


def test_what_is_withdrawn_is_gone_at_once_also_for_those_who_read_it(shelf):
    slot, other = put(shelf, b"a"), put(shelf, b"b")
    shelf.lease("x", [b"a"])
    shelf.withdraw([b"a", b"b", b"never"])
    assert not holds(shelf, slot, b"a")
    assert shelf.lease("y", [b"a", b"b"]) == [MISSING, MISSING]
    # A slot that somebody reads is not the next block's before that one lets go.
    assert slot not in {shelf.open(bytes([n])) for n in range(3)}
    shelf.release("x")
    assert shelf.open(b"z") == slot
    assert other != slot


NAMES = st.sampled_from([bytes([n]) for n in range(7)])
HOLDERS = st.sampled_from("xyz")


class ShelfMachine(RuleBasedStateMachine):
    """Whatever is done, leased blocks stay where they are and every slot is of one kind."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.shelf = Shelf(LAYOUT, SLOTS * LAYOUT.stride, 0, self.clock)
        self.leased = {}

    @rule(name=NAMES, fill=st.integers(0, 255))
    def put(self, name, fill):
        put(self.shelf, name, fill)

    @rule(holder=HOLDERS, names=st.lists(NAMES, max_size=4), lasts=st.sampled_from([None, 5.0]))
    def lease(self, holder, names, lasts):
        found = dict(zip(names, self.shelf.lease(holder, names, lasts), strict=True))
        slots, _ = self.leased.get(holder, ({}, None))
        ends = None if lasts is None else self.clock.now + lasts
        kept = {name: slot for name, slot in found.items() if slot != MISSING}
        self.leased[holder] = ({**slots, **kept}, ends)

    @rule(holder=HOLDERS)
    def release(self, holder):
        assert self.shelf.release(holder) == (holder in self.leased)
        self.leased.pop(holder, None)

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        over = [h for h, (_, ends) in self.leased.items() if ends and ends <= self.clock.now]
        for holder in over:
            del self.leased[holder]
        self.shelf.counts()

    @precondition(lambda self: self.leased)
    @invariant()
    def what_is_leased_is_there(self):
        for slots, _ in self.leased.values():
            for name, slot in slots.items():
                assert holds(self.shelf, slot, name)

    @invariant()
    def every_slot_is_counted_once(self):
        counts = self.shelf.counts()
        free = len(self.shelf._free)
        assert free + counts["slots_kept"] + counts["slots_filling"] == SLOTS
        assert counts["leases"] == len(self.leased)

    def teardown(self):
        self.shelf.close()


TestShelfMachine = ShelfMachine.TestCase
TestShelfMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
