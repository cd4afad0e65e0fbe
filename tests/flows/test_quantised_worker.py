"""A trainer of floats and a worker process of a quantised checkpoint."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
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


INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
        }
    },
}
TRAINER = """
import json, pathlib, sys
import torch
from wtransfer import Publisher

folder, url, token, num_layers, size = sys.argv[1:]
shape = (int(size), int(size))
model = {
    f"layer.{number}.weight": torch.empty(shape, dtype=torch.bfloat16).normal_()
    for number in range(int(num_layers))
}
base, peaks = f"{folder}/checkpoint", []
with Publisher(model, base=base, hosts=[url], host_token=token) as publisher:
    for number in range(3):
        publisher.publish(f"step-{number}").raise_unless_ok()
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("VmHWM:")]
        peaks.append(int(line.split()[1]) * 1024)
print(json.dumps([sum(each.nbytes for each in model.values()), peaks]))
"""


def peaks_of(zygote, folder, num_layers, size):
    """Publish from a process; return bytes of model and set, and peak memory after each round."""
    checkpoint, kept = folder / "checkpoint", {}
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps({"quantization_config": INT8}))
    for number in range(num_layers):
        kept[f"layer.{number}.weight"] = torch.zeros(size, size, dtype=torch.int8)
        kept[f"layer.{number}.weight_scale"] = torch.ones(size, 1, dtype=torch.bfloat16)
    save_file(kept, checkpoint / "model.safetensors")
    worker = WorkerProcess(zygote, folder)
    try:
        worker.until_ready()
        told = [folder, worker.url, worker.token, num_layers, size]
        ran = subprocess.run(
            [sys.executable, "-c", TRAINER, *map(str, told)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        worker.end()
    assert ran.returncode == 0, ran.stderr
    model_nbytes, peaks = json.loads(ran.stdout)
    return model_nbytes, sum(each.nbytes for each in kept.values()), peaks


@pytest.mark.slow
def test_large_trainer_needs_one_and_a_tenth_of_the_set_beside_its_model(zygote, tmp_path):
    """From the second round on with one set more: the segment that workers compute from stays."""
    _, _, small = peaks_of(zygote, tmp_path / "small", 4, 64)
    model, whole, large = peaks_of(zygote, tmp_path / "large", 8, 5792)
    assert model > 500 << 20
    more = [(peak - before - model) / whole for before, peak in zip(small, large, strict=True)]
    for found, num_sets in zip(more, (1, 2, 2), strict=True):
        # At least so much: the peak is that of the process with the segments.
        assert num_sets <= found <= num_sets + 0.1, more
