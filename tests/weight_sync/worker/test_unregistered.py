"""Modules that a model computes with and has not registered, by each way to hold them."""

import functools
import logging
import types
import weakref
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn

from wtransfer.weight_sync.worker.unregistered import unregistered


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Wrapper:
    """An object with a slot."""

    __slots__ = ("head", "never_set")

    def __init__(self, head):
        self.head = head

    def score(self, states):
        return self.head(states)


def in_closure(head):
    def score(states):
        return head(states)

    return score


def in_default(head):
    def score(states, by=head):
        return by(states)

    return score


def in_keyword_default(head):
    def score(states, *, by=head):
        return by(states)

    return score


def in_attribute_of_function(head):
    def score(states):
        return states

    score.head = head
    return score


def in_pooler(head):
    """Return what poolers by task are: modules in a plain dictionary, of which one registers it."""
    pooler = nn.Identity()
    pooler.head = head
    return {"embed": pooler}


class Lazy(dict):
    """Makes its values as they are asked for."""

    def items(self):
        raise AssertionError("asked for")


HOLDS = {
    "dict": (lambda head: {"embed": head}, "held.embed"),
    "ordered": (lambda head: OrderedDict(embed=head), "held.embed"),
    "lazy": (lambda head: Lazy(embed=head), "held.embed"),
    "read only": (lambda head: types.MappingProxyType({"embed": head}), "held.embed"),
    "nested": (lambda head: [(head,)], "held.0.0"),
    "deque": (lambda head: deque([head]), "held.0"),
    "set": (lambda head: {head}, "held.0"),
    "object": (lambda head: types.SimpleNamespace(head=head), "held.head"),
    "slot": (lambda head: Wrapper([head]), "held.head.0"),
    "closure": (in_closure, "held.head"),
    "default": (in_default, "held.defaults.0"),
    "keyword default": (in_keyword_default, "held.kwdefaults.by"),
    "attribute of a function": (in_attribute_of_function, "held.head"),
    "partial": (lambda head: functools.partial(torch.add, head), "held.args.0"),
    "keyword": (lambda head: functools.partial(torch.add, other=head), "held.keywords.other"),
    "method": (lambda head: head.forward, "held.__self__"),
    "method of an object": (lambda head: Wrapper(head).score, "held.__self__.head"),
    "pooler": (in_pooler, "held.embed.head"),
    "whole": (lambda head: nn.Sequential(head).forward, "held.__self__.0"),
}


@pytest.mark.parametrize("way", HOLDS)
def test_module_that_is_held_and_not_registered_is_found_with_the_way_to_it(way):
    model = Model()
    hold, path = HOLDS[way]
    model.layer.__dict__["held"] = hold(nn.Linear(2, 2))
    assert list(unregistered(model)) == [f"layer.{path} (Linear)"]


@pytest.mark.parametrize("way", HOLDS)
def test_module_that_is_registered_as_well_is_left_alone(way):
    model = Model()
    model.__dict__["held"] = HOLDS[way][0](model.layer)
    assert list(unregistered(model)) == []


@pytest.mark.parametrize(
    "held",
    [
        {"norm": nn.Identity(), "act": nn.Sequential(nn.ReLU())},
        {"head": nn.Linear(2, 2, device="meta")},
        nn.Linear,
        torch,
        logging.getLogger(),
    ],
    ids=["no tensors", "no memory", "class", "package", "logger"],
)
def test_what_does_not_compute_with_weights_is_left_alone(held):
    model = Model()
    model.held = held
    assert list(unregistered(model)) == []


class Odd:
    """Raises wherever it is asked."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __eq__(self, other):
        raise RuntimeError("eq")

    __hash__ = None

    def __str__(self):
        raise RuntimeError("str")

    @property
    def __dict__(self):
        raise RuntimeError("dict")


class OddKey(Odd):
    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return 1


class OddList(list):
    def __iter__(self):
        raise RuntimeError("iter")


class Unfinished(nn.Module):
    def __init__(self):
        pass


def table_of_positions():
    table = nn.Module()
    table.register_buffer("cos", torch.ones(2), persistent=False)
    return table


ODD = {
    "odd": Odd,
    "key": lambda: {OddKey(): 1},
    "list": lambda: OddList([1]),
    "unfinished": Unfinished,
    "scripted": lambda: torch.jit.script(nn.Linear(2, 2)),
    "traced": lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
    "positions": lambda: [table_of_positions()],
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_odd_objects_are_looked_at_without_their_code(name):
    model, held = Model(), ODD[name]()
    model.__dict__["held"] = held
    assert list(unregistered(model)) == []
    model.__dict__["head"] = [held, nn.Linear(2, 2)]
    assert list(unregistered(model)) == ["head.1 (Linear)"]


@pytest.mark.parametrize("name", ["scale", "buffer"])
def test_tensor_beside_the_parameters_is_enough(name):
    model, head = Model(), nn.SiLU()
    if name == "buffer":
        head.register_buffer(name, torch.ones(1))
    else:
        head.scale = torch.ones(1)
    model.held = [head]
    assert list(unregistered(model)) == ["held.0 (SiLU)"]


def test_attribute_of_a_parameter_is_reached():
    model = Model()
    model.layer.weight.weight_loader = nn.Linear(2, 2).forward
    assert list(unregistered(model)) == ["layer.weight.weight_loader.__self__ (Linear)"]


@pytest.mark.parametrize("is_alive", [True, False])
def test_weak_references_are_not_followed(is_alive):
    model, head = Model(), nn.Linear(2, 2)
    model.held = [weakref.ref(head), weakref.proxy(head)]
    if not is_alive:
        del head
    assert list(unregistered(model)) == []


class Engine:
    """Holds more than one model."""

    def __init__(self, other):
        self.other = other


class OwnEngine(Engine):
    """One of a user's own."""


@pytest.mark.parametrize("kind", [Engine, OwnEngine])
def test_objects_of_the_serving_engine_are_not_entered(kind):
    model = Model()
    model.held = kind(nn.Linear(2, 2))
    assert list(unregistered(model)) == ["held.other (Linear)"]
    for name in (__name__, f"{__name__}.Engine"):
        assert list(unregistered(model, (name,))) == []
    assert list(unregistered(model, (f"{__name__}.Eng",))) == ["held.other (Linear)"]


def test_each_is_found_once_and_circles_end():
    model, head = Model(), nn.Linear(2, 2)
    circle = [head]
    circle.append(circle)
    model.held, model.again = circle, {"a": head, "model": model}
    assert list(unregistered(model)) == ["held.0 (Linear)"]


def test_variable_of_a_closure_that_is_not_set_yet_holds_nothing():
    model = Model()

    def make():
        def apply():
            return late

        model.held = apply
        assert list(unregistered(model)) == []
        late = model.layer

    make()
