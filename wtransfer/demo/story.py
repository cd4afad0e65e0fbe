"""Everything that was heard in one run of the demo, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.demo.life import Life
from wtransfer.demo.messages import (
    Applied,
    Held,
    Listening,
    Proof,
    Ready,
    RoundOver,
    Sample,
    Tokens,
    Trained,
)

if TYPE_CHECKING:
    from wtransfer.demo.messages import Report
    from wtransfer.demo.row import Row


@dataclass(frozen=True)
class Kill:
    """One worker was killed."""

    worker: str
    """Whose process."""
    number: int
    """In which round."""
    at: float
    """When it was gone."""


class Story:
    """Collects reports; judges nothing."""

    def __init__(self) -> None:
        self.listening: Listening | None = None
        """The trainer's first report."""
        self.first_loss: float | None = None
        """Loss of the first step."""
        self.trained: Trained | None = None
        """The last step."""
        self.held: Held | None = None
        """The transfer that stood still."""
        self.resumed_at: float | None = None
        """When it was told to go on."""
        self.rounds: list[RoundOver] = []
        """Rounds, in order."""
        self.rows: list[Row] = []
        """Their numbers, once all that belongs to a round was heard."""
        self.lives: dict[str, list[Life]] = {}
        """Worker -> its processes, in order."""
        self.kill: Kill | None = None
        """The kill."""
        self.samples: list[Sample] = []
        """Generated text."""
        self.events: list[str] = []
        """What happened beside the rounds, in words."""
        self.exits: dict[str, int] = {}
        """Child -> exit status, of those that were not killed."""

    def add(self, report: Report) -> None:
        """Take note of a report."""
        match report:
            case Listening():
                self.listening = report
            case Trained():
                self.first_loss = self.first_loss or report.loss
                self.trained = report
            case Held():
                self.held = report
            case RoundOver():
                self.rounds.append(report)
            case Sample():
                self.samples.append(report)
            case Ready() | Tokens() | Applied() | Proof():
                self._add_to_life(report)

    def _add_to_life(self, report: Ready | Tokens | Applied | Proof) -> None:
        match report:
            case Ready():
                self.lives.setdefault(report.worker, []).append(Life(report))
            case Tokens():
                self.life(report.worker).add_tokens(report)
            case Applied():
                self.life(report.worker).applied.append(report)
            case Proof():
                self.life(report.worker).proofs.append(report)

    def life(self, worker: str) -> Life:
        """Return a worker's present process."""
        return self.lives[worker][-1]

    def num_lives(self, worker: str) -> int:
        """Return how many processes a worker has had."""
        return len(self.lives.get(worker, []))

    def last_committed(self) -> RoundOver | None:
        """Return the last round that every worker of it committed."""
        return next((each for each in reversed(self.rounds) if each.outcome == "committed"), None)

    def round(self, number: int) -> RoundOver | None:
        """Return a round that is over."""
        return next((each for each in self.rounds if each.number == number), None)

    def is_proven(self, over: RoundOver) -> bool:
        """Whether every worker that committed a round has digested its live model since."""
        return all(
            any(life.proof_of(over.version) for life in self.lives.get(receipt.worker, []))
            for receipt in over.receipts
            if receipt.outcome == "committed"
        )
