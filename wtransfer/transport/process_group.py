"""Process groups of one's own, on gloo: never torch's default group, and several in one process."""

from __future__ import annotations

import datetime as dt
import threading
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
OPERATION_TIMEOUT_S = 600.0
"""When gloo gives an operation up by itself. The control channel is faster: it calls `abort`."""
_MAX_DEVICES = 5

_making_device = threading.Lock()


class GlooPending:
    """One of gloo's operations.

    Args:
        work: Torch's.
        group: The communicator.
        tensor: Kept until the end: torch's work does not always keep it.
    """

    def __init__(self, work: Any, group: GlooCommunicator, tensor: torch.Tensor) -> None:
        self._work = work
        self._group = group
        self._tensor = tensor

    def wait(self) -> None:
        """Wait for the end.

        Raises:
            GroupError: A rank is gone, or the group was aborted.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._group.failure(error) from error


class GlooCommunicator:
    """A group of CPU ranks on one or several hosts, over TCP.

    Args:
        rendezvous: Where the ranks meet; used up by this group.
        rank: This process's rank.
        size: Ranks of the group.
        host: Address of this machine at which the other ranks reach it; nothing else listens.
        timeout_s: Longest wait for the other ranks to arrive, in seconds.

    Raises:
        GroupError: The rank is taken, or the ranks cannot connect to each other.
        PeerLostError: The rendezvous is gone.
        StallError: Not all ranks have arrived in time.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, size: int, *, host: str, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        self._aborted = False
        device, own = _device_at(host)
        cards = rendezvous.meet(rank, size, f"{own[0]} {own[1]}", timeout_s)
        self._endpoints = {_endpoint(card) for card in cards}
        self._group: Any = self._connect(device, rendezvous.store)

    def broadcast(self, tensor: torch.Tensor, root: int) -> GlooPending:
        """Begin to copy from rank `root` to all."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._begin(lambda group: group.broadcast([tensor], options), tensor)

    def send(self, tensor: torch.Tensor, to: int) -> GlooPending:
        """Begin to send to one rank."""
        return self._begin(lambda group: group.send([tensor], to, 0), tensor)

    def recv(self, tensor: torch.Tensor, source: int) -> GlooPending:
        """Begin to receive from one rank."""
        return self._begin(lambda group: group.recv([tensor], source, 0), tensor)

    def abort(self) -> None:
        """End the connections, so that all that waits for one ends, here and elsewhere."""
        self._aborted = True
        hang_up(self._endpoints)

    def close(self) -> None:
        """Release the group; what is under way in it fails."""
        # Its destructor waits for what is under way.
        self.abort()
        self._group = None

    def failure(self, error: RuntimeError) -> GroupError:
        """Return our error for one of gloo's."""
        why = "the group was aborted" if self._aborted else f"{error}"
        return GroupError(f"rank {self.rank} of {self.size}: {why}")

    def _begin(self, begin: Callable[[Any], Any], tensor: torch.Tensor) -> GlooPending:
        group = self._group
        if group is None or self._aborted:
            raise GroupError(f"rank {self.rank} of {self.size}: the group was aborted")
        try:
            return GlooPending(begin(group), self, tensor)
        except RuntimeError as error:
            raise self.failure(error) from error

    def _connect(self, device: object, store: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  # the only way to name a device
        options._devices = [device]  # noqa: SLF001
        options._timeout = dt.timedelta(seconds=CONNECT_TIMEOUT_S)  # noqa: SLF001
        try:
            group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} of {self.size} cannot connect: {error}") from error
        group.set_timeout(dt.timedelta(seconds=OPERATION_TIMEOUT_S))
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
            new = [endpoint for endpoint in listening() - before if endpoint[0] == host]
        if len(new) == 1:
            return device, new[0]
        # Something else in this process began to listen in between: which one is gloo's?
    raise GroupError(f"cannot tell where gloo listens at {host!r}: other listeners come and go")


def _endpoint(card: str) -> Endpoint:
    host, _, port = card.partition(" ")
    return host, int(port)
