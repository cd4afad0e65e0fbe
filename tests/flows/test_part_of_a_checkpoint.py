"""A trainer of a part, and worker processes that were started with the whole checkpoint."""

from __future__ import annotations

import os
import runpy
import secrets
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("uvicorn")

from wtransfer import Publisher
from wtransfer.errors import WTransferError
from wtransfer.transport.address import random_address
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.http.client import HttpClient

WorkerProcess = runpy.run_path(str(Path(__file__).with_name("http_worker.py")))["WorkerProcess"]


def whole(seed=0):
    generator = torch.Generator().manual_seed(seed)
    names = ("layer.0", "layer.1", "tower.0", "tower.1")
    return {name: torch.randn(64, 96, generator=generator) for name in names}


@pytest.fixture
def start(zygote, tmp_path):
    """Start a worker process with a checkpoint; a second one of the same number takes its place."""
    made, token, address = [], secrets.token_hex(16), random_address()

    def start(checkpoint, number=0):
        folder = tmp_path / f"worker-{number}"
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
        save_file(checkpoint, folder / "checkpoint" / "model.safetensors")
        listen = f"{address}-{number}"
        made.append(WorkerProcess(zygote, folder, listen=listen, token=token))
        return made[-1].until_ready()

    yield start
    for each in made:
        each.end()


def held(worker):
    return HttpClient(worker.url, worker.token).weight_info(digests=True)["digests"]


def digests(tensors):
    return {name: digest(each) for name, each in tensors.items()}


@pytest.mark.parametrize(
    "engine", ["shm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("file", "gloo"))]
)
def test_part_reaches_workers_that_are_killed_and_started_again(start, engine, tmp_path):
    checkpoint = whole()
    part = {name: each.clone() for name, each in checkpoint.items() if name.startswith("layer")}
    worker = start(checkpoint)
    options = {"path": str(tmp_path / "store")} if engine == "file" else {}
    with Publisher(
        part,
        base=tmp_path / "worker-0" / "checkpoint",
        engine=engine,
        options=options,
        hosts=[worker.url],
        host_token=worker.token,
    ) as publisher:
        for number in range(3):
            part["layer.1"] += 1
            report = publisher.publish(f"step-{number}").raise_unless_ok()
            assert report.nbytes == sum(each.nbytes for each in part.values())
            assert held(worker) == digests(checkpoint | part)
            if number == 1:
                os.kill(worker.child.pid, signal.SIGKILL)
                worker.child.wait(10)
                worker = start(checkpoint)
                publisher.invite()
        other = start(checkpoint | {"tower.1": whole(9)["tower.1"]}, 1)
        before, served = held(other), held(worker)
        publisher.invite(other.url)
        part["layer.1"] += 1
        with pytest.raises(WTransferError, match=r"'tower\.1' is not sent"):
            publisher.publish("refused")
        assert (held(other), held(worker)) == (before, served)
