"""Process groups of one's own, on gloo: never torch's default group, and several in one process.

Gloo's own collectives are not used. A connection that breaks in the midst of a tensor leaves their
operation behind, since gloo only ends those that have not begun to move: one of its threads then
waits for its time-out, and keeps the group's descriptors and the tensor's memory for as long.

So operations are made of messages between two ranks, for which none of gloo's threads waits. Each
is three: the content, an empty one after it on the same connection, and an empty one as answer.
Only the empty ones are waited for. They have no midst, so gloo ends them as soon as the connection
breaks; and where one has arrived, so has the content before it. A broadcast goes down a tree:
whoever has received sends on.
"""

from __future__ import annotations

import collections
import datetime as dt
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed

from wtransfer.errors import GroupError
from wtransfer.transport.communicator import OPERATION_TIMEOUT_S
from wtransfer.transport.connections import Endpoint, hang_up, listening
from wtransfer.transport.rendezvous import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.transport.rendezvous import Rendezvous

_ToDo: TypeAlias = "queue.SimpleQueue[GlooPending | None]"

dist: Any = torch.distributed  # whose groups torch does not declare

CONNECT_TIMEOUT_S = 10.0
"""Longest time that ranks take to connect to each other, after all have arrived."""
CLOSE_TIMEOUT_S = 0.5
"""Longest wait for what is under way in a group that is closed; it ends within milliseconds."""
MAX_ANSWERS = 1024
"""Answers that are kept until they are written: more than a rank has operations under way."""
_CONTENT, _END, _ANSWER = range(3)
_MAX_DEVICES = 5
_MAX_LOOKS = 50
_LOOK_S = 0.002

_making_device = threading.Lock()


class GlooPending:
    """One rank's part in an operation: it receives from one rank or none, and sends to others.

    Made by `GlooCommunicator`.

    Args:
        communicator: The rank.
        tensor: Kept until the end: torch's works do not always keep it.
        source: Rank that it comes from; None: this one.
        targets: Ranks that it is sent to.
    """

    def __init__(
        self,
        communicator: GlooCommunicator,
        tensor: torch.Tensor,
        source: int | None,
        targets: list[int],
    ) -> None:
        self._communicator = communicator
        self._tensor: torch.Tensor | None = tensor
        self._source = source
        self._targets = targets
        self._moving: list[Any] = []
        self._answers: list[Any] = []
        self._sent_on = threading.Event()
        self._error: str | None = None

    def wait(self) -> None:
        """Wait for the end; a second call does nothing.

        Raises:
            GroupError: A rank is gone or late, or the group was aborted.
        """
        # Without a time-out: what comes before it has its own, and ends.
        self._sent_on.wait()
        self._await_answers()
        self._communicator.leave(self)
        if self._error is not None:
            raise self._communicator.failure(self._error)

    def post(self, group: Any) -> None:
        """Tell gloo where the content goes to that another rank sends; does not wait."""
        if self._source is not None:
            self._moving = [
                group.recv([self._tensor], self._source, _CONTENT),
                group.recv([_nothing()], self._source, _END),
            ]

    def carry_out(self, group: Any) -> None:
        """Wait for the content, if it is another rank's, answer, and send it on; does not raise."""
        if self._communicator.aborted:  # which has failed this one, too
            return
        tensor, moving = self._tensor, self._moving  # an abort lets go of them at any time
        try:
            if self._source is not None:
                self._communicator.await_end(moving[-1])
                self._communicator.keep(group.send([_nothing()], self._source, _ANSWER))
            for target in self._targets:
                # Asked for first, so that it can be written as soon as the content is there.
                self._answers.append(group.recv([_nothing()], target, _ANSWER))
                moving.append(group.send([tensor], target, _CONTENT))
                moving.append(group.send([_nothing()], target, _END))
        except Exception as error:
            self.fail(f"{error}")
        self._sent_on.set()

    def fail(self, why: str) -> None:
        """Let whoever waits for it have an error."""
        self._error = self._error or why
        self._sent_on.set()

    def forget(self) -> None:
        """Let go of torch's works, which hold the group's connections; an error may hold this.

        Of an operation that has ended gloo neither reads nor writes the tensor any more. Of one
        that was made to fail while the thread is inside `carry_out` it may, until that returns:
        its frame keeps works and tensor for as long, which is until their connections have ended.
        """
        self._moving, self._answers, self._tensor = [], [], None

    def _await_answers(self) -> None:
        try:
            for answer in tuple(self._answers):
                self._communicator.await_end(answer)
        except RuntimeError as error:
            self.fail(f"{error}")
        # Of one that has come, gloo would wait for a second one.
        self._answers = []


class GlooCommunicator:
    """A group of CPU ranks on one or several hosts, over TCP.

    Args:
        rendezvous: Where the ranks meet; used up by this group.
        rank: This process's rank.
        size: Ranks of the group.
        host: Address of this machine at which the other ranks reach it; nothing else listens.
        timeout_s: Longest wait for the other ranks to arrive, in seconds.
        operation_timeout_s: When a rank gives an operation up by itself, in seconds.

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
        operation_timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> None:
        self.rank = rank
        self.size = size
        self.aborted = False
        """Whether `abort` was called here."""
        self._group: Any = None
        self._limit = dt.timedelta(seconds=operation_timeout_s)
        self._device, own = _device_at(host)
        try:
            cards = rendezvous.meet(rank, size, f"{own[0]} {own[1]}", timeout_s)
            self._endpoints = {_endpoint(card) for card in cards}
            self._group = self._connect(rendezvous)
        finally:
            # It listens for as long as anybody has it, and a frame of an error would.
            self._device = None
        self._changing = threading.Lock()
        self._under_way: set[GlooPending] = set()
        to_do: _ToDo = queue.SimpleQueue()
        self._to_do = to_do
        self._answers_sent: collections.deque[Any] = collections.deque(maxlen=MAX_ANSWERS)
        # One after the other, in the order in which they were begun: what goes over a connection
        # has no name. On a thread, since ranks answer and send on whatever their callers do. It has
        # no communicator, so that it ends with one that nobody has closed.
        self._thread = threading.Thread(
            target=_carry_out_all, args=(to_do, self._group), name="wtransfer-gloo", daemon=True
        )
        self._end_thread = weakref.finalize(self, to_do.put, None)
        # At exit threads end anyhow, and a group must not be destroyed meanwhile.
        self._end_thread.atexit = False
        self._thread.start()

    def broadcast(self, tensor: torch.Tensor, root: int) -> GlooPending:
        """Begin to copy from rank `root` to all."""
        place = (self.rank - root) % self.size
        source = None if place == 0 else (_before(place) + root) % self.size
        targets = [(each + root) % self.size for each in _after(place, self.size)]
        return self._begin(tensor, source, targets)

    def send(self, tensor: torch.Tensor, to: int) -> GlooPending:
        """Begin to send to one rank."""
        return self._begin(tensor, None, [to])

    def recv(self, tensor: torch.Tensor, source: int) -> GlooPending:
        """Begin to receive from one rank."""
        return self._begin(tensor, source, [])

    def abort(self) -> None:
        """End the connections, so that all that waits ends: here, and elsewhere for this rank.

        Raises:
            OSError: They cannot be found, since no descriptor is left. Everything under way has
                failed nevertheless; what gloo itself waits for ends with the group, or in time.
        """
        with self._changing:
            self.aborted = True
            under_way = list(self._under_way)
        try:
            hang_up(self._endpoints)
        finally:
            for pending in under_way:
                pending.fail("the group was aborted")

    def close(self) -> None:
        """Release the group; what is under way in it fails.

        Raises:
            OSError: As `abort`; the group has been released all the same.
        """
        try:
            self.abort()
        finally:
            self._end_thread()
            self._thread.join(CLOSE_TIMEOUT_S)
            with self._changing:
                for pending in self._under_way:
                    pending.forget()
                self._under_way.clear()
            self._answers_sent.clear()
            self._group = None

    # -- for its operations

    def await_end(self, work: Any) -> None:
        """Wait for one of torch's works, of an empty message.

        Raises:
            RuntimeError: Its connection is broken, or time is over; then the group is broken too.
        """
        work.wait(self._limit)

    def keep(self, answer: Any) -> None:
        """Keep torch's work of an answer until it is written, of which nobody tells."""
        self._answers_sent.append(answer)

    def leave(self, pending: GlooPending) -> None:
        """Note that an operation has ended."""
        with self._changing:
            self._under_way.discard(pending)
        pending.forget()

    def failure(self, error: str) -> GroupError:
        """Return our error for one of gloo's."""
        why = "the group was aborted" if self.aborted else error
        return GroupError(f"rank {self.rank} of {self.size}: {why}")

    def _begin(self, tensor: torch.Tensor, source: int | None, targets: list[int]) -> GlooPending:
        pending = GlooPending(self, tensor, source, targets)
        with self._changing:
            if self._group is None or self.aborted:
                raise self.failure("the group was closed")
            try:
                pending.post(self._group)
            except RuntimeError as error:
                # Its frames have torch's group, which would live as long as the error.
                raise self.failure(f"{error}") from error.with_traceback(None)
            self._under_way.add(pending)
            self._to_do.put(pending)
        return pending

    def _connect(self, rendezvous: Rendezvous) -> Any:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  # the only way to name a device
        options._devices = [self._device]  # noqa: SLF001
        options._timeout = dt.timedelta(seconds=CONNECT_TIMEOUT_S)  # noqa: SLF001
        try:
            # Gloo bounds its waits for ranks, but not those for the store's answers.
            with rendezvous.waiting(CONNECT_TIMEOUT_S + GRACE_S, self._endpoints):
                group = dist.ProcessGroupGloo(rendezvous.store, self.rank, self.size, options)
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} of {self.size} cannot connect: {error}") from error
        except GroupError:
            # Called off just when it was made: this frame would keep it as long as the error.
            group = None
            raise
        finally:
            options._devices = []  # noqa: SLF001
        return group


def _carry_out_all(to_do: _ToDo, group: Any) -> None:
    for pending in iter(to_do.get, None):
        pending.carry_out(group)
        # Waiting for the next one, this frame would keep it, its tensor, and its communicator.
        del pending


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _before(place: int) -> int:
    """Return who sends to a place of the tree; 0 is its root."""
    return place - (1 << (place.bit_length() - 1))


def _after(place: int, size: int) -> Iterator[int]:
    """Yield to whom a place of the tree sends, whoever has the most after it first."""
    step = 1 << place.bit_length()
    while place + step < size:
        yield place + step
        step *= 2


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
