"""A worker that has its process for itself: what it computes with is what the process does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.testing.mini_engine.build import make_worker
from wtransfer.weights import process_weights

if TYPE_CHECKING:
    from wtransfer.testing.mini_engine.build import HostSettings
    from wtransfer.testing.mini_engine.worker import ServingWorker
    from wtransfer.transport.communicator import Communicator


def make_sole_worker(settings: HostSettings, group: Communicator | None = None) -> ServingWorker:
    """Return the worker of one rank, in a process that has no other model.

    Without a publisher its weights never change, and get their true name: KV cache is exchanged
    with whoever has the same ones. With one, a session says what they are.

    Args:
        settings: Of the host.
        group: The ranks; None: there is one.
    """
    worker = make_worker(settings, group)
    if settings.publishing is None:
        process_weights.vouch(worker.model)
    return worker
