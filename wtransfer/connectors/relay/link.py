"""One worker of another instance, as its counterpart here sees it: the side of the cache."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from wtransfer.connectors.relay.loads import Loading
from wtransfer.connectors.relay.messages import CODEC, MAX_ASKED, Ask, Card, Done, Found, Over
from wtransfer.connectors.relay.shelf import MISSING
from wtransfer.connectors.relay.taking import Wanted
from wtransfer.deadline import Deadline
from wtransfer.errors import (
    AuthenticationError,
    ClosedError,
    GroupError,
    KVLayoutError,
    PeerLostError,
    ProtocolError,
    StallError,
    WTransferError,
)
from wtransfer.transport.channel import Dialer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec

    from wtransfer.connectors.relay.loads import Loads
    from wtransfer.connectors.relay.taking import Taken, Taker
    from wtransfer.transport.channel import Connection

logger = logging.getLogger(__name__)

REACH_S = 0.25
"""How long somebody is dialed who does not answer at all: whoever tells of a shelf listens."""
CLOSE_S = 1.0
"""Longest wait for a load that is told to end."""

_POLL_S = 0.01
_REASONS = (
    (KVLayoutError, "layout"),
    (AuthenticationError, "refused"),
    (StallError, "stalled"),
    (ClosedError, "shutdown"),
    (ProtocolError, "protocol"),
    (PeerLostError, "lost"),
    (GroupError, "lost"),
)


class Here(NamedTuple):
    """What a link needs of the worker that it belongs to."""

    taker: Taker
    """Copies into its cache."""
    loads: Loads
    """Its loads."""
    deadline_s: float
    """Longest time without a sign of life from the other side, in seconds."""


class Link:
    """A connection, and a thread that loads over it. A base: kinds say how bytes are read.

    It ends when the other side is lost, does not fit or breaks the protocol; all its loads fail
    then, those that were waiting, too. The next load dials anew.

    Args:
        address: Where the other side listens.
        token: What to prove to know there.
        here: This side.
    """

    def __init__(self, address: str, token: str | None, here: Here) -> None:
        self.address = address
        """Where the other side listens."""
        self.here = here
        """This side."""
        self._changed = threading.Condition()
        self._to_do: deque[Loading | str] = deque()
        self._card: Card | None = None
        self._found: dict[int, list[int]] = {}
        self._numbers = itertools.count()
        self._error: WTransferError | None = None
        self._has_met = False
        self._ended = False
        self._dialer = Dialer(
            CODEC,
            address=address,
            token=token,
            on_open=lambda _connection: None,
            on_message=self._heard,
            on_close=self._closed,
            on_refused=self.lose,
            redial=False,
        )
        self._thread = threading.Thread(target=self._run, name="wtransfer-load", daemon=True)

    def start(self, first: Loading | str) -> None:
        """Begin, with something to do: if the link ends at once, it fails for the same reason."""
        self._to_do.append(first)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it can still load something."""
        return not self._ended and self._error is None

    def submit(self, what: Loading | str) -> bool:
        """Load something, or say that no more is wanted of a request; False: the link has ended."""
        with self._changed:
            if self._ended or self._error is not None:
                return False
            self._to_do.append(what)
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """End; what is not loaded is missing. A second call does nothing."""
        self.lose(ClosedError(f"the link to {self.address} was closed"))
        self._thread.join(CLOSE_S)

    # -- what kinds have to say; on the link's thread, but for `interrupt`

    def open(self, card: Card) -> None:
        """Get ready to read."""

    def fetch(
        self, wanted: Sequence[Wanted], slots: Sequence[int], go_on: Callable[[], bool]
    ) -> Taken:
        """Copy what stands in slots to where it belongs.

        Args:
            wanted: The blocks.
            slots: The slot of each.
            go_on: Whether they are still wanted.
        """
        raise NotImplementedError

    def interrupt(self) -> None:
        """Let a `fetch` that waits raise; any thread may call it."""

    def finish(self) -> None:
        """Let go of everything."""

    # -- the channel, on its thread

    def _heard(self, connection: Connection, message: msgspec.Struct) -> None:  # noqa: ARG002
        with self._changed:
            if isinstance(message, Card) and self._card is None:
                self._card = message
            elif isinstance(message, Found):
                self._found[message.number] = message.slots
            self._changed.notify_all()

    def _closed(self, connection: Connection, error: WTransferError | None) -> None:  # noqa: ARG002
        self.lose(error or PeerLostError(f"the connection to {self.address} was closed"))

    def lose(self, error: WTransferError) -> None:
        """End the link; any thread may call it, more than once."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
            # While the two meet, nothing is written to the cache, and the thread may be held up.
            left = [] if self._has_met else self._take_all()
        for loading in left:
            self.here.loads.end(loading, _reason(error))
        self.interrupt()

    # -- the thread

    def _run(self) -> None:
        error: BaseException
        try:
            self._meet()
            while True:
                self._work(self._next())
        except WTransferError as caught:
            error = self._error or caught
        except Exception as caught:
            error = caught
        if not isinstance(error, ClosedError):
            # Its text only: whoever keeps the record would keep its frames, and the mapping.
            logger.warning("no more blocks from %s: %s", self.address, str(error))
        self._end(_reason(error))

    def _end(self, reason: str) -> None:
        with self._changed:
            self._ended = True
            left = self._take_all()
        self._dialer.close()
        try:
            self.finish()
        finally:
            for loading in left:
                self.here.loads.end(loading, reason)

    def _take_all(self) -> list[Loading]:
        left = [each for each in self._to_do if isinstance(each, Loading)]
        self._to_do.clear()
        return left

    def _meet(self) -> None:
        card = self._wait_for_card()
        self.here.taker.layout.geometry.check_fits(
            card.geometry, f"{card.engine_id!r} ({self.address})"
        )
        if card.rank != self.here.taker.rank:
            raise KVLayoutError(
                f"{self.address} is rank {card.rank} of {card.engine_id!r}, this is rank "
                f"{self.here.taker.rank}; each loads from its own",
                field="rank",
            )
        self.open(card)
        with self._changed:
            self._check()
            self._has_met = True

    def _wait_for_card(self) -> Card:
        deadline, reach = Deadline(self.here.deadline_s), Deadline(REACH_S)
        with self._changed:
            while self._card is None:
                self._check()
                deadline.check(f"the worker at {self.address}: it does not say who it is")
                if reach.expired and self._dialer.last_error is not None:
                    raise self._dialer.last_error
                self._changed.wait(_POLL_S)
            return self._card

    def _next(self) -> Loading | str:
        with self._changed:
            while not self._to_do:
                self._check()
                self._changed.wait()
            self._check()
            return self._to_do.popleft()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self, what: Loading | str) -> None:
        if isinstance(what, str):
            self._dialer.send(Over(what))
            return
        reason: str | None = "error"
        try:
            reason = self._load(what)
        except WTransferError as error:
            reason = _reason(self._error or error)
            raise
        finally:
            self.here.loads.end(what, reason)
        self._dialer.send(Over(what.load.place.request_id))

    def _load(self, loading: Loading) -> str | None:
        """Load blocks up to the first that cannot be; return why it could not."""
        load = loading.load
        for start in range(0, len(load.names), MAX_ASKED):
            names = load.names[start : start + MAX_ASKED]
            number = next(self._numbers)
            self._dialer.send(Ask(number, load.place.request_id, names))
            slots = self._wait_for(number, len(names))
            present = until_missing(slots)
            wanted = list(map(Wanted, names, load.block_ids[start : start + len(present)]))
            taken = self.fetch(wanted, present, lambda: self._goes_on(loading))
            loading.num_loaded += taken.number
            self._check()
            self._dialer.send(Done(number))
            if taken.number < len(names):
                return taken.reason or "absent"
        return None

    def _goes_on(self, loading: Loading) -> bool:
        return self._error is None and not loading.unwanted

    def _wait_for(self, number: int, count: int) -> list[int]:
        deadline = Deadline(self.here.deadline_s)
        with self._changed:
            while number not in self._found:
                self._check()
                deadline.check(f"an answer of {self.address}")
                self._changed.wait(deadline.remaining())
            slots = self._found.pop(number)
        if len(slots) != count:
            raise ProtocolError(f"{self.address} told {len(slots)} slots for {count} blocks")
        return slots


def until_missing(slots: Sequence[int]) -> list[int]:
    """Return the slots before the first one that is not there: what is behind is of no use."""
    return list(itertools.takewhile(lambda slot: slot != MISSING, slots))


def _reason(error: BaseException) -> str:
    return next((reason for cls, reason in _REASONS if isinstance(error, cls)), "error")
