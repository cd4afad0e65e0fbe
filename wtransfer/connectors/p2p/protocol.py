"""What travels: with a request, between two workers, and between the sides of one instance.

A request carries `TransferParams` from P to D through routers and clients, so nothing in it is
trusted: it only says where to look.

Two workers talk over an authenticated channel. D connects, P sends `Hello`. Then D sends `Lookup`,
P answers `LookupReply`, D copies and sends `TransferDone`; at the end of a request it sends
`ReleaseRequest`. Unknown and repeated numbers are counted and change nothing.

The sides of one instance exchange metadata: plain data, which hosts move without pickle.

Source: the names in ``kv_transfer_params`` are those of vLLM's NIXL connector, where it has them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from wtransfer.connectors.fenced import WeightHandshake, WeightReport
from wtransfer.connectors.interface import KVConnectorMetadata, KVConnectorWorkerMetadata
from wtransfer.kv.header import BlockGeometry
from wtransfer.transport.framing import Codec, MessageType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.weight_version import WeightVersions

_DAY_S = 86_400
Seconds = Annotated[float, msgspec.Meta(gt=0, le=_DAY_S)]


class P2POptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Options in ``kv_connector_extra_config``."""

    shelf_bytes: Annotated[int, msgspec.Meta(ge=0)] = 512 << 20
    """Host memory of each rank's staging buffer."""
    lease_s: Seconds = 30.0
    """How long staged blocks are kept for an instance that does not fetch them, in seconds."""
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
Texts = Annotated[tuple[Text, ...], msgspec.Meta(max_length=_MAX_RANKS)]


class TransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ``kv_transfer_params`` of one request."""

    do_remote_decode: bool = False
    """Whether another instance decodes it."""
    do_remote_prefill: bool = False
    """Whether another instance has computed its prompt."""
    remote_engine_id: Text = ""
    """That instance."""
    remote_request_id: Text = ""
    """The request there."""
    remote_addresses: Texts = ()
    """Addresses of its workers, by rank."""
    remote_tokens: Texts = ()
    """Their tokens, by rank; empty: the options have the token."""
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens of the prompt whose blocks are staged."""
    remote_weights: Text = ""
    """Fingerprint of the weights that computed them."""

    def to_plain(self) -> dict[str, Any]:
        """Return what a request carries; JSON can hold it."""
        # Not `to_builtins`: it leaves tuples, which arrive as lists in another process.
        plain: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(self))
        return plain


def read_params(plain: Mapping[str, Any] | None) -> TransferParams | None:
    """Return a request's parameters; None if they are not valid.

    Args:
        plain: Its ``kv_transfer_params``; unknown names belong to other connectors.
    """
    try:
        params = msgspec.convert(dict(plain or {}), TransferParams)
        # JSON has texts that cannot be sent on: halves of surrogate pairs.
        msgspec.msgpack.encode(params)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError):
        return None
    return params


# -- between two workers

MAX_KEYS = 4096
"""Keys of one `Lookup`."""
MISSING = -1
"""Stands for the slot of a block that is not staged."""
_MAX_RELEASE_NBYTES = 4 * MAX_TEXT + 64


class Hello(msgspec.Struct, frozen=True):
    """State identity and layout of P's worker. The first message."""

    engine_id: str
    rank: int
    block_size: int
    pages: tuple[tuple[str, int], ...]
    num_ranks: int
    model: str
    transport: dict[str, int | str]
    """How to get at the bytes; each connector has its own."""

    @property
    def geometry(self) -> BlockGeometry:
        """Layout of its blocks."""
        return BlockGeometry(self.block_size, self.pages, self.num_ranks, self.model)


class Lookup(msgspec.Struct, frozen=True):
    """Look blocks up, and lease those that are staged."""

    number: int
    """Rises with each lookup of a connection."""
    request_id: Text
    """Request on P that the blocks belong to."""
    keys: list[bytes]

    def num_entries(self) -> int:
        """Return the number of entries, for the codec's limit."""
        return len(self.keys)


class LookupReply(msgspec.Struct, frozen=True):
    """Answer a lookup."""

    number: int
    slots: list[int]
    """Slot of each key, or `MISSING`."""

    def num_entries(self) -> int:
        """Return the number of entries, for the codec's limit."""
        return len(self.slots)


class TransferDone(msgspec.Struct, frozen=True):
    """End the lease of a lookup."""

    number: int


class ReleaseRequest(msgspec.Struct, frozen=True):
    """End the lease of a request: D needs nothing more of it."""

    request_id: Text


CODEC = Codec(
    [
        MessageType(1, Hello),
        MessageType(2, Lookup, max_entries=MAX_KEYS),
        MessageType(3, LookupReply, max_entries=MAX_KEYS),
        MessageType(4, TransferDone, max_nbytes=64),
        MessageType(5, ReleaseRequest, max_nbytes=_MAX_RELEASE_NBYTES),
    ]
)


def until_missing(slots: list[int]) -> list[int]:
    """Return the slots before the first missing one: blocks after a gap are of no use."""
    return list(itertools.takewhile(lambda slot: slot != MISSING, slots))


# -- between the sides of one instance


@dataclass
class RemoteRequest:
    """A request on another instance that has staged its blocks."""

    engine_id: str
    request_id: str
    addresses: list[str]
    """Addresses of the workers there, by rank."""
    tokens: list[str]
    """Their tokens, by rank; empty: the options have the token."""


@dataclass
class Load:
    """Blocks to fetch for a request that waits for them."""

    request_id: str
    remote: RemoteRequest
    keys: list[bytes]
    block_ids: list[int]
    versions: WeightVersions = ()
    """Weights that the request began with, by rank; empty: they have changed since."""


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
    remote_releases: list[RemoteRequest] = field(default_factory=list)
    """Requests of other instances whose blocks are not needed here."""
    expiring: list[str] = field(default_factory=list)
    """Requests that were handed over: their leases expire from now on."""
    released: list[str] = field(default_factory=list)
    """Requests that no instance will fetch."""
    invalidated: list[bytes] = field(default_factory=list)
    """Keys whose saved bytes are wrong: a load into the blocks had failed."""


@dataclass
class P2PHandshake(WeightHandshake):
    """Where one worker listens."""

    address: str = ""
    """Empty: it does not send."""
    token: str = ""
    """Empty: the options have the token."""
    num_slots: int = 0
    """Blocks that it can stage at a time."""


@dataclass
class P2PWorkerMetadata(WeightReport):
    """What workers report after a step."""

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
