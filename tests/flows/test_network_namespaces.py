"""Groups of ranks on several hosts, whose cables can be pulled."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from pathlib import Path

import pytest

TRANSPORT = Path(__file__).parents[1] / "transport"
JOBS = TRANSPORT / "process_group_jobs.py"
PARTS = runpy.run_path(str(TRANSPORT / "process_group_ranks.py"))
Rank, form = PARTS["Rank"], PARTS["form"]
MIB = 1 << 20
ABORT_S = 1.0
PATIENCE_S = 20.0
GLOO_TIMEOUT_S = 4.0


@pytest.fixture(scope="module")
def hosts(make_network):
    return make_network(3).hosts


@pytest.fixture(scope="module")
def ranks(hosts, tmp_path_factory):
    """One rank on each host. Torch is imported in each, so they serve all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        made = []
        for number, host in enumerate(hosts):

            def start(path, host=host):
                return host.run([sys.executable, str(JOBS), path], env=environment)

            made.append(Rank(f"rank-{number}", folder, start, patience_s=120.0))
            stack.callback(made[-1].end)
        yield made


@pytest.fixture
def cables(hosts):
    """The hosts; whatever a test pulls is plugged in again."""
    yield hosts
    for host in hosts:
        host.link(up=True)


def form_across(ranks, hosts, group, **options):
    form(ranks, group, hosts=[host.address for host in hosts], **options)


def broadcast(ranks, group):
    answers = [
        rank.begin("broadcast", group=group, nbytes=3 * MIB + 1, root=0, seed=7) for rank in ranks
    ]
    return {answer.result() for answer in answers}


def close(ranks, group):
    for rank in ranks:
        rank.ask("close", group=group)


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.01)


def is_stalled(rank):
    done = rank.ask("done")
    time.sleep(0.3)
    return rank.ask("done") == done


def test_the_hosts_are_separate_and_reach_each_other(namespaces):
    one, two, three = namespaces
    ping = [sys.executable, "-c", "import socket, sys; socket.create_connection(eval(sys.argv[1]))"]
    serve = (
        "import socket, sys; s = socket.create_server((sys.argv[1], 7)); print('up', flush=True); "
        "s.accept(); s.accept()"
    )
    server = one.run([sys.executable, "-c", serve, one.address], stdout=-1)
    with server.stdout:
        assert server.stdout.readline() == b"up\n"
    where = repr((one.address, 7))
    assert two.run([*ping, where]).wait(PATIENCE_S) == 0
    three.link(up=False)
    cut_off = three.run([*ping, where])
    time.sleep(0.3)
    assert cut_off.poll() is None
    three.link(up=True)
    assert cut_off.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_group_of_three_hosts_broadcasts_and_listens_at_its_own_addresses(ranks, hosts):
    form_across(ranks, hosts, "group")
    assert len(broadcast(ranks, "group")) == 1
    listeners = [rank.ask("listeners") for rank in ranks]
    # The kernel writes 10.77.0.1 as one number, as it stands in memory.
    assert [{each.partition(":")[0] for each in own} for own in listeners] == [
        {"01004D0A"},
        {"02004D0A"},
        {"03004D0A"},
    ]
    close(ranks, "group")


@pytest.mark.parametrize("cut_off", [2, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_cable_pulled_in_mid_broadcast_holds_nobody_and_the_next_group_works(
    ranks, cables, cut_off
):
    # A process's first store opens a pipe for good: libuv's, for signals.
    form_across(ranks, cables, "first")
    close(ranks, "first")
    before = [rank.ask("holdings") for rank in ranks]
    form_across(ranks, cables, "group", gloo_timeout_s=GLOO_TIMEOUT_S)
    streams = [rank.begin("stream", group="group", nbytes=MIB, root=0) for rank in ranks]
    begun = ranks[1].ask("done")
    until(lambda: ranks[1].ask("done") > begun + 3)
    cables[cut_off].link(up=False)
    until(lambda: all(is_stalled(rank) for rank in ranks))
    aborted = time.monotonic()
    for rank in ranks:
        rank.begin("abort", group="group")
    for stream in streams:
        assert stream.error(ABORT_S + 1.0).kind == "GroupError"
        assert stream.ended - aborted < ABORT_S
    closing = time.monotonic()
    close(ranks, "group")
    assert time.monotonic() - closing < ABORT_S
    # Gloo keeps what is in the midst of a message until its time-out.
    until(lambda: [rank.ask("holdings") for rank in ranks] == before)
    cables[cut_off].link(up=True)
    form_across(ranks, cables, "group")
    assert len(broadcast(ranks, "group")) == 1
    close(ranks, "group")


@pytest.mark.slow
def test_who_meets_at_a_host_that_is_cut_off_waits_no_longer_than_told(ranks, cables):
    meeting = ranks[0].ask("host", host=cables[0].address)
    ranks[1].ask("join", **meeting)
    cables[0].link(up=False)
    waiting = ranks[1].begin("meet", name=meeting["name"], rank=1, size=2, timeout_s=0.5)
    error = waiting.error()
    assert error.kind == "StallError"
    assert f"{cables[0].address}:{meeting['port']}: its host does not answer" in error.text
    assert waiting.ended - waiting.begun < 2.0
    for rank in ranks[:2]:
        rank.ask("leave", name=meeting["name"])
