"""The workers that have joined a publisher: their connections, and the versions they hold."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from wtransfer.calls import Changed
from wtransfer.errors import PeerLostError, ProtocolError, WTransferError
from wtransfer.weight_sync.messages import Ack, Fault, Hello, Lost, Ready, Refuse, Refused
from wtransfer.weight_sync.trainer.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.transport.channel import Connection
    from wtransfer.weight_sync.report import WorkerInfo
    from wtransfer.weight_sync.trainer.round_state import RoundState

logger = logging.getLogger(__name__)

MAX_LOST = 64
"""Workers that are remembered after their end."""
MAX_PUBLISHED = 1024
"""Versions by which a worker that joins again is known to have held one of this publisher's."""


class _Gone(NamedTuple):
    """A worker that is gone."""

    at: float
    info: WorkerInfo
    has_held: bool


class Membership:
    """The joined workers by connection, and the rounds that wait for their answers.

    Messages come in on the channel's thread, which feeds them to the rounds and notifies `changed`.

    Args:
        on_join: Called, without the lock, after a worker's `Hello`.
    """

    def __init__(self, on_join: Callable[[Worker], None]) -> None:
        self.changed = Changed()
        """The one lock of a publisher, held for every change of workers and rounds."""
        self.num_dropped = 0
        self.without: set[str] = set()
        """Hosts that were removed: workers that join by their invitation take part in nothing."""
        self._on_join = on_join
        self._workers: dict[Connection, Worker] = {}
        self._lost: dict[str, _Gone] = {}
        """Name of a worker that is gone -> when, and the worker; oldest first, bounded."""
        self._rounds: dict[str, RoundState] = {}
        self._closing: set[str] = set()
        self._published: dict[str, None] = {}
        """Fingerprints of committed updates, the last ones."""

    # -- asked by rounds and by the publisher

    def workers(self) -> list[Worker]:
        """Return every joined worker."""
        with self.changed:
            return list(self._workers.values())

    def lost(self) -> list[WorkerInfo]:
        """Return the workers that are gone and did not come back under their name; the last ones.

        Returns:
            What each held at its end, which is so many seconds ago.
        """
        with self.changed:
            now = time.monotonic()
            return [replace(each.info, since_s=now - each.at) for each in self._lost.values()]

    def left(self) -> list[WorkerInfo]:
        """Return the workers of `lost` that joined by themselves and had held a version."""
        with self.changed:
            lost = list(self._lost.values())
            return [each.info for each in lost if each.has_held and each.info.host is None]

    def instances(self) -> dict[str, list[Worker]]:
        """Return the ranks of each instance of which every rank has joined."""
        groups: dict[str, list[Worker]] = {}
        for worker in self.workers():
            if worker.hello.host not in self.without:
                groups.setdefault(worker.hello.instance, []).append(worker)
        return {
            name: sorted(ranks, key=lambda worker: worker.hello.rank)
            for name, ranks in groups.items()
            if len(ranks) == ranks[0].hello.num_ranks
        }

    def note_published(self, fingerprint: str) -> None:
        """Note that workers are ordered to commit an update: whoever holds it is known by it."""
        with self.changed:
            self._published[fingerprint] = None
            while len(self._published) > MAX_PUBLISHED:
                self._published.pop(next(iter(self._published)))

    def place_of(self, worker: Worker) -> tuple[int, int]:
        """Return a place for a joiner's instance that no other has, and the number of places."""
        instance = worker.hello.instance
        with self.changed:
            others = [each for each in self._workers.values() if each is not worker]
            own = [each.place for each in others if each.hello.instance == instance]
            taken = {each.place for each in others if each.hello.instance != instance}
            place = own[0] if own else next(n for n in itertools.count() if n not in taken)
            return place, max(taken | {place}) + 1

    def open(self, state: RoundState) -> None:
        """Feed a round with its workers' answers from now on."""
        with self.changed:
            self._rounds[state.round_id] = state
            for rank in list(state.ranks()):
                rank.moved_at = time.monotonic()
                if rank.worker.lost is not None:
                    state.lose(rank.worker, rank.worker.lost)

    def close(self, state: RoundState) -> None:
        """Forget a round as soon as all its instances are settled.

        A worker whose commit was pending at the end of a round may still apply it, and then has to
        be told to finish or to roll back. Messages after that are dropped and counted.
        """
        with self.changed:
            self._closing.add(state.round_id)
            self._forget_settled()

    # -- called on the channel's thread

    def on_message(self, connection: Connection, message: msgspec.Struct) -> None:
        """Take in a worker's message."""
        if isinstance(message, Hello):
            worker = self._join(connection, message)
            self._on_join(worker)
            return
        with self.changed:
            joined = self._workers.get(connection)
            if joined is None:
                raise ProtocolError(f"{connection.peer} sends before its hello")
            if isinstance(message, (Ready, Refused)):
                self._take_engine_answer(joined, message)
            elif isinstance(message, Lost):
                logger.warning("%s has lost its weights: %s", joined.name, message.reason)
                joined.holds(None, message.fingerprint, message.state)
                joined.last_error = message.reason
                # The worker asks for weights anew: earlier failed attempts do not count.
                joined.num_failed = 0
            else:
                self._take_round_answer(joined, message)
            self.changed.notify_all()

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Note that a worker is gone."""
        with self.changed:
            worker = self._workers.pop(connection, None)
            if worker is None:
                return
            worker.lost = _lost(worker, error)
            logger.info("%s is gone: %s", worker.name, worker.lost)
            info = replace(worker.info, state="lost", since_s=0.0, last_error=str(worker.lost))
            self._lost[worker.name] = _Gone(time.monotonic(), info, worker.has_held)
            while len(self._lost) > MAX_LOST:
                # First those that no report counts: a worker may fail and come again for ever.
                first = next(iter(self._lost))
                uncounted = (name for name, each in self._lost.items() if not each.has_held)
                self._lost.pop(next(uncounted, first))
            self._feed(worker, worker.lost, lost=True)
            self.changed.notify_all()

    def _join(self, connection: Connection, hello: Hello) -> Worker:
        worker = Worker(connection, hello)
        with self.changed:
            if connection in self._workers:
                raise ProtocolError(f"{hello.worker} says hello twice")
            if not 0 <= hello.rank < hello.num_ranks:
                raise ProtocolError(f"rank {hello.rank} of {hello.num_ranks} is no rank")
            worker.hello = hello = self._numbered(hello)
            for other in self._workers.values():
                if other.hello.instance == hello.instance and (
                    other.hello.num_ranks != hello.num_ranks or other.hello.rank == hello.rank
                ):
                    raise ProtocolError(
                        f"{hello.worker} says it is rank {hello.rank} of {hello.num_ranks} of "
                        f"instance {hello.instance}, but {other.name} is rank {other.hello.rank} "
                        f"of {other.hello.num_ranks}"
                    )
            worker.has_held = hello.fingerprint in self._published
            self._workers[connection] = worker
            self._lost.pop(worker.name, None)
            # Under the lock: no line about a round with this worker comes before its own.
            logger.info("%s has joined, %s with %r", worker.name, worker.state, worker.version)
            self.changed.notify_all()
        return worker

    def _numbered(self, hello: Hello) -> Hello:
        """Return a hello whose names no other worker has: the second ``w0`` is ``w0#2``.

        Ranks of several are not numbered: which of two servers a rank belongs to could not be told.
        """
        others = [each.hello for each in self._workers.values()]
        names = {each.worker for each in others}
        instances = {each.instance for each in others} if hello.num_ranks == 1 else set()

        def free(name: str, taken: set[str]) -> str:
            numbers = itertools.chain([""], (f"#{n}" for n in itertools.count(2)))
            return next(f"{name}{n}" for n in numbers if f"{name}{n}" not in taken)

        worker, instance = free(hello.worker, names), free(hello.instance, instances)
        if worker != hello.worker:
            logger.warning("two workers call themselves %s; one is %s here", hello.worker, worker)
        return msgspec.structs.replace(hello, worker=worker, instance=instance)

    def _take_engine_answer(self, worker: Worker, message: Ready | Refused) -> None:
        if message.epoch != worker.epoch:
            self.num_dropped += 1
        elif isinstance(message, Ready):
            worker.ready, worker.refusal = message.epoch, None
        else:
            worker.refusal = message.error.rebuild(worker=worker.name, phase="init")
            worker.last_error = message.error.message
            self._feed(worker, worker.refusal, lost=False)

    def _take_round_answer(self, worker: Worker, message: msgspec.Struct) -> None:
        state = self._rounds.get(getattr(message, "round_id", ""))
        rank = None if state is None else state.participant(worker)
        if state is None or rank is None:
            self.num_dropped += 1
        elif state.answer(worker, message):
            rank.moved_at = time.monotonic()
        if isinstance(message, (Refuse, Fault)):
            worker.last_error = message.error.message
        if isinstance(message, Ack):
            # An ack reports the worker's weights, even after its round.
            worker.holds(message.version, message.fingerprint, message.state)
            worker.last_error = None if message.error is None else message.error.message
            worker.set_aside = False
            if message.outcome in ("committed", "discarded"):
                worker.num_failed = 0
            worker.has_held = worker.has_held or message.outcome == "committed"
        self._forget_settled()

    def _feed(self, worker: Worker, error: WTransferError, *, lost: bool) -> None:
        for state in self._rounds.values():
            if state.participant(worker) is not None:
                (state.lose if lost else state.fault)(worker, error)
        self._forget_settled()

    def _forget_settled(self) -> None:
        for round_id in list(self._closing):
            state = self._rounds.get(round_id)
            if state is None or state.settled:
                self._closing.remove(round_id)
                self._rounds.pop(round_id, None)


def _lost(worker: Worker, error: Exception | None) -> WTransferError:
    if not isinstance(error, WTransferError):
        reason = f": {error}" if error else ""
        error = PeerLostError(f"worker {worker.name} was lost{reason}")
    error.add_facts(worker=worker.name)
    host = worker.host or worker.hello.host
    if host is not None:
        # The host as the user wrote it: a process id says little to users of URLs.
        error.message = f"{host}: {error.message}"
    return error
