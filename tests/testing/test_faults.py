"""Injected faults do what they say, once, and leave a witness."""

from __future__ import annotations

import threading

import pytest
import torch

from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.testing.fakes import MemoryEngine, MemoryTrainerEngine
from wtransfer.testing.faults import Fault, Faults

TENSORS = {name: torch.arange(4.0) + 10 * i for i, name in enumerate("abc")}
A, B, C = ([float(x) for x in tensor] for tensor in TENSORS.values())


class Shelf(MemoryEngine):
    """Delivers `TENSORS`, each in a call of its own."""

    trainer_cls = MemoryTrainerEngine

    def receive_weights(self, update_info, load_weights):
        for name, tensor in TENSORS.items():
            load_weights([(name, tensor)])


@pytest.fixture
def faults():
    return Faults()


def delivered(faults, worker=0):
    """Return what one round delivers on a worker."""
    engine = faults.wrap(Shelf)(
        WeightTransferConfig("shelf"), ParallelConfig(data_parallel_index=worker)
    )
    engine.start_weight_update()
    found = []
    engine.receive_weights(None, lambda pairs: found.extend((n, t.tolist()) for n, t in pairs))
    return found


def test_without_a_fault_nothing_is_changed(faults):
    assert delivered(faults) == [("a", A), ("b", B), ("c", C)]
    assert faults.fired == []


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("drop", [("a", A), ("c", C)]),
        ("twice", [("a", A), ("b", B), ("b", B), ("c", C)]),
        ("truncate", [("a", A), ("b", B[:-1]), ("c", C)]),
        ("swap", [("a", A), ("b", C), ("c", B)]),
        ("duplicate", [("a", A), ("b", B), ("c", B)]),
    ],
)
def test_a_tensor_is_spoiled_once(faults, action, expected):
    faults.arm(Fault(action, tensor=1))
    assert delivered(faults) == expected
    assert faults.fired == [Fault(action, tensor=1)]
    assert delivered(faults) == [("a", A), ("b", B), ("c", C)]


@pytest.mark.parametrize("bit", [0, 7, 8, 127])
def test_one_bit_is_flipped(faults, bit):
    faults.arm(Fault("flip", bit=bit))
    (_, got), *_ = delivered(faults)
    words = [torch.tensor(values).view(torch.uint8).tolist() for values in (A, got)]
    number = int.from_bytes(words[0], "little") ^ int.from_bytes(words[1], "little")
    assert number == 1 << bit


def test_a_cast_changes_the_dtype(faults):
    seen = []
    engine = faults.wrap(Shelf)(WeightTransferConfig("shelf"), ParallelConfig())
    faults.arm(Fault("cast", tensor=2))
    engine.receive_weights(None, lambda pairs: seen.extend(t.dtype for _, t in pairs))
    assert seen == [torch.float32, torch.float32, torch.float64]


def test_a_fault_of_one_worker_spares_the_others(faults):
    faults.arm(Fault("drop", worker=1))
    assert len(delivered(faults, worker=0)) == 3
    assert len(delivered(faults, worker=1)) == 2


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("raise", RuntimeError),
        ("memory-error", MemoryError),
        ("torch-memory", RuntimeError),
        ("enomem", OSError),
        ("exit", SystemExit),
    ],
)
def test_an_engine_breaks_where_it_is_told_to(faults, action, error):
    faults.arm(Fault(action, tensor=2))
    with pytest.raises(error):
        delivered(faults)


def test_a_hanging_engine_is_let_go_by_disarm(faults):
    faults.arm(Fault("hang"))
    ended = []

    def run():
        with pytest.raises(RuntimeError, match="hung"):
            delivered(faults)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.1)
    assert ended == []
    faults.disarm()
    thread.join(5)
    assert ended == [True]


def test_tensors_cannot_be_spoiled_on_the_trainer():
    with pytest.raises(ValueError, match="on workers"):
        Fault("flip", side="trainer")
