"""One publisher as its worker sees it, and one round of it.

`Participant` answers a publisher's messages; `StagedUpdate` is an update on its way to the commit:
judged, received, verified. `PublisherConnection` is a publisher that is dialed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from wtransfer.calls import Flag, forget_frames
from wtransfer.errors import (
    EngineError,
    PeerError,
    ProtocolError,
    RoundAbortedError,
    WTransferError,
)
from wtransfer.manifest import Manifest
from wtransfer.transport.channel import Dialer
from wtransfer.transport.layout import TensorLayout
from wtransfer.transport.memory import require_memory
from wtransfer.weight_sync.messages import (
    CODEC,
    Abort,
    Accept,
    Commit,
    Compare,
    Data,
    ErrorInfo,
    Fault,
    Finish,
    Init,
    Plan,
    Prepare,
    Progress,
    Ready,
    Received,
    Refuse,
    Refused,
    Rollback,
    Vote,
)
from wtransfer.weight_sync.worker.engine_runner import EngineRunner
from wtransfer.weight_sync.worker.schema import (
    canonical_names,
    check_fit,
    check_scheme,
    check_whole,
)
from wtransfer.weight_sync.worker.staging import Staging
from wtransfer.weight_sync.worker.weight_state import WeightSet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import msgspec
    import torch

    from wtransfer.registry.hooks import Notifications
    from wtransfer.transport.channel import Connection
    from wtransfer.weight_sync.messages import Hello
    from wtransfer.weight_sync.worker.held_memory import HeldMemory
    from wtransfer.weight_sync.worker.weight_state import Answered, Pending, WeightState
    from wtransfer.weights import TensorSpec

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.1
"""Least time between two progress messages."""


class Member(Protocol):
    """A worker, as far as rounds concern it."""

    name: str
    rank: int
    num_ranks: int
    cast: bool
    """True if floating dtypes are cast at a commit."""
    cast_hint: str
    """How a user allows the cast, for errors."""
    weight_state: WeightState[StagedUpdate]
    observers: Notifications

    def hello(self, host: str | None) -> Hello:
        """Return the first message to a publisher."""

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return the model's schema; None: a target without one."""

    @property
    def scheme(self) -> str:
        """How the model's weights are quantised; empty where it does not say."""

    def check_config(self, config: str) -> list[str]:
        """Raise if the model computes by another configuration than an update's; return notes."""

    def prove_kept(self, manifest: Manifest, on_progress: Callable[[int], None]) -> None:
        """Raise unless this worker has every tensor of an update that does not travel."""

    def held_memory(self) -> HeldMemory:
        """Return the memory of the weights that this worker has by an update."""

    def held_was_hit(self, tensor: torch.Tensor, reason: str) -> str | None:
        """Note that an engine has written to that memory; return the sentence for the error.

        Args:
            tensor: Lies there.
            reason: Begins the sentence.

        Returns:
            None: these weights were let go meanwhile.
        """

    def notes(self) -> list[str]:
        """Return the notes on this worker for the publisher's report."""

    def note_error(self, error: WTransferError) -> None:
        """Note the error for which an update is refused."""

    def notify_aborted(self, pending: Pending[StagedUpdate], error: WTransferError) -> None:
        """Tell observers that a pending update is dropped."""


class StagedUpdate:
    """One update beside the model: judged, received and verified on the engine's thread.

    Args:
        plan: The publisher's plan.
        manifest: The plan's manifest, or else the last one that came from this publisher.
        participant: Answers the publisher.
    """

    def __init__(self, plan: Plan, manifest: Manifest, participant: Participant) -> None:
        self.publisher = participant.publisher
        self.round_id = plan.round_id
        self.version = plan.version
        self.held = WeightSet(plan.version, "", manifest)
        """The set; complete once it is verified."""
        self.seconds: dict[str, float] = {}
        self.dropped: str | None = None
        """Why the round has ended without a commit."""
        self.running = Flag()
        """Set when the engine's thread has nothing more to do for the update."""
        self._participant = participant
        self._named = plan.manifest if isinstance(plan.manifest, str) else None
        self._layout: TensorLayout | None = None
        self._staging: Staging | None = None
        self._progress_at = 0.0
        self.started_at = self.moved_at = time.monotonic()
        self.staged_nbytes = 0
        """Bytes staged so far; before the plan is accepted, proven to be here already."""

    @property
    def facts(self) -> dict[str, str]:
        """Round, version and worker of the update, for errors and observers."""
        member = self._participant.member
        return {"round_id": self.round_id, "version": self.version, "worker": member.name}

    def drop(self, reason: str) -> None:
        """Release all staged tensors, under the state's lock.

        An engine that is still receiving returns by the error of its next `load_weights`.
        """
        self.dropped = reason
        staging, self._staging = self._staging, None
        self.held = self.held.without_tensors()
        if staging is not None:
            staging.stop(reason)

    def judge_plan(self) -> Accept:
        """Raise unless the update fits the target and there is room for it.

        Raises:
            WTransferError: Why the plan is refused.
        """
        member, runner = self._participant.member, self._participant.runner
        manifest = self.held.manifest
        assert manifest is not None
        layout = self._layout = self._participant.layout_of(manifest)
        if self._named not in (None, layout.identity):
            # The publisher sent only the manifest's identity. Compare with the identity that this
            # worker computed from the last manifest that it checked.
            raise ProtocolError(
                f"the plan of {self.version!r} names the manifest {self._named!r:.80}; the last "
                f"one over this connection is {layout.identity!r}; send the plan whole"
            )
        runner.ensure()
        notes = member.notes()
        check_scheme(manifest, member.scheme)
        schema = member.schema()
        casts = ""
        if schema is None:
            check_whole(manifest)
        else:
            # A copy: a target may return its own mapping, and change it.
            schema = dict(schema)
            casts = check_fit(
                manifest,
                schema,
                cast=member.cast,
                cast_hint=member.cast_hint,
                scheme=member.scheme,
            )
        notes += member.check_config(manifest.config)
        if manifest.kept:
            # Before it accepts, with the model as it serves; and once more as they are applied.
            member.prove_kept(manifest, self._proven)
        if casts:
            notes.append("casts floating dtypes at commit")
        # The manifest of the layout: equal manifests of round after round are one object.
        self.held = WeightSet(self.version, "", layout.manifest, casts=casts, judged=schema)
        note = runner.make_room(layout.nbytes)
        if note is not None:
            notes.append(note)
        elif runner.copies or runner.allocates:
            require_memory(layout.nbytes, f"staging update {self.version!r}")
            notes.append(f"stages {layout.nbytes} bytes of its own")
        self.staged_nbytes = 0
        staging = Staging(
            layout,
            copies=runner.copies,
            on_progress=self._progress,
            held=None if runner.copies else member.held_memory(),
            check_held=self._check_held,
        )
        with member.weight_state.changed:
            if self.dropped is None:
                self._staging = staging
        runner.optional("set_layout", layout)
        runner.optional("start_weight_update")
        self.seconds["accept"] = time.monotonic() - self.started_at
        return Accept(self.round_id, notes)

    def receive(self, data: Data) -> Received:
        """Let the engine receive once."""
        begun = time.monotonic()
        load_weights = self._staged().load_weights
        self._participant.runner.receive(data.update_info, load_weights)
        self.seconds["transfer"] = self.seconds.get("transfer", 0.0) + time.monotonic() - begun
        return Received(self.round_id, data.seq)

    def verify(self, prepare: Prepare) -> Vote:
        """Vote for the arrived set; a set that is as sent is left to the commit.

        Raises:
            IncompleteUpdateError: Pieces never arrived.
            SchemaError: Names of one tensor arrived with different bytes.
        """
        begun = time.monotonic()
        runner, state = self._participant.runner, self._participant.member.weight_state
        runner.optional("finish_weight_update")
        staging, layout = self._staged(), self._layout
        assert layout is not None
        if runner.may_rewrite:
            staging.digest_again()
        fingerprint = layout.fingerprint(staging.digests())
        # Equal fingerprints are equal digests of every piece.
        as_sent = fingerprint == prepare.fingerprint
        judged = self.held.judged or {}
        if as_sent and any(spec.aliases for spec in judged.values()):
            staging.check_ties(canonical_names(judged))
        # A tensor that an engine delivers from here on is in no digest.
        staging.stop("the update is verified")
        self.seconds["verify"] = time.monotonic() - begun
        vote = Vote(self.round_id, fingerprint, staging.nbytes, self.seconds)
        if not as_sent:
            # Before the vote leaves, which asks for the digests. A commit would be dropped.
            if not state.differs(self):
                raise RoundAbortedError(f"the round was ended: {self.dropped}")
            return vote
        with state.changed:
            self._staging = None
            self.held = replace(self.held, fingerprint=fingerprint, tensors=staging.tensors)
            # In this order: the commit may come as soon as the vote has left.
            if not state.verified(self):
                self.held = self.held.without_tensors()
                raise RoundAbortedError(f"the round was ended: {self.dropped}")
        return vote

    def compare(self, message: Compare) -> Fault:
        """Name the pieces that arrived with other bytes than were sent; see `Staging.compare`."""
        raise self._staged().compare(message.digests)

    def _staged(self) -> Staging:
        staging = self._staging
        if staging is None:
            raise RoundAbortedError(f"the round was ended: {self.dropped}")
        return staging

    def _check_held(self, name: str, tensor: torch.Tensor) -> None:
        """Raise if an engine delivers a tensor where the weights lie that this worker has.

        They have other bytes by then, and the bytes of the update are no better: the next round
        would be written there, too.
        """
        engine = self._participant.runner.name
        text = self._participant.member.held_was_hit(
            tensor, f"engine {engine!r} delivers {name!r} of version {self.version!r}"
        )
        if text is not None:
            error = EngineError(text, piece=name)
            self._staged().stop(text)
            raise error

    def _proven(self, nbytes: int) -> None:
        if self.dropped is not None:
            raise RoundAbortedError(f"the round was ended: {self.dropped}")
        self._progress(nbytes)

    def _progress(self, nbytes: int) -> None:
        self.staged_nbytes = nbytes
        now = self.moved_at = time.monotonic()
        if now - self._progress_at >= PROGRESS_INTERVAL_S:
            self._progress_at = now
            self._participant.publisher.send(Progress(self.round_id, nbytes))


class Participant:
    """Answers the messages of one publisher, whether it is dialed or a folder.

    `handle` never waits: the state decides what is on time, engine work is queued to the engine's
    thread, and applying is left to the thread that owns the model.

    Args:
        member: The worker, with its weights.
        publisher: Takes the answers.
        runner: Runs the engine.
        on_error: Called with the error of an update that fails on this worker.
    """

    def __init__(
        self,
        member: Member,
        publisher: Answered,
        runner: EngineRunner,
        on_error: Callable[[WTransferError], None],
    ) -> None:
        self.member = member
        self.publisher = publisher
        self.runner = runner
        self._state = member.weight_state
        self._on_error = on_error
        self._manifest = Manifest(())
        self._layout: TensorLayout | None = None

    def handle(self, message: msgspec.Struct) -> None:
        """Take the next message.

        Raises:
            ProtocolError: A publisher does not send such messages.
        """
        state = self._state
        match message:
            case Plan():
                self._plan(message)
            case Data():
                staged = state.data(message.round_id, message.seq)
                if staged is not None:
                    self._queue(staged, lambda update: update.receive(message), Fault)
            case Prepare():
                staged = state.prepare(message.round_id)
                if staged is not None:
                    self._queue(staged, lambda update: update.verify(message), Fault)
            case Compare():
                staged = state.compare(message.round_id)
                if staged is not None:
                    self._queue(staged, lambda update: update.compare(message), Fault)
            case Commit():
                state.commit(message.round_id)
            case Finish():
                state.finish(message.round_id)
            case Rollback():
                self._dropped(state.rollback(message.round_id, message.reason), message.reason)
            case Abort():
                self.ended(state.end_round(message.reason, message.round_id))
            case _:
                raise ProtocolError(f"a publisher does not send {type(message).__name__}")

    def ended(self, update: StagedUpdate | None) -> None:
        """Let the engine return from a round that has ended, if it is at work for it."""
        if update is None:
            return
        error = RoundAbortedError(f"the round was ended: {update.dropped}")
        logger.info("%s drops %r: %s", self.member.name, update.version, update.dropped)
        self._notify_aborted(update, error)
        self.runner.abort_in_background(update.running)

    def begin_anew(self) -> None:
        """Forget the last manifest: a plan may name only a manifest of the same connection."""
        self._manifest = Manifest(())

    def publisher_lost(self, reason: str) -> None:
        """End the round that is being staged, for the publisher's connection has ended.

        A rank of several also rolls back a commit that is not finished.
        """
        self.ended(self._state.end_round(reason))
        self._dropped(self._state.publisher_lost(), reason)

    def _dropped(self, pending: Pending[StagedUpdate] | None, reason: str) -> None:
        if pending is not None:
            error = RoundAbortedError(f"the update was dropped before it was applied: {reason}")
            self.member.notify_aborted(pending, error)

    def layout_of(self, manifest: Manifest) -> TensorLayout:
        """Return the checked layout of a manifest; mostly that of the round before."""
        if self._layout is None or self._layout.manifest != manifest:
            manifest.check()
            self._layout = TensorLayout(manifest)
        return self._layout

    def _plan(self, plan: Plan) -> None:
        # The publisher knows which of its rounds is alive: a new plan ends an older one.
        self.ended(self._state.end_round(f"superseded by round {plan.round_id}"))
        if isinstance(plan.manifest, Manifest):
            self._manifest = plan.manifest
        update = StagedUpdate(plan, self._manifest, self)
        # First: no end of the round is notified before it has begun for the state. The end of an
        # earlier one was, under the lock that `end_round` has taken just now.
        self.member.observers.notify("wtransfer_round_started", **update.facts)
        try:
            self._state.plan(update)
        except WTransferError as error:
            busy = error
            self._notify_aborted(update, busy, is_refused=True)
            self.runner.submit(lambda: self._answer_failure(update, busy, Refuse))
        else:
            self._queue(update, StagedUpdate.judge_plan, Refuse)

    def _queue(
        self,
        update: StagedUpdate,
        step: Callable[[StagedUpdate], msgspec.Struct],
        answer: type[Refuse | Fault],
    ) -> None:
        def run() -> None:
            if update.dropped is not None:
                return
            try:
                message = step(update)
                update.moved_at = time.monotonic()
                self.publisher.send(message)
            except BaseException as error:
                if not isinstance(error, WTransferError):
                    logger.exception("round %s failed", update.round_id)
                # The frames that raised are over; observers and logs may keep the error for long.
                forget_frames(error)
                with self._state.changed:
                    # Under one lock: the plan of the next round may come at any time.
                    if failed := self._state.failed(update, str(error)):
                        self._notify_aborted(update, error, is_refused=answer is Refuse)
                if failed:
                    self._answer_failure(update, error, answer)

        update.running = self.runner.submit(run)

    def _answer_failure(
        self, update: StagedUpdate, error: BaseException, answer: type[Refuse | Fault]
    ) -> None:
        info = ErrorInfo.of(error)
        self._on_error(error if isinstance(error, WTransferError) else info.rebuild())
        self.publisher.send(answer(update.round_id, info))

    def _notify_aborted(
        self, update: StagedUpdate, error: BaseException, *, is_refused: bool = False
    ) -> None:
        if is_refused and isinstance(error, WTransferError):
            # So that observers tell a refused plan from a round that failed later.
            error.add_facts(phase="plan")
        self.member.observers.notify("wtransfer_round_aborted", error=error, **update.facts)


class PublisherConnection:
    """Dials one publisher until closed, and answers it.

    All ``_on_*`` methods run on the channel's thread and never wait.

    Args:
        member: The worker, with its weights.
        address: The publisher's.
        token: Shared secret.
        host: Host by which the publisher has invited this worker.
        engines: Engine names that the publisher may ask for; None: every engine found here.
    """

    def __init__(
        self,
        member: Member,
        address: str,
        token: str,
        host: str | None,
        engines: Collection[str] | None,
    ) -> None:
        self.address = address
        self.connected_since: float | None = None
        self.refusal: Exception | None = None
        """Why the publisher last refused this worker, or this worker the publisher."""
        self._member = member
        self._host = host
        self._runner = EngineRunner(member.rank, member.num_ranks, engines)
        self._participant = Participant(member, self, self._runner, member.note_error)
        self._connection: Connection | None = None
        self._making = Flag()
        self._making.set()
        self._token = token
        self._dialer: Dialer | None = None

    def start(self) -> None:
        """Dial."""
        self._dialer = Dialer(
            CODEC,
            address=self.address,
            token=self._token,
            on_open=self._on_open,
            on_message=self._on_message,
            on_close=self._on_close,
            on_refused=self._on_refused,
        )

    @property
    def connected(self) -> bool:
        """True if the publisher is reached right now."""
        return self._connection is not None

    def send(self, message: msgspec.Struct) -> None:
        """Send to the publisher; without a connection the message is dropped."""
        self._send_to(self._connection, message)

    def close(self) -> None:
        """Leave the publisher; a round that is not committed ends."""
        if self._dialer is not None:
            self._dialer.close()
        self._participant.ended(
            self._member.weight_state.end_round("the worker closed its session")
        )
        # An engine that is still being made, and waits for the ranks of its group, ends as well.
        self._runner.abort_in_background(self._making)
        self._runner.shutdown()

    # -- on the channel's thread

    def _on_open(self, connection: Connection) -> None:
        self._participant.begin_anew()
        # Under the lock: the hello must not report an older version than an ack sent before it.
        with self._member.weight_state.changed:
            # First: the engine's thread sends by `_connection`, and nothing may precede the hello.
            self._send_to(connection, self._member.hello(self._host))
            self._connection = connection
            self.connected_since = time.monotonic()

    def _on_close(self, connection: Connection, error: Exception | None) -> None:
        if connection is not self._connection:
            return
        self._connection = self.connected_since = None
        self._participant.publisher_lost(f"the publisher was lost: {error}")
        self._runner.leave_group(self._making)

    def _on_refused(self, error: Exception) -> None:
        logger.warning("publisher %s refuses this worker: %s", self.address, error)
        self.refusal = error

    def _on_message(self, _connection: Connection, message: msgspec.Struct) -> None:
        state = self._member.weight_state
        if isinstance(message, Init):
            self._on_init(message)
            return
        is_current = state.update is None or state.update.round_id == getattr(
            message, "round_id", None
        )
        self._participant.handle(message)
        if isinstance(message, Abort) and is_current:
            # An abort can come between the init of a round and its plan: the group exists by then,
            # and the engine leaves it. On one connection no init of another round comes earlier.
            self._runner.leave_group(self._making)

    def _on_init(self, init: Init) -> None:
        self._participant.ended(
            self._member.weight_state.end_round("the engine is initialised anew")
        )
        # An engine that hangs while it is made must not hold up the engine asked for now.
        self._runner.abort_in_background(self._making)
        # The answer goes over the connection of the init: a restarted publisher counts epochs from
        # one again, and would take this answer for its own.
        asked_by = self._connection
        self._making = self._runner.submit(lambda: self._make_engine(init, asked_by))

    def _make_engine(self, init: Init, asked_by: Connection | None) -> None:
        try:
            self._runner.make(init)
        except BaseException as error:
            if not isinstance(error, WTransferError):
                logger.exception("engine %r could not be made", init.engine)
            self._send_to(asked_by, Refused(init.epoch, ErrorInfo.of(error)))
        else:
            self._send_to(asked_by, Ready(init.epoch))

    def _send_to(self, connection: Connection | None, message: msgspec.Struct) -> None:
        if connection is None:
            return
        try:
            connection.send(message)
        except PeerError as error:
            logger.info("%s was not sent to %s: %s", type(message).__name__, self.address, error)
