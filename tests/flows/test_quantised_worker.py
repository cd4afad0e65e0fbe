"""A trainer of floats and a worker process of a quantised checkpoint."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("uvicorn")

from wtransfer import Publisher
from wtransfer.errors import SchemaError
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.http.client import HttpClient

WorkerProcess = runpy.run_path(str(Path(__file__).with_name("http_worker.py")))["WorkerProcess"]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def trained(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(256, 384, generator=generator).to(torch.bfloat16)
    return {"layer.weight": weight, "norm": torch.ones(8, dtype=torch.bfloat16) * seed}


def quantised(tensors):
    blocks = tensors["layer.weight"].float().reshape(2, 128, 3, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    weight = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(256, 384)
    return tensors | {"layer.weight": weight, "layer.weight_scale_inv": scale}


@pytest.fixture
def worker(zygote, tmp_path):
    """A worker process that holds a checkpoint of blocks of float8."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    save_file(quantised(trained(0)), folder / "model.safetensors")
    made = WorkerProcess(zygote, tmp_path)
    yield made.until_ready()
    made.end()


def held(worker):
    return HttpClient(worker.url, worker.token).weight_info(digests=True)["digests"]


@pytest.mark.parametrize("engine", ["shm", pytest.param("file", marks=pytest.mark.slow)])
def test_worker_process_has_each_round_what_a_quantised_checkpoint_would_have(
    worker, engine, tmp_path
):
    model = trained(1)
    options = {"path": str(tmp_path / "store")} if engine == "file" else {}
    with Publisher(
        model,
        base=tmp_path / "checkpoint",
        engine=engine,
        options=options,
        hosts=[worker.url],
        host_token=worker.token,
    ) as publisher:
        for seed in range(1, 4):
            for name, each in trained(seed).items():
                model[name].copy_(each)
            publisher.publish(f"step-{seed}").raise_unless_ok()
            wanted = quantised(trained(seed))
            assert held(worker) == {name: digest(each) for name, each in wanted.items()}


def test_worker_process_keeps_its_weights_where_no_base_was_given(worker):
    publisher = Publisher(trained(1), hosts=[worker.url], host_token=worker.token)
    with publisher, pytest.raises(SchemaError, match=r"layer\.weight: wanted float8_e4m3fn"):
        publisher.publish("step-1")
    assert held(worker) == {name: digest(each) for name, each in quantised(trained(0)).items()}
