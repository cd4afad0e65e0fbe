"""What a worker's last call came to, as its engine core asks for it.

vLLM's routes return nothing, and an exception in one rank leaves the answers of the others in the
executor's queues, where the next call takes them for its own. So workers never raise; they note
what happened, and the engine core asks all of them with a call of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What a call came to in one rank."""

    applied: bool = False
    """Whether the model consists of another version now."""
    touched: bool = False
    """Whether the model was written to, whatever it consists of now."""
    state: str = "fresh"
    """The session's."""
    version: str | None = None
    """Label of what the model consists of."""
    error: str | None = None
    """Why the call did not do what was asked."""


NO_ENGINE: dict[str, Any] = asdict(Outcome(error="this worker has no engine of wtransfer"))
"""Outcome in a worker without an engine of ours."""


def outcome_of(worker: Any) -> dict[str, Any]:
    """Return the last outcome; runs in each worker, called by the engine core."""
    member = member_of(worker)
    return NO_ENGINE if member is None else asdict(member.outcome)


def lose_weights(worker: Any, why: str) -> dict[str, Any]:
    """Enter that the weights are no longer those of the last commit; runs in each worker."""
    member = member_of(worker)
    if member is not None:
        member.lose_weights(why)
    return outcome_of(worker)


def replaced_weights(worker: Any, why: str) -> None:
    """Enter that something else has put other weights into the model; runs in each worker."""
    # With torch and what reads checkpoints: not where vLLM's processes register their plug-ins.
    from wtransfer_vllm.vouching import weights_were_replaced

    weights_were_replaced(worker, why)


def has_left(worker: Any) -> bool:
    """Return whether a verified update waits for a commit; runs in each worker."""
    member = member_of(worker)
    return member is not None and member.has_left


def commit_left(worker: Any) -> dict[str, Any]:
    """Commit what was ordered while the weights had no memory; runs in each worker."""
    member = member_of(worker)
    if member is not None:
        member.commit()
    return outcome_of(worker)


def member_of(worker: Any) -> Any:
    """Return the worker's `Member`; None if its engine is none of ours."""
    return getattr(getattr(worker, "weight_transfer_engine", None), "member", None)
