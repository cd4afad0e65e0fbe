"""Which publishers an engine core lets its workers join: those that know its environment's token.

vLLM's routes ask no client who it is, and whoever reaches one can invite the workers. So a token
that comes with an invitation is compared, and never used in the place of the environment's: each
worker proves that it knows the latter, and has the publisher prove it.

A program that holds both vLLM and publisher needs no token in its environment: the kernel says
which process listens at the publisher's address.
"""

from __future__ import annotations

import hmac
import os
import socket
from typing import TYPE_CHECKING

from wtransfer.deadline import Deadline
from wtransfer.errors import AuthenticationError, WTransferError
from wtransfer.transport.address import connect, parse_address, peer_credentials
from wtransfer.transport.handshake import resolve_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer_vllm.messages import Invitation

LOOK_S = 1.0
"""Longest wait for the answer of a publisher's address, in seconds."""


def token_for(invitation: Invitation, environ: Mapping[str, str]) -> str:
    """Return the secret that workers and publisher prove to each other.

    Args:
        invitation: The publisher's.
        environ: The environment that this process was started with.

    Raises:
        AuthenticationError: The environment has none, and the publisher is neither in this process
            nor in the one that started it; or the invitation has another one.
    """
    given, known = invitation.token, resolve_token(None, environ)
    if known is None:
        if given and _is_of_this_program(invitation.address):
            return given
        raise AuthenticationError(
            "vLLM lets its workers join only a publisher that knows the token of vLLM's "
            "environment, and there is none: set WTRANSFER_TOKEN to one secret in both "
            "environments (or WTRANSFER_TOKEN_FILE), and start vLLM again"
        )
    if given and not hmac.compare_digest(_bytes(given), _bytes(known)):
        raise AuthenticationError(
            "the publisher's token is not that of vLLM's environment: WTRANSFER_TOKEN must be the "
            "same in both"
        )
    return known


def _is_of_this_program(address: str) -> bool:
    """Return whether this process, or the one that started it, listens at an address."""
    try:
        parsed = parse_address(address)
        if not parsed.is_unix:
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            connect(probe, parsed, Deadline(LOOK_S))
            pid, _ = peer_credentials(probe)
            # 0 is any process outside of this container.
            return pid != 0 and pid in (os.getpid(), os.getppid())
    except (WTransferError, OSError):
        return False


def _bytes(token: str) -> bytes:
    return token.encode(errors="surrogateescape")
