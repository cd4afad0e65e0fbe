"""Modules that a model computes with and has not registered, by each way to hold them."""

import functools
import types
import weakref
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

from vllm.config import CompilationConfig

from wtransfer_vllm.unregistered import find_unregistered


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
