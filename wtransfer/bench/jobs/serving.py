"""Serving while weights travel: a worker that generates text, and the trainer that disturbs it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from wtransfer.bench.jobs import tell
from wtransfer.bench.jobs.joining import session_of, while_published
from wtransfer.bench.jobs.publishing import JOIN_S, WARM_UP_ROUNDS, checked
from wtransfer.bench.jobs.weights import Served
from wtransfer.bench.sets import TensorSet
from wtransfer.demo.model import Generator
from wtransfer.weight_sync.trainer.publisher import Publisher

if TYPE_CHECKING:
    from wtransfer.weight_sync.report import Report

_QUIET_S = 0.3
"""Shortest time between two rounds in which nothing happens, in seconds."""


def serve(address: str, token: str, tensors: list[Any], **_: Any) -> None:
    """Generate byte after byte; tell when each was finished, and when commits began and ended."""
    model = Served(TensorSet(*tensors).shapes())
    generator = Generator(model.transformer, seed=1)
    ended_at: list[float] = []
    commits: list[tuple[str | None, float, float]] = []
    with session_of(model, address, token) as session:
        for _step in while_published(session):
            generator.next_byte()
            ended_at.append(time.monotonic())
            began = time.monotonic()
            if session.commit_pending():
                commits.append((session.version, began, time.monotonic()))
    tell(tokens=ended_at, commits=commits)


def publish_between_pauses(
    address: str, token: str, tensors: list[Any], num_workers: int, num_rounds: int, **_: Any
) -> None:
    """Publish with a quiet time before each round that is as long as the round before."""
    model = Served(TensorSet(*tensors).shapes())
    rounds: list[dict[str, Any]] = []
    with Publisher(model, listen=address, token=token) as publisher:
        publisher.wait_for_workers(num_workers, JOIN_S)
        for number in range(WARM_UP_ROUNDS + num_rounds):
            model.renew(number)
            rounds.append(_one(publisher, f"round-{number}", rounds[-1:]))
    tell(rounds=rounds[WARM_UP_ROUNDS:])


def _one(publisher: Publisher, version: str, before: list[dict[str, Any]]) -> dict[str, Any]:
    quiet_from = time.monotonic()
    time.sleep(max([_QUIET_S, *(each["total_s"] for each in before)]))
    began = time.monotonic()
    report: Report = checked(publisher.publish(version))
    return {
        "version": version,
        "quiet_from": quiet_from,
        "began": began,
        "total_s": report.seconds["total"],
        "nbytes": report.nbytes,
    }
