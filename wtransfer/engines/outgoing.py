"""What a trainer broadcasts, bucket by bucket: one is filled while the other travels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from wtransfer.engines.digesting import Places
from wtransfer.transport.buckets import Layout, aligned, slices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wtransfer.engines.interface import ParamMeta
    from wtransfer.transport.communicator import Communicator, Pending
    from wtransfer.transport.tensors import ByteArray

NUM_BUCKETS = 2
"""Buckets in memory: one is filled while the other travels."""


class Outgoing(Places):
    """Places for the tensors of one round, in two buckets that take turns.

    Asking for the place of a tensor says that all before it have been copied: the bucket before is
    sent off then, and the one before that, whose memory is needed, is waited for.

    Args:
        metadata: The tensors of the round.
        communicator: This rank is the root.
        nbytes: Bytes of a bucket, about.
        memory: Of an earlier round, to be used again where it is large enough.
        on_part: Called whenever something has left, since a bucket may take long; may raise.
        num_buckets: Buckets in memory.
    """

    def __init__(
        self,
        metadata: Sequence[ParamMeta],
        communicator: Communicator,
        nbytes: int,
        memory: ByteArray | None = None,
        on_part: Callable[[], object] | None = None,
        *,
        num_buckets: int = NUM_BUCKETS,
    ) -> None:
        self._num_buckets = num_buckets
        self._on_part = on_part
        self._communicator = communicator
        self._nbytes = nbytes
        layout = Layout([meta.nbytes for meta in metadata])
        self._buckets = list(layout.cut(nbytes))
        self._room = aligned(max((bucket.nbytes for bucket in self._buckets), default=0))
        self._spans = self._placed(metadata, layout)
        self._filling = 0
        self._travelling: list[list[Pending]] = [[] for _ in range(num_buckets)]
        super().__init__(self._enough(memory, num_buckets * self._room), self)

    def __getitem__(self, name: str) -> slice:
        """Return the place of a tensor, which is free from now on."""
        number, span = self._spans[name]
        if number > self._filling:
            self._turn_to(number)
        return span

    def finish(self) -> None:
        """Send the last bucket off and wait until all have left."""
        if self._buckets:
            self._send_off()
        # The one before the last first: that is the order in which they leave.
        for number in range(self._num_buckets):
            self._await(self._travelling[(self._filling + 1 + number) % self._num_buckets])

    def forget(self) -> None:
        """Let go of what is still under way: it would keep the group, and that its port."""
        for travelling in self._travelling:
            travelling.clear()

    def _turn_to(self, number: int) -> None:
        self._send_off()
        self._filling = number
        self._await(self._travelling[number % self._num_buckets])

    def _send_off(self) -> None:
        bucket, start = self._buckets[self._filling], self._start(self._filling)
        content = self._content(start, start + bucket.nbytes)
        self._travelling[self._filling % self._num_buckets] = [
            self._communicator.broadcast(content[part], self._communicator.rank)
            for part in slices(bucket, self._nbytes)
        ]

    def _await(self, travelling: list[Pending]) -> None:
        for pending in travelling:
            pending.wait()
            if self._on_part is not None:
                self._on_part()
        travelling.clear()

    def _start(self, number: int) -> int:
        return number % self._num_buckets * self._room

    def _enough(self, memory: ByteArray | None, nbytes: int) -> ByteArray:
        """Return that memory, or some that is large enough."""
        if memory is not None and memory.size >= nbytes:
            return memory
        return np.empty(nbytes, np.uint8)

    def _content(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes of the memory as the group takes them."""
        return torch.from_numpy(self.memory[start:stop])

    def _placed(
        self, metadata: Sequence[ParamMeta], layout: Layout
    ) -> dict[str, tuple[int, slice]]:
        spans = {}
        for number, bucket in enumerate(self._buckets):
            shift = self._start(number) - bucket.start
            for each in range(bucket.first, bucket.last):
                start, stop = layout.starts[each] + shift, layout.stops[each] + shift
                spans[metadata[each].name] = number, slice(start, stop)
        return spans
