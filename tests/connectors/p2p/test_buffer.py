"""The staging buffer alone: what it keeps, for which holders, and what it gives up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wtransfer.connectors.p2p.buffer import SlotMemory, StagingBuffer
from wtransfer.errors import ConnectorOptionError
from wtransfer.kv.header import HEADER_NBYTES, BlockGeometry, BlockHeader, checksum

GEOMETRY = BlockGeometry(4, (("uint8", 32), ("uint8", 48)), 1, "m")
STRIDE = SlotMemory.stride(GEOMETRY.nbytes)
SLOTS = 4


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def buffer(clock, leaves_nothing):
    made = StagingBuffer(GEOMETRY, SLOTS * STRIDE + 100, clock)
    yield made
    made.close()


def put(buffer, key, fill=7):
    slots = buffer.reserve([key])
    for slot in slots.values():
        buffer.memory.slots[slot] = fill
        total = checksum(buffer.memory.slots[slot])
        packed = BlockHeader(key, GEOMETRY.digest, GEOMETRY.nbytes, total).pack()
        buffer.commit(slots, np.frombuffer(packed, np.uint8).reshape(1, -1))
    return slots.get(key)


def holds(buffer, slot, key):
    header = BlockHeader.unpack(buffer.memory.headers[slot].tobytes())
    return not isinstance(header, str) and header.key == key


def test_buffer_without_room_for_a_block_is_refused():
    with pytest.raises(ConnectorOptionError, match=r"staging_bytes=10 has no room for one block"):
        StagingBuffer(GEOMETRY, 10)


def test_slot_is_one_range_of_header_version_and_payload(buffer):
    memory, slot = buffer.memory, put(buffer, b"a")
    assert (memory.used.shape, STRIDE) == ((SLOTS, 272), 4096)
    sent = memory.used[slot]
    assert sent[:HEADER_NBYTES].tobytes() == memory.headers[slot].tobytes()
    assert int.from_bytes(sent[HEADER_NBYTES:][:8].tobytes(), "little") == memory.versions[slot]
    assert sent[192:].tobytes() == memory.slots[slot].tobytes() == bytes([7] * 80)


def test_slot_refilled_with_the_same_block_has_another_version(buffer):
    looks = []
    for _ in range(2):
        slots = np.array([put(buffer, b"a")])
        looks.append(buffer.memory.look(slots))
        buffer.invalidate([b"a"])
        looks.append(buffer.memory.look(slots))
    assert len({int(each.openings[0]) for each in looks}) == 4
    assert np.array_equal(looks[0].headers, looks[2].headers)
    assert not looks[1].headers.any()
    assert not looks[3].headers.any()


def test_block_that_is_not_committed_is_missing(buffer):
    slots = buffer.reserve([b"a"])
    assert buffer.lease("x", [b"a"]) == []
    assert not buffer.release("x")
    buffer.abort(slots)
    assert buffer.reserve([b"a"]) == slots


def test_least_recently_used_block_is_evicted_and_its_header_cleared(buffer):
    slots = {key: put(buffer, key) for key in (b"a", b"b", b"c", b"d")}
    assert buffer.lease("x", [b"a"]) == [slots[b"a"]]
    buffer.release("x")
    assert buffer.reserve([b"e"]) == {b"e": slots[b"b"]}
    assert not holds(buffer, slots[b"b"], b"b")
    assert not buffer.memory.headers[slots[b"b"]].any()
    # Blocks after a gap are of no use.
    assert buffer.lease("x", [b"a", b"b", b"c"]) == [slots[b"a"]]


def test_leased_block_stays_until_its_last_holder_releases_it(buffer):
    keys = [b"a", b"b", b"c", b"d"]
    for key in keys:
        put(buffer, key)
    buffer.lease("x", keys)
    buffer.lease("y", keys)
    assert buffer.release("x")
    assert buffer.reserve([b"e"]) == {}
    assert buffer.release("y")
    assert not buffer.release("y")
    assert buffer.reserve([b"e"])


def test_lease_expires_at_its_time_and_not_before(buffer, clock):
    keys = [b"a", b"b", b"c", b"d"]
    for key in keys:
        put(buffer, key)
    buffer.lease("x", keys, 10.0)
    clock.now = 9.9
    assert buffer.reserve([b"e"]) == {}
    clock.now = 10.0
    assert buffer.reserve([b"e"])
    assert buffer.get_stats()["leases_expired_total"] == 1


def test_lease_without_an_end_gets_one(buffer, clock):
    put(buffer, b"a")
    buffer.lease("x", [b"a"])
    clock.now = 1e6
    assert buffer.get_stats()["leases"] == 1
    buffer.lease("x", (), 1.0)
    buffer.lease("y", (), 1.0)
    assert buffer.get_stats()["leases"] == 1
    clock.now += 1.0
    assert buffer.get_stats()["leases"] == 0


def test_invalidated_block_is_gone_at_once_and_its_slot_waits_for_readers(buffer):
    slot, other = put(buffer, b"a"), put(buffer, b"b")
    buffer.lease("x", [b"a"])
    buffer.invalidate([b"a", b"b", b"never"])
    assert not holds(buffer, slot, b"a")
    assert buffer.lease("y", [b"a"]) == buffer.lease("y", [b"b"]) == []
    assert slot not in buffer.reserve(bytes([n]) for n in range(4)).values()
    buffer.release("x")
    assert buffer.reserve([b"z"]) == {b"z": slot}
    assert other != slot


KEYS = st.sampled_from([bytes([n]) for n in range(7)])
HOLDERS = st.sampled_from("xyz")


class BufferMachine(RuleBasedStateMachine):
    """Whatever is done, leased blocks stay where they are and every slot has one state."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.buffer = StagingBuffer(GEOMETRY, SLOTS * STRIDE, self.clock)
        self.leased = {}

    @rule(key=KEYS, fill=st.integers(0, 255))
    def put(self, key, fill):
        put(self.buffer, key, fill)

    @rule(holder=HOLDERS, keys=st.lists(KEYS, max_size=4), lasts=st.sampled_from([None, 5.0]))
    def lease(self, holder, keys, lasts):
        committed = dict(zip(keys, self.buffer.lease(holder, keys, lasts), strict=False))
        slots, _ = self.leased.get(holder, ({}, None))
        ends = None if lasts is None else self.clock.now + lasts
        if committed or holder in self.leased:
            self.leased[holder] = ({**slots, **committed}, ends)

    @rule(holder=HOLDERS)
    def release(self, holder):
        assert self.buffer.release(holder) == (holder in self.leased)
        self.leased.pop(holder, None)

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        over = [h for h, (_, ends) in self.leased.items() if ends and ends <= self.clock.now]
        for holder in over:
            del self.leased[holder]
        self.buffer.get_stats()

    @precondition(lambda self: self.leased)
    @invariant()
    def leased_blocks_are_there(self):
        for slots, _ in self.leased.values():
            for key, slot in slots.items():
                assert holds(self.buffer, slot, key)

    @invariant()
    def every_slot_is_counted_once(self):
        stats = self.buffer.get_stats()
        assert stats["slots_leased"] + self.buffer.num_unleased() == SLOTS
        assert stats["leases"] == len(self.leased)

    def teardown(self):
        self.buffer.close()


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
