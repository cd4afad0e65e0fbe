"""The checkpoint that a serving engine started from, as long as its files are the same."""

import os
import time

import pytest
import torch
from safetensors.torch import save_file

from wtransfer.checkpoint.served import ServedCheckpoint, find_folder
from wtransfer.errors import SourceError
from wtransfer.weights import TensorSpec

EMBEDDING = "model.embed_tokens.weight"


def weights(value=1.0):
    return {
        EMBEDDING: torch.full((8, 4), value, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(4) * value,
        "lm_head.weight": torch.full((8, 4), value, dtype=torch.bfloat16),
    }


def write(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_schema_equals_the_file_headers(tmp_path):
    tensors = weights()
    schema = ServedCheckpoint(write(tmp_path / "A", tensors)).schema()
    assert schema == {n: TensorSpec(t.dtype, tuple(t.shape)) for n, t in tensors.items()}


def test_tensors_equal_the_files(tmp_path):
    tensors = weights()
    found = ServedCheckpoint(write(tmp_path / "A", tensors))
    assert len(found) == len(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())


def replaced(file, other):
    other.rename(file)


def overwritten(file, other):
    """Write other bytes of the same size in place, and set the time of change back."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write(other.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def removed(file, _other):
    file.unlink()


@pytest.mark.parametrize("change", [replaced, overwritten, removed])
def test_changed_checkpoint_is_detected_and_refuses_to_be_read(tmp_path, change):
    folder = write(tmp_path / "A", weights())
    checkpoint = ServedCheckpoint(folder)
    assert checkpoint.unchanged()
    time.sleep(0.02)  # the kernel's clock for files has ticks
    other = write(tmp_path / "B", weights(2.0))
    change(folder / "model.safetensors", other / "model.safetensors")
    assert not checkpoint.unchanged()
    with pytest.raises(SourceError, match="was overwritten since"):
        dict(checkpoint)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_head_is_covered_by_either_name(tmp_path, tied):
    schema = ServedCheckpoint(write(tmp_path / "A", weights()), tied=tied).schema()
    assert ("lm_head.weight" in schema) is not tied
    assert schema[EMBEDDING].aliases == (("lm_head.weight",) if tied else ())


def test_path_of_a_folder_is_that_folder(tmp_path):
    assert find_folder(str(tmp_path)) == tmp_path


def test_model_that_is_not_on_disk_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceError, match="model 'nobody/nothing' has no checkpoint on this disk"):
        find_folder("nobody/nothing")
