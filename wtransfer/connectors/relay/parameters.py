"""What travels with a request from the instance of its prompt to the one that goes on with it.

Plain data under the field's names, as a router passes it on. On its way it may have been in
anybody's hands, so nothing in it is trusted: it only says where to ask, and for what to hope.

Source: the names that vLLM's NIXL connector has, where there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TEXT = 1024
"""Longest text, in characters."""
_MAX_RANKS = 65_536

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class TransferParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ``kv_transfer_params`` of one request."""

    do_remote_decode: bool = False
    """Whether another instance goes on with it."""
    do_remote_prefill: bool = False
    """Whether another instance has computed its prompt."""
    remote_engine_id: Text = ""
    """That instance."""
    remote_request_id: Text = ""
    """The request there."""
    remote_addresses: Annotated[tuple[Text, ...], msgspec.Meta(max_length=_MAX_RANKS)] = ()
    """Where its workers listen, in order of rank."""
    remote_tokens: Annotated[tuple[Text, ...], msgspec.Meta(max_length=_MAX_RANKS)] = ()
    """What to prove to know there, in order of rank; none: what the options say."""
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens of the prompt whose blocks it has put on its shelves."""
    remote_weights: Text = ""
    """Identity of the weights that have computed them."""

    def plain(self) -> dict[str, Any]:
        """Return it as what a request carries; JSON can hold it."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        # `to_builtins` leaves tuples, which another process gets as lists.
        return {name: list(v) if isinstance(v, tuple) else v for name, v in told.items()}


def read_parameters(told: Mapping[str, Any] | None) -> TransferParameters | None:
    """Return what a request says; None where that cannot be understood.

    Args:
        told: Its ``kv_transfer_params``; what is not known here is another connector's.
    """
    try:
        parameters = msgspec.convert(dict(told or {}), TransferParameters)
        # JSON has texts that cannot be sent on: halves of characters.
        msgspec.msgpack.encode(parameters)
    except (msgspec.ValidationError, TypeError, ValueError):
        return None
    return parameters
