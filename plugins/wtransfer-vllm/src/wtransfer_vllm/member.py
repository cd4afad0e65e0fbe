"""One rank's membership in the groups of publishers: its session, kept as long as the worker."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wtransfer import WorkerSession
from wtransfer.errors import ClosedError
from wtransfer.weights import process_weights

from wtransfer_vllm.casting import HINT, may_cast
from wtransfer_vllm.invitation import Invitation, read_invitation
from wtransfer_vllm.outcome import Outcome

if TYPE_CHECKING:
    from wtransfer.engines.interface import WeightTarget

    from wtransfer_vllm.place import Place

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

COMMIT_WAIT_S = 2.0
"""Longest wait for a commit whose order is still under way when the host's call is here."""


class Member:
    """Joins, commits and leaves on the worker's model thread, and never raises.

    What comes of it travels to the publisher as a receipt, and to the engine core as `outcome`.

    Args:
        target: vLLM's model.
        engine: Name of the wtransfer engine, the only one that publishers may ask for.
        place: This worker's.
    """

    def __init__(self, target: WeightTarget, engine: str, place: Place) -> None:
        self.outcome = Outcome()
        self._target = target
        self._engine = engine
        self._place = place
        self._session: WorkerSession | None = None
        self._joined: dict[str, Invitation] = {}
        self._lost: str | None = None

    @property
    def session(self) -> WorkerSession | None:
        """The session, once a publisher has asked this worker to join."""
        return self._session

    @property
    def has_left(self) -> bool:
        """Whether a verified update waits for `commit`."""
        return self._session is not None and self._session.pending

    def join(self, init_info: dict[str, Any]) -> None:
        """Join a publisher; leave the one before if it is not there any more."""
        self.outcome = Outcome()
        error = None
        try:
            invitation = read_invitation(init_info)
            if invitation.leave:
                self._leave(invitation.address)
                return
            if invitation.may_commit and self._session is not None and self._session.orphaned:
                # A publisher that was lost after its order to commit has left a verified set.
                # From there it only goes forward, and this is the first moment between two steps.
                self.commit(wait_s=0.0)
            self._join(invitation)
        except Exception as refused:
            error = str(refused)
            logger.error("cannot join the publisher: %s", error)  # noqa: TRY400  # said in full
        state = self.outcome.state if self._session is None else self._session.state
        self.outcome = replace(self.outcome, state=state, error=error)

    def commit(self, wait_s: float = COMMIT_WAIT_S) -> None:
        """Apply what the publisher has ordered, if anything."""
        session = self._session
        if session is None:
            self.outcome = Outcome(error="no publisher has asked this worker to join")
            return
        try:
            applied = session.commit_pending(wait_s if session.connected else 0.0)
        except Exception as error:
            logger.error("%s", error)  # noqa: TRY400  # the session has said what to know of it
            self.outcome = self._seen(session, touched=True, error=str(error))
            return
        self.outcome = self._seen(
            session,
            applied=applied,
            touched=applied,
            error=None if applied else "no verified update was there to commit",
        )
        if applied:
            logger.info("committed %r (%s)", session.version, session.fingerprint)

    def leave(self) -> None:
        """Leave every publisher; the model keeps its weights, the session its books."""
        for address in list(self._joined):
            self._leave(address)

    def lose_weights(self, why: str) -> None:
        """Enter that the model consists of nothing that could be named, until the next commit."""
        session = self._session
        if session is None:
            # Said by the session that a publisher will ask for.
            self._lost = why
            process_weights.weights_replaced(getattr(self._target, "vouched_as", self._target))
            return
        # Closed where the interpreter ends: nobody asks any more.
        with contextlib.suppress(ClosedError):
            session.weights_lost(why)
        self.outcome = self._seen(session, touched=True)

    def _join(self, invitation: Invitation) -> None:
        session = self._session or self._open(invitation)
        if not session.connected:
            # Those that were joined before are gone: the new one has taken their place.
            self.leave()
        known = self._joined.get(invitation.address)
        if known == invitation:
            return
        if known is not None:
            self._leave(invitation.address)
        session.join(invitation.address, token=invitation.token, host=invitation.host)
        self._joined[invitation.address] = invitation

    def _leave(self, address: str) -> None:
        if self._joined.pop(address, None) is None or self._session is None:
            return
        # Closed before its engine, where the interpreter ends: then it has left already.
        # Or another publisher has taken the place of one that was lost.
        with contextlib.suppress(ClosedError, ValueError):
            self._session.leave(address)

    def _open(self, invitation: Invitation) -> WorkerSession:
        place = self._place
        self._session = WorkerSession(
            self._target,
            cast=may_cast(),
            engines={self._engine},
            instance=invitation.instance or place.instance,
            rank=place.rank,
            num_ranks=place.num_ranks,
        )
        self._session.cast_hint = HINT
        self._session.host_ranks = place.host_ranks
        if self._lost is not None:
            self._session.weights_lost(self._lost)
        return self._session

    @staticmethod
    def _seen(
        session: WorkerSession,
        *,
        applied: bool = False,
        touched: bool = False,
        error: str | None = None,
    ) -> Outcome:
        return Outcome(applied, touched, session.state, session.version, error)
