"""Process groups of one's own, on gloo: never torch's default group, and several in one process."""

from __future__ import annotations

import datetime as dt
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed

from wtransfer.errors import GroupError
from wtransfer.transport.connections import Endpoint, hang_up, listening

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.transport.rendezvous import Rendezvous

dist: Any = torch.distributed  # whose groups torch does not declare

CONNECT_TIMEOUT_S = 10.0
"""Longest time that ranks take to connect to each other, after all have arrived."""
OPERATION_TIMEOUT_S = 120.0
"""When gloo gives an operation up by itself. The control channel is faster: it calls `abort`."""
CLOSE_TIMEOUT_S = 0.5
"""Longest wait for gloo to release a group."""
_LOOK_UP = dt.timedelta(seconds=0.2)
_MAX_DEVICES = 5
_MAX_LOOKS = 50
_LOOK_S = 0.002

_making_device = threading.Lock()


class GlooPending:
    """One of gloo's operations.

    Args:
        work: Torch's.
        group: The communicator.
        tensor: Kept until the end: torch's work does not always keep it.
        is_message: Whether it concerns two ranks only.
    """

    def __init__(
        self, work: Any, group: GlooCommunicator, tensor: torch.Tensor, *, is_message: bool
    ) -> None:
        self._is_message = is_message
        self._work = work
        self._group = group
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> None:
        """Wait for the end.

        Raises:
            GroupError: A rank is gone, or the group was aborted.
        """
        work = self._work
        if work is None:
            raise self._group.failure("the group was closed")
        try:
            while not self._ends(work):
                if self._group.aborted:
                    raise self._group.failure("the group was aborted")
        except RuntimeError as error:
            raise self._group.failure(f"{error}") from error
        finally:
            # The frame of an error would keep it.
            del work

    def _ends(self, work: Any) -> bool:
        """Wait, but only so long that an abort is noticed of which gloo does not tell this work.

        Gloo forgets an operation that begins while its connection breaks: nothing ends it then.
        """
        if self._is_message:
            work.wait()  # a time-out would break the group
            return True
        try:
            work.wait(_LOOK_UP)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it ended meanwhile, one way or the other
        finally:
            del work
        return True

    def forget(self) -> None:
        """Let go of torch's work: it holds the group's connections, and an error may hold this."""
        self._work = None
        self._tensor = None


class GlooCommunicator:
    """A group of CPU ranks on one or several hosts, over TCP.

    Args:
        rendezvous: Where the ranks meet; used up by this group.
        rank: This process's rank.
        size: Ranks of the group.
        host: Address of this machine at which the other ranks reach it; nothing else listens.
        timeout_s: Longest wait for the other ranks to arrive, in seconds.
        operation_timeout_s: When gloo gives an operation up by itself, in seconds.

    Raises:
        GroupError: The rank is taken, or the ranks cannot connect to each other.
        PeerLostError: The rendezvous is gone.
        StallError: Not all ranks have arrived in time.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        size: int,
        *,
        host: str,
        timeout_s: float,
        operation_timeout_s: float | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.aborted = False
        """Whether `abort` was called here."""
        self._group: Any = None
        self._begun: weakref.WeakSet[GlooPending] = weakref.WeakSet()
        self._device, own = _device_at(host)
        try:
            cards = rendezvous.meet(rank, size, f"{own[0]} {own[1]}", timeout_s)
            self._endpoints = {_endpoint(card) for card in cards}
            self._group = self._connect(rendezvous)
            limit = OPERATION_TIMEOUT_S if operation_timeout_s is None else operation_timeout_s
            self._group.set_timeout(dt.timedelta(seconds=limit))
        finally:
            # It listens for as long as anybody has it, and a frame of an error would.
            self._device = None

    def broadcast(self, tensor: torch.Tensor, root: int) -> GlooPending:
        """Begin to copy from rank `root` to all."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._begin(
            lambda group: group.broadcast([tensor], options), tensor, is_message=False
        )

    def send(self, tensor: torch.Tensor, to: int) -> GlooPending:
        """Begin to send to one rank."""
        return self._begin(lambda group: group.send([tensor], to, 0), tensor, is_message=True)

    def recv(self, tensor: torch.Tensor, source: int) -> GlooPending:
        """Begin to receive from one rank."""
        return self._begin(lambda group: group.recv([tensor], source, 0), tensor, is_message=True)

    def abort(self) -> None:
        """End the connections, so that all that waits ends: here, and elsewhere for this rank."""
        self.aborted = True
        hang_up(self._endpoints)

    def close(self) -> None:
        """Release the group; what is under way in it fails."""
        self.abort()
        for pending in list(self._begun):
            pending.forget()
        groups, self._group = [self._group], None
        # Its destructor waits for what is under way, and gloo may have forgotten to end that: see
        # `GlooPending`. Then it takes gloo's time-out, and nobody shall wait for it.
        releasing = threading.Thread(target=groups.clear, name="wtransfer-gloo", daemon=True)
        releasing.start()
        releasing.join(CLOSE_TIMEOUT_S)

    def failure(self, error: str) -> GroupError:
        """Return our error for one of gloo's."""
        why = "the group was aborted" if self.aborted else error
        return GroupError(f"rank {self.rank} of {self.size}: {why}")

    def _begin(
        self, begin: Callable[[Any], Any], tensor: torch.Tensor, *, is_message: bool
    ) -> GlooPending:
        try:
            pending = GlooPending(begin(self._whole()), self, tensor, is_message=is_message)
        except RuntimeError as error:
            # Its frames have torch's group, which would live as long as the error.
            raise self.failure(f"{error}") from error.with_traceback(None)
        self._begun.add(pending)
        return pending

    def _whole(self) -> Any:
        if self._group is None or self.aborted:
            raise self.failure("the group was closed")
        return self._group

    def _connect(self, rendezvous: Rendezvous) -> Any:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  # the only way to name a device
        options._devices = [self._device]  # noqa: SLF001
        options._timeout = dt.timedelta(seconds=CONNECT_TIMEOUT_S)  # noqa: SLF001
        try:
            group = dist.ProcessGroupGloo(rendezvous.store, self.rank, self.size, options)
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} of {self.size} cannot connect: {error}") from error
        finally:
            options._devices = []  # noqa: SLF001
        return group


def _device_at(host: str) -> tuple[object, Endpoint]:
    """Return a gloo device that listens at one address, and where: it does not say so itself."""
    for _ in range(_MAX_DEVICES):
        with _making_device:
            before = listening()
            try:
                device = dist.ProcessGroupGloo.create_device(hostname=host)
            except RuntimeError as error:
                raise GroupError(f"gloo cannot listen at {host!r}: {error}") from error
            new = {endpoint for endpoint in listening() - before if endpoint[0] == host}
            # What else began to listen in between may go again; gloo's stays.
            for _ in range(_MAX_LOOKS):
                if len(new) <= 1:
                    break
                time.sleep(_LOOK_S)
                new &= listening()
        if len(new) == 1:
            return device, new.pop()
        # Something else in this process stays, too: which one is gloo's?
    raise GroupError(f"cannot tell where gloo listens at {host!r}: other listeners come and go")


def _endpoint(card: str) -> Endpoint:
    host, _, port = card.partition(" ")
    return host, int(port)
