"""Pushes of a real model that are killed at random (FAULTS 13, 16, 34)."""

from __future__ import annotations

import collections
import random
import signal
import time
from pathlib import Path

import pytest

from wtransfer.testing.zygote import Zygote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PHASES = {"start", "init", "plan", "transfer", "prepare", "commit", "over"}


@pytest.fixture(scope="module")
def nursery():
    preload = ["torch", "wtransfer.commands.push", "wtransfer.weight_sync.trainer.publisher"]
    with Zygote(preload=preload, paths=[Path(__file__).parent]) as zygote:
        yield zygote


class Story:
    """Two versions in turn, pushed to workers who shall never be torn."""

    def __init__(self, nursery, push, workers, versions, log):
        self.nursery, self.push, self.workers = nursery, push, workers
        self.versions = versions
        self.log, self.witness = log, log.with_suffix(".phase")
        self.outcomes = collections.Counter()
        self.seconds = 0.0

    def begin(self, label):
        arguments = self.push.arguments(
            self.workers, str(self.versions[label][0]), "--label", label, "--json"
        )
        token = self.push.env["WTRANSFER_TOKEN"]
        self.log.write_bytes(b"")
        self.witness.write_bytes(b"start")
        return self.nursery.spawn(
            "pushing:main", arguments, token, str(self.witness), stdout=self.log, stderr=self.log
        )

    def go_well(self, label):
        begun = time.monotonic()
        child = self.begin(label)
        assert child.wait(60.0) == 0, self.log.read_text()
        self.seconds = time.monotonic() - begun
        assert {label} == {each.info["weight_version"] for each in self.workers}
        self.all_are_whole()

    def be_killed(self, label, rng):
        child = self.begin(label)
        time.sleep(rng.uniform(0.0, self.seconds))
        child.kill()
        killed = child.wait(10.0) == -signal.SIGKILL
        self.all_are_whole()
        phase = self.witness.read_bytes().decode().strip()
        assert phase in PHASES
        self.outcomes[phase if killed else "too late"] += 1

    def all_are_whole(self):
        for each in self.workers:
            info = each.info
            checkpoint = self.versions[info["weight_version"]][1]
            assert (checkpoint.fingerprint, checkpoint.digests) == (
                info["fingerprint"],
                each.digests,
            )


@pytest.mark.parametrize("num_kills", [4, pytest.param(100, marks=pytest.mark.nightly)])
def test_workers_stay_whole_and_the_next_push_works(
    nursery, original, start_workers, push, folders, *, num_kills
):
    rng = random.Random(3)
    workers = start_workers(2)
    versions = {}
    for number, label in enumerate(("odd", "even"), 1):
        checkpoint = original.perturbed(number)
        versions[label] = (checkpoint.write(folders(label)), checkpoint)
    story = Story(nursery, push, workers, versions, folders("push.log"))
    story.go_well("odd")
    story.go_well("even")
    held = [each.holdings for each in workers]
    for number in range(num_kills):
        label = ("odd", "even")[number % 2]
        story.be_killed(label, rng)
        story.go_well(label)
    # Kills fell into pushes; of a hundred, also before the round, into it, and most of them.
    told = dict(story.outcomes)
    assert told.get("too late", 0) < num_kills, told
    if num_kills == 100:
        assert told.get("start", 0) >= 1, told
        assert told.get("transfer", 0) >= 5, told
        assert told.get("too late", 0) <= 50, told
    story.go_well("odd")
    story.go_well("even")
    assert [each.settled(before) for each, before in zip(workers, held, strict=True)] == held
    assert push.leftovers() == []
