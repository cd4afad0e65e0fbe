"""Loggers: named by their modules, and those of the operators' guide say what it says of them."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path

import pytest
import torch

from wtransfer.errors import NonfiniteError, SchemaError

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "wtransfer" / "engines" / "README.md").read_text("utf-8")
DOCUMENTED = set(re.findall(r"^\| `(wtransfer[\w.]*)` \| `([A-Z]+)` \|", GUIDE, re.MULTILINE))
TRAINER = "wtransfer.weight_sync.trainer"
WORKER = "wtransfer.weight_sync.worker"


def test_every_logger_is_named_by_its_module():
    calls = [
        (path.name, call)
        for path in (ROOT / "wtransfer").rglob("*.py")
        for call in re.findall(r"getLogger\((.*?)\)", path.read_text("utf-8"))
    ]
    assert len(calls) > 20
    # The kit listens to the logger of the backend that it tests.
    calls.remove(("kit.py", "self._logger_name("))
    assert [each for each in calls if "__name__" not in each[1]] == []


def test_every_documented_logger_exists():
    assert len(DOCUMENTED) > 10
    for name, level in DOCUMENTED:
        assert importlib.import_module(name).logger.name == name
        assert level in {"INFO", "WARNING", "ERROR"}


@pytest.fixture
def said(caplog):
    """What was logged so far, of (logger, level): texts; all of it must be documented."""
    caplog.set_level(logging.INFO, "wtransfer")

    def said(logger, level):
        assert (logger, level) in DOCUMENTED
        return [
            record.getMessage()
            for record in caplog.records
            if (record.name, record.levelname) == (logger, level)
        ]

    return said


def test_a_worker_that_joins_and_goes_and_a_commit_are_logged_on_both_sides(fleet, weights, said):
    made = fleet(weights)
    member = made.join()
    assert said(f"{TRAINER}.membership", "INFO") == ["worker-0 has joined, fresh with None"]
    report = made.publish("v1")
    (line,) = said(f"{TRAINER}.coordinator", "INFO")
    assert line.startswith(f"round {report.round_id} ('v1') committed by 1 workers in ")
    (line,) = said(f"{WORKER}.committer", "INFO")
    assert line == f"worker-0 has committed 'v1' ({report.fingerprint})"
    made.leave(member)
    assert said(f"{TRAINER}.membership", "INFO")[-1].startswith("worker-0 is gone: ")


def test_an_abort_is_logged_on_both_sides(fleet, weights, said, until):
    made = fleet(weights, nonfinite="reject")
    made.join()
    next(each for each in weights.values() if each.is_floating_point()).view(-1)[0] = torch.nan
    with pytest.raises(NonfiniteError) as caught:
        made.publish("v1")
    (line,) = said(f"{TRAINER}.coordinator", "INFO")
    assert re.fullmatch(r"round \w+ \('v1'\) aborted: " + re.escape(str(caught.value)), line)
    until(lambda: said(f"{WORKER}.participant", "INFO"))
    (line,) = said(f"{WORKER}.participant", "INFO")
    assert line.startswith("worker-0 drops 'v1': ")


def test_a_refused_update_is_logged_where_it_is_refused(fleet, weights, said):
    made = fleet(weights)
    made.join({name: torch.zeros(1) for name in weights})
    with pytest.raises(SchemaError):
        made.publish("v1")
    (line,) = said(f"{WORKER}.committer", "WARNING")
    assert line.startswith("worker-0 refuses an update: ")


def test_an_error_after_the_commit_is_logged_as_what_the_caller_is_told(
    fleet, weights, said, unapplied
):
    made = fleet(weights)
    report = unapplied(made)
    (line,) = said(f"{TRAINER}.coordinator", "INFO")
    assert line.startswith(f"round {report.round_id} ('v1') mixed: no worker holds 'v1'")
    assert said(f"{TRAINER}.coordinator", "WARNING") == []


def test_a_mixed_round_and_an_empty_worker_are_warnings(fleet, weights, said, until, torn):
    made = fleet(weights)
    member = made.join(torn, keep_previous=False)
    made.join()
    assert made.publish("v1").outcome == "mixed"
    assert "is mixed:\nv1  mixed" in said(f"{TRAINER}.coordinator", "WARNING")[0]
    member.session.weights_lost("it was put to sleep")
    (line,) = said(f"{WORKER}.committer", "WARNING")
    assert line == "worker-0 is empty: it was put to sleep"
    until(lambda: said(f"{TRAINER}.membership", "WARNING"))
    assert "it was put to sleep" in said(f"{TRAINER}.membership", "WARNING")[0]
    made.commit_errors.clear()
