"""What ``init_weight_transfer_engine`` carries: where our publisher is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KEY = "wtransfer"
"""Under which an invitation stands in ``init_info``."""


@dataclass(frozen=True)
class Invitation:
    """A publisher asks this worker to join."""

    address: str
    """The publisher's."""
    token: str | None = field(default=None, repr=False)
    """Its secret; None: the worker's environment has it."""
    host: str | None = None
    """What the publisher calls this host."""
    instance: str | None = None
    """Serving instance, the same in all its ranks; the engine core names it."""
    leave: bool = field(default=False, compare=False)
    """Whether it is taken back: this worker shall leave that publisher, and no other."""
    may_commit: bool = field(default=True, compare=False)
    """Whether the weights have memory, so that an older order to commit may be carried out."""


@dataclass
class InitInfo:
    """Init info in vLLM's form."""

    wtransfer: dict[str, Any]
    """The invitation's fields."""


@dataclass
class UpdateInfo:
    """Update info in vLLM's form: nothing, for tensors do not come this way."""

    is_checkpoint_format: bool = True
    """The seed era's only field of its own."""


def read_invitation(init_info: Any) -> Invitation:
    """Read an invitation.

    Raises:
        ValueError: It is none; the text says what is expected.
    """
    fields = init_info.get(KEY) if isinstance(init_info, dict) else None
    if not isinstance(fields, dict) or not isinstance(fields.get("address"), str):
        raise ValueError(  # noqa: TRY004  # vLLM's word for an info that does not fit
            "init_info names no publisher of wtransfer; expected "
            '{"wtransfer": {"address": ..., "token": ...}}, as Publisher(hosts=[...]) sends it. '
            "Trainers that speak another backend's protocol need that backend"
        )
    known = {name: fields.get(name) for name in ("address", "token", "host", "instance")}
    wrong = [n for n, value in known.items() if not (value is None or isinstance(value, str))]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} in an invitation of wtransfer must be text")
    may_commit = fields.get("may_commit") is not False
    return Invitation(
        fields["address"],
        known["token"],
        known["host"],
        known["instance"],
        leave=fields.get("leave") is True,
        may_commit=may_commit,
    )


def taken_back(address: str) -> dict[str, Any]:
    """Return what has workers leave one publisher."""
    return {KEY: {"address": address, "leave": True}}


def addressed(init_info: dict[str, Any], instance: str, *, may_commit: bool) -> dict[str, Any]:
    """Return the same invitation, addressed to the ranks of one instance."""
    told = {**init_info[KEY], "instance": instance, "may_commit": may_commit}
    return {**init_info, KEY: told}


def is_foreign(update_info: Any) -> bool:
    """Whether an update carries something: then it is no round of ours, whose updates are empty."""
    if isinstance(update_info, list):
        return any(map(is_foreign, update_info))
    return bool(update_info) and set(update_info) != {"is_checkpoint_format"}
