"""Real weights into running workers, with the commands that users run.

Two workers serve a model of 90 MB from the registry; changed copies of it are pushed to them. What
they should have is read from the files by hand, what they have is asked over HTTP.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

TENSOR = "encoder.layer.3.attention.self.query.weight"
FILE = "model.safetensors"


def what_they_have(workers):
    return [
        (each.info["weight_version"], each.info["fingerprint"], each.digests) for each in workers
    ]


def assert_all_have(workers, checkpoint, label):
    for each in workers:
        info = each.info
        assert (label, checkpoint.fingerprint) == (info["weight_version"], info["fingerprint"])
        assert info["verified"] == "digests"
        assert checkpoint.digests == each.digests


def test_a_worker_begins_with_its_checkpoint(original, start_workers):
    assert start_workers(1)[0].digests == original.digests


def test_both_workers_have_the_pushed_copy_as_the_sender_has_it(original, workers, push, folders):
    changed = original.perturbed(1)
    document = push.well(workers, str(changed.write(folders("changed"))), "--label", "step-1")
    assert document["fingerprint"] == changed.fingerprint
    assert_all_have(workers, changed, "step-1")


def missing(original, folder):
    return type(original)((n, e) for n, e in original.items() if n != TENSOR).write(folder)


def flipped(original, folder):
    original.perturbed(2).write(folder)
    subprocess.run([sys.executable, "-m", "wtransfer", "seal", str(folder)], check=True)
    data = (folder / FILE).read_bytes()
    at = data.index(original.perturbed(2)[TENSOR].data) + 4321
    with (folder / FILE).open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 0x10]))
    return folder


@pytest.mark.parametrize("spoil", [missing, flipped])
def test_a_spoiled_copy_is_refused_by_name_and_the_next_good_one_works(
    spoil, original, workers, push, folders
):
    before = what_they_have(workers)
    refused = push(workers, str(spoil(original, folders("spoiled"))), "--label", "spoiled")
    assert refused.code == 1
    assert TENSOR in str(refused.document["error"])
    assert what_they_have(workers) == before
    good = original.perturbed(3)
    push.well(workers, str(good.write(folders("good"))), "--label", "good")
    assert_all_have(workers, good, "good")


def test_a_dry_run_proves_everything_and_changes_nothing(original, workers, push, folders):
    folder = str(original.perturbed(4).write(folders("changed")))
    before = what_they_have(workers)
    document = push.well(workers, folder, "--label", "dry", "--dry-run")
    assert [each["outcome"] for each in document["workers"]] == ["verified"] * 2
    assert what_they_have(workers) == before


@pytest.mark.parametrize("engine", ["file"], indirect=True)
def test_a_rollback_brings_the_version_before_back_bit_for_bit(original, workers, push, folders):
    first, second = original.perturbed(5), original.perturbed(6)
    push.well(workers, str(first.write(folders("first"))), "--label", "first")
    push.well(workers, str(second.write(folders("second"))), "--label", "second")
    assert_all_have(workers, second, "second")
    push.well(workers, "--rollback", "first")
    assert_all_have(workers, first, "first")


@pytest.mark.parametrize("engine", ["file"], indirect=True)
def test_a_third_worker_gets_the_current_version_when_the_publisher_has_gone(
    original, workers, start_workers, push, folders
):
    changed = original.perturbed(7)
    push.well(workers, str(changed.write(folders("changed"))), "--label", "late")
    third = start_workers(1, "--join", f"file:{push.store}")
    third[0].until_it_has("late")
    assert_all_have([*workers, *third], changed, "late")


@pytest.mark.parametrize("engine", ["shm"], indirect=True)
def test_a_third_worker_joins_a_publisher_that_stays(
    original, workers, start_workers, push, folders
):
    changed = original.perturbed(8)
    folder = str(changed.write(folders("changed")))
    with push.staying(workers, folders("push.log"), folder, "--label", "late") as address:
        third = start_workers(1, "--join", address)
        third[0].until_it_has("late")
    assert_all_have([*workers, *third], changed, "late")
