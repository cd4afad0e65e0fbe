"""What is sent in a round is what the tensors are then, whatever was known of them before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wtransfer.engines.digesting import DigestingSource, Places
from wtransfer.engines.shm_trainer import SegmentLayout
from wtransfer.engines.source import StateDictSource
from wtransfer.transport.digests import digest


class Custom(StateDictSource):
    """A source whose metadata or passes a test replaces."""

    def __init__(self, tensors, read):
        super().__init__(tensors)
        self.read = read

    def iter_full(self):
        yield from self.read()


def packed(source):
    """What one pass copies into a piece of memory, by name."""
    layout = SegmentLayout(source.metadata)
    memory = np.full(layout.nbytes, 0xFF, dtype=np.uint8)
    found = {
        meta.name: bytes(place) for meta, place in source.iter_into(Places(memory, layout.spans))
    }
    assert found == {name: memory[span].tobytes() for name, span in layout.spans.items()}
    return found


def expected_bytes(tensors):
    return {
        name: each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, each in tensors.items()
    }


def test_metadata_and_manifest_are_kept_while_they_are_right():
    tensors = {"a": torch.zeros(2), "b": torch.ones(3)}
    source = DigestingSource(StateDictSource(tensors))
    manifest, metadata = source.plan(), source.metadata
    tensors["a"] = torch.full((2,), 7.0)
    tensors["b"].data = torch.full((3,), 8.0)
    assert source.plan() is manifest
    assert source.metadata is metadata
    assert packed(source) == expected_bytes(tensors)


def reshaped(tensors):
    tensors["a"].resize_(5)


def retyped(tensors):
    tensors["a"] = tensors["a"].double()


def added(tensors):
    tensors["new"] = torch.ones(4)


def removed(tensors):
    del tensors["b"]


def parted(tensors):
    tensors["tied"].data = torch.full((3,), 9.0)


def turned(tensors):
    tensors["square"].data = tensors["square"].data.t()


def replaced(tensors):
    tensors["a"] = torch.full((2,), 5.0)


def swapped(tensors):
    tensors["a"], tensors["c"] = tensors["c"], tensors["a"]


@pytest.mark.parametrize(
    "change", [reshaped, retyped, added, removed, parted, turned, replaced, swapped]
)
def test_whatever_became_of_the_tensors_is_sent_in_the_next_round(change):
    b = torch.ones(3)
    tensors = {
        "a": torch.zeros(2),
        "b": b,
        "c": torch.tensor([3.0, 4.0]),
        "square": torch.arange(9.0).view(3, 3),
        "tied": b.detach(),
    }
    source = DigestingSource(StateDictSource(tensors))
    for _ in range(2):
        source.plan()
        packed(source)
    change(tensors)
    manifest = source.plan()
    sent = packed(source)
    named = {name: tensors[name] for name in sent}
    assert sent == expected_bytes(named)
    assert set(tensors) - set(sent) <= {"tied"}
    assert source.digests() == [digest(each) for each in named.values()]
    assert [(p.name, p.shape) for p in manifest.pieces] == [
        (name, tuple(each.shape)) for name, each in named.items()
    ]
    if change is parted:
        assert "tied" in sent


def test_metadata_of_a_class_of_ones_own_is_read_anew():
    class Meta:
        def __init__(self, tensor):
            self.name, self.dtype, self.shape, self.digest = "a", tensor.dtype, tensor.shape, None

    tensors = {"a": torch.zeros(2)}
    meta = Meta(tensors["a"])

    class Own(Custom):
        metadata = (meta,)

    source = DigestingSource(Own({}, tensors.items))
    assert source.plan().pieces[0].shape == (2,)
    tensors["a"] = torch.ones(4)
    meta.shape = (4,)
    assert source.plan().pieces[0].shape == (4,)
    assert packed(source) == expected_bytes(tensors)


def test_a_source_may_yield_one_buffer_again_and_again():
    names, buffer = [f"t{number}" for number in range(300)], torch.zeros(1024)
    source = DigestingSource(
        Custom(
            {name: buffer.clone() for name in names},
            lambda: ((name, buffer.fill_(number)) for number, name in enumerate(names)),
        )
    )
    source.plan()
    assert packed(source) == expected_bytes(
        {name: torch.full((1024,), float(number)) for number, name in enumerate(names)}
    )


def test_large_strided_and_empty_tensors_are_packed_among_small_ones():
    tensors = {
        "one": torch.ones(3),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "two": torch.full((5,), 2, dtype=torch.bfloat16),
        "large": torch.full((1 << 18,), 3.0),
        "empty": torch.empty(0),
        "scalar": torch.tensor(4),
        "nan": torch.tensor([float("nan"), 1.0]),
    }
    source = DigestingSource(StateDictSource(tensors))
    source.plan()
    assert packed(source) == expected_bytes(tensors)
    assert source.digests() == [digest(each) for each in tensors.values()]
    assert source.nonfinite == {"nan": 1}
