"""FAULTS 12: a worker is killed, at any point."""

from __future__ import annotations

import statistics

import pytest

BEFORE_COMMIT = ["init", "plan", "transfer", "seal"]
AFTER_COMMIT = ["verdict", "commit"]


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
def test_before_the_commit_all_stay_and_the_next_round_works(flow, failing, phase):
    trainer = flow.trainer()
    survivor = flow.worker()
    trainer.ask("wait", n=1)
    trainer.ask("publish", number=1)
    flow.holds(survivor, 1)
