"""A worker's session: it stages, proves and applies updates, and knows what the worker holds.

A session has two sides. The channel and the engine work on threads of their own and bring an
update up to the point where it is verified; the model meanwhile serves. Only `commit_pending`,
called between two steps by the thread that owns the model, changes the model.

    fresh ──commit──> serving <──────────┐
      │                  │               │ commit_pending
      └────── T commit ──┴──> pending ───┤
                                         ├──> behind (restored: the old version, whole)
                                         └──> empty  (could not be restored: must not serve)

From any of them `weights_lost` leads to *empty*, and the next commit out of it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from wtransfer.calls import forget_frames
from wtransfer.deadline import Deadline
from wtransfer.engines.interface import TensorSpec
from wtransfer.errors import (
    AuthenticationError,
    ClosedError,
    CommitError,
    ForkedError,
    RoundBusyError,
    SchemaError,
    StallError,
    WTransferError,
)
from wtransfer.registry import hooks
from wtransfer.transport.address import parse_address
from wtransfer.transport.digests import digest
from wtransfer.transport.handshake import resolve_token
from wtransfer.transport.tensors import dtype_name, torch_dtype
from wtransfer.weight_sync.close_at_exit import close_at_exit
from wtransfer.weight_sync.messages import Ack, ErrorInfo, Hello, Lost
from wtransfer.weight_sync.worker.follower import Follower, folder_of, is_folder
from wtransfer.weight_sync.worker.hosted import HostedEngine
from wtransfer.weight_sync.worker.ledger import Held, Ledger, Pending
from wtransfer.weight_sync.worker.link import Link
from wtransfer.weight_sync.worker.schema import CAST_HINT
from wtransfer.weight_sync.worker.target import (
    CommitMode,
    NotedTensors,
    StateDictTarget,
    as_target,
)
from wtransfer.weights import process_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import nn
    from typing_extensions import Self

    from wtransfer.engines.interface import WeightTarget
    from wtransfer.manifest import Manifest
    from wtransfer.transport.address import Address

logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    """What `commit_pending` raises once no frame with tensors in it is left."""

    error: BaseException
    """For the caller."""
    cause: BaseException | None = None
    """Why, if it is another."""


class WorkerSession:
    """Receives weight updates for one worker process, or one rank of it.

    Args:
        model_or_target: A torch module, a mapping of names to tensors, or a `WeightTarget`.
        join: Address of a publisher; more can follow by `join()`.
        token: Shared secret. Default: ``WTRANSFER_TOKEN``, or the owner-only file that
            ``WTRANSFER_TOKEN_FILE`` names.
        commit: ``"adopt"`` points parameters at the staged memory (those of up to 16 KiB at memory
            of their own, which is written), ``"copy"`` writes into theirs.
        keep_previous: Keep what is needed to go back if applying fails. Without it a failed commit
            leaves the session *empty*.
        cast: Allow updates in another floating dtype than the model's.
        engines: Engine names that a publisher may ask for. Default: every one found here.
        instance: Serving instance that this rank belongs to; its ranks commit all or none.
        rank: Rank within the instance.
        num_ranks: Ranks of the instance.
        deadline_s: Longest wait for the other ranks of the instance at a commit, in seconds. What
            concerns a publisher is bounded by the publisher's deadline.
        name: Name for people. Default: host, process id and rank.
    """

    cast_hint: str = CAST_HINT
    """How `cast` is allowed here, for errors; a host that offers another way says so."""
    host_ranks: int | None = None
    """Ranks that the host of this worker invites, if it may say another number itself."""

    def __init__(
        self,
        model_or_target: nn.Module | Mapping[str, torch.Tensor] | WeightTarget,
        *,
        join: str | None = None,
        token: str | None = None,
        commit: CommitMode = "adopt",
        keep_previous: bool = True,
        cast: bool = False,
        engines: Collection[str] | None = None,
        instance: str | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        deadline_s: float = 30.0,
        name: str | None = None,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank is {rank}, expected 0 <= rank < num_ranks ({num_ranks})")
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise ValueError(f"deadline_s is {deadline_s}, expected a finite number above 0")
        self.cast = cast
        self.name = name or f"{socket.gethostname()}:{os.getpid()}/{rank}"
        self.ledger = Ledger()
        self._target = as_target(model_or_target, commit)
        self._token = token
        self._keep_previous = keep_previous
        self._engines = None if engines is None else frozenset(engines)
        self._instance = instance or f"{self.name}:{secrets.token_hex(4)}"
        self._rank = rank
        self.num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        self._last_error: WTransferError | None = None
        self._links: list[Link | Follower] = []
        # Held by whoever changes the model or decides not to: one thing at a time.
        self._model = threading.Lock()
        self._model_thread: int | None = None
        model = getattr(self._target, "vouched_as", model_or_target)
        self._weights = process_weights.hold(self.ledger.held.fingerprint, model)
        self._forget_weights = weakref.finalize(self, self._weights.close)
        close_at_exit(self)
        if join is not None:
            self.join(join)

    # -- for the thread that owns the model

    def join(self, address: str, *, token: str | None = None, host: str | None = None) -> None:
        """Dial a publisher, now and again whenever the connection is lost, until closed or left.

        ``file:/path`` is the folder that engine ``file`` publishes to: whatever version is current
        there, now and later, is taken from it, also when no publisher lives.

        Returns at once: a publisher that is not there yet is found when it comes.

        Args:
            address: The publisher's, or that of a folder.
            token: Its secret, where that is another than the session's. A folder has none: who may
                read it, may follow it.
            host: What the publisher calls the host that it has asked to let this worker join.

        Raises:
            AuthenticationError: No token was given and none is in the environment.
            ValueError: Not an address, one that was joined before, or a folder's for a rank of
                several.
        """
        self._check_usable()
        # Before anything is made: a second connection would be thrown out as the same worker.
        if self.link_to(address) is not None:
            raise ValueError(f"this WorkerSession has joined {address} already; join it once")
        if is_folder(address):
            self._follow(address)
            return
        token = resolve_token(self._token if token is None else token, os.environ)
        if token is None:
            raise AuthenticationError(
                f"no token for {address}: pass token=, or set WTRANSFER_TOKEN to the publisher's"
            )
        engine = HostedEngine(self._rank, self.num_ranks, self._engines)
        self._links = [*self._links, Link(self, address, token, engine, host)]

    def _follow(self, address: str) -> None:
        if self.num_ranks > 1:
            raise ValueError(
                f"a rank of {self.num_ranks} cannot follow {address}: nobody there would see to it "
                "that all ranks commit or none; join a publisher (it may send a kept version)"
            )
        self._links = [*self._links, Follower(self, address)]

    def leave(self, address: str) -> None:
        """Leave a publisher that was joined; the model keeps the weights that it has.

        Raises:
            ValueError: Not an address, or one that was not joined.
        """
        self._check_usable()
        link = self.link_to(address)
        if link is None:
            raise ValueError(f"this WorkerSession has not joined {address}")
        # Anew, not in place: other threads may be going through the list.
        self._links = [each for each in self._links if each is not link]
        link.close()

    def commit_pending(self, timeout_s: float = 0.0) -> bool:
        """Apply a verified update, if there is one. Call it between two steps of the model.

        For a rank of several this returns once the other ranks have done so too, or at
        `deadline_s`. So all ranks must call it between the same two steps: one that goes on into a
        collective operation instead would wait there for the one that waits here.

        Args:
            timeout_s: How long to wait for an update, in seconds.

        Returns:
            Whether an update was applied.

        Raises:
            CommitError: Applying failed, here or in another rank of this instance. The old version
                is whole again, unless `CommitError.restored` is false.
            RoundBusyError: Called from within the target or an observer, while it applies.
        """
        self._check_usable()
        self._check_not_within()
        ledger = self.ledger
        with ledger.changed:
            ledger.changed.wait_for(lambda: ledger.pending is not None or ledger.closed, timeout_s)
        with self._changing_model():
            done, failure = self._do_pending()
        if failure is None:
            return done
        forget_frames(failure.error)
        forget_frames(failure.cause)
        try:
            if failure.cause is None:
                raise failure.error
            raise failure.error from failure.cause
        finally:
            # Else the error, by its traceback and this frame, would keep itself.
            del failure

    def wait_for(self, version: str, timeout_s: float) -> None:
        """Apply updates as they come until the model has `version`; for who has nothing to serve.

        Call it on the thread that owns the model, as `commit_pending`.

        Args:
            version: Label.
            timeout_s: How long to wait, in seconds.

        Raises:
            StallError: It has not come in time; the text says what is known of why.
            CommitError: Applying an update failed; as `commit_pending`.
        """
        deadline = Deadline(timeout_s)
        while self.version != version:
            if deadline.expired:
                why = self.last_error or self.refusal
                reached = "a publisher is connected" if self.connected else "none is reached"
                raise StallError(
                    f"{version!r} has not come within {timeout_s:g} s: {reached}, the model has "
                    f"{self.version!r}" + (f"; last error: {why}" if why else ""),
                    seconds=timeout_s,
                ) from why
            self.commit_pending(deadline.remaining())

    def discard_pending(self) -> bool:
        """Drop a verified update that waits for `commit_pending`; return whether there was one."""
        self._check_usable()
        self._check_not_within()
        with self._changing_model():
            pending = self.ledger.discard()
        if pending is not None:
            self.ack(pending, "discarded")
        return pending is not None

    def weights_lost(self, reason: str) -> None:
        """State that the model does not hold the last commit any more; what it holds has no name.

        For hosts whose model loses its weights by other ways than a commit: it was put to sleep
        without them, or reloaded from disk. Call it between two steps of the model. The session is
        *empty* until the next commit. Every publisher is told, and brings the current version again
        where its engine can.

        A verified update that waits for `commit_pending` stays (`pending`): it is whole and its
        publisher has ordered it, so applying it is the shortest way back to weights with a name.

        Args:
            reason: What became of the weights, for people.

        Raises:
            RoundBusyError: Called from within the target or an observer, while it applies.
            ClosedError: The session was closed.
        """
        self._check_usable()
        self._check_not_within()
        logger.warning("%s is empty: %s", self.name, reason)
        with self._changing_model():
            self._enter_lost(reason)
            forget = getattr(self._target, "forget", None)
            if forget is not None:
                forget()

    def _enter_lost(self, reason: str) -> None:
        ledger = self.ledger
        # Told under the lock: publishers take the last message for what is held.
        with ledger.changed:
            ledger.lose()
            self._weights.settle(ledger.held.fingerprint)
            lost = Lost(ledger.held.fingerprint, ledger.standing, reason)
            for link in self._links:
                link.send(lost)

    @property
    def pending(self) -> bool:
        """Whether a verified update waits for `commit_pending`, whatever `state` says."""
        self._check_process()
        return self.ledger.pending is not None

    @property
    def version(self) -> str | None:
        """Label of the weights that the model has; None before the first commit."""
        return self.ledger.held.version

    @property
    def fingerprint(self) -> str:
        """Identity of the weights that the model has."""
        return self.ledger.held.fingerprint

    @property
    def state(self) -> str:
        """``fresh``, ``serving``, ``pending``, ``behind`` or ``empty``."""
        self._check_process()
        with self.ledger.changed:
            return self.ledger.state

    @property
    def connected(self) -> bool:
        """Whether a publisher is reached right now."""
        return any(link.connected for link in self._links)

    @property
    def orphaned(self) -> bool:
        """Whether the update that waits for `commit_pending` has lost its publisher.

        It is verified and was ordered, so it may still be applied; nobody waits for it any more.
        """
        pending = self.ledger.pending
        return pending is not None and not getattr(pending.link, "connected", False)

    @property
    def links(self) -> tuple[Link | Follower, ...]:
        """The link to every publisher that was joined and not left."""
        return tuple(self._links)

    def link_to(self, address: str) -> Link | Follower | None:
        """Return the link to a publisher that was joined and not left; None if there is none.

        Raises:
            AddressError: Not an address.
        """
        place = _place(address)
        return next((each for each in self._links if _place(each.address) == place), None)

    @property
    def has_publisher(self) -> bool:
        """Whether a publisher is reached right now, not only a folder of versions."""
        return any(isinstance(link, Link) and link.connected for link in self._links)

    @property
    def refusal(self) -> Exception | None:
        """Why a publisher last refused this worker (token, protocol); None if none has."""
        return next((link.refusal for link in self._links if link.refusal), None)

    @property
    def last_error(self) -> Exception | None:
        """Why the last update that came was refused or not applied; None once one is applied."""
        return self._last_error

    def note_error(self, error: WTransferError) -> None:
        """Note, and log, why an update was refused here."""
        # A copy without traceback, also for the log: frames that still run hold session and model.
        self._last_error = ErrorInfo.of(error).rebuild()
        logger.warning("%s refuses an update: %s", self.name, self._last_error)

    def digests(self) -> dict[str, str]:
        """Return the xxh3-128 of every tensor that the model has now, computed afresh.

        Waits while an update is being applied, so the digests are those of one version.

        Raises:
            ClosedError: The session was closed.
        """
        self._check_usable()
        self._check_not_within()
        with self._changing_model():
            target = self._target
            if (
                isinstance(target, StateDictTarget)
                and type(target).capture is StateDictTarget.capture
            ):
                # As they lie: its `capture` may be a copy of all.
                tensors: Mapping[str, torch.Tensor] | None = target.present()
            else:
                tensors = target.capture()
            return {name: digest(tensor) for name, tensor in (tensors or {}).items()}

    @property
    def num_dropped(self) -> int:
        """Late or repeated messages that were dropped."""
        return sum(link.num_dropped for link in self._links)

    def close(self) -> None:
        """Leave every publisher. The model keeps the weights that it has."""
        if os.getpid() != self._pid or not self.ledger.close():
            return
        self._forget_weights()
        for link in self._links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for links; none of these waits

    def hello(self, host: str | None = None) -> Hello:
        """Return what this worker is and holds, for who has invited it by way of `host`."""
        ledger = self.ledger
        with ledger.changed:
            return Hello(
                worker=self.name,
                instance=self._instance,
                rank=self._rank,
                num_ranks=self.num_ranks,
                version=ledger.held.version,
                fingerprint=ledger.held.fingerprint,
                state=ledger.standing,
                host=host,
                host_ranks=self.host_ranks,
            )

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return what updates must look like; a target without a schema follows the last one."""
        schema = self._target.schema()
        last = self.ledger.held.manifest
        return _schema_of(last) if schema is None and last is not None else schema

    def notes(self) -> list[str]:
        """Return what a publisher should know of this worker before a round."""
        if self._keep_previous:
            return []
        return ["keeps no previous version: a failed commit empties it"]

    def ack(self, pending: Pending, outcome: str, error: WTransferError | None = None) -> None:
        """Tell the publisher what came of its round, and what is held now."""
        ledger = self.ledger
        with ledger.changed:
            ack = Ack(
                round_id=pending.round_id,
                outcome=outcome,
                version=ledger.held.version,
                fingerprint=ledger.held.fingerprint,
                state=ledger.standing,
                seconds=pending.seconds,
                error=None if error is None else ErrorInfo.of(error),
            )
            # Under the lock: publishers take the last message for what is held.
            pending.link.send(ack)

    # -- applying

    @contextlib.contextmanager
    def _changing_model(self) -> Iterator[None]:
        with self._model:
            self._model_thread = threading.get_ident()
            try:
                yield
            finally:
                self._model_thread = None

    def _do_pending(self) -> tuple[bool, Failure | None]:
        pending = self.ledger.begin()
        if pending is None:
            return False, None
        # KV cache of the old weights is not served from here on, nor any that is not surely new.
        with self._weights.changing(lambda: self.ledger.held.kv_name):
            if pending.rollback_reason is not None:
                return False, self._go_back(pending)
            failure = self._apply(pending)
            if failure is None and self.num_ranks > 1:
                failure = self._await_release(pending)
            return True, failure

    def _apply(self, pending: Pending) -> Failure | None:
        begun = time.monotonic()
        pending.seconds["wait"] = begun - pending.since
        tensors = pending.held.tensors
        assert tensors is not None
        handed = NotedTensors(tensors)
        previous = None
        try:
            self._check_unchanged(pending)
            previous = self._restorable()
            self._target.apply(handed)
            pending.seconds["commit"] = time.monotonic() - begun
            # Within: an interrupt between the two would leave new weights under the old label.
            self.ledger.committed(pending, previous, keep=self._keep_previous)
        except BaseException as error:
            return self._restore(previous, pending, error, handed.last_read)
        self._last_error = None
        # Told first: the publisher waits, with a deadline, and observers may be slow.
        self.ack(pending, "committed")
        hooks.notify(
            "wtransfer_weights_committed",
            version=pending.held.version,
            fingerprint=pending.held.fingerprint,
            round_id=pending.round_id,
            worker=self.name,
        )
        return None

    def _check_unchanged(self, pending: Pending) -> None:
        """Raise if the model is not what the update was judged by: coverage would be no proof."""
        judged = pending.schema
        now = None if judged is None else self.schema()
        if judged is None or now is None or judged == now:
            return
        names = [*judged, *(name for name in now if name not in judged)]
        wrong = [name for name in names if judged.get(name) != now.get(name)]
        name = wrong[0]
        raise SchemaError(
            f"the model has changed in {len(wrong)} of its names since the update was judged, "
            f"first {name!r}: {_shown(judged.get(name))} then, {_shown(now.get(name))} now",
            piece=name,
        )

    def _restorable(self) -> Held:
        """Return what the model has, with tensors if there is a way back to it."""
        held = self.ledger.held
        if self._keep_previous and held.tensors is None and not self.ledger.empty:
            return replace(held, tensors=self._target.capture())
        return held

    def _restore(
        self, way_back: Held | None, pending: Pending, cause: BaseException, last_read: str | None
    ) -> Failure:
        """Go back after `cause`, and return what the caller shall see.

        Args:
            way_back: What the model had; None if the model was not touched yet.
            pending: What was to be applied.
            cause: Why it was not.
            last_read: The tensor that the target had taken last.
        """
        previous = way_back or self.ledger.held
        # An empty worker, whose model was not touched, is as empty as before.
        restored = self._put_back(previous) if way_back else not self.ledger.empty
        self.ledger.put_back(previous, restored=restored)
        back = f"{previous.version!r}" if previous.version else "its first weights"
        now = (
            f"the worker has {back} again"
            if restored
            else "the old version could not be restored: this worker must not serve"
        )
        piece = getattr(cause, "piece", None) or last_read
        where = f" after reading {piece!r}" if piece else ""
        failure = CommitError(
            f"applying {pending.held.version!r} failed{where} ({type(cause).__name__}: {cause}); "
            f"{now}",
            worker=self.name,
            round_id=pending.round_id,
            version=pending.held.version,
            phase="commit",
            piece=piece,
        )
        failure.restored = restored
        self._last_error = ErrorInfo.of(failure).rebuild()
        self.ack(pending, "restored" if restored else "empty", failure)
        return Failure(failure, cause) if isinstance(cause, Exception) else Failure(cause)

    def _put_back(self, previous: Held) -> bool:
        """Apply `previous`; return whether the model is whole again."""
        restored = previous.tensors is not None
        if previous.tensors is not None:
            try:
                self._target.apply(previous.tensors)
            except BaseException:
                logger.exception("%s could not restore %r", self.name, previous.version)
                restored = False
        return restored

    def _go_back(self, pending: Pending) -> Failure:
        """Undo a commit because another rank of the instance failed, and say so."""
        undone = self.ledger.held.version
        restored = self._put_back(pending.held)
        self.ledger.put_back(pending.held, restored=restored)
        failure = CommitError(
            f"{undone!r} was taken back: {pending.rollback_reason}"
            + ("" if restored else "; the old version could not be restored: must not serve"),
            worker=self.name,
            round_id=pending.round_id,
        )
        failure.restored = restored
        self._last_error = ErrorInfo.of(failure).rebuild()
        self.ack(pending, "reverted" if restored else "empty", failure)
        return Failure(failure)

    def _await_release(self, committed: Pending) -> Failure | None:
        """Wait until every rank has committed; between two of them no step may run."""
        ledger = self.ledger

        def settled() -> bool:
            return ledger.released or ledger.pending is not None or ledger.closed

        with ledger.changed:
            if not ledger.changed.wait_for(settled, self._deadline_s):
                # Others may not have committed: this rank must not serve new weights alone.
                reason = f"not released within {self._deadline_s:g} s"
                ledger.rollback(committed.link, committed.round_id, reason)
            rollback = ledger.pending
        if rollback is not None and rollback.rollback_reason is not None:
            return self._go_back(rollback)
        return None

    def _check_not_within(self) -> None:
        if self._model_thread == threading.get_ident():
            raise RoundBusyError(
                "this thread is applying an update already: do not call commit_pending or "
                "discard_pending from a hook or a target; call them between two steps"
            )

    def _check_usable(self) -> None:
        self._check_process()
        if self.ledger.closed:
            raise ClosedError("this WorkerSession is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                "this WorkerSession belongs to the parent process; after fork() make a new one"
            )


def _shown(spec: TensorSpec | None) -> str:
    if spec is None:
        return "not there"
    tied = f", tied to {', '.join(map(repr, spec.aliases))}" if spec.aliases else ""
    return f"{dtype_name(spec.dtype)} {list(spec.shape)}{tied}"


def _place(address: str) -> Address | Path:
    return folder_of(address) if is_folder(address) else parse_address(address)


def _schema_of(manifest: Manifest) -> Mapping[str, TensorSpec]:
    return {
        piece.name: TensorSpec(torch_dtype(piece.dtype), piece.shape) for piece in manifest.pieces
    }
