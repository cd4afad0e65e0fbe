import types

import pytest
import tiny_models
import torch
from safetensors.torch import save_file
from wtransfer.engines.interface import TensorSpec
from wtransfer.errors import SourceError

from wtransfer_vllm.checkpoint import Checkpoint, find_checkpoint

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


def test_the_schema_is_what_the_headers_say(tmp_path):
    tensors = tiny_models.weights(1)
    schema = find_checkpoint(config_of(write(tmp_path / "A", tensors))).schema()
    assert schema == {n: TensorSpec(t.dtype, tuple(t.shape)) for n, t in tensors.items()}


def test_the_tensors_are_the_files(tmp_path):
    tensors = tiny_models.weights(1)
    found = find_checkpoint(config_of(write(tmp_path / "A", tensors))).tensors()
    assert len(found) == len(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())


@pytest.mark.parametrize("load_format", ["dummy", "gguf", "sharded_state"])
def test_what_was_not_loaded_from_safetensors_has_no_checkpoint(tmp_path, load_format):
    folder = write(tmp_path / "A", tiny_models.weights(1))
    assert find_checkpoint(config_of(folder, load_format)) is None


def test_a_folder_without_safetensors_has_no_checkpoint(tmp_path):
    assert find_checkpoint(config_of(tmp_path)) is None


def test_a_checkpoint_that_was_replaced_is_no_way_back(tmp_path):
    folder = write(tmp_path / "A", tiny_models.weights(1))
    checkpoint = Checkpoint(folder)
    save_file(tiny_models.weights(2), folder / "new")
    (folder / "new").rename(folder / "model.safetensors")
    assert checkpoint.tensors() is None


def test_a_checkpoint_that_was_overwritten_after_it_was_captured_refuses_to_be_read(tmp_path):
    folder = write(tmp_path / "A", tiny_models.weights(1))
    captured = Checkpoint(folder).tensors()
    bytes_of_b = write(tmp_path / "B", tiny_models.weights(2)) / "model.safetensors"
    (folder / "model.safetensors").write_bytes(bytes_of_b.read_bytes())
    with pytest.raises(SourceError, match="was overwritten since"):
        dict(captured)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_the_embedding_is_covered_by_either(tmp_path, tied):
    folder = write(tmp_path / "A", tiny_models.weights(1, tied=True))
    schema = find_checkpoint(config_of(folder), tied=tied).schema()
    assert ("lm_head.weight" in schema) is not tied
    expected = ("lm_head.weight",) if tied else ()
    assert schema["model.embed_tokens.weight"].aliases == expected
