"""A process group between threads of one process, which fails loudly where a real one would hang.

For tests of engines that move tensors by collectives, and for authors of such engines: NCCL shows
a mistake as two processes that hang, or as bytes in the wrong place. The group names the
ranks, the operations and the mistake:

* ranks that begin operations with another root, peer or size;
* ranks that begin them in another order, or do not begin them, when the time is over; a rank that
  closes while others wait for it;
* memory that breaks the contract, or is changed, or used by a second operation, before
  the first has been waited for;
* operations that are never waited for.

Bytes arrive only when they are waited for, and until then the receiver's memory holds rubbish:
a read that comes too early sees it. A mistake breaks the group for all ranks, as an abort does.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from wtransfer.deadline import Deadline
from wtransfer.errors import GroupError

RUBBISH = 0xA5
"""Byte that fills memory while an operation receives into it."""


def memory_group(size: int, timeout_s: float = 10.0) -> list[MemoryCommunicator]:
    """Make a group.

    Args:
        size: Number of ranks.
        timeout_s: Longest wait of an operation for a rank that does not begin it, in seconds.

    Returns:
        One communicator for each rank; give each to a thread of its own.
    """
    group = _Group(size, timeout_s)
    return [MemoryCommunicator(group, rank) for rank in range(size)]


class MemoryCommunicator:
    """One rank. Made by `memory_group`; any thread may call it.

    Args:
        group: State that the ranks share.
        rank: This rank.
    """

    def __init__(self, group: _Group, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._group = group

    def broadcast(self, tensor: torch.Tensor, root: int) -> MemoryPending:
        """Begin to copy from rank `root` to all.

        Raises:
            GroupError: Another rank is at another operation, or the group is broken.
        """
        return self._begin("broadcast", tensor, root, range(self.size))

    def send(self, tensor: torch.Tensor, to: int) -> MemoryPending:
        """Begin to send to one rank.

        Raises:
            GroupError: See `broadcast`.
        """
        return self._begin("message", tensor, self.rank, (self.rank, to))

    def recv(self, tensor: torch.Tensor, source: int) -> MemoryPending:
        """Begin to receive from one rank.

        Raises:
            GroupError: See `broadcast`.
        """
        return self._begin("message", tensor, source, (self.rank, source))

    def abort(self) -> None:
        """Break the group: every wait in it ends with an error."""
        with self._group.lock:
            self._group.break_up(f"rank {self.rank} aborted the group")

    def close(self) -> None:
        """Leave the group.

        Raises:
            GroupError: An operation that this rank began was not waited for, other ranks wait for
                this one, or it was closed before. Not raised in a group that is broken already.
        """
        with self._group.lock:
            self._group.leave(self.rank)

    def _begin(
        self, kind: str, tensor: torch.Tensor, source: int, ranks: range | tuple[int, int]
    ) -> MemoryPending:
        with self._group.lock:
            return self._group.begin(self.rank, kind, tensor, source, tuple(sorted(ranks)))


@dataclass(eq=False)
class MemoryPending:
    """One rank's part in an operation. Made by `MemoryCommunicator`."""

    group: _Group
    """State that the ranks share."""
    rank: int
    """The rank whose part it is."""
    operation: _Operation
    """The operation, as all its ranks see it."""
    tensor: torch.Tensor
    """This rank's memory."""

    def wait(self) -> None:
        """Wait until every rank is at the operation; then the bytes arrive. Idempotent.

        Raises:
            GroupError: A rank is late, or the group is broken.
        """
        with self.group.lock:
            self.group.wait(self)

    @property
    def sends(self) -> bool:
        """True if this rank has the bytes."""
        return self.rank == self.operation.source

    def overlaps(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares memory with this operation's."""
        first, second = (each.data_ptr() for each in (self.tensor, tensor))
        if not self.tensor.nbytes or not tensor.nbytes:
            return False
        return first < second + tensor.nbytes and second < first + self.tensor.nbytes

    def prepare(self) -> None:
        """Keep the bytes to send, or spoil the memory to receive into."""
        if self.sends:
            self.operation.payload = self.tensor.clone()
        else:
            self.tensor.fill_(RUBBISH)

    def is_untouched(self) -> bool:
        """Return whether the memory is as `prepare` left it."""
        if not self.sends:
            return bool((self.tensor == RUBBISH).all())
        return self.operation.payload is not None and self.tensor.equal(self.operation.payload)

    def deliver(self) -> None:
        """Copy the bytes that were sent."""
        if not self.sends and self.operation.payload is not None:
            self.tensor.copy_(self.operation.payload)


@dataclass(eq=False)
class _Operation:
    """One broadcast or message, as all its ranks see it."""

    kind: str
    """``"broadcast"`` or ``"message"``."""
    number: int
    """Of this kind, and for a message between these two ranks; counted from 1."""
    source: int
    """Rank that has the bytes."""
    ranks: tuple[int, ...]
    """Participants, in ascending order."""
    nbytes: int
    begun_by: list[int] = field(default_factory=list)
    payload: torch.Tensor | None = None
    """A copy of the bytes, from the moment at which the source began."""
    complete: bool = False
    """True once every rank has reached the operation."""

    def __str__(self) -> str:
        what = f"{self.kind} {self.number} of {self.nbytes} bytes from rank {self.source}"
        if self.kind == "broadcast":
            return what
        (target,) = set(self.ranks) - {self.source}
        return f"{what} to rank {target}"

    @property
    def missing(self) -> list[int]:
        """Ranks that have not begun the operation."""
        return [rank for rank in self.ranks if rank not in self.begun_by]


class _Group:
    """State that the ranks share; callers hold the lock.

    The order of operations is NCCL's: a rank's operations run in the order in which it began them;
    a broadcast runs when it is every rank's turn, a message when it is that of both its ranks.

    Args:
        size: Number of ranks.
        timeout_s: See `memory_group`.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.lock = threading.Condition()
        self._timeout_s = timeout_s
        self._under_way: list[list[MemoryPending]] = [[] for _ in range(size)]
        self._queues: list[deque[_Operation]] = [deque() for _ in range(size)]
        self._counts: list[Counter[object]] = [Counter() for _ in range(size)]
        # Operations that not every rank has reached.
        self._open: dict[object, _Operation] = {}
        self._closed: set[int] = set()
        self._fault: str | None = None

    def begin(
        self, rank: int, kind: str, tensor: torch.Tensor, source: int, ranks: tuple[int, ...]
    ) -> MemoryPending:
        self._check_whole(rank)
        what = f"a {kind} from rank {source} among ranks {list(ranks)}"
        if rank in self._closed:
            self._fail(rank, f"began {what} after it had closed")
        self._check_ranks(rank, what, {source, *ranks}, ranks)
        self._check_memory(rank, what, tensor, receives=rank != source)
        # A message's place in the order of its two ranks; a broadcast's in that of all.
        stream = kind if kind == "broadcast" else (source, ranks)
        self._counts[rank][stream] += 1
        number = self._counts[rank][stream]
        mine = _Operation(kind, number, source, ranks, tensor.nbytes)
        operation = self._open.setdefault((stream, number), mine)
        if str(operation) != str(mine):
            self._fail(rank, f"began {mine}, ranks {operation.begun_by} {operation}")
        operation.begun_by.append(rank)
        self._queues[rank].append(operation)
        pending = MemoryPending(self, rank, operation, tensor)
        pending.prepare()
        self._under_way[rank].append(pending)
        self._complete_ready()
        self.lock.notify_all()
        return pending

    def wait(self, pending: MemoryPending) -> None:
        under_way, deadline = self._under_way[pending.rank], Deadline(self._timeout_s)
        if pending not in under_way:
            return
        while not pending.operation.complete:
            self._check_whole(pending.rank)
            self.lock.wait(deadline.remaining())
            if deadline.expired and not pending.operation.complete:
                self._check_whole(pending.rank)
                self._fail(pending.rank, self._why_late(pending.operation))
        if pending not in under_way:
            # The rank was closed meanwhile.
            self._check_whole(pending.rank)
            return
        under_way.remove(pending)
        if not pending.is_untouched():
            self._fail(pending.rank, f"changed its memory while {pending.operation} was under way")
        pending.deliver()

    def leave(self, rank: int) -> None:
        left = self._under_way[rank]
        unwaited = [f"{pending.operation}" for pending in left]
        awaited = [f"{each}" for each in self._open.values() if rank in each.missing]
        closed = rank in self._closed
        self._closed.add(rank)
        left.clear()
        if self._fault is not None:
            return
        if closed:
            self._fail(rank, "closed twice")
        if unwaited:
            self._fail(rank, f"closed without having waited for {', '.join(unwaited)}")
        if awaited:
            self._fail(rank, f"closed while others wait for it in {', '.join(awaited)}")

    def break_up(self, fault: str) -> None:
        # The first fault is the cause; later faults follow from it.
        self._fault = self._fault or fault
        self.lock.notify_all()

    def _complete_ready(self) -> None:
        while ready := [key for key, each in self._open.items() if self._is_next(each)]:
            for key in ready:
                operation = self._open.pop(key)
                operation.complete = True
                for rank in operation.ranks:
                    self._queues[rank].popleft()

    def _is_next(self, operation: _Operation) -> bool:
        queues = [self._queues[rank] for rank in operation.ranks]
        return all(queue and queue[0] is operation for queue in queues)

    def _why_late(self, operation: _Operation) -> str:
        late = operation.missing or list(operation.ranks)
        places = "; ".join(
            f"rank {rank} is at {self._queues[rank][0]}"
            if self._queues[rank]
            else f"rank {rank} has nothing under way"
            for rank in late
        )
        return f"no progress on {operation} within {self._timeout_s:g} s: {places}"

    def _fail(self, rank: int, fault: str) -> NoReturn:
        self.break_up(f"rank {rank} of {self.size}: {fault}")
        raise GroupError(f"rank {rank} of {self.size}: {fault}")

    def _check_whole(self, rank: int) -> None:
        if self._fault is not None:
            raise GroupError(f"rank {rank} of {self.size}: the group is broken: {self._fault}")

    def _check_ranks(self, rank: int, what: str, named: set[int], ranks: tuple[int, ...]) -> None:
        unknown = sorted(named - set(range(self.size)))
        if unknown:
            self._fail(rank, f"began {what}; there is no rank {unknown[0]}")
        if len(set(ranks)) < len(ranks):
            self._fail(rank, f"began {what}: a message to itself")
        gone = sorted(self._closed & set(ranks))
        if gone:
            self._fail(rank, f"began {what}; rank {gone[0]} has closed")

    def _check_memory(self, rank: int, what: str, tensor: torch.Tensor, *, receives: bool) -> None:
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            self._fail(
                rank,
                f"began {what} with a tensor of dtype {tensor.dtype}, shape {list(tensor.shape)}, "
                f"contiguous {tensor.is_contiguous()}; expected torch.uint8, one dimension, "
                "contiguous",
            )
        for other in self._under_way[rank]:
            # Operations may share memory only if both read it.
            if other.overlaps(tensor) and (receives or not other.sends):
                self._fail(
                    rank,
                    f"began {what} in memory of {other.operation}, which was not waited for",
                )
