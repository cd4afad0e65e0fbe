import os
import time
import types

import pytest
import tiny_models
import torch
from safetensors.torch import save_file
from wtransfer.checkpoint.served import ServedCheckpoint
from wtransfer.errors import SourceError
from wtransfer.weights import TensorSpec

from wtransfer_vllm.checkpoint import find_checkpoint

bag = types.SimpleNamespace


def config_of(model, load_format="auto"):
    return bag(
        model_config=bag(model=str(model), hf_config=bag()),
        load_config=bag(load_format=load_format),
    )


def write(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_schema_equals_the_file_headers(tmp_path):
    tensors = tiny_models.weights(1)
    schema = find_checkpoint(config_of(write(tmp_path / "A", tensors))).schema()
    assert schema == {n: TensorSpec(t.dtype, tuple(t.shape)) for n, t in tensors.items()}


def test_tensors_equal_the_files(tmp_path):
    tensors = tiny_models.weights(1)
    found = find_checkpoint(config_of(write(tmp_path / "A", tensors)))
    assert len(found) == len(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())


@pytest.mark.parametrize("load_format", ["dummy", "gguf", "sharded_state"])
def test_model_not_loaded_from_safetensors_has_no_checkpoint(tmp_path, load_format):
    folder = write(tmp_path / "A", tiny_models.weights(1))
    assert find_checkpoint(config_of(folder, load_format)) is None


def test_folder_without_safetensors_has_no_checkpoint(tmp_path):
    assert find_checkpoint(config_of(tmp_path)) is None


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
    folder = write(tmp_path / "A", tiny_models.weights(1))
    checkpoint = ServedCheckpoint(folder)
    assert checkpoint.unchanged()
    time.sleep(0.02)  # the kernel's clock for files has ticks
    other = write(tmp_path / "B", tiny_models.weights(2))
    change(folder / "model.safetensors", other / "model.safetensors")
    assert not checkpoint.unchanged()
    with pytest.raises(SourceError, match="was overwritten since"):
        dict(checkpoint)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_head_is_covered_by_either_name(tmp_path, tied):
    folder = write(tmp_path / "A", tiny_models.weights(1, tied=True))
    schema = find_checkpoint(config_of(folder), tied=tied).schema()
    assert ("lm_head.weight" in schema) is not tied
    expected = ("lm_head.weight",) if tied else ()
    assert schema["model.embed_tokens.weight"].aliases == expected
