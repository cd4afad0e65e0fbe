"""D's side: the loads of one worker, and its connections to workers of other instances."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from wtransfer.calls import SerialThread
from wtransfer.connectors.p2p.protocol import (
    CODEC,
    MAX_KEYS,
    Hello,
    Load,
    Lookup,
    LookupReply,
    ReleaseRequest,
)
from wtransfer.deadline import Deadline
from wtransfer.errors import (
    AuthenticationError,
    ClosedError,
    KVLayoutError,
    PeerLostError,
    ProtocolError,
    StallError,
)
from wtransfer.kv.copier import Chunks, Copier, RefusedError
from wtransfer.kv.slots import HeaderForm
from wtransfer.transport.channel import Dialer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wtransfer.connectors.p2p.protocol import P2POptions
    from wtransfer.errors import WTransferError
    from wtransfer.kv.cache_view import GroupPages
    from wtransfer.kv.header import BlockGeometry
    from wtransfer.kv.slots import Slots
    from wtransfer.transport.channel import Connection

logger = logging.getLogger(__name__)

TMessage = TypeVar("TMessage", bound=msgspec.Struct)

MAX_CLIENTS = 256
"""Workers of other instances that one worker is connected with at a time. A further worker takes
the place of the least recently used one, once it has proved the token; as many may be about to."""
MAX_UNPROVEN = 4
"""Clients of one address that have not proved theirs: requests can name it with any token."""
REACH_S = 0.25
"""Time allowed to an address where nothing listens: workers listen before they state theirs."""
CLOSE_S = 1.0
"""Longest wait for a load that is aborted."""
_POLL_S = 0.01

_REASONS = (
    (KVLayoutError, "layout"),
    (AuthenticationError, "refused"),
    (StallError, "stalled"),
    (ProtocolError, "protocol"),
)


def _reason(error: BaseException | None) -> str:
    return next((reason for cls, reason in _REASONS if isinstance(error, cls)), "lost")


def start_threads(number: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads have all been started.

    A pool that starts a thread in `submit` has queued the call before: if the start fails, the call
    has no future to wait for, and is made later.

    Args:
        number: Number of threads.
        name: Prefix of their names.

    Raises:
        RuntimeError: A thread cannot be started.
    """
    pool = ThreadPoolExecutor(number, name)
    # No thread is idle before all of them run, so each `submit` starts one.
    all_run = threading.Barrier(number)
    try:
        for _ in range(number):
            pool.submit(all_run.wait)
    except BaseException:
        all_run.abort()
        pool.shutdown()
        raise
    return pool


@dataclass(eq=False)
class PendingLoad:
    """One load under way."""

    load: Load
    mark: object
    """Model work that the load waits for (`GroupPages.mark`)."""
    num_loaded: int = 0
    """Blocks, from the first on, that are in the cache and are the wanted ones."""
    aborted: bool = False
    """True if the request has ended; the load ends soon."""


class RemoteLoads:
    """The loads of one worker, each on the client of the worker that it loads from.

    The model's thread calls it; clients call `end` and `warn`.

    Args:
        geometry: Layout of a block.
        rank: Rank of the worker.
        pages: Its cache.
        options: Options of the connector.
        token: Secret of both instances; None: each request brings the one of its other instance.
        client_cls: Kind of the clients.
        admits: Returns whether this process still has the weights that a load was planned for.
    """

    def __init__(
        self,
        *,
        geometry: BlockGeometry,
        rank: int,
        pages: GroupPages,
        options: P2POptions,
        token: str | None,
        client_cls: type[P2PClient],
        admits: Callable[[Load], bool],
    ) -> None:
        self.geometry, self.rank, self.pages, self.options = geometry, rank, pages, options
        self.threads = start_threads(options.num_threads, "wtransfer-load-copy")
        """Threads that copy."""
        self._form = HeaderForm(geometry.digest, rank)
        self._token = token
        self._client_cls = client_cls
        self._admits = admits
        # Least recently used first.
        self._clients: dict[tuple[str, str], P2PClient] = {}
        self._closed = False
        # Guards everything below.
        self._lock = threading.Lock()
        self._pending: dict[str, PendingLoad] = {}
        self._ended: list[tuple[PendingLoad, str | None]] = []
        self._failed_blocks: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._warned: set[str] = set()

    def start(self, load: Load) -> None:
        """Begin a load; one that cannot begin fails."""
        pending = PendingLoad(load, None if self._closed else self.pages.mark())
        if load.keys:
            with self._lock:
                if load.request_id in self._pending:
                    return
                self._pending[load.request_id] = pending
                self._counts["loads_total"] += 1
            if not self._admits(load):
                self.end(pending, "weights")
                pending = PendingLoad(Load(load.request_id, load.remote), None)
        reason = "lost" if self._closed else self._submit(pending)
        if reason:
            self.end(pending, reason)

    def abort(self, request_id: str) -> None:
        """Let a load end soon, as its request has ended."""
        with self._lock:
            if request_id in self._pending:
                self._pending[request_id].aborted = True

    def end(self, pending: PendingLoad, reason: str | None) -> None:
        """End a load: nothing of it will be written any more. A second call does nothing.

        Args:
            pending: The load.
            reason: Why blocks are missing, if any are.
        """
        with self._lock:
            if self._pending.get(pending.load.request_id) is pending:
                del self._pending[pending.load.request_id]
                self._ended.append((pending, reason))

    def take_received(self) -> set[str]:
        """Return the requests whose loads have ended since the last call.

        The weights are compared here, on the model's thread: a commit between the comparison and
        the report would let a request compute with new weights on KV of old ones.
        """
        with self._lock:
            ended, self._ended = self._ended, []
            for pending, reason in ended:
                self._settle(pending, reason)
        self._make_room()
        return {pending.load.request_id for pending, _ in ended}

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that loads named by `take_received` have not loaded, each once."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def warn(self, kind: str, text: str, *args: object) -> None:
        """Log a warning that a request's parameters can cause: each kind once, the rest counts."""
        with self._lock:
            self._counts["warnings_total"] += 1
            is_first = kind not in self._warned
            self._warned.add(kind)
        if is_first:
            logger.warning(f"{text} (later warnings of this kind are only counted)", *args)  # noqa: G004

    def copier(self, slots: Slots) -> Copier:
        """Return a copier from another instance's slots into the cache."""
        return Copier(slots, self.pages, self._form)

    def get_stats(self) -> dict[str, int]:
        """Return counters (``_total``) and the number of loads under way."""
        with self._lock:
            return {**self._counts, "loads_under_way": len(self._pending)}

    def close(self) -> None:
        """Close all clients and release the cache; loads that have not ended fail."""
        if self._closed:
            return
        self._closed = True
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self.threads.shutdown()
        del self.pages

    def _submit(self, pending: PendingLoad) -> str:
        """Give a load to the client of its worker; return why that is impossible, or ``""``."""
        remote = pending.load.remote
        if len(remote.remote_addresses) != self.geometry.num_ranks:
            text = "KV blocks of %r do not fit: num_ranks is %d there and %d here"
            numbers = len(remote.remote_addresses), self.geometry.num_ranks
            self.warn("num_ranks", text, remote.remote_engine_id, *numbers)
            return "layout"
        address = remote.remote_addresses[self.rank]
        token = self._token or "".join(remote.remote_tokens[self.rank : self.rank + 1])
        # By token, too: a request with a wrong one must not fail the requests with the right one.
        where = address, token
        client = self._clients.pop(where, None)
        if client is None or not client.submit(pending):
            self._clients = {key: each for key, each in self._clients.items() if each.is_alive}
            # Requests can name any address and token: they must not end the loads of others, nor
            # take the places of workers that have proved theirs.
            unproven = [key for key, each in self._clients.items() if not each.is_proven]
            num_busy = sum(each.is_proven and not each.is_idle for each in self._clients.values())
            num_here = sum(key[0] == address for key in unproven)
            if num_here >= MAX_UNPROVEN or max(len(unproven), num_busy) >= MAX_CLIENTS:
                self.warn("crowded", "no more clients for %s", address)
                return "lost"
            client = self._client_cls(address, token, self)
            try:
                client.submit(pending)
            except RuntimeError as error:
                self.warn("unreachable", "no blocks from %s: %s", address, error)
                return "lost"
        self._clients[where] = client
        return ""

    def _make_room(self) -> None:
        """Close clients beyond `MAX_CLIENTS` that have proved their token, as far as none loads."""
        proven = [key for key, each in self._clients.items() if each.is_proven]
        idle = [key for key in proven if self._clients[key].is_idle]
        for key in idle[: max(0, len(proven) - MAX_CLIENTS)]:
            self._clients.pop(key).fail(ClosedError("another instance needs its place"))

    def _settle(self, pending: PendingLoad, reason: str | None) -> None:
        load = pending.load
        if not self._admits(load):
            pending.num_loaded, reason = 0, "weights"
        missing = load.block_ids[pending.num_loaded :]
        self._counts["blocks_loaded_total"] += pending.num_loaded
        self._counts["bytes_loaded_total"] += pending.num_loaded * self.geometry.nbytes
        if pending.aborted:
            self._counts["loads_aborted_total"] += 1
        elif missing:
            self._failed_blocks.update(missing)
            self._counts["blocks_missed_total"] += len(missing)
            self._counts[f"blocks_missed_{reason}_total"] += len(missing)


class P2PClient:
    """A connection to one worker of another instance, and the thread that loads over it. A base.

    The client ends when the other side is lost, has another layout or breaks the protocol. Every
    load of it fails then, also those that wait. The next load makes a new client.

    Args:
        address: Where the other side listens.
        token: Secret to prove.
        loads: The loads of this worker.
    """

    def __init__(self, address: str, token: str | None, loads: RemoteLoads) -> None:
        self.address = address
        self.loads = loads
        self._token = token
        self._thread = SerialThread("wtransfer-load")
        self._num_jobs = 0
        self._changed = threading.Condition()
        self._message: msgspec.Struct | None = None
        self._error: BaseException | None = None
        self._dialer: Dialer | None = None
        self.is_proven = False
        """True if the other side has proved the token, and fits."""

    @property
    def is_alive(self) -> bool:
        """True if the client takes loads."""
        return self._error is None

    @property
    def is_idle(self) -> bool:
        """True if the client has no load."""
        return not self._num_jobs

    def submit(self, job: PendingLoad) -> bool:
        """Add a load, after those before; return False if the client has ended.

        Raises:
            RuntimeError: Its thread cannot be started.
        """
        with self._changed:
            if self._error is None:
                self._thread.submit(lambda: self._run(job))
                self._num_jobs += 1
            return self._error is None

    def fail(self, error: BaseException) -> None:
        """End the client. Any thread may call it; the first error counts."""
        with self._changed:
            is_first = self._error is None
            if is_first:
                self._error = error
                # After every load that was added: none is added from here on.
                self._thread.submit(self._end)
                self._thread.stop()
                self._changed.notify_all()
        if is_first and not isinstance(error, ClosedError):
            # Its text only: a log record would keep the frames, and with them the mapping.
            self.loads.warn(_reason(error), "no more blocks from %s: %s", self.address, str(error))
        self.abort_transport()

    def check(self) -> None:
        """Raise the error that ended the client, if any."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the client; blocks that are not loaded are missing. A second call does nothing."""
        self.fail(ClosedError(f"the client of {self.address} was closed"))
        self._thread.join(CLOSE_S)

    # -- for subclasses; on the client's thread, but for `abort_transport`

    def open_transport(self, hello: Hello) -> None:
        """Prepare to fetch."""

    def fetch(self, job: PendingLoad, part: slice, slots: Sequence[int]) -> str | None:
        """Copy blocks of a load from the other side's slots into the cache, by `load`.

        Args:
            job: The load.
            part: Range of its blocks.
            slots: Slot of each block.

        Returns:
            Why the first block that was not copied must not be used; None: all are copied, or the
            load was aborted.
        """
        raise NotImplementedError

    def load(
        self, copier: Copier, job: PendingLoad, part: slice, slots: Sequence[int]
    ) -> str | None:
        """Copy blocks, in order up to the first that is refused; arguments as for `fetch`."""
        blocks = np.array(job.load.block_ids[part]).reshape(-1, 1)
        chunks = Chunks(0, np.array(slots), job.load.keys[part], blocks)
        tasks = list(copier.tasks(chunks, self.loads.options.num_threads))

        def copy(task: Chunks) -> tuple[int, str | None]:
            if self._error is not None or job.aborted:
                return 0, None
            try:
                copier.load(task, job.mark)
            except RefusedError as refused:
                return refused.row, refused.reason
            return len(task), None

        copies: list[Future[tuple[int, str | None]]] = []
        try:
            copies.extend(self.loads.threads.submit(copy, task) for task in tasks)
        finally:
            # Also if a copy raises or cannot begin: nothing may write to the cache after this.
            wait(copies)
        found = [each.result() for each in copies]
        for task, (number, reason) in zip(tasks, found, strict=True):
            job.num_loaded += number
            if number < len(task):
                return reason
        return None

    def abort_transport(self) -> None:
        """Let `open_transport` or `fetch` raise soon. Any thread may call it."""

    def close_transport(self) -> None:
        """Release everything. Called once, at the end."""

    # -- the channel

    def _on_message(self, connection: Connection, message: msgspec.Struct) -> None:  # noqa: ARG002
        with self._changed:
            self._message = message
            self._changed.notify_all()

    def _on_close(self, connection: Connection, error: WTransferError | None) -> None:  # noqa: ARG002
        self.fail(error or PeerLostError(f"the connection to {self.address} was closed"))

    # -- the thread

    def _run(self, job: PendingLoad) -> None:
        reason: str | None = "error"
        try:
            self.check()
            dialer = self._dialer or self._open()
            reason = self._load(dialer, job)
            dialer.send(ReleaseRequest(job.load.remote.remote_request_id))
        except Exception as error:
            self.fail(error)
            reason = _reason(self._error)
        finally:
            with self._changed:
                self._num_jobs -= 1
            self.loads.end(job, reason)

    def _open(self) -> Dialer:
        """Connect, and compare layouts before the first lookup."""
        self._dialer = Dialer(
            CODEC,
            address=self.address,
            token=self._token,
            on_open=lambda _connection: None,
            on_message=self._on_message,
            on_close=self._on_close,
            on_refused=self.fail,
            redial=False,
        )
        hello = self._receive(Hello, f"the worker at {self.address}: it does not say hello")
        whose, rank = f"{hello.engine_id!r} ({self.address})", self.loads.rank
        self.loads.geometry.check_fits(hello.geometry, whose)
        if hello.rank != rank:
            raise KVLayoutError(
                f"{self.address} is rank {hello.rank} of {hello.engine_id!r}, this is rank "
                f"{rank}; each rank loads from its own",
                field="rank",
            )
        self.open_transport(hello)
        self.is_proven = True
        return self._dialer

    def _load(self, dialer: Dialer, job: PendingLoad) -> str | None:
        """Load blocks up to the first that fails; return why it failed, or None."""
        load = job.load
        for start in range(0, len(load.keys), MAX_KEYS):
            keys = load.keys[start : start + MAX_KEYS]
            self._message = None
            dialer.send(Lookup(load.remote.remote_request_id, keys))
            slots = self._receive(LookupReply, f"an answer of {self.address}").slots
            if len(slots) > len(keys):
                raise ProtocolError(
                    f"{self.address} named {len(slots)} slots for {len(keys)} blocks"
                )
            reason = self.fetch(job, slice(start, start + len(slots)), slots)
            self.check()
            if job.num_loaded < start + len(keys):
                return reason or "absent"
        return None

    def _receive(self, kind: type[TMessage], what: str) -> TMessage:
        """Return the next message of a kind."""
        reach, deadline = Deadline(REACH_S), Deadline(self.loads.options.deadline_s)
        with self._changed:
            while not isinstance(self._message, kind):
                self.check()
                deadline.check(what)
                if (
                    reach.expired
                    and self._dialer is not None
                    and self._dialer.last_error is not None
                ):
                    raise self._dialer.last_error
                self._changed.wait(_POLL_S)
            return self._message

    def _end(self) -> None:
        if self._dialer is not None:
            self._dialer.close()
        self.close_transport()
