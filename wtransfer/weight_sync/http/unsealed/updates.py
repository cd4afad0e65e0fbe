"""Updates that no publisher of ours has planned or digested: a trainer calls the worker itself.

Nothing proves that their bytes are the trainer's. So a worker takes them only where it was started
to, judges that they are complete and fit, and says of them ``verified: "coverage"``. All else is
as in a round: they are staged beside the weights that are served, and applied whole or not at all.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from wtransfer.deadline import Deadline
from wtransfer.errors import NotInitializedError
from wtransfer.registry.registry import registry
from wtransfer.weight_sync.http.unsealed.engine_step import on_engine
from wtransfer.weight_sync.http.unsealed.update import UnsealedUpdate
from wtransfer.weight_sync.messages import Init
from wtransfer.weight_sync.worker.hosted import UNBLOCK_GRACE_S, HostedEngine

if TYPE_CHECKING:
    from wtransfer.weight_sync.messages import Receipt
    from wtransfer.weight_sync.worker.session import WorkerSession


class UnsealedUpdates:
    """Takes updates from trainers that call start, update and finish themselves. Thread-safe.

    All methods wait, within the deadline.

    Args:
        session: The worker's. Its ranks must not be several: nobody would let them commit alike.
        engine: Name of the engine that receives; chosen here, never by a peer.
        deadline_s: Longest time without progress, and for the model's thread to apply, in seconds.
            A trainer that is silent for so long has lost its update.

    Raises:
        UnknownBackendError: There is no such engine.
    """

    def __init__(self, session: WorkerSession, engine: str, deadline_s: float = 30.0) -> None:
        if session.num_ranks > 1:
            raise ValueError(
                f"accept_unsealed needs a worker of one rank, {session.name} has "
                f"{session.num_ranks}: without a publisher its ranks could not commit all or none"
            )
        registry("engines").record(engine)
        self.engine_name = engine
        self._session = session
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._engine: HostedEngine | None = None
        self._update: UnsealedUpdate | None = None

    def init(self, init_info: dict[str, Any]) -> None:
        """Make and initialise the engine; an update that is under way is ended.

        Raises:
            WTransferError: It cannot be found, or failed to initialise.
            StallError: It did not return in time.
        """
        with self._lock:
            self._end("the engine is initialised anew")
            if self._engine is None:
                self._engine = HostedEngine(0, 1, {self.engine_name})
            engine = self._engine
        order = Init(1, self.engine_name, None, None, 0, 1, init_info)
        # One that hangs since an earlier update is left behind within the grace; then this begins.
        deadline = Deadline(self._deadline_s + UNBLOCK_GRACE_S)
        on_engine(engine, lambda: engine.make(order), deadline, "init_transfer_engine")

    def start(self, client: str) -> None:
        """Begin an update.

        Args:
            client: Who asks, for errors.

        Raises:
            RoundBusyError: Another update or round is active, or a commit is pending.
            NotInitializedError: There is no engine yet.
            SchemaError: Nothing says what a whole update is.
            StagingMemoryError: There is no room to stage it.
        """
        with self._lock:
            if self._engine is None:
                raise NotInitializedError(
                    "the worker has no weight transfer engine; POST /init_weight_transfer_engine "
                    "first"
                )
            update = UnsealedUpdate(self._session, self._engine, client, self._deadline_s)
            self._session.ledger.claim(update, update.round_id, "unsealed")
            self._update = update
        update.start()

    def update(self, update_info: dict[str, Any]) -> None:
        """Let the engine receive, once.

        Raises:
            NotInitializedError: No update was started.
            WTransferError: It failed, and with it the whole update.
        """
        self._started().receive(update_info)

    def finish(self, version: str | None) -> Receipt:
        """Judge that the update is whole, and wait until the model's thread has applied it.

        Args:
            version: Label. Default: one that is made of the fingerprint.

        Raises:
            NotInitializedError: No update was started.
            IncompleteUpdateError: Tensors are missing; the update is over.
            CommitError: Applying failed; the old version is back.
            StallError: It was not applied in time; it still will be.
        """
        return self._started().finish(version)

    def shutdown(self) -> None:
        """End an update that is under way, and drop the engine."""
        with self._lock:
            self._end("the engine was shut down")
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _started(self) -> UnsealedUpdate:
        with self._lock:
            if self._update is None:
                raise NotInitializedError("no update was started; POST /start_weight_update first")
            return self._update

    def _end(self, reason: str) -> None:
        if self._update is not None:
            self._update.end(reason)
            self._update = None
