"""The weights demo: train, serve, publish, kill a worker half way, let it rejoin, and judge."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from wtransfer import Publisher
from wtransfer.deadline import Deadline
from wtransfer.demo.model import ByteTransformer, Learner, live_digest
from wtransfer.demo.output import Check, Progress, Result, cell
from wtransfer.demo.worker import DEADLINE_S, REPORTS, Applied, Proof, Ready, Tokens
from wtransfer.errors import PeerLostError, WTransferError
from wtransfer.testing.mini_engine.channel import start_process, wait_for_end
from wtransfer.testing.zygote import Child, Zygote
from wtransfer.weight_sync.trainer.source import ModuleSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wtransfer.demo import worker
    from wtransfer.testing.mini_engine.channel import Channel
    from wtransfer.weight_sync.report import Report, WorkerReport

WORKERS = ("worker-0", "worker-1")
SURVIVOR, VICTIM = WORKERS
WITNESS_TOKENS = 3
"""Tokens that every worker must generate while the transfer is held."""
_TRAINER_SEED = 1
_TRAIN_S = 2.2
_HOLD_S = 100.0
_STEP_S = 180.0
_END_S = 60.0

HEADER = "round   loss    version   weights       MB    GB/s   pause  equal"
LEGEND = (
    "weights: fingerprint. GB/s: bytes / (publish -> last receipt). pause: longest commit, ms. "
    "equal: live models with the trainer's digest."
)


# -- records --------------------------------------------------------------------------------------


@dataclass
class Round:
    """One round, as the trainer saw it."""

    number: int
    """Counts from 1."""
    version: str
    step: int
    """Optimizer steps in the published weights."""
    loss: float
    digest: str
    """Digest of the trainer's live model, taken before the round."""
    ended_at: float = float("inf")
    report: Report | None = None
    """None: the round was aborted."""
    error: WTransferError | None = None
    """Cause of the abort."""

    @property
    def outcome(self) -> str:
        """``committed``, ``mixed`` or ``aborted``."""
        return self.report.outcome if self.report else "aborted"

    @property
    def receipts(self) -> list[WorkerReport]:
        """Rows of the workers of the round; the killed one is ``gone`` until it is back."""
        rows = self.report.workers if self.report else ()
        return [each for each in rows if each.outcome != "gone"]


class Hold(NamedTuple):
    """The time in which half of the tensors were handed to the engine, and `VICTIM` was killed."""

    number: int
    """Round."""
    version: str | None
    """Version that the workers serve meanwhile."""
    began_at: float
    ended_at: float


@dataclass
class Trace:
    """Reports of one process of a worker."""

    ready: Ready
    commits: list[Applied] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    tokens: list[tuple[float, str | None]] = field(default_factory=list)
    """When each token was finished, and its weights."""
    text: str = ""
    """Text generated last."""

    def add(self, report: worker.Report) -> None:
        """Record a report."""
        match report:
            case Tokens():
                self.tokens += [(ended_at, report.version) for ended_at in report.ended_at]
                self.text = report.text
            case Applied():
                self.commits.append(report)
            case Proof():
                self.proofs.append(report)

    @property
    def holds(self) -> Ready | Applied:
        """The report of the weights that the process serves."""
        return self.commits[-1] if self.commits else self.ready

    def proves(self, version: str | None, since: float = 0.0) -> bool:
        """Return whether the process has digested its live model with a version since a time."""
        return any(each.version == version and each.began_at >= since for each in self.proofs)

    def versions_between(self, since: float, until: float) -> list[str | None]:
        """Return the version of every token that was finished in an interval."""
        return [version for ended_at, version in self.tokens if since <= ended_at <= until]


@dataclass
class RunLog:
    """Record of one run."""

    rounds: list[Round] = field(default_factory=list)
    hold: Hold | None = None
    traces: dict[str, list[Trace]] = field(default_factory=dict)
    """Worker -> its processes, in order."""
    exits: dict[str, int] = field(default_factory=dict)
    """Worker -> exit status; without the killed one."""

    def all_traces(self) -> list[Trace]:
        """Return the traces of all worker processes."""
        return [trace for traces in self.traces.values() for trace in traces]

    @property
    def last_committed(self) -> Round | None:
        """The last committed round."""
        return next((over for over in reversed(self.rounds) if over.outcome == "committed"), None)

    def is_proven(self, over: Round) -> bool:
        """Return whether every worker that committed a round has digested its live model since."""
        return all(
            any(trace.proves(over.version) for trace in self.traces.get(receipt.worker, []))
            for receipt in over.receipts
            if receipt.outcome == "committed"
        )


def row_of(log: RunLog, over: Round) -> dict[str, Any]:
    """Return a round in numbers."""
    report = over.report
    commits = [c for t in log.all_traces() for c in t.commits if c.version == over.version]
    receipts = over.receipts
    live_digests = [
        {p.digest for t in log.traces[each.worker] for p in t.proofs if p.version == over.version}
        for each in receipts
    ]
    return {
        "number": over.number,
        "version": over.version,
        "outcome": over.outcome,
        "loss": over.loss,
        "fingerprint": report.fingerprint if report else None,
        "nbytes": report.nbytes if report else 0,
        "gb_per_s": report.nbytes / report.seconds["total"] / 1e9 if report else None,
        "commit_pause_s": max((c.ended_at - c.began_at for c in commits), default=None),
        "num_receipts": len(receipts),
        "num_equal": live_digests.count({over.digest}),
        "error": str(over.error) if over.error else None,
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row as text, one cell per column."""
    return (
        str(row["number"]),
        f"{row['loss']:.2f}",
        row["version"],
        row["fingerprint"][:8] if row["fingerprint"] else row["outcome"],
        f"{row['nbytes'] / 1e6:.1f}" if row["nbytes"] else "-",
        cell(row["gb_per_s"], 2),
        cell(row["commit_pause_s"], 1, 1e3),
        f"{row['num_equal']}/{row['num_receipts']}" if row["num_receipts"] else "-",
    )


# -- judgement ------------------------------------------------------------------------------------


def judge(log: RunLog) -> list[Check]:
    """Return one check per promise."""
    hold, last = log.hold, log.last_committed
    old_version = hold.version if hold else None

    reports = [over.report for over in log.rounds if over.report and over.receipts]
    receipts = [(each, over.report) for over in log.rounds if over.report for each in over.receipts]
    wrong_receipts = [
        f"{receipt.worker} in {report.version}"
        for receipt, report in receipts
        if (receipt.outcome, receipt.digests_equal) != ("committed", True)
        or receipt.fingerprint != report.fingerprint
    ]
    num_expected = len(log.rounds) - bool(hold)

    published = {(over.version, over.digest, over.step, True) for over in log.rounds}
    proofs = [proof for trace in log.all_traces() for proof in trace.proofs]
    wrong_proofs = [
        proof.version
        for proof in proofs
        if (proof.version, proof.digest, proof.trained_steps, proof.tied) not in published
    ]
    unproven = [over.version for over in log.rounds if not log.is_proven(over)]

    # Tokens that were begun and finished while a verified update waited for its commit: the first
    # token to be finished meanwhile was begun before.
    waits = [
        max(0, len(trace.versions_between(since, commit.began_at)) - 1)
        for receipt, report in receipts
        for trace in log.traces.get(receipt.worker, [])
        for commit in trace.commits
        if commit.version == report.version
        for since in [commit.began_at - receipt.seconds.get("wait", 0.0)]
    ]

    while_held = {
        worker: traces[0].versions_between(hold.began_at, hold.ended_at)
        for worker, traces in log.traces.items()
        if hold
    }
    in_use = ", ".join(f"{worker} {len(got)} tokens" for worker, got in while_held.items())

    aborted = next((over for over in log.rounds if hold and over.number == hold.number), None)
    error = aborted.error if aborted else None
    is_whole = aborted is not None and log.traces[SURVIVOR][0].proves(
        old_version, since=aborted.ended_at
    )
    was_applied = aborted is not None and any(
        commit.version == aborted.version for trace in log.all_traces() for commit in trace.commits
    )

    processes = log.traces.get(VICTIM, [])
    killed, rejoined = processes if len(processes) == 2 else (None, None)  # noqa: PLR2004

    last_fingerprint = last.report.fingerprint if last and last.report else ""
    held = {worker: traces[-1].holds.fingerprint for worker, traces in log.traces.items()}

    return [
        Check(
            "no success without proof of receipt: every digest and fingerprint equal",
            not wrong_receipts and len(reports) == num_expected > 0,
            f"{len(receipts)} receipts in {len(reports)} of {num_expected} rounds, wrong: "
            f"{wrong_receipts or 'none'}",
        ),
        Check(
            "the models that serve are bit for bit the published one (digest taken independently)",
            bool(proofs) and not wrong_proofs and not unproven,
            f"{len(proofs)} live digests, wrong: {wrong_proofs or 'none'}, missing: "
            f"{unproven or 'none'}",
        ),
        Check(
            "a commit waits for no more than one generated token",
            bool(waits) and max(waits) <= 1,
            f"{len(waits)} commits, at most {max(waits, default=0)} whole tokens waited for",
        ),
        Check(
            "serving goes on in the middle of a transfer, with the old version",
            bool(while_held)
            and min(map(len, while_held.values())) >= WITNESS_TOKENS
            and all(set(versions) == {old_version} for versions in while_held.values()),
            f"after half of the tensors: {in_use or 'nothing'} with {old_version}",
        ),
        Check(
            "all or nothing: a worker killed in mid-round leaves the others on the old version",
            error is not None
            and (error.worker, error.phase) == (VICTIM, "transfer")
            and is_whole
            and not was_applied,
            f"error names {error.worker} in phase {error.phase}, {SURVIVOR} still "
            f"{'whole' if is_whole else 'NOT PROVEN'} on {old_version}"
            if error
            else "no round was aborted",
        ),
        Check(
            "the killed worker rejoins, reports what it holds, catches up",
            killed is not None
            and rejoined is not None
            and rejoined.ready.version is None
            and rejoined.ready.fingerprint.startswith("local:")
            and rejoined.ready.pid != killed.ready.pid
            and rejoined.holds.fingerprint == last_fingerprint,
            f"rejoined with {rejoined.ready.version or 'no version'} "
            f"({rejoined.ready.fingerprint[:14]}), holds {rejoined.holds.version} now"
            if rejoined
            else "did not rejoin",
        ),
        Check(
            "in the end every worker holds the trainer's last version",
            last is not None
            and last is log.rounds[-1]
            and set(held.values()) == {last_fingerprint},
            ", ".join(f"{worker} {fingerprint[:8]}" for worker, fingerprint in held.items())
            + f", trainer {last_fingerprint[:8]}",
        ),
        Check(
            "every process ends when asked",
            bool(log.exits) and not any(log.exits.values()),
            ", ".join(f"{worker} exit {status}" for worker, status in log.exits.items()),
        ),
    ]


# -- the run --------------------------------------------------------------------------------------


class HoldableSource(ModuleSource):
    """A module's weights; the next pass over them stops half way, once `is_armed`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.is_armed = False
        self.is_held, self.may_go_on = threading.Event(), threading.Event()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors."""
        half = len(self.metadata) // 2
        for index, pair in enumerate(super().iter_full()):
            if self.is_armed and index == half:
                self.is_armed = False
                self.is_held.set()
                self.may_go_on.wait(_HOLD_S)
            yield pair


class Main(contextlib.ExitStack):
    """Trains, starts the workers, and plays the rounds. Use as a context manager."""

    def __init__(self, millions: float, num_rounds: int, progress: Progress) -> None:
        super().__init__()
        self._log = RunLog()
        self._loss = 0.0
        self._millions = millions
        self._num_rounds = num_rounds
        self._progress = progress
        self._children: dict[str, Child] = {}
        self._channels: dict[str, Channel] = {}

    def run(self) -> Result:
        """Start every process, play all rounds, and end every process."""
        # One thread, as in the workers: more would take the processors from them.
        torch.set_num_threads(1)
        folder = tempfile.TemporaryDirectory(prefix="wtransfer-demo-")
        self._folder = Path(self.enter_context(folder))
        self._zygote = self.enter_context(Zygote(["wtransfer.demo.worker"]))
        self._token = secrets.token_hex(32)
        self._model = ByteTransformer.of_size(self._millions, _TRAINER_SEED)
        self._learner = Learner(self._model)
        self._source = HoldableSource(self._model)
        self._publisher = self.enter_context(
            Publisher(self._source, token=self._token, deadline_s=DEADLINE_S)
        )
        self.callback(self._source.may_go_on.set)
        for worker in WORKERS:
            self._start(worker)
        traces, progress = self._log.traces, self._progress
        self._wait(lambda: len(traces) == len(WORKERS), "the workers' start")

        rows = []
        number_of_kill = max(2, self._num_rounds // 2)
        for number in range(1, self._num_rounds + 1):
            over = self._train_and_publish(number, kills=number == number_of_kill)
            # Every report of the round has arrived.
            rows.append(row_of(self._log, over))
            progress.row(cells(rows[-1]))
            if number == number_of_kill + 1:
                self._rejoin()
        self._show_text(f"serving {over.version}")

        # Close every channel before the first wait, so that the workers end side by side.
        for channel in self._channels.values():
            channel.close()
        deadline = Deadline(_END_S)
        for name in self._channels:
            self._log.exits[name] = wait_for_end(self._children[name], deadline)
        num_parameters = sum(each.numel() for each in self._model.parameters())
        facts = {"parameters": num_parameters, "rounds": rows, "events": progress.events}
        return Result(judge(self._log), facts)

    def _train_and_publish(self, number: int, *, kills: bool) -> Round:
        """Publish to the present workers; wait until they have proven their weights."""
        log, is_over = self._log, Deadline(_TRAIN_S)
        self._wait(lambda: is_over.expired, "training")
        if number == 1:
            self._show_text("untrained")
        steps = int(self._model.trained_steps)
        self._publisher.wait_for_workers(len(self._channels), timeout_s=DEADLINE_S)
        over = Round(number, f"step-{steps}", steps, self._loss, digest=live_digest(self._model))
        self._source.is_armed = kills
        running = self._publisher.publish(over.version, wait=False)
        if kills:
            self._kill_victim(number)
        with contextlib.suppress(WTransferError):  # raised again by result()
            running.packed()
            # The engine has its own copy now: this step changes the weights while the workers still
            # verify and commit the old ones. Without that copy, the digests would differ.
            self._loss = self._learner.step()
        # Reports are taken meanwhile: a worker that cannot send any would not commit.
        self._wait(lambda: running.done, "the end of the round", trains=False)
        try:
            over.report = running.result()
        except WTransferError as error:
            over.error = error
        over.ended_at = time.monotonic()
        log.rounds.append(over)
        if over.report:
            self._wait(lambda: log.is_proven(over), f"the proofs of {over.version}")
        elif old := log.last_committed:
            trace = log.traces[SURVIVOR][0]
            self._wait(
                lambda: trace.proves(old.version, since=over.ended_at), f"a proof of {SURVIVOR}"
            )
        return over

    def _show_text(self, when: str) -> None:
        self._progress.event(f"{SURVIVOR}, {when}: {self._log.traces[SURVIVOR][0].text}")

    def _kill_victim(self, number: int) -> None:
        """Kill a worker while half of the tensors are under way, and no more than half."""
        source = self._source
        self._wait(source.is_held.is_set, "the middle of a transfer", trains=False)
        began_at = time.monotonic()
        for worker in WORKERS:
            self._wait_for_tokens(worker)
        # Kill before closing the channel, which would ask the worker to end by itself.
        victim = self._children.pop(VICTIM)
        victim.kill()
        wait_for_end(victim, Deadline(_END_S))
        self._channels.pop(VICTIM).close()
        self._progress.event(f"{VICTIM} killed (SIGKILL) in the middle of round {number}")
        self._wait_for_tokens(SURVIVOR)
        old = self._log.last_committed
        self._log.hold = Hold(number, old.version if old else None, began_at, time.monotonic())
        source.may_go_on.set()

    def _wait_for_tokens(self, worker: str) -> None:
        now, trace = time.monotonic(), self._log.traces[worker][-1]
        self._wait(
            lambda: len(trace.versions_between(now, float("inf"))) >= WITNESS_TOKENS,
            f"{WITNESS_TOKENS} tokens of {worker}",
            # Weights under way must not change.
            trains=False,
        )

    def _rejoin(self) -> None:
        """Start the killed worker again: it catches up without a round of its own."""
        self._start(VICTIM)
        traces, last = self._log.traces[VICTIM], self._log.last_committed
        self._wait(lambda: len(traces) > 1, f"the new {VICTIM}")
        trace, ready = traces[1], traces[1].ready
        self._progress.event(
            f"{VICTIM} is back as process {ready.pid}: {ready.state}, has "
            f"{ready.version or 'no version'} ({ready.fingerprint[:14]})"
        )
        assert last is not None
        self._wait(lambda: trace.proves(last.version), f"{VICTIM} to catch up")
        self._progress.event(
            f"{VICTIM} caught up: has {last.version} ({trace.holds.fingerprint[:8]})"
        )

    def _start(self, name: str) -> None:
        arguments = (self._millions, self._token, name, self._publisher.address)
        target, log = "wtransfer.demo.worker:run_worker", self._folder / name

        def spawn(address: str) -> Child:
            child = self._zygote.spawn(target, address, *arguments, stdout=log, stderr=log)
            self._children[name] = child
            return child

        self._channels[name] = start_process(name, spawn)
        self.callback(self._channels[name].close)

    def _wait(self, is_reached: Callable[[], bool], what: str, *, trains: bool = True) -> None:
        """Train, and record reports of the workers, until a condition holds."""
        self._progress.status(what)
        deadline = Deadline(_STEP_S)
        while not is_reached():
            deadline.check(what)
            if trains:
                self._loss = self._learner.step()
            for name in self._channels:
                self._receive(name)
            if not trains:
                time.sleep(0.01)

    def _receive(self, name: str) -> None:
        """Record the reports that a worker has sent so far."""
        channel, traces = self._channels[name], self._log.traces
        try:
            while channel.poll(0.0):
                report = channel.receive(REPORTS)
                if isinstance(report, Ready):
                    traces.setdefault(name, []).append(Trace(report))
                else:
                    traces[name][-1].add(report)
        except WTransferError as error:
            output = (self._folder / name).read_text("utf-8", "replace") if channel.is_lost else ""
            raise PeerLostError(
                f"the demo's {name} (pid {self._children[name].pid}) failed: {error}"
                + (f"; its last output:\n{output[-4000:]}" if output else ""),
                worker=name,
            ) from error


def run_weights(millions: float, num_rounds: int, *, quiet: bool) -> Result:
    """Run the demo.

    Args:
        millions: Size of the model, in million parameters.
        num_rounds: At least 4.
        quiet: Print nothing.

    Raises:
        WTransferError: A process ended unexpectedly, or did not do its part in time.
    """
    with (
        Progress(HEADER, LEGEND, quiet=quiet) as progress,
        Main(millions, num_rounds, progress) as main,
    ):
        return main.run()
