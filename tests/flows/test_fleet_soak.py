"""A fleet of which some workers always come, leave, die, hang or hold another checkpoint.

Ten are named, the others join by themselves. No round fails because of them, none says `ok` before
every named one holds its version, nobody is torn, and the trainer keeps nothing of who is gone.
"""

from __future__ import annotations

import collections
import random
import signal
import threading
import time

import pytest

pytest.importorskip("uvicorn")

NUM_NAMED, NUM_JOINERS = 10, 20
DEADLINE_S = 15.0
LONGEST_STOP_S = 3.0
PAUSE_S = 0.2
GROWTH_NBYTES = 32 << 20
OTHER_CHECKPOINT = {"num_tensors": 5}


class Slot:
    """A place in the fleet: a URL or a name, and the process that has it, if one has."""

    def __init__(self, flow, number, address, token):
        self.name = f"slot-{number}"
        self.host = f"unix:@{address}-{number}" if number < NUM_NAMED else None
        self._flow, self._token = flow, token
        self.puppet = None
        self.fits = False
        self._goes_on = None

    def start(self, *, fits=True):
        self.fits = fits
        self.puppet = self._flow.worker(
            name=self.name,
            listen=self.host,
            **({} if fits else OTHER_CHECKPOINT),
            **({} if self.host is None else {"token": self._token}),
        )

    def stop(self, seconds):
        """Stop the process for some time, also beyond the end of a round."""
        self.go_on()
        self.puppet.signal(signal.SIGSTOP)
        self._goes_on = threading.Timer(seconds, self.puppet.signal, (signal.SIGCONT,))
        self._goes_on.start()

    def go_on(self):
        if self._goes_on is not None:
            self._goes_on.cancel()
            self._goes_on.join()
            self.puppet.signal(signal.SIGCONT)
            self._goes_on = None

    def end(self, *, by_force):
        """End the process; return it, for what it has seen."""
        self.go_on()
        puppet, self.puppet = self.puppet, None
        if by_force:
            puppet.kill()
        puppet.end()
        self._flow.puppets.remove(puppet)
        return puppet


class Story:
    """A fleet, what happens to it, and what was seen of it."""

    def __init__(self, flow, rng):
        self.flow, self.rng = flow, rng
        self.number = 0
        self.identities = {}
        self.events = collections.Counter()
        self.outcomes = collections.Counter()
        self.slowest_s = 0.0
        self.trainer = flow.trainer(
            on_lost_worker="drop", deadline_s=DEADLINE_S, token="a token of these tests"
        )
        where = self.trainer.ask("where")
        address, token = f"soak-{self.trainer.pid}", where["token"]
        count = NUM_NAMED + NUM_JOINERS
        self.slots = [Slot(flow, number, address, token) for number in range(count)]
        for slot in self.slots:
            slot.start()
        self.trainer.ask("invite", hosts=[slot.host for slot in self.slots if slot.host])

    def one_event(self):
        """Let something happen to one worker, or to a place without one."""
        empty = [slot for slot in self.slots if slot.puppet is None]
        slot = self.rng.choice(empty if empty and self.rng.random() < 0.4 else self.slots)
        if slot.puppet is None:
            fits = self.rng.random() < 0.8
            slot.start(fits=fits)
            self.events["comes" if fits else "comes with another checkpoint"] += 1
            return
        event = self.rng.choice(("leaves", "dies", "stops", "stops"))
        if event == "stops":
            slot.stop(self.rng.uniform(0.0, LONGEST_STOP_S))
        else:
            self.judge(slot.end(by_force=event == "dies"))
        self.events[event] += 1

    def one_round(self):
        self.number += 1
        begun = time.monotonic()
        self.trainer.ask("begin", number=self.number)
        self.trainer.order("result")
        for _ in range(self.rng.randrange(4)):
            time.sleep(self.rng.uniform(0.0, PAUSE_S))
            self.one_event()
        # Whatever was lost: the rest commit, so that no round raises.
        report = self.trainer.answer()
        self.slowest_s = max(self.slowest_s, self.trainer.ended - begun)
        assert self.trainer.ended - begun < DEADLINE_S, report["text"]
        self.check(report)

    def check(self, report):
        rows = report["workers"]
        for name, row in rows.items():
            self.outcomes[row["outcome"]] += 1
            if row["outcome"] == "committed":
                held = (f"v{self.number}", report["fingerprint"])
                assert held == (row["version"], row["fingerprint"]), name
        told = {row["host"]: row for row in rows.values() if row["host"] is not None}
        named = [slot.host for slot in self.slots if slot.host]
        assert sorted(told) == sorted(named), report["text"]
        if report["ok"]:
            assert {told[host]["outcome"] for host in named} == {"committed"}, report["text"]
        self.outcomes["rounds that are ok" if report["ok"] else "rounds that are not ok"] += 1

    def judge(self, puppet):
        """Everything that a worker has looked like was one published version, whole."""
        for version, identity, _ in puppet.looks():
            if version is not None:
                assert self.identities.setdefault(version, identity) == identity

    def whole_again(self):
        """Bring every worker back, and see one version in all of them."""
        for slot in self.slots:
            slot.go_on()
            if slot.puppet is None or not slot.fits:
                if slot.puppet is not None:
                    self.judge(slot.end(by_force=False))
                slot.start()
        self.trainer.ask("wait", n=len(self.slots))
        self.number += 1
        report = self.trainer.ask("publish", number=self.number)
        assert report["ok"], report["text"]
        for slot in self.slots:
            self.flow.holds(slot.puppet, self.number)
            self.judge(slot.puppet)


def tell(flow, seconds):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 (what to repeat)
    story = Story(flow, random.Random(seed))
    story.whole_again()
    end = time.monotonic() + seconds
    warm = time.monotonic() + seconds / 4
    while time.monotonic() < warm:
        story.one_round()
    story.whole_again()
    holdings, nbytes = story.trainer.holdings(), story.trainer.resident_nbytes()
    while time.monotonic() < end:
        story.one_round()
    story.whole_again()
    grown = story.trainer.resident_nbytes() - nbytes
    print(  # noqa: T201 (the witness)
        f"{story.number} rounds in {seconds} s, the longest {story.slowest_s:.1f} s; memory "
        f"{grown / 2**20:+.1f} MiB; {dict(story.events)}; {dict(story.outcomes)}"
    )
    assert grown < GROWTH_NBYTES
    none = collections.Counter()
    assert flow.settled(lambda: story.trainer.holdings() - holdings, none) == none
    return story


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_no_round_fails_because_of_who_comes_leaves_hangs_or_does_not_fit(flow):
    story = tell(flow, 600.0)
    assert all(story.outcomes[each] for each in ("committed", "dropped", "rounds that are ok"))
    assert len(story.events) == 5
