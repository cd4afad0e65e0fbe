"""Outcome of a round for every worker: the proof that a publisher hands out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wtransfer.deadline import LONGEST_S
from wtransfer.errors import CommitError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.errors import WTransferError

_DO_NOT_COUNT = ("behind", "gone")
"""Outcomes of workers that joined by themselves, and that `Report.ok` does not wait for."""
_LEFT_OUT = ("dropped", *_DO_NOT_COUNT)
_RESTORED = ("restored", "reverted", "discarded")
_NUM_NAMED = 4
"""Workers that an error names; its report has all."""
_NUM_CELLS = 60
"""Width of the longest bar of `Report.stages`."""


def printable(text: str) -> str:
    """Return a text as one line that cannot steer a terminal: control characters are escaped."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


@dataclass(frozen=True)
class WorkerInfo:
    """A worker as its publisher knows it."""

    worker: str
    """Name."""
    instance: str
    """Serving instance."""
    rank: int
    """Rank within the instance."""
    num_ranks: int
    """Ranks of the instance."""
    version: str | None
    """Label of the held weights."""
    fingerprint: str
    """Identity of the held weights."""
    state: str
    """fresh, serving, pending, behind or empty; lost, of one that is not joined any more."""
    since_s: float = 0.0
    """Seconds since the held weights or the state last changed; at most since it has joined."""
    host: str | None = None
    """Host of the publisher's list that let it join; None: it has joined by itself."""
    nbytes: int | None = None
    """Bytes that it has staged in the round under way; None: it takes no part in one."""
    last_error: str | None = None
    """Why its last update was refused or not applied; None once one is applied."""


@dataclass(frozen=True)
class WorkerReport:
    """Outcome of a round for one worker."""

    worker: str
    """Name."""
    instance: str
    """Serving instance."""
    rank: int
    """Rank within the instance."""
    outcome: str
    """``committed``; ``verified`` (a dry run: dropped after its proof); ``pending`` (verified, this
    or an earlier update, and not applied yet; or applied, and its serving engine has not returned
    from the call in which it was); ``restored``, ``reverted`` or ``discarded`` (on its
    old version, whole); ``empty`` (must not serve); ``lost`` (gone after the commit was sent, its
    weights unknown); ``dropped`` (left out of the round: the worker or a rank of its instance was
    lost or refused the plan before the commit, or its host was absent when the round began);
    ``behind`` (joined by itself, and not yet brought up to date: too late for the round, or left
    out of it); ``gone`` (joined by itself, had held a version, and has not come back)."""
    version: str | None
    """Label of the weights held now."""
    fingerprint: str
    """Identity of the weights held now."""
    digests_equal: bool = False
    """True if the worker's own digest of every piece equals the sender's."""
    nbytes: int = 0
    """Bytes that the worker staged and verified."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by stage: accept, transfer, verify, wait (for the model's thread), commit."""
    notes: list[str] = field(default_factory=list)
    """Notes of the worker's `Accept`."""
    error: WTransferError | None = None
    """Why the worker did not commit."""
    host: str | None = None
    """Host by which it joined, as the user wrote it; None: it joined by itself."""

    @property
    def label(self) -> str:
        """Name for people: the host, as they wrote it, and the worker behind it."""
        return self.worker if self.host in (None, self.worker) else f"{self.host} ({self.worker})"


@dataclass(frozen=True)
class Report:
    """Outcome of a round. ``print(report)`` shows a table."""

    version: str
    """Label."""
    fingerprint: str
    """Identity of the weights that were sent."""
    round_id: str
    """Round."""
    nbytes: int
    """Bytes of the update."""
    workers: tuple[WorkerReport, ...]
    """Every worker that took part, every named host, late joiners, and workers that are gone."""
    seconds: dict[str, float]
    """Seconds by phase: init, plan, transfer, prepare, commit and finish, which add up to total."""
    packed_s: float
    """Seconds until the trainer could change its weights again."""
    nonfinite: dict[str, int] = field(default_factory=dict)
    """Tensors with NaN or infinity -> how many of their elements; empty where the publisher does
    not look for them (``nonfinite="allow"``)."""
    dry_run: bool = False
    """True if the round was to end before the commit."""
    with_config: bool = False
    """True if the update had its model's configuration, which serving engines compare with that of
    their checkpoint; a plain mapping or module has none."""

    @property
    def outcome(self) -> str:
        """``committed`` if the report is `ok`, else ``mixed``; ``verified``: a dry run.

        A round that not every worker has verified raises and has no report.
        """
        if self.dry_run:
            return "verified"
        return "committed" if self.ok else "mixed"

    @property
    def ok(self) -> bool:
        """True if every named host and every worker of the round has proven to hold the update.

        After a dry run: to have received it. Workers that joined by themselves do not
        count if they came too late, were left out before they had held a version, or have left:
        ``min_workers`` guards against that.
        """
        return is_ok(self)

    @property
    def holders(self) -> tuple[WorkerReport, ...]:
        """Workers that have proven that they hold the update, after a commit."""
        return tuple(filter(self._is_held_by, self.workers))

    def raise_unless_ok(self, *, left_out: bool = False) -> Report:
        """Return this report if it is `ok`: for a caller that goes on with every worker or stops.

        Args:
            left_out: True to accept that hosts or workers were dropped
                (``on_lost_worker="drop"``).

        Raises:
            CommitError: A named host, or a worker of the round, does not hold the update.
        """
        if not is_ok(self, left_out=left_out):
            raise commit_error(self)
        return self

    def stages(self) -> str:
        """Return the seconds of each stage as bars: the publisher's, and one for every worker.

        All bars have one scale. A stage is drawn by a letter of its name, the first one that no
        earlier stage has taken, and the last line lists them. Stages of a worker stand one after
        the other, without the time between them in which it waits for the publisher.
        """
        phases = {phase: s for phase, s in self.seconds.items() if phase != "total"}
        named = [("publisher", phases)]
        named += [(each.label, each.seconds) for each in self.workers if each.seconds]
        # A worker may be on another host: its numbers are any, NaN too, and its names any text.
        bars = [
            (
                printable(name),
                {printable(k): s if 0 <= s <= LONGEST_S else 0.0 for k, s in of.items()},
            )
            for name, of in named
        ]
        letters: dict[str, str] = {}
        for stage in (stage for _, seconds in bars for stage in seconds):
            free = (c for c in stage if c.isalnum() and c not in letters.values())
            letters.setdefault(stage, next(free, "?"))
        longest = max(sum(seconds.values()) for _, seconds in bars) or 1.0
        width = max(len(name) for name, _ in bars)
        lines = [
            f"{name.ljust(width)}  {_bar(seconds, letters, longest).ljust(_NUM_CELLS)}  "
            f"{sum(seconds.values()):.3f} s"
            for name, seconds in bars
        ]
        legend = "  ".join(f"{letter} {stage}" for stage, letter in letters.items())
        return "\n".join([*lines, f"{' ' * width}  {legend}"])

    def _is_held_by(self, each: WorkerReport) -> bool:
        return (
            each.outcome == "committed"
            # A named host that was lost since may be back on the weights that it starts with.
            and (each.host is None or each.error is None)
            and each.digests_equal
            and each.fingerprint == self.fingerprint
        )

    def __str__(self) -> str:
        head = (
            f"{printable(self.version)}  {self.outcome}  {self.nbytes / 1e6:.1f} MB in "
            f"{self.seconds.get('total', 0.0):.3f} s  {self.fingerprint}"
        )
        phases = [f"{name} {s:.3f}s" for name, s in self.seconds.items() if name != "total"]
        lines = [f"  publisher  {'  '.join(phases)}"] if phases else []
        return "\n".join([head, *lines, *(printable(_line(each)) for each in self.workers)])


def _bar(seconds: Mapping[str, float], letters: Mapping[str, str], longest: float) -> str:
    drawn, end_s = "", 0.0
    for stage, each_s in seconds.items():
        # From the sum: the rounding of short stages does not add up.
        end_s += each_s
        drawn += letters[stage] * (round(end_s / longest * _NUM_CELLS) - len(drawn))
    return drawn


def _line(each: WorkerReport) -> str:
    stages = "  ".join(f"{stage} {seconds:.3f}s" for stage, seconds in each.seconds.items())
    proof = f"{each.nbytes} bytes, digests equal" if each.digests_equal else "nothing proven"
    why = f"  {each.error}" if each.error else ""
    if each.error and each.outcome == "committed":
        why = f"  it committed, and was lost afterwards: {each.error}"
    elif each.error and each.outcome == "lost":
        why = f"  which version it holds it says when it joins again: {each.error}"
    return f"  {each.label}  {each.outcome}  holds {each.version}  {proof}  {stages}{why}"


def _why(each: WorkerReport) -> str:
    if each.error is not None:
        return f": {each.error.message}"
    reasons = {
        "pending": "verified, and not applied in time",
        "committed": "it holds other weights",
    }
    return f": {reasons[each.outcome]}" if each.outcome in reasons else ""


def is_ok(report: Report, *, left_out: bool = False) -> bool:
    """Return whether a report is `ok`; with `left_out`, but for what was dropped."""
    skipped = _LEFT_OUT if left_out else _DO_NOT_COUNT
    counted = [each for each in report.workers if each.outcome not in skipped]
    if report.dry_run:
        return all(each.digests_equal for each in counted)
    holders = report.holders
    return all(each in holders for each in counted)


def commit_error(report: Report) -> CommitError:
    """Return the error of a round whose commit has not brought its update to every worker."""
    holders = report.holders
    num = len(holders)
    total = sum(each in holders or each.outcome not in _DO_NOT_COUNT for each in report.workers)
    head = f"{num} of {total} workers hold" if num else "no worker holds"
    missed = [each for each in report.workers if each not in holders]
    # Last: those that took no part, or were lost before the commit.
    missed.sort(key=lambda each: each.outcome in _LEFT_OUT)
    lines = [f"\n  {each.label} {each.outcome}{_why(each)}" for each in missed[:_NUM_NAMED]]
    if len(missed) > _NUM_NAMED:
        lines.append(f"\n  and {len(missed) - _NUM_NAMED} more")
    return CommitError(
        f"{head} {report.version!r} after its commit; mend what is named, then publish again:"
        + "".join(lines),
        restored=all(each.outcome in (*_RESTORED, "gone") for each in report.workers),
        report=report,
        round_id=report.round_id,
        version=report.version,
        phase="commit",
    )
