"""A pusher or a rank that is killed or stopped beside updates: nothing is torn, nobody waits on."""

import contextlib
import signal
import time

import pytest
import wtransfer
from publishers import Pusher, pushed
from safetensors.torch import load_file
from server import PROMPT, TOKEN, Server, cpu_threads
from sglang_models import wrong_tokens
from wtransfer.errors import WTransferError

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]

OPTIONS = {"tp": "2", "chunked-prefill-size": "64", "max-running-requests": "4"}
DEADLINE_S = 5.0
SLACK_S = 20.0
"""What a busy machine may add to a deadline."""


def start(models, folder):
    return Server(folder, models / "llama-A", OPTIONS, cpu_threads())


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory):
    server = start(models, tmp_path_factory.mktemp("ranks"))
    yield server.ready()
    server.close()


@pytest.fixture
def folders(models):
    return {"default": models / "llama-A", "A": models / "llama-A", "B": models / "llama-B"}


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


def test_rank_that_is_killed_within_a_commit_is_told_in_time_and_ends_sglang(
    models, folders, tmp_path
):
    server = start(models, tmp_path)
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
