"""Groups of ranks: by NCCL through torch's process group, or by gloo where there is no GPU.

NCCL is reached by ``torch.distributed.ProcessGroupNCCL``, made directly: never torch's default
group, and several in one process.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from wtransfer.calls import on_callers_stream
from wtransfer.deadline import Deadline
from wtransfer.engines.collective import MAX_ABANDONED
from wtransfer.errors import GroupError
from wtransfer.transport.process_group import GlooCommunicator
from wtransfer.transport.rendezvous import GRACE_S, own_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wtransfer.transport.communicator import Communicator
    from wtransfer.transport.rendezvous import Rendezvous

dist: Any = torch.distributed  # whose groups torch does not declare

POLL_S = 0.0001
"""Time between two checks of an operation under way, in seconds."""

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"

_making_group = threading.Lock()


def form(
    kind: str,
    rendezvous: Rendezvous,
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout_s: float,
    operation_timeout_s: float,
) -> Communicator:
    """Form a group with the other ranks: the one place where engines and groups meet.

    Args:
        kind: ``nccl`` or ``gloo``.
        rendezvous: Meeting place of the ranks; used up by this group.
        rank: Rank of this process.
        size: Ranks of the group.
        device: Device of this rank's tensors.
        timeout_s: Longest wait for the other ranks, in seconds.
        operation_timeout_s: Time after which torch gives an operation up by itself, in seconds.

    Raises:
        GroupError: The group cannot be formed.
        StallError: Ranks are missing.
    """
    if kind == "nccl":
        return NCCLCommunicator(
            rendezvous,
            rank,
            size,
            device=device,
            timeout_s=timeout_s,
            operation_timeout_s=operation_timeout_s,
        )
    return GlooCommunicator(
        rendezvous,
        rank,
        size,
        host=rendezvous.host if rank == 0 else own_address(rendezvous.host, rendezvous.port),
        timeout_s=timeout_s,
        operation_timeout_s=operation_timeout_s,
        max_abandoned=MAX_ABANDONED,
    )


def _go_on() -> None:
    pass


class NCCLPending:
    """One of NCCL's operations.

    Args:
        work: Torch's.
        group: The communicator.
        tensor: Kept until the end.
    """

    def __init__(self, work: Any, group: NCCLCommunicator, tensor: torch.Tensor) -> None:
        self._work = work
        self._group = group
        self._tensor = tensor

    def wait(self, check: Callable[[], object] = _go_on) -> None:
        """Wait until the device has done the operation, not only until a stream would wait for it.

        An operation that an abort has cut off looks done to the device; the digests show whether
        it was, not NCCL.

        Args:
            check: Called again and again; may raise.

        Raises:
            GroupError: The group was aborted, or torch has given the operation up.
        """
        while not self._work.is_completed():
            self._group.check()
            check()
            time.sleep(POLL_S)
        self._group.check()
        try:
            # The private stream comes after NCCL's; raises errors that torch's watchdog has found.
            self._work.wait()
        except RuntimeError as error:
            raise self._group.failure(f"{error}") from error


class NCCLCommunicator:
    """A group of ranks on GPUs. Made together by all ranks, or by none.

    An abort ends this rank's operations. Other ranks on the same host may go on waiting for it on
    their device: the control channel has every rank of a failed round abort its own.

    Args:
        rendezvous: Meeting place of the ranks; used up by this group.
        rank: Rank of this process.
        size: Ranks of the group.
        device: Device of this rank's tensors, with a number.
        timeout_s: Longest wait for the other ranks, in seconds.
        operation_timeout_s: Time after which torch gives an operation up by itself, in seconds.

    Raises:
        GroupError: The rank is taken, or NCCL cannot connect.
        PeerLostError: The rendezvous is gone.
        StallError: Not all ranks have arrived in time.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        size: int,
        *,
        device: torch.device,
        timeout_s: float,
        operation_timeout_s: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self._aborted = False
        self._lock = threading.Lock()
        deadline = Deadline(timeout_s)
        # NCCL waits for missing ranks without naming them: so it is asked when all are there.
        rendezvous.meet(rank, size, timeout_s)
        self._group: Any = None
        try:
            # Where NCCL waits for the store's answers, it waits without a bound.
            rendezvous.call(
                on_callers_stream(
                    lambda: self._connect(device, rendezvous, deadline, operation_timeout_s)
                ),
                "forming an NCCL group",
                deadline.remaining() + GRACE_S,
            )
        except BaseException:
            self.close()
            raise

    def broadcast(self, tensor: torch.Tensor, root: int) -> NCCLPending:
        """Begin to copy from rank `root` to all."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self._begin(lambda group: group.broadcast([tensor], options), tensor)

    def send(self, tensor: torch.Tensor, to: int) -> NCCLPending:
        """Begin to send to one rank."""
        return self._begin(lambda group: group.send([tensor], to, 0), tensor)

    def recv(self, tensor: torch.Tensor, source: int) -> NCCLPending:
        """Begin to receive from one rank."""
        return self._begin(lambda group: group.recv([tensor], source, 0), tensor)

    def abort(self) -> None:
        """Let NCCL's kernels end, and with them every wait of this rank."""
        with self._lock:
            aborted, self._aborted = self._aborted, True
            group = self._group
        if not aborted and group is not None:
            _abort(group)

    def close(self) -> None:
        """Release the group; operations under way in it fail."""
        self.abort()
        self._group = None

    def check(self) -> None:
        """Raise if the group was aborted.

        Raises:
            GroupError: The group was aborted.
        """
        if self._aborted or self._group is None:
            raise self.failure("the group was aborted")

    def failure(self, why: str) -> GroupError:
        """Return wtransfer's error for one of NCCL's."""
        return GroupError(f"rank {self.rank} of {self.size}: {why}")

    def _begin(self, begin: Callable[[Any], Any], tensor: torch.Tensor) -> NCCLPending:
        group = self._group  # which a close lets go of at any time
        self.check()
        try:
            return NCCLPending(begin(group), self, tensor)
        except RuntimeError as error:
            raise self.failure(f"{error}") from error

    def _make(self, store: Any, timeout_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = dt.timedelta(seconds=timeout_s)  # noqa: SLF001
        try:
            with _surviving_errors():
                return dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        except (RuntimeError, ValueError) as error:
            raise self.failure(f"NCCL cannot be started: {error}") from error

    def _connect(
        self,
        device: torch.device,
        rendezvous: Rendezvous,
        deadline: Deadline,
        operation_timeout_s: float,
    ) -> None:
        """Broadcast one byte: at its first operation NCCL connects, and reports faults."""
        group = self._make(rendezvous.store, operation_timeout_s)
        with self._lock:
            self._group, aborted = group, self._aborted
        if aborted:  # by the caller, which has left this thread behind
            _abort(group)

        def check() -> None:
            rendezvous.check()
            deadline.check("the first broadcast of a new NCCL group")

        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), 0).wait(check)


@contextlib.contextmanager
def _surviving_errors() -> Iterator[None]:
    """Let a group that is made now survive its errors.

    By default torch's watchdog ends the *process* when an operation fails or is late: a worker
    would die of a lost trainer. The variable is read when a group is made, so it is set just then;
    other owners' groups keep what they had.
    """
    with _making_group:
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = _CLEAN_UP_ONLY
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ERROR_HANDLING]
            else:
                os.environ[_ERROR_HANDLING] = before


def _abort(group: Any) -> None:
    # Older releases of torch call it otherwise.
    abort = getattr(group, "abort", None) or group._abort  # noqa: SLF001
    abort()
