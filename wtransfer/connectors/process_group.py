"""KV cache from prefill to decode across hosts, over TCP: no GPU and no special network is needed.

Both instances name this connector and have the same token. ``host`` is the address of this machine
at which the other instance reaches it; nothing listens elsewhere. The worker of rank r listens at
``port + r``, or at a port of the kernel's choice.

The token proves both ends to each other. The bytes are neither encrypted nor bound to that proof:
use a network of your own, or a tunnel.

A request names the addresses of its blocks, and a client that can send ``kv_transfer_params`` can
name any. So the scheduler's side compares them with ``allowed_peers`` before it plans a load. The
default, loopback and ``host``, suits instances on one machine; instances on several machines list
each other, as addresses or networks. A request that names another address is computed here.

Bytes travel over a gloo group of two, one for each connection. The control channel carries lookups
and notices when a peer is lost; the group only moves bytes. P sends the slots of each lookup as
they are. D receives them into memory of its own, and checks them as it copies. The side that loses
the channel aborts the group, so that no wait in it outlives the peer.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, cast

import msgspec
import numpy as np
import torch

from wtransfer.calls import SerialThread
from wtransfer.connectors.interface import KVConnectorBase_V1
from wtransfer.connectors.p2p.buffer import SlotMemory
from wtransfer.connectors.p2p.client import P2PClient
from wtransfer.connectors.p2p.protocol import P2POptions
from wtransfer.connectors.p2p.scheduler import P2PScheduler
from wtransfer.connectors.p2p.server import P2PServer
from wtransfer.connectors.p2p.worker import P2PWorker
from wtransfer.errors import ConnectorOptionError, GroupError, LimitError, ProtocolError
from wtransfer.transport.address import parse_address, tcp_text
from wtransfer.transport.process_group import GlooCommunicator
from wtransfer.transport.rendezvous import Rendezvous, bind_rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wtransfer.calls import Call
    from wtransfer.connectors.p2p.buffer import StagingBuffer
    from wtransfer.connectors.p2p.client import PendingLoad
    from wtransfer.connectors.p2p.protocol import Hello
    from wtransfer.connectors.serving_config import Instance
    from wtransfer.transport.channel import Connection
    from wtransfer.transport.communicator import Pending

logger = logging.getLogger(__name__)

DEPTH = 4
"""Slots under way at a time."""
JOIN_S = 3.0
"""Longest wait for the host of a rendezvous, which has just named it."""
MAX_LOOKUPS = 64
"""Lookups of one client whose slots are not sent yet; it makes one at a time."""

_SENDER, _RECEIVER, _SIZE = range(3)
_END_S = 1.0
_MAX_PORT = 65_535
_LOOPBACK = ("127.0.0.0/8", "::1")
_ANYWHERE = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  (refused, not bound)


class ProcessGroupOptions(P2POptions, frozen=True, kw_only=True):
    """Options in ``kv_connector_extra_config``."""

    host: str = "127.0.0.1"
    """Address of this machine at which the other instance reaches it."""
    port: Annotated[int, msgspec.Meta(ge=0, le=_MAX_PORT)] = 0
    """Port of rank 0, with the other ranks behind it; 0: the kernel picks."""
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


# -- allowed peers


class _Peer(NamedTuple):
    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    port: str


def _read_peer(text: str) -> _Peer:
    """Return an entry of ``allowed_peers``."""
    network, colon, port = text.rpartition(":")
    if not colon or (":" in network and not network.endswith("]")):
        network, port = text, ""
    elif not (port.isascii() and port.isdigit()):
        raise ValueError(f"allowed_peers: {text!r} has no number for a port")
    try:
        return _Peer(ipaddress.ip_network(network.removeprefix("[").removesuffix("]")), port)
    except ValueError as error:
        raise ValueError(f"allowed_peers: {text!r} is no IP address or network: {error}") from error


def _read_address(
    address: str,
) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, str] | None:
    """Return IP address and port of a TCP address; None for any other."""
    scheme, _, where = address.partition(":")
    host, _, port = where.rpartition(":")
    try:
        number = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return (number, port) if scheme == "tcp" else None


class ProcessGroupScheduler(P2PScheduler):
    """The scheduler's side.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Not used.

    Raises:
        ConnectorOptionError: An option is not valid.
        AddressError: ``host`` is a name that cannot be looked up.
    """

    options: ProcessGroupOptions

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        allowed = self.options.allowed_peers
        if allowed is None:
            own = parse_address(tcp_text((self.options.host, 0))).target[0]
            allowed = (*_LOOPBACK, own.partition("%")[0])
        self._peers = [_read_peer(each) for each in allowed]

    def is_address(self, address: str) -> bool:
        """Return whether the address is numeric: looking a name up would block the scheduler."""
        return _read_address(address) is not None

    def allows(self, address: str) -> bool:
        """Return whether ``allowed_peers`` contains an address."""
        numbers = _read_address(address)
        return numbers is not None and any(
            numbers[0] in peer.network and peer.port in ("", numbers[1]) for peer in self._peers
        )


# -- the group


class _Pair:
    """One end of a group of two. Any thread may abort it.

    Args:
        rank: Rank of this end.
        options: Options of the connector.
    """

    group: GlooCommunicator | None = None
    _rendezvous: Rendezvous | None = None

    def __init__(self, rank: int, options: ProcessGroupOptions) -> None:
        self._rank = rank
        self._options = options
        self._aborted = False

    def host(self) -> Rendezvous:
        """Open the rendezvous, which may take seconds: torch asks the host's resolver.

        Raises:
            WTransferError: The rendezvous cannot be opened, or this end was aborted.
        """
        rendezvous = self._take(bind_rendezvous(self._options.host))
        rendezvous.serve(self._options.deadline_s)
        return rendezvous

    def join(self, rendezvous: Rendezvous) -> None:
        """Connect to the other end's rendezvous.

        Raises:
            WTransferError: The rendezvous cannot be reached, or this end was aborted.
        """
        self._take(rendezvous).join(min(JOIN_S, self._options.deadline_s))

    def meet(self) -> None:
        """Form the group, once both ends are there.

        Raises:
            WTransferError: The other end does not come, or this one was aborted.
        """
        assert self._rendezvous is not None
        timeout_s = self._options.deadline_s
        self.group = GlooCommunicator(
            self._rendezvous,
            self._rank,
            _SIZE,
            host=self._options.host,
            timeout_s=timeout_s,
            operation_timeout_s=timeout_s,
        )
        # `abort` cancels, then reads `group`. Either it finds the group, or this the cancellation.
        self._rendezvous.check()

    def abort(self) -> None:
        """Let every wait in the pair raise; a second call does nothing."""
        self._aborted = True
        if self._rendezvous is not None:
            self._rendezvous.cancel()
        group = self.group
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Release the pair; only after `host` or `join`, and `meet`, have returned or raised."""
        self.abort()
        if self.group is not None:
            self.group.close()
            self.group = None
        # Only now: the other end may still connect when this one has.
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _take(self, rendezvous: Rendezvous) -> Rendezvous:
        self._rendezvous = rendezvous
        # `abort` sets the flag, then reads the rendezvous: one of the two finds the other.
        if self._aborted:
            rendezvous.cancel()
        return rendezvous


class _Sender:
    """Sends slots to one client, on a thread of its own; the first error closes its connection."""

    def __init__(self, server: ProcessGroupServer, pair: _Pair, connection: Connection) -> None:
        self._server = server
        self._pair = pair
        self._connection = connection
        self._calls: list[Call] = []
        self._thread = SerialThread("wtransfer-send")
        # Not on the channel's thread, which every other client needs.
        self._submit(self._open)

    def send(self, slots: list[int]) -> None:
        """Send slots, after those of earlier calls.

        Raises:
            LimitError: The client does not receive what it has looked up.
        """
        self._calls = [call for call in self._calls if not call.done.is_set()]
        if len(self._calls) > MAX_LOOKUPS:
            raise LimitError(f"{self._connection.peer} has more than {MAX_LOOKUPS} open lookups")
        self._submit(lambda: self._send(slots))

    def abort(self) -> None:
        """End soon; does not wait."""
        self._pair.abort()
        self._thread.submit(self._pair.close)
        self._thread.stop()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(_END_S)

    def _submit(self, function: Callable[[], None]) -> None:
        def call() -> None:
            try:
                function()
            except Exception as error:
                # Else the client waits for bytes until its deadline.
                if not self._connection.closed:
                    logger.info("no more blocks to %s: %s", self._connection.peer, error)
                self._connection.close()

        self._calls.append(self._thread.submit(call))

    def _open(self) -> None:
        rendezvous = self._pair.host()
        where: dict[str, int | str] = {
            "host": rendezvous.host,
            "port": rendezvous.port,
            "name": rendezvous.name,
        }
        self._server.say_hello(self._connection, where)
        self._pair.meet()

    def _send(self, slots: list[int]) -> None:
        group = self._pair.group
        if group is None or self._connection.closed:
            return  # the slots are no longer leased
        under_way: deque[Pending] = deque()
        for slot in slots:
            if len(under_way) == DEPTH:
                under_way.popleft().wait()
            memory = torch.from_numpy(self._server.buffer.memory.used[slot])
            under_way.append(group.send(memory, _RECEIVER))
        while under_way:
            under_way.popleft().wait()


class ProcessGroupServer(P2PServer):
    """Sends the slots of each lookup."""

    def __init__(
        self, buffer: StagingBuffer, instance: Instance, options: P2POptions, token: str | None
    ) -> None:
        self._options = cast("ProcessGroupOptions", options)
        self._senders: dict[Connection, _Sender] = {}
        host, port = self._options.host, self._options.port
        address = tcp_text((host, port + instance.rank if port else 0))
        super().__init__(buffer, instance, options, token, address)

    def open_transport(self, connection: Connection) -> None:
        """Start the client's sender, which opens a rendezvous and says where it is."""
        pair = _Pair(_SENDER, self._options)
        self._senders[connection] = _Sender(self, pair, connection)

    def send_slots(self, connection: Connection, slots: list[int]) -> None:
        """Send the slots."""
        self._senders[connection].send(slots)

    def close_transport(self, connection: Connection) -> None:
        """End what is being sent to a lost client."""
        sender = self._senders.pop(connection, None)
        if sender is not None:
            sender.abort()

    def close(self) -> None:
        """Close all connections, and wait for their threads."""
        senders = list(self._senders.values())
        super().close()
        for sender in senders:
            sender.join()


class ProcessGroupClient(P2PClient):
    """Receives the slots that it looks up."""

    _pair: _Pair | None = None

    def open_transport(self, hello: Hello) -> None:
        """Form a group with the other side."""
        host, port, name = (hello.transport.get(each) for each in ("host", "port", "name"))
        if not (isinstance(host, str) and isinstance(port, int) and isinstance(name, str)):
            raise ProtocolError(f"{self.address} does not say where its process group meets")
        options = cast("ProcessGroupOptions", self.loads.options)
        self._pair = pair = _Pair(_RECEIVER, options)
        # `fail` sets the error, then aborts the pair. Either it finds the pair, or this the error.
        self.check()
        pair.join(Rendezvous(host, port, name))
        pair.meet()
        nbytes = self.loads.geometry.nbytes
        memory = np.zeros(DEPTH * SlotMemory.stride(nbytes), np.uint8)
        self._ring = SlotMemory(memory, nbytes)
        self._copier = self.loads.copier(self._ring)

    def fetch(self, job: PendingLoad, part: slice, slots: Sequence[int]) -> str | None:
        """Copy slots as they arrive; all do, whether they are still wanted or not."""
        assert self._pair is not None
        group, number = self._pair.group, len(slots)
        assert group is not None
        ring = [torch.from_numpy(each) for each in self._ring.used]
        under_way = deque(group.recv(memory, _SENDER) for memory in ring[:number])
        reason: str | None = None
        for each in range(number):
            try:
                under_way.popleft().wait()
            except GroupError as error:
                # The blocks that arrived before are good. Then the client ends.
                self.fail(error)
                break
            block = part.start + each
            if job.num_loaded == block:
                here = [each % DEPTH]
                reason = self.load(self._copier, job, slice(block, block + 1), here)
            if each + DEPTH < number:
                under_way.append(group.recv(ring[each % DEPTH], _SENDER))
        return reason

    def abort_transport(self) -> None:
        """Abort the group."""
        if self._pair is not None:
            self._pair.abort()

    def close_transport(self) -> None:
        """Release the group."""
        if self._pair is not None:
            self._pair.close()


class ProcessGroupWorker(P2PWorker):
    """The worker's side.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Not used.

    Raises:
        ConnectorOptionError: There is no token, or an option is not valid.
    """

    options: ProcessGroupOptions
    server_cls = ProcessGroupServer
    client_cls = ProcessGroupClient

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        if self.token is None:
            raise ConnectorOptionError(
                "ProcessGroupConnector needs a token that both instances know: set token in "
                "kv_connector_extra_config, or WTRANSFER_TOKEN or WTRANSFER_TOKEN_FILE"
            )


class ProcessGroupConnector(KVConnectorBase_V1):
    """Prefill and decode on different hosts."""

    scheduler_cls = ProcessGroupScheduler
    worker_cls = ProcessGroupWorker
    names_weights = True
    example_options: ClassVar[Mapping[str, Any]] = {"host": "10.0.0.1"}
    options_cls = ProcessGroupOptions

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Return False: blocks come and go whole, all layers at once."""
        return False
