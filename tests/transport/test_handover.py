import contextlib
import gc
import hmac
import os
import signal
import socket
import threading
import time
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from wtransfer.errors import (
    AddressInUseError,
    AuthenticationError,
    ClosedError,
    PeerLostError,
    ProtocolError,
    SegmentGoneError,
    StallError,
)
from wtransfer.transport import borrower as borrower_module
from wtransfer.transport import lender as lender_module
from wtransfer.transport.handover import PROTOCOL, Borrower, Lender
from wtransfer.transport.memory import Segment, map_private
from wtransfer.transport.tensors import tensor_from
from wtransfer.transport.zygote import Zygote

NBYTES = 1 << 16
PATIENCE_S = 20.0


def eventually(condition, timeout_s=PATIENCE_S):
    """Return what the condition returns once it is true."""
    end = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.002)
    return result


def stop(pid):
    """Stop a process, and wait until all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    for task in Path(f"/proc/{pid}/task").iterdir():
        eventually(lambda task=task: (task / "stat").read_text().rpartition(")")[2][1] == "T")


def what_is_held():
    """Descriptors, mappings and threads of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        *(f"descriptor {path.name}" for path in Path("/proc/self/fd").iterdir()),
        *(line for line in maps if "memfd:wtransfer" in line),
        *threading.enumerate(),
    }


@pytest.fixture(scope="module")
def zygote():
    with Zygote(preload=["torch", "handover_jobs"], paths=[Path(__file__).parent]) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(zygote):
    before = what_is_held()
    yield
    # What tests of other modules still held may go meanwhile; nothing may come.
    if what_is_held() - before:
        # An exception that a test caught may hold a frame in a cycle.
        gc.collect()
    assert what_is_held() - before == set()
    assert list(Path("/dev/shm").glob("*wtransfer*")) == []


@pytest.fixture
def lender():
    made = Lender()
    yield made
    made.close()


@pytest.fixture
def segment():
    made = Segment(NBYTES)
    made.buffer[:] = 5
    yield made
    made.close()


@pytest.fixture
def borrower(lender, segment):
    lender.offer(1, segment)
    return Borrower(lender.address, lender.secret, PATIENCE_S)


class Job:
    """A child that runs one of `handover_jobs`, and the words it has said."""

    def __init__(self, zygote, folder, name, *args):
        self.out = folder / f"{name}.{time.monotonic_ns()}.out"
        self.child = zygote.spawn(f"handover_jobs:{name}", *args, stdout=self.out)
        self.pid, self.wait, self.kill = self.child.pid, self.child.wait, self.child.kill

    def line(self, number=0):
        def complete():
            text = self.out.read_text() if self.out.exists() else ""
            assert self.child.poll() in (None, 0), "the child failed"
            return text.splitlines()[number : number + 1] if text.endswith("\n") else None

        return eventually(complete)[0]


@pytest.fixture
def job(zygote, tmp_path):
    """Starter of children, which are ended with the test."""
    started = []

    def start(name, *args):
        started.append(Job(zygote, tmp_path, name, *args))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait(PATIENCE_S)


# -- leases


def test_a_borrower_sees_the_segments_bytes(borrower, segment):
    borrowed = borrower.borrow(1)
    assert (borrowed.segment_id, borrowed.nbytes, len(borrowed.mapping)) == (1, NBYTES, NBYTES)
    assert bytes(borrowed.mapping[:]) == b"\x05" * NBYTES


def test_what_a_borrower_writes_is_its_own(borrower, segment):
    one, other = borrower.borrow(1), borrower.borrow(1)
    one.mapping[0] = 9
    assert (segment.buffer[0], other.mapping[0]) == (5, 5)


@pytest.mark.parametrize("make", [
    lambda mapping: tensor_from(mapping, 0, "uint8", (16,))[3:],
    lambda mapping: tensor_from(mapping, 0, "float32", (2, 2)).T,
    lambda mapping: np.frombuffer(mapping, np.uint8)[4:8],
    memoryview,
], ids=["tensor", "transposed", "array", "memoryview"])  # fmt: skip
def test_a_lease_lasts_as_long_as_anything_made_from_the_mapping(borrower, lender, make):
    borrowed = borrower.borrow(1)
    kept = make(borrowed.mapping)
    del borrowed
    assert not lender.wait_free(1, 0.05)
    assert lender.num_leases(1) == 1
    del kept
    assert lender.wait_free(1, PATIENCE_S)
    assert lender.num_leases(1) == 0


def test_a_received_descriptor_is_no_other_programs(borrower, monkeypatch):
    inheritable = []

    def spy(fd, nbytes):
        inheritable.append(os.get_inheritable(fd))
        return map_private(fd, nbytes)

    monkeypatch.setattr(borrower_module, "map_private", spy)
    borrower.borrow(1)
    assert inheritable == [False]


def test_each_borrowing_is_a_lease(borrower, lender):
    held = [borrower.borrow(1) for _ in range(3)]
    assert lender.num_leases(1) == 3
    del held[1]
    eventually(lambda: lender.num_leases(1) == 2)
    held.clear()
    assert lender.wait_free(1, PATIENCE_S)


def test_a_lease_in_a_cycle_ends_with_the_collector(borrower, lender):
    gc.disable()
    try:
        cycle = [borrower.borrow(1)]
        cycle.append(cycle)
        del cycle
        assert not lender.wait_free(1, 0.05)
        collector = threading.Thread(target=gc.collect)
        collector.start()
        assert lender.wait_free(1, PATIENCE_S)
        collector.join()
    finally:
        gc.enable()


def test_leases_of_segments_are_counted_apart(borrower, lender, segment):
    lender.offer(2, segment)
    held = borrower.borrow(2)
    assert (lender.num_leases(1), lender.num_leases(2)) == (0, 1)
    assert lender.wait_free(1, 0.0)
    del held


def test_a_withdrawn_segment_is_lent_no_more_and_stays_leased(borrower, lender, segment):
    held = borrower.borrow(1)
    lender.withdraw(1)
    lender.withdraw(1)
    with pytest.raises(SegmentGoneError, match=r"does not lend segment 1 \(any more\)"):
        borrower.borrow(1)
    assert lender.num_leases(1) == 1
    lender.offer(1, segment)
    assert bytes(borrower.borrow(1).mapping[:1]) == b"\x05"
    del held
    assert lender.wait_free(1, PATIENCE_S)


def test_a_closed_segment_is_not_lent(borrower, lender, segment):
    segment.close()
    with pytest.raises(SegmentGoneError):
        borrower.borrow(1)
    lender.withdraw(1)
    another = Segment(NBYTES)
    lender.offer(1, another)
    assert borrower.borrow(1).mapping[0] == 0
    another.close()


def test_a_number_is_on_offer_once(borrower, lender, segment):
    with pytest.raises(ValueError, match="segment 1 is on offer already"):
        lender.offer(1, segment)


def test_closing_a_borrower_keeps_what_it_borrowed(borrower, lender):
    held = borrower.borrow(1)
    borrower.close()
    with pytest.raises(ClosedError):
        borrower.borrow(1)
    assert not lender.wait_free(1, 0.05)
    assert held.mapping[0] == 5


def test_a_closed_lender_leaves_mappings_valid_and_counts_no_more(lender, segment, borrower):
    held = borrower.borrow(1)
    lender.close()
    lender.close()
    segment.close()
    assert bytes(held.mapping[:]) == b"\x05" * NBYTES
    with pytest.raises(PeerLostError, match="the lender is gone"):
        borrower.borrow(1)
    calls = [
        lambda: lender.offer(2, segment),
        lambda: lender.num_leases(1),
        lambda: lender.wait_free(1, 1.0),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_closing_ends_a_wait(lender, borrower):
    held = borrower.borrow(1)
    outcome = []

    def wait():
        try:
            outcome.append(lender.wait_free(1, 60.0))
        except ClosedError:
            outcome.append("closed")

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    lender.close()
    thread.join(PATIENCE_S)
    assert outcome == ["closed"]
    del held


# -- the ends of processes


def test_the_lease_of_a_killed_reader_ends_at_once(lender, borrower, job):
    reader = job("hold", lender.address, lender.secret, 1)
    reader.line()
    assert not lender.wait_free(1, 0.05)
    reader.kill()
    assert lender.wait_free(1, 1.0)


def test_a_stopped_reader_keeps_its_lease(lender, borrower, job):
    reader = job("hold", lender.address, lender.secret, 1)
    reader.line()
    stop(reader.pid)
    assert not lender.wait_free(1, 0.3)
    assert borrower.borrow(1).mapping[0] == 5
    reader.kill()
    assert lender.wait_free(1, 1.0)


def test_a_lease_outlives_the_interpreters_exit_handlers(lender, borrower, job, tmp_path):
    reader = job("hold_until_exit", lender.address, lender.secret, 1, str(tmp_path / "go"))
    assert reader.line(1) == "exiting"
    assert not lender.wait_free(1, 0.1)
    (tmp_path / "go").touch()
    assert reader.wait(PATIENCE_S) == 0
    assert lender.wait_free(1, PATIENCE_S)


def test_a_forked_copy_of_the_mapping_keeps_the_lease(lender, borrower, segment, job, tmp_path):
    reader = job("leave_to_a_fork", lender.address, lender.secret, 1, str(tmp_path / "go"))
    assert reader.line() == "released"
    lender.withdraw(1)
    if lender.wait_free(1, 0.1):
        # What an owner does with a free slot; the copy must not be there to see it.
        segment.buffer[:] = 6
    (tmp_path / "go").touch()
    assert reader.wait(PATIENCE_S) == 0
    assert lender.wait_free(1, PATIENCE_S)


def test_a_forked_child_that_lets_go_ends_nothing(lender, borrower, job, tmp_path):
    reader = job("release_in_a_fork", lender.address, lender.secret, 1, str(tmp_path / "go"))
    assert reader.line(0) == "released"
    assert not lender.wait_free(1, 0.1)
    (tmp_path / "go").touch()
    assert reader.line(1) == "child ended"
    assert not lender.wait_free(1, 0.1)


def test_a_program_started_by_a_reader_holds_no_lease(lender, borrower, job, tmp_path):
    reader = job(
        "release_beside_a_subprocess", lender.address, lender.secret, 1, str(tmp_path / "go")
    )
    assert reader.line() == "released"
    assert lender.wait_free(1, 1.0)
    (tmp_path / "go").touch()
    assert reader.wait(PATIENCE_S) == 0


def test_a_killed_lender_leaves_readers_their_bytes_and_nothing_else(job):
    owner = job("lend", 7)
    address, secret = owner.line().split()
    borrower = Borrower(address, secret, PATIENCE_S)
    held = borrower.borrow(1)
    assert address in Path("/proc/net/unix").read_text()
    owner.kill()
    owner.wait(PATIENCE_S)
    assert bytes(held.mapping[:]) == b"\x07" * NBYTES
    with pytest.raises(PeerLostError, match="the lender is gone"):
        borrower.borrow(1)
    # The name is listed for as long as a connection accepted under it: this lease.
    del held
    eventually(lambda: address not in Path("/proc/net/unix").read_text())


def test_a_forked_copy_of_a_lender_does_not_stand_in_for_it(job):
    owner = job("lend_and_fork", 7)
    address, secret, lender_pid, child_pid = owner.line().split()
    try:
        borrower = Borrower(address, secret, PATIENCE_S)
        assert borrower.borrow(1).mapping[0] == 7
        assert int(lender_pid) == owner.pid
        owner.kill()
        owner.wait(PATIENCE_S)
        os.kill(int(child_pid), 0)
        with pytest.raises(PeerLostError, match="the lender is gone"):
            borrower.borrow(1)
    finally:
        os.kill(int(child_pid), signal.SIGKILL)


def test_a_stopped_lender_is_a_stall(job):
    owner = job("lend", 7)
    address, secret = owner.line().split()
    stop(owner.pid)
    start = time.monotonic()
    with pytest.raises(StallError, match=r"no answer from the lender within 0.3 s") as caught:
        Borrower(address, secret, 0.3).borrow(1)
    assert caught.value.seconds == 0.3
    assert time.monotonic() - start < 2.0
    os.kill(owner.pid, signal.SIGCONT)
    assert Borrower(address, secret, PATIENCE_S).borrow(1).mapping[0] == 7


def test_a_full_queue_is_a_stall(job):
    owner = job("lend", 7)
    address, secret = owner.line().split()
    stop(owner.pid)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(BlockingIOError):
            while True:
                raw = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                raw.setblocking(False)
                raw.connect(address.replace("@", "\0"))
        with pytest.raises(StallError, match="the connection to @wtransfer"):
            Borrower(address, secret, 0.2).borrow(1)
        os.kill(owner.pid, signal.SIGCONT)
        assert Borrower(address, secret, PATIENCE_S).borrow(1).mapping[0] == 7


# -- who may borrow


def test_a_wrong_secret_is_refused(lender, borrower):
    for secret in ("", lender.secret[:-1], "é" * 64, lender.secret + "0"):
        with pytest.raises(AuthenticationError, match="did not accept the secret"):
            Borrower(lender.address, secret, PATIENCE_S).borrow(1)
    assert lender.num_leases(1) == 0
    assert borrower.borrow(1).mapping[0] == 5


def test_secrets_are_compared_in_constant_time_and_never_repeat(lender, borrower, monkeypatch):
    compared = []
    compare_digest = hmac.compare_digest

    def spy(one, other):
        compared.append(True)
        return compare_digest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    borrower.borrow(1)
    assert compared == [True]
    other = Lender()
    assert other.secret != lender.secret
    assert other.address != lender.address
    other.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_on_its_side(lender, borrower, job):
    assert job("borrow_as_another_user", lender.address, lender.secret, 65534).wait(60) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_by_the_lender(lender, borrower, monkeypatch):
    """The lender trusts the kernel, not what the borrower checks about itself."""
    monkeypatch.setattr(borrower_module, "peer_uid", lambda connection: os.geteuid())
    monkeypatch.setattr(lender_module, "peer_uid", lambda connection: 65534)
    with pytest.raises(PeerLostError):
        borrower.borrow(1)
    assert lender.num_leases(1) == 0


def test_another_protocol_is_refused_and_both_are_named(lender, borrower, monkeypatch):
    monkeypatch.setattr(borrower_module, "PROTOCOL", "wtransfer-handover-2")
    with pytest.raises(ProtocolError) as caught:
        borrower.borrow(1)
    assert PROTOCOL in str(caught.value)
    assert "wtransfer-handover-2" in str(caught.value)


def connect(lender):
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.settimeout(PATIENCE_S)
    raw.connect(lender.address.replace("@", "\0"))
    return raw


@pytest.mark.parametrize("datagram", [
    b"\x00", b"\x80\x04\x95cos\nsystem\n.", b"\xff" * 4096, b"\xdd\xff\xff\xff\xff",
    msgspec.msgpack.encode([PROTOCOL, "x", "1"]), msgspec.msgpack.encode([PROTOCOL, 1, 1]),
    msgspec.msgpack.encode([PROTOCOL, "x", 2**64 - 1]), msgspec.msgpack.encode([PROTOCOL]),
])  # fmt: skip
def test_nonsense_ends_only_its_own_connection(lender, borrower, datagram):
    with connect(lender) as raw:
        raw.send(datagram)
        reply = msgspec.msgpack.decode(raw.recv(4096))
        assert reply[1] in ("protocol", "denied")
        assert raw.recv(4096) == b""
    assert borrower.borrow(1).mapping[0] == 5


def test_what_a_leaseholder_says_further_changes_nothing(lender, borrower):
    with connect(lender) as raw:
        raw.send(msgspec.msgpack.encode([PROTOCOL, lender.secret, 1]))
        _, fds, _, _ = socket.recv_fds(raw, 4096, 1)
        for _ in range(20):
            raw.send(b"release me")
        assert not lender.wait_free(1, 0.1)
        os.close(fds[0])
    assert lender.wait_free(1, PATIENCE_S)


def test_connections_that_say_nothing_are_closed_in_time(lender, borrower):
    with connect(lender) as raw:
        start = time.monotonic()
        assert raw.recv(1) == b""
        assert 0.5 < time.monotonic() - start < 3.0
    assert borrower.borrow(1).mapping[0] == 5


def test_many_silent_connections_keep_nobody_out(lender, borrower):
    held = borrower.borrow(1)
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            # The queue may be full for a moment.
            raw = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            raw.settimeout(PATIENCE_S)
            eventually(lambda raw=raw: raw.connect_ex(lender.address.replace("@", "\0")) == 0)
        assert borrower.borrow(1).mapping[0] == 5
        assert len(lender._waiting) <= lender_module.MAX_WAITING
        assert lender.num_leases(1) >= 1
    del held


# -- shortages


def test_a_borrower_without_descriptors_says_so(lender, borrower, job):
    # One for the connection, one to receive; the mapping keeps none.
    assert job("without_descriptors", lender.address, lender.secret).wait(60) == 2
    assert lender.wait_free(1, PATIENCE_S)


def test_a_lender_without_descriptors_stays_calm_and_recovers(job, tmp_path):
    owner = job("lend_without_descriptors", str(tmp_path / "go"))
    address, secret = owner.line().split()
    with pytest.raises(StallError):
        Borrower(address, secret, 0.3).borrow(1)
    (tmp_path / "go").touch()
    assert owner.line(1) == "calm"
    assert Borrower(address, secret, PATIENCE_S).borrow(1).mapping[0] == 0


# -- all at once


def rounds_over_killed_readers(seconds, seed, lender, job):
    """Rewrite two slots whenever they are free, under readers of which some are killed."""
    random = Random(seed)
    slots = [Segment(NBYTES), Segment(NBYTES)]
    readers = [job("read_on", lender.address, lender.secret, n) for n in range(3)]
    num_rewrites = num_kills = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        slot = random.randrange(2)
        lender.withdraw(slot)
        if lender.wait_free(slot, 0.02):
            slots[slot].buffer[:] = num_rewrites % 251
            num_rewrites += 1
        lender.offer(slot, slots[slot])
        time.sleep(0.003)
        if random.random() < 0.02:
            victim = readers.pop(random.randrange(3))
            victim.kill()
            assert victim.wait(PATIENCE_S) == -signal.SIGKILL
            readers.append(job("read_on", lender.address, lender.secret, num_kills))
            num_kills += 1
    assert [reader.child.poll() for reader in readers] == [None] * 3
    for reader in readers:
        reader.kill()
    for slot in (0, 1):
        lender.withdraw(slot)
        assert lender.wait_free(slot, PATIENCE_S)
        slots[slot].close()
    assert num_rewrites > 20 * seconds
    assert num_kills > 0


@pytest.mark.slow
def test_no_reader_ever_sees_a_mix(lender, job):
    rounds_over_killed_readers(3, 1, lender, job)


@pytest.mark.nightly
def test_no_reader_ever_sees_a_mix_for_long(lender, job):
    rounds_over_killed_readers(40, 2, lender, job)


# -- segments that both sides write to


def test_a_lender_may_have_an_address_of_its_choice_and_nobody_else_then(segment):
    address = f"@wtransfer-test-{os.getpid()}-{time.monotonic_ns()}"
    first = Lender(address, secret="a word")
    try:
        first.offer(1, segment)
        assert first.address == address
        assert Borrower(address, "a word", PATIENCE_S).borrow(1).mapping[0] == 5
        with pytest.raises(AddressInUseError, match=f"somebody listens at {address} already"):
            Lender(address)
    finally:
        first.close()
    Lender(address).close()


def test_both_sides_write_to_a_segment_that_is_shared(lender, segment):
    facts = {"num_slots": 7, "model": "a"}
    lender.offer(1, segment, facts)
    shared = Borrower(lender.address, lender.secret, PATIENCE_S).share(1)
    assert shared.facts == facts
    shared.segment.buffer[3] = 9
    assert segment.buffer[3] == 9
    segment.buffer[4] = 8
    assert shared.segment.buffer[4] == 8
    # It is not leased, and outlives its lender.
    eventually(lambda: lender.num_leases(1) == 0)
    lender.close()
    segment.close()
    assert shared.segment.buffer[4] == 8
    shared.segment.close()


def test_a_segment_that_is_not_lent_cannot_be_shared(lender):
    with pytest.raises(SegmentGoneError):
        Borrower(lender.address, lender.secret, PATIENCE_S).share(1)
