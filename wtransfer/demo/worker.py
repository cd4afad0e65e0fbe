"""The demo's worker processes: they generate text, and report commits and digests of weights.

Weights never pass here. Times are seconds of `time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

import os
import time
import zlib
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from wtransfer import WorkerSession
from wtransfer.demo.model import ByteTransformer, Generator, digest_in_parts
from wtransfer.testing.mini_engine.channel import open_channel

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 120.0
"""Deadline of publisher and sessions, in seconds: large models need long for a token."""
_FLUSH_S = 0.1
_SAMPLE_LENGTH = 160


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker process has a session and begins to serve."""

    pid: int
    version: str | None
    fingerprint: str
    state: str


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Bytes were generated, all with the same weights."""

    version: str | None
    ended_at: tuple[float, ...]
    text: str
    """Text generated last."""


class Applied(msgspec.Struct, frozen=True, tag=True):
    """A commit changed the weights; serving paused from `began_at` to `ended_at`."""

    version: str | None
    fingerprint: str
    began_at: float
    ended_at: float


class Proof(msgspec.Struct, frozen=True, tag=True):
    """The live model was digested, from `began_at` on."""

    version: str | None
    began_at: float
    digest: str
    trained_steps: int
    """Optimizer steps according to the weights themselves."""
    tied: bool
    """True if tied weights still share memory."""


Report: TypeAlias = Ready | Tokens | Applied | Proof
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def run_worker(address: str, millions: float, token: str, name: str, join: str) -> None:
    """Generate text, commit published weights between two tokens, and digest the live model.

    Ends when the other side closes the channel.
    """
    # Seeded by its name: no worker starts with the trainer's weights.
    seed = zlib.crc32(name.encode())
    model = ByteTransformer.of_size(millions, seed).eval()
    with (
        open_channel(address, "main") as main,
        WorkerSession(model, join=join, token=token, name=name, deadline_s=DEADLINE_S) as session,
    ):
        main.send(Ready(os.getpid(), session.version, session.fingerprint, session.state))
        generator = Generator(model, seed)
        ended_at: list[float] = []
        # Nothing to prove before the first commit. Then one digest follows the other.
        parts: Iterator[str] = iter(())
        parts_from = 0.0

        def report_tokens(version: str | None) -> None:
            main.send(Tokens(version, tuple(ended_at), generator.last(_SAMPLE_LENGTH)))
            ended_at.clear()

        while not main.poll(0.0):
            generator.next_byte()
            ended_at.append(time.monotonic())
            # Before the commit: so a proof comes at least one token after its commit.
            version, digest = session.version, next(parts, "")
            # Tokens first: every earlier event has arrived when the proof arrives.
            if digest or ended_at[-1] - ended_at[0] > _FLUSH_S:
                report_tokens(version)
            if digest:
                steps = int(model.trained_steps)
                main.send(Proof(version, parts_from, digest, steps, model.is_tied))
            began_at = time.monotonic()
            # The only pause of serving.
            is_new = session.commit_pending()
            if is_new:
                applied_at = time.monotonic()
                report_tokens(version)
                main.send(Applied(session.version, session.fingerprint, began_at, applied_at))
            if is_new or digest:
                parts, parts_from = digest_in_parts(model), time.monotonic()
