"""The folder that SGLang has loaded a model from, by SGLang's own configuration."""

import enum
from types import SimpleNamespace as Bag

import pytest
import torch
from safetensors.torch import save_file
from wtransfer.errors import SourceError

from wtransfer_sglang.target import checkpoint_folder

REVISIONS = ("1" * 40, "2" * 40)


class LoadFormat(enum.Enum):
    """SGLang's, in part."""

    AUTO = "auto"
    DUMMY = "dummy"


def runner(model, load_format=LoadFormat.AUTO, revision=None, download_dir=None):
    return Bag(
        model_config=Bag(model_path=str(model), revision=revision),
        load_config=Bag(load_format=load_format, download_dir=download_dir),
    )


def test_model_of_another_load_format_has_no_folder(tmp_path):
    assert checkpoint_folder(runner(tmp_path)) == tmp_path
    with pytest.raises(SourceError, match="a model of load format 'dummy' does not consist of"):
        checkpoint_folder(runner(tmp_path, LoadFormat.DUMMY))


def test_name_of_the_hub_is_the_revisions_folder_in_the_cache_and_nothing_is_fetched(
    tmp_path, monkeypatch
):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **_: asked.append(args) or [])
    cache = tmp_path / "cache"
    model = cache / "models--an-owner--a-model"
    for revision in REVISIONS:
        folder = model / "snapshots" / revision
        folder.mkdir(parents=True)
        save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISIONS[0])
    for wanted, found in ((None, REVISIONS[0]), (REVISIONS[1], REVISIONS[1])):
        config = runner("an-owner/a-model", revision=wanted, download_dir=str(cache))
        assert checkpoint_folder(config) == model / "snapshots" / found
    with pytest.raises(SourceError, match="model 'an-owner/a-model' has no checkpoint on this"):
        checkpoint_folder(runner("an-owner/a-model", download_dir=str(tmp_path / "another")))
    assert asked == []
