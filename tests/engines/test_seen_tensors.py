"""A source shows all of its tensors with its metadata, so that each is looked at but once."""

from __future__ import annotations

import gc
import weakref
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn

from wtransfer.engines.places import Places
from wtransfer.errors import RoundAbortedError, SourceError
from wtransfer.testing.contents import contents
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.sharded import ShardedSource
from wtransfer.weight_sync.trainer.source import ModuleSource, StateDictSource, look_at

NUMBER = 700
"""More than are looked at together."""


@pytest.fixture
def tensors():
    made = {f"t{number}": torch.full((4,), float(number)) for number in range(NUMBER)}
    return {**made, "large": torch.arange(float(1 << 18))}


@pytest.fixture
def source(tensors):
    """Of tensors that were looked at before."""
    found = DigestingSource(ShardedSource(tensors))
    found.plan("before")
    drain(found)
    return found


def drain(source):
    """Copy everything, and return it by name."""
    sizes = [meta.nbytes for meta in source.metadata]
    stops = np.cumsum(sizes).tolist()
    starts = [0, *stops[:-1]]
    memory = np.zeros(sum(sizes), np.uint8)
    numbers = {meta.name: number for number, meta in enumerate(source.metadata)}
    *_, last = source.copy_into(Places(memory, numbers, starts, stops))
    assert last == len(sizes)
    rows = zip(source.metadata, starts, stops, strict=True)
    return {m.name: torch.from_numpy(memory[a:b]).view(m.dtype).view(m.shape) for m, a, b in rows}


def test_tensors_are_shown_once_their_metadata_is_known(tensors):
    source = StateDictSource(tensors)
    assert look_at(source)[1] is None
    metadata, found = look_at(source)
    assert [meta.name for meta in metadata] == list(tensors)
    assert all(a is b for a, b in zip(found.tensors, tensors.values(), strict=True))
    assert found.memory.addresses == [each.data_ptr() for each in tensors.values()]
    assert all(a is b for a, b in zip(metadata, source.metadata, strict=True))


@pytest.mark.parametrize(
    "wrap", [StateDictSource, ShardedSource, lambda t: ModuleSource(module(t))]
)
def test_every_source_of_ours_shows_them(tensors, wrap):
    source = wrap(tensors)
    assert look_at(source)[1] is None
    assert look_at(source)[1] is not None


def module(tensors):
    return nn.ParameterDict({name: nn.Parameter(each) for name, each in tensors.items()})


def tie(tensors):
    tensors["t1"] = tensors["t0"]


def empty(tensors):
    tensors["t1"] = torch.zeros(0)


def turn(tensors):
    tensors["t1"] = torch.zeros(2, 3).t()


def meta(tensors):
    tensors["t1"] = torch.zeros(4, device="meta")


@pytest.mark.parametrize("change", [tie, empty, turn, meta])
def test_what_takes_a_closer_look_is_not_shown(tensors, change):
    change(tensors)
    source = StateDictSource(tensors)
    assert [look_at(source)[1] for _ in range(3)] == [None] * 3


def test_a_source_that_becomes_empty_has_nothing_to_show_of_what_it_had(tensors):
    tensors["t1"] = tensors["t1"].as_subclass(type("Own", (torch.Tensor,), {}))
    source = DigestingSource(ShardedSource(tensors))
    for _ in range(2):
        source.plan()
        assert len(drain(source)) == NUMBER + 1
    tensors.clear()
    assert source.plan().outline.names == []
    assert source.digests() == []


class Doubled(StateDictSource):
    """Yields other tensors than it was made of."""

    def iter_full(self):
        return iter([(name, each * 2) for name, each in super().iter_full()])


@pytest.mark.parametrize("wrap", [lambda source: source, ShardedSource])
def test_a_class_with_passes_of_its_own_is_asked_for_them(tensors, wrap):
    source = DigestingSource(wrap(Doubled(tensors)))
    for _ in range(2):
        source.plan()
        assert contents(drain(source)) == contents({n: t * 2 for n, t in tensors.items()})


def test_passes_that_were_put_in_the_place_of_ours_are_made(tensors):
    inner = StateDictSource(tensors)
    inner.iter_full = lambda: iter([(name, each * 2) for name, each in tensors.items()])
    source = DigestingSource(ShardedSource(inner))
    for _ in range(3):
        source.plan()
        assert contents(drain(source)) == contents({n: t * 2 for n, t in tensors.items()})


def test_what_was_shown_is_what_is_sent(tensors, source):
    for value in (1, 2):
        for each in tensors.values():
            each.fill_(value)
        source.plan()
        assert contents(drain(source)) == contents(tensors)
        assert source.digests() == [digest(each) for each in tensors.values()]


def test_no_pass_is_made_over_what_was_shown(tensors, source, monkeypatch):
    def iter_full(_):
        raise AssertionError

    source.plan()
    monkeypatch.setattr(ShardedSource, "iter_full", iter_full)
    assert contents(drain(source)) == contents(tensors)


def test_a_second_pass_of_a_round_reads_anew(tensors, source):
    source.plan()
    drain(source)
    tensors["t5"].add_(1)
    with pytest.raises(SourceError, match="'t5' had other bytes in a second pass") as caught:
        drain(source)
    assert caught.value.piece == "t5"


@pytest.mark.parametrize("name", ["t5", "large"])
def test_memory_that_is_freed_after_it_was_shown_is_not_read(tensors, source, name):
    # What was read as an array once keeps its size.
    tensors[name] = tensors[name].clone()
    source.plan()
    tensors[name].untyped_storage().resize_(0)
    with pytest.raises(SourceError, match=f"'{name}' has less memory than its shape") as caught:
        drain(source)
    assert caught.value.piece == name


@pytest.mark.parametrize("name", ["t5", "large"])
def test_memory_that_moves_after_it_was_shown_is_read_where_it_is(tensors, source, name):
    tensors[name] = tensors[name].clone()
    source.plan()
    tensors[name].untyped_storage().resize_(1 << 22)
    tensors[name].fill_(7)
    assert contents(drain(source)) == contents(tensors)


@pytest.mark.slow
@pytest.mark.parametrize("shift", range(0, 4 << 20, 1 << 19))
def test_memory_that_was_given_up_and_taken_anew_around_it_is_not_read_in_its_place(shift):
    """A trainer that frees and gathers between plan and transfer has other bytes at the address."""
    before = torch.zeros(shift + 64, dtype=torch.uint8)
    tensors = {"t": torch.zeros(1 << 20, dtype=torch.uint8), "u": torch.zeros(4)}
    source = DigestingSource(StateDictSource(tensors))
    source.plan()
    source.plan()
    storage = tensors["t"].untyped_storage()
    storage.resize_(0)
    del before
    storage.resize_(8 << 20)
    tensors["t"].random_(0, 255)
    assert contents(drain(source)) == contents(tensors)


class Slow(UserDict):
    """A mapping in which something happens while it is read."""

    def __init__(self, tensors, meanwhile):
        super().__init__(tensors)
        self.meanwhile = meanwhile

    def keys(self):
        self.meanwhile()
        return super().keys()


def test_of_a_round_that_ended_while_its_metadata_was_read_nothing_is_kept(tensors):
    slow = Slow(tensors, lambda: None)
    source = DigestingSource(StateDictSource(slow))
    source.plan()
    slow.meanwhile = lambda: source.stop("for a test")
    source.begin("next")
    with pytest.raises(RoundAbortedError, match="for a test"):
        source.read()
    kept = weakref.ref(tensors["large"])
    del tensors["large"], slow["large"]
    gc.collect()
    assert kept() is None


def test_an_ended_round_goes_on_with_nothing_of_it(source):
    source.plan()
    source.stop("for a test")
    with pytest.raises(RoundAbortedError, match="for a test"):
        drain(source)


ENDS = {
    "the next plan": lambda source: source.plan(),
    "a pass": drain,
    "another pass": lambda source: list(source.iter_full()),
    "a failure": lambda source: source.stop("for a test"),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_was_shown_is_kept_up_to_the_end_of_the_round_only(tensors, source, end):
    source.plan()
    kept = weakref.ref(tensors["large"])
    storage = weakref.ref(tensors["large"].untyped_storage())
    tensors["large"] = torch.arange(float(1 << 18))
    assert kept() is not None
    ENDS[end](source)
    gc.collect()
    assert kept() is None
    assert storage() is None
