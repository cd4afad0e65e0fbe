"""What was announced is worked out once, and anew when anything else is announced."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wtransfer.engines.collective import CollectiveUpdateInfo
from wtransfer.engines.incoming import HostLanding, Incoming
from wtransfer.errors import ManifestError
from wtransfer.testing.contents import contents
from wtransfer.transport.buckets import Bucket
from wtransfer.transport.rendezvous import host_rendezvous
from wtransfer.transport.tensors import byte_view, dtype_name, tensor_from

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "empty": torch.empty(0, 2),
    "b": torch.tensor(5),
    "c": torch.arange(4, dtype=torch.int16),
}


def info(**instead):
    """Announce the tensors, or other columns `instead`; every call makes new lists."""
    columns = {
        "names": list(TENSORS),
        "dtype_names": [dtype_name(tensor.dtype) for tensor in TENSORS.values()],
        "shapes": [list(tensor.shape) for tensor in TENSORS.values()],
    }
    return CollectiveUpdateInfo(**(columns | instead))


def test_the_same_announcement_is_not_worked_out_again():
    first = info().incoming(Incoming([], [], []))
    assert info().incoming(first) is first


@pytest.mark.parametrize(
    "instead",
    [
        {"names": ["a", "empty", "b", "other"]},
        {"dtype_names": ["float32", "float32", "int64", "float16"]},
        {"shapes": [[3, 2], [0, 2], [], [4]]},
        {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]},
    ],
)
def test_any_other_announcement_is(instead):
    first = info().incoming(Incoming([], [], []))
    changed = info(**instead)
    found = changed.incoming(first)
    assert found is not first
    assert [(p.name, p.dtype, list(p.shape)) for p in found.pieces] == list(
        zip(changed.names, changed.dtype_names, changed.shapes, strict=True)
    )


class ElsewhereLanding:
    """Memory that does not show itself, as that of a device."""

    def __init__(self, memory):
        self.own = memory

    def view(self, start, piece):
        return tensor_from(self.own, start, piece.dtype, piece.shape)


@pytest.mark.parametrize("landing", [HostLanding, ElsewhereLanding])
@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_what_has_landed_are_the_tensors_of_the_bucket(landing, cut):
    incoming = info().incoming(Incoming([], [], []))
    layout = incoming.layout
    memory = np.zeros(layout.nbytes, dtype=np.uint8)
    for start, stop, tensor in zip(layout.starts, layout.stops, TENSORS.values(), strict=True):
        memory[start:stop] = byte_view(tensor)
    landed = landing(memory)
    found = [
        pair
        for first, last in ((0, cut), (cut, len(TENSORS)))
        for pair in incoming.landed(Bucket(first, last, 0, 0), landed)
    ]
    assert contents(dict(found)) == contents(TENSORS)


# FAULTS 4
@pytest.mark.parametrize("shape", [[2, -1], [True], [2.0], ["3"], [None]])
def test_a_size_that_cannot_be_is_named(shape):
    with pytest.raises(ManifestError, match="'b' has the shape"):
        info(shapes=[[2, 3], [0, 2], shape, [4]])


@pytest.fixture(scope="module")
def made_once_in_a_process():
    """Let libuv, under torch's store, make the pipe that it keeps for the life of the process."""
    host_rendezvous("127.0.0.1").close()


@pytest.mark.usefixtures("made_once_in_a_process")
@pytest.mark.parametrize("commit", ["adopt", "copy"])
def test_a_trainer_that_changes_its_tensors_is_followed_in_the_same_group(fleet, commit):
    made = fleet({name: each.clone() for name, each in TENSORS.items()}, engine="gloo")
    member = made.join(commit=commit)
    for number, numel in enumerate((3, 3, 100_000, 3)):
        for tensors in (made.source, member.model):
            tensors["c"] = torch.full((numel,), float(number))
            tensors[f"new.{number // 2}"] = torch.full((2,), 5.0)
        made.source["c"].add_(1)
        assert made.publish(f"v{number}").ok
        assert contents(member.model) == contents(made.source)
