"""Process groups on gloo: never torch's default group, and several in one process.

Gloo cannot be told to stop. An operation ends when its bytes have moved, or by the group's time-out
(twice the publisher's deadline, unless an option says otherwise): a connection that breaks in the
midst of a tensor ends it no sooner, and a group is not released before its operations have ended.
So each group has one thread, which waits for its operations in order, holds their memory, and
releases the group after the last one. Callers wait for that thread, and an abort ends their waits
at once: the rest of the group then stays with its thread until gloo has ended. Until then the
memory is in use, so it is never handed out again while a rank that is resumed could write to it.

An abort also lets one operation of the group time out, at which gloo closes all connections of this
rank. Operations that have not begun to move end then, here and in the ranks that wait for this one.
"""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import functools
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from wtransfer.calls import close_at_exit
from wtransfer.deadline import Deadline
from wtransfer.errors import GroupError
from wtransfer.transport.communicator import OPERATION_TIMEOUT_S
from wtransfer.transport.rendezvous import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.transport.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

dist: Any = torch.distributed  # whose groups torch does not declare

CONNECT_TIMEOUT_S = 10.0
"""Longest time that ranks take to connect to each other, after all have arrived."""
RELEASE_GRACE_S = 1.0
"""Longest wait for the release of a group that has nothing under way; it takes milliseconds."""
BROKEN_GRACE_S = 0.1
"""The same for a group with operations under way: gloo ends them at once, or by its time-out."""
_TAG, _UNUSED_TAG = range(2)
_AT_ONCE = dt.timedelta(milliseconds=1)

_abandoned: collections.defaultdict[int, list[threading.Thread]] = collections.defaultdict(list)
"""Rank -> threads of closed groups that have not ended, where their number is bounded."""


class GlooPending:
    """One operation. Made by `GlooCommunicator`.

    Args:
        work: Torch's work object.
        timeout: Time-out of the operation; None: the group's.
        tensor: Memory of the operation.
        rank: This rank, for errors.
    """

    def __init__(
        self, work: Any, timeout: dt.timedelta | None, tensor: torch.Tensor, rank: str
    ) -> None:
        self._work = work
        self._timeout = timeout
        self._tensor: torch.Tensor | None = tensor
        self._rank = rank
        self._ended = threading.Event()
        self._error: str | None = None

    def wait(self) -> None:
        """Wait for the end; a second call returns or raises the same.

        Raises:
            GroupError: A rank is gone or late, or the group was aborted.
        """
        # Without a time-out: gloo has one, and an abort does not wait for gloo's.
        self._ended.wait()
        if self._error is not None:
            raise GroupError(f"{self._rank}: {self._error}")

    @property
    def is_under_way(self) -> bool:
        """True until gloo has ended the operation, even if its waits have ended."""
        return self._work is not None

    def carry_out(self) -> None:
        """Wait until gloo has ended, then release the memory; on the group's thread."""
        error = None
        try:
            self._work.wait() if self._timeout is None else self._work.wait(self._timeout)
        except RuntimeError as failed:
            error = f"{failed}"
        self._work = self._tensor = None
        self.end(error)

    def end(self, error: str | None) -> None:
        """End every wait for the operation; the first call counts."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()


class GlooCommunicator:
    """A group of CPU ranks on one or several hosts, over TCP; must be closed.

    Args:
        rendezvous: Rendezvous of the ranks. Its host keeps it open until every rank has its group.
        rank: Rank of this process.
        size: Ranks of the group.
        host: Address of this machine at which the other ranks reach it; nothing else listens.
        timeout_s: Longest wait for the other ranks to arrive, in seconds.
        operation_timeout_s: Gloo's time-out for an operation, in seconds.
        max_abandoned: Closed groups of this process and rank that gloo may still keep, with their
            memory, while this group forms; more are waited for. None: any number, and this group
            is not counted later.

    Raises:
        GroupError: The rank is taken, or the ranks cannot connect to each other.
        PeerLostError: The rendezvous is gone.
        StallError: Not all ranks have arrived in time, or closed groups of this process have not
            ended in time.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        size: int,
        *,
        host: str,
        timeout_s: float,
        operation_timeout_s: float = OPERATION_TIMEOUT_S,
        max_abandoned: int | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._name = f"rank {rank} of {size}"
        self._timeout = dt.timedelta(seconds=operation_timeout_s)
        self._lock = threading.Lock()
        self._aborted = False
        self._under_way: set[GlooPending] = set()
        self._to_do: queue.SimpleQueue[GlooPending | None] = queue.SimpleQueue()
        deadline = Deadline(timeout_s)
        self._is_counted = max_abandoned is not None
        if max_abandoned is not None:
            wait = functools.partial(_await_abandoned, rank, max_abandoned, deadline)
            rendezvous.call(wait, "the end of broken process groups", timeout_s + GRACE_S)
        rendezvous.meet(rank, size, deadline.remaining())
        self._group = rendezvous.call(
            lambda: self._connected(rendezvous.store, host),
            f"connecting {self._name}",
            CONNECT_TIMEOUT_S + GRACE_S,
        )
        self._thread = threading.Thread(
            target=self._carry_out, args=(self._group,), name="wtransfer-gloo", daemon=True
        )
        self._thread.start()
        close_at_exit(self)

    def broadcast(self, tensor: torch.Tensor, root: int) -> GlooPending:
        """Begin to copy from rank `root` to all."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self._begin(lambda group: group.broadcast([tensor], options), tensor, None)

    def send(self, tensor: torch.Tensor, to: int) -> GlooPending:
        """Begin to send to one rank."""
        return self._begin(lambda group: group.send([tensor], to, _TAG), tensor, self._timeout)

    def recv(self, tensor: torch.Tensor, source: int) -> GlooPending:
        """Begin to receive from one rank."""
        return self._begin(lambda group: group.recv([tensor], source, _TAG), tensor, self._timeout)

    def abort(self) -> None:
        """End every wait of this rank, and its connections."""
        with self._lock:
            self._aborted = True
            for pending in self._under_way:
                pending.end("the group was aborted")
            # Under the lock: a `close` on another thread must not leave the last reference here.
            if self._group is not None:
                with contextlib.suppress(RuntimeError):
                    never = torch.empty(1, dtype=torch.uint8, device="cpu")
                    self._group.recv_anysource([never], _UNUSED_TAG).wait(_AT_ONCE)

    def close(self) -> None:
        """Abort, and leave the group to its thread, which releases it once gloo has ended."""
        self.abort()
        with self._lock:
            if self._group is not None:
                self._group = None
                if self._is_counted:
                    _abandoned[self.rank].append(self._thread)
                self._to_do.put(None)
            is_broken = any(pending.is_under_way for pending in self._under_way)
        # Also where another thread has closed the group: torch aborts a process that ends while a
        # group is released.
        self._thread.join(BROKEN_GRACE_S if is_broken else RELEASE_GRACE_S)

    def _begin(
        self,
        begin: Callable[[Any], Any],
        tensor: torch.Tensor,
        timeout: dt.timedelta | None,
    ) -> GlooPending:
        with self._lock:
            if self._group is None or self._aborted:
                raise GroupError(f"{self._name}: the group was aborted")
            try:
                work = begin(self._group)
            except RuntimeError as error:
                # The error's frames hold torch's group, which would live as long as the error.
                raise GroupError(f"{self._name}: {error}") from error.with_traceback(None)
            pending = GlooPending(work, timeout, tensor, self._name)
            self._under_way.add(pending)
            self._to_do.put(pending)
        return pending

    def _carry_out(self, group: Any) -> None:
        """Run the group's thread; its frame holds the group until all operations have ended."""
        for pending in iter(self._to_do.get, None):
            pending.carry_out()
            with self._lock:
                self._under_way.discard(pending)
            # While waiting for the next operation, this frame would keep the last one.
            del pending
        del group
        if self._is_counted:
            _abandoned[self.rank].remove(threading.current_thread())

    def _connected(self, store: Any, host: str) -> Any:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  # the only way to name a device
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
        except RuntimeError as error:
            raise GroupError(f"gloo cannot listen at {host!r}: {error}") from error
        options._timeout = dt.timedelta(seconds=CONNECT_TIMEOUT_S)  # noqa: SLF001
        try:
            group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise GroupError(f"{self._name} cannot connect: {error}") from error
        group._set_default_timeout(self._timeout)  # noqa: SLF001  # of broadcasts alone
        return group


def _await_abandoned(rank: int, most: int, deadline: Deadline) -> None:
    # In a forked child, threads of the parent are listed and not alive.
    while len(left := [each for each in _abandoned[rank] if each.is_alive()]) > most:
        what = f"the end of {len(left)} broken process groups of rank {rank}"
        logger.warning("waiting for %s: gloo keeps them until its time-out", what)
        left[0].join(deadline.remaining())
        deadline.check(f"{what}, which gloo keeps until its time-out (option timeout_s)")
