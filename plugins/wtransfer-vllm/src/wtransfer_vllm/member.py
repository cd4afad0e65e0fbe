"""One rank's membership in the groups of publishers: its session, kept as long as the worker."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wtransfer import WorkerSession
from wtransfer.errors import ClosedError
from wtransfer.weight_sync.worker.session import ServingHost, is_set

from wtransfer_vllm.messages import Invitation, Outcome, read_invitation
from wtransfer_vllm.reload import ReloadError

if TYPE_CHECKING:
    from wtransfer.weights import WeightTarget

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

COMMIT_WAIT_S = 2.0
"""Longest wait for a commit whose order is still under way when the host's call is here."""
CAST_VARIABLE = "WTRANSFER_VLLM_CAST"
"""Environment variable of vLLM's processes: whether an update may have another floating dtype than
the checkpoint. vLLM's configuration of weight transfer has no room for options."""


@dataclass(frozen=True)
class Place:
    """Place of a worker in its serving instance."""

    instance: str
    """The instance, where no engine core has named it."""
    rank: int
    """Rank, 0-based."""
    num_ranks: int
    """Ranks of the instance."""
    host_ranks: int | None = None
    """Ranks behind the server's address, where the server counts other servers' ranks as well."""


def place_of(parallel_config: Any, instance_id: str) -> Place:
    """Return a worker's place; each data-parallel replica is an instance of its own."""
    replica = getattr(parallel_config, "data_parallel_index", 0)
    num_ranks = int(parallel_config.world_size)
    host_ranks = None
    if getattr(parallel_config, "local_engines_only", False):
        # Several servers are one data-parallel group: each server reports the ranks of the whole
        # group, but leads only to the replicas on its node.
        host_ranks = num_ranks * int(getattr(parallel_config, "data_parallel_size_local", 1))
    return Place(f"vllm-{instance_id}-{replica}", parallel_config.rank, num_ranks, host_ranks)


class Member:
    """Joins, commits and leaves on the worker's model thread, and never raises.

    Each outcome goes to the publisher on the channel, and to the engine core as `outcome`.

    Args:
        target: vLLM's model.
        engine: Name of the wtransfer engine, the only one that publishers may ask for.
        place: Place of this worker.
    """

    def __init__(self, target: WeightTarget, engine: str, place: Place) -> None:
        self.outcome = Outcome()
        """Outcome of the last call."""
        self.session: WorkerSession | None = None
        """None until a publisher asks this worker to join."""
        self._target: Any = target
        self._engine = engine
        self._place = place
        self._joined: dict[str, Invitation] = {}
        self._lost: str | None = None

    @property
    def pending(self) -> bool:
        """True if a verified update waits for `commit`."""
        return self.session is not None and self.session.status().pending

    def join(self, init_info: dict[str, Any]) -> None:
        """Join a publisher, or leave it, as the invitation says; leave lost publishers."""
        self.outcome = Outcome()
        error = None
        try:
            invitation = read_invitation(init_info)
            address = invitation.address
            if invitation.leave:
                self._leave(address)
                return
            session = self.session or self._open(invitation.instance)
            if invitation.may_commit and session.status().orphaned:
                # A publisher that was lost after its order to commit has left a verified set.
                # The only way is forward, and this is the first moment between two steps.
                self.commit(wait_s=0.0)
            if not session.status().connected:
                # The publishers joined before are lost: the new one takes their place.
                self.leave()
            self._prove_reload(awake=invitation.may_commit)
            known = self._joined.get(address)
            if known is not None and known.host != invitation.host:
                # Else each of two names of this server would take it from the other.
                raise ValueError(f"joined this publisher as {known.host}; name it once")
            if known != invitation:
                self._leave(address)
                session.join(address, token=invitation.token, host=invitation.host)
                self._joined[address] = invitation
        except Exception as refused:
            error = str(refused)
            logger.error("cannot join the publisher: %s", error)  # noqa: TRY400  # said in full
        state = self.outcome.state if self.session is None else self.session.state
        self.outcome = replace(self.outcome, state=state, error=error)

    def _prove_reload(self, *, awake: bool) -> None:
        prove = getattr(self._target, "prove", None)  # the seed era's model cannot be reached
        if prove is None:
            return
        if not (awake or self._target.proven):
            raise ReloadError(
                "vLLM is asleep, and its reload has not been proven yet, which takes weights in "
                'memory: wake it (wake_up(tags=["weights"])), then invite it again'
            )
        prove()

    def prove_reload(self) -> None:
        """Find out whether vLLM's reload can be trusted, while the served weights are known."""
        try:
            self._prove_reload(awake=True)
        except Exception as refused:
            logger.warning("%s", refused)

    def _open(self, instance: str | None) -> WorkerSession:
        self.session = session = WorkerSession(
            self._target,
            cast=is_set(CAST_VARIABLE),
            engines={self._engine},
            instance=instance or self._place.instance,
            rank=self._place.rank,
            num_ranks=self._place.num_ranks,
            serving_host=ServingHost(
                cast_hint=f"{CAST_VARIABLE}=1 in the environment of vLLM",
                num_ranks=self._place.host_ranks,
            ),
        )
        if self._lost is not None:
            session.weights_lost(self._lost)
        return session

    def commit(self, wait_s: float = COMMIT_WAIT_S) -> None:
        """Apply the update that the publisher has ordered, if any."""
        session = self.session
        if session is None:
            self.outcome = Outcome(error="no publisher has asked this worker to join")
            return
        applied, touched, error = False, False, None
        try:
            applied = touched = session.commit_pending(
                wait_s if session.status().connected else 0.0
            )
        except Exception as failed:
            touched, error = True, str(failed)
            logger.error("%s", error)  # noqa: TRY400  # the session has logged the rest
        else:
            if applied:
                logger.info("committed %r (%s)", session.version, session.fingerprint)
            else:
                error = "no verified update was there to commit"
        self.outcome = Outcome(
            applied, touched, session.state, session.version, error, session.fingerprint
        )

    def lose_weights(self, why: str) -> None:
        """Record that the model has no version any more, until the next commit."""
        session = self.session
        if session is None:
            self._lost = why  # for the session that an invitation will open
            return
        # Closed where the interpreter ends, when no caller asks for the weights any more.
        with contextlib.suppress(ClosedError):
            session.weights_lost(why)
        self.outcome = Outcome(False, True, session.state, session.version)

    def leave(self) -> None:
        """Leave every publisher; model and session keep their weights."""
        for address in list(self._joined):
            self._leave(address)

    def _leave(self, address: str) -> None:
        if self._joined.pop(address, None) is None or self.session is None:
            return
        # Closed before its engine, where the interpreter ends: the session has left already then.
        # Or another publisher has replaced a lost one.
        with contextlib.suppress(ClosedError, ValueError):
            self.session.leave(address)
