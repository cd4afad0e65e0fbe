"""verl's manager, verl's rollout workers and trainer ranks as Ray actors, over several syncs."""

import json
import os
import random
import re
from pathlib import Path

import pytest
import ray_apart
from stand_ins import FAILS_AT, NUM_TENSORS

ROOT = Path(__file__).parents[3]
SESSION = Path(__file__).parent / "ray_session.py"
BREAKS = "serving engine fails"
FAILS, DIES, WAS_KILLED, LATE = FAULTS = (
    "trainer fails",
    "rollout is killed",
    "rollout is killed before",
    "rollout joins late",
)


def run(result, timeout_s, **plan):
    """Return what came of each sync, the rooms that were imported, and the processes left."""
    if reason := ray_apart.why_not():
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    arguments = (SESSION, result, json.dumps(plan))
    _, left = ray_apart.run(*arguments, timeout_s=timeout_s, env={"PYTHONWARNINGS": "ignore"})
    return json.loads(result.read_text("utf-8")) | {"left": left}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    result = tmp_path_factory.mktemp("session") / "result.json"
    return run(result, 170, syncs=[None, DIES, None, FAILS, None, BREAKS, None], engine_kwargs={})


pytestmark = pytest.mark.timeout(200)


def test_every_rollout_has_the_set_of_a_sync_that_succeeds(session):
    found = [each for each in session["syncs"] if each["fault"] is None]
    assert [each["error"] for each in found] == [None] * 4
    assert [each["holds"] for each in found] == [[1] * 3, [3] * 3, [5] * 3, [7] * 3]
    assert [each["metrics"]["wtransfer/bytes"] for each in found] == [163840] * 4


def test_rollout_that_is_killed_in_a_sync_leaves_the_others_on_the_old_set(session):
    killed = session["syncs"][1]
    assert "actor died" in killed["error"]
    assert killed["holds"] == [1, 1]
    assert killed["num_ordered"] == [1, 1]


def test_every_rank_gathers_the_rest_when_a_round_has_failed(session):
    assert session["syncs"][1]["num_gathered"] == [NUM_TENSORS] * 2


def test_rollout_that_was_restarted_joins_the_next_sync(session):
    assert session["syncs"][2]["num_ordered"] == [2, 2, 1]


def test_trainer_that_fails_in_the_midst_leaves_every_rollout_on_the_old_set(session):
    failed = session["syncs"][3]
    assert f"RuntimeError: the trainer failed at model.layers.{FAILS_AT}.weight" in failed["error"]
    assert failed["num_gathered"] == [FAILS_AT] * 2
    assert failed["holds"] == [3] * 3
    assert failed["num_ordered"] == [2, 2, 1]


def test_rollouts_with_a_whole_set_generate_after_every_sync(session):
    said = session["syncs"]
    assert [set(each["generates"]) for each in said if each["fault"] != BREAKS] == [{True}] * 6


def test_rollout_with_a_part_of_a_set_stays_paused_until_a_sync_succeeds(session):
    broken, mended = session["syncs"][5:]
    assert "this model has no" in broken["error"]
    # The second was loading when the first one failed.
    assert broken["holds"] == [None, 6, 6]
    assert broken["generates"] == [False, True, True]
    assert mended["generates"] == [True] * 3


def test_failed_sync_has_ended_on_every_worker(session):
    assert [each["in_sync"] for each in session["syncs"] if each["error"]] == [[], [], []]


def test_ray_leaves_nothing_behind(session):
    assert session["left"] == []


def test_ci_tests_the_package_when_a_room_that_it_imports_has_changed(session):
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    (compared,) = re.findall(r"weight_rooms=\(.*?wtransfer/\{([\w,]+)\}", ci, re.DOTALL)
    folders = {path.name for path in (ROOT / "wtransfer").iterdir() if path.is_dir()}
    assert folders.intersection(session["imported"]) == set(compared.split(","))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "engine_kwargs"),
    [(1, {}), (2, {"engine": "gloo", "listen": "tcp:127.0.0.1:0"})],
    ids=["shm", "gloo by tcp"],
)
def test_no_fault_of_many_leaves_rollouts_with_different_sets(tmp_path, seed, engine_kwargs):
    dice = random.Random(seed)
    syncs = [fault for _ in range(2) for fault in dice.sample([None, *FAULTS], 5)] + [None]
    said = run(tmp_path / "result", 800, syncs=syncs, engine_kwargs=engine_kwargs)
    held = 0
    for each in said["syncs"]:
        assert (each["error"] is None) is (each["fault"] in (None, LATE)), each
        assert set(each["generates"]) == {True}
        # A rollout that has joined since the last success has none before the next.
        allowed = {held, 0}
        if each["error"] is None:
            held = each["step"]
            allowed = {held}
        assert set(each["holds"]) <= allowed, each
    assert said["left"] == []
