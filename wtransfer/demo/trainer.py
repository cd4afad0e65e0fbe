"""The trainer process: trains all the time, publishes when it is told to.

Run by the conductor as ``python -m wtransfer.demo.trainer NUM_LAYERS WIDTH``.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from wtransfer.demo.inbox import Inbox, StoppedError, report
from wtransfer.demo.learner import Learner
from wtransfer.demo.memcpy import Memcpy
from wtransfer.demo.messages import Held, Listening, Publish, Receipt, RoundOver, Trained
from wtransfer.demo.model import ByteTransformer
from wtransfer.demo.proof import weights_digest
from wtransfer.demo.sizes import ModelShape
from wtransfer.errors import WTransferError
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.trainer.source import ModuleSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wtransfer.weight_sync.report import Report

_SEED = 1
_JOIN_S = 120.0
# Large models take their time for a token, and for the tokens that a held transfer waits for.
_DEADLINE_S = 120.0
_HOLD_S = 100.0


class HoldableSource(ModuleSource):
    """A module's weights, with a place to stand still in the middle of a transfer.

    Args:
        module: The model.
        stand_still: Called, where `hold` is set, after half of the tensors were handed over, with
            their number and the number of all; the transfer goes on when it returns.
    """

    def __init__(self, module: torch.nn.Module, stand_still: Callable[[int, int], None]) -> None:
        super().__init__(module)
        self.hold = False
        """Whether the next pass stands still once."""
        self._stand_still = stand_still

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors."""
        num_tensors = len(self.metadata)
        for index, pair in enumerate(super().iter_full()):
            if self.hold and index == num_tensors // 2:
                self.hold = False
                self._stand_still(index, num_tensors)
            yield pair


class Trainer:
    """Trains and publishes.

    Args:
        model: The model.
        inbox: Commands.
    """

    def __init__(self, model: ByteTransformer, inbox: Inbox) -> None:
        self._learner = Learner(model)
        self._memcpy = Memcpy.of_model(model)
        self._inbox = inbox
        self._source = HoldableSource(model, self._stand_still)
        self._publisher = Publisher(self._source, engine="shm", deadline_s=_DEADLINE_S)

    def run(self) -> None:
        """Train until the conductor ends it."""
        with self._publisher:
            num_parameters = self._learner.model.num_parameters()
            report(Listening(self._publisher.address, num_parameters))
            while True:
                command = self._inbox.poll()
                if isinstance(command, Publish):
                    report(self._publish(command))
                else:
                    self._train()

    def _train(self) -> None:
        self._learner.step()
        report(Trained(self._learner.steps, self._learner.loss))

    def _publish(self, command: Publish) -> RoundOver:
        self._publisher.wait_for_workers(command.num_workers, timeout_s=_JOIN_S)
        self._source.hold = command.hold
        published = RoundOver(
            number=command.number,
            version=f"step-{self._learner.steps}",
            outcome="aborted",
            step=self._learner.steps,
            loss=self._learner.loss,
            digest=weights_digest(self._learner.model),
            memcpy_s=self._memcpy.seconds(),
            started_at=time.monotonic(),
        )
        try:
            return self._committed(published, self._transfer(published.version))
        except WTransferError as error:
            total_s = time.monotonic() - published.started_at
            return replace(
                published,
                total_s=total_s,
                error=str(error),
                blamed=error.worker,
                failed_in=error.phase,
            )

    def _transfer(self, version: str) -> Report:
        running = self._publisher.publish(version=version, wait=False)
        running.packed()
        # From here the engine has its own copy: the next step changes the weights while the
        # workers still verify and commit the old ones. If it had not, the digests would differ.
        self._train()
        return running.result()

    def _committed(self, published: RoundOver, got: Report) -> RoundOver:
        return replace(
            published,
            outcome=got.outcome,
            fingerprint=got.fingerprint,
            nbytes=got.nbytes,
            packed_s=got.packed_s,
            total_s=got.seconds["total"],
            receipts=tuple(
                Receipt(
                    worker=each.worker,
                    outcome=each.outcome,
                    fingerprint=each.fingerprint,
                    digests_equal=each.digests_equal,
                    waited_s=each.seconds.get("wait", 0.0),
                )
                for each in got.workers
            ),
        )

    def _stand_still(self, num_sent: int, num_tensors: int) -> None:
        # Runs wherever the engine iterates its source. The main thread is inside `_transfer` then
        # and reads no commands, so the one that arrives now is the Resume. Should none come, the
        # transfer goes on by itself and the conductor's verdict says what was missing.
        report(Held(time.monotonic(), num_sent, num_tensors))
        self._inbox.wait(_HOLD_S)


def main() -> None:
    """Run the trainer until standard input ends."""
    torch.set_num_threads(1)
    shape = ModelShape(*map(int, sys.argv[1:3]))
    try:
        Trainer(ByteTransformer(shape, _SEED), Inbox.of_stdin()).run()
    except StoppedError:
        return


if __name__ == "__main__":
    main()
