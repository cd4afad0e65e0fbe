"""A worker looks at its model before the plan is there, and again if anything came between."""

from __future__ import annotations

import threading

import pytest
import torch

from wtransfer.engines.interface import TensorSpec
from wtransfer.errors import SchemaError
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.trainer.source import StateDictSource
from wtransfer.weight_sync.worker.ledger import Held, Ledger, Pending
from wtransfer.weight_sync.worker.lookahead import LookAhead

SCHEMA = {"w": TensorSpec(torch.float32, (2,))}


class Target:
    """Counts how often it is looked at."""

    def __init__(self):
        self.looks = 0
        self.error = None

    def read(self):
        self.looks += 1
        if self.error is not None:
            raise self.error
        return dict(SCHEMA)


@pytest.fixture
def target():
    return Target()


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def ahead(ledger, target):
    return LookAhead(ledger, target.read)


def pending(version):
    return Pending(None, version, Held(version, version * 16, tensors={}), {})


def test_the_look_before_the_plan_is_the_one_that_counts(ahead, target):
    ahead.look("r1")
    assert ahead.schema("r1") == SCHEMA
    assert target.looks == 1


def test_a_look_serves_one_round(ahead, target):
    ahead.look("r1")
    ahead.schema("r1")
    assert ahead.schema("r1") == SCHEMA
    assert ahead.schema("r2") == SCHEMA
    assert target.looks == 3


def test_a_look_for_another_round_is_none(ahead, target):
    ahead.look("r1")
    assert ahead.schema("r2") == SCHEMA
    assert ahead.schema("r1") == SCHEMA
    assert target.looks == 3


def commit(ledger):
    ledger.offer(pending("v1"))
    applied = ledger.begin()
    ledger.committed(applied, ledger.held, keep=True)


def fail(ledger):
    """The way back leads to the very entry that there was."""
    before = ledger.held
    ledger.offer(pending("v1"))
    ledger.begin()
    ledger.put_back(before, restored=True)
    assert ledger.held is before


def lose(ledger):
    ledger.lose()


@pytest.mark.parametrize("happen", [commit, fail, lose])
def test_what_happened_to_the_model_since_makes_it_look_again(ahead, ledger, target, happen):
    ahead.look("r1")
    happen(ledger)
    assert ahead.schema("r1") == SCHEMA
    assert target.looks == 2


@pytest.mark.parametrize("happen", [commit, fail, lose])
def test_a_look_during_which_the_model_changes_is_none(ahead, ledger, target, happen):
    read = target.read

    def changing():
        happen(ledger)
        return read()

    ahead._read = changing
    ahead.look("r1")
    ahead._read = read
    assert ahead.schema("r1") == SCHEMA
    assert target.looks == 2


def test_nobody_looks_while_a_set_is_applied_whose_order_was_taken_back(ahead, ledger, target):
    ledger.offer(pending("v1"))
    ledger.begin()
    assert ledger.discard() is not None
    ahead.look("r1")
    assert target.looks == 0


def test_nobody_looks_while_a_set_waits_to_be_applied(ahead, ledger, target):
    ledger.offer(pending("v1"))
    ahead.look("r1")
    assert target.looks == 0


def test_what_is_wrong_with_the_model_is_said_when_the_plan_is_judged(ahead, target):
    target.error = SchemaError("nothing can be written to w")
    ahead.look("r1")
    with pytest.raises(SchemaError, match="nothing can be written to w"):
        ahead.schema("r1")
    target.error = None
    assert ahead.schema("r1") == SCHEMA


class Waits(StateDictSource):
    """A source that does not say what it has before the worker has looked at its model."""

    def __init__(self, tensors, looked):
        super().__init__(tensors)
        self._looked = looked

    @property
    def metadata(self):
        assert self._looked.wait(10), "the worker looks only when the plan is there"
        return super().metadata


def test_in_a_round_the_worker_looks_while_the_trainer_does(fleet, weights, monkeypatch):
    looked, look = threading.Event(), LookAhead.look

    def looking(self, round_id):
        look(self, round_id)
        looked.set()

    monkeypatch.setattr(LookAhead, "look", looking)
    made = fleet(Waits(weights, looked))
    worker = made.join({name: torch.zeros_like(each) for name, each in weights.items()})
    for number in range(3):
        looked.clear()
        weights["layer.0"] += 1
        assert made.publish(f"v{number}").ok
        assert worker.contents == contents(weights)
