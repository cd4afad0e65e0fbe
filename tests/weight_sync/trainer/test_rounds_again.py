"""Round after round: what is remembered of the last one never decides what this one brings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wtransfer.errors import SchemaError
from wtransfer.testing.contents import contents
from wtransfer.testing.fleet import Fleet


@pytest.fixture(params=["adopt", "copy"])
def commit(request):
    return request.param


@pytest.fixture(params=[1, 0], ids=["none-empty", "some-empty"])
def many(request):
    """Makes small tensors of several dtypes and shapes, and one that takes huge pages.

    Where some are empty, they are handled one by one.
    """

    def make():
        torch.manual_seed(0)
        return {
            **{f"norm.{i}": torch.randn(64 + i).bfloat16() for i in range(600)},
            "large": torch.randn(1024, 1024),
            **{f"scale.{i}": torch.randn(3, request.param + i % 5) for i in range(300)},
            "step": torch.tensor(0),
        }

    return make


def step_on(tensors):
    for each in tensors.values():
        each.add_(1)


def test_many_tensors_arrive_in_every_round(fleet, commit, many):
    made = fleet(many(), engine="shm")
    member = made.join(commit=commit)
    for number in range(5):
        step_on(made.source)
        assert made.publish(f"v{number}").ok
        assert contents(member.model) == contents(made.source)


def replace(tensors):
    tensors["norm.1"] = torch.zeros_like(tensors["norm.1"])


def repoint(tensors):
    tensors["norm.1"].data = torch.zeros_like(tensors["norm.1"])


def set_elsewhere(tensors):
    tensors["norm.1"].set_(torch.zeros_like(tensors["norm.1"]))


def onto_a_flat_buffer(tensors):
    flat = torch.zeros(4096)
    for number in range(2, 5):
        name = f"scale.{number}"
        shape = tensors[name].shape
        tensors[name] = flat[100 * number :][: shape.numel()].view(shape)


def turn(tensors):
    tensors["large"].data = tensors["large"].data.t()


def write(tensors):
    step_on(tensors)


def view(tensors):
    tensors["norm.2"] = tensors["norm.2"].view(-1)


@pytest.mark.parametrize(
    "change",
    [
        onto_a_flat_buffer,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (replace, repoint, set_elsewhere, turn, write, view)
        ),
    ],
)
def test_what_a_worker_did_to_its_tensors_between_rounds_is_seen(fleet, commit, many, change):
    made = fleet(many(), engine="shm")
    member = made.join(commit=commit)
    for number in range(6):
        if number in (2, 3):
            change(member.model)
        step_on(made.source)
        assert made.publish(f"v{number}").ok
        assert contents(member.model) == contents(made.source)


def test_a_tensor_that_no_longer_fits_is_refused_in_the_next_round_and_fits_again(
    fleet, commit, many
):
    made = fleet(many(), engine="shm")
    member = made.join(commit=commit)
    assert made.publish("v1").ok
    before, own = contents(member.model), member.model["norm.1"]
    others = [
        (torch.zeros(7, dtype=torch.bfloat16), r"norm\.1: wanted bfloat16 \[7\]"),
        (own.detach().view(5, 13), r"norm\.1: wanted bfloat16 \[5, 13\]"),
        (own.detach().view(torch.int16), r"norm\.1: wanted int16 \[65\]"),
    ]
    step_on(made.source)
    for other, wanted in others * 2:
        member.model["norm.1"] = other
        with pytest.raises(SchemaError, match=wanted):
            made.publish("v2")
    member.model["norm.1"] = own
    assert contents(member.model) == before
    assert made.publish("v3").ok
    assert contents(member.model) == contents(made.source)


def test_names_that_a_worker_ties_or_parts_between_rounds_stay_as_it_left_them(fleet, commit):
    made = fleet({"a": torch.ones(4), "b": torch.ones(4)}, engine="shm")
    member = made.join(commit=commit)
    assert made.publish("v1").ok
    member.model["b"] = member.model["a"].detach()
    step_on(made.source)
    assert made.publish("v2").ok
    assert contents(member.model) == contents(made.source)
    made.source["b"].add_(1)
    with pytest.raises(SchemaError, match="'a' and 'b' are one tensor in the target"):
        made.publish("v3")
    member.model["b"] = member.model["b"].clone()
    assert made.publish("v4").ok
    assert contents(member.model) == contents(made.source)


def test_a_trainer_that_changes_its_tensors_is_followed_by_models_that_do(fleet, commit, many):
    made = fleet(many(), engine="shm")
    member = made.join(commit=commit)
    assert made.publish("v1").ok
    for number, numel in enumerate((9, 100_000, 9)):
        for tensors in (made.source, member.model):
            tensors["norm.7"] = torch.full((numel,), float(number))
            tensors[f"new.{number}"] = torch.full((2,), 5.0)
            del tensors[f"scale.{number}"]
        made.source["norm.7"].add_(1)
        assert made.publish(f"v2.{number}").ok
        assert contents(member.model) == contents(made.source)


@pytest.mark.parametrize("change", ["data", "assign"])
def test_a_modules_parameters_may_be_replaced_on_both_sides(fleet, commit, change):
    trained, serving = nn.Linear(8, 8), nn.Linear(8, 8)
    made = fleet(trained, engine="shm")
    made.join(serving, commit=commit)
    for number in range(4):
        for module in (trained, serving):
            values = {name: torch.randn_like(each) for name, each in module.state_dict().items()}
            if change == "assign":
                module.load_state_dict(values, assign=True)
            else:
                module.weight.data, module.bias.data = values["weight"], values["bias"]
        assert made.publish(f"v{number}").ok
        assert contents(serving.state_dict()) == contents(trained.state_dict())


@pytest.mark.slow
def test_a_worker_that_comes_back_and_one_that_comes_late_get_everything(fleet, commit, many):
    made = fleet(many(), engine="shm")
    member = made.join(commit=commit)
    assert made.publish("v1").ok
    made.leave(member)
    for number in range(2, 4):
        late = made.join(commit=commit)
        again = made.join(member.model, commit=commit)
        step_on(made.source)
        assert made.publish(f"v{number}").ok
        assert contents(again.model) == contents(late.model) == contents(made.source)
        made.leave(again)


@pytest.mark.slow
def test_two_publishers_in_turn_are_told_apart(fleet, commit, many):
    made = fleet(many(), engine="shm")
    member = made.join(commit=commit)
    # The same tensors in another order: equal in every piece, different in every place.
    others = dict(reversed(many().items()))
    with Fleet(others, engine="shm", deadline_s=5.0) as other:
        other.members.append(member)
        for number in range(3):
            for each, before in ((made, other), (other, made)):
                publisher = each.publisher
                if member.session.publisher_at(publisher.address) is None:
                    member.session.leave(before.publisher.address)
                    member.session.join(publisher.address, token=publisher.token)
                    publisher.wait_for_workers(1, timeout_s=5.0)
                step_on(each.source)
                assert each.publish(f"v{number}").ok
                assert contents(member.model) == contents(each.source)
        other.members.clear()
        member.session.leave(other.publisher.address)
