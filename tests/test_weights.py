"""What this process computes with, by one name for all of its models."""

from __future__ import annotations

import pytest

from wtransfer.weights import ProcessWeights, WeightsStamp, process_weights


@pytest.fixture
def weights():
    return ProcessWeights()


def test_without_a_model_the_name_is_the_processs_own(weights):
    assert weights.stamp() == WeightsStamp(weights.stamp().fingerprint, 0)
    assert weights.stamp().fingerprint.startswith("local:")
    assert weights.stamp().fingerprint != ProcessWeights().stamp().fingerprint


def test_one_model_gives_its_name(weights):
    weights.hold("f0")
    assert weights.stamp() == WeightsStamp("f0", 1)


def test_while_a_model_changes_nothing_has_a_name(weights):
    held = weights.hold("f0")
    with held.changing(lambda: "f1"):
        assert weights.stamp() is None
    assert weights.stamp().fingerprint == "f1"


def test_a_change_that_fails_is_a_change_all_the_same(weights):
    held = weights.hold("f0")
    before = weights.stamp()
    with pytest.raises(ZeroDivisionError), held.changing(lambda: "f0"):
        raise ZeroDivisionError
    assert weights.stamp().fingerprint == before.fingerprint
    assert weights.stamp() != before


def test_there_and_back_is_the_same_weights_and_another_stamp(weights):
    held = weights.hold("f0")
    before = weights.stamp()
    held.settle("f1")
    held.settle("f0")
    assert weights.stamp().fingerprint == before.fingerprint
    assert weights.stamp().epoch > before.epoch


def test_several_models_have_one_name_whatever_their_order(weights):
    one, other = ProcessWeights(), ProcessWeights()
    for each, names in ((one, ("f0", "g0")), (other, ("g0", "f0"))):
        for name in names:
            each.hold(name)
    assert one.stamp().fingerprint == other.stamp().fingerprint
    assert one.stamp().fingerprint.startswith("several:")


def test_a_change_of_any_model_is_a_change_of_all(weights):
    weights.hold("f0")
    draft = weights.hold("g0")
    before = weights.stamp()
    with draft.changing(lambda: "g1"):
        assert weights.stamp() is None
    assert weights.stamp().fingerprint != before.fingerprint


def test_a_model_that_nobody_watches_over_gets_a_name_that_nobody_knows(weights):
    held = weights.hold("f0")
    held.close()
    after = weights.stamp()
    assert after.fingerprint.startswith("local:")
    held.close()
    assert weights.stamp() == after
    assert weights.hold("f0") is not held
    assert weights.stamp().fingerprint == "f0"


def test_what_is_read_holds_for_this_process():
    assert isinstance(process_weights.stamp(), WeightsStamp)
