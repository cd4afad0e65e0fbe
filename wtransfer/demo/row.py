"""One line of the table: a round in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wtransfer.demo.life import Life
    from wtransfer.demo.messages import Applied, RoundOver
    from wtransfer.demo.story import Story


@dataclass(frozen=True)
class Row:
    """A round in numbers. Gaps are between two generated tokens, the longest of all workers."""

    number: int
    """Number of the round."""
    step: int
    """Optimizer steps in the weights."""
    loss: float
    """Cross entropy, nats per byte."""
    version: str
    """Label."""
    outcome: str
    """``committed``, ``mixed`` or ``aborted``."""
    fingerprint: str | None
    """Identity of the weights."""
    nbytes: int
    """Bytes of the update."""
    seconds: float | None
    """From ``publish`` to the last receipt."""
    packed_s: float | None
    """Until the trainer could train on."""
    gb_per_s: float | None
    """Bytes by seconds, in 10^9 per second."""
    memcpy_share: float | None
    """Time of a plain copy of the same bytes, just before, divided by `seconds`."""
    commit_pause_s: float | None
    """Longest time that a worker's serving thread spent in the commit."""
    gap_normal_s: float | None
    """Longest gap between the round before and this one."""
    gap_transfer_s: float | None
    """Longest gap from ``publish`` to the commit."""
    gap_commit_s: float | None
    """Longest gap around a commit."""
    num_receipts: int
    """Workers of the round."""
    num_equal: int
    """Of these, whose live model has the trainer's digest."""


def row_of(story: Story, over: RoundOver) -> Row:
    """Return the numbers of a round.

    Args:
        story: With the workers' tokens and proofs of the round.
        over: The round.
    """
    done = over.outcome == "committed"
    return Row(
        number=over.number,
        step=over.step,
        loss=over.loss,
        version=over.version,
        outcome=over.outcome,
        fingerprint=over.fingerprint,
        nbytes=over.nbytes,
        seconds=over.total_s if done else None,
        packed_s=over.packed_s if done else None,
        gb_per_s=over.nbytes / over.total_s / 1e9 if done else None,
        memcpy_share=over.memcpy_s / over.total_s if done else None,
        commit_pause_s=_longest_commit(story, over, lambda _, got: got.ended_at - got.started_at),
        gap_normal_s=_gap_before(story, over),
        gap_transfer_s=_gap_in_transfer(story, over),
        gap_commit_s=_longest_commit(story, over, lambda life, got: life.gap_around(got)),
        num_receipts=len(over.receipts),
        num_equal=sum(_is_equal(story, over, receipt.worker) for receipt in over.receipts),
    )


def all_lives(story: Story) -> list[Life]:
    """Return every worker process there was."""
    return [life for lives in story.lives.values() for life in lives]


def usual_gap(story: Story) -> float | None:
    """Return the median gap between two tokens of the slowest worker process, in seconds."""
    return longest(life.median_gap() for life in all_lives(story))


def longest(gaps: Iterable[float | None]) -> float | None:
    """Return the longest of the gaps that are known, or None if none is."""
    return max((gap for gap in gaps if gap is not None), default=None)


def _longest_commit(
    story: Story, over: RoundOver, measure: Callable[[Life, Applied], float | None]
) -> float | None:
    commits = [(life, life.applied_version(over.version)) for life in all_lives(story)]
    return longest(measure(life, applied) for life, applied in commits if applied)


def _gap_before(story: Story, over: RoundOver) -> float | None:
    ends = [_end(each) for each in story.rounds if each.number < over.number]
    since = max(ends, default=0.0)
    return longest(life.longest_gap(since, over.started_at) for life in all_lives(story))


def _gap_in_transfer(story: Story, over: RoundOver) -> float | None:
    gaps = []
    for life in all_lives(story):
        applied = life.applied_version(over.version)
        until = applied.started_at if applied else _end(over)
        gaps.append(life.longest_gap(over.started_at, until))
    return longest(gaps)


def _end(over: RoundOver) -> float:
    return over.started_at + over.total_s


def _is_equal(story: Story, over: RoundOver, worker: str) -> bool:
    proofs = [life.proof_of(over.version) for life in story.lives[worker]]
    return any(proof is not None and proof.digest == over.digest for proof in proofs)
