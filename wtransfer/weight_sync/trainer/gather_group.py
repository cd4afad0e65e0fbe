"""The protocol of a trainer's ranks between gathers, by way of the trainer's own store.

Each rank owns one key and overwrites it with its state; the publishing rank polls the keys of the
others, which poll its key. States are levels, not events: a late poll misses nothing that still
matters, and no key has to be deleted. One round, with P the publishing rank and R any other rank
that holds a part of its weights:

1. P writes attempt, version and the digest of its tensors' layout. R, called for that version,
   joins the attempt and compares layouts (its own against P's, which stands under another key).
2. P begins a pass over the source. For every bucket R writes `ready` once it has its shards in hand
   and has checked them; P writes `go` once all ranks are ready, and only then enters the gather. An
   attempt that ends (P), or a rank that fails (R), is seen in place of `go` or `ready`. When which
   state is written, and why this keeps the trainer's groups in step: `gather_state.py`.
3. P writes `packed`: R may change its weights. P appends the end of the attempt, for better or
   worse, to the list of the last ones, where a rank that comes late finds it.

The store has no authentication: a process that can write there can take the trainer's collectives
apart as well. The store's values are decoded as plain data and never as code.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch.distributed

from wtransfer.calls import Changed, SerialThread
from wtransfer.errors import (
    ClosedError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    StallError,
    WTransferError,
)
from wtransfer.weight_sync.messages import ErrorInfo  # noqa: TC001  # fields of states

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from wtransfer.deadline import Deadline

dist: Any = torch.distributed  # whose stores torch does not declare

PUBLISHER = "publisher"
"""Key of the publishing rank's `GatherRound`; that of any other rank is its number."""
LAYOUT = "layout"
"""Key of the publishing rank's `LayoutState`."""

SILENT_S = 2.5
"""Seconds without a sign of life after which a rank that takes part counts as lost."""
BEAT_S = 0.25
"""Seconds between two signs of life."""
STALLED_S = 1.0
"""Seconds after which this process, or the store, counts as having stood still: ranks may have
been heard of late then, so their silence is counted anew."""
MIN_PAUSE_S = 0.0005
"""Pause before the next poll after something has changed."""
MAX_PAUSE_S = 0.02
"""Longest pause between two polls."""


class Ended(msgspec.Struct, frozen=True):
    """How an attempt ended."""

    attempt: int
    """Number of the attempt."""
    version: str
    """Label."""
    error: ErrorInfo | None = None
    """Why it failed."""
    fingerprint: str = ""
    """Identity of the published weights."""


class GatherRound(msgspec.Struct, frozen=True):
    """State of the publishing rank."""

    epoch: str
    """Tells one publisher from the next under the same name."""
    rank: int
    """Rank in torch's default group."""
    attempt: int = 0
    """Number of the round under way, or of the last one; only grows."""
    version: str = ""
    """Label of that round."""
    phase: Literal["open", "packed", "over"] = "over"
    """Open: ranks still gather; packed: ranks may change their weights; over: no round to join."""
    layout: str = ""
    """Digest of the layout."""
    number: int = 0
    """Pass of the round; 0: none has begun."""
    go: int = 0
    """Buckets of this pass that may be gathered."""
    torn: int = 0
    """The last attempt in which this rank left a gather on an error: others wait in vain there."""
    ended: tuple[Ended, ...] = ()
    """The last attempts that have ended."""


class LayoutState(msgspec.Struct, frozen=True):
    """How the publishing rank's tensors lie."""

    digest: str
    """Digest of the lines."""
    lines: bytes
    """The lines, packed and compressed: a store takes no more than 8 MiB."""


class RankState(msgspec.Struct, frozen=True):
    """State of any other rank."""

    epoch: str
    """Epoch of the publisher that this rank follows."""
    attempt: int
    """Attempt that this rank has joined, or has been told the end of."""
    version: str
    """Label that its program has asked for."""
    number: int = 0
    """Pass."""
    ready: int = 0
    """Buckets of that pass that this rank has gathered or has in hand; without the one in hand once
    this rank has failed."""
    left: bool = False
    """True if this rank takes part no longer."""
    error: ErrorInfo | None = None
    """Why this rank left, or why its gather failed."""


_RANK_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[int, RankState])
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    PUBLISHER: msgspec.msgpack.Decoder(tuple[int, GatherRound]),
    LAYOUT: msgspec.msgpack.Decoder(tuple[int, LayoutState]),
}


class GatherGroup:
    """Writes the state of this rank to the trainer's store and reads that of others.

    One thread makes all calls to the store, over a connection of its own: a store whose host is
    stopped never answers, whatever time-out it was given, and a waiting call blocks the trainer's
    calls on the same connection. The calls only poll; every wait is one of `until`, which ends in
    time even if the thread hangs. The thread polls from `start` to `pause`.

    Args:
        name: Tells several publishers of one trainer apart.
        store: A torch store that all ranks share. Default: the one of torch's default group.
        publishing: True if this rank publishes.
        deadline_s: Longest time for which the store may not answer, in seconds.
    """

    def __init__(self, name: str, store: Any, *, publishing: bool, deadline_s: float) -> None:
        self._given = store
        self.deadline_s = deadline_s
        self._shared: Any = None
        self._prefix = f"wtransfer/{name}"
        self._publishing = publishing
        self.key = ""
        """Key of this rank, known from the first `start`."""
        self._store: Any = None
        self._thread = SerialThread("wtransfer-ranks")
        self.check: Callable[[], None] = lambda: None
        """Called in every wait, which raises the error of this call."""
        self._changed = self.lock = Changed()
        """Held where states are looked at and posted in one step, as in every `until`."""
        self._has_news = False
        """True if the thread has a state to write, or a pause or close to notice."""
        self.polling = False
        """True while the thread polls."""
        self._paused = False
        self._closed = False
        self._error: WTransferError | None = None
        self._others: tuple[str, ...] = ()
        self._mine: dict[str, msgspec.Struct] = {}
        self._written: dict[str, msgspec.Struct] = {}
        self._raw: dict[str, bytes] = {}
        self._states: dict[str, Any] = {}
        self._heard_at: dict[str, float] = {}
        self._alive: set[str] = set()
        self._polled_at = 0.0

    # -- for the rank

    def start(self, others: Collection[str] = ()) -> None:
        """Begin to poll the keys of `others`; states read before are forgotten.

        Raises:
            NotInitializedError: There is no default group, and no store was given.
        """
        shared = _default_store() if self._given is None else self._given
        with self._changed:
            self.key = PUBLISHER if self._publishing else str(own_rank())
            self._shared, self._others = shared, tuple(others)
            for known in (self._raw, self._states, self._heard_at, self._alive):
                known.clear()
            self._polled_at = time.monotonic()
            self._error, self._paused = None, False
            if not self.polling and not self._closed:
                self.polling = True
                self._thread.submit(self._poll)

    def add(self, others: Collection[str]) -> None:
        """Poll these keys as well."""
        with self._changed:
            self._others = (*dict.fromkeys((*self._others, *others)),)

    def post(self, state: msgspec.Struct, key: str | None = None) -> None:
        """Let the store have a state of this rank, from `start` on."""
        with self._changed:
            self._mine[key or self.key] = state
            self._has_news = True
        self._changed.notify_all()

    def flush(self, deadline: Deadline) -> None:
        """Wait until the store has all posted states.

        Raises:
            StallError: The store has not taken them in time.
            PeerLostError: The store is gone.
        """
        self.until(self._is_written, deadline, "writing to the trainer's store")

    def heard(self, key: str) -> Any:
        """Return the state of another rank; None if there is none."""
        return self._states.get(key)

    def is_alive(self, key: str) -> bool:
        """Return True if another rank has written since `start`, and not only before."""
        return key in self._alive

    def lost(self, key: str, what: str) -> PeerLostError | None:
        """Return an error if a rank was heard of and its signs of life have stopped."""
        now = time.monotonic()
        silent_s = now - self._heard_at.get(key, now)
        if silent_s < SILENT_S or now - self._polled_at > STALLED_S:
            return None
        return PeerLostError(
            f"{what} was lost: it takes part in a round and has given no sign of life for "
            f"{silent_s:.1f} s; its process is dead, or stopped"
        )

    def until(
        self, done: Callable[[], Any], deadline: Deadline, what: str | Callable[[], str]
    ) -> Any:
        """Wait until `done` returns something true, and return that.

        Args:
            done: Called under a lock whenever something may have changed; may raise.
            deadline: When to give up.
            what: Name of the wait, for the error.

        Raises:
            StallError: The deadline has passed.
            PeerLostError: The store is gone.
            ClosedError: `close` was called.
        """

        def look() -> Any:
            if found := done():
                return found
            self.check()
            if self._closed:
                raise ClosedError("this rank of the trainer was closed")
            if self._error is not None:
                raise self._error.with_traceback(None)
            mute_s = time.monotonic() - self._polled_at
            if mute_s > self.deadline_s or (deadline.expired and mute_s > STALLED_S):
                raise StallError(
                    f"the trainer's store has not answered for {mute_s:.1f} s: its host is "
                    "stopped or cannot be reached",
                    seconds=mute_s,
                )
            if deadline.expired:
                text = what if isinstance(what, str) else what()
                raise StallError(
                    f"no progress on {text} within {deadline.seconds:g} s",
                    seconds=deadline.seconds,
                )
            return None

        # A missing sign of life raises no event: the wait polls.
        return self._changed.wait_for(look)

    def wake(self) -> None:
        """Let every wait look again."""
        self._changed.notify_all()

    def pause(self) -> None:
        """Stop polling once the store has all posted states."""
        with self._changed:
            self._paused = self._has_news = True
        self._changed.notify_all()

    def close(self) -> None:
        """Stop polling and let go of the store; every wait ends."""
        with self._changed:
            self._closed = self._paused = self._has_news = True
        self._changed.notify_all()
        self._thread.stop()
        self._thread.join(STALLED_S)
        self._store = self._shared = None

    # -- on the thread

    def _poll(self) -> None:
        pause_s, written_at = MIN_PAUSE_S, 0.0
        error: WTransferError | None = None
        try:
            if self._store is None:
                self._connect()
            while True:
                with self._changed:
                    self._has_news = False
                    mine, others = self._mine.copy(), self._others
                now = time.monotonic()
                due = now - written_at > BEAT_S
                stale = [k for k, s in mine.items() if self._written.get(k) is not s]
                for key, state in mine.items():
                    if key in stale or (due and key == self.key):
                        self._store.set(key, msgspec.msgpack.encode((time.monotonic_ns(), state)))
                        written_at = now
                there = [k for k in others if k in self._raw or self._store.check([k])]
                raw = dict(zip(there, self._store.multi_get(there), strict=True)) if there else {}
                with self._changed:
                    changed = self._take(mine, raw)
                    if self._paused and self._is_written():
                        # Under the same lock: `start` must see that this thread polls no longer.
                        self.polling = False
                        return
                # A change is mostly followed by another one.
                pause_s = MIN_PAUSE_S if changed or stale else min(2 * pause_s, MAX_PAUSE_S)
                self._changed.wait_for(lambda: self._has_news, pause_s)
        except msgspec.MsgspecError as raised:
            error = ProtocolError(
                f"the trainer's store holds something else under {self._prefix!r}: {raised}"
            )
            error.__cause__ = raised
        except Exception as raised:
            error = PeerLostError(
                "the trainer's store is gone, with it the way to the other ranks: "
                f"{type(raised).__name__}: {raised}"
            )
            error.__cause__ = raised
        if error is not None:
            with self._changed:
                self.polling, self._error, self._store = False, error, None
            self._changed.notify_all()

    def _connect(self) -> None:
        # First, since a clone would try for minutes to reach a host that has ended.
        self._shared.check([self._prefix])
        self._store = dist.PrefixStore(self._prefix, self._shared.clone())
        # A new store has none of the states written to an earlier one.
        self._written = {}

    def _take(self, mine: dict[str, msgspec.Struct], raw: dict[str, bytes]) -> bool:
        """Note the states written and read; return True if any is new. Under the lock."""
        now = time.monotonic()
        if now - self._polled_at > STALLED_S:
            self._heard_at = dict.fromkeys(self._heard_at, now)
        self._polled_at = now
        self._written = mine
        new = {key: value for key, value in raw.items() if value != self._raw.get(key)}
        for key, value in new.items():
            if key in self._states:
                self._alive.add(key)
            self._states[key] = _decoded(key, value)
            self._heard_at[key] = now
        self._raw |= new
        self._changed.notify_all()
        return bool(new)

    def _is_written(self) -> bool:
        return all(self._written.get(key) is state for key, state in self._mine.items())


def own_rank() -> int:
    """Return this process's rank in torch's default group; 0 where there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _decoded(key: str, raw: bytes) -> Any:
    return _DECODERS.get(key, _RANK_DECODER).decode(raw)[1]


def _default_store() -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise NotInitializedError(
            "torch.distributed is not initialized in this process: the ranks of a trainer find "
            "each other by the store of its default group; call init_process_group first, or "
            "pass store="
        )
    from torch.distributed import distributed_c10d

    # Torch has no public way to the store of its default group.
    return distributed_c10d._get_default_store()  # noqa: SLF001
