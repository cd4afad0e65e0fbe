"""A worker's side of one publisher: its connection, its engine, its round."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from wtransfer.errors import PeerError, ProtocolError, WTransferError
from wtransfer.manifest import Manifest
from wtransfer.transport.channel import Dialer
from wtransfer.transport.layout import TensorLayout
from wtransfer.weight_sync.messages import (
    CODEC,
    Abort,
    Commit,
    Data,
    ErrorInfo,
    Finish,
    Init,
    Plan,
    Prepare,
    Ready,
    Refused,
    Rollback,
)
from wtransfer.weight_sync.worker.ledger import Held, Pending
from wtransfer.weight_sync.worker.reception import Reception

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from wtransfer.transport.channel import Connection
    from wtransfer.weight_sync.worker.hosted import HostedEngine
    from wtransfer.weight_sync.worker.session import WorkerSession

logger = logging.getLogger(__name__)


class Link:
    """Dials one publisher until closed, and answers it.

    All ``_on_*`` methods run on the channel's thread and none of them waits: engine work is queued
    to the engine's thread, applying is left to the thread that owns the model.

    Args:
        session: Says what the worker is; its ledger decides which round may be active.
        address: The publisher's.
        token: Shared secret.
        engine: Runs what the publisher asks for.
        host: By way of which host the publisher has invited this worker.
    """

    def __init__(
        self,
        session: WorkerSession,
        address: str,
        token: str,
        engine: HostedEngine,
        host: str | None = None,
    ) -> None:
        self.address = address
        self._host = host
        self.num_dropped = 0
        self.refusal: Exception | None = None
        self._session = session
        self._ledger = session.ledger
        self._engine = engine
        self._connection: Connection | None = None
        self._reception: Reception | None = None
        self._manifest: Manifest | None = None
        self._layout: TensorLayout | None = None
        self._making = threading.Event()
        self._making.set()
        self._committing: str | None = None
        self._handlers: dict[type[msgspec.Struct], Callable[..., None]] = {
            Init: self._on_init,
            Plan: self._on_plan,
            Data: self._on_data,
            Prepare: self._on_prepare,
            Commit: self._on_commit,
            Abort: self._on_abort,
            Finish: self._on_finish,
            Rollback: self._on_rollback,
        }
        self._dialer = Dialer(
            CODEC,
            address=address,
            token=token,
            on_open=self._on_open,
            on_message=self._on_message,
            on_close=self._on_close,
            on_refused=self._on_refused,
        )

    @property
    def connected(self) -> bool:
        """Whether the publisher is reached right now."""
        return self._connection is not None

    def send(self, message: msgspec.Struct) -> None:
        """Send to the publisher; without a connection the message has lost its meaning."""
        self._send_to(self._connection, message)

    def close(self) -> None:
        """Leave the publisher; a round that is not committed ends."""
        self._dialer.close()
        self._end_reception("the worker closed its session")
        # What it still does while it is made, such as to wait for a group's ranks, ends as well.
        self._engine.abort_in_background(self._making)
        self._engine.shutdown()

    # -- on the channel's thread

    def _on_open(self, connection: Connection) -> None:
        self._connection = connection
        # Each end knows of manifests what went over this connection: a new one begins with none.
        self._manifest = None
        self.send(self._session.hello(self._host))

    def _on_close(self, connection: Connection, error: Exception | None) -> None:
        if connection is self._connection:
            self._connection = None
            self._end_reception(f"the publisher was lost: {error}")
            self._engine.leave_group(self._making)
            if self._committing is not None and self._session.num_ranks > 1:
                self._ledger.orphan(self, self._committing)

    def _on_refused(self, error: Exception) -> None:
        logger.warning("publisher %s refuses this worker: %s", self.address, error)
        self.refusal = error

    def _on_message(self, _connection: Connection, message: msgspec.Struct) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"a publisher does not send {type(message).__name__}")
        handler(message)

    def _on_init(self, init: Init) -> None:
        self._end_reception("the engine is initialised anew")
        # An engine that hangs while it is made must not hold up the one that is asked for now.
        self._engine.abort_in_background(self._making)
        # The answer is for who asked: a later publisher counts epochs from one as well.
        asked_by = self._connection
        self._making = self._engine.submit(lambda: self._make_engine(init, asked_by))

    def _make_engine(self, init: Init, asked_by: Connection | None) -> None:
        try:
            self._engine.make(init)
        except BaseException as error:
            if not isinstance(error, WTransferError):
                logger.exception("engine %r could not be made", init.engine)
            self._send_to(asked_by, Refused(init.epoch, ErrorInfo.of(error)))
        else:
            self._send_to(asked_by, Ready(init.epoch))

    def _on_plan(self, plan: Plan) -> None:
        # The publisher knows which of its rounds is alive: a new plan ends an older one.
        self._end_reception(f"superseded by round {plan.round_id}")
        if isinstance(plan.manifest, Manifest):
            self._manifest = plan.manifest
        session = self._session
        reception = Reception(
            plan,
            self._manifest,
            self._engine,
            layout_of=self._layout_of,
            session=session,
            notes=session.notes(),
            send=self.send,
            on_error=session.note_error,
            on_over=lambda: self._ledger.free(plan.round_id),
        )
        self._reception = reception
        reception.start(lambda: self._ledger.claim(self, plan.round_id, plan.version))

    def _layout_of(self, manifest: Manifest) -> TensorLayout:
        """Return the checked layout of a manifest; mostly that of the round before."""
        if self._layout is None or self._layout.manifest != manifest:
            manifest.check()
            self._layout = TensorLayout(manifest)
        return self._layout

    def _on_data(self, data: Data) -> None:
        reception = self._current(data.round_id)
        if reception is not None and reception.expects(data):
            reception.receive(data)
        else:
            self._drop(data)

    def _on_prepare(self, prepare: Prepare) -> None:
        reception = self._current(prepare.round_id)
        if reception is not None:
            reception.prepare(prepare)
        else:
            self._drop(prepare)

    def _on_commit(self, commit: Commit) -> None:
        reception = self._current(commit.round_id)
        tensors = None if reception is None else reception.take()
        if reception is None or tensors is None:
            self._drop(commit)
            return
        self._reception = None
        plan = reception.plan
        self._committing = plan.round_id
        held = Held(
            plan.version,
            reception.fingerprint,
            reception.manifest,
            tensors,
            "digests",
            reception.casts,
        )
        self._ledger.offer(
            Pending(self, plan.round_id, held, reception.seconds, schema=reception.judged)
        )

    def _on_abort(self, abort: Abort) -> None:
        if self._current(abort.round_id) is not None:
            self._end_reception(abort.reason)
        elif self._reception is not None:
            return
        # Also of a round that ended between its init and its plan: its group is there, too. The
        # abort comes before the init of another, on the same connection, so the group is that one.
        self._engine.leave_group(self._making)

    def _on_finish(self, finish: Finish) -> None:
        self._ledger.release(finish.round_id)

    def _on_rollback(self, rollback: Rollback) -> None:
        dropped = self._ledger.rollback(self, rollback.round_id, rollback.reason)
        if dropped is not None:
            self._session.ack(dropped, "discarded")

    def _send_to(self, connection: Connection | None, message: msgspec.Struct) -> None:
        if connection is None:
            return
        try:
            connection.send(message)
        except PeerError as error:
            logger.info("%s was not sent to %s: %s", type(message).__name__, self.address, error)

    def _current(self, round_id: str) -> Reception | None:
        reception = self._reception
        if reception is not None and reception.plan.round_id == round_id:
            return reception
        return None

    def _drop(self, message: Data | Prepare | Commit) -> None:
        self.num_dropped += 1
        logger.info(
            "dropped a late or repeated %s of round %s", type(message).__name__, message.round_id
        )

    def _end_reception(self, reason: str) -> None:
        reception, self._reception = self._reception, None
        if reception is not None:
            reception.end(reason)
