"""The messages of the control channel, and what each side may do with them.

T is the trainer's publisher, W a worker session. One round:

1. T `Plan`; W `Accept` or `Refuse`. All accept before any byte moves. A manifest that a worker
   has had over this very connection, and has not refused, is only named.
2. T `Data` (zero or more); W `Received` or `Fault`, and `Progress` meanwhile.
3. T `Prepare`; W `Vote`, or `Fault`. To a vote for another set than was sent, which no commit can
   follow, T answers with `Compare`, and W says in a `Fault` which pieces differ.
4. T `Commit`; W `Ack` when the thread that owns the model has applied it (or could not).
5. T `Finish`, or `Rollback` where another rank of the same instance failed; to a rollback W answers
   with another `Ack`.

A message with a new or changed field is another protocol: raise `PROTOCOL` in
`wtransfer.transport.handshake`.

`Abort` ends a round before its commit, from the trainer's side; a `Fault` does so from a worker's.
In a round or outside, W says `Lost` when its model does not hold any more what it had committed.

A connection that begins with `Observe` in the place of a worker's `Hello` is no worker's: T answers
with a `FleetStatus`, and closes it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from wtransfer.errors import Fact, WTransferError, from_wire, to_wire
from wtransfer.manifest import MAX_PIECES, Digests, Manifest
from wtransfer.transport.framing import Codec, MessageType
from wtransfer.weight_sync.report import WorkerInfo  # noqa: TC001  # msgspec reads annotations

MIB = 1 << 20
MAX_TEXT_NBYTES = 16 << 10
"""Longest text of an error or a reason, in UTF-8 bytes."""
MAX_OBSERVED = 4096
"""Most workers and hosts of a `FleetStatus`: more than a publisher has connections."""
MAX_OBSERVED_NBYTES = 512
"""Longest text of one in a `FleetStatus`, in UTF-8 bytes."""
MAX_LIST_NBYTES = 256 << 10
"""Longest list among an error's facts, in bytes of its encoding."""

_CUT = "... (cut)"
_STR_HEADER_NBYTES = 5
_MAX_INT_BITS = 63


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error on its way to the other side."""

    kind: str
    """Class name in `wtransfer.errors`."""
    message: str
    """The sentence."""
    facts: dict[str, Fact] = {}
    """Its facts."""

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Describe an error, shortened so that it always fits a frame."""
        kind, message, facts = to_wire(error)
        return cls(kind, clipped(message), {name: _sendable(v) for name, v in facts.items()})

    def rebuild(self, **facts: object) -> WTransferError:
        """Return the error as an exception of this process, with more facts added."""
        error = from_wire(self.kind, self.message, self.facts)
        error.add_facts(**facts)
        return error


def clipped(text: str, max_nbytes: int = MAX_TEXT_NBYTES) -> str:
    """Return a text that can be sent: bounded, and with lone surrogates written out.

    A message that cannot be encoded or exceeds its limit never reaches the other side, and the
    text that engines and file names put into an error can be anything.
    """
    raw = text[: max_nbytes + 1].encode("utf-8", "backslashreplace")
    if len(raw) <= max_nbytes:
        return raw.decode()
    return raw[: max_nbytes - len(_CUT)].decode("utf-8", "ignore") + _CUT


def _sendable(fact: Fact) -> Fact:
    if isinstance(fact, str):
        return clipped(fact)
    if isinstance(fact, list):
        return _first(fact)
    # msgpack's integers end at 64 bits.
    return None if isinstance(fact, int) and fact.bit_length() > _MAX_INT_BITS else fact


def _first(lines: list[str]) -> list[str]:
    """Return as many lines as fit, from the start."""
    kept, left = [], MAX_LIST_NBYTES
    for line in map(clipped, map(str, lines)):
        left -= len(line.encode()) + _STR_HEADER_NBYTES
        if left < 0:
            break
        kept.append(line)
    return kept


DRAINED = "was told to leave its publisher, and joins again only when it is invited by hand"
"""Words of the refusal of a host that its operator has drained; across every serving engine's own
routes an error is text."""


class Hello(msgspec.Struct, frozen=True):
    """W: identity and weights of this worker. Sent first, after every (re)connection."""

    worker: str
    """Name for people, unique in the fleet by habit."""
    instance: str
    """Serving instance; ranks of one instance commit all or none."""
    rank: int
    """Rank within the instance."""
    num_ranks: int
    """Ranks of the instance."""
    version: str | None
    """Label of what is held."""
    fingerprint: str
    """Identity of what is held."""
    state: str
    """fresh, serving, pending, behind or empty."""
    host: str | None = None
    """Host of the publisher's list whose invitation the worker followed; None: joined by itself."""
    host_ranks: int | None = None
    """Ranks that follow that host's invitations, where the worker knows better than the host."""


class Init(msgspec.Struct, frozen=True):
    """T: make this engine."""

    epoch: int
    """Counts initialisations, so that an answer can be matched."""
    engine: str
    """Name in the group ``wtransfer.engines``; never a path."""
    distribution: str | None
    """Where the trainer's engine comes from."""
    engine_version: str | None
    """Version of that distribution."""
    data_parallel_index: int
    """Index of the worker's instance."""
    data_parallel_size: int
    """Number of instances."""
    init_info: dict[str, Any]
    """Fields of the engine's init info."""
    contract: str | None = None
    """Contract that the trainer's engine states; None: it states none."""


class Ready(msgspec.Struct, frozen=True):
    """W: the engine of this epoch is initialised."""

    epoch: int
    """Generation of the `Init`."""


class Refused(msgspec.Struct, frozen=True):
    """W: the engine could not be made."""

    epoch: int
    """Generation of the `Init`."""
    error: ErrorInfo
    """Why."""


class Plan(msgspec.Struct, frozen=True):
    """T: the update that the round will bring."""

    round_id: str
    """Identity of the round."""
    version: str
    """Label, for people."""
    manifest: Manifest | str
    """The pieces; or, by its identity, the manifest that came last over this connection."""

    def num_entries(self) -> int:
        """Entries, for the frame's limit."""
        return 0 if isinstance(self.manifest, str) else len(self.manifest.whole)


class Accept(msgspec.Struct, frozen=True):
    """W: the plan fits, there is room, nothing else is going on."""

    round_id: str
    """Round."""
    notes: list[str]
    """Notes for the operator: staging memory, no way back, casts."""


class Refuse(msgspec.Struct, frozen=True):
    """W: the plan cannot be taken."""

    round_id: str
    """Round."""
    error: ErrorInfo
    """Why."""


class Data(msgspec.Struct, frozen=True):
    """T: call ``receive_weights`` with this."""

    round_id: str
    """Round."""
    seq: int
    """Counts from 0 in each round; any number but the next one is dropped."""
    update_info: dict[str, Any]
    """Fields of the engine's update info; a field of one engine goes here."""

    def num_entries(self) -> int:
        """Entries, for the frame's limit: the longest list in the info."""
        sizes = [len(v) for v in self.update_info.values() if isinstance(v, (list, tuple, dict))]
        return max(sizes, default=0)


class Received(msgspec.Struct, frozen=True):
    """W: ``receive_weights`` returned."""

    round_id: str
    """Round."""
    seq: int
    """Number of the `Data`."""


class Progress(msgspec.Struct, frozen=True):
    """W: still receiving; before its `Accept`, still proving what does not travel."""

    round_id: str
    """Round."""
    nbytes: int
    """Bytes staged, or proven, so far."""


class Fault(msgspec.Struct, frozen=True):
    """W: this round has failed here; staging is dropped."""

    round_id: str
    """Round."""
    error: ErrorInfo
    """Why."""


class Prepare(msgspec.Struct, frozen=True):
    """T: everything was sent. The message's size does not depend on the number of pieces."""

    round_id: str
    """Round."""
    fingerprint: str
    """Identity of what was sent."""


class Compare(msgspec.Struct, frozen=True):
    """T, to a worker that has voted for another set, once: say which pieces differ."""

    round_id: str
    """Round."""
    digests: Digests
    """Of what was sent, in plan order."""

    def num_entries(self) -> int:
        """Entries, for the frame's limit."""
        return len(self.digests)


class Vote(msgspec.Struct, frozen=True):
    """W: every piece has arrived. A vote for another set than was sent asks for the digests."""

    round_id: str
    """Round."""
    fingerprint: str
    """Identity of the staged set, from digests computed here: no other set has it."""
    nbytes: int
    """Bytes staged."""
    seconds: dict[str, float]
    """Seconds by stage so far."""


class Commit(msgspec.Struct, frozen=True):
    """T: every worker's vote is good; apply."""

    round_id: str
    """Round."""


class Ack(msgspec.Struct, frozen=True):
    """W: outcome of a commit or a rollback."""

    round_id: str
    """Round."""
    outcome: str
    """committed, restored (the old version, whole), reverted, discarded or empty."""
    version: str | None
    """Label of what is held now."""
    fingerprint: str
    """Identity of what is held now."""
    state: str
    """State now."""
    seconds: dict[str, float]
    """Seconds by stage."""
    error: ErrorInfo | None = None
    """Why the update was not committed."""


class Lost(msgspec.Struct, frozen=True):
    """W: the model has other weights than last reported, without a commit and without a name."""

    fingerprint: str
    """Identity of what is held now."""
    state: str
    """State now: empty, or pending where a verified set waits to be applied."""
    reason: str
    """How the weights were lost; clipped."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reason", clipped(self.reason))


class Finish(msgspec.Struct, frozen=True):
    """T: no rank will be asked to go back; the previous set may be dropped."""

    round_id: str
    """Round."""


class Rollback(msgspec.Struct, frozen=True):
    """T: another rank of your instance failed; go back."""

    round_id: str
    """Round."""
    reason: str
    """The rank that failed, and how; clipped."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reason", clipped(self.reason))


class Abort(msgspec.Struct, frozen=True):
    """T: this round is over without a commit."""

    round_id: str
    """Round."""
    reason: str
    """Why; clipped."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reason", clipped(self.reason))


class Observe(msgspec.Struct, frozen=True):
    """An observer, in the place of a hello: say what the fleet holds. Joins nothing."""


class RoundStatus(msgspec.Struct, frozen=True):
    """A round under way, as its publisher sees it."""

    round_id: str
    """Identity of the round."""
    version: str
    """Label of the update."""
    phase: str
    """``init``, ``plan``, ``transfer``, ``prepare`` or ``commit``."""
    nbytes: int
    """Bytes of the update; 0 until it is planned."""
    age_s: float
    """Seconds since the round began."""
    idle_s: float
    """Seconds since the trainer or a worker last made progress."""
    is_catch_up: bool
    """True if the round brings the current version to workers that lack it."""


class FleetStatus(msgspec.Struct, frozen=True):
    """T, to an observer: the workers at one moment, as their publisher sees them."""

    version: str | None
    """Label of the last committed update; None: there was none."""
    fingerprint: str | None
    """Its identity."""
    workers: list[WorkerInfo]
    """Every joined worker."""
    lost: list[WorkerInfo]
    """Workers that have left or were lost, and did not come back under their name: the last ones,
    with what they held and why the connection ended."""
    absent: dict[str, str]
    """Host that was asked to join and has no joined worker now -> why."""
    round: RoundStatus | None
    """The round under way; None: there is none."""
    last_error: str | None
    """Why the last round was ended, or is mixed; None if every worker of it has committed. A
    catch-up of late workers changes nothing here."""

    def num_entries(self) -> int:
        """Entries, for the frame's limit."""
        return len(self.workers) + len(self.lost) + len(self.absent)


CODEC = Codec(
    [
        MessageType(16, Hello),
        MessageType(17, Init),
        MessageType(18, Ready),
        MessageType(19, Refused),
        MessageType(20, Plan, max_nbytes=64 * MIB, max_entries=MAX_PIECES),
        MessageType(21, Accept),
        MessageType(22, Refuse),
        MessageType(23, Data, max_nbytes=64 * MIB, max_entries=MAX_PIECES),
        MessageType(24, Received),
        MessageType(25, Progress),
        MessageType(26, Fault),
        MessageType(27, Prepare),
        MessageType(28, Vote),
        MessageType(29, Commit),
        MessageType(30, Ack),
        MessageType(31, Finish),
        MessageType(32, Rollback),
        MessageType(33, Abort),
        MessageType(34, Lost),
        MessageType(35, Compare, max_nbytes=64 * MIB, max_entries=MAX_PIECES),
        MessageType(36, Observe),
        MessageType(37, FleetStatus, max_nbytes=16 * MIB, max_entries=MAX_OBSERVED),
    ]
)
"""Every message of the channel with its limits."""
