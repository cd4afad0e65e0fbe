"""What a model computes with and no reload reaches, by each way to hold it."""

import functools
import types
import weakref
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

from vllm.config import CompilationConfig

from wtransfer_vllm.reach import MADE_ONCE, check_reach, find_unregistered
from wtransfer_vllm.reload import ReloadError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Slotted:
    __slots__ = ("head",)


def slotted(head):
    held = Slotted()
    held.head = head
    return held


def closure(head):
    return lambda states: head(states) + 1


def default(head):
    def apply(states, by=head):
        return by(states)

    return apply


def within_pooler(head):
    pooler = nn.Identity()
    pooler.head = head
    return {"embed": pooler}


HOLDS = {
    "dict": (lambda head: {"embed": head}, "held['embed']"),
    "ordered": (lambda head: OrderedDict(embed=head), "held['embed']"),
    "nested": (lambda head: [({"a": head},)], "held[0][0]['a']"),
    "deque": (lambda head: deque([head]), "held[0]"),
    "set": (lambda head: {head}, "held[0]"),
    "object": (lambda head: types.SimpleNamespace(head=head), "held.head"),
    "slots": (slotted, "held.head"),
    "bound method": (lambda head: head.forward, "held.forward"),
    "partial": (lambda head: functools.partial(nn.Module.__call__, head), "held()[0]"),
    "keyword": (lambda head: functools.partial(print, head=head), "held()['head']"),
    "closure": (closure, "held:head"),
    "default": (default, "held:apply"),
    # A module that registers it is itself in a plain dictionary.
    "pooler": (within_pooler, "held['embed'].head"),
}


@pytest.mark.parametrize("way", HOLDS)
def test_module_that_is_held_and_not_registered_is_found_with_the_way_to_it(way):
    model, head = Model(), nn.Linear(2, 2)
    hold, path = HOLDS[way]
    model.layer.held = hold(head)
    assert list(find_unregistered(model)) == [(f"layer.{path}", head)]


@pytest.mark.parametrize("way", HOLDS)
def test_module_that_is_registered_as_well_is_left_alone(way):
    model = Model()
    model.held = HOLDS[way][0](model.layer)
    assert list(find_unregistered(model)) == []


def test_module_without_tensors_computes_the_same_with_any_weights():
    model = Model()
    model.held = {"norm": nn.Identity(), "act": nn.Sequential(nn.ReLU())}
    assert list(find_unregistered(model)) == []


def test_module_whose_tensors_have_no_memory_computes_nothing():
    model = Model()
    model.held = {"head": nn.Linear(2, 2, device="meta")}
    assert list(find_unregistered(model)) == []


def test_buffers_count_as_tensors():
    model, head = Model(), nn.Module()
    head.register_buffer("scale", torch.ones(1))
    model.held = [head]
    assert list(find_unregistered(model)) == [("held[0]", head)]


def test_what_belongs_to_the_engine_is_not_entered():
    model, others = Model(), nn.Linear(2, 2)
    config = CompilationConfig()
    config.static_forward_context["draft"] = others
    model.config, model.weak = config, weakref.ref(others)
    model.module, model.kind = types, type(others)
    assert list(find_unregistered(model)) == []


def test_each_is_found_once_and_circles_end():
    model, head = Model(), nn.Linear(2, 2)
    circle = [head]
    circle.append(circle)
    model.held, model.again = circle, {"a": head, "self": model}
    assert [module for _, module in find_unregistered(model)] == [head]


def test_variable_of_a_closure_that_is_not_set_yet_holds_nothing():
    model = Model()

    def make():
        def apply():
            return late

        model.held = apply
        assert list(find_unregistered(model)) == []
        late = model.layer

    make()


@pytest.mark.parametrize("name", MADE_ONCE)
def test_copy_of_weights_that_a_layer_makes_once_is_refused_as_soon_as_it_is_there(name):
    model = Model()
    setattr(model.layer, name, None)
    check_reach(model)
    setattr(model.layer, name, torch.ones(1))
    with pytest.raises(ReloadError, match=f"Model takes no update: layer 'layer' keeps {name}, "):
        check_reach(model)


@pytest.mark.parametrize(
    ("kernel", "scale", "is_refused"),
    [
        ({"bmm1_scale": 0.5, "bmm2_scale": 1.0}, 2.0, True),
        ({"bmm1_scale": 0.5, "bmm2_scale": 1.0}, 1.0, False),
        ({"bmm1_scale": None}, 2.0, False),
        ({}, 2.0, False),
    ],
)
def test_scales_of_kv_that_a_kernel_has_taken_in_are_refused(kernel, scale, is_refused):
    model = Model()
    model.layer.impl = types.SimpleNamespace(**kernel)
    model.layer._q_scale_float, model.layer._k_scale_float = 1.0, scale
    if is_refused:
        with pytest.raises(ReloadError, match=r"layer 'layer' keeps impl\.bmm1_scale, "):
            check_reach(model)
    else:
        check_reach(model)
