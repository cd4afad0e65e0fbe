import os
import textwrap
from dataclasses import dataclass

import pytest

from wtransfer.demo.messages import (
    Applied,
    Held,
    Listening,
    Proof,
    Ready,
    Receipt,
    RoundOver,
    Sample,
    Tokens,
    Trained,
)
from wtransfer.demo.row import row_of
from wtransfer.demo.story import Kill, Story

TOKEN_S = 0.010
COMMIT_S = 0.002


@dataclass
class Scribe:
    """Writes a story in which everything is as promised; tests then falsify one thing."""

    story: Story
    now: float = 100.0

    def tokens(self, workers, num_tokens, version):
        for worker in workers:
            ended_at = tuple(self.now + TOKEN_S * (i + 1) for i in range(num_tokens))
            self.story.add(Tokens(worker, version, ended_at))
        self.now += TOKEN_S * num_tokens

    def ready(self, worker, pid):
        self.story.add(Ready(worker, pid, None, f"local:{pid:032x}", "fresh"))

    def commit(self, number, workers, old):
        """One token during the transfer, the commit, and three tokens after it."""
        version, fingerprint = f"round-{number}", f"{number:032x}"
        started_at = self.now
        self.tokens(workers, 1, old)
        for worker in workers:
            commit = (self.now, self.now + COMMIT_S)
            self.story.add(Applied(worker, version, fingerprint, *commit))
        self.now += COMMIT_S
        self.tokens(workers, 3, version)
        receipts = tuple(Receipt(w, "committed", fingerprint, True, 0.5 * TOKEN_S) for w in workers)
        self.story.add(
            RoundOver(
                number=number,
                version=version,
                outcome="committed",
                step=10 * number,
                loss=5.0 - number,
                digest=f"sha-{number}",
                memcpy_s=0.001,
                started_at=started_at,
                fingerprint=fingerprint,
                nbytes=10_000_000,
                packed_s=0.003,
                total_s=0.010,
                receipts=receipts,
            )
        )
        for worker in workers:
            self.prove(worker, number)

    def prove(self, worker, number):
        self.story.add(Proof(worker, f"round-{number}", f"sha-{number}", 10 * number, True))


@pytest.fixture
def sabotage(monkeypatch, tmp_path):
    """Let every child execute this at its start, and end it where this fails."""

    def arm(code):
        body = textwrap.indent(code, "    ")
        (tmp_path / "sitecustomize.py").write_text(
            f"try:\n{body}except BaseException as error:\n    raise SystemExit(70) from error\n"
        )
        inherited = os.environ.get("PYTHONPATH")
        path = f"{tmp_path}{os.pathsep}{inherited}" if inherited else str(tmp_path)
        monkeypatch.setenv("PYTHONPATH", path)

    return arm


@pytest.fixture
def scribe():
    return Scribe(Story())


@pytest.fixture
def story(scribe):
    """Four rounds: both, one killed, one alone, both."""
    both = ("worker-0", "worker-1")
    told = scribe.story
    told.add(Listening("unix:@x", 1000))
    for pid, worker in enumerate(both):
        scribe.ready(worker, pid)
    scribe.tokens(both, 5, None)
    told.add(Trained(1, 5.5))
    told.add(Sample("worker-0", None, "q#.x"))
    scribe.commit(1, both, old=None)

    started_at = scribe.now
    told.add(Held(scribe.now, 10, 20))
    scribe.tokens(both, 4, "round-1")
    told.kill = Kill("worker-1", 2, scribe.now)
    scribe.tokens(both[:1], 4, "round-1")
    told.resumed_at = scribe.now
    told.add(
        RoundOver(
            number=2,
            version="round-2",
            outcome="aborted",
            step=20,
            loss=3.0,
            digest="sha-2",
            memcpy_s=0.001,
            started_at=started_at,
            total_s=scribe.now - started_at,
            error="worker-1 was lost",
            blamed="worker-1",
            failed_in="transfer",
        )
    )
    scribe.prove("worker-0", 1)

    scribe.commit(3, both[:1], old="round-1")
    scribe.ready("worker-1", 7)
    told.events.append("worker-1 is back")
    scribe.commit(4, both, old="round-3")
    told.add(Trained(50, 2.5))
    told.add(Sample("worker-0", "round-4", "The class"))
    told.rows = [row_of(told, over) for over in told.rounds]
    told.exits = {"trainer": 0, "worker-0": 0, "worker-1": 0}
    return told
