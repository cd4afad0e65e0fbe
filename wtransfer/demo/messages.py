"""Messages between the demo's main process and its children.

Weights never pass here. Times are seconds of `time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class TakeDigest(msgspec.Struct, frozen=True, tag=True):
    """To a worker: digest the live model again."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """To the trainer: publish the weights as they are."""

    number: int
    """Number of the round, from 1."""
    hold: bool
    """Hold the transfer half way until `Resume`."""
    num_workers: int
    """Workers to wait for first."""


class Resume(msgspec.Struct, frozen=True, tag=True):
    """To the trainer: continue the held transfer."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To every child: report the rest, and end."""


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The publisher can be joined."""

    address: str
    num_parameters: int


class Trained(msgspec.Struct, frozen=True, tag=True):
    """One optimizer step was taken."""

    step: int
    """Counts from 1."""
    loss: float
    """Cross entropy, nats per byte."""


class Held(msgspec.Struct, frozen=True, tag=True):
    """Half of the tensors were handed to the engine; the transfer is held."""

    at: float
    num_sent: int
    num_tensors: int


class Receipt(msgspec.Struct, frozen=True):
    """One worker in the publisher's report."""

    worker: str
    outcome: str
    fingerprint: str
    digests_equal: bool
    waited_s: float
    """Seconds that the verified update waited for the worker's thread."""


class RoundOver(msgspec.Struct, frozen=True, tag=True):
    """A round was committed, or failed."""

    number: int
    version: str
    outcome: str
    """``committed``, ``mixed`` or ``aborted``."""
    step: int
    """Optimizer steps in the published weights."""
    loss: float
    digest: str
    """Digest of the trainer's live model, taken before the round."""
    memcpy_s: float
    """Seconds of a plain copy of as many bytes, just before the round."""
    started_at: float
    """Time of the call of ``publish``."""
    total_s: float = 0.0
    """Seconds from ``publish`` to the last receipt, or to the failure."""
    packed_s: float | None = None
    """Seconds until the trainer could train on."""
    fingerprint: str | None = None
    nbytes: int = 0
    receipts: tuple[Receipt, ...] = ()
    error: str | None = None
    blamed: str | None = None
    """Worker that the error names."""
    failed_in: str | None = None
    """Phase that the error names."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker process has a session and begins to serve."""

    worker: str
    pid: int
    version: str | None
    fingerprint: str
    state: str


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Bytes were generated, all with the same weights."""

    worker: str
    version: str | None
    ended_at: tuple[float, ...]


class Applied(msgspec.Struct, frozen=True, tag=True):
    """A commit changed the weights; serving paused from `started_at` to `ended_at`."""

    worker: str
    version: str | None
    fingerprint: str
    started_at: float
    ended_at: float


class Proof(msgspec.Struct, frozen=True, tag=True):
    """The live model was digested."""

    worker: str
    version: str | None
    digest: str
    trained_steps: int
    """Optimizer steps according to the weights themselves."""
    tied: bool
    """Whether tied weights still share memory."""


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Some of the text generated last."""

    worker: str
    version: str | None
    text: str


Command: TypeAlias = TakeDigest | Publish | Resume | Stop
Report: TypeAlias = (
    Listening | Trained | Held | RoundOver | Ready | Tokens | Applied | Proof | Sample
)

COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
