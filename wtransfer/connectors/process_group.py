"""KV cache from prefill to decode across hosts, over TCP: no GPU and no special network is needed.

Both instances name this connector, and both are given the same token. ``host`` is the address of
this machine at which the other instance reaches it; nothing listens at any other. The worker of
rank r listens at ``port + r``, or wherever the kernel likes.

The token proves both ends to each other. The bytes are neither encrypted nor bound to that proof:
let it run on a network of your own, or through a tunnel.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import msgspec

from wtransfer.connectors.interface import KVConnectorBase_V1
from wtransfer.connectors.relay.grouped import ReceivingLink, SendingDesk
from wtransfer.connectors.relay.options import RelayOptions
from wtransfer.connectors.relay.scheduler import RelayScheduler
from wtransfer.connectors.relay.worker import RelayWorker
from wtransfer.errors import ConnectorOptionError
from wtransfer.transport.addresses import tcp_text
from wtransfer.transport.channel import resolve_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.connectors.relay.desk import Desk
    from wtransfer.connectors.relay.link import Here
    from wtransfer.connectors.relay.shelf import Shelf

_MAX_PORT = 65_535
_ANYWHERE = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  (refused, not bound)


class ProcessGroupOptions(RelayOptions, frozen=True, kw_only=True):
    """Options of ``kv_connector_extra_config``."""

    host: str = "127.0.0.1"
    """Address of this machine at which the other instance reaches it."""
    port: Annotated[int, msgspec.Meta(ge=0, le=_MAX_PORT)] = 0
    """Where rank 0 listens, the others behind it; 0: the kernel picks."""


class ProcessGroupScheduler(RelayScheduler):
    """The scheduler's side."""

    options_cls = ProcessGroupOptions

    def dials(self, address: str) -> bool:
        """Return whether it is a number: a name would be looked up, while everybody waits."""
        scheme, _, where = address.partition(":")
        host = where.rpartition(":")[0].removeprefix("[").removesuffix("]")
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return scheme == "tcp"


class ProcessGroupWorker(RelayWorker):
    """The worker's side.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Not looked at.

    Raises:
        ConnectorOptionError: There is no token, or ``host`` is no address that others can dial.
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
        if self._own.host in _ANYWHERE:
            raise ConnectorOptionError(
                f"host={self._own.host!r} is no address that others could dial; name the one at "
                "which the other instance reaches this machine"
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
