"""A worker's session: it stages, proves and applies updates, and knows what the worker holds.

A session has two sides. The channel and the engine work on threads of their own and bring an
update up to the point where it is verified; the model meanwhile serves. Only `commit_pending`,
called between two steps by the thread that owns the model, changes the model.

    fresh ──commit──> serving <──────────┐
      │                  │               │ commit_pending
      └────── T commit ──┴──> pending ───┤
                                         ├──> behind (restored: the old version, whole)
                                         └──> empty  (could not be restored: must not serve)
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wtransfer.engines.endings import close_at_exit
from wtransfer.engines.hosted import HostedEngine
from wtransfer.engines.link import Link
from wtransfer.engines.messages import ErrorInfo, Hello, Receipt
from wtransfer.engines.target import CommitMode, as_target
from wtransfer.errors import (
    AuthenticationError,
    ClosedError,
    CommitError,
    ForkedError,
    RoundBusyError,
    WTransferError,
)
from wtransfer.host import hooks
from wtransfer.manifest import Manifest, local_fingerprint
from wtransfer.transport.auth import resolve_token
from wtransfer.transport.tensors import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch
    from torch import nn
    from typing_extensions import Self

    from wtransfer.engines.interface import TensorSpec, WeightTarget
    from wtransfer.engines.reception import Reception

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """A set of weights: its names, and, where it can be applied again, its tensors."""

    version: str | None
    fingerprint: str
    manifest: Manifest | None = None
    tensors: Mapping[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class Claim:
    """Which round may stage in this session."""

    link: Link
    round_id: str
    version: str
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        age = time.monotonic() - self.since
        return f"round {self.round_id} ({self.version!r}) of {self.link.address}, {age:.1f} s old"


@dataclass(frozen=True)
class Pending:
    """What `commit_pending` has to do: apply a verified set, or go back to the previous one."""

    link: Link
    round_id: str
    held: Held
    seconds: dict[str, float]
    revert_reason: str | None = None
    since: float = field(default_factory=time.monotonic)


class WorkerSession:
    """Receives weight updates for one worker process, or one rank of it.

    Args:
        model_or_target: A torch module, a mapping of names to tensors, or a `WeightTarget`.
        join: Address of a publisher; more can follow by `join()`.
        token: Shared secret. Default: ``WTRANSFER_TOKEN``, or the owner-only file that
            ``WTRANSFER_TOKEN_FILE`` names.
        commit: ``"adopt"`` points parameters at the staged memory, ``"copy"`` writes into theirs.
        keep_previous: Keep what is needed to go back if applying fails. Without it a failed commit
            leaves the session *empty*.
        cast: Allow updates in another floating dtype than the model's.
        engines: Engine names that a publisher may ask for. Default: every one found here.
        instance: Serving instance that this rank belongs to; its ranks commit all or none.
        rank: Rank within the instance.
        num_ranks: Ranks of the instance.
        deadline_s: Bound on every wait of this session, in seconds.
        name: Name for people. Default: host, process id and rank.
    """

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
        self.cast = cast
        self.name = name or f"{socket.gethostname()}:{os.getpid()}/{rank}"
        self._target = as_target(model_or_target, commit)
        self._token = token
        self._keep_previous = keep_previous
        self._engines = None if engines is None else frozenset(engines)
        self._instance = instance or f"{self.name}:{secrets.token_hex(4)}"
        self._rank = rank
        self._num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        # Held by whoever changes the model or decides not to: one thing at a time.
        self._model = threading.Lock()
        self._changed = threading.Condition()
        self._links: list[Link] = []
        self._closed = False
        self._refusal: Exception | None = None
        self._claim: Claim | None = None
        self._pending: Pending | None = None
        self._held = Held(None, local_fingerprint())
        self._previous: Held | None = None
        self._unreleased: str | None = None
        self._behind = False
        self._empty = False
        close_at_exit(self)
        if join is not None:
            self.join(join)

    # -- for the thread that owns the model

    def join(self, address: str) -> None:
        """Dial a publisher, now and again whenever the connection is lost, until closed.

        Returns at once: a publisher that is not there yet is found when it comes.

        Raises:
            AuthenticationError: No token was given and none is in the environment.
            ValueError: Not an address.
        """
        self._check_usable()
        token = resolve_token(self._token, os.environ)
        if token is None:
            raise AuthenticationError(
                f"no token for {address}: pass token=, or set WTRANSFER_TOKEN to the publisher's"
            )
        engine = HostedEngine(self._rank, self._num_ranks, self._engines)
        self._links.append(Link(self, address, token, engine))

    def commit_pending(self, timeout_s: float = 0.0) -> bool:
        """Apply a verified update, if there is one. Call it between two steps of the model.

        For a rank of several this returns once the other ranks have done so too.

        Args:
            timeout_s: How long to wait for an update, in seconds.

        Returns:
            Whether an update was applied.

        Raises:
            CommitError: Applying failed, here or in another rank of this instance. The old version
                is whole again, unless `CommitError.restored` is false.
        """
        self._check_usable()
        with self._changed:
            self._changed.wait_for(lambda: self._pending is not None or self._closed, timeout_s)
        with self._model:
            return self._do_pending()

    def discard_pending(self) -> bool:
        """Drop a verified update that waits for `commit_pending`; return whether there was one."""
        self._check_usable()
        with self._model, self._changed:
            pending = self._pending
            if pending is None or pending.revert_reason is not None:
                return False
            self._pending = None
            self._behind = True
        self._receipt(pending, "discarded")
        return True

    @property
    def version(self) -> str | None:
        """Label of the weights that the model has; None before the first commit."""
        return self._held.version

    @property
    def fingerprint(self) -> str:
        """Identity of the weights that the model has."""
        return self._held.fingerprint

    @property
    def state(self) -> str:
        """``fresh``, ``serving``, ``pending``, ``behind`` or ``empty``."""
        self._check_process()
        with self._changed:
            return self._state()

    @property
    def connected(self) -> bool:
        """Whether a publisher is reached right now."""
        return any(link.connected for link in self._links)

    @property
    def refusal(self) -> Exception | None:
        """Why a publisher last refused this worker (token, protocol); None if none has."""
        return self._refusal

    @property
    def num_dropped(self) -> int:
        """Late or repeated messages that were dropped."""
        return sum(link.num_dropped for link in self._links)

    def close(self) -> None:
        """Leave every publisher. The model keeps the weights that it has."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._pending = None
            self._changed.notify_all()
        for link in self._links:
            link.close()
        self._previous = None
        self._held = Held(self._held.version, self._held.fingerprint, self._held.manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for links; none of these waits

    def hello(self) -> Hello:
        """Return what this worker is and holds."""
        with self._changed:
            return Hello(
                worker=self.name,
                instance=self._instance,
                rank=self._rank,
                num_ranks=self._num_ranks,
                version=self._held.version,
                fingerprint=self._held.fingerprint,
                state=self._state(),
            )

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return what updates must look like; a target without a schema follows the last one."""
        schema = self._target.schema()
        if schema is None and self._held.manifest is not None:
            return _schema_of(self._held.manifest)
        return schema

    def notes(self) -> list[str]:
        """Return what a publisher should know of this worker before a round."""
        return (
            [] if self._keep_previous else ["keeps no previous version: a failed commit empties it"]
        )

    def claim(self, link: Link, round_id: str, version: str) -> None:
        """Take the session for one round.

        Raises:
            RoundBusyError: Another round is active, or a commit is pending.
        """
        with self._changed:
            if self._pending is not None:
                age = time.monotonic() - self._pending.since
                raise RoundBusyError(
                    f"commit pending since {age:.1f} s: {self._pending.held.version!r} of "
                    f"{self._pending.link.address} waits for commit_pending()"
                )
            if self._claim is not None and self._claim.link is not link:
                raise RoundBusyError(f"another round is active: {self._claim}")
            self._claim = Claim(link, round_id, version)

    def free(self, round_id: str) -> None:
        """End a round's claim."""
        with self._changed:
            if self._claim is not None and self._claim.round_id == round_id:
                self._claim = None

    def offer(self, link: Link, reception: Reception, tensors: Mapping[str, torch.Tensor]) -> None:
        """Leave a verified set, whose commit has been ordered, for `commit_pending`."""
        plan = reception.plan
        held = Held(plan.version, reception.fingerprint, plan.manifest, tensors)
        with self._changed:
            self._pending = Pending(link, plan.round_id, held, reception.seconds)
            self._claim = None
            self._changed.notify_all()

    def release(self, round_id: str) -> None:
        """Drop the previous set: nobody will ask to go back to it."""
        with self._changed:
            if self._unreleased == round_id:
                self._unreleased = None
                self._previous = None
                self._changed.notify_all()

    def revert(self, link: Link, round_id: str, reason: str) -> None:
        """Leave the way back for `commit_pending`."""
        with self._changed:
            if self._unreleased != round_id:
                return
            previous = self._previous or Held(None, local_fingerprint())
            self._pending = Pending(link, round_id, previous, {}, reason)
            self._changed.notify_all()

    def publisher_lost(self, link: Link) -> None:
        """Stop waiting for a release that will not come."""
        with self._changed:
            self._changed.notify_all()
        logger.info("%s lost its publisher %s", self.name, link.address)

    def refused(self, error: Exception) -> None:
        """Note that a publisher refuses this worker."""
        self._refusal = error

    # -- applying

    def _do_pending(self) -> bool:
        pending = self._pending
        if pending is None:
            return False
        if pending.revert_reason is not None:
            self._go_back(pending)
        else:
            self._apply(pending)
            if self._num_ranks > 1:
                self._await_release(pending)
        return True

    def _state(self) -> str:
        if self._empty:
            return "empty"
        if self._pending is not None:
            return "pending"
        if self._behind:
            return "behind"
        return "fresh" if self._held.version is None else "serving"

    def _apply(self, pending: Pending) -> None:
        begun = time.monotonic()
        pending.seconds["wait"] = begun - pending.since
        previous = self._restorable()
        tensors = pending.held.tensors
        assert tensors is not None
        try:
            self._target.apply(tensors)
        except BaseException as error:
            self._restore(previous, pending, error)
        pending.seconds["commit"] = time.monotonic() - begun
        self._adopted(pending, previous)

    def _restorable(self) -> Held:
        """Return what the model has, with tensors if there is a way back to it."""
        held = self._held
        if self._keep_previous and held.tensors is None and not self._empty:
            captured = self._target.capture()
            return Held(held.version, held.fingerprint, held.manifest, captured)
        return held

    def _adopted(self, pending: Pending, previous: Held) -> None:
        held = pending.held
        with self._changed:
            if not self._keep_previous:
                held = Held(held.version, held.fingerprint, held.manifest)
            self._held = held
            self._previous = previous
            self._unreleased = pending.round_id
            self._pending = None
            self._behind = self._empty = False
        hooks.notify(
            "wtransfer_weights_committed",
            version=held.version,
            fingerprint=held.fingerprint,
            round_id=pending.round_id,
            worker=self.name,
        )
        self._receipt(pending, "committed")

    def _restore(self, previous: Held, pending: Pending, cause: BaseException) -> None:
        """Go back after `cause`, and raise what the caller shall see."""
        failure = CommitError(
            f"applying {pending.held.version!r} failed ({type(cause).__name__}: {cause})",
            worker=self.name,
            round_id=pending.round_id,
            version=pending.held.version,
            phase="commit",
            piece=getattr(cause, "piece", None),
        )
        failure.restored = self._put_back(previous)
        back = f"{previous.version!r}" if previous.version else "its first weights"
        failure.message += (
            f"; the worker has {back} again"
            if failure.restored
            else "; the old version could not be restored: this worker must not serve"
        )
        failure.args = (failure.message,)
        self._receipt(pending, "restored" if failure.restored else "empty", failure)
        if not isinstance(cause, Exception):
            raise cause
        raise failure from cause

    def _put_back(self, previous: Held) -> bool:
        """Apply `previous`; return whether the model is whole again."""
        restored = previous.tensors is not None
        if previous.tensors is not None:
            try:
                self._target.apply(previous.tensors)
            except BaseException:
                logger.exception("%s could not restore %r", self.name, previous.version)
                restored = False
        with self._changed:
            self._pending = None
            self._unreleased = None
            self._previous = None
            self._behind = True
            self._empty = not restored
            self._held = previous if restored else Held(None, local_fingerprint())
            self._changed.notify_all()
        return restored

    def _go_back(self, pending: Pending) -> None:
        """Undo a commit because another rank of the instance failed, and say so."""
        undone = self._held.version
        restored = self._put_back(pending.held)
        failure = CommitError(
            f"{undone!r} was taken back: {pending.revert_reason}"
            + ("" if restored else "; the old version could not be restored: must not serve"),
            worker=self.name,
            round_id=pending.round_id,
            restored=restored,
        )
        failure.restored = restored
        self._receipt(pending, "reverted" if restored else "empty", failure)
        raise failure

    def _await_release(self, pending: Pending) -> None:
        """Wait until every rank has committed; between two of them no step may run."""

        def settled() -> bool:
            lost = not pending.link.connected
            return self._unreleased is None or self._pending is not None or self._closed or lost

        with self._changed:
            self._changed.wait_for(settled, self._deadline_s)
            revert = self._pending
        if revert is not None and revert.revert_reason is not None:
            self._go_back(revert)

    def _receipt(self, pending: Pending, outcome: str, error: WTransferError | None = None) -> None:
        with self._changed:
            receipt = Receipt(
                round_id=pending.round_id,
                outcome=outcome,
                version=self._held.version,
                fingerprint=self._held.fingerprint,
                state=self._state(),
                seconds=pending.seconds,
                error=None if error is None else ErrorInfo.of(error),
            )
        pending.link.send(receipt)

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError("this WorkerSession is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                "this WorkerSession belongs to the parent process; after fork() make a new one"
            )


def _schema_of(manifest: Manifest) -> Mapping[str, TensorSpec]:
    from wtransfer.engines.interface import TensorSpec

    return {
        piece.name: TensorSpec(torch_dtype(piece.dtype), piece.shape) for piece in manifest.pieces
    }
