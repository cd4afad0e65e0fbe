"""Workers behind HTTP, which publishers name as hosts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

HTTP = Path(__file__).parents[1] / "http"
TOKEN = "the-secret"


@pytest.fixture
def start_worker(weights, monkeypatch):
    """Maker of workers behind HTTP whose models step; their token is in the environment."""
    monkeypatch.setenv("WTRANSFER_TOKEN", TOKEN)
    worker_class = runpy.run_path(str(HTTP / "worker_in_process.py"))["HttpWorker"]
    workers = []

    def start(**options):
        tensors = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        name = options.pop("name", f"w{len(workers)}")
        workers.append(worker_class(tensors, name=name, **{"token": TOKEN, **options}))
        return workers[-1]

    yield start
    for each in workers:
        each.close()
