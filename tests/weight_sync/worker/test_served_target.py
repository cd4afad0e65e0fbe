"""A serving engine's model, loaded from a checkpoint, as the target of updates."""

import time

import pytest
import torch
from safetensors.torch import save_file

from wtransfer.checkpoint.served import ServedCheckpoint
from wtransfer.weight_sync.worker.served_target import ServedTarget
from wtransfer.weights import TensorSpec


class Engine(ServedTarget):
    """Loads into a dictionary."""

    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self.model = {}
        self.fails = False

    def load(self, weights):
        for name, tensor in weights:
            if self.fails:
                raise RuntimeError("the load fails")
            self.model[name] = tensor


def write(folder, value):
    folder.mkdir(exist_ok=True)
    tensors = {"w": torch.full((4,), value, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "A", 1.0)


@pytest.fixture
def engine(folder):
    return Engine(ServedCheckpoint(folder))


def test_form_is_that_of_the_checkpoint_and_an_update_is_cast_to_it(engine):
    assert engine.schema() == {"w": TensorSpec(torch.bfloat16, (4,))}
    engine.apply({"w": torch.full((4,), 1.0001)})
    assert engine.model["w"].dtype is torch.bfloat16
    assert torch.equal(engine.model["w"], torch.ones(4, dtype=torch.bfloat16))


def test_other_name_of_a_tied_tensor_is_cast_too(tmp_path):
    names = ("embedding", "lm_head.weight")
    save_file(
        {name: torch.ones(4, dtype=torch.bfloat16) for name in names}, tmp_path / "a.safetensors"
    )
    engine = Engine(ServedCheckpoint(tmp_path, tied=True))
    for name in names:
        engine.apply({name: torch.full((4,), 1.0001)})
    assert {name: each.dtype for name, each in engine.model.items()} == dict.fromkeys(
        names, torch.bfloat16
    )


def test_way_back_is_the_checkpoint_and_then_the_set_applied_last(engine):
    assert torch.equal(engine.capture()["w"], torch.ones(4, dtype=torch.bfloat16))
    first = {"w": torch.zeros(4)}
    engine.apply(first)
    assert engine.capture() is first
    engine.fails = True
    with pytest.raises(RuntimeError):
        engine.apply({"w": torch.ones(4)})
    assert engine.capture() is None, "of a mix there is nothing to go back to"
    engine.fails = False
    engine.apply(first)
    engine.forget()
    assert engine.capture() is None


def test_weights_that_are_lost_before_the_first_update_are_not_the_checkpoints(engine):
    engine.forget()
    assert engine.capture() is None
    assert engine.base() is engine.checkpoint


def test_checkpoint_that_was_changed_is_no_way_back(engine, folder):
    assert engine.base() is engine.checkpoint
    time.sleep(0.02)  # the kernel's clock for files has ticks
    write(folder, 2.0)
    assert engine.base() is None
    assert engine.capture() is None


def test_without_a_checkpoint_the_first_update_sets_the_form(engine):
    bare = Engine(None)
    assert (bare.schema(), bare.base(), bare.capture()) == (None, None, None)
    bare.apply({"w": torch.ones(2)})
    assert bare.model["w"].dtype is torch.float32
