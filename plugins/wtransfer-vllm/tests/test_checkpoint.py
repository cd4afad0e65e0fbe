import types

import pytest
import tiny_models
from safetensors.torch import save_file

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


@pytest.mark.parametrize("load_format", ["dummy", "gguf", "sharded_state"])
def test_model_not_loaded_from_safetensors_has_no_checkpoint(tmp_path, load_format):
    folder = write(tmp_path / "A", tiny_models.weights(1))
    assert find_checkpoint(config_of(folder, load_format)) is None


def test_folder_without_safetensors_has_no_checkpoint(tmp_path):
    assert find_checkpoint(config_of(tmp_path)) is None
