"""Which operation every rank of a group has got to, and whether any can still end.

The rules are NCCL's: a rank's operations run in the order in which it began them; a broadcast runs
when it is every rank's turn, a message when it is that of both its ranks. So ranks that disagree
about the order wait for each other for ever, and here are told so at once.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wtransfer.errors import GroupError

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Operation:
    """One broadcast or message, as all its ranks see it."""

    kind: str
    """``"broadcast"`` or ``"message"``."""
    number: int
    """Of this kind, and for a message between these two ranks; counted from 1."""
    source: int
    """Rank that has the bytes."""
    ranks: tuple[int, ...]
    """Who takes part, in ascending order."""
    nbytes: int
    """Size."""
    begun_by: list[int] = field(default_factory=list)
    """Who has begun it."""
    payload: torch.Tensor | None = None
    """A copy of the bytes, from the moment at which the source began."""
    complete: bool = False
    """Whether every rank has got to it."""

    def __str__(self) -> str:
        if self.kind == "broadcast":
            return f"broadcast {self.number} of {self.nbytes} bytes from rank {self.source}"
        (target,) = set(self.ranks) - {self.source}
        return (
            f"message {self.number} of {self.nbytes} bytes from rank {self.source} to rank {target}"
        )

    @property
    def missing(self) -> list[int]:
        """Ranks that have not begun it."""
        return [rank for rank in self.ranks if rank not in self.begun_by]


class Schedule:
    """What every rank has begun. Not for several threads at a time.

    Args:
        size: Ranks of the group.
    """

    def __init__(self, size: int) -> None:
        self._queues: list[collections.deque[Operation]] = [
            collections.deque() for _ in range(size)
        ]
        self._counts: list[collections.Counter[object]] = [
            collections.Counter() for _ in range(size)
        ]
        self._open: dict[object, Operation] = {}

    @property
    def operations(self) -> list[Operation]:
        """What is under way."""
        return list(self._open.values())

    def begin(
        self, rank: int, kind: str, source: int, ranks: tuple[int, ...], nbytes: int
    ) -> Operation:
        """Note that a rank begins its next operation of a kind.

        Raises:
            GroupError: Another rank began it as something else.
        """
        # A message's place in the order of its two ranks; a broadcast's in that of all.
        stream = kind if kind == "broadcast" else (source, ranks)
        self._counts[rank][stream] += 1
        number = self._counts[rank][stream]
        mine = Operation(kind, number, source, ranks, nbytes)
        operation = self._open.setdefault((stream, number), mine)
        if str(operation) != str(mine):
            raise GroupError(f"rank {rank} began {mine}, ranks {operation.begun_by} {operation}")
        operation.begun_by.append(rank)
        self._queues[rank].append(operation)
        return operation

    def advance(self) -> None:
        """Complete what can be.

        Raises:
            GroupError: Ranks wait for each other.
        """
        while ready := [each for each in self.operations if self._is_ready(each)]:
            for operation in ready:
                self._complete(operation)
        circle = self._circle()
        if circle:
            places = "; ".join(f"rank {rank} is at {self._queues[rank][0]}" for rank in circle)
            raise GroupError(f"these ranks wait for each other for ever: {places}")

    def place(self, rank: int) -> str:
        """Say what a rank is at."""
        queue = self._queues[rank]
        return f"rank {rank} is at {queue[0]}" if queue else f"rank {rank} has nothing under way"

    def _is_ready(self, operation: Operation) -> bool:
        queues = [self._queues[rank] for rank in operation.ranks]
        return all(queue and queue[0] is operation for queue in queues)

    def _complete(self, operation: Operation) -> None:
        operation.complete = True
        for rank in operation.ranks:
            self._queues[rank].popleft()
        self._open = {key: each for key, each in self._open.items() if each is not operation}

    def _circle(self) -> list[int]:
        """Return ranks of which each waits for the next and the last for the first."""
        # A rank that waits for one that is free, or that waits for such a one, can still go on.
        # What is left when those are taken away stands in circles, or waits for them.
        stuck = {rank: self._awaited(rank) for rank, queue in enumerate(self._queues) if queue}
        while free := [rank for rank, awaited in stuck.items() if not awaited & stuck.keys()]:
            for rank in free:
                del stuck[rank]
        if not stuck:
            return []
        path = [min(stuck)]
        while (following := min(stuck[path[-1]] & stuck.keys())) not in path:
            path.append(following)
        return path[path.index(following) :]

    def _awaited(self, rank: int) -> set[int]:
        first = self._queues[rank][0]
        queues = {each: self._queues[each] for each in first.ranks}
        return {each for each, queue in queues.items() if not queue or queue[0] is not first}
