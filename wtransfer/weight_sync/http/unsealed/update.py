"""One update of a trainer that calls the worker itself: staged, judged, and left to be applied."""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from wtransfer.deadline import Deadline
from wtransfer.errors import ClosedError, RoundAbortedError, SchemaError, StallError
from wtransfer.manifest import fingerprint
from wtransfer.transport.memory import require_memory
from wtransfer.weight_sync.http.unsealed.coverage import CoverageStaging
from wtransfer.weight_sync.http.unsealed.engine_step import on_engine
from wtransfer.weight_sync.messages import Receipt
from wtransfer.weight_sync.worker.ledger import Held, Pending

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from wtransfer.weight_sync.http.unsealed.engine_step import Step
    from wtransfer.weight_sync.worker.hosted import HostedEngine
    from wtransfer.weight_sync.worker.session import WorkerSession

T = TypeVar("T")


class UnsealedUpdate:
    """One update. As the ledger's holder it gets the receipt.

    Args:
        session: The worker's.
        engine: Receives.
        client: Who has begun it.
        deadline_s: Longest time without progress or request, in seconds.
    """

    def __init__(
        self, session: WorkerSession, engine: HostedEngine, client: str, deadline_s: float
    ) -> None:
        self.address = client
        self.round_id = secrets.token_hex(8)
        self._session = session
        self._ledger = session.ledger
        self._engine = engine
        self._deadline = Deadline(deadline_s)
        self._lock = threading.Lock()
        self._staging: CoverageStaging | None = None
        self._over: str | None = None
        self._step: Step | None = None
        self._silence: threading.Timer | None = None
        self._receipt: Receipt | None = None

    def start(self) -> None:
        """Prepare; see `UnsealedUpdates.start`."""
        self._run(self._prepare, "start_weight_update")

    def receive(self, update_info: dict[str, Any]) -> None:
        """Receive once; see `UnsealedUpdates.update`."""
        self._run(
            lambda: self._engine.receive(update_info, self._staged().load_weights),
            "receive_weights",
        )

    def finish(self, version: str | None) -> Receipt:
        """Offer the tensors to the model's thread; see `UnsealedUpdates.finish`."""
        held = self._run(lambda: self._judge(version), "finish_weight_update")
        with self._lock:
            self._check_not_over()
            self._over = "it was finished"
            self._rest()
            self._staging = None
        self._ledger.offer(Pending(self, self.round_id, held, {}))
        return self._outcome()

    def end(self, reason: str) -> None:
        """Drop what is staged; an engine at work is made to return. Only the first call counts."""
        with self._lock:
            if self._over is not None:
                return
            self._over = reason
            self._rest()
            staging, self._staging = self._staging, None
        if staging is not None:
            staging.stop(reason)
        self._ledger.free(self.round_id)
        if self._step is not None:
            self._step.end(self._ended())
            self._engine.abort_in_background(self._step.running)

    def send(self, message: msgspec.Struct) -> None:
        """Take the receipt from the model's thread."""
        assert isinstance(message, Receipt)
        if message.outcome == "committed":
            # There are no other ranks: nobody will ask to go back.
            self._ledger.release(self.round_id)
        with self._ledger.changed:
            self._receipt = message
            self._ledger.changed.notify_all()

    # -- steps

    def _run(self, step: Callable[[], T], what: str) -> T:
        """Run a step on the engine's thread; if it fails, the update is over."""
        with self._lock:
            self._check_not_over()
            self._rest()
            self._deadline.restart()
        try:
            result = on_engine(self._engine, step, self._deadline, what, self._note)
        except BaseException as error:
            self.end(str(error))
            raise
        self._listen()
        return result

    def _note(self, step: Step) -> None:
        self._step = step

    def _prepare(self) -> None:
        engine, session = self._engine, self._session
        engine.ensure()
        schema = session.schema()
        if schema is None:
            raise SchemaError(
                "this worker's model does not say what a whole update is; let a publisher send "
                "one first"
            )
        staging = CoverageStaging(
            schema,
            cast=session.cast,
            copies=engine.copies,
            on_progress=lambda _nbytes: self._deadline.restart(),
        )
        if engine.copies or engine.allocates:
            require_memory(staging._layout.manifest.nbytes, "staging an unsealed update")
        engine.optional("start_weight_update")
        with self._lock:
            self._check_not_over()
            self._staging = staging

    def _judge(self, version: str | None) -> Held:
        self._engine.optional("finish_weight_update")
        staging = self._staged()
        manifest = staging._layout.manifest
        identity = fingerprint(manifest, staging.prove())
        label = version or f"unsealed-{identity[:12]}"
        return Held(label, identity, manifest, staging.tensors, "coverage")

    def _staged(self) -> CoverageStaging:
        with self._lock:
            self._check_not_over()
            assert self._staging is not None
            return self._staging

    def _outcome(self) -> Receipt:
        ledger, seconds = self._ledger, self._deadline.seconds
        with ledger.changed:
            ledger.changed.wait_for(lambda: self._receipt is not None or ledger.closed, seconds)
            receipt = self._receipt
        if receipt is None and ledger.closed:
            raise ClosedError("the worker was closed before it had applied the update")
        if receipt is None:
            raise StallError(
                f"the update is complete, and the worker's model has not applied it within "
                f"{seconds:g} s (nobody called commit_pending); it will when it comes to it: ask "
                "GET /weight_info",
                seconds=seconds,
                phase="commit",
            )
        if receipt.error is not None:
            raise receipt.error.rebuild(worker=self._session.name)
        if receipt.outcome != "committed":
            raise RoundAbortedError(f"the update was {receipt.outcome} by the worker's owner")
        return receipt

    # -- silence

    def _listen(self) -> None:
        """Begin to wait for the client's next request: a dead one must not block the worker."""
        with self._lock:
            if self._over is None:
                self._deadline.restart()
                self._silence = threading.Timer(self._deadline.seconds, self._expire)
                self._silence.daemon = True
                self._silence.name = "wtransfer-unsealed-silence"
                self._silence.start()

    def _rest(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _expire(self) -> None:
        if self._deadline.expired:
            self.end(f"{self.address} was silent for {self._deadline.seconds:g} s")

    def _check_not_over(self) -> None:
        if self._over is not None:
            raise self._ended()

    def _ended(self) -> RoundAbortedError:
        return RoundAbortedError(
            f"this update is over: {self._over}; POST /start_weight_update for another"
        )
