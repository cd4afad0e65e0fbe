"""The conductor: starts the processes, says when to publish, kills one, sees everybody off."""

from __future__ import annotations

import os
import queue
import secrets
import time
from typing import TYPE_CHECKING, Protocol

from wtransfer.deadline import Deadline
from wtransfer.demo.child import Child, Ended
from wtransfer.demo.messages import Join, Prove, Publish, Report, Resume, RoundOver
from wtransfer.demo.row import row_of
from wtransfer.demo.story import Kill, Story
from wtransfer.demo.verdict import WITNESS_TOKENS
from wtransfer.errors import PeerLostError, WTransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from wtransfer.demo.sizes import ModelShape

WORKERS = ("worker-0", "worker-1")
"""Names of the workers."""
VICTIM = WORKERS[1]
"""The one that is killed."""
MIN_ROUNDS = 4
"""One to have an old version, one to die in, one without the dead, one to catch up."""
_TRAIN_S = 2.2
_STEP_S = 180.0
_END_S = 60.0
# After a failure a child may be stuck in a wait for what will not come.
_FAILED_END_S = 5.0
_POLL_S = 0.2


class View(Protocol):
    """Whatever shows a story while it is being told."""

    def show(self, story: Story) -> None:
        """Show it as it is now. Called after every report; must return quickly."""


class Conductor:
    """Runs the demo once. Use as a context manager: leaving it ends every process.

    Args:
        shape: Of the model.
        num_rounds: At least `MIN_ROUNDS`.
        view: Shows the story.
    """

    def __init__(self, shape: ModelShape, num_rounds: int, view: View) -> None:
        self.story = Story()
        """What happened so far."""
        self._shape = shape
        self._num_rounds = num_rounds
        self._kill_round = max(2, num_rounds // 2)
        self._view = view
        self._reports: queue.SimpleQueue[Report | Ended] = queue.SimpleQueue()
        self._environ = {
            **os.environ,
            "WTRANSFER_TOKEN": secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
        }
        self._children: dict[str, Child] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end_all(_END_S if kind is None else _FAILED_END_S)

    def start(self) -> None:
        """Start every process and let the workers join; most of its time is imports.

        Raises:
            WTransferError: As `run`.
        """
        self._start_child("trainer", "wtransfer.demo.trainer")
        for worker in WORKERS:
            self._start_child(worker, "wtransfer.demo.worker", worker)
        self._until(lambda: self.story.listening is not None, "the trainer to start")
        for worker in WORKERS:
            self._join(worker)
        self._until(
            lambda: all(self.story.num_lives(worker) for worker in WORKERS), "the workers to start"
        )

    def run(self) -> Story:
        """Tell the whole story, after `start`.

        Returns:
            The story, to be judged.

        Raises:
            WTransferError: A process ended that should not have, or did not do its part in time.
        """
        for number in range(1, self._num_rounds + 1):
            self._let_it_train()
            if number == self._kill_round:
                self._round_with_a_kill(number)
            elif number == self._kill_round + 1:
                self._round(number, num_workers=len(WORKERS) - 1)
                self._come_back()
            else:
                self._round(number, num_workers=len(WORKERS))
        self._end_all(_END_S)
        return self.story

    # -- the story ------------------------------------------------------------------------------

    def _let_it_train(self) -> None:
        """Let the trainer take steps for a while: one at least, however slow it is."""
        before, deadline = self.story.trained, Deadline(_TRAIN_S)
        self._until(
            lambda: deadline.expired and self.story.trained is not before, "an optimizer step"
        )

    def _round(self, number: int, num_workers: int) -> None:
        self._publish(number, hold=False, num_workers=num_workers)
        over = self._result(number)
        self._until(lambda: self.story.is_proven(over), f"the proofs of {over.version}")
        self.story.rows.append(row_of(self.story, over))

    def _round_with_a_kill(self, number: int) -> None:
        """Kill a worker while half of the tensors are under way, and no more than half."""
        self._publish(number, hold=True, num_workers=len(WORKERS))
        self._until(lambda: self.story.held is not None, "the middle of a transfer")
        for worker in WORKERS:
            self._see_tokens(worker)
        self._kill(number)
        survivor = WORKERS[0]
        self._see_tokens(survivor)
        self.story.resumed_at = time.monotonic()
        self._children["trainer"].send(Resume())
        over = self._result(number)
        self._see_proof(survivor)
        self.story.rows.append(row_of(self.story, over))
        # It imports torch while the next round is done without it.
        self._start_child(VICTIM, "wtransfer.demo.worker", VICTIM)

    def _come_back(self) -> None:
        self._join(VICTIM)
        self._until(lambda: self.story.num_lives(VICTIM) > 1, f"the new {VICTIM}")
        ready = self.story.life(VICTIM).ready
        self.story.events.append(
            f"{VICTIM} is back as process {ready.pid}: {ready.state}, has "
            f"{ready.version or 'no version'} ({ready.fingerprint[:14]})"
        )
        self._see_catch_up()

    def _see_catch_up(self) -> None:
        """Wait until the returned worker has what the others have, without a round of its own."""
        life, last = self.story.life(VICTIM), self.story.last_committed()
        assert last is not None
        self._until(lambda: life.proof_of(last.version) is not None, f"{VICTIM} to catch up")
        self.story.events.append(f"{VICTIM} caught up: has {life.version} ({life.fingerprint[:8]})")

    def _kill(self, number: int) -> None:
        self._children.pop(VICTIM).kill()
        self.story.kill = Kill(VICTIM, number, time.monotonic())
        self.story.events.append(f"{VICTIM} killed (SIGKILL) in the middle of round {number}")

    def _see_tokens(self, worker: str) -> None:
        """Wait until a worker has generated something since now."""
        now = time.monotonic()
        life = self.story.life(worker)
        self._until(
            lambda: len(life.versions_between(now, float("inf"))) >= WITNESS_TOKENS,
            f"{WITNESS_TOKENS} tokens of {worker}",
        )

    def _see_proof(self, worker: str) -> None:
        """Let a worker digest its live model once more."""
        life = self.story.life(worker)
        before = len(life.proofs)
        self._children[worker].send(Prove())
        self._until(lambda: len(life.proofs) > before, f"a digest of {worker}")

    # -- its parts --------------------------------------------------------------------------------

    def _start_child(self, name: str, module: str, *arguments: str) -> None:
        shape = (str(self._shape.num_layers), str(self._shape.width))
        self._children[name] = Child(
            name, module, (*arguments, *shape), self._environ, self._reports.put
        )

    def _join(self, worker: str) -> None:
        assert self.story.listening is not None
        self._children[worker].send(Join(self.story.listening.address))

    def _publish(self, number: int, *, hold: bool, num_workers: int) -> None:
        self._children["trainer"].send(Publish(number, hold, num_workers))

    def _result(self, number: int) -> RoundOver:
        self._until(lambda: self.story.round(number) is not None, f"the end of round {number}")
        over = self.story.round(number)
        assert over is not None
        return over

    def _end_all(self, timeout_s: float) -> None:
        # All are asked before the first is waited for, so that they end side by side.
        for child in self._children.values():
            child.ask_to_end()
        while self._children:
            name, child = self._children.popitem()
            self.story.exits[name] = child.end(timeout_s)
        self._hear_the_rest()

    def _hear_the_rest(self) -> None:
        while not self._reports.empty():
            report = self._reports.get()
            if not isinstance(report, Ended):
                self.story.add(report)

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        """Listen until something is true.

        Raises:
            StallError: It took too long.
            WTransferError: A process ended, or wrote what is no report.
        """
        deadline = Deadline(_STEP_S)
        while not reached():
            deadline.check(what)
            try:
                self._hear(self._reports.get(timeout=_POLL_S))
            except queue.Empty:
                continue

    def _hear(self, report: Report | Ended) -> None:
        if isinstance(report, Ended):
            self._check_expected(report)
            return
        self.story.add(report)
        self._view.show(self.story)

    def _check_expected(self, ended: Ended) -> None:
        child = ended.child
        if self._children.get(child.name) is not child:
            return  # The one that was killed.
        if isinstance(ended.error, WTransferError):
            raise ended.error
        raise PeerLostError(
            f"the demo's {child.name} (pid {child.pid}) ended; it said:\n{child.last_words()}",
            worker=child.name,
        ) from ended.error
