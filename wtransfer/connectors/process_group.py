"""KV cache from prefill to decode across hosts, over TCP: no GPU and no special network is needed.

Both instances name this connector, and both are given the same token. ``host`` is the address of
this machine at which the other instance reaches it; nothing listens at any other. The worker of
rank r listens at ``port + r``, or wherever the kernel likes.

The token proves both ends to each other. The bytes are neither encrypted nor bound to that proof:
let it run on a network of your own, or through a tunnel.

A request says where its blocks are, and a client that can send ``kv_transfer_params`` can say any
address. So the scheduler's side compares addresses with ``allowed_peers`` before a load is planned.
The default, loopback and ``host``, is for instances on one machine; instances on several machines
list each other, as addresses or networks. A request that names another address is computed here.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, cast

import msgspec

from wtransfer.connectors.interface import KVConnectorBase_V1
from wtransfer.connectors.relay.grouped import ReceivingLink, SendingDesk
from wtransfer.connectors.relay.options import RelayOptions
from wtransfer.connectors.relay.scheduler import RelayScheduler
from wtransfer.connectors.relay.worker import RelayWorker
from wtransfer.errors import ConnectorOptionError
from wtransfer.transport.address import parse_address, tcp_text
from wtransfer.transport.channel import resolve_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.connectors.relay.desk import Desk
    from wtransfer.connectors.relay.link import Here
    from wtransfer.connectors.relay.shelf import Shelf

_MAX_PORT = 65_535
_LOOPBACK = ("127.0.0.0/8", "::1")
_ANYWHERE = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  (refused, not bound)


class ProcessGroupOptions(RelayOptions, frozen=True, kw_only=True):
    """Options of ``kv_connector_extra_config``."""

    host: str = "127.0.0.1"
    """Address of this machine at which the other instance reaches it."""
    port: Annotated[int, msgspec.Meta(ge=0, le=_MAX_PORT)] = 0
    """Where rank 0 listens, the others behind it; 0: the kernel picks."""
    allowed_peers: tuple[str, ...] | None = None
    """Instances from which requests may fetch blocks: IP addresses, networks (``10.0.0.0/24``), or
    either with a port (``10.0.0.5:7000``, ``[fd00::5]:7000``); None: loopback and ``host``."""

    def __post_init__(self) -> None:
        # A ValueError here is reported as one of the options.
        if self.host in _ANYWHERE:
            raise ValueError(
                f"host={self.host!r} is no address that others could dial; name the one at which "
                "the other instance reaches this machine"
            )
        for text in self.allowed_peers or ():
            _read_peer(text)


class _Peer(NamedTuple):
    """An entry of ``allowed_peers``."""

    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    port: str


def _read_peer(text: str) -> _Peer:
    network, colon, port = text.rpartition(":")
    if not colon or (":" in network and not network.endswith("]")):
        network, port = text, ""
    elif not (port.isascii() and port.isdigit()):
        raise ValueError(f"allowed_peers: {text!r} has no number for a port")
    try:
        return _Peer(ipaddress.ip_network(network.removeprefix("[").removesuffix("]")), port)
    except ValueError as error:
        raise ValueError(f"allowed_peers: {text!r} is no IP address or network: {error}") from error


class ProcessGroupScheduler(RelayScheduler):
    """The scheduler's side.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Not looked at.

    Raises:
        ConnectorOptionError: An option cannot be used.
        AddressError: ``host`` is a name that cannot be looked up.
    """

    options_cls = ProcessGroupOptions

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        options = cast("ProcessGroupOptions", self.options)
        allowed = options.allowed_peers
        if allowed is None:
            own = parse_address(tcp_text((options.host, 0))).target[0]
            allowed = (*_LOOPBACK, own.partition("%")[0])
        self._peers = [_read_peer(each) for each in allowed]

    def dials(self, address: str) -> bool:
        """Return whether it is a number: a name would be looked up, while everybody waits."""
        return _numbers(address) is not None

    def allows(self, address: str) -> bool:
        """Return whether ``allowed_peers`` has an address."""
        numbers = _numbers(address)
        return numbers is not None and any(
            numbers[0] in peer.network and peer.port in ("", numbers[1]) for peer in self._peers
        )


def _numbers(
    address: str,
) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, str] | None:
    """Return IP address and port of a TCP address; None where it is anything else."""
    scheme, _, where = address.partition(":")
    host, _, port = where.rpartition(":")
    try:
        number = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return (number, port) if scheme == "tcp" else None


class ProcessGroupWorker(RelayWorker):
    """The worker's side.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Not looked at.

    Raises:
        ConnectorOptionError: There is no token, or an option cannot be used.
    """

    options_cls = ProcessGroupOptions

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self._own = cast("ProcessGroupOptions", self.options)
        self._token = resolve_token(self._own.token)
        if self._token is None:
            raise ConnectorOptionError(
                "ProcessGroupConnector needs a token that both instances know: set token in "
                "kv_connector_extra_config, or WTRANSFER_TOKEN or WTRANSFER_TOKEN_FILE"
            )

    def make_desk(self, shelf: Shelf) -> Desk:
        """Listen at this machine's address."""
        rank, port = self.instance.rank, self._own.port
        return SendingDesk(
            shelf,
            host=self._own.host,
            engine_id=self.instance.engine_id,
            rank=rank,
            address=tcp_text((self._own.host, port + rank if port else 0)),
            token=self._token,
            lease_s=self._own.lease_s,
            deadline_s=self._own.deadline_s,
            allow_remote=True,
        )

    def make_link(self, address: str, token: str, here: Here) -> ReceivingLink:  # noqa: ARG002
        """Form a group with another host's worker; no request says what the token is."""
        return ReceivingLink(address, self._token, here, self._own.host)


class ProcessGroupConnector(KVConnectorBase_V1):
    """Prefill and decode on different hosts."""

    scheduler_cls = ProcessGroupScheduler
    worker_cls = ProcessGroupWorker
    names_weights = True
    example_options: ClassVar[Mapping[str, Any]] = {"host": "10.0.0.1"}
