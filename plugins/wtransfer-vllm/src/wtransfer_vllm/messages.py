"""Messages in vLLM's calls: a publisher's invitation to the workers, and their outcomes.

vLLM's routes return nothing, and an exception in one rank leaves the answers of the other ranks in
the executor's queues, where the next call takes them for its own. So a worker never raises: it
records an `Outcome`, and the engine core asks all ranks for theirs with a call of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KEY = "wtransfer"
"""Key of an invitation in ``init_info``."""


@dataclass(frozen=True)
class Invitation:
    """A publisher's request that this worker join."""

    address: str
    """Address of the publisher."""
    token: str | None = field(default=None, repr=False)
    """The publisher's secret; to a worker, the one that its engine core trusts."""
    host: str | None = None
    """The publisher's name of the host that it has asked."""
    instance: str | None = None
    """Serving instance, the same in all its ranks; the engine core names it."""
    again: bool = field(default=False, compare=False)
    """True if the publisher asks by itself, as it does while the worker is absent."""
    leave: bool = field(default=False, compare=False)
    """True if the worker is asked to leave this publisher instead."""
    may_commit: bool = field(default=True, compare=False)
    """True if the weights have memory, so that an older order to commit may be carried out."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call in one rank."""

    applied: bool = False
    """True if the model consists of another version now."""
    touched: bool = False
    """True if the model was written to, whatever it consists of now."""
    state: str = "fresh"
    """State of the session."""
    version: str | None = None
    """Label of the model's weights."""
    error: str | None = None
    """Reason of the call's failure."""
    fingerprint: str | None = None
    """Identity of the model's weights."""


def read_invitation(init_info: Any) -> Invitation:
    """Read an invitation.

    Raises:
        ValueError: The info is no invitation; the text says what is expected.
    """
    fields = init_info.get(KEY) if isinstance(init_info, dict) else None
    if not isinstance(fields, dict) or not isinstance(fields.get("address"), str):
        raise ValueError(  # noqa: TRY004  # vLLM's word for an info that does not fit
            "init_info names no publisher of wtransfer; expected "
            '{"wtransfer": {"address": ..., "token": ...}}, as Publisher(hosts=[...]) sends it. '
            "Trainers that speak another backend's protocol need that backend"
        )
    texts: dict[str, Any] = {
        name: fields.get(name) for name in ("address", "token", "host", "instance")
    }
    wrong = [n for n, value in texts.items() if not (value is None or isinstance(value, str))]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} in an invitation of wtransfer must be text")
    return Invitation(
        **texts,
        again=fields.get("again") is True,
        leave=fields.get("leave") is True,
        may_commit=fields.get("may_commit") is not False,
    )


def is_foreign(update_info: Any = None) -> bool:
    """Return whether an update carries anything: updates of wtransfer's rounds never do."""
    if isinstance(update_info, list):
        return any(map(is_foreign, update_info))
    return bool(update_info) and set(update_info) != {"is_checkpoint_format"}


def member_of(worker: Any) -> Any:
    """Return a worker's `Member`; None if its weight engine is not one of wtransfer."""
    return getattr(getattr(worker, "weight_transfer_engine", None), "member", None)
