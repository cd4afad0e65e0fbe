"""A process group between threads of one process, which fails loudly where a real one would hang.

For tests of engines that move tensors by collectives, and for authors of such engines: NCCL shows
a mistake as two processes that wait for ever, or as bytes in the wrong place. This one names the
ranks, the operations and the mistake:

* ranks that begin operations in another order, or with another root, peer or size;
* a rank that is missing when the time is over, or that closes while others wait for it;
* memory that is not what the contract says, or is changed, or used by a second operation, before
  the first has been waited for;
* operations that nobody waits for.

Bytes arrive only when they are waited for, and until then the receiver's memory holds rubbish:
who reads too early sees it. A mistake breaks the group for all ranks, as an abort does.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

import torch

from wtransfer.deadline import Deadline
from wtransfer.errors import GroupError
from wtransfer.testing.schedule import Schedule

if TYPE_CHECKING:
    from wtransfer.testing.schedule import Operation

RUBBISH = 0xA5
"""What memory holds while something is being received into it."""


def memory_group(size: int, timeout_s: float = 10.0) -> list[MemoryCommunicator]:
    """Make a group.

    Args:
        size: How many ranks.
        timeout_s: How long an operation waits for a rank that does not begin it, in seconds.

    Returns:
        One communicator for each rank; give each to a thread of its own.
    """
    table = _Table(size, timeout_s)
    return [MemoryCommunicator(table, rank) for rank in range(size)]


class MemoryCommunicator:
    """One rank. Made by `memory_group`; any thread may call it.

    Args:
        table: What the ranks share.
        rank: This rank.
    """

    def __init__(self, table: _Table, rank: int) -> None:
        self.rank = rank
        self.size = table.size
        self._table = table

    def broadcast(self, tensor: torch.Tensor, root: int) -> MemoryPending:
        """Begin to copy from rank `root` to all.

        Raises:
            GroupError: Another rank is at something else, or the group is broken.
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
        with self._table.lock:
            self._table.break_up(f"rank {self.rank} aborted the group")

    def close(self) -> None:
        """Leave the group.

        Raises:
            GroupError: Something that this rank began was not waited for, others wait for it, or
                it was closed before. Not in a group that is broken already.
        """
        with self._table.lock:
            self._table.leave(self.rank)

    def _begin(
        self, kind: str, tensor: torch.Tensor, source: int, ranks: range | tuple[int, int]
    ) -> MemoryPending:
        with self._table.lock:
            return self._table.begin(self.rank, kind, tensor, source, tuple(sorted(ranks)))


class MemoryPending:
    """One rank's part in an operation. Made by `MemoryCommunicator`."""

    def __init__(
        self, table: _Table, rank: int, operation: Operation, tensor: torch.Tensor
    ) -> None:
        self.rank = rank
        """The rank whose part it is."""
        self.operation = operation
        """What all ranks do."""
        self.tensor = tensor
        """This rank's memory."""
        self._table = table

    def wait(self) -> None:
        """Wait until every rank has got here; then the bytes arrive. A second call does nothing.

        Raises:
            GroupError: A rank is late, or the group is broken.
        """
        with self._table.lock:
            self._table.wait(self)

    @property
    def sends(self) -> bool:
        """Whether this rank has the bytes."""
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
        """Copy what was sent."""
        if not self.sends and self.operation.payload is not None:
            self.tensor.copy_(self.operation.payload)


class _Table:
    """What the ranks of a group share; its caller holds the lock.

    Args:
        size: How many ranks.
        timeout_s: See `memory_group`.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.lock = threading.Condition()
        self._timeout_s = timeout_s
        self._schedule = Schedule(size)
        self._under_way: list[list[MemoryPending]] = [[] for _ in range(size)]
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
        try:
            operation = self._schedule.begin(rank, kind, source, ranks, tensor.nbytes)
            pending = MemoryPending(self, rank, operation, tensor)
            pending.prepare()
            self._under_way[rank].append(pending)
            self._schedule.advance()
        except GroupError as error:
            self._fail(rank, f"{error}")
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
        under_way.remove(pending)
        if not pending.is_untouched():
            self._fail(pending.rank, f"changed its memory while {pending.operation} was under way")
        pending.deliver()

    def leave(self, rank: int) -> None:
        left = self._under_way[rank]
        unwaited = [f"{pending.operation}" for pending in left]
        awaited = [f"{each}" for each in self._schedule.operations if rank in each.missing]
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
        # What broke it first is the reason; all else follows from that.
        self._fault = self._fault or fault
        self.lock.notify_all()

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
            # Two operations may read the same memory, not more.
            if other.overlaps(tensor) and (receives or not other.sends):
                self._fail(
                    rank,
                    f"began {what} in memory of {other.operation}, which was not waited for",
                )

    def _why_late(self, operation: Operation) -> str:
        late = operation.missing or list(operation.ranks)
        places = "; ".join(self._schedule.place(rank) for rank in late)
        return f"no progress on {operation} within {self._timeout_s:g} s: {places}"
