"""Round after round: what is remembered of the last one never decides what this one brings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wtransfer.testing.contents import contents


def many():
    """Return small tensors of several dtypes and shapes, some empty, and one with huge pages."""
    torch.manual_seed(0)
    return {
        **{f"norm.{i}": torch.randn(64 + i).bfloat16() for i in range(600)},
        "large": torch.randn(1024, 1024),
        **{f"scale.{i}": torch.randn(3, i % 5) for i in range(300)},
        "step": torch.tensor(0),
    }


def test_a_trainer_that_changes_its_tensors_is_followed_by_models_that_do(fleet, commit):
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


def test_bytes_sent_to_a_worker_in_a_round_do_not_grow_with_the_number_of_tensors(fleet, sent):
    def nbytes(num_tensors):
        made = fleet({f"norm.{i}": torch.ones(2) for i in range(num_tensors)}, engine="shm")
        for _ in range(2):
            made.join()
        assert made.publish("v1").ok
        sent.clear()
        made.source["norm.1"].add_(1)
        assert made.publish("v2").ok
        assert {name for name, _, _ in sent} == {"worker-0", "worker-1"}
        return sum(size for _, _, size in sent) / 2

    # A greater number takes more bytes where it is written.
    assert nbytes(2000) - nbytes(2) < 8
