"""The demo's child processes: a trainer, and workers that generate text."""

from __future__ import annotations

import os
import time
import zlib
from typing import TYPE_CHECKING

from msgspec.structs import replace

from wtransfer.demo import messages
from wtransfer.demo.model import (
    ByteTransformer,
    Generator,
    Learner,
    LiveDigest,
    live_digest,
    memcpy_seconds,
)
from wtransfer.errors import WTransferError
from wtransfer.testing.mini_engine.channel import open_channel
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.trainer.source import ModuleSource
from wtransfer.weight_sync.worker.session import WorkerSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from wtransfer.testing.mini_engine.channel import Channel

_TRAINER_SEED = 1
# Large models need long for a token, and for the tokens that a held transfer waits for.
_DEADLINE_S = 120.0
_HOLD_S = 100.0
_FLUSH_S = 0.1
_SAMPLE_LENGTH = 160
# Part of a token's time that a running digest may add to it.
_DIGEST_SHARE = 0.25


class HoldableSource(ModuleSource):
    """A module's weights; a pass over them can be held half way.

    Args:
        module: The model.
        hold: Called after half of the tensors of the next pass, if `is_armed`, with their number
            and the number of all; the pass goes on when it returns.
    """

    def __init__(self, module: torch.nn.Module, hold: Callable[[int, int], None]) -> None:
        super().__init__(module)
        self.is_armed = False
        self._hold = hold

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors."""
        num_tensors = len(self.metadata)
        for index, pair in enumerate(super().iter_full()):
            if self.is_armed and index == num_tensors // 2:
                self.is_armed = False
                self._hold(index, num_tensors)
            yield pair


class Trainer:
    """Trains all the time, and publishes on command."""

    def __init__(self, model: ByteTransformer, token: str, main: Channel) -> None:
        self._model = model
        self._main = main
        self._learner = Learner(model)
        self._source = HoldableSource(model, self._hold)
        self._publisher = Publisher(self._source, engine="shm", token=token, deadline_s=_DEADLINE_S)

    def run(self) -> None:
        """Train until main ends it."""
        with self._publisher as publisher:
            num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
            self._main.send(messages.Listening(publisher.address, num_parameters))
            while True:
                command = self._main.receive(messages.COMMANDS) if self._main.poll(0.0) else None
                if isinstance(command, messages.Stop):
                    return
                if isinstance(command, messages.Publish):
                    self._main.send(self._publish(command))
                else:
                    self._train()

    def _train(self) -> None:
        self._learner.step()
        self._main.send(messages.Trained(self._learner.steps, self._learner.loss))

    def _publish(self, command: messages.Publish) -> messages.RoundOver:
        self._publisher.wait_for_workers(command.num_workers, timeout_s=_DEADLINE_S)
        self._source.is_armed = command.hold
        version = f"step-{self._learner.steps}"
        over = messages.RoundOver(
            number=command.number,
            version=version,
            outcome="aborted",
            step=self._learner.steps,
            loss=self._learner.loss,
            digest=live_digest(self._model),
            memcpy_s=memcpy_seconds(sum(each.nbytes for each in self._model.parameters())),
            started_at=time.monotonic(),
        )
        try:
            running = self._publisher.publish(version=version, wait=False)
            running.packed()
            # The engine has its own copy now: the next step changes the weights while the workers
            # still verify and commit the old ones. If it had none, the digests would differ.
            self._train()
            report = running.result()
        except WTransferError as error:
            return replace(
                over,
                total_s=time.monotonic() - over.started_at,
                error=str(error),
                blamed=error.worker,
                failed_in=error.phase,
            )
        return replace(
            over,
            outcome=report.outcome,
            fingerprint=report.fingerprint,
            nbytes=report.nbytes,
            packed_s=report.packed_s,
            total_s=report.seconds["total"],
            receipts=tuple(
                messages.Receipt(
                    each.worker,
                    each.outcome,
                    each.fingerprint,
                    each.digests_equal,
                    each.seconds.get("wait", 0.0),
                )
                for each in report.workers
            ),
        )

    def _hold(self, num_sent: int, num_tensors: int) -> None:
        # Runs wherever the engine iterates its source. The main thread is inside `_publish` then
        # and reads no commands: the one that arrives now is the Resume, and is not taken by it.
        self._main.send(messages.Held(time.monotonic(), num_sent, num_tensors))
        if self._main.poll(_HOLD_S):
            self._main.receive(messages.COMMANDS)


class Worker:
    """Generates text all the time, and commits what is published between two tokens."""

    def __init__(
        self, name: str, model: ByteTransformer, session: WorkerSession, main: Channel
    ) -> None:
        self._name = name
        self._model = model
        self._session = session
        self._main = main
        self._generator = Generator(model, seed=zlib.crc32(name.encode()))
        self._ended_at: list[float] = []
        self._flushed_at = time.monotonic()
        self._digest: LiveDigest | None = None

    def run(self) -> None:
        """Serve until main ends it."""
        session = self._session
        self._main.send(
            messages.Ready(
                self._name, os.getpid(), session.version, session.fingerprint, session.state
            )
        )
        while True:
            began = time.monotonic()
            self._generator.next_byte()
            ended = time.monotonic()
            self._ended_at.append(ended)
            # Before the commit: so a proof comes at least one token after its commit.
            self._advance_digest((ended - began) * _DIGEST_SHARE)
            self._commit()
            command = self._main.receive(messages.COMMANDS) if self._main.poll(0.0) else None
            if isinstance(command, messages.Stop):
                break
            if isinstance(command, messages.TakeDigest):
                self._digest = LiveDigest(self._model)
            if ended - self._flushed_at > _FLUSH_S:
                self._flush(session.version)
        self._flush(session.version)
        self._sample(session.version)

    def _commit(self) -> None:
        """Let the session change the weights if it has new ones: the only pause of serving."""
        old = self._session.version
        began = time.monotonic()
        if not self._session.commit_pending():
            return
        ended = time.monotonic()
        self._flush(old)
        if old is None:
            self._sample(old)
        version, fingerprint = self._session.version, self._session.fingerprint
        self._main.send(messages.Applied(self._name, version, fingerprint, began, ended))
        self._digest = LiveDigest(self._model)

    def _advance_digest(self, seconds: float) -> None:
        digest = self._digest.advance(seconds) if self._digest else None
        if digest is None:
            return
        self._digest = None
        # Tokens first: when main has the proof, it has everything that happened before.
        version, steps = self._session.version, int(self._model.trained_steps)
        self._flush(version)
        self._main.send(messages.Proof(self._name, version, digest, steps, self._model.is_tied))

    def _flush(self, version: str | None) -> None:
        """Report the tokens since the last time; all were generated with `version`."""
        if self._ended_at:
            self._main.send(messages.Tokens(self._name, version, tuple(self._ended_at)))
        self._ended_at = []
        self._flushed_at = time.monotonic()

    def _sample(self, version: str | None) -> None:
        text = self._generator.last(_SAMPLE_LENGTH)
        self._main.send(messages.Sample(self._name, version, text))


def trainer(address: str, millions: float, token: str) -> None:
    """Run the trainer until main ends it."""
    with open_channel(address, "main") as main:
        main.wait_forever()
        Trainer(ByteTransformer.of_size(millions, _TRAINER_SEED), token, main).run()


def worker(address: str, millions: float, token: str, name: str, join: str) -> None:
    """Run a worker until main ends it."""
    # Seeded by its name: no worker starts with the trainer's weights.
    model = ByteTransformer.of_size(millions, zlib.crc32(name.encode())).eval()
    with (
        open_channel(address, "main") as main,
        WorkerSession(model, join=join, token=token, name=name, deadline_s=_DEADLINE_S) as session,
    ):
        main.wait_forever()
        Worker(name, model, session, main).run()
