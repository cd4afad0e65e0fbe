"""One round as a worker sees it: accepted, received, verified, or over."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from wtransfer.calls import forget_frames
from wtransfer.errors import ProtocolError, RoundAbortedError, WTransferError
from wtransfer.manifest import Manifest
from wtransfer.registry import hooks
from wtransfer.transport.memory import require_memory
from wtransfer.weight_sync.messages import (
    Accept,
    ErrorInfo,
    Fault,
    Progress,
    Received,
    Refuse,
    Vote,
)
from wtransfer.weight_sync.worker.schema import canonical_names, check_fit, check_whole
from wtransfer.weight_sync.worker.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import msgspec
    import torch

    from wtransfer.engines.interface import TensorSpec
    from wtransfer.transport.layout import TensorLayout
    from wtransfer.weight_sync.messages import Data, Plan, Prepare
    from wtransfer.weight_sync.worker.hosted import HostedEngine
    from wtransfer.weight_sync.worker.session import WorkerSession

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.1
"""Least time between two progress messages."""


class Reception:
    """Stages one round on the engine's thread, and answers each of its messages.

    The channel's thread decides what is on time (`expects`) and queues the work here; the engine's
    thread does it. `end` may be called from any thread, and only the first call counts.

    Args:
        plan: What the trainer announces.
        manifest: The one that came with it, or else the last one that came over its connection.
        engine: Receives it.
        layout_of: Returns the layout of a manifest, which it checks.
        session: Says what updates must look like.
        notes: What the trainer should know of this worker.
        send: Sends a message to the trainer; never raises.
        on_error: Called with what is wrong with the update, or with this worker.
        on_over: Called once when the round is over here without a verified set.
    """

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest | None,
        engine: HostedEngine,
        *,
        layout_of: Callable[[Manifest], TensorLayout],
        session: WorkerSession,
        notes: list[str],
        send: Callable[[msgspec.Struct], None],
        on_error: Callable[[WTransferError], None],
        on_over: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.manifest = manifest or Manifest(())
        self.fingerprint = ""
        self.casts = ""
        """What `check_fit` says of the tensors that will be cast."""
        self.judged: Mapping[str, TensorSpec] | None = None
        """The schema that the plan was judged by."""
        self.seconds: dict[str, float] = {}
        self.verified = False
        self._engine = engine
        self._session = session
        self._layout_of = layout_of
        self._tied: Mapping[str, str] = {}
        self._notes = list(notes)
        self._send = send
        self._on_error = on_error
        self._on_over = on_over
        self._next_seq = 0
        self._sealed = False
        self._over = False
        self._lock = threading.Lock()
        self._staging: Staging | None = None
        self._running = threading.Event()
        self._running.set()
        self._progress_at = 0.0
        self._started_at = time.monotonic()

    # -- on the channel's thread

    def start(self, claim: Callable[[], None]) -> None:
        """Judge the plan and answer with `Accept` or `Refuse`.

        Args:
            claim: Takes the session for this round, or raises.
        """
        self._queue(lambda: self._accept(claim), refusal=True)

    def expects(self, data: Data) -> bool:
        """Whether this is the next data of this round, neither late nor repeated."""
        return data.seq == self._next_seq and not self._sealed and not self._over

    def receive(self, data: Data) -> None:
        """Let the engine receive, and answer with `Received` or `Fault`."""
        self._next_seq += 1
        self._queue(lambda: self._receive(data))

    def prepare(self, prepare: Prepare) -> None:
        """Verify, and answer with `Vote` or `Fault`."""
        if not self._sealed:
            self._sealed = True
            self._queue(lambda: self._verify(prepare))

    def take(self) -> Mapping[str, torch.Tensor] | None:
        """Return the verified tensors, once; None if there are none to be had."""
        with self._lock:
            staging = self._staging
            if staging is None or not self.verified:
                return None
            self._staging = None
            self._over = True
            return staging.tensors

    def end(self, reason: str) -> None:
        """Drop what is staged; the engine, if it is at work, is made to return."""
        if self._finish(reason):
            ended = RoundAbortedError(f"the round was ended: {reason}")
            # Not here, on the channel's thread: observers that are slow would cost the connection.
            self._engine.submit(
                lambda: hooks.notify("wtransfer_round_aborted", error=ended, **self._identity())
            )
            self._engine.abort_in_background(self._running)

    def _identity(self) -> dict[str, str]:
        plan = self.plan
        return {"round_id": plan.round_id, "version": plan.version, "worker": self._session.name}

    # -- on the engine's thread

    def _queue(self, step: Callable[[], None], *, refusal: bool = False) -> None:
        self._running = self._engine.submit(lambda: self._guarded(step, refusal=refusal))

    def _guarded(self, step: Callable[[], None], *, refusal: bool) -> None:
        if self._over:
            return
        try:
            step()
        except BaseException as error:
            self._fail(error, refusal=refusal)

    def _fail(self, error: BaseException, *, refusal: bool) -> None:
        if not isinstance(error, WTransferError):
            logger.error("round %s failed", self.plan.round_id, exc_info=error)
        # The frames that raised are over; observers and logs may keep the error for long.
        forget_frames(error)
        if not self._finish(str(error)):
            return
        hooks.notify("wtransfer_round_aborted", error=error, **self._identity())
        info = ErrorInfo.of(error)
        self._on_error(error if isinstance(error, WTransferError) else info.rebuild())
        answer = Refuse if refusal else Fault
        self._send(answer(self.plan.round_id, info))

    def _finish(self, reason: str) -> bool:
        with self._lock:
            if self._over:
                return False
            self._over = True
            self.verified = False
            staging, self._staging = self._staging, None
        if staging is not None:
            staging.stop(reason)
        self._on_over()
        return True

    def _accept(self, claim: Callable[[], None]) -> None:
        layout = self._layout_of(self.manifest)
        self._check_named(layout.identity)
        claim()
        if self._over:
            # Ended by the channel's thread a moment ago, when there was no claim to free.
            self._on_over()
            return
        self._engine.ensure()
        schema = self._session.schema()
        if schema is not None:
            # A copy: what a target returns may be its own, and change.
            self.judged = dict(schema)
            self.casts = check_fit(
                layout.manifest,
                schema,
                cast=self._session.cast,
                cast_hint=self._session.cast_hint,
            )
            if any(spec.aliases for spec in schema.values()):
                self._tied = canonical_names(schema)
            if self.casts:
                self._notes.append("casts floating dtypes at commit")
        else:
            check_whole(layout.manifest)
        self._make_room(layout)
        self._engine.optional("set_layout", layout)
        self._engine.optional("start_weight_update")
        self.seconds["accept"] = time.monotonic() - self._started_at
        hooks.notify("wtransfer_round_started", **self._identity())
        self._send(Accept(self.plan.round_id, self._notes))

    def _check_named(self, here: str) -> None:
        """Raise if the trainer means another manifest than the one with this identity.

        What it names is only compared with what was worked out here, of what was checked here.
        """
        named = self.plan.manifest
        if isinstance(named, str) and named != here:
            raise ProtocolError(
                f"the plan of {self.plan.version!r} names the manifest {named!r:.80}; the last one "
                f"over this connection is {here!r}; send the plan whole"
            )

    def _make_room(self, layout: TensorLayout) -> None:
        note = self._engine.make_room(layout.nbytes)
        if note is not None:
            self._notes.append(note)
        elif self._engine.copies or self._engine.allocates:
            require_memory(layout.nbytes, f"staging update {self.plan.version!r}")
            self._notes.append(f"stages {layout.nbytes} bytes of its own")
        staging = Staging(layout, copies=self._engine.copies, on_progress=self._progress)
        with self._lock:
            if not self._over:
                self._staging = staging

    def _staged(self) -> Staging:
        staging = self._staging
        if staging is None:
            raise RoundAbortedError("the round was ended while it was received")
        return staging

    def _receive(self, data: Data) -> None:
        begun = time.monotonic()
        self._engine.receive(data.update_info, self._staged().load_weights)
        self.seconds["transfer"] = self.seconds.get("transfer", 0.0) + time.monotonic() - begun
        self._send(Received(self.plan.round_id, data.seq))

    def _verify(self, prepare: Prepare) -> None:
        begun = time.monotonic()
        self._engine.optional("finish_weight_update")
        staging = self._staged()
        if self._engine.may_rewrite:
            staging.digest_again()
        digests = staging.verify(prepare.digests, self._tied)
        self.fingerprint = self._layout_of(self.manifest).fingerprint(digests)
        self.seconds["verify"] = time.monotonic() - begun
        with self._lock:
            if self._over:
                raise RoundAbortedError("the round was ended during its verification")
            self.verified = True
        self._send(Vote(self.plan.round_id, self.fingerprint, staging.nbytes, self.seconds))

    def _progress(self, nbytes: int) -> None:
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_INTERVAL_S:
            self._progress_at = now
            self._send(Progress(self.plan.round_id, nbytes))
