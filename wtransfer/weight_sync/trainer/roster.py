"""The workers that have joined a publisher, and what each has answered."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wtransfer.errors import PeerError, PeerLostError, ProtocolError, WTransferError
from wtransfer.weight_sync.messages import (
    CODEC,
    Accept,
    Ack,
    Fault,
    Hello,
    Lost,
    Progress,
    Ready,
    Received,
    Refuse,
    Refused,
    Vote,
)
from wtransfer.weight_sync.report import WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import msgspec

    from wtransfer.transport.channel import Connection

logger = logging.getLogger(__name__)

_Answer = (Accept, Received, Progress, Vote, Ack, Refuse, Fault)


@dataclass(eq=False)
class Worker:
    """One joined worker: a connection and what it said last."""

    connection: Connection
    hello: Hello
    epoch: int = 0
    """Generation of the last `Init` that was sent to it."""
    ready: int = 0
    """Generation that it has answered with `Ready`."""
    refusal: WTransferError | None = None
    """Why it refused the last `Init`."""
    lost: WTransferError | None = None
    """Set when the connection has ended."""
    version: str | None = None
    fingerprint: str = ""
    place: int = 0
    """Its instance's place among all, as its engine was last told."""
    state: str = "fresh"
    num_failed: int = 0
    """Times in a row that it could not be brought up to date."""
    planned: str | None = None
    """Identity of the manifest that it was sent last, over this connection; None: it needs one."""
    set_aside: bool = False
    """Whether it was served between rounds and has not applied that yet: rounds go on without."""

    def __post_init__(self) -> None:
        self.version = self.hello.version
        self.fingerprint = self.hello.fingerprint
        self.state = self.hello.state

    @property
    def name(self) -> str:
        """Name for people."""
        return self.hello.worker

    @property
    def info(self) -> WorkerInfo:
        """What a user may know of it."""
        hello = self.hello
        return WorkerInfo(
            worker=hello.worker,
            instance=hello.instance,
            rank=hello.rank,
            num_ranks=hello.num_ranks,
            version=self.version,
            fingerprint=self.fingerprint,
            state=self.state,
        )

    def send(self, message: msgspec.Struct) -> None:
        """Send one message.

        Raises:
            LimitError: It is larger than its type may be.
        """
        self.send_frame(CODEC.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message; that a worker is lost shows by its connection's end."""
        try:
            self.connection.send_frame(frame)
        except PeerError as error:
            logger.info("a message was not sent to %s: %s", self.name, error)


@dataclass(eq=False)
class Exchange:
    """What one worker has answered in one round. Written under the roster's lock."""

    worker: Worker
    accept: Accept | None = None
    num_received: int = 0
    nbytes: int = 0
    """Bytes that it has staged so far."""
    committing: bool = False
    """Whether it was told to commit."""
    vote: Vote | None = None
    ack: Ack | None = None
    error: WTransferError | None = None
    lost: bool = False
    moved_at: float = field(default_factory=time.monotonic)


class Roster:
    """Workers by connection, and the answers to the rounds that are alive.

    Messages come in on the channel's thread and wake whoever waits on `changed`.

    Args:
        on_join: Called, without the lock, when a worker has said hello.
        on_ack: Called likewise when an ack has come in.
    """

    def __init__(
        self,
        on_join: Callable[[Worker], None],
        on_ack: Callable[[str], None],
        on_weights_lost: Callable[[], None],
    ) -> None:
        # Taken by itself, not by way of the condition, whose methods are Python: an interrupt at
        # the entry of its `__exit__` would leave it locked for good.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.num_dropped = 0
        self._on_join = on_join
        self._on_ack = on_ack
        self._on_weights_lost = on_weights_lost
        self._workers: dict[Connection, Worker] = {}
        self._exchanges: dict[str, dict[Worker, Exchange]] = {}

    # -- asked by rounds and by the publisher

    def workers(self) -> list[Worker]:
        """Return every joined worker."""
        with self.lock:
            return list(self._workers.values())

    def instances(self) -> dict[str, list[Worker]]:
        """Return the ranks of each instance of which every rank has joined."""
        groups: dict[str, list[Worker]] = {}
        for worker in self.workers():
            groups.setdefault(worker.hello.instance, []).append(worker)
        return {
            name: sorted(ranks, key=lambda worker: worker.hello.rank)
            for name, ranks in groups.items()
            if len(ranks) == ranks[0].hello.num_ranks
        }

    def place_of(self, worker: Worker) -> tuple[int, int]:
        """Return a place for a joiner's instance that no other has, and the number of places."""
        instance = worker.hello.instance
        with self.lock:
            others = [each for each in self._workers.values() if each is not worker]
            own = [each.place for each in others if each.hello.instance == instance]
            taken = {each.place for each in others if each.hello.instance != instance}
            place = own[0] if own else next(n for n in itertools.count() if n not in taken)
            return place, max(taken | {place}) + 1

    def open(self, round_id: str, workers: Iterable[Worker]) -> dict[Worker, Exchange]:
        """Begin to keep what `workers` answer in this round."""
        with self.lock:
            exchanges = {worker: Exchange(worker) for worker in workers}
            self._exchanges[round_id] = exchanges
            for exchange in exchanges.values():
                if exchange.worker.lost is not None:
                    exchange.lost, exchange.error = True, exchange.worker.lost
            return exchanges

    def close(self, round_id: str) -> None:
        """Forget a round; what still comes in for it is dropped and counted."""
        with self.lock:
            self._exchanges.pop(round_id, None)

    # -- called on the channel's thread

    def on_message(self, connection: Connection, message: msgspec.Struct) -> None:
        """Take in what a worker says."""
        if isinstance(message, Hello):
            self._join(connection, message)
            return
        worker = self._workers.get(connection)
        if worker is None:
            raise ProtocolError(f"{connection.peer} sends before its hello")
        if isinstance(message, (Ready, Refused)):
            self._engine_answer(worker, message)
        elif isinstance(message, Lost):
            self._note_lost_weights(worker, message)
        else:
            self._round_answer(worker, message)

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Note that a worker is gone."""
        with self.lock:
            worker = self._workers.pop(connection, None)
            if worker is None:
                return
            worker.lost = _lost(worker, error)
            for exchanges in self._exchanges.values():
                exchange = exchanges.get(worker)
                if exchange is not None:
                    exchange.lost, exchange.error = True, exchange.error or worker.lost
            affected = [r for r, exchanges in self._exchanges.items() if worker in exchanges]
            self.changed.notify_all()
        for round_id in affected:
            self._on_ack(round_id)

    def _join(self, connection: Connection, hello: Hello) -> None:
        worker = Worker(connection, hello)
        with self.lock:
            if connection in self._workers:
                raise ProtocolError(f"{hello.worker} says hello twice")
            self._check_place(hello)
            self._workers[connection] = worker
            self.changed.notify_all()
        self._on_join(worker)

    def _check_place(self, hello: Hello) -> None:
        if not 0 <= hello.rank < hello.num_ranks:
            raise ProtocolError(f"rank {hello.rank} of {hello.num_ranks} is no rank")
        for other in self._workers.values():
            if other.hello.instance != hello.instance:
                continue
            if other.hello.num_ranks != hello.num_ranks or other.hello.rank == hello.rank:
                raise ProtocolError(
                    f"{hello.worker} says it is rank {hello.rank} of {hello.num_ranks} of instance "
                    f"{hello.instance}, but {other.name} is rank {other.hello.rank} of "
                    f"{other.hello.num_ranks}"
                )

    def _engine_answer(self, worker: Worker, message: Ready | Refused) -> None:
        with self.lock:
            if message.epoch != worker.epoch:
                self.num_dropped += 1
            elif isinstance(message, Ready):
                worker.ready, worker.refusal = message.epoch, None
            else:
                worker.refusal = message.error.rebuild(worker=worker.name, phase="init")
            self.changed.notify_all()

    def _note_lost_weights(self, worker: Worker, message: Lost) -> None:
        logger.warning("%s has lost its weights: %s", worker.name, message.reason)
        with self.lock:
            worker.version, worker.fingerprint = None, message.fingerprint
            worker.state = message.state
            # Whatever had failed before: it asks for weights anew.
            worker.num_failed = 0
            self.changed.notify_all()
        self._on_weights_lost()

    def _round_answer(self, worker: Worker, message: Any) -> None:
        with self.lock:
            exchange = self._exchanges.get(message.round_id, {}).get(worker)
            if exchange is None:
                self.num_dropped += 1
                _take_late(worker, message)
            else:
                _take(exchange, message)
                self.changed.notify_all()
        if isinstance(message, Ack):
            self._on_ack(message.round_id)


def _take(exchange: Exchange, message: Any) -> None:
    worker = exchange.worker
    if not isinstance(message, _Answer):
        raise ProtocolError(f"a worker does not send {type(message).__name__}")
    if _advances(exchange, message):
        # Only what brings the round on counts as life: a worker cannot talk a deadline away.
        exchange.moved_at = time.monotonic()
    if isinstance(message, Accept):
        exchange.accept = message
    elif isinstance(message, Received):
        # Answers come in the order of the data; a repeated one changes nothing.
        exchange.num_received = max(exchange.num_received, message.seq + 1)
    elif isinstance(message, Progress):
        exchange.nbytes = max(exchange.nbytes, message.nbytes)
    elif isinstance(message, Vote):
        if exchange.vote is not None:
            raise ProtocolError(f"{worker.name} gives a second vote in one round")
        exchange.vote = message
    elif isinstance(message, Ack):
        if not exchange.committing:
            raise ProtocolError(f"{worker.name} gives an ack before the commit")
        exchange.ack = message
        _take_late(worker, message)
    else:
        _take_failure(exchange, message)


def _take_failure(exchange: Exchange, message: Refuse | Fault) -> None:
    worker, refused = exchange.worker, isinstance(message, Refuse)
    if refused:
        # Whatever it has against that manifest: the next plan brings it whole.
        worker.planned = None
    exchange.error = exchange.error or message.error.rebuild(
        worker=worker.name, round_id=message.round_id, phase="plan" if refused else None
    )


def _advances(exchange: Exchange, message: Any) -> bool:
    if isinstance(message, Accept):
        return exchange.accept is None
    if isinstance(message, Received):
        return message.seq >= exchange.num_received
    if isinstance(message, Progress):
        return message.nbytes > exchange.nbytes
    return True


def _take_late(worker: Worker, message: Any) -> None:
    """An ack says what the worker holds, whenever it comes."""
    if isinstance(message, Ack):
        worker.version, worker.fingerprint = message.version, message.fingerprint
        worker.state = message.state
        worker.set_aside = False
        if message.outcome in ("committed", "discarded"):
            worker.num_failed = 0


def _lost(worker: Worker, error: Exception | None) -> WTransferError:
    if isinstance(error, WTransferError):
        error.add_facts(worker=worker.name)
        return error
    reason = f": {error}" if error else ""
    return PeerLostError(f"worker {worker.name} was lost{reason}", worker=worker.name)
