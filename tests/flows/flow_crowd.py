"""Many workers in one process: sessions on small models, each committed by a thread of its own."""

from __future__ import annotations

import threading

import torch

from wtransfer.weight_sync.worker.session import WorkerSession


def _serve(session):
    while True:
        session.commit_pending(60.0)


def main(address, token, name, num_workers, num_tensors):
    """Be many workers, until killed."""
    for number in range(num_workers):
        weights = {f"w{index}": torch.zeros(64) for index in range(num_tensors)}
        session = WorkerSession(weights, join=address, token=token, name=f"{name}-{number}")
        threading.Thread(target=_serve, args=(session,), daemon=True).start()
    threading.Event().wait()
