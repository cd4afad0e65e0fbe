"""Weights through gloo, as it is done without wtransfer: no proof, nothing but the bytes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from wtransfer.bench.jobs.buckets import BUCKET_NBYTES, cut, pack, unpack
from wtransfer.bench.jobs.timing import Sending, time_rounds

if TYPE_CHECKING:
    from torch import distributed as dist

_NUM_BUCKETS = 2


def tensor_by_tensor(**keywords: Any) -> None:
    """Broadcast every tensor by itself, one after another."""
    time_rounds(_each, **keywords)


def in_buckets(**keywords: Any) -> None:
    """Broadcast buckets that were allocated before; one is filled while another travels."""
    buckets = [torch.zeros(BUCKET_NBYTES, dtype=torch.uint8) for _ in range(_NUM_BUCKETS)]
    time_rounds(lambda sending: _in_buckets(sending, buckets), **keywords)


def _each(sending: Sending) -> None:
    for tensor in sending.tensors.values():
        sending.group.finish(sending.group.broadcast(tensor.view(-1).view(torch.uint8)))


def _in_buckets(sending: Sending, buckets: list[torch.Tensor]) -> None:
    group = sending.group
    under_way: deque[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = deque()

    def take_first() -> None:
        work, memory, pieces = under_way.popleft()
        group.finish(work)
        if group.rank:
            unpack(memory, pieces)

    for number, pieces in enumerate(cut(sending.tensors.values())):
        if len(under_way) == len(buckets):
            take_first()
        memory = buckets[number % len(buckets)]
        nbytes = sum(piece.numel() for piece in pieces)
        full = memory[:nbytes] if group.rank else pack(memory, pieces)
        under_way.append((group.broadcast(full), full, pieces))
    while under_way:
        take_first()
