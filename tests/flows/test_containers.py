"""Containers of one host that share a folder, and no network namespace."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

IMPORT_S = 60.0

pytestmark = pytest.mark.slow


@pytest.fixture
def volume():
    """A folder with a short name: the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="wt-") as folder:
        yield Path(folder)


def test_engine_shm_updates_workers_of_other_containers(flow, namespaces, volume):
    home, *others = namespaces
    listen = f"unix:{volume}/publisher"
    trainer = flow.trainer(host=home, listen=listen)
    workers = [flow.worker(host=host) for host in (home, *others)]
    for number in (1, 2, 3):
        flow.publish(trainer, number, workers)
    trainer.kill()
    assert len(set(volume.iterdir())) == 2
    successor = flow.trainer(host=home, listen=listen, token=flow.where["token"])
    for number in (4, 5):
        flow.publish(successor, number, workers)
    assert len(set(volume.iterdir())) == 2
    successor.end()
    assert set(volume.iterdir()) == set()


def test_worker_behind_http_in_another_container_is_pushed_to(namespaces, volume, wait_until):
    home, other, _ = namespaces
    wtransfer = [sys.executable, "-m", "wtransfer"]
    environ = {**os.environ, "WTRANSFER_TOKEN": "a token of these tests"}
    for number in range(2):
        (volume / str(number)).mkdir()
        tensors = {"w": torch.full((8,), float(number))}
        save_file(tensors, volume / str(number) / "model.safetensors")
    url = f"http://{other.address}:8000"
    options = ["--checkpoint", volume / "0", "--listen", f"tcp:{other.address}:8000"]
    with (volume / "ready").open("w+") as told:
        other.run([*wtransfer, "worker", *options], env=environ, stdout=told)
        wait_until(lambda: url in (volume / "ready").read_text(), IMPORT_S)
    push = ["push", volume / "1", "--to", url, "--listen", f"unix:{volume}/publisher"]
    assert home.run([*wtransfer, *push], env=environ).wait(IMPORT_S) == 0


def test_error_across_containers_says_what_they_must_share(flow, failing, namespaces):
    home, other, _ = namespaces
    trainer = flow.trainer(host=home, listen=f"tcp:{home.address}:0")
    flow.worker(host=other)
    trainer.ask("wait", n=1, within_s=60.0)
    with failing("PeerLostError") as failed:
        trainer.ask("publish", number=1)
    assert "has another network namespace" in failed.error.text
    assert "listen='unix:/path'" in failed.error.text
