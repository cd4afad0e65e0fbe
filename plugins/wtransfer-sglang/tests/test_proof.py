"""The proof finds the fault of a load, on small modules with loads that are wrong."""

import pytest
import torch
from torch import nn

from wtransfer_sglang.proof import LoadError, ServedWeightsError, note_built, prove


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
        self.layer.kinds = [list[int], torch.arange(3)]
        note_built(self)


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


def packed_of(weights):
    return weights["layer.weight"].t().contiguous()


def as_buffer(model, packed):
    model.layer.register_buffer("packed", packed, persistent=False)


def in_list(model, packed):
    model.layer.method.parts = [packed]


def in_dict(model, packed):
    model.layer.parts = {"packed": (packed,)}


def as_integers(model, packed):
    model.layer.packed = (packed * 10).to(torch.int8)


def as_scalar(model, packed):
    model.layer.packed = packed.abs().max()


def beside_a_constant(model, packed):
    model.layer.kinds.append(packed)


@pytest.mark.parametrize(
    "put", [as_buffer, in_list, in_dict, as_integers, as_scalar, beside_a_constant]
)
def test_made_tensor_that_the_load_leaves_alone_is_found_wherever_it_is(put):
    model = Model()
    weights = served(model)
    put(model, packed_of(weights))
    with pytest.raises(LoadError, match="whether it was made of the weights is not known"):
        prove(model, lambda: write(model, weights))


@pytest.mark.parametrize("put", [as_buffer, in_list, in_dict, beside_a_constant])
def test_made_tensor_that_each_load_renews_in_place_is_no_fault(put):
    """As SGLang's multi-head latent attention does with what it absorbs of ``kv_b_proj``."""
    model = Model()
    weights = served(model)
    packed = packed_of(weights)
    put(model, packed)
    place = packed.data_ptr()

    def load():
        write(model, weights)
        packed.copy_(model.layer.weight.t())

    prove(model, load)
    assert packed.data_ptr() == place
    assert torch.equal(packed, packed_of(weights))

    def load_another():
        write(model, weights)
        packed.copy_(model.layer.weight)

    with pytest.raises(LoadError, match="other bits than those that serve"):
        prove(model, load_another)
    assert torch.equal(packed, packed_of(weights))


def test_made_tensor_that_the_load_puts_elsewhere_is_a_fault_and_is_put_back():
    model = Model()
    weights = served(model)
    parts = model.parts = [packed_of(weights)]
    before = parts[0]

    def load():
        write(model, weights)
        parts[0] = packed_of(weights)

    with pytest.raises(LoadError, match=r"layer '\.parts', '0': replaced, not written to"):
        prove(model, load)
    assert model.parts is parts
    assert parts[0] is before


def test_table_that_was_cast_or_has_got_longer_since_the_model_was_built_is_no_fault():
    model = Model()
    weights = served(model)
    model.angles = torch.arange(9.0)
    prove(model, lambda: write(model, weights))
    model.angles = torch.arange(4.0).to(torch.bfloat16)
    model.cast = (torch.arange(4.0), torch.arange(4.0).half())
    prove(model, lambda: write(model, weights))
    model.angles = torch.arange(1.0, 9.0)
    with pytest.raises(LoadError, match="'angles': whether it was made of the weights"):
        prove(model, lambda: write(model, weights))


def no_memory():
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("parameter", "load", "text"),
    [
        (torch.empty(2, device="meta"), lambda: None, "could not be proven: "),
        (torch.ones(2).to_sparse(), lambda: None, "could not be proven: "),
        (torch.ones(2), no_memory, "could not be proven: MemoryError: no room"),
    ],
    ids=["meta", "sparse", "memory"],
)
def test_proof_that_fails_by_itself_refuses_updates_and_does_not_blame_the_load(
    parameter, load, text
):
    model = Model()
    weights = served(model)
    model.odd = nn.Parameter(parameter, requires_grad=False)
    places = [each.data_ptr() for each in model.layer.parameters()]
    with pytest.raises(LoadError, match=text) as caught:
        prove(model, load)
    assert "gives others" not in str(caught.value)
    assert [each.data_ptr() for each in model.layer.parameters()] == places
    assert torch.equal(model.layer.weight, weights["layer.weight"])


def test_load_that_changes_what_serves_by_a_view_is_told_as_that():
    model = Model()
    weights = served(model)

    def load():
        write(model, weights)
        model.layer.view.data.zero_()

    with pytest.raises(ServedWeightsError, match=r"layer 'layer', 'weight'\. They are"):
        prove(model, load)


def test_tied_parameters_are_one():
    model = Model()
    model.head.weight = model.layer.weight
    weights = served(model)
    prove(model, lambda: write(model, weights))
    assert model.head.weight is model.layer.weight


@pytest.mark.parametrize("layer", ["", "layer"])
def test_module_that_is_reached_and_not_registered_is_refused_by_the_way_to_it(layer):
    model = Model()
    model.get_submodule(layer).held = {"embed": nn.Linear(4, 2)}
    weights = served(model)
    begun = []
    with pytest.raises(LoadError) as caught:
        prove(model, lambda: begun.append(write(model, weights)))
    assert f"it computes with {f'{layer}.held.embed'.lstrip('.')} (" in str(caught.value)
    assert begun == [], "nothing is loaded"
