import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from wtransfer.errors import (
    AddressError,
    AuthenticationError,
    ClosedError,
    DescriptorLimitError,
    LimitError,
    PeerLostError,
    ProtocolError,
    SegmentGoneError,
    StallError,
    TruncatedError,
)
from wtransfer.transport import channel as channel_module
from wtransfer.transport import lease as lease_module
from wtransfer.transport.channel import MAX_UNPROVEN, Dial, Listener
from wtransfer.transport.framing import pack_frame
from wtransfer.transport.lease import CODEC, Attach, Attached, SegmentExporter, attach
from wtransfer.transport.memory import Segment, map_private

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


@contextlib.contextmanager
def full_queue(address):
    """Fill the kernel's queue of connections to a process that is stopped."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(BlockingIOError):
            while True:
                raw = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                raw.setblocking(False)
                raw.connect(address.replace("unix:@", "\0"))
        yield


@pytest.fixture(autouse=True)
def nothing_left(zygote, leaves_nothing):
    """Look at every test here so; the zygote is the run's."""


@pytest.fixture
def exporter():
    made = SegmentExporter()
    yield made
    made.close()


@pytest.fixture
def segment():
    made = Segment(NBYTES)
    made.buffer[:] = 5
    yield made
    made.close()


@pytest.fixture
def lease(exporter, segment):
    """Attach a segment; number 1 is exported."""
    exporter.export(1, segment)
    return lambda number: attach(exporter.address, exporter.secret, number, PATIENCE_S)


class Job:
    """A child that runs one of `lease_jobs`, and the words it has said."""

    def __init__(self, zygote, folder, name, *args):
        self.out = folder / f"{name}.{time.monotonic_ns()}.out"
        self.child = zygote.spawn(f"lease_jobs:{name}", *args, stdout=self.out)
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


@pytest.mark.parametrize("make", [
    lambda mapping: torch.from_numpy(mapping)[:16][3:],
    lambda mapping: torch.frombuffer(mapping, dtype=torch.float32, count=4).view(2, 2).T,
    lambda mapping: np.frombuffer(mapping, np.uint8)[4:8],
    memoryview,
], ids=["tensor", "transposed", "array", "memoryview"])  # fmt: skip
def test_a_lease_lasts_as_long_as_anything_made_from_the_mapping(lease, exporter, make):
    held = lease(1)
    kept = make(held.mapping)
    del held
    assert not exporter.wait_free(1, 0.05)
    del kept
    assert exporter.wait_free(1, PATIENCE_S)


def test_lease_ends_without_code_in_which_a_signal_handler_could_strike(
    lease, exporter, python_calls
):
    held = lease(1)
    with python_calls() as made:
        del held
    assert made == []
    assert exporter.wait_free(1, PATIENCE_S)


def test_each_attachment_is_a_lease_on_its_own_segment(lease, exporter, segment):
    exporter.export(2, segment)
    one, other = lease(1), lease(1)
    assert exporter.wait_free(2, 0.0)
    del one
    assert not exporter.wait_free(1, 0.05)
    del other
    assert exporter.wait_free(1, PATIENCE_S)


def test_a_received_descriptor_is_no_other_programs(lease, monkeypatch):
    inheritable = []

    def spy(fd, *args):
        inheritable.append(os.get_inheritable(fd))
        return map_private(fd, *args)

    monkeypatch.setattr(lease_module, "map_private", spy)
    lease(1)
    assert inheritable == [False]


def test_a_revoked_segment_is_exported_no_more_and_stays_leased(lease, exporter, segment):
    held = lease(1)
    exporter.revoke(1)
    exporter.revoke(1)
    with pytest.raises(SegmentGoneError, match=r"does not export segment 1 \(any more\)"):
        lease(1)
    assert not exporter.wait_free(1, 0.0)
    exporter.export(1, segment)
    assert bytes(lease(1).mapping[:1]) == b"\x05"
    del held
    assert exporter.wait_free(1, PATIENCE_S)


def test_a_closed_segment_is_not_exported(lease, exporter, segment):
    segment.close()
    with pytest.raises(SegmentGoneError):
        lease(1)
    exporter.revoke(1)
    another = Segment(NBYTES)
    exporter.export(1, another)
    assert lease(1).mapping[0] == 0
    another.close()


def test_a_number_is_exported_once(lease, exporter, segment):
    with pytest.raises(ValueError, match="segment 1 is exported already"):
        exporter.export(1, segment)


def test_a_closed_exporter_leaves_mappings_valid_and_counts_no_more(exporter, segment, lease):
    held = lease(1)
    exporter.close()
    exporter.close()
    segment.close()
    assert bytes(held.mapping[:]) == b"\x05" * NBYTES
    with pytest.raises(PeerLostError, match="cannot reach"):
        lease(1)
    calls = [
        lambda: exporter.export(2, segment),
        lambda: exporter.wait_free(1, 1.0),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_closing_ends_a_wait(exporter, lease):
    held = lease(1)
    outcome = []

    def wait():
        try:
            outcome.append(exporter.wait_free(1, 60.0))
        except ClosedError:
            outcome.append("closed")

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    exporter.close()
    thread.join(PATIENCE_S)
    assert outcome == ["closed"]
    del held


@pytest.fixture
def beside(tmp_path, segment):
    """An exporter beside a listener with a path; segment 1 is exported."""
    made = SegmentExporter(beside=f"unix:{tmp_path}/x:y")
    made.export(1, segment)
    yield made
    made.close()
    assert set(tmp_path.iterdir()) == set()


@pytest.mark.parametrize("way", ["path", "name"])
def test_a_segment_is_attached_by_a_path_or_else_by_its_name(beside, tmp_path, way):
    (path,) = tmp_path.iterdir()
    assert beside.address == f"unix:@{path}"
    if way == "name":
        path.rename(tmp_path / "mounted elsewhere")
    else:
        # As in another network namespace.
        beside._listener.close()
    held = attach(beside.address, beside.secret, 1, PATIENCE_S)
    assert held.mapping[0] == 5
    assert not beside.wait_free(1, 0.05)
    del held
    assert beside.wait_free(1, PATIENCE_S)
    if way == "name":
        (tmp_path / "mounted elsewhere").rename(path)


@pytest.mark.parametrize("listens_at", [None, "unix:@name", "tcp:127.0.0.1:1", f"unix:/{'x' * 99}"])
def test_without_a_folder_the_name_is_random(listens_at):
    made = SegmentExporter(beside=listens_at)
    assert made.address.startswith("unix:@wtransfer-")
    made.close()


# -- the ends of processes


def test_the_lease_of_a_killed_reader_ends(exporter, lease, job):
    reader = job("hold", exporter.address, exporter.secret, 1)
    reader.line()
    assert not exporter.wait_free(1, 0.05)
    reader.kill()
    assert exporter.wait_free(1, PATIENCE_S)


def test_a_lease_outlives_the_interpreters_exit_handlers(exporter, lease, job, tmp_path):
    reader = job("hold_until_exit", exporter.address, exporter.secret, 1, str(tmp_path / "go"))
    assert reader.line(1) == "exiting"
    assert not exporter.wait_free(1, 0.1)
    (tmp_path / "go").touch()
    assert reader.wait(PATIENCE_S) == 0
    assert exporter.wait_free(1, PATIENCE_S)


def test_a_forked_copy_of_the_mapping_keeps_the_lease(exporter, lease, segment, job, tmp_path):
    reader = job("leave_to_a_fork", exporter.address, exporter.secret, 1, str(tmp_path / "go"))
    assert reader.line() == "released"
    exporter.revoke(1)
    if exporter.wait_free(1, 0.1):
        # What an owner does with a free slot; the copy must not be there to see it.
        segment.buffer[:] = 6
    (tmp_path / "go").touch()
    assert reader.wait(PATIENCE_S) == 0
    assert exporter.wait_free(1, PATIENCE_S)


def test_a_forked_child_that_lets_go_ends_nothing(exporter, lease, job, tmp_path):
    reader = job("release_in_a_fork", exporter.address, exporter.secret, 1, str(tmp_path / "go"))
    assert reader.line(0) == "released"
    assert not exporter.wait_free(1, 0.1)
    (tmp_path / "go").touch()
    assert reader.line(1) == "child ended"
    assert not exporter.wait_free(1, 0.1)


def test_a_program_started_by_a_reader_holds_no_lease(exporter, lease, job, tmp_path):
    reader = job(
        "release_beside_a_subprocess", exporter.address, exporter.secret, 1, str(tmp_path / "go")
    )
    assert reader.line() == "released"
    assert exporter.wait_free(1, PATIENCE_S)
    (tmp_path / "go").touch()
    assert reader.wait(PATIENCE_S) == 0


def test_a_killed_exporter_leaves_readers_their_bytes_and_nothing_else(job):
    owner = job("lend", 7)
    address, secret = owner.line().split()
    held = attach(address, secret, 1, PATIENCE_S)
    name = address.removeprefix("unix:")
    assert name in Path("/proc/net/unix").read_text()
    owner.kill()
    owner.wait(PATIENCE_S)
    assert bytes(held.mapping[:]) == b"\x07" * NBYTES
    with pytest.raises(PeerLostError, match="cannot reach"):
        attach(address, secret, 1, PATIENCE_S)
    # The name is listed for as long as a connection accepted under it: this lease.
    del held
    eventually(lambda: name not in Path("/proc/net/unix").read_text())


def test_a_stopped_exporter_is_a_stall(job):
    owner = job("lend", 7)
    address, secret = owner.line().split()
    stop(owner.pid)
    with pytest.raises(StallError, match=r"within 0.3 s") as caught:
        attach(address, secret, 1, 0.3)
    assert caught.value.seconds == 0.3
    os.kill(owner.pid, signal.SIGCONT)
    assert attach(address, secret, 1, PATIENCE_S).mapping[0] == 7


def test_a_full_queue_is_a_stall(job):
    owner = job("lend", 7)
    address, secret = owner.line().split()
    stop(owner.pid)
    with (
        full_queue(address),
        pytest.raises(StallError, match="the connection to unix:@wtransfer"),
    ):
        attach(address, secret, 1, 0.2)
    os.kill(owner.pid, signal.SIGCONT)
    assert attach(address, secret, 1, PATIENCE_S).mapping[0] == 7


@pytest.mark.parametrize("is_full", [False, True], ids=["handshake", "queue"])
def test_attaching_is_called_off(job, at_handshake, is_full):
    owner = job("lend", 7)
    address, secret = owner.line().split()
    stop(owner.pid)
    dial, connected, outcome = Dial(), threading.Event(), []
    at_handshake(connected.set)

    def wait():
        try:
            attach(address, secret, 1, dial=dial)
        except ClosedError as error:
            outcome.append(str(error))

    with full_queue(address) if is_full else contextlib.nullcontext():
        thread = threading.Thread(target=wait)
        thread.start()
        assert is_full or connected.wait(PATIENCE_S)
        dial.call_off()
        thread.join(PATIENCE_S)
    assert outcome == ["the dial was called off"]
    with pytest.raises(ClosedError):
        attach(address, secret, 1, dial=dial)


def test_a_lease_outlives_a_dial_that_is_called_off_too_late(exporter, segment, monkeypatch):
    exporter.export(1, segment)
    dial = Dial()

    def call_off_first(*args):
        dial.call_off()
        return map_private(*args)

    monkeypatch.setattr(lease_module, "map_private", call_off_first)
    held = attach(exporter.address, exporter.secret, 1, dial=dial)
    assert not exporter.wait_free(1, 0.1)
    assert held.mapping[0] == 5


# -- admission


@pytest.fixture
def at_handshake(monkeypatch):
    """Let a call be made once between a connection and its handshake; errors of all are kept."""

    def arrange(call):
        calls, errors, shake_hands = [call], [], channel_module.shake_hands

        def shake_hands_after(*args):
            while calls:
                calls.pop()()
            try:
                return shake_hands(*args)
            except PeerLostError as error:
                errors.append(str(error))
                raise

        monkeypatch.setattr(channel_module, "shake_hands", shake_hands_after)
        return errors

    return arrange


@pytest.fixture
def pass_by(exporter, later):
    """Let seconds pass at once, and the exporter's timers of that time run."""

    def pass_by(seconds):
        later(seconds)
        over, loop = threading.Event(), exporter._listener._loop
        # In two turns: timers come last in one.
        loop.call_soon(lambda: loop.call_soon(over.set))
        assert over.wait(PATIENCE_S)

    return pass_by


def test_a_reader_of_this_user_is_never_late(exporter, segment, at_handshake, pass_by):
    exporter.export(1, segment)

    def late():
        eventually(lambda: exporter._listener._unproven)
        pass_by(3600.0)

    errors = at_handshake(late)
    assert attach(exporter.address, exporter.secret, 1).mapping[0] == 5
    assert errors == []


def test_a_reader_that_had_to_make_room_attaches_all_the_same(
    exporter, lease, at_handshake, pass_by, raw_peer
):
    def make_room():
        (reader,) = eventually(lambda: list(exporter._listener._unproven))
        for _ in range(MAX_UNPROVEN):
            raw_peer(exporter.address)
        eventually(lambda: pass_by(1.0) or reader.closed)

    errors = at_handshake(make_room)
    assert lease(1).mapping[0] == 5
    assert len(errors) == 1
    assert "made way: too many peers without a proof" in errors[0]


@pytest.mark.slow
def test_silent_peers_of_this_user_lock_no_reader_out(exporter, lease, raw_peer):
    for _ in range(200):
        raw_peer(exporter.address)
    assert lease(1).mapping[0] == 5


def test_a_wrong_secret_is_refused(exporter, lease):
    for secret in ("", exporter.secret[:-1], "é" * 64, exporter.secret + "0"):
        with pytest.raises(AuthenticationError, match="could not prove that it knows the token"):
            attach(exporter.address, secret, 1, PATIENCE_S)
    assert exporter.wait_free(1, 0.0)
    assert lease(1).mapping[0] == 5


def test_a_descriptor_is_asked_for_over_unix_sockets_only(exporter):
    with pytest.raises(AddressError, match="no Unix socket"):
        attach("tcp:127.0.0.1:9", exporter.secret, 1, PATIENCE_S)


def test_further_messages_of_a_leaseholder_change_nothing(exporter, lease, raw_peer):
    raw = raw_peer(exporter.address).shake_hands(exporter.secret).socket
    raw.sendall(CODEC.encode(Attach(1)))
    _, fds, _, _ = socket.recv_fds(raw, 4096, 1)
    for _ in range(20):
        raw.sendall(b"release me")
    raw.sendall(CODEC.encode(Attach(2)))
    assert not exporter.wait_free(1, 0.1)
    os.close(fds[0])
    raw.close()
    assert exporter.wait_free(1, PATIENCE_S)


def rogue_answer(connection, name, fd):
    if name == "no descriptor":
        connection.send(Attached(NBYTES))
    elif name == "too small":
        connection.send_descriptor(Attached(2 * NBYTES), fd)
    elif name == "not an answer":
        connection.send(Attach(1))
    elif name == "too long":
        connection.send_frame(pack_frame(2, 0, bytes(5000)))
    else:
        connection.close()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no descriptor", DescriptorLimitError),
        ("too small", TruncatedError),
        ("not an answer", ProtocolError),
        ("too long", LimitError),
        ("the end", PeerLostError),
    ],
)
def test_a_reader_believes_no_answer(segment, name, error):
    rogue = Listener(
        CODEC,
        on_open=lambda connection: None,
        on_message=lambda connection, message: rogue_answer(connection, name, segment.fd),
        on_close=lambda connection, error: None,
    )
    with pytest.raises(error):
        attach(rogue.address, rogue.token, 1, PATIENCE_S)
    rogue.close()


# -- shortages


def test_a_reader_without_descriptors_says_so(exporter, lease, job):
    # One for the connection, one to receive; the mapping keeps none.
    assert job("without_descriptors", exporter.address, exporter.secret).wait(60) == 2
    assert exporter.wait_free(1, PATIENCE_S)


# -- all at once


@pytest.mark.slow
def test_no_reader_ever_sees_a_mix(exporter, job):
    """Rewrite two slots whenever they are free, under readers of which some are killed."""
    random, seconds = Random(1), 3.0
    slots = [Segment(NBYTES), Segment(NBYTES)]
    readers = [job("read_on", exporter.address, exporter.secret, n) for n in range(3)]
    num_rewrites = num_kills = 0
    end = time.monotonic() + seconds
    # On a busy machine it takes longer until there was enough of both.
    while (now := time.monotonic()) < end or (
        now < end + PATIENCE_S and (num_rewrites <= 20 * seconds or not num_kills)
    ):
        slot = random.randrange(2)
        exporter.revoke(slot)
        if exporter.wait_free(slot, 0.02):
            slots[slot].buffer[:] = num_rewrites % 251
            num_rewrites += 1
        exporter.export(slot, slots[slot])
        time.sleep(0.003)
        if random.random() < 0.02:
            victim = readers.pop(random.randrange(3))
            victim.kill()
            assert victim.wait(PATIENCE_S) == -signal.SIGKILL
            readers.append(job("read_on", exporter.address, exporter.secret, num_kills))
            num_kills += 1
    assert [reader.child.poll() for reader in readers] == [None] * 3
    for reader in readers:
        reader.kill()
    for slot in (0, 1):
        exporter.revoke(slot)
        assert exporter.wait_free(slot, PATIENCE_S)
        slots[slot].close()
    assert num_rewrites > 20 * seconds
    assert num_kills > 0
