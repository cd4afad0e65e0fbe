"""What may be sent to a worker: bounded, plain JSON of known shape, and nothing is guessed."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import msgspec

from wtransfer.errors import ProtocolError

MAX_LABEL_LENGTH = 1024
"""Longest label of a version, in characters."""

Label = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL_LENGTH)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
"""Address of a publisher."""


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to join a publisher."""

    address: Address
    """The publisher's address."""
    token: str | None = None
    """Its secret, where that is another than the worker's."""
    host: str | None = None
    """What the publisher calls this host."""


class InitBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``/init_weight_transfer_engine``."""

    init_info: dict[str, Any]
    """``{"wtransfer": Invitation}``, or fields of an engine's init info."""

    def invitation(self) -> Invitation | None:
        """Return the publisher's address, where this is an invitation.

        Raises:
            ProtocolError: It is one and something else, or its fields are not valid.
        """
        if "wtransfer" not in self.init_info:
            return None
        if len(self.init_info) > 1:
            raise ProtocolError(
                "init_info names a publisher (wtransfer) and other things; send one"
            )
        try:
            return msgspec.convert(self.init_info["wtransfer"], Invitation)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"init_info.wtransfer is not valid: {error}") from error


class UpdateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``/update_weights``."""

    update_info: dict[str, Any] | list[dict[str, Any]]
    """Fields of an engine's update info; or a list, with one entry per rank."""

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return what concerns one rank.

        Raises:
            ProtocolError: There is no entry for it.
        """
        if isinstance(self.update_info, dict):
            return self.update_info
        if rank >= len(self.update_info):
            raise ProtocolError(
                f"update_info has {len(self.update_info)} entries, none of them for rank {rank}"
            )
        return self.update_info[rank]


class FinishBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``/finish_weight_update``."""

    weight_version: Label | None = None
    """Label."""


class ShutdownBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``/shutdown_weight_transfer_engine``."""

    address: Address | None = None
    """Publisher to leave; None: all that a request has named, and the engine."""


class NoBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of routes that want none."""


TBody = TypeVar("TBody", bound=msgspec.Struct)


def decode(raw: bytes, content_type: str, cls: type[TBody]) -> TBody:
    """Read a body.

    Args:
        raw: The bytes; none stand for an empty object.
        content_type: As the client says.
        cls: What it must be.

    Raises:
        ProtocolError: It is not JSON of that shape, or a name appears twice in one object.
    """
    if not raw:
        raw = b"{}"
    elif content_type.partition(";")[0].strip().lower() != "application/json":
        raise ProtocolError(
            f"the body is of type {content_type[:80]!r}, expected 'application/json'"
        )
    try:
        body = msgspec.json.decode(raw, type=cls)
        # The decoder takes the last of two equal names, another reader might take the first.
        json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"the body is not valid: {error}") from error
    return body


def _unique(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"{name[:80]!r} appears twice in one object")
        seen.add(name)
