"""Ranks meet at one address, are named when they are missing, and nobody waits for ever."""

import contextlib
import os
import runpy
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed

from wtransfer.errors import (
    AddressError,
    AddressInUseError,
    GroupError,
    PeerLostError,
    StallError,
)
from wtransfer.transport import rendezvous as rendezvous_module
from wtransfer.transport.rendezvous import (
    Rendezvous,
    bind_rendezvous,
    host_rendezvous,
    join_rendezvous,
    own_address,
)

HERE = Path(__file__).parent
HOST = "127.0.0.1"
Rank = runpy.run_path(str(HERE / "process_group_ranks.py"))["Rank"]


def num_threads():
    """Count all, also those that Python does not know."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


@pytest.fixture(autouse=True)
def nothing_left(zygote, libuv, leaves_nothing):
    before = num_threads()
    yield
    end = time.monotonic() + 5.0
    # The kernel shows a thread for a moment after it was joined.
    while num_threads() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert num_threads() <= before


@pytest.fixture
def meeting(nothing_left, monkeypatch):
    """A hosted rendezvous; maker of others at the same store."""
    # Its host is this process: it does answer, also where the machine stands still.
    monkeypatch.setattr(rendezvous_module, "GRACE_S", 10.0)
    with contextlib.ExitStack() as stack:
        hosted = host_rendezvous(HOST)
        stack.callback(hosted.close)

        def join():
            joined = join_rendezvous(hosted.host, hosted.port, hosted.name)
            stack.callback(joined.close)
            return joined

        yield hosted, join


@pytest.fixture
def other_host(zygote, tmp_path):
    """A process that hosts a rendezvous, and this process's place at it."""
    rank = Rank("host", tmp_path, lambda path: zygote.spawn("process_group_jobs:serve", path))
    where = rank.ask("host")
    joined = join_rendezvous(where["at"], where["port"], where["name"])
    yield rank, joined
    joined.close()
    rank.end()
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.pid, signal.SIGKILL)
    rank.process.wait(10.0)


def test_ranks_wait_until_the_last_has_arrived(meeting):
    hosted, join = meeting
    with ThreadPoolExecutor(2) as pool:
        early = [pool.submit(each.meet, rank, 3, 10.0) for rank, each in [(0, hosted), (1, join())]]
        time.sleep(0.1)
        assert not any(each.done() for each in early)
        join().meet(2, 3, 10.0)
        assert [each.result() for each in early] == [None, None]


def test_a_rank_that_is_taken_twice_is_refused_at_once(meeting):
    hosted, join = meeting
    with pytest.raises(StallError):
        hosted.meet(1, 2, 0.05)
    with pytest.raises(GroupError, match=r"rank 1 of 2 is taken; two workers were given one place"):
        join().meet(1, 2, 10.0)


def test_missing_ranks_are_named(meeting):
    hosted, join = meeting
    with pytest.raises(StallError):
        join().meet(2, 4, 0.05)
    with pytest.raises(StallError, match=r"the arrival of ranks \[1, 3\] of 4 within 0.2 s"):
        hosted.meet(0, 4, 0.2)


def test_meetings_with_other_names_do_not_meet(meeting):
    hosted, _ = meeting
    stranger = join_rendezvous(hosted.host, hosted.port, "wtransfer/guessed")
    with pytest.raises(StallError):
        stranger.meet(1, 2, 0.05)
    with pytest.raises(StallError, match=r"ranks \[1\] of 2"):
        hosted.meet(0, 2, 0.05)
    stranger.close()


def test_rendezvous_can_be_called_off_from_another_thread(meeting):
    hosted, _ = meeting
    with ThreadPoolExecutor(1) as pool:
        meet = pool.submit(hosted.meet, 0, 2, 60.0)
        time.sleep(0.05)
        hosted.cancel()
        with pytest.raises(GroupError, match="called off"):
            meet.result(5.0)
    with pytest.raises(GroupError, match="called off"):
        hosted.meet(0, 2, 60.0)


def test_the_port_is_free_once_it_is_closed_though_a_rank_keeps_its_connection(meeting):
    hosted, join = meeting
    kept = join().store
    hosted.close()
    host_rendezvous(HOST, hosted.port).close()
    del kept


def test_a_closed_rendezvous_says_so(meeting):
    hosted, _ = meeting
    hosted.close()
    hosted.close()
    with pytest.raises(GroupError, match="this rendezvous was closed"):
        hosted.meet(0, 1, 1.0)


def test_a_host_that_is_killed_is_lost_at_once(other_host):
    host, joined = other_host
    with ThreadPoolExecutor(1) as pool:
        meet = pool.submit(joined.meet, 1, 2, 60.0)
        time.sleep(0.05)
        host.kill()
        with pytest.raises(PeerLostError, match=rf"the rendezvous at tcp:{HOST}:\d+ is gone"):
            meet.result(10.0)


def test_a_stopped_host_holds_no_rank_longer_than_the_deadline(other_host, monkeypatch):
    monkeypatch.setattr(rendezvous_module, "GRACE_S", 0.1)
    host, joined = other_host
    host.stop()
    with pytest.raises(StallError, match=rf"{HOST}:\d+: its host does not answer within 0.4 s"):
        joined.meet(1, 2, 0.3)


@pytest.fixture
def unreached():
    """A port where nobody answers: whoever dials waits, as for a host that is switched off."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((HOST, 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_dialing_a_host_that_does_not_answer_ends_in_time(unreached):
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match=f"no rendezvous at tcp:{HOST}:{unreached}: "):
        join_rendezvous(HOST, unreached, "name", 0.3)
    assert time.monotonic() - begun > 0.2


def test_a_host_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous_module, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server((HOST, 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(PeerLostError, match=f"no rendezvous at tcp:{HOST}:{port}"):
            join_rendezvous(HOST, port, "name")
    with pytest.raises(PeerLostError, match=f"no rendezvous at tcp:{HOST}:{port}: .*refused"):
        join_rendezvous(HOST, port, "name")
    with pytest.raises(PeerLostError, match=r"no rendezvous at tcp:no-such-host\.invalid:1: "):
        join_rendezvous("no-such-host.invalid", 1, "name")


@pytest.mark.parametrize("name", ["0.0.0.0", "localhost"])
def test_a_host_is_known_by_the_address_that_has_answered(meeting, name):
    hosted, _ = meeting
    joined = join_rendezvous(name, hosted.port, hosted.name)
    assert joined.host == HOST
    joined.close()


def test_a_port_in_use_is_named_at_once_and_nothing_stays_half_open():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"listens at 'tcp:{HOST}:{port}' already"):
            host_rendezvous(HOST, port)
    host_rendezvous(HOST, port).close()


@pytest.mark.parametrize("ends", ["late", "called off"])
def test_a_store_that_torch_is_slow_to_make_is_not_waited_for(monkeypatch, ends):
    """Torch asks the resolver of the host, which may answer nothing for seconds."""
    gate, reached, real = threading.Event(), threading.Event(), torch.distributed.TCPStore

    def make_store(*args, **options):
        reached.set()
        assert gate.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(torch.distributed, "TCPStore", make_store)
    bound = bind_rendezvous(HOST)
    try:
        if ends == "late":
            with pytest.raises(StallError, match=r"opening the rendezvous at .* asks the resolver"):
                bound.serve(0.2)
        else:
            with ThreadPoolExecutor(1) as threads:
                serving = threads.submit(bound.serve, 30.0)
                assert reached.wait(10)
                bound.cancel()
                with pytest.raises(GroupError, match="called off"):
                    serving.result(10)
    finally:
        bound.close()
        gate.set()
    with pytest.raises(GroupError, match="closed"):
        bound.serve(1.0)
    monkeypatch.undo()
    # The store is gone once torch has made it, and nobody wants it.
    end = time.monotonic() + 10.0
    while True:
        with contextlib.suppress(AddressInUseError):
            host_rendezvous(HOST, bound.port).close()
            break
        assert time.monotonic() < end


def test_a_rendezvous_that_is_closed_before_it_is_opened_leaves_nothing():
    bound = bind_rendezvous(HOST)
    bound.close()
    with pytest.raises(GroupError, match="closed"):
        bound.serve(1.0)
    host_rendezvous(HOST, bound.port).close()


def test_a_rendezvous_that_is_called_off_dials_no_host_that_has_ended_as_well(monkeypatch):
    hosted, connect = host_rendezvous(HOST), socket.create_connection
    joining = Rendezvous(hosted.host, hosted.port, hosted.name)

    def ends_meanwhile(*args):
        probe = connect(*args)
        joining.cancel()
        hosted.close()
        return probe

    monkeypatch.setattr(socket, "create_connection", ends_meanwhile)
    with pytest.raises(GroupError, match="called off"):
        joining.join()
    # A thread that goes on dialing would be found left.


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(AddressError, match=r"192\.0\.2\.1"):
        host_rendezvous("192.0.2.1")


def test_one_s_own_address_is_the_one_that_the_route_has():
    assert own_address("127.0.0.9", 1) == HOST
    assert own_address("::1", 1) == "::1"
    with pytest.raises(PeerLostError, match="no way to 'no such host'"):
        own_address("no such host", 1)
