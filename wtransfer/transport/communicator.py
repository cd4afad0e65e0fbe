"""Interface of process groups, as small as engines that move tensors by collectives need.

There are three implementations: gloo (`wtransfer.transport.process_group`), NCCL (the distribution
``wtransfer-nccl``), and one in a process's own memory, which fails loudly wherever a real one would
hang (`wtransfer.testing.communicator`).

Ranks must call the same collectives in the same order with the same sizes: bytes carry no names.

A rank's operations are carried out one after the other, in the order in which it began them; also
those that it does not wait for yet. So two ranks that each begin to receive from the other, and to
send after that, wait for each other, and each for itself: one of the two must send first. The group
in memory names such ranks, and their operations, at its time-out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

OPERATION_TIMEOUT_S = 120.0
"""Time after which a rank gives an operation up by itself, in seconds. The control channel is
faster: it calls `abort`."""


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Wait until this rank's part is done: sent memory may be changed, received one read.

        Raises:
            GroupError: A rank is gone or late, or the group was aborted.
        """


class Communicator(Protocol):
    """Ranks 0 to ``size - 1`` of one group. `abort` may be called from any thread."""

    rank: int
    """Rank of this process."""
    size: int
    """Ranks of the group."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Begin to copy `tensor` from rank `root` into every other rank's.

        Args:
            tensor: uint8, one dimension, contiguous; the same size everywhere. The group owns it
                until the operation has been waited for.
            root: Rank that has the bytes.
        """

    def send(self, tensor: torch.Tensor, to: int) -> Pending:
        """Begin to send to one rank, which calls `recv`."""

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        """Begin to receive from one rank, which calls `send`."""

    def abort(self) -> None:
        """Break the group: every wait in it ends with an error here.

        Waits of other ranks for this one may end, too. Other ranks, however, may wait for each
        other, or for a stopped one: abort on every rank.
        """

    def close(self) -> None:
        """Release everything, without waiting for it. Called once, also after `abort`."""
