"""FAULTS 12, 13, 16: trainer and workers are killed at random, again and again.

Each kill falls into a round (or between two). Afterwards: nobody is torn, nobody hangs, nothing is
left over, and the next round works. Who is killed writes its phase into memory that outlives it;
the histogram of these phases is the proof that the kills fell everywhere.
"""

from __future__ import annotations

import collections
import itertools
import random
import time

import pytest

from wtransfer.transport.address import random_address

ROLES = ("trainer", "worker")
PHASES = ("idle", "init", "plan", "transfer", "prepare", "commit")
PARTS = {"vote": "commit", "between": "commit"}
ANY_TIME = "any time"
NUM_WORKERS = 2
STUCK_S = 10.0


class Story:
    """A trainer and its workers, of whom one after the other is killed and replaced."""

    def __init__(self, flow, rng):
        self.flow, self.rng = flow, rng
        flow.size = {"num_tensors": 16, "numel": 1 << 17}  # 8 MiB
        self.home = {
            "listen": random_address(),
            "token": "a token of these tests",
            "pace_s": 0.002,
            "options": {"bucket_nbytes": 1 << 19},
        }
        self.number = 0
        self.fingerprints = {}
        self.slowest_s = 0.0
        self.histogram = {role: collections.Counter() for role in ROLES}
        self.trainer = flow.trainer(**self.home)
        self.workers = [self.new_worker() for _ in range(NUM_WORKERS)]
        self.limits = {role: collections.Counter() for role in ROLES}

    @property
    def num_kills(self):
        return sum(counts.total() for counts in self.histogram.values())

    def new_worker(self):
        return self.flow.worker(pace_s=0.002)

    def calm(self, num_rounds):
        """Learn what the processes hold in daily life."""
        for _ in range(num_rounds):
            self.good_round()
            for role, puppet in self.cast():
                self.limits[role] |= puppet.holdings()

    def cast(self):
        return [("trainer", self.trainer), *(("worker", worker) for worker in self.workers)]

    def summary(self, seconds):
        lines = [f"{self.num_kills} kills in {seconds:.0f} s, {self.number} versions"]
        for role, counts in self.histogram.items():
            told = "  ".join(f"{phase} {counts[phase]}" for phase in PHASES)
            lines.append(f"  {role:8}{told}")
        return "\n".join([*lines, f"  slowest replacement {self.slowest_s:.2f} s"])

    # -- one kill

    def kill_one(self, role, phase):
        if phase == "init":
            self.kill_at_its_beginning(role)
        else:
            victim = self.trainer if role == "trainer" else self.rng.choice(self.workers)
            self.kill_in_a_round(victim, role, phase)
        self.good_round()
        self.nothing_is_left()

    def kill_in_a_round(self, victim, role, phase):
        if phase != "idle":
            self.begin_round()
        if phase == ANY_TIME:
            time.sleep(self.rng.uniform(0.0, 0.12))
        else:
            self.until(victim, phase)
        self.bury(victim, role)

    def kill_at_its_beginning(self, role):
        """Kill somebody who has just come: a worker that joins, a trainer in its first round."""
        if role == "worker":
            victim = self.new_worker()
            self.workers.append(victim)
        else:
            self.bury(self.trainer, "trainer")
            self.trainer.ask("wait", n=NUM_WORKERS)
            self.begin_round()
            victim = self.trainer
        self.until(victim, "init")
        self.bury(victim, role)

    def until(self, victim, phase):
        end = time.monotonic() + 1.0
        while victim.phase != phase and time.monotonic() < end:
            time.sleep(0.0002)
        time.sleep(self.rng.uniform(0.0, 0.002))

    def begin_round(self):
        self.number += 1
        self.trainer.ask("begin", number=self.number)

    def bury(self, victim, role):
        """Kill, see the others come to terms with it, and put another one in its place."""
        in_round = self.trainer.phase != "idle"
        killed_at = victim.kill()
        self.histogram[role][PARTS.get(victim.phase, victim.phase)] += 1
        if role == "trainer":
            for worker in self.workers:
                worker.ask("until_free", within_s=STUCK_S)
            self.trainer = self.flow.trainer(**self.home)
        else:
            self.workers.remove(victim)
            if in_round:
                self.end_round()
            if len(self.workers) < NUM_WORKERS:
                self.workers.append(self.new_worker())
        self.slowest_s = max(self.slowest_s, time.monotonic() - killed_at)
        self.whole(victim)
        victim.end()
        self.flow.puppets.remove(victim)

    def end_round(self):
        self.trainer.order("result", within_s=STUCK_S)
        try:
            report = self.trainer.answer()
        except Exception as error:
            # Lost before the commit: all stay. Anything else is a failure of the test.
            assert "PeerLostError" in error.classes, error  # noqa: PT017
        else:
            assert report["outcome"] in ("committed", "mixed")

    # -- what must be true afterwards

    def good_round(self):
        self.number += 1
        self.trainer.ask("wait", n=NUM_WORKERS)
        report = self.trainer.ask("publish", number=self.number)
        assert report["ok"], report["text"]
        for worker in self.workers:
            assert report["fingerprint"] == self.flow.holds(worker, self.number)["fingerprint"]
            self.whole(worker)

    def whole(self, puppet):
        """Every state that a worker was in was one published version, and always the same one."""
        if puppet.name.startswith("worker"):
            for version, fingerprint, _ in puppet.looks():
                if version is not None:
                    known = self.fingerprints.setdefault(version, fingerprint)
                    assert known == fingerprint
            assert len(set(self.fingerprints.values())) == len(self.fingerprints)

    def nothing_is_left(self):
        for role, puppet in self.cast():
            extra = self.flow.settled(
                lambda p=puppet, r=role: p.holdings() - self.limits[r], collections.Counter()
            )
            assert not extra, (puppet.name, extra, puppet.ask("threads"))
        pids = {puppet.pid for _, puppet in self.cast()}
        assert pids == self.flow.settled(self.flow.living, pids)


def tell(flow, files_in_shm, num_kills):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 (what to repeat)
    rng = random.Random(seed)
    segments = files_in_shm()
    story = Story(flow, rng)
    story.calm(5)
    deck = [*itertools.product(ROLES, PHASES), *itertools.product(ROLES, [ANY_TIME] * 4)]
    begun = time.monotonic()
    hand = []
    while story.num_kills < num_kills:
        hand = hand or rng.sample(deck, len(deck))
        story.kill_one(*hand.pop())
    print(story.summary(time.monotonic() - begun))  # noqa: T201 (the witness)
    assert files_in_shm() <= segments
    return story.histogram


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("num_kills", "least"), [(40, 0), pytest.param(300, 5, marks=pytest.mark.nightly)]
)
def test_random_kills_tear_nothing_and_leave_nothing(flow, files_in_shm, num_kills, least):
    histogram = tell(flow, files_in_shm, num_kills)
    for role, counts in histogram.items():
        assert all(counts[phase] >= least for phase in PHASES), (role, counts)
