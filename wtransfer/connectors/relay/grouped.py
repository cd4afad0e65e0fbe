"""The two ends on different hosts: bytes travel over a process group of two.

The control channel says what is wanted and when somebody is gone; the group only moves bytes. P
hosts a meeting for every asker that has proved to know the token, and sends what it has found for a
question, slot by slot as they lie there, up to the first that is missing. D receives into memory of
its own, and compares before and after it copies.

Whoever loses the channel aborts the group, so that nobody waits in it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from wtransfer.connectors.relay.desk import Desk
from wtransfer.connectors.relay.link import Link, until_missing
from wtransfer.errors import GroupError, ProtocolError, WTransferError
from wtransfer.transport.process_group import GlooCommunicator
from wtransfer.transport.rendezvous import host_rendezvous, join_rendezvous, own_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wtransfer.connectors.relay.link import Here
    from wtransfer.connectors.relay.messages import Ask, Card
    from wtransfer.connectors.relay.shelf import Shelf
    from wtransfer.connectors.relay.taking import Taken, Wanted
    from wtransfer.transport.channel import Connection
    from wtransfer.transport.communicator import Pending
    from wtransfer.transport.rendezvous import Rendezvous
    from wtransfer.transport.tensors import ByteArray

logger = logging.getLogger(__name__)

DEPTH = 4
"""Slots under way at a time."""
JOIN_S = 3.0
"""Longest wait for the host of a meeting, which has just told of it."""

_SENDER, _RECEIVER, _SIZE = range(3)
_END_S = 1.0


class Pair:
    """One end of a group of two, from the meeting on. Any thread may abort it.

    Args:
        rendezvous: Where the two meet; used up.
        rank: Of this end.
        host: Address of this machine at which the other end reaches it.
        timeout_s: Longest wait for the other end, and for any operation, in seconds.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, host: str, timeout_s: float) -> None:
        self._rendezvous = rendezvous
        self._rank, self._host, self._timeout_s = rank, host, timeout_s
        self._lock = threading.Lock()
        self._aborted = False
        self._group: GlooCommunicator | None = None

    def meet(self) -> GlooCommunicator:
        """Return the group, once both are there.

        Raises:
            WTransferError: The other end does not come, or this one was aborted.
        """
        group = GlooCommunicator(
            self._rendezvous,
            self._rank,
            _SIZE,
            host=self._host,
            timeout_s=self._timeout_s,
            operation_timeout_s=self._timeout_s,
        )
        with self._lock:
            self._group = group
            aborted = self._aborted
        if aborted:
            raise GroupError("the group was aborted before both were there")
        return group

    def abort(self) -> None:
        """Let all that waits in it raise; a second call does nothing."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            group = self._group
        if group is None:
            self._rendezvous.cancel()
        else:
            group.abort()

    def close(self) -> None:
        """Release it; only after `meet` has returned or raised."""
        self.abort()
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close()
        # Only now: the other end may still connect when this one has.
        self._rendezvous.close()


class _Sender:
    """Sends to one asker, on a thread of its own.

    Args:
        shelf: What it sends from.
        pair: This end of the group.
    """

    def __init__(self, shelf: Shelf, pair: Pair) -> None:
        self._shelf = shelf
        self._pair = pair
        self._to_do: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="wtransfer-send", daemon=True)
        self._thread.start()

    def send(self, slots: list[int]) -> None:
        """Send slots, after all that was to be sent before."""
        self._to_do.put(slots)

    def end(self) -> None:
        """Stop soon; does not wait."""
        self._to_do.put(None)
        self._pair.abort()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            group = self._pair.meet()
            for slots in iter(self._to_do.get, None):
                self._send(group, slots)
        except WTransferError as error:
            # The asker hears of it by the group, or is the one that is gone.
            logger.info("no more blocks to this asker: %s", error)
        finally:
            self._pair.close()

    def _send(self, group: GlooCommunicator, slots: list[int]) -> None:
        nbytes = self._shelf.layout.nbytes
        under_way: deque[Pending] = deque()
        for slot in slots:
            if len(under_way) == DEPTH:
                under_way.popleft().wait()
            memory = self._shelf.slot(slot)[:nbytes]
            under_way.append(group.send(torch.from_numpy(memory), _RECEIVER))
        while under_way:
            under_way.popleft().wait()


class SendingDesk(Desk):
    """Sends what is asked for.

    Args:
        shelf: The shelf.
        host: Address of this machine at which askers reach it.
        deadline_s: Longest wait for an asker, in seconds.
        **settings: As `Desk`.
    """

    def __init__(self, shelf: Shelf, *, host: str, deadline_s: float, **settings: Any) -> None:
        self._own_shelf = shelf
        self._host, self._deadline_s = host, deadline_s
        self._senders: dict[Connection, _Sender] = {}
        super().__init__(shelf, deadline_s=deadline_s, **settings)

    def facts(self, connection: Connection) -> dict[str, int | str]:
        """Open a meeting, and return where it is."""
        rendezvous = host_rendezvous(self._host)
        facts: dict[str, int | str] = {
            "host": rendezvous.host,
            "port": rendezvous.port,
            "name": rendezvous.name,
        }
        pair = Pair(rendezvous, _SENDER, self._host, self._deadline_s)
        self._senders[connection] = _Sender(self._own_shelf, pair)
        return facts

    def found(self, connection: Connection, ask: Ask, slots: list[int]) -> None:  # noqa: ARG002
        """Send them."""
        self._senders[connection].send(until_missing(slots))

    def gone(self, connection: Connection) -> None:
        """End what waits for an asker that is gone."""
        sender = self._senders.pop(connection, None)
        if sender is not None:
            sender.end()

    def close(self) -> None:
        """Send everybody away."""
        senders = list(self._senders.values())
        super().close()
        for sender in senders:
            sender.join()


class ReceivingLink(Link):
    """Receives what it asks for.

    Args:
        address: Where the other side listens.
        token: What to prove to know there.
        here: This side.
        host: Address of this machine at which the other side reaches it; None: the one from which
            this machine reaches the other.
    """

    _pair: Pair | None = None
    _group: GlooCommunicator | None = None
    _interrupted = False

    def __init__(self, address: str, token: str | None, here: Here, host: str | None) -> None:
        self._host = host
        self._guard = threading.Lock()
        super().__init__(address, token, here)

    def open(self, card: Card) -> None:
        """Meet the other side."""
        host, port, name = (card.facts.get(each) for each in ("host", "port", "name"))
        if not (isinstance(host, str) and isinstance(port, int) and isinstance(name, str)):
            raise ProtocolError(f"{self.address} does not say where its process group meets")
        own = self._host or own_address(host, port)
        rendezvous = join_rendezvous(host, port, name, min(JOIN_S, self.here.deadline_s))
        pair = Pair(rendezvous, _RECEIVER, own, self.here.deadline_s)
        with self._guard:
            self._pair = pair
            interrupted = self._interrupted
        if interrupted:
            pair.abort()
        self._group = pair.meet()
        nbytes = self.here.taker.layout.nbytes
        self._memory = torch.empty((DEPTH, nbytes), dtype=torch.uint8, device="cpu")

    def fetch(
        self, wanted: Sequence[Wanted], slots: Sequence[int], go_on: Callable[[], bool]
    ) -> Taken:
        """Copy what arrives; all of it does, whether it is still wanted or not."""
        return self.here.taker.take(wanted, self._received(len(slots)), go_on)

    def _received(self, number: int) -> Iterator[ByteArray]:
        group = self._group
        assert group is not None
        memories = self._memory[:number]
        under_way = deque(group.recv(memory, _SENDER) for memory in memories)
        for each in range(number):
            try:
                under_way.popleft().wait()
            except GroupError as error:
                # What has arrived before is good; then the link ends.
                self.lose(error)
                return
            memory = self._memory[each % DEPTH]
            yield memory.numpy()
            if each + DEPTH < number:
                under_way.append(group.recv(memory, _SENDER))

    def interrupt(self) -> None:
        """Break the group."""
        with self._guard:
            self._interrupted = True
            pair = self._pair
        if pair is not None:
            pair.abort()

    def finish(self) -> None:
        """Release the group."""
        self._group = None
        if self._pair is not None:
            self._pair.close()
