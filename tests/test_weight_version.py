"""What this process computes with, by one name for all of its models."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import weakref

import pytest
import torch
from torch import nn

from wtransfer.errors import WTransferError
from wtransfer.weight_sync.identity import module_fingerprint
from wtransfer.weight_version import ProcessWeights, process_weights

F0, F1, F2 = ("0" * 32, "1" * 32, "2" * 32)
LOCAL, OTHER_LOCAL = ("local:" + digit * 32 for digit in "ab")


@pytest.fixture
def weights():
    return ProcessWeights()


def test_without_a_model_the_name_is_the_processs_own(weights):
    assert weights.version().fingerprint.startswith("local:")
    assert weights.version().fingerprint != ProcessWeights().version().fingerprint


def test_a_change_that_fails_is_a_change_all_the_same(weights):
    held = weights.hold("f0")
    before = weights.version()
    with pytest.raises(ZeroDivisionError), held.changing(lambda: "f0"):
        raise ZeroDivisionError
    assert weights.version().fingerprint == before.fingerprint
    assert weights.version() != before


def test_there_and_back_is_the_same_weights_and_another_version(weights):
    held = weights.hold("f0")
    before = weights.version()
    held.settle("f1")
    held.settle("f0")
    assert weights.version().fingerprint == before.fingerprint
    assert weights.version().epoch > before.epoch


def test_several_models_have_one_fingerprint_that_depends_on_which_model_holds_which(weights):
    one, other = weights.hold("f0"), weights.hold("g0")
    before = weights.version().fingerprint
    assert before.startswith("several:")
    one.settle("g0")
    other.settle("f0")
    assert weights.version().fingerprint.startswith("several:")
    assert weights.version().fingerprint != before
    one.settle("f0")
    other.settle("g0")
    assert weights.version().fingerprint == before


def test_no_other_process_knows_which_of_several_models_has_which_weights():
    names = set()
    for _ in range(2):
        made = ProcessWeights()
        made.hold("f0")
        made.hold("g0")
        names.add(made.version().fingerprint)
    assert len(names) == 2


def test_a_change_of_any_model_is_a_change_of_all(weights):
    weights.hold("f0")
    draft = weights.hold("g0")
    before = weights.version()
    with draft.changing(lambda: "g1"):
        assert weights.version() is None
    assert weights.version().fingerprint != before.fingerprint


def test_a_model_left_alone_is_not_taken_for_the_one_that_stays(weights):
    weights.hold("f0")
    names = set()
    for fingerprint in ("g0", "g1"):
        weights.hold(fingerprint).close()
        names.add(weights.version().fingerprint)
    assert "f0" not in names
    assert len(names) == 2


class Model:
    pass


def test_a_model_that_is_watched_over_again_is_known_by_its_weights(weights):
    model = Model()
    weights.hold("f0", model).close()
    assert weights.version().fingerprint.startswith("local:")
    weights.hold("f0", model)
    assert weights.version().fingerprint == "f0"


def test_a_model_that_is_gone_computes_nothing(weights):
    weights.hold("f0")
    draft = Model()
    weights.hold("g0", draft).close()
    assert weights.version().fingerprint.startswith("several:")
    before = weights.version().epoch
    del draft
    gc.collect()
    assert weights.version().fingerprint == "f0"
    assert weights.version().epoch > before


@pytest.mark.parametrize("way", ["watched", "vouched", "replaced"])
def test_end_of_a_model_runs_no_code_in_which_a_signal_handler_could_strike(
    weights, python_calls, way
):
    weights.hold("f0")
    draft = Model()
    if way == "watched":
        weights.hold("g0", draft).close()
    elif way == "vouched":
        weights.vouch_by_fingerprint(F1, draft)
    else:
        weights.weights_replaced(draft)
    assert weights.version().fingerprint.startswith("several:")
    with python_calls() as made:
        del draft
    assert made == []
    assert weights.version().fingerprint == "f0"


@pytest.mark.parametrize("strike_at", range(1, 12))
def test_handler_that_strikes_as_a_model_is_forgotten_leaves_its_name_no_longer(strike_at):
    weights, model, lines = ProcessWeights(), Model(), itertools.count(1)
    weights.vouch_by_fingerprint(F1, model)
    assert weights.version().fingerprint == F1
    del model

    def strike(frame, event, _argument):
        if frame.f_code.co_name not in ("version", "_forget_gone"):
            return None
        if event == "line" and next(lines) == strike_at:
            raise KeyboardInterrupt
        return strike

    before = sys.gettrace()
    sys.settrace(strike)
    with contextlib.suppress(KeyboardInterrupt):
        weights.version()
    sys.settrace(before)
    assert weights.version().fingerprint.startswith("local:")


def test_model_that_leaves_as_another_is_gone_never_shows_a_third_ones_name(weights, monkeypatch):
    model, vouched, gone = Model(), Model(), Model()
    held = weights.hold("f0", model)
    weights.vouch_by_fingerprint(F1, vouched)
    weights.vouch_by_fingerprint(F2, gone)
    del gone
    shown, show = [], weights._show

    def noted():
        show()
        shown.append(weights._version)

    monkeypatch.setattr(weights, "_show", noted)
    held.close()
    assert shown
    assert {each.fingerprint for each in shown} & {F1, "f0"} == set()


def test_model_at_the_place_of_one_that_is_gone_has_not_its_name(weights):
    for _ in range(50):
        gone = Model()
        weights.vouch_by_fingerprint(F1, gone)
        place = id(gone)
        del gone
        model = Model()
        if id(model) == place:
            weights.hold("g0", model)
            assert weights.version().fingerprint == "g0"
            return
    pytest.skip("no object came to the place of another")


def test_equal_models_that_are_vouched_for_have_one_name_and_others_have_another():
    names = []
    for weight in (1.0, 1.0, 2.0):
        weights, model = ProcessWeights(), nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(weight)
            model.bias.fill_(0)
        weights.vouch(model)
        names.append(weights.version().fingerprint)
        assert names[-1] == module_fingerprint(model)
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("args", [("step-7", nn.Linear(1, 1)), (F0, nn.Linear(1, 1)), ("step-7",)])
def test_a_label_is_refused_with_what_to_write_instead(weights, args):
    before = weights.version()
    with pytest.raises(TypeError) as raised:
        weights.vouch(*args)
    assert str(raised.value) == (
        "vouch() digests the model and takes no label: write process_weights.vouch(model); where "
        "the fingerprint of its weights is known, "
        "process_weights.vouch_by_fingerprint(fingerprint, model)"
    )
    assert weights.version() == before


@pytest.mark.parametrize(
    "label", ["step-7", "", F0[1:], F0 + "0", F0.replace("0", "A"), "local:", "several:" + F0, None]
)
def test_malformed_fingerprint_is_refused(weights, label):
    model, before = Model(), weights.version()
    with pytest.raises(ValueError, match="is no fingerprint: expected 32 hexadecimal digits"):
        weights.vouch_by_fingerprint(label, model)
    assert weights.version() == before
    vouch = weights.vouch_later(model)
    with pytest.raises(ValueError, match="is no fingerprint"):
        vouch.settle(label)
    assert weights.version() is None


def test_a_model_that_cannot_be_digested_has_no_name_that_others_have(weights):
    model = nn.Linear(1, 1)
    weights.vouch(model)
    known = weights.version().fingerprint
    model.weight = nn.Parameter(torch.ones(1, 1))
    model.weight.untyped_storage().resize_(0)
    with pytest.raises(WTransferError, match="weight"):
        weights.vouch(model)
    assert weights.version().fingerprint.startswith("local:")
    assert not known.startswith("local:")


def test_second_model_with_other_weights_is_not_vouched_for(weights):
    """Two engines in one process would find each other's KV cache: it has one name for both."""
    first, equal, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    equal.load_state_dict(first.state_dict())
    weights.vouch(first)
    shared = weights.version().fingerprint
    weights.vouch(equal)
    before = weights.version()
    assert before.fingerprint == shared, "whichever computes, it is with these weights"
    with pytest.raises(ValueError, match="run one engine per process"):
        weights.vouch(other)
    assert weights.version() != before
    del other
    gc.collect()
    # The model itself may be vouched for again.
    first.weight.data.fill_(1)
    equal.weight.data.fill_(1)
    del equal
    gc.collect()
    weights.vouch(first)


def test_refused_second_model_is_said_to_cost_the_first_its_shared_name(weights, caplog):
    """Either could compute what is kept from here on, and nothing says which does."""
    first, other = nn.Linear(2, 2), nn.Linear(2, 2)
    weights.vouch(first)
    shared = weights.version().fingerprint
    with pytest.raises(ValueError, match="the other model's too, has a name that no other process"):
        weights.vouch(other)
    assert "nothing is shared" in caplog.text
    assert weights.version().fingerprint != shared
    del other
    gc.collect()
    assert weights.version().fingerprint == shared


def test_vouching_again_is_a_change(weights):
    model = Model()
    weights.vouch_by_fingerprint(F0, model)
    before = weights.version()
    weights.vouch_by_fingerprint(F0, model)
    assert weights.version().fingerprint == F0
    assert weights.version() != before


def test_a_first_commit_that_is_taken_back_brings_the_vouched_name_back(weights):
    model = Model()
    weights.vouch_by_fingerprint(F0, model)
    held = weights.hold(LOCAL, model)
    held.settle(F1)
    held.settle(LOCAL)
    assert weights.version().fingerprint == F0


def test_nothing_can_be_vouched_for_that_a_session_watches_over(weights):
    model = Model()
    held = weights.hold(LOCAL, model)
    with pytest.raises(ValueError, match="this Model is watched over by a session"):
        weights.vouch_by_fingerprint(F0, model)
    with held.changing(lambda: F1), pytest.raises(ValueError, match="no other caller can vouch"):
        weights.vouch_by_fingerprint(F0, model)
    held.close()
    assert weights.version().fingerprint.startswith("local:"), "nobody has said that it is the same"
    weights.vouch_by_fingerprint(F2, model)
    assert weights.version().fingerprint == F2


def test_a_model_closed_while_it_changes_is_not_vouched_for(weights):
    model = Model()
    held = weights.hold(F0, model)
    with held.changing(lambda: F1):
        held.close()
        with pytest.raises(ValueError, match="watched over"):
            weights.vouch_by_fingerprint(F0, model)
    weights.vouch_by_fingerprint(F1, model)
    assert weights.version().fingerprint == F1


def test_model_without_weak_references_is_not_vouched_for(weights):
    before = weights.version()
    for vouch in (
        lambda: weights.vouch({}),
        lambda: weights.vouch_by_fingerprint(F0, {}),
        lambda: weights.weights_replaced({}),
    ):
        with pytest.raises(TypeError, match="weak reference"):
            vouch()
    assert weights.version() == before


def test_withheld_is_also_what_was_vouched_for(weights):
    model = Model()
    weights.vouch_by_fingerprint(F0, model)
    with weights.withheld():
        assert weights.version() is None
    assert weights.version().fingerprint == F0


def test_there_is_no_version_either_where_a_session_is_opened_meanwhile(weights):
    model = Model()
    vouch = weights.vouch_later(model)
    held = weights.hold(LOCAL, model)
    assert weights.version() is None
    vouch.settle(F0)
    assert weights.version().fingerprint == F0
    held.settle(F1)
    assert weights.version().fingerprint == F1


def commit(weights, model):
    weights.hold(LOCAL, model).settle(F1)


def lose(weights, model):
    held = weights.hold(LOCAL, model)
    held.settle(OTHER_LOCAL)


def replace(weights, model):
    weights.weights_replaced(model)


def replace_in_a_session(weights, model):
    weights.hold(LOCAL, model)
    weights.weights_replaced(model)


def vouch_anew(weights, model):
    weights.vouch_by_fingerprint(F1, model)


def close_a_session(weights, model):
    weights.hold(LOCAL, model).close()


@pytest.mark.parametrize(
    ("meanwhile", "is_forgotten"),
    [
        (commit, False),
        (lose, False),
        (replace, True),
        (replace_in_a_session, False),
        (vouch_anew, True),
        (close_a_session, True),
    ],
)
def test_a_fingerprint_that_comes_too_late_is_void(weights, meanwhile, is_forgotten):
    model = Model()
    vouch = weights.vouch_later(model)
    meanwhile(weights, model)
    before = weights.version()
    assert before.fingerprint != F0
    vouch.settle(F0)
    assert weights.version().fingerprint == before.fingerprint
    if is_forgotten:
        assert weights.version() == before


def test_an_announced_fingerprint_that_comes_during_a_first_commit_is_the_name_after_its_failure(
    weights,
):
    model = Model()
    vouch = weights.vouch_later(model)
    held = weights.hold(LOCAL, model)
    with held.changing(lambda: LOCAL):
        vouch.settle(F0)
        assert weights.version() is None
    assert weights.version().fingerprint == F0


def test_of_a_model_that_is_gone_nothing_is_announced_any_more(weights):
    model = Model()
    vouch = weights.vouch_later(model)
    del model
    gc.collect()
    before = weights.version()
    assert before.fingerprint.startswith("local:")
    vouch.settle(F0)
    assert weights.version() == before


@pytest.mark.parametrize("fingerprint", [None, F0])
def test_replaced_weights_have_a_new_local_fingerprint_each_time(weights, fingerprint):
    model = Model()
    if fingerprint is not None:
        weights.vouch_by_fingerprint(fingerprint, model)
    names = [weights.version().fingerprint]
    for _ in range(2):
        weights.weights_replaced(model)
        names.append(weights.version().fingerprint)
    assert len(set(names)) == 3
    assert all(name.startswith("local:") for name in names[1:])


@pytest.mark.parametrize("held_as", [LOCAL, F1])
def test_weights_replaced_behind_a_session_have_a_new_name_until_its_next_commit(weights, held_as):
    model = Model()
    weights.vouch_by_fingerprint(F0, model)
    held = weights.hold(LOCAL, model)
    held.settle(held_as)
    before = weights.version().fingerprint
    weights.weights_replaced(model)
    assert weights.version().fingerprint.startswith("local:")
    assert weights.version().fingerprint not in (before, LOCAL)
    with held.changing(lambda: F2):
        weights.weights_replaced(model)
        assert weights.version() is None
    assert weights.version().fingerprint == F2


def test_closed_while_it_changes_it_has_no_name_until_then_and_none_that_is_known_after(weights):
    held = weights.hold("f0")
    with held.changing(lambda: "f1"):
        held.close()
        assert weights.version() is None
        other = weights.hold("g0")
        assert weights.version() is None
    other.close()
    assert weights.version().fingerprint not in ("f0", "f1", "g0")
    before = weights.version()
    held.settle("f1")
    assert weights.version() == before


def test_versions_of_two_processes_with_one_fingerprint_differ():
    one, other = ProcessWeights(), ProcessWeights()
    assert one.hold("f0") is not other.hold("f0")
    assert one.version().fingerprint == other.version().fingerprint == "f0"
    assert one.version() != other.version()


def test_a_forked_child_begins_anew():
    held = process_weights.hold("f0")
    try:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            held.settle("f1")
            version = process_weights.version()
            os.write(write, f"{version.fingerprint} {version.epoch}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        name, epoch = os.read(read, 200).decode().split()
    finally:
        held.close()
    assert name.startswith("local:")
    assert name != process_weights.version().fingerprint
    assert int(epoch) != process_weights.version().epoch
    os.close(read)
    os.close(write)


@pytest.mark.timeout(30)
def test_the_collector_may_find_a_forgotten_model_at_any_time(weights):
    class Session:
        def __init__(self):
            self.itself = self
            self.held = weights.hold("f0")
            weakref.finalize(self, self.held.close)

    models = [Model() for _ in range(20)]
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            Session()
            weights.vouch_by_fingerprint(F0, models[0])
            weights.hold(LOCAL, models[0]).close()
            vouch = weights.vouch_later(models[1])
            forgotten = Model()
            forgotten.itself = forgotten
            weights.weights_replaced(forgotten)
            del forgotten
            vouch.settle(F1)
    finally:
        gc.set_threshold(*before)
        gc.collect()
    weights.hold("g0")
    assert weights.version() is not None
