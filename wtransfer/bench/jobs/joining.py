"""A worker of a scene: takes what is published until the trainer is gone."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from wtransfer.bench.jobs import tell
from wtransfer.bench.jobs.unverified import switch_off
from wtransfer.bench.jobs.weights import make
from wtransfer.bench.sets import TensorSet
from wtransfer.deadline import Deadline
from wtransfer.weight_sync.worker.session import WorkerSession

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEP_S = 0.1
_JOIN_S = 60.0


def join(
    *,
    address: str,
    token: str,
    tensors: list[Any],
    commit: Any = "adopt",
    verified: bool = True,
    **_: Any,
) -> None:
    """Commit whatever comes; tell this process's CPU seconds at the end of each commit.

    Args:
        address: The publisher's.
        token: Its secret.
        tensors: What it sends.
        commit: How to commit.
        verified: Whether the digests are real.
        **_: Of the trainer.
    """
    if not verified:
        switch_off()
    weights = make(TensorSet(*tensors))
    with session_of(weights, address, token, commit) as session:
        cpu_s = [
            time.process_time()
            for _step in while_published(session)
            if session.commit_pending(_STEP_S)
        ]
    tell(cpu_s=cpu_s)


def session_of(model: Any, address: str, token: str, commit: Any = "adopt") -> WorkerSession:
    """Return a session that is named by its process, by which the trainer finds that."""
    return WorkerSession(model, join=address, token=token, commit=commit, name=str(os.getpid()))


def while_published(session: WorkerSession) -> Iterator[None]:
    """Yield until the publisher has been there and is gone.

    Raises:
        StallError: It did not come.
    """
    deadline = Deadline(_JOIN_S)
    while not session.connected:
        deadline.check("the bench's publisher")
        yield
    while session.connected:
        yield
