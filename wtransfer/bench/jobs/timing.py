"""Rounds of a way to send that knows nothing of rounds: timed until the last worker has all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wtransfer.bench.jobs import tell
from wtransfer.bench.jobs.group import Group
from wtransfer.bench.jobs.weights import are_those_of, make, renew
from wtransfer.bench.sets import TensorSet
from wtransfer.errors import IncompleteUpdateError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_WARM_UP_ROUNDS = 1


@dataclass(frozen=True)
class Sending:
    """What one process of a round has."""

    group: Group
    """All processes."""
    tensors: dict[str, torch.Tensor]
    """Sent by rank 0, written by the others."""


def time_rounds(
    send: Callable[[Sending], None],
    *,
    store: str,
    rank: int,
    num_workers: int,
    tensors: list[Any],
    num_rounds: int,
    **_: Any,
) -> None:
    """Send all tensors again and again, and tell the seconds of the rounds that count.

    Args:
        send: One round, in every process; has brought all bytes when it returns.
        store: Where the processes meet.
        rank: Of this one; 0 is the trainer.
        num_workers: How many there are beside it.
        tensors: What is sent.
        num_rounds: How often.
    """
    weights = make(TensorSet(*tensors))
    sending = Sending(Group.of(store, rank, num_workers), weights)
    # Written once, so that no round pays for fresh memory of the model.
    renew(weights, -1)
    seconds = [_one(send, sending, number) for number in range(_WARM_UP_ROUNDS + num_rounds)]
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    tell(nbytes=nbytes, seconds=seconds[_WARM_UP_ROUNDS:])


def _one(send: Callable[[Sending], None], sending: Sending, number: int) -> float:
    if sending.group.rank == 0:
        renew(sending.tensors, number)
    sending.group.meet()
    began = time.monotonic()
    send(sending)
    sending.group.meet()
    seconds = time.monotonic() - began
    if not sending.group.meet(good=are_those_of(sending.tensors, number)):
        raise IncompleteUpdateError(f"round {number} of the bench did not bring every tensor")
    return seconds
