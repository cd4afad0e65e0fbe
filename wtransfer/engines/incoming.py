"""What a worker receives by broadcasts, bucket by bucket, straight into its place."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from wtransfer.transport.buckets import Layout, slices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from wtransfer.transport.buckets import Bucket
    from wtransfer.transport.communicator import Communicator, Pending

NUM_AHEAD = 3
"""Parts asked for in advance, so that the next arrive while one is digested."""


def receive(
    layout: Layout,
    memory: torch.Tensor,
    communicator: Communicator,
    nbytes: int,
    on_part: Callable[[], object],
) -> Iterator[Bucket]:
    """Receive a stream of tensors from rank 0; yield each bucket once it is there.

    Args:
        layout: The stream.
        memory: Where to; uint8 of at least the stream's size.
        communicator: This rank and the root.
        nbytes: Bytes of a bucket, about; the same as the root's.
        on_part: Called whenever something has arrived.
    """
    under_way: collections.deque[tuple[Bucket | None, Pending]] = collections.deque()
    for bucket in layout.cut(nbytes):
        for part in slices(bucket, nbytes):
            here = memory[bucket.start + part.start : bucket.start + part.stop]
            ends = bucket if part.stop == bucket.nbytes else None
            under_way.append((ends, communicator.broadcast(here, 0)))
            if len(under_way) > NUM_AHEAD:
                yield from _arrived(under_way, on_part)
        if not bucket.nbytes:
            yield bucket
    while under_way:
        yield from _arrived(under_way, on_part)


def _arrived(
    under_way: collections.deque[tuple[Bucket | None, Pending]], on_part: Callable[[], object]
) -> Iterator[Bucket]:
    bucket, pending = under_way.popleft()
    pending.wait()
    on_part()
    if bucket is not None:
        yield bucket
