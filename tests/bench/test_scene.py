"""Scenes: what the processes tell, what becomes of those that fail, and that none is left."""

from pathlib import Path

import pytest

from wtransfer.errors import PeerLostError, StallError


def test_a_scene_yields_what_its_processes_tell(play):
    told = play("say", "say", num_workers=2, arguments=[("word", "ink")])
    assert told.trainer == {"rank": 0, "num_workers": 2, "given": {"word": "ink"}}
    assert [each["rank"] for each in told.workers] == [1, 2]


def test_the_last_thing_said_counts_and_silence_is_left_out(play):
    told = play("say_twice", "return_at_once")
    assert (told.trainer, told.workers) == ({"number": 2}, ())


@pytest.mark.parametrize(("trainer", "worker"), [("fail", "wait"), ("wait", "fail")])
def test_who_fails_ends_the_scene_with_his_last_words(play, trainer, worker):
    with pytest.raises(
        PeerLostError, match=r"(?s)bench_jobs:fail.* with 1 .*ValueError: out of ink$"
    ):
        play(trainer, worker)


def test_a_killed_worker_ends_the_scene_unless_it_is_to_be_replaced(play):
    with pytest.raises(PeerLostError, match="ended with -9"):
        play("wait", "kill_self")
    told = play("count_starts", "count_starts", replaces_killed=True)
    assert told.trainer["starts"] >= 3


def test_a_scene_that_takes_too_long_is_ended(play):
    with pytest.raises(StallError, match="the bench's scene 'a test'"):
        play("wait", "wait", timeout_s=0.3)


def test_no_process_is_left_when_a_scene_has_failed(zygote, play):
    children = Path(f"/proc/{zygote.pid}/task/{zygote.pid}/children")
    with pytest.raises(PeerLostError):
        play("fail", "wait", num_workers=3)
    assert children.read_text().split() == []


def test_a_worker_that_does_not_leave_is_killed(play, monkeypatch):
    monkeypatch.setattr("wtransfer.bench.scene.LEAVE_S", 0.2)
    pid = play("tell_pid", "tell_pid").trainer["pid"]
    assert not Path(f"/proc/{pid}").exists()
