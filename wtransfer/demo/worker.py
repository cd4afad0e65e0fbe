"""A worker process: generates text all the time, and takes what the trainer publishes.

Run by the conductor as ``python -m wtransfer.demo.worker NAME NUM_LAYERS WIDTH``.
"""

from __future__ import annotations

import os
import sys
import time
import zlib

import torch

from wtransfer.demo.generate import Generator
from wtransfer.demo.inbox import Inbox, StoppedError, report
from wtransfer.demo.messages import Applied, Join, Proof, Prove, Ready, Sample, Tokens
from wtransfer.demo.model import ByteTransformer
from wtransfer.demo.proof import LiveDigest
from wtransfer.demo.sizes import ModelShape
from wtransfer.weight_sync.worker.session import WorkerSession

_FLUSH_S = 0.1
# Large models take their time for a token.
_DEADLINE_S = 120.0
_SAMPLE_LENGTH = 160
# Part of a token's time that a running digest may add to it.
_PROOF_SHARE = 0.25


class Server:
    """Serves one model on the thread that owns it.

    Args:
        name: Name of the worker.
        model: The model; the session changes its weights, nobody else.
        session: Receives weights.
        inbox: Commands.
    """

    def __init__(
        self, name: str, model: ByteTransformer, session: WorkerSession, inbox: Inbox
    ) -> None:
        self._name = name
        self._model = model
        self._session = session
        self._inbox = inbox
        self._generator = Generator(model, seed=zlib.crc32(name.encode()))
        self._ended_at: list[float] = []
        self._flushed_at = time.monotonic()
        self._proof: LiveDigest | None = None

    def run(self) -> None:
        """Serve until the conductor ends it."""
        report(
            Ready(
                self._name,
                os.getpid(),
                self._session.version,
                self._session.fingerprint,
                self._session.state,
            )
        )
        try:
            while True:
                self._serve_one()
        except StoppedError:
            self._flush(self._session.version)
            self._sample(self._session.version)
            raise

    def _serve_one(self) -> None:
        began = time.monotonic()
        self._generator.next_byte()
        ended = time.monotonic()
        self._ended_at.append(ended)
        # Before the commit: so a proof comes at least one token after it, and reports that token.
        self._advance_proof((ended - began) * _PROOF_SHARE)
        self._commit()
        if isinstance(self._inbox.poll(), Prove):
            self._proof = LiveDigest(self._model)
        if ended - self._flushed_at > _FLUSH_S:
            self._flush(self._session.version)

    def _commit(self) -> None:
        """Let the session change the weights, if it has new ones: the only pause of serving."""
        version = self._session.version
        began = time.monotonic()
        if not self._session.commit_pending():
            return
        ended = time.monotonic()
        self._flush(version)
        if version is None:
            self._sample(version)
        report(Applied(self._name, self._session.version, self._session.fingerprint, began, ended))
        self._proof = LiveDigest(self._model)

    def _advance_proof(self, seconds: float) -> None:
        digest = self._proof.advance(seconds) if self._proof else None
        if digest is None:
            return
        self._proof = None
        steps = int(self._model.trained_steps)
        # Tokens first: when the conductor has the proof, it has all that happened before.
        version = self._session.version
        self._flush(version)
        report(Proof(self._name, version, digest, steps, self._model.is_tied))

    def _flush(self, version: str | None) -> None:
        """Report the tokens since the last time; all were generated with `version`."""
        if self._ended_at:
            report(Tokens(self._name, version, tuple(self._ended_at)))
        self._ended_at = []
        self._flushed_at = time.monotonic()

    def _sample(self, version: str | None) -> None:
        report(Sample(self._name, version, self._generator.last(_SAMPLE_LENGTH)))


def main() -> None:
    """Run the worker until standard input ends."""
    torch.set_num_threads(1)
    name, *numbers = sys.argv[1:]
    shape = ModelShape(*map(int, numbers))
    inbox = Inbox.of_stdin()
    try:
        # Seeded by its name: no worker starts with the trainer's weights.
        model = ByteTransformer(shape, zlib.crc32(name.encode())).eval()
        join = inbox.wait()
        assert isinstance(join, Join)
        with WorkerSession(model, join=join.address, name=name, deadline_s=_DEADLINE_S) as session:
            Server(name, model, session, inbox).run()
    except StoppedError:
        return


if __name__ == "__main__":
    main()
