"""Rows of every bench with their goals, and the processes that run the cases of a row.

A row is measured by running cases. A case is one trainer process and its workers; the trainer's end
is the end of the case, and what the functions return is its outcome. Nothing of a run outlives the
bench, however it ends: its children are killed, its folder is removed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import operator
import secrets
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from wtransfer.deadline import Deadline
from wtransfer.errors import PeerLostError, StallError, WTransferError
from wtransfer.testing.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from typing_extensions import Self

    from wtransfer.testing.zygote import Child

MIB = 1 << 20
"""Bytes."""
BESIDE_NBYTES = 1 << 30
"""Memory of processes, messages and file cache beside the data that is measured."""
CASE_S = 600.0
"""Longest time that a case may take, in seconds."""
LEAVE_S = 10.0
"""How long workers may take to end after their trainer, in seconds."""
MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - mkdtemp makes a name there that cannot be guessed
"""Where files of a run are, unless it asks for another folder."""

_POLL_S = 0.05
_TAIL_NBYTES = 2000

# A process of its own: its standard input ends when the bench does, even by SIGKILL. The bench's
# children are killed at that moment as well and may just be writing, so rm is tried again.
_REMOVE = 'cat; for _ in 1 2 3 4 5 6 7 8; do rm -rf -- "$1" && exit; sleep 0.5; done'


def format_nbytes(nbytes: int) -> str:
    """Return a size with the largest unit that fits."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"


def format_number(value: float) -> str:
    """Return a number with as many digits as are worth reading."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004


def format_numbers(numbers: Mapping[str, float]) -> str:
    """Return numbers after their names, in one line."""
    return ", ".join(f"{name} {format_number(value)}" for name, value in numbers.items())


# -- rows ------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """Several measurements of one thing."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one measurement."""
        known = list(values)
        return cls(statistics.median(known), min(known), max(known))


class Goal(NamedTuple):
    """Goal of the median of a row."""

    relation: Literal[">=", "<="]
    value: float


@dataclass(frozen=True)
class Result:
    """Measurements of a row."""

    spread: Spread
    unit: str = ""
    """Of the spread; empty for a ratio."""
    goal: Goal | None = None
    """None: the number only stands beside others."""
    beside: dict[str, float] = field(default_factory=dict)
    """Numbers of the same run to compare with; names end in their unit where they have one."""
    stages: dict[str, float] = field(default_factory=dict)
    """Median seconds of the parts of a round."""
    limit: float | None = None
    """Bound of every single measurement."""
    note: str = ""
    """Note without which the number cannot be read."""

    @property
    def reached(self) -> bool | None:
        """True if the goal is reached; None where there is none."""
        if self.goal is None:
            return None
        compare = {">=": operator.ge, "<=": operator.le}[self.goal.relation]
        within = self.limit is None or self.spread.high <= self.limit
        return within and bool(compare(self.spread.median, self.goal.value))


class Row(NamedTuple):
    """One number of a bench."""

    name: str
    """Stable name, for ``--only`` and ``--json``."""
    what: str
    """In words."""
    measure: Callable[[Runner], Result]
    """Raises a `WTransferError` if it cannot be measured."""


def measure_rows(
    rows: Sequence[Row], runner: Runner, report: Callable[[str], None]
) -> dict[Row, Result | str]:
    """Measure row after row; one that fails yields its error, and the next one is measured.

    Args:
        rows: What to measure.
        runner: Runs the cases of all rows.
        report: Called with the number and name of each row before it is measured.
    """
    results: dict[Row, Result | str] = {}
    for number, row in enumerate(rows, 1):
        report(f"{number}/{len(rows)} {row.name}")
        try:
            results[row] = row.measure(runner)
        except WTransferError as error:
            results[row] = str(error)
    return results


# -- processes -------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """First argument of the functions of a case."""

    rank: int
    """Of this process; 0 is the trainer."""
    num_workers: int
    address: str
    """Where a publisher may listen."""
    token: str
    folder: str
    """For files of this case; removed after it."""


class Outcome(NamedTuple):
    """Results of the functions of a case."""

    trainer: Any
    workers: list[Any]
    """Of the workers that have returned, by rank."""


class Runner:
    """Runs cases in processes forked from one that has imported torch. Use it as a context manager.

    Args:
        modules: Modules of the functions to run; the process to fork from imports them.
        folder: Where files go during a run, in a folder of their own; None: into memory.
        report: Called with the name of each case before it is run.

    Raises:
        OSError: There is no such folder, or it cannot be written to.
        PeerLostError: A module could not be imported.
    """

    def __init__(
        self,
        modules: Sequence[str],
        folder: str | None = None,
        report: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self._report = report
        self._known: dict[str, Outcome | WTransferError] = {}
        self.folder = tempfile.mkdtemp(prefix="wtransfer-bench-", dir=folder or MEMORY_FOLDER)
        """Where files are during the run."""
        self._remover = subprocess.Popen(  # noqa: S603 - our own arguments
            ["/bin/sh", "-c", _REMOVE, "sh", self.folder],
            stdin=subprocess.PIPE,
            # Ctrl-C ends the bench, and with it the remover's standard input.
            start_new_session=True,
        )
        try:
            self.zygote = Zygote(["torch", __name__, *modules])
        except BaseException:
            self._remover.communicate()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Before the folder: children that live may be writing there.
        self.zygote.close()
        self._remover.communicate()

    def run(
        self,
        name: str,
        trainer: Callable[..., Any],
        worker: Callable[..., Any] | None = None,
        num_workers: int = 0,
        *,
        replace_killed: bool = False,
        **keywords: Any,
    ) -> Outcome:
        """Run a case until its trainer returns; once, however many rows need it.

        Args:
            name: Of the case, for people.
            trainer: Function of a module, called with a `Setup` and the keywords; it returns plain
                data.
            worker: The same, for each worker.
            num_workers: How many workers there are.
            replace_killed: Start a new worker in place of one that was killed.
            **keywords: Plain data, for trainer and workers.

        Raises:
            PeerLostError: A process failed; the error has the end of what it wrote.
            StallError: It takes too long.
        """
        key = repr((trainer, worker, num_workers, keywords))
        if key not in self._known:
            self._report(name)
            functions = [trainer, *[worker] * num_workers]
            try:
                self._known[key] = self._run(name, functions, keywords, replace_killed)
            except WTransferError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, WTransferError):
            raise found
        return found

    def _run(
        self,
        name: str,
        functions: list[Any],
        keywords: dict[str, Any],
        replace_killed: bool,
    ) -> Outcome:
        deadline = Deadline(CASE_S)
        folder = tempfile.mkdtemp(dir=self.folder)
        address = f"unix:@wtransfer-bench-{secrets.token_hex(8)}"
        shared = (address, secrets.token_hex(16), folder)
        started: list[_Process] = []

        def start(rank: int) -> _Process:
            function, setup = functions[rank], Setup(rank, len(functions) - 1, *shared)
            target = f"{function.__module__}:{function.__name__}"
            path = Path(setup.folder, f"process-{len(started)}")
            arguments = (target, list(setup), keywords, str(path))
            log = path.with_suffix(".log")
            child = self.zygote.spawn(
                f"{__name__}:run_in_child", *arguments, stdout=log, stderr=log
            )
            started.append(_Process(child, target, path, log))
            return started[-1]

        def check(process: _Process, *, may_be_killed: bool = False) -> int | None:
            """Return the return code of a process, once it has ended; raise if it is a failure."""
            code = process.child.poll()
            if code and not (may_be_killed and code < 0):
                tail = process.log.read_bytes()[-_TAIL_NBYTES:].decode("utf-8", "replace").strip()
                raise PeerLostError(
                    f"a process of the bench ({process.target}) ended with {code} in the case "
                    f"{name!r}: {tail}"
                )
            return code

        try:
            trainer, *workers = map(start, range(len(functions)))
            while check(trainer) is None:
                for at, worker in enumerate(workers):
                    # Asked once: it may be killed between two looks.
                    if (check(worker, may_be_killed=replace_killed) or 0) < 0:
                        workers[at] = start(1 + at)
                deadline.check(f"the case {name!r} of the bench")
                time.sleep(_POLL_S)
            for worker in workers:
                with contextlib.suppress(StallError):
                    worker.child.wait(LEAVE_S)
            trainer_result, *results = [
                json.loads(each.path.read_bytes())
                for each in (trainer, *workers)
                if each.child.poll() == 0
            ]
            return Outcome(trainer_result, results)
        finally:
            for each in started:
                each.child.kill()
            for each in started:
                each.child.wait(LEAVE_S)
            shutil.rmtree(folder, ignore_errors=True)


class _Process(NamedTuple):
    child: Child
    target: str
    path: Path
    """Of what the function has returned."""
    log: Path


def run_in_child(function: str, setup: list[Any], keywords: dict[str, Any], path: str) -> None:
    """Call a function in a child of the bench, and leave what it returns in a file."""
    module, _, name = function.partition(":")
    returned = getattr(importlib.import_module(module), name)(Setup(*setup), **keywords)
    Path(path).write_text(json.dumps(returned), "utf-8")
