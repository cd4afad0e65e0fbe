"""What a trainer broadcasts, bucket by bucket: one is filled while the other travels."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import torch

from wtransfer.engines.places import Places
from wtransfer.transport.buckets import Layout, aligned, slices
from wtransfer.transport.tensors import own_memory
from wtransfer.weight_sync.trainer.digesting import same_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wtransfer.engines.interface import ParamMeta
    from wtransfer.transport.communicator import Communicator, Pending
    from wtransfer.transport.tensors import ByteArray

NUM_BUCKETS = 2
"""Buckets in memory: one is filled while the other travels."""


class Stream:
    """How the tensors of a round follow each other, and where each of them waits for its bucket.

    Args:
        metadata: The tensors of the round.
        nbytes: Bytes of a bucket, about.
        num_buckets: Buckets in memory.
    """

    def __init__(self, metadata: Sequence[ParamMeta], nbytes: int, num_buckets: int) -> None:
        self.metadata = tuple(metadata)
        self._made_for = nbytes, num_buckets
        layout = Layout([meta.nbytes for meta in metadata])
        self.buckets = list(layout.cut(nbytes))
        """The buckets, in order."""
        self.lasts = [bucket.last for bucket in self.buckets]
        """Number behind the last tensor of each."""
        self.room = aligned(max((bucket.nbytes for bucket in self.buckets), default=0))
        """Bytes that each of the buckets in memory takes."""
        self.numbers = {meta.name: number for number, meta in enumerate(metadata)}
        """Name -> number."""
        self.starts: list[int] = []
        """First byte of each tensor, in memory."""
        self.stops: list[int] = []
        """Byte behind each tensor, in memory."""
        for number, bucket in enumerate(self.buckets):
            shift = number % num_buckets * self.room - bucket.start
            own = slice(bucket.first, bucket.last)
            self.starts += [start + shift for start in layout.starts[own]]
            self.stops += [stop + shift for stop in layout.stops[own]]

    def is_of(self, metadata: Sequence[ParamMeta], nbytes: int, num_buckets: int) -> bool:
        """Whether it is that of these tensors, in such buckets."""
        return self._made_for == (nbytes, num_buckets) and same_metadata(metadata, self.metadata)


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
        stream: Of an earlier round, to be used again where it is the same.
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
        stream: Stream | None = None,
    ) -> None:
        self._num_buckets = num_buckets
        self._on_part = on_part
        self._communicator = communicator
        self._nbytes = nbytes
        if stream is None or not stream.is_of(metadata, nbytes, num_buckets):
            stream = Stream(metadata, nbytes, num_buckets)
        self.stream = stream
        """How the tensors follow each other."""
        self._filling = 0
        self._travelling: list[list[Pending]] = [[] for _ in range(num_buckets)]
        super().__init__(
            self._enough(memory, num_buckets * stream.room),
            stream.numbers,
            stream.starts,
            stream.stops,
        )

    def reach(self, number: int) -> int:
        """Make room for a tensor, all before it having been copied."""
        bucket = bisect.bisect_right(self.stream.lasts, number)
        if bucket > self._filling:
            self._turn_to(bucket)
        return self.stream.lasts[bucket]

    def finish(self) -> None:
        """Send the last bucket off and wait until all have left."""
        if self.stream.buckets:
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
        bucket, start = self.stream.buckets[self._filling], self._start(self._filling)
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
        return number % self._num_buckets * self.stream.room

    def _enough(self, memory: ByteArray | None, nbytes: int) -> ByteArray:
        """Return that memory, or some that is large enough."""
        if memory is not None and memory.size >= nbytes:
            return memory
        return own_memory(nbytes)

    def _content(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes of the memory as the group takes them."""
        return torch.from_numpy(self.memory[start:stop])
