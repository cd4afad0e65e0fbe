"""A trainer whose workers are killed in the middle of a round: how soon does it know?"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from wtransfer.bench.jobs import tell
from wtransfer.bench.jobs.publishing import JOIN_S, publish_one
from wtransfer.bench.jobs.weights import make, renew
from wtransfer.bench.sets import TensorSet
from wtransfer.deadline import Deadline
from wtransfer.errors import WTransferError
from wtransfer.weight_sync.trainer.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import Container

_POLL_S = 0.005
# Rounds that were over before the worker was killed do not count; so many may be.
_TRIES_PER_KILL = 4
# After this part of a round its commit may begin.
_LAST_PART = 0.8


def publish_and_kill(
    address: str, token: str, tensors: list[Any], num_kills: int, **_: Any
) -> None:
    """Tell the seconds from each SIGKILL to the error that names the worker."""
    weights = make(TensorSet(*tensors))
    noticed: list[float] = []
    killed: set[str] = set()
    with Publisher(weights, listen=address, token=token) as publisher:
        publisher.wait_for_workers(1, JOIN_S)
        usual_s = min(publish_one(publisher, weights, n).seconds["total"] for n in range(3))
        for number in range(3, 3 + _TRIES_PER_KILL * num_kills):
            if len(noticed) == num_kills:
                break
            part = _LAST_PART * (len(noticed) + 0.5) / num_kills
            # Else one that the publisher has not missed yet, its id perhaps another's by now.
            worker = _worker_up_to_date(publisher, killed)
            killed.add(worker)
            renew(weights, number)
            found = _kill_in_round(publisher, f"round-{number}", worker, part * usual_s)
            noticed += [] if found is None else [found]
    tell(noticed_s=noticed, round_s=usual_s)


def _kill_in_round(publisher: Publisher, version: str, worker: str, after_s: float) -> float | None:
    """Return the seconds until the death was noticed; None if the round was over before it."""
    round_ = publisher.publish(version, wait=False)
    time.sleep(after_s)
    killed_at = time.monotonic()
    os.kill(int(worker), signal.SIGKILL)
    try:
        round_.result()
    except WTransferError as error:
        noticed_at = time.monotonic()
        return noticed_at - killed_at if error.worker == worker else None
    return None


def _worker_up_to_date(publisher: Publisher, killed: Container[str]) -> str:
    """Wait until only one that lives is there, and has caught up: nothing else is under way."""
    deadline = Deadline(JOIN_S)
    while True:
        found = publisher.workers()
        if len(found) == 1 and found[0].worker not in killed:
            only = found[0]
            if only.fingerprint == publisher.fingerprint:
                return only.worker
        deadline.check("a new worker of the bench")
        time.sleep(_POLL_S)
