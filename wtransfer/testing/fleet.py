"""A publisher and its workers in one process, stepped by hand."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from wtransfer.deadline import Deadline
from wtransfer.errors import CommitError
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.trainer.source import StateDictSource
from wtransfer.weight_sync.worker.session import WorkerSession

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn
    from typing_extensions import Self

    from wtransfer.weight_sync.report import Report
    from wtransfer.weight_sync.trainer.round_handle import Round
    from wtransfer.weights import WeightSource, WeightTarget

STEP_S = 0.005
_POLL_S = 0.001
_RANK_PATIENCE_S = 0.05
_COMMIT_S = 0.02


@contextlib.contextmanager
def committing(session: WorkerSession) -> Iterator[None]:
    """Have a worker commit whenever it can within the block, on a thread: its model "steps".

    Args:
        session: The worker's; its publisher reports the errors of a commit.
    """
    over = threading.Event()

    def commit() -> None:
        while not over.is_set():
            with contextlib.suppress(CommitError):
                session.commit_pending(_COMMIT_S)

    thread = threading.Thread(target=commit, name="steps")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class GatedSource(StateDictSource):
    """A source whose passes wait at a tensor while the gate is closed.

    Args:
        tensors: The weights.
        gate_at: Number of the tensor; the first is 0.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], gate_at: int = 1) -> None:
        super().__init__(tensors)
        self.tensors = tensors
        self.gate_at = gate_at
        """Number of the tensor at which a pass waits."""
        self.reached = threading.Event()
        """Set once a pass is at the gate."""
        self.gate = threading.Event()
        """Open while it is set, as at the beginning."""
        self.gate.set()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, and wait at one of them."""
        for number, pair in enumerate(super().iter_full()):
            if number == self.gate_at:
                self.reached.set()
                self.gate.wait()
            yield pair


@dataclass(eq=False)
class Member:
    """One worker of a fleet."""

    model: Any
    """The target of its session."""
    session: WorkerSession
    """Its session."""

    @property
    def contents(self) -> dict[str, tuple[str, tuple[int, ...], str]]:
        """Dtype, shape and digest of each of its tensors."""
        model = self.model
        return contents(model.state_dict() if isinstance(model, torch.nn.Module) else model)


class Fleet:
    """Publishes to workers of this process, whose models "step" while a round is waited for.

    Args:
        source: Model or source, as `Publisher` takes it.
        engine: Name of the engine.
        deadline_s: Bound on every wait of either side, in seconds.
        **options: Further arguments of `Publisher`.
    """

    def __init__(
        self,
        source: nn.Module | Mapping[str, torch.Tensor] | WeightSource,
        *,
        engine: str = "shm",
        deadline_s: float = 10.0,
        **options: Any,
    ) -> None:
        self.source = source
        self.engine = engine
        self.deadline_s = deadline_s
        self.publisher = Publisher(source, engine=engine, deadline_s=deadline_s, **options)
        self.members: list[Member] = []
        self._num_joined = 0
        self.commit_errors: list[CommitError] = []
        """Errors of `WorkerSession.commit_pending` while rounds were waited for."""

    def join(
        self,
        model: nn.Module | Mapping[str, torch.Tensor] | WeightTarget | None = None,
        **options: Any,
    ) -> Member:
        """Add a worker and wait until the publisher knows it.

        Args:
            model: Target of its session; None: tensors like those of a source that is a mapping.
            **options: Further arguments of `WorkerSession`.
        """
        if model is None:
            assert isinstance(self.source, dict), "give a model for a source that is no dict"
            model = {name: torch.zeros_like(tensor) for name, tensor in self.source.items()}
        options.setdefault("name", f"worker-{self._num_joined}")
        self._num_joined += 1
        session = WorkerSession(
            model,
            join=self.publisher.address,
            token=self.publisher.token,
            deadline_s=self.deadline_s,
            **options,
        )
        member = Member(model, session)
        self.members.append(member)
        self._await_hello(session.status().worker)
        return member

    def adopt(self, member: Member) -> None:
        """Have a worker join that has left its publisher, and wait until this one knows it."""
        publisher = self.publisher
        member.session.join(publisher.address, token=publisher.token)
        self.members.append(member)
        self._await_hello(member.session.status().worker)

    def leave(self, member: Member) -> None:
        """Close a worker's session and wait until the publisher knows that it is gone."""
        self.members.remove(member)
        member.session.close()
        deadline, name = Deadline(self.deadline_s), member.session.status().worker
        while self._knows(name):
            deadline.check(f"the end of {name}")
            time.sleep(_POLL_S)

    def publish(self, version: str) -> Report:
        """Run one round; workers commit it as soon as they can.

        Raises:
            WTransferError: As `Publisher.publish`.
        """
        # A round waits for a worker that is catching up, which takes steps, too.
        with ThreadPoolExecutor(1) as pool:
            beginning = pool.submit(self.publisher.publish, version, wait=False)
            while not beginning.done():
                self.step()
        return self.finish(beginning.result())

    def finish(self, round_: Round) -> Report:
        """Step every worker until the round is over, and return its report.

        Raises:
            WTransferError: As `Publisher.publish`.
        """
        while not round_.done:
            self.step()
        return round_.result()

    def step(self) -> None:
        """Let every worker commit what it has, as its model would between two steps.

        Workers step at the same time: the ranks of one instance wait for each other. Where a rank
        waits for one that had received nothing yet, the latter steps again.
        """
        running = {member: self._start_step(member) for member in self.members}
        while not _joined(running.values(), _RANK_PATIENCE_S):
            for member, thread in running.items():
                if not thread.is_alive():
                    running[member] = self._start_step(member)

    def close(self) -> None:
        """Close every session and the publisher, and forget the models."""
        # The frames of these errors hold staged tensors.
        self.commit_errors.clear()
        with contextlib.ExitStack() as stack:
            stack.callback(self.publisher.close)
            while self.members:
                # A model that adopted shared memory holds it for as long as it is referenced.
                stack.callback(self.members.pop().session.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_step(self, member: Member) -> threading.Thread:
        thread = threading.Thread(target=self._step, args=(member,), name="step")
        thread.start()
        return thread

    def _step(self, member: Member) -> None:
        try:
            member.session.commit_pending(STEP_S)
        except CommitError as error:
            self.commit_errors.append(error)

    def _await_hello(self, name: str) -> None:
        deadline = Deadline(self.deadline_s)
        while not self._knows(name):
            deadline.check(f"the hello of {name}", worker=name)
            time.sleep(_POLL_S)

    def _knows(self, name: str) -> bool:
        return any(worker.worker == name for worker in self.publisher.workers())


def _joined(threads: Iterable[threading.Thread], timeout_s: float) -> bool:
    """Wait for all threads, at most `timeout_s`; return whether they have ended."""
    deadline = Deadline(timeout_s)
    for thread in threads:
        thread.join(deadline.remaining())
        if thread.is_alive():
            return False
    return True
