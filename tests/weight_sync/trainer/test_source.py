"""Where weights come from, and what is refused there."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from wtransfer.testing.contents import contents
from wtransfer.weight_sync.trainer.source import ModuleSource, StateDictSource, as_source
from wtransfer.weights import ParamMeta

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3), "c": torch.empty(0, 2)}


def whole(source):
    return dict(source.iter_full())


# -- mappings and modules


@pytest.mark.parametrize("make", [StateDictSource, as_source])
def test_a_mapping_is_yielded_in_the_order_of_its_metadata(make):
    source = make(TENSORS)
    assert [meta.name for meta in source.metadata] == ["a", "b", "c"]
    assert source.metadata[0] == ParamMeta("a", torch.float32, (2, 3))
    assert contents(whole(source)) == contents(TENSORS)
    assert contents(dict(source.iter_local())) == contents(TENSORS)


def test_a_mapping_is_read_anew_in_every_round():
    tensors = {"a": torch.zeros(2)}
    source = StateDictSource(tensors)
    tensors["a"] = torch.ones(3)
    assert source.metadata[0].shape == (3,)
    assert contents(whole(source)) == contents(tensors)


# FAULTS 45
def test_a_module_sends_tied_weights_once_and_buffers_too():
    module = nn.Sequential(
        nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False)
    )
    module[2].weight = module[0].weight
    sent = whole(ModuleSource(module))
    expected = {name: t for name, t in module.state_dict().items() if name != "2.weight"}
    assert contents(sent) == contents(expected)
    assert "1.num_batches_tracked" in sent


class Proxy:
    """Passes on whatever it is asked for."""

    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)


def test_a_source_may_pass_attributes_on():
    proxy = Proxy(StateDictSource({"a": torch.ones(2)}))
    assert as_source(proxy) is proxy


def test_object_that_is_no_source_is_refused():
    with pytest.raises(TypeError, match="cannot publish a list: expected a torch module"):
        as_source([torch.zeros(1)])


@pytest.mark.parametrize(
    ("facts", "shape"),
    [
        ({}, None),
        ({"owners": (0, 2)}, (2,)),
        ({"owners": (0, 1, 2, 3), "mesh": types.SimpleNamespace(shape=torch.Size([2, 2]))}, (2, 2)),
    ],
    ids=["whole on every rank", "owners", "a mesh"],
)
def test_the_shape_of_a_mesh_is_told_as_plain_numbers(facts, shape):
    told = ParamMeta("a", torch.float32, (8, 8), **facts).mesh_shape
    assert told == shape
    assert type(told) in (tuple, type(None))
