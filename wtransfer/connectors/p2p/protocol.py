"""Messages: with a request, between two workers, and between the sides of one instance.

A request carries `TransferParams` from P to D through routers and clients, so nothing in it is
trusted: it only says where to look.

Two workers talk over an authenticated channel. D connects, P sends `Hello`. Then for one request
after the other D sends `Lookup`, P answers `LookupReply`, and D copies; when all keys were looked
up, D sends `ReleaseRequest`.

The sides of one instance exchange metadata: plain data, which hosts move without pickle.

Source: the names in ``kv_transfer_params`` are those of vLLM's NIXL connector, where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from wtransfer.config import convert_options
from wtransfer.connectors.fenced import WeightHandshake, WeightReport
from wtransfer.connectors.interface import KVConnectorMetadata, KVConnectorWorkerMetadata
from wtransfer.kv.header import BlockGeometry  # noqa: TC001  (msgspec reads it)
from wtransfer.transport.framing import Codec, MessageType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.weight_version import WeightVersions

_DAY_S = 86_400
Seconds = Annotated[float, msgspec.Meta(gt=0, le=_DAY_S)]


class P2POptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options in ``kv_connector_extra_config``."""

    staging_bytes: Annotated[int, msgspec.Meta(ge=0)] = 512 << 20
    """Host memory of each rank's staging buffer."""
    lease_s: Seconds = 30.0
    """Time that staged blocks are kept for an instance that does not fetch them, in seconds."""
    deadline_s: Seconds = 30.0
    """Longest time without a sign of life from the other instance, in seconds."""
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Threads of each rank that copy loaded blocks, and as many that copy saved ones."""
    token: str | None = None
    """Secret of both instances; None: ``WTRANSFER_TOKEN``, or as the connector has it."""


# -- with a request

MAX_TEXT = 1024
"""Longest text in parameters, in characters."""
_MAX_RANKS = 65_536

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Texts = Annotated[list[Text], msgspec.Meta(max_length=_MAX_RANKS)]


@dataclass(kw_only=True)
class TransferParams:
    """The ``kv_transfer_params`` of one request."""

    do_remote_decode: bool = False
    """True if another instance decodes the request."""
    do_remote_prefill: bool = False
    """True if another instance has computed the prompt."""
    remote_engine_id: Text = ""
    """Engine id of that instance."""
    remote_request_id: Text = ""
    """Id of the request there."""
    remote_addresses: Texts = field(default_factory=list)
    """Addresses of its workers, by rank."""
    remote_tokens: Texts = field(default_factory=list)
    """Their tokens, by rank; empty: the options have the token."""
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens of the prompt whose blocks are staged."""
    remote_weights: Text = ""
    """Fingerprint of the weights that computed them."""

    def to_plain(self) -> dict[str, Any]:
        """Return the parameters as a request carries them; JSON can hold them."""
        return {name: value for name, value in vars(self).items() if value}


def read_params(plain: Mapping[str, Any] | None) -> TransferParams:
    """Return a request's parameters; those of an ordinary request if they are not valid.

    Args:
        plain: Its ``kv_transfer_params``; unknown names belong to other connectors.
    """
    try:
        params = convert_options(plain or {}, TransferParams)
        # JSON has texts that cannot be sent on: halves of surrogate pairs.
        msgspec.msgpack.encode(params)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError):
        return TransferParams()
    return params


# -- between two workers

MAX_KEYS = 4096
"""Keys of one `Lookup`."""


class Hello(msgspec.Struct, frozen=True):
    """State identity and layout of P's worker. The first message."""

    engine_id: str
    rank: int
    geometry: BlockGeometry
    """Layout of its blocks."""
    transport: dict[str, int | str]
    """Access to the bytes; each connector has its own entries."""


class Lookup(msgspec.Struct, frozen=True):
    """Look blocks up, and lease those that are staged. Ends the lease of another request."""

    request_id: Text
    """Request on P that the blocks belong to."""
    keys: Annotated[list[bytes], msgspec.Meta(max_length=MAX_KEYS)]


class LookupReply(msgspec.Struct, frozen=True):
    """Answer a lookup."""

    slots: Annotated[list[int], msgspec.Meta(max_length=MAX_KEYS)]
    """Slots of the blocks, up to the first that is not staged: those after a gap are of no use."""


class ReleaseRequest(msgspec.Struct, frozen=True):
    """End the lease of a request and of its lookups: D needs nothing more of it."""

    request_id: Text


CODEC = Codec(
    [
        MessageType(1, Hello),
        MessageType(2, Lookup),
        MessageType(3, LookupReply),
        MessageType(4, ReleaseRequest),
    ]
)


# -- between the sides of one instance


@dataclass
class Load:
    """Blocks to fetch for a request that waits for them; then the remote request is released."""

    request_id: str
    remote: TransferParams
    keys: list[bytes] = field(default_factory=list)
    """Empty: the request does not wait, but only releases the remote one."""
    block_ids: list[int] = field(default_factory=list)
    versions: WeightVersions = ()
    """Weights that the request began with, by rank; empty: the weights have changed since."""


@dataclass
class Save:
    """Blocks of a request that are full at the end of the step."""

    request_id: str
    keys: list[bytes]
    block_ids: list[int]
    versions: WeightVersions
    """Weights that the request began with, by rank."""


@dataclass
class P2PMetadata(KVConnectorMetadata):
    """Work of the workers in one step."""

    step: int = 0
    """Number of the step."""
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    aborted_loads: list[str] = field(default_factory=list)
    """Requests that ended while they were loading."""
    ended: dict[str, float] = field(default_factory=dict)
    """Requests that ended, with the seconds until their leases expire: 0 if no other instance was
    told of them."""
    invalidated: list[bytes] = field(default_factory=list)
    """Keys whose saved bytes are wrong: a load into the blocks had failed."""


@dataclass
class P2PHandshake(WeightHandshake):
    """Address of one worker, and its weight version."""

    address: str = ""
    """Empty: the worker does not send."""
    token: str = ""
    """Empty: the options have the token."""
    num_slots: int = 0
    """Blocks that the worker can stage at a time."""


@dataclass
class P2PWorkerMetadata(WeightReport):
    """Report of workers after a step."""

    not_saved: set[bytes] = field(default_factory=set)
    """Keys that any worker has not staged: its step did not count, or there was no room."""
    step: int = 0
    """Number of the step."""
    num_unleased: int = 0
    """Slots that no lease held at the end of the step, of the worker that has the fewest."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> P2PWorkerMetadata:
        """Add another worker's report; return this object."""
        super().aggregate(other)
        assert isinstance(other, P2PWorkerMetadata)
        self.not_saved |= other.not_saved
        self.step = min(self.step, other.step)
        self.num_unleased = min(self.num_unleased, other.num_unleased)
        return self
