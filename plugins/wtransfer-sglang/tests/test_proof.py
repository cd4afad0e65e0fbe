"""The proof finds the fault of a load, on small modules with loads that are wrong."""

import pytest
import torch
from torch import nn

from wtransfer_sglang.proof import LoadError, prove


class Method:
    """A quantisation method, as SGLang calls an object beside the layer."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.layer.method = Method()
        self.layer.method.scale = torch.ones(())
        self.layer.view = self.layer.weight.t()


def served(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def write(model, weights):
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])


def left_out(model, weights):
    write(model, {**weights, "head.weight": model.head.weight.data})


def in_part(model, weights):
    write(model, weights)
    model.head.weight.data[0, 0] = -model.head.weight.data[0, 0]


def replaced(model, weights):
    write(model, weights)
    model.head.weight = nn.Parameter(weights["head.weight"])


def packed(model, weights):
    write(model, weights)
    model.head.weight.data = weights["head.weight"].t().contiguous()


def gone(model, weights):
    write(model, weights)
    del model.head.weight


def raising(model, weights):
    write(model, {"layer.weight": weights["layer.weight"]})


def derived_anew(model, weights):
    write(model, weights)
    model.layer.method.packed = weights["layer.weight"].t().contiguous()


def buffer_written(model, weights):
    write(model, weights)
    model.angles.add_(1)


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (left_out, "layer 'head', 'weight': other bits than those that serve"),
        (in_part, "layer 'head', 'weight': other bits than those that serve"),
        (replaced, "layer 'head', 'weight': replaced, not written to"),
        (packed, "layer 'head', 'weight': replaced, not written to"),
        (gone, "1 of 3 parameters are gone"),
        (raising, "KeyError: 'layer.bias'"),
        (derived_anew, "layer 'layer.method', 'packed': a tensor that the first load had not"),
        (buffer_written, "layer '', 'angles': other bits than those that serve"),
    ],
)
def test_load_at_fault_is_refused_and_the_model_is_as_it_was(load, text):
    model = Model()
    weights, objects = served(model), dict(model.named_parameters())
    places = {name: each.data_ptr() for name, each in objects.items()}
    with pytest.raises(LoadError) as caught:
        prove(model, lambda: load(model, weights))
    assert text in str(caught.value)
    assert dict(model.named_parameters()) == objects
    assert {name: each.data_ptr() for name, each in objects.items()} == places
    assert all(torch.equal(each, weights[name]) for name, each in objects.items())
    assert torch.equal(model.angles, torch.arange(4.0))
    assert not hasattr(model.layer.method, "packed")


def test_load_that_gives_what_serves_is_proven_without_a_change():
    model = Model()
    weights = served(model)
    prove(model, lambda: write(model, weights))
    assert served(model).keys() == weights.keys()
    assert all(torch.equal(each, weights[name]) for name, each in served(model).items())


def test_tensor_made_of_the_weights_that_the_load_leaves_alone_is_refused():
    model = Model()
    model.layer.method.packed = model.layer.weight.detach().t().contiguous()
    weights = served(model)
    with pytest.raises(
        LoadError, match="'packed': whether it was made of the weights is not known"
    ):
        prove(model, lambda: write(model, weights))


def test_tied_parameters_are_one():
    model = Model()
    model.head.weight = model.layer.weight
    weights = served(model)
    prove(model, lambda: write(model, weights))
    assert model.head.weight is model.layer.weight
