"""The checkpoint that SGLang has loaded names its KV cache, if the proof has found it served."""

import time
from types import SimpleNamespace as Bag

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from wtransfer.checkpoint.served import ServedCheckpoint
from wtransfer.weight_sync.identity import module_fingerprint
from wtransfer.weight_sync.worker import vouching
from wtransfer.weight_version import ProcessWeights

from wtransfer_sglang import target
from wtransfer_sglang.target import vouch

REFUSAL = "this SGLang takes no update: it serves adapters"


def write(folder, value):
    save_file({"a": torch.full((4, 4), value)}, folder / "model.safetensors")
    # What comes next has another time: the kernel's clock for files has ticks.
    time.sleep(0.02)


@pytest.fixture
def process(monkeypatch, tmp_path):
    """The names of this process, as if the test were alone in it."""
    made = ProcessWeights()
    monkeypatch.setenv("WTRANSFER_CACHE", str(tmp_path / "cache"))
    for module in (vouching, target):
        monkeypatch.setattr(module, "process_weights", made)
    return made


@pytest.fixture
def server(tmp_path):
    """A server that has loaded a checkpoint, and a model that stands for its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, 1.0)
    runner = Bag(
        model_config=Bag(model_path=str(folder), revision=None), load_config=Bag(load_format="auto")
    )
    served = Bag(vouched_as=nn.Linear(1, 1), refusal=None, checkpoint=ServedCheckpoint(folder))
    return Bag(runner=runner, target=served, folder=folder)


def name_of(process):
    end = time.monotonic() + 20
    while process.version() is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    return process.version().fingerprint


def test_proven_server_has_the_name_of_its_checkpoint(process, server):
    vouch(server.runner, server.target, is_proven=True)
    assert name_of(process) == module_fingerprint({"a": torch.full((4, 4), 1.0)})


@pytest.mark.parametrize(
    ("refusal", "text"), [(REFUSAL, REFUSAL), (None, "another rank's load does not give")]
)
def test_server_that_is_not_proven_has_a_name_of_its_own_and_says_why(
    process, server, caplog, refusal, text
):
    server.target.refusal = refusal
    vouch(server.runner, server.target, is_proven=False)
    assert name_of(process).startswith("local:")
    assert text in caplog.text


def test_checkpoint_that_is_overwritten_after_the_proof_gives_no_name(process, server):
    write(server.folder, 2.0)
    vouch(server.runner, server.target, is_proven=True)
    assert name_of(process).startswith("local:")
