"""Ask a publisher for the state of its fleet, without joining it."""

from __future__ import annotations

from wtransfer.errors import ProtocolError
from wtransfer.transport.channel import ask
from wtransfer.weight_sync.messages import CODEC, FleetStatus, Observe


def observe(address: str, token: str, timeout_s: float = 5.0) -> FleetStatus:
    """Return the fleet of a publisher at one moment, as the publisher sees it.

    Reads only: the caller is no worker of the publisher, and no round waits for the call.

    Args:
        address: The publisher's.
        token: Its shared secret.
        timeout_s: Longest time for the whole call, in seconds.

    Raises:
        PeerError: The publisher is gone, refuses the token, or speaks another protocol.
        StallError: No answer in time.
        AddressError: Not an address.
    """
    answer = ask(CODEC, address, token, Observe(), timeout_s)
    if not isinstance(answer, FleetStatus):
        raise ProtocolError(f"{address} answers an observer with {type(answer).__name__}")
    return answer
