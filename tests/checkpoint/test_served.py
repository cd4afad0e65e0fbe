"""The checkpoint that a serving engine started from, as long as its files are the same."""

import enum
import os
import time

import pytest
import torch
from safetensors.torch import save_file

from wtransfer.checkpoint import served
from wtransfer.checkpoint.served import ServedCheckpoint, find_folder
from wtransfer.errors import SourceError
from wtransfer.transport.digests import digest
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
    with pytest.raises(SourceError, match="was overwritten since"):
        checkpoint.digest(EMBEDDING, "xxh3-128")


def test_names_are_those_of_the_start_and_cost_no_reading(tmp_path):
    folder = write(tmp_path / "A", weights())
    checkpoint = ServedCheckpoint(folder)
    (folder / "model.safetensors").unlink()
    assert EMBEDDING in checkpoint
    assert "another" not in checkpoint


def test_digest_of_each_algorithm_is_read_once(tmp_path, monkeypatch):
    read = []

    def counted(tensor, algorithm):
        read.append(algorithm)
        return digest(tensor, algorithm)

    monkeypatch.setattr(served, "digest", counted)
    tensors = weights()
    checkpoint = ServedCheckpoint(write(tmp_path / "A", tensors))
    for algorithm in ("xxh3-128", "wsum64", "xxh3-128", "wsum64"):
        assert checkpoint.digest(EMBEDDING, algorithm) == digest(tensors[EMBEDDING], algorithm)
    assert read == ["xxh3-128", "wsum64"]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_head_is_covered_by_either_name(tmp_path, tied):
    schema = ServedCheckpoint(write(tmp_path / "A", weights()), tied=tied).schema()
    assert ("lm_head.weight" in schema) is not tied
    assert schema[EMBEDDING].aliases == (("lm_head.weight",) if tied else ())


@pytest.mark.parametrize("num", [0, 2])
def test_head_is_tied_to_the_one_tensor_of_its_form_alone(tmp_path, num):
    form = torch.ones(8, 4)
    tensors = {"lm_head.weight": form, **{f"embedding.{each}": form.clone() for each in range(num)}}
    schema = ServedCheckpoint(write(tmp_path / "A", tensors), tied=True).schema()
    assert schema == {name: TensorSpec(torch.float32, (8, 4)) for name in tensors}


class Format(enum.Enum):
    AUTO = "auto"
    DUMMY = "dummy"


@pytest.mark.parametrize("load_format", ["auto", Format.AUTO])
def test_path_of_a_folder_is_that_folder(tmp_path, load_format):
    assert find_folder(str(tmp_path), load_format, {"auto"}) == tmp_path


@pytest.mark.parametrize("load_format", ["dummy", Format.DUMMY])
def test_model_of_another_load_format_does_not_consist_of_its_files(tmp_path, load_format):
    with pytest.raises(SourceError, match="a model of load format 'dummy' does not consist of"):
        find_folder(str(tmp_path), load_format, {"auto"})


def test_model_that_is_not_on_disk_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SourceError, match="model 'nobody/nothing' has no checkpoint on this disk"):
        find_folder("nobody/nothing", "auto", {"auto"})
