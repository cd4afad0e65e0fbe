"""Kills and stops of a pusher or a rank, and spoilt pushes: nothing is torn, and nothing hangs."""

import contextlib
import json
import signal
import time

import pytest
import wtransfer
from publishers import Pusher, pushed
from safetensors.torch import load_file
from server import PROMPT, TOKEN, Server, cpu_threads
from sglang_models import wrong_tokens
from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.errors import WTransferError
from wtransfer.testing.faults import SPOILS

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]

OPTIONS = {"tp": "2", "chunked-prefill-size": "64", "max-running-requests": "4"}
DEADLINE_S = 5.0
SLACK_S = 20.0
"""What a busy machine may add to a deadline."""


@pytest.fixture(scope="module")
def ranks(models, kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    server = Server(folder, models / f"{kind}-A", OPTIONS, cpu_threads())
    yield server.ready()
    server.close()


def check(server, folders):
    """Assert that each version serves whole, and that updates go on."""
    for name in "BA":
        pushed(folders[name], server, name)
        answer = server.ask([*PROMPT, ord(name)])
        assert answer.versions == [(name, 0, 8)]
        assert wrong_tokens(folders, answer) == []


@contextlib.contextmanager
def told_in_time(text):
    """Assert that a publisher is told within its deadline."""
    begun = time.monotonic()
    with pytest.raises(WTransferError, match=text):
        yield
    assert time.monotonic() - begun < DEADLINE_S + SLACK_S


def test_pusher_that_is_killed_at_any_time_leaves_one_whole_set(ranks, folders):
    for number in range(6):
        pusher = Pusher(folders, ranks)
        with contextlib.closing(pusher):
            begun = [ranks.begin([*PROMPT, number, each], 60) for each in range(3)]
            pusher.begin(rounds=number)
            time.sleep(0.013 * number)
        answers = [each.result() for each in begun]
        answers.append(ranks.ask([*PROMPT, number]))
        assert [wrong_tokens(folders, answer) for answer in answers] == [[]] * 4
    check(ranks, folders)


def test_pusher_that_is_killed_within_a_commit_leaves_both_ranks_with_one_set(ranks, folders):
    pushed(folders["B"], ranks, "B")
    pusher = Pusher(folders, ranks)
    ranks.forget("stalled")
    ranks.tell("rank", "1")
    ranks.tell("stall_at", "5")
    with contextlib.closing(pusher):
        pusher.begin()
        ranks.wait_for("stalled")
    ranks.forget("stall_at")
    answer = ranks.ask(PROMPT)
    assert answer.versions == [("B", 0, 8)]
    assert wrong_tokens(folders, answer) == []
    check(ranks, folders)


@pytest.fixture(scope="module")
def spoilt_shm():
    """Name of an engine whose updates arrive spoilt; on this side it is the engine `shm`."""
    WeightTransferEngineFactory.register_engine(
        "spoilt-shm", "wtransfer.engines.shm", "ShmWeightTransferEngine"
    )
    return "spoilt-shm"


@pytest.mark.parametrize("spoil", SPOILS)
def test_push_that_arrives_spoilt_in_one_rank_is_applied_in_none(ranks, folders, spoilt_shm, spoil):
    pushed(folders["A"], ranks, "A")
    before = ranks.ask(PROMPT).tokens
    held = load_file(folders["B"] / "model.safetensors")
    ranks.tell("rank", "1")
    ranks.tell("spoil", json.dumps({"action": spoil, "tensor": 5}))
    with wtransfer.Publisher(
        held, hosts=[ranks.address], engine=spoilt_shm, token=TOKEN, deadline_s=30
    ) as publisher:
        assert len(publisher.workers()) == 2
        running = ranks.begin([*PROMPT, 1], 40)
        with pytest.raises(WTransferError, match=r"worker .*/1"):
            publisher.publish("spoilt")
        assert running.result().versions == [("A", 0, 40)]
        answer = ranks.ask(PROMPT)
        assert (answer.versions, answer.tokens) == ([("A", 0, 8)], before)
        ranks.forget("spoil")
        publisher.publish("B")
    after = ranks.ask(PROMPT)
    assert after.versions == [("B", 0, 8)]
    assert wrong_tokens(folders, after) == []


def test_pusher_that_is_stopped_keeps_neither_requests_nor_another_one(ranks, folders):
    pusher = Pusher(folders, ranks, DEADLINE_S)
    with contextlib.closing(pusher):
        pusher.begin(rounds=3)
        pusher.process.send_signal(signal.SIGSTOP)
        answers = [ranks.ask([*PROMPT, number], 20) for number in range(3)]
        assert [wrong_tokens(folders, answer) for answer in answers] == [[]] * 3
        check(ranks, folders)
        pusher.process.send_signal(signal.SIGCONT)
    check(ranks, folders)


def test_rank_that_is_stopped_is_told_in_time_and_goes_on_whole(ranks, folders):
    pushed(folders["A"], ranks, "A")
    held = load_file(folders["B"] / "model.safetensors")
    with wtransfer.Publisher(
        held, hosts=[ranks.address], token=TOKEN, deadline_s=DEADLINE_S
    ) as publisher:
        ranks.signal_rank(1, signal.SIGSTOP)
        try:
            with told_in_time("has been silent for"):
                publisher.publish("B")
        finally:
            ranks.signal_rank(1, signal.SIGCONT)
    answer = ranks.ask(PROMPT)
    assert wrong_tokens(folders, answer) == []
    check(ranks, folders)


def test_rank_that_is_killed_within_a_commit_is_told_in_time_and_ends_sglang(folders, tmp_path):
    server = Server(tmp_path, folders["A"], OPTIONS, cpu_threads())
    with contextlib.closing(server):
        server.ready()
        held = load_file(folders["B"] / "model.safetensors")
        server.tell("rank", "1")
        server.tell("stall_at", "5")
        with wtransfer.Publisher(
            held, hosts=[server.address], token=TOKEN, deadline_s=DEADLINE_S
        ) as publisher:
            assert len(publisher.workers()) == 2
            round_ = publisher.publish("B", wait=False)
            server.wait_for("stalled")
            server.signal_rank(1, signal.SIGKILL)
            with told_in_time("worker"):
                round_.result()
        end = time.monotonic() + 60
        while not server.ended():
            assert time.monotonic() < end
            time.sleep(0.05)
