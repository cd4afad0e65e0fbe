"""What the demo's processes tell each other: one JSON object per line, on their pipes.

The command line's process (the conductor) starts a trainer and two workers. Its commands go to
their standard input, their reports come from their standard output; a closed standard input means
"stop", so no child outlives the conductor. Weights never pass here. Times are seconds of
`time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from wtransfer.errors import ProtocolError

# -- commands -------------------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag=True):
    """To a worker: dial this publisher."""

    address: str
    """Its address."""


class Prove(msgspec.Struct, frozen=True, tag=True):
    """To a worker: digest the live model once more."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """To the trainer: publish the weights as they are."""

    number: int
    """Number of the round, from 1."""
    hold: bool
    """Whether to stop half way through the transfer until `Resume`."""
    num_workers: int
    """Wait for this many workers first."""


class Resume(msgspec.Struct, frozen=True, tag=True):
    """To the trainer: go on with the held transfer."""


# -- reports of the trainer -----------------------------------------------------------------------


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The publisher can be joined."""

    address: str
    """Where."""
    num_parameters: int
    """Weights of the model."""


class Trained(msgspec.Struct, frozen=True, tag=True):
    """One optimizer step was taken."""

    step: int
    """Counts from 1."""
    loss: float
    """Cross entropy, nats per byte."""


class Held(msgspec.Struct, frozen=True, tag=True):
    """Half of the tensors were handed to the engine; the transfer stands still."""

    at: float
    """When."""
    num_sent: int
    """Tensors handed over."""
    num_tensors: int
    """Tensors of the round."""


class Receipt(msgspec.Struct, frozen=True):
    """What the publisher's report says of one worker."""

    worker: str
    """Its name."""
    outcome: str
    """``committed``, or what else became of it."""
    fingerprint: str | None
    """What it holds."""
    digests_equal: bool
    """Whether its digests of all pieces were those of the trainer."""
    waited_s: float
    """Seconds that the verified update waited for the worker's thread."""


class RoundOver(msgspec.Struct, frozen=True, tag=True):
    """A round was committed, or failed."""

    number: int
    """Number of the round."""
    version: str
    """Label."""
    outcome: str
    """``committed``, ``mixed`` or ``aborted``."""
    step: int
    """Optimizer steps in the published weights."""
    loss: float
    """Loss when they were published."""
    digest: str
    """The trainer's digest of its live model, taken before the round."""
    memcpy_s: float
    """Seconds of a plain copy of as many bytes, just before the round."""
    started_at: float
    """When ``publish`` was called."""
    fingerprint: str | None = None
    """Identity of the published weights."""
    nbytes: int = 0
    """Bytes of the update."""
    packed_s: float = 0.0
    """Seconds until the trainer could train on."""
    total_s: float = 0.0
    """Seconds from ``publish`` to the last receipt, or to the failure."""
    receipts: tuple[Receipt, ...] = ()
    """One per worker."""
    error: str | None = None
    """Why it failed."""
    blamed: str | None = None
    """Worker that the error names."""
    failed_in: str | None = None
    """Phase that the error names."""


# -- reports of a worker --------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker process has a session and serves."""

    worker: str
    """Its name."""
    pid: int
    """Its process."""
    version: str | None
    """Label of what it holds."""
    fingerprint: str
    """Identity of what it holds."""
    state: str
    """State of its session."""


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Bytes were generated, all with the same weights."""

    worker: str
    """Who."""
    version: str | None
    """With which weights."""
    ended_at: tuple[float, ...]
    """When each was finished."""


class Applied(msgspec.Struct, frozen=True, tag=True):
    """A commit changed the weights."""

    worker: str
    """Whose."""
    version: str | None
    """Label of what it holds now."""
    fingerprint: str
    """Identity of what it holds now."""
    started_at: float
    """When the session was called; serving stood still from here ..."""
    ended_at: float
    """... to here."""


class Proof(msgspec.Struct, frozen=True, tag=True):
    """The live model was digested."""

    worker: str
    """Whose."""
    version: str | None
    """Label of what it holds."""
    digest: str
    """The digest, to be compared with the trainer's."""
    trained_steps: int
    """Optimizer steps that the weights themselves claim."""
    tied: bool
    """Whether tied weights still are."""


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Some of the text generated last."""

    worker: str
    """Who."""
    version: str | None
    """With which weights."""
    text: str
    """Printable."""


# -- lines ----------------------------------------------------------------------------------------

Command: TypeAlias = Join | Prove | Publish | Resume
Report: TypeAlias = (
    Listening | Trained | Held | RoundOver | Ready | Tokens | Applied | Proof | Sample
)

_COMMANDS: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_REPORTS: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """Return a message as one line."""
    return msgspec.json.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    """Return a command.

    Raises:
        ProtocolError: The line is none.
    """
    return _decode(_COMMANDS, line)


def decode_report(line: bytes) -> Report:
    """Return a report.

    Raises:
        ProtocolError: The line is none.
    """
    return _decode(_REPORTS, line)


_TMessage = TypeVar("_TMessage")


def _decode(decoder: msgspec.json.Decoder[_TMessage], line: bytes) -> _TMessage:
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{line[:200]!r} is no message of the demo: {error}") from error
