"""What this process computes with, by one name for all of its models."""

from __future__ import annotations

import gc
import os
import weakref

import pytest

from wtransfer.weights import ProcessWeights, WeightsStamp, process_weights


@pytest.fixture
def weights():
    return ProcessWeights()


def test_without_a_model_the_name_is_the_processs_own(weights):
    assert weights.stamp().fingerprint.startswith("local:")
    assert weights.stamp().fingerprint != ProcessWeights().stamp().fingerprint


def test_one_model_gives_its_name(weights):
    weights.hold("f0")
    assert weights.stamp().fingerprint == "f0"


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


def test_several_models_have_one_name_which_says_who_has_which(weights):
    one, other = weights.hold("f0"), weights.hold("g0")
    before = weights.stamp().fingerprint
    assert before.startswith("several:")
    one.settle("g0")
    other.settle("f0")
    assert weights.stamp().fingerprint.startswith("several:")
    assert weights.stamp().fingerprint != before
    one.settle("f0")
    other.settle("g0")
    assert weights.stamp().fingerprint == before


def test_no_other_process_knows_which_of_several_models_has_which_weights():
    names = set()
    for _ in range(2):
        made = ProcessWeights()
        made.hold("f0")
        made.hold("g0")
        names.add(made.stamp().fingerprint)
    assert len(names) == 2


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


def test_a_model_left_alone_is_not_taken_for_the_one_that_stays(weights):
    weights.hold("f0")
    names = set()
    for fingerprint in ("g0", "g1"):
        weights.hold(fingerprint).close()
        names.add(weights.stamp().fingerprint)
    assert "f0" not in names
    assert len(names) == 2


class Model:
    pass


def test_a_model_that_is_watched_over_again_is_known_by_its_weights(weights):
    model = Model()
    weights.hold("f0", model).close()
    assert weights.stamp().fingerprint.startswith("local:")
    weights.hold("f0", model)
    assert weights.stamp().fingerprint == "f0"


def test_a_model_that_is_gone_computes_nothing(weights):
    weights.hold("f0")
    draft = Model()
    weights.hold("g0", draft).close()
    assert weights.stamp().fingerprint.startswith("several:")
    before = weights.stamp().epoch
    del draft
    gc.collect()
    assert weights.stamp().fingerprint == "f0"
    assert weights.stamp().epoch > before


def test_a_model_that_is_vouched_for_has_the_name_that_others_may_have():
    names = []
    for fingerprint in ("f0", "f0", "f1"):
        weights, model = ProcessWeights(), Model()
        weights.vouch(fingerprint, model)
        names.append(weights.stamp().fingerprint)
    assert names == ["f0", "f0", "f1"]


def test_who_vouches_again_has_changed_something(weights):
    model = Model()
    weights.vouch("f0", model)
    before = weights.stamp()
    weights.vouch("f0", model)
    assert weights.stamp().fingerprint == "f0"
    assert weights.stamp() != before


def test_who_watches_over_a_model_knows_better_than_who_has_vouched_for_it(weights):
    model = Model()
    weights.vouch("f0", model)
    held = weights.hold("local:1", model)
    assert weights.stamp().fingerprint == "local:1"
    with pytest.raises(ValueError, match="this Model is watched over by a session"):
        weights.vouch("f0", model)
    with held.changing(lambda: "f1"), pytest.raises(ValueError, match="nobody else can vouch"):
        weights.vouch("f0", model)
    held.close()
    assert weights.stamp().fingerprint.startswith("local:"), "nobody has said that it is the same"
    weights.vouch("f2", model)
    assert weights.stamp().fingerprint == "f2"


def test_a_model_closed_while_it_changes_is_not_vouched_for(weights):
    model = Model()
    held = weights.hold("f0", model)
    with held.changing(lambda: "f1"):
        held.close()
        with pytest.raises(ValueError, match="watched over"):
            weights.vouch("f0", model)
    weights.vouch("f1", model)
    assert weights.stamp().fingerprint == "f1"


def test_several_models_that_are_vouched_for_have_a_name_that_nobody_knows():
    names, models = set(), (Model(), Model())
    for _ in range(2):
        weights = ProcessWeights()
        for model in models:
            weights.vouch("f0", model)
        names.add(weights.stamp().fingerprint)
    assert len(names) == 2
    assert all(name.startswith("several:") for name in names)


def test_a_model_that_was_vouched_for_and_is_gone_has_no_name(weights):
    model = Model()
    weights.vouch("f0", model)
    del model
    gc.collect()
    assert weights.stamp().fingerprint.startswith("local:")


def test_what_cannot_be_seen_to_go_is_not_vouched_for(weights):
    with pytest.raises(TypeError, match="weak reference"):
        weights.vouch("f0", {})
    assert weights.stamp().fingerprint.startswith("local:")


def test_withheld_is_also_what_was_vouched_for(weights):
    model = Model()
    weights.vouch("f0", model)
    with weights.withheld():
        assert weights.stamp() is None
    assert weights.stamp().fingerprint == "f0"


def test_closed_while_it_changes_it_has_no_name_until_then_and_none_that_is_known_after(weights):
    held = weights.hold("f0")
    with held.changing(lambda: "f1"):
        held.close()
        assert weights.stamp() is None
        other = weights.hold("g0")
        assert weights.stamp() is None
    other.close()
    assert weights.stamp().fingerprint not in ("f0", "f1", "g0")
    before = weights.stamp()
    held.settle("f1")
    assert weights.stamp() == before


def test_who_comes_after_a_process_has_other_stamps():
    one, other = ProcessWeights(), ProcessWeights()
    assert one.hold("f0") is not other.hold("f0")
    assert one.stamp().fingerprint == other.stamp().fingerprint == "f0"
    assert one.stamp() != other.stamp()


def test_a_forked_child_begins_anew():
    held = process_weights.hold("f0")
    try:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            held.settle("f1")
            stamp = process_weights.stamp()
            os.write(write, f"{stamp.fingerprint} {stamp.epoch}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        name, epoch = os.read(read, 200).decode().split()
    finally:
        held.close()
    assert name.startswith("local:")
    assert name != process_weights.stamp().fingerprint
    assert int(epoch) != process_weights.stamp().epoch
    os.close(read)
    os.close(write)


@pytest.mark.timeout(30)
def test_the_collector_may_find_a_forgotten_model_at_any_time(weights):
    class Session:
        def __init__(self):
            self.itself = self
            self.held = weights.hold("f0")
            weakref.finalize(self, self.held.close)

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            Session()
    finally:
        gc.set_threshold(*before)
        gc.collect()
    weights.hold("g0")
    assert weights.stamp() is not None


def test_what_is_read_holds_for_this_process():
    assert isinstance(process_weights.stamp(), WeightsStamp)
