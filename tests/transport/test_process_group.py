"""Groups of several processes: what they carry, how they break, and that nothing of them stays."""

import contextlib
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import xxhash

from wtransfer.errors import GroupError, StallError
from wtransfer.testing.leftovers import Leftovers
from wtransfer.transport import process_group, rendezvous
from wtransfer.transport.process_group import GlooCommunicator
from wtransfer.transport.rendezvous import host_rendezvous, join_rendezvous

HERE = Path(__file__).parent
HOST = "127.0.0.1"
MIB = 1 << 20
SETTLE_S = 5.0
FLOW_S = 20.0
ABORT_S = 3.5
GLOO_TIMEOUT_S = 4.0
MAX_TRIES = 5
ranks_module = runpy.run_path(str(HERE / "process_group_ranks.py"))
Rank, form = ranks_module["Rank"], ranks_module["form"]


ENDS_WHILE_A_GROUP_IS_RELEASED = """
import threading, time
import torch
from wtransfer.transport.process_group import GlooCommunicator
from wtransfer.transport.rendezvous import host_rendezvous, join_rendezvous

hosted = host_rendezvous("127.0.0.1")
made = {}

def meet(rank):
    here = join_rendezvous(hosted.host, hosted.port, hosted.name) if rank else hosted
    made[rank] = GlooCommunicator(here, rank, 2, host="127.0.0.1", timeout_s=30.0)

meeting = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
for each in meeting:
    each.start()
for each in meeting:
    each.join()
sent = made[0].send(torch.ones(1 << 20, dtype=torch.uint8), 1)
made[1].recv(torch.empty(1 << 20, dtype=torch.uint8), 0).wait()
sent.wait()
for each in made.values():
    threading.Thread(target=each.close, daemon=True).start()
"""


@pytest.fixture
def make_rank(zygote, tmp_path):
    """Maker of processes, which are killed at the end of the test."""
    made = []

    def make():
        name = f"process-{len(made)}"
        rank = Rank(name, tmp_path, lambda path: zygote.spawn("process_group_jobs:serve", path))
        made.append(rank)
        # Torch's first store makes a pipe that it keeps, once per process.
        rank.ask("leave", name=rank.ask("host")["name"])
        return rank

    yield make
    for rank in made:
        rank.end()
        with contextlib.suppress(ProcessLookupError):
            rank.kill()
        rank.process.wait(10.0)


@pytest.fixture
def three(make_rank):
    return [make_rank() for _ in range(3)]


def results(answers):
    return [answer.result() for answer in answers]


def all_begin(ranks, order, **options):
    return [rank.begin(order, **options) for rank in ranks]


def all_do(ranks, order, **options):
    return results(all_begin(ranks, order, **options))


def settled(rank, wanted):
    """Return what a rank holds, once it is what is wanted or time is over."""
    end = time.monotonic() + SETTLE_S
    while (held := rank.ask("holdings")) != wanted and time.monotonic() < end:
        time.sleep(0.02)
    return held


def until_flowing(rank):
    end = time.monotonic() + FLOW_S
    while rank.ask("done") <= 2:
        assert time.monotonic() < end, "nothing flows"
        time.sleep(0.005)


# -- what they carry


def content_digest(nbytes, seed):
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return xxhash.xxh3_128_hexdigest(content.numpy())


def test_bytes_of_any_number_arrive_whole(three):
    form(three, "group")
    for nbytes in (0, 1, 4097, 3 * MIB + 1):
        expected = content_digest(nbytes, seed=5)
        for root in (0, 2):
            digests = all_do(three, "broadcast", group="group", nbytes=nbytes, root=root, seed=5)
            assert digests == [expected] * 3
        sent = three[2].begin("send", group="group", nbytes=nbytes, to=1, seed=5)
        assert three[1].ask("recv", group="group", nbytes=nbytes, source=2) == expected
        sent.result()


def test_a_process_is_in_several_groups_and_one_may_break_alone(three):
    form(three, "all")
    form(three[1:], "pair", root=1)
    all_do(three[1:], "broadcast", group="pair", nbytes=10, root=1)
    three[1].ask("abort", group="pair")
    three[2].begin("broadcast", group="pair", nbytes=10, root=1).error()
    digests = all_do(three, "broadcast", group="all", nbytes=MIB, root=1)
    assert len(set(digests)) == 1
    assert all_do(three, "has_default_group") == [False] * 3


# -- how they break


def test_an_aborted_group_takes_no_more_operations(three):
    form(three, "group")
    three[0].ask("abort", group="group")
    three[0].ask("abort", group="group")
    error = three[0].begin("broadcast", group="group", nbytes=1, root=0).error()
    assert (error.kind, error.text) == ("GroupError", "rank 0 of 3: the group was aborted")


# -- what stays


def test_after_abort_and_close_nothing_is_left_and_the_next_group_works(three):
    before = all_do(three, "holdings")
    form(three, "group", gloo_timeout_s=4.0)
    assert all(held["threads"] > 0 for held in all_do(three, "holdings"))
    streams = all_begin(three, "stream", group="group", nbytes=MIB, root=0)
    until_flowing(three[2])
    all_do(three, "abort", group="group")
    for stream in streams:
        stream.error()
    all_do(three, "close", group="group")
    assert [settled(rank, held) for rank, held in zip(three, before, strict=True)] == before
    form(three, "group")
    assert len(set(all_do(three, "broadcast", group="group", nbytes=MIB, root=0))) == 1


def test_an_operation_that_lasts_too_long_is_given_up(make_rank):
    ranks = [make_rank(), make_rank()]
    form(ranks, "group", gloo_timeout_s=0.3)
    waiting = ranks[0].begin("broadcast", group="group", nbytes=MIB, root=1)
    error = waiting.error()
    assert (error.kind, error.text[:13]) == ("GroupError", "rank 0 of 2: ")
    assert "300ms" in error.text
    sending = ranks[1].begin("broadcast", group="group", nbytes=MIB, root=1)
    assert sending.error().kind == "GroupError"


def test_ranks_answer_and_send_on_whatever_their_callers_do(make_rank):
    ranks = [make_rank() for _ in range(4)]
    form(ranks, "group")
    # Rank 1 is between the root and rank 3, and does not wait for what it has begun.
    ranks[1].ask("begin_and_keep", group="group", nbytes=MIB, root=0)
    for _ in range(3):
        others = [ranks[number] for number in (0, 2, 3)]
        digests = all_do(others, "broadcast", group="group", nbytes=MIB, root=0, seed=9)
        assert len(set(digests)) == 1
    assert ranks[1].ask("wait_for_kept") == ["done"] * 3


def test_closing_under_operations_frees_everything_though_their_pendings_live(make_rank):
    rank = make_rank()
    before = rank.ask("holdings")
    form([rank, make_rank()], "group")
    # The process keeps them, and every error that it sees.
    rank.ask("begin_and_keep", group="group", nbytes=MIB, root=1)
    waiting = rank.begin("broadcast", group="group", nbytes=MIB, root=1)
    rank.ask("close", group="group")
    waiting.error()
    assert settled(rank, before) == before
    assert rank.ask("wait_for_kept") == ["rank 0 of 2: the group was aborted"] * 3


@pytest.mark.parametrize(
    ("arrived", "why"),
    [
        ([], r"the arrival of ranks \[1\] of 2"),
        # It arrives, and then never connects.
        ([1], "rank 0 of 2 cannot connect"),
    ],
)
def test_a_group_that_was_not_formed_leaves_nothing_though_its_error_lives(
    monkeypatch, arrived, why
):
    monkeypatch.setattr(process_group, "CONNECT_TIMEOUT_S", 0.3)
    # The store is in this process: it does answer, also where the machine stands still.
    for module in (process_group, rendezvous):
        monkeypatch.setattr(module, "GRACE_S", 10.0)
    host_rendezvous(HOST).close()  # torch's first store makes a pipe that it keeps
    before = Leftovers()
    hosted = host_rendezvous(HOST)
    for rank in arrived:
        with pytest.raises(StallError):
            hosted.meet(rank, 2, 0.05)
    with pytest.raises((GroupError, StallError), match=why) as caught:
        GlooCommunicator(hosted, 0, 2, host=HOST, timeout_s=0.3)
    hosted.close()
    assert before.found() == []
    assert caught.value.__traceback__ is not None


def test_a_rank_whose_host_stops_while_the_group_forms_gives_up_in_time(make_rank, monkeypatch):
    host = make_rank()
    told = host.ask("host")
    joined = join_rendezvous(told["at"], told["port"], told["name"])
    meet = joined.meet

    def meet_and_stop(*args):
        host.begin("meet", name=told["name"], rank=0, size=2)
        meet(*args)
        host.stop()

    monkeypatch.setattr(joined, "meet", meet_and_stop)
    monkeypatch.setattr(process_group, "CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(StallError, match="no progress on connecting rank 1 of 2"):
        GlooCommunicator(joined, 1, 2, host=HOST, timeout_s=10.0)
    joined.close()


# -- groups that are left to gloo


@pytest.fixture
def broken_in_midst(make_rank):
    """Let a new process broadcast to a rank and stop in the midst; return it, once that aborted."""

    def make(receiver, group, **options):
        options.setdefault("gloo_timeout_s", GLOO_TIMEOUT_S)
        for number in range(MAX_TRIES):
            root, name = make_rank(), f"{group} {number}"
            form([root, receiver], name, **options)
            root.begin("broadcast", group=name, nbytes=256 * MIB, root=0, seed=1)
            receiving = receiver.begin("receive_recycled", group=name, nbytes=256 * MIB, root=0)
            receiver.ask("until_first_byte", group=name)
            root.stop()
            in_midst = not receiver.ask("has_last_byte", group=name)
            receiver.ask("close", group=name)
            if in_midst:
                assert receiving.error(ABORT_S).text == "rank 1 of 2: the group was aborted"
                return root
        raise AssertionError("never in the midst")

    return make


def test_memory_of_a_broken_broadcast_is_used_again_only_once_gloo_has_ended(
    make_rank, broken_in_midst
):
    receiver = make_rank()
    root = broken_in_midst(receiver, "group")
    assert not receiver.ask("takes_it_again"), "the root could still write to it"
    root.go_on()
    end = time.monotonic() + GLOO_TIMEOUT_S + SETTLE_S
    while not receiver.ask("takes_it_again"):
        assert time.monotonic() < end, "gloo never ends"
        time.sleep(0.05)


@pytest.mark.slow
def test_broken_groups_are_bounded_and_waited_for(make_rank, broken_in_midst):
    receiver, peer = make_rank(), make_rank()
    meeting = peer.ask("host")
    receiver.ask("join", **meeting)
    options = {"name": meeting["name"], "rank": 1, "size": 2, "timeout_s": 0.2, "max_abandoned": 1}
    for number in range(MAX_TRIES):
        broken_in_midst(receiver, f"broken {number}", max_abandoned=1, gloo_timeout_s=8.0)
        stalled = receiver.begin("form", group="too early", **options).error()
        assert stalled.kind == "StallError"
        # On a machine that is busy, an earlier one may have ended by now.
        if "the end of 2 broken process groups of rank 1" in stalled.text:
            break
    else:
        raise AssertionError("never two at once")
    # Groups that are not bounded wait for none.
    form([peer, receiver], "other")
    form([peer, receiver], "next", max_abandoned=1, timeout_s=30.0)
    assert len(set(all_do([peer, receiver], "broadcast", group="next", nbytes=MIB, root=0))) == 1


def test_process_that_ends_while_a_group_is_released_is_not_aborted():
    command = [sys.executable, "-c", ENDS_WHILE_A_GROUP_IS_RELEASED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_gloo_cannot_listen_at_another_machines_address(leaves_nothing):
    rendezvous = host_rendezvous(HOST)
    with pytest.raises(GroupError, match=r"gloo cannot listen at '192\.0\.2\.1'"):
        GlooCommunicator(rendezvous, 0, 1, host="192.0.2.1", timeout_s=1.0)
    rendezvous.close()
