"""What a push came to: for people, for machines, and as an exit code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wtransfer.errors import HostsError, WTransferError, to_wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wtransfer.commands.order import Order
    from wtransfer.weight_sync.report import Report, WorkerReport

ADVICE = {
    "pending": "it has verified the update, and applies it when its model gets to it",
    "restored": "it is on its old version, whole: see its log, then push again",
    "reverted": "it is on its old version, whole: another rank failed; push again",
    "discarded": "it is on its old version, whole: its host declined the update; push again",
    "empty": "it holds no whole version and must not serve: restart it, then push again",
    "lost": "it was lost, so nobody knows what it has: look at it, then push again",
    "dropped": "it was lost before the commit and left out: start it, then push again",
    "behind": "it took no part, or ranks of its instance are missing: push again",
}
"""What to do about a worker that did not commit, by its outcome."""

_COLUMNS = ("worker", "host", "outcome", "holds", "digests", "MB")
_NUM_LEFT = 5
"""Columns of text; the others are numbers."""


@dataclass
class Outcome:
    """A push that is over, or that never began."""

    order: Order
    """What was asked."""
    address: str | None = None
    """The publisher's."""
    hosts: dict[str, str | None] = field(default_factory=dict)
    """Worker by host."""
    report: Report | None = None
    """What the round came to."""
    error: WTransferError | None = None
    """Why there is no report."""
    exit_code: int | None = None
    """Set where a signal ended it."""

    @property
    def ok(self) -> bool:
        """Whether every worker has the update (dry run: has verified it)."""
        return self.report is not None and not self.problems()

    @property
    def code(self) -> int:
        """Exit code: 0 only if every worker has the update."""
        return (0 if self.ok else 1) if self.exit_code is None else self.exit_code

    @property
    def word(self) -> str:
        """``committed``, ``verified``, ``mixed``, ``failed`` or ``interrupted``."""
        if self.exit_code is not None:
            return "interrupted"
        if self.report is None:
            return "failed"
        if self.ok:
            return "verified" if self.report.dry_run else "committed"
        return "mixed"

    def problems(self) -> dict[str, str]:
        """Return what is wrong, and what to do, for every worker that has not the update."""
        if self.report is None:
            return {}
        found = {w.worker: _problem(w) for w in self.report.workers if not self._is_fine(w)}
        reported = {each.worker for each in self.report.workers}
        for worker in filter(None, self.hosts.values()):
            if worker not in reported:
                found[worker] = f"lost: {ADVICE['lost']}"
        return found

    def _is_fine(self, each: WorkerReport) -> bool:
        assert self.report is not None
        if each.outcome == "behind":
            # One that came by itself and too late was not asked for.
            return each.worker not in self.hosts.values()
        if self.report.dry_run:
            return each.outcome == "verified" and each.digests_equal
        is_current = each.fingerprint == self.report.fingerprint
        return each.outcome == "committed" and each.digests_equal and is_current

    def document(self) -> dict[str, Any]:
        """Return everything as plain data."""
        order, report = self.order, self.report
        document: dict[str, Any] = {
            "ok": self.ok,
            "outcome": self.word,
            "label": order.version,
            "dry_run": order.dry_run,
            "rollback": order.rollback is not None,
            "engine": order.engine,
            "checkpoint": None if order.checkpoint is None else str(order.checkpoint),
            "address": self.address,
            "hosts": self.hosts,
            "error": None if self.error is None else described(self.error),
        }
        if report is not None:
            document |= {
                "round_id": report.round_id,
                "fingerprint": report.fingerprint,
                "nbytes": report.nbytes,
                "seconds": report.seconds,
                "packed_s": report.packed_s,
                "nonfinite": report.nonfinite,
                "problems": self.problems(),
            }
        workers = report.workers if report is not None else ()
        return document | {"workers": [self._row(each) for each in workers]}

    def _row(self, each: WorkerReport) -> dict[str, Any]:
        return {
            "worker": each.worker,
            "host": self._host_of(each.worker),
            "instance": each.instance,
            "rank": each.rank,
            "outcome": each.outcome,
            "version": each.version,
            "fingerprint": each.fingerprint,
            "digests_equal": each.digests_equal,
            "nbytes": each.nbytes,
            "seconds": each.seconds,
            "notes": each.notes,
            "error": None if each.error is None else described(each.error),
        }

    def _host_of(self, worker: str) -> str | None:
        return next((host for host, name in self.hosts.items() if name == worker), None)

    def lines(self) -> Iterator[str]:
        """Yield the result as people read it."""
        report = self.report
        if report is None:
            return
        total = report.seconds.get("total", 0.0)
        label = printable(report.version)
        yield f"{label}  {self.word}  {report.nbytes / 1e6:.1f} MB in {total:.3f} s"
        yield f"fingerprint  {report.fingerprint}"
        phases = "  ".join(f"{phase} {s:.3f}" for phase, s in report.seconds.items())
        yield f"seconds here  {phases}  read {report.packed_s:.3f}"
        if report.nonfinite:
            yield f"{len(report.nonfinite)} tensors hold NaN or infinity"
        yield ""
        yield from self._table(report)
        for each in report.workers:
            yield from (printable(f"{each.worker}: {note}") for note in each.notes)

    def _table(self, report: Report) -> Iterator[str]:
        stages = list(dict.fromkeys(stage for w in report.workers for stage in w.seconds))
        yield from aligned(
            [(*_COLUMNS, *stages), *(self._cells(each, stages) for each in report.workers)]
        )

    def _cells(self, each: WorkerReport, stages: Sequence[str]) -> tuple[str, ...]:
        return (
            printable(each.worker),
            printable(self._host_of(each.worker) or "-"),
            each.outcome,
            printable(each.version or "-"),
            "equal" if each.digests_equal else "-",
            f"{each.nbytes / 1e6:.1f}",
            *(f"{each.seconds[stage]:.3f}" if stage in each.seconds else "-" for stage in stages),
        )

    def complaints(self) -> Iterator[str]:
        """Yield what went wrong, with what to do."""
        if self.error is not None:
            yield _printable_lines(f"push {self.word}: {self.error}")
        for worker, problem in self.problems().items():
            yield _printable_lines(f"{printable(worker)}  {problem}")


def _problem(each: WorkerReport) -> str:
    why = f" ({each.error})" if each.error is not None else ""
    advice = ADVICE.get(each.outcome, "its digests are others than those that were sent")
    return f"{each.outcome}: {advice}{why}"


def described(error: WTransferError) -> dict[str, Any]:
    """Return an error as plain data: class, text, facts, and those of every host."""
    kind, _, facts = to_wire(error)
    document: dict[str, Any] = {**facts, "type": kind, "message": str(error)}
    if isinstance(error, HostsError) and error.errors is not None:
        document["hosts"] = {host: described(each) for host, each in error.errors.items()}
    return document


def printable(text: str) -> str:
    """Return a text as one line that a terminal only shows: what would steer it is written out."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines of equal columns: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < _NUM_LEFT else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
