"""The trainer of a scene: publishes round after round, and tells what they took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from wtransfer.bench.jobs import tell
from wtransfer.bench.jobs.unverified import check_changing, check_constant, switch_off
from wtransfer.bench.jobs.weights import make, renew
from wtransfer.bench.sets import TensorSet
from wtransfer.errors import RoundAbortedError
from wtransfer.weight_sync.report import Report
from wtransfer.weight_sync.trainer.publisher import Publisher

if TYPE_CHECKING:
    import torch

JOIN_S = 60.0
"""How long workers may take to join, in seconds."""
WARM_UP_ROUNDS = 2
"""Rounds that do not count: each touches one of the two segments for the first time."""


def publish(
    *,
    address: str,
    token: str,
    tensors: list[Any],
    num_workers: int,
    num_rounds: int,
    verified: bool,
    engine: str = "shm",
    **_: Any,
) -> None:
    """Publish all tensors as often as it says, and tell of the rounds that count."""
    if not verified:
        switch_off()
    weights = make(TensorSet(*tensors))
    with Publisher(weights, engine=engine, listen=address, token=token) as publisher:
        publisher.wait_for_workers(num_workers, JOIN_S)
        reports, cpu_s = list[Report](), list[float]()
        for number in range(WARM_UP_ROUNDS + num_rounds):
            renew(weights, number)
            began_s = time.process_time()
            reports.append(checked(publisher.publish(f"round-{number}")))
            cpu_s.append(time.process_time() - began_s)
    (check_changing if verified else check_constant)([each.fingerprint for each in reports])
    rounds = [told_of(each) | {"cpu_s": s} for each, s in zip(reports, cpu_s, strict=True)]
    tell(rounds=rounds[WARM_UP_ROUNDS:])


def publish_one(publisher: Publisher, weights: dict[str, torch.Tensor], number: int) -> Report:
    """Change all weights and publish them.

    Raises:
        RoundAbortedError: A worker does not have them.
    """
    renew(weights, number)
    return checked(publisher.publish(f"round-{number}"))


def checked(report: Report) -> Report:
    """Return a report with a good receipt of every worker.

    Raises:
        RoundAbortedError: It is none.
    """
    if not report.ok:
        raise RoundAbortedError(f"a round of the bench is not {report.outcome!r}: {report}")
    return report


def told_of(report: Report) -> dict[str, Any]:
    """Return what the bench needs of a report."""
    return {
        "nbytes": report.nbytes,
        "seconds": report.seconds,
        "packed_s": report.packed_s,
        "workers": [each.seconds for each in report.workers],
    }
