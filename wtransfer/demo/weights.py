"""The weights demo: train, serve, publish, kill a worker half way, let it rejoin, and judge."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from bisect import bisect_left, bisect_right
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.demo import messages
from wtransfer.demo.output import Check, Progress, Result, cell
from wtransfer.errors import PeerLostError, WTransferError
from wtransfer.testing.mini_engine.channel import Channel, start_process, wait_for_end
from wtransfer.transport.zygote import Child, Zygote

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

WORKERS = ("worker-0", "worker-1")
SURVIVOR, VICTIM = WORKERS
WITNESS_TOKENS = 3
"""Tokens that every worker must generate while the transfer is held."""
_TRAIN_S = 2.2
_STEP_S = 180.0
_END_S = 60.0
_POLL_S = 0.01

HEADER = "round   loss    version   weights       MB    GB/s  memcpy   pause  equal"
LEGEND = (
    "weights: fingerprint. GB/s: bytes / (publish -> last receipt). memcpy: that, as a share of a "
    "plain copy measured just before. pause: longest commit, ms. equal: live models with the "
    "trainer's digest."
)


# -- what is recorded -----------------------------------------------------------------------------


class Kill(NamedTuple):
    """The kill of a worker."""

    worker: str
    number: int
    """Round."""
    at: float


class WorkerTrace:
    """What one process of a worker reported."""

    def __init__(self, ready: messages.Ready) -> None:
        self.ready = ready
        self.commits: list[messages.Applied] = []
        self.proofs: list[messages.Proof] = []
        # One entry per token, in order of time.
        self.times: list[float] = []
        self.versions: list[str | None] = []

    @property
    def holds(self) -> messages.Ready | messages.Applied:
        """The report of the weights that it serves."""
        return self.commits[-1] if self.commits else self.ready

    def proof_of(self, version: str) -> messages.Proof | None:
        """Return the first proof of a version."""
        return next((proof for proof in self.proofs if proof.version == version), None)

    def versions_between(self, since: float, until: float) -> list[str | None]:
        """Return the version of every token that was finished in an interval."""
        return self.versions[bisect_right(self.times, since) : bisect_left(self.times, until)]

    def gaps(self, since: float, until: float) -> list[tuple[float, float]]:
        """Return start and end of every gap between two tokens that overlaps an interval."""
        first = max(0, bisect_right(self.times, since) - 1)
        return list(pairwise(self.times[first : bisect_left(self.times, until) + 1]))


class RunLog:
    """Everything that was reported in one run."""

    def __init__(self) -> None:
        self.listening: messages.Listening | None = None
        self.first_loss: float | None = None
        self.trained: messages.Trained | None = None
        """The last step."""
        self.held: messages.Held | None = None
        self.resumed_at: float | None = None
        self.rounds: list[messages.RoundOver] = []
        self.rows: list[dict[str, Any]] = []
        """The rounds in numbers, each made when all that belongs to it was reported."""
        self.traces: dict[str, list[WorkerTrace]] = {}
        """Worker -> its processes, in order."""
        self.kill: Kill | None = None
        self.samples: list[messages.Sample] = []
        self.events: list[str] = []
        self.exits: dict[str, int] = {}
        """Child -> exit status; without the killed one."""

    def add(self, report: messages.Report) -> None:
        """Record a report."""
        match report:
            case messages.Listening():
                self.listening = report
            case messages.Trained():
                self.first_loss = self.first_loss or report.loss
                self.trained = report
            case messages.Held():
                self.held = report
            case messages.RoundOver():
                self.rounds.append(report)
            case messages.Sample():
                self.samples.append(report)
            case messages.Ready():
                self.traces.setdefault(report.worker, []).append(WorkerTrace(report))
            case messages.Tokens():
                trace = self.traces[report.worker][-1]
                trace.times += report.ended_at
                trace.versions += [report.version] * len(report.ended_at)
            case messages.Applied():
                self.traces[report.worker][-1].commits.append(report)
            case messages.Proof():
                self.traces[report.worker][-1].proofs.append(report)

    def all_traces(self) -> list[WorkerTrace]:
        """Return the traces of all worker processes."""
        return [trace for traces in self.traces.values() for trace in traces]

    def last_committed(self, before: int | None = None) -> messages.RoundOver | None:
        """Return the last committed round, among those before a number."""
        rounds = self.rounds[: before and before - 1]
        return next((over for over in reversed(rounds) if over.outcome == "committed"), None)

    def is_proven(self, over: messages.RoundOver) -> bool:
        """Whether every worker that committed a round has digested its live model since."""
        return all(
            any(trace.proof_of(over.version) for trace in self.traces.get(receipt.worker, []))
            for receipt in over.receipts
            if receipt.outcome == "committed"
        )


def row_of(log: RunLog, over: messages.RoundOver) -> dict[str, Any]:
    """Return a round in numbers."""
    is_done = over.outcome == "committed"
    commits = [c for t in log.all_traces() for c in t.commits if c.version == over.version]
    proofs = [
        [trace.proof_of(over.version) for trace in log.traces[receipt.worker]]
        for receipt in over.receipts
    ]
    return msgspec.structs.asdict(over) | {
        "receipts": [msgspec.structs.asdict(receipt) for receipt in over.receipts],
        "seconds": over.total_s if is_done else None,
        "gb_per_s": over.nbytes / over.total_s / 1e9 if is_done else None,
        "memcpy_share": over.memcpy_s / over.total_s if is_done else None,
        "commit_pause_s": max((c.ended_at - c.started_at for c in commits), default=None),
        "num_receipts": len(over.receipts),
        "num_equal": sum(any(p and p.digest == over.digest for p in each) for each in proofs),
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row as text, one cell per column."""
    pause_s = row["commit_pause_s"]
    return (
        str(row["number"]),
        f"{row['loss']:.2f}",
        row["version"],
        row["fingerprint"][:8] if row["fingerprint"] else row["outcome"],
        f"{row['nbytes'] / 1e6:.1f}" if row["nbytes"] else "-",
        cell(row["gb_per_s"], 2),
        cell(row["memcpy_share"], 2),
        cell(pause_s and pause_s * 1e3, 1),
        f"{row['num_equal']}/{row['num_receipts']}" if row["num_receipts"] else "-",
    )


# -- what is judged -------------------------------------------------------------------------------


def judge(log: RunLog) -> list[Check]:
    """Return one check per promise."""
    kill, held, last = log.kill, log.held, log.last_committed()
    old = log.last_committed(before=kill.number) if kill else None
    old_version = old.version if old else None

    receipts = [(receipt, over) for over in log.rounds for receipt in over.receipts]
    wrong_receipts = [
        f"{receipt.worker} in {over.version}"
        for receipt, over in receipts
        if not (
            receipt.outcome == over.outcome == "committed"
            and receipt.digests_equal
            and receipt.fingerprint == over.fingerprint
        )
    ]
    num_rounds = len({over.version for _, over in receipts})
    num_expected = len(log.rounds) - (1 if kill else 0)

    published = {over.version: over for over in log.rounds}
    proofs = [proof for trace in log.all_traces() for proof in trace.proofs]
    wrong_proofs = [
        f"{proof.worker} with {proof.version}"
        for proof in proofs
        if proof.version not in published
        or proof.digest != published[proof.version].digest
        or proof.trained_steps != published[proof.version].step
        or not proof.tied
    ]
    unproven = [over.version for over in log.rounds if not log.is_proven(over)]

    # Tokens that were begun and finished while a verified update waited for its commit.
    waits = [
        sum(
            since <= before and after <= commit.started_at
            for before, after in trace.gaps(since, commit.started_at)
        )
        for receipt, over in receipts
        for trace in log.traces.get(receipt.worker, [])
        for commit in trace.commits
        if commit.version == over.version
        for since in [commit.started_at - receipt.waited_s]
    ]

    while_held: dict[str, list[str | None]] = {}
    if held is not None and log.resumed_at is not None:
        while_held = {
            worker: traces[0].versions_between(held.at, log.resumed_at)
            for worker, traces in log.traces.items()
        }

    aborted = next((over for over in log.rounds if kill and over.number == kill.number), None)
    survivors = [worker for worker in log.traces if kill and worker != kill.worker]
    # The digest after the abort is the second one of the same version.
    are_whole = all(
        [proof.version for proof in log.traces[worker][0].proofs].count(old_version) > 1
        for worker in survivors
    )
    was_applied = any(
        aborted is not None and commit.version == aborted.version
        for trace in log.all_traces()
        for commit in trace.commits
    )

    rejoined = log.traces.get(kill.worker, [])[1:] if kill else []
    fingerprints = {worker: traces[-1].holds.fingerprint for worker, traces in log.traces.items()}

    return [
        Check(
            "no success without proof of receipt: every digest and fingerprint equal",
            not wrong_receipts and num_rounds == num_expected > 0,
            f"{len(receipts)} receipts in {num_rounds} of {num_expected} rounds"
            + (f", wrong: {', '.join(wrong_receipts)}" if wrong_receipts else ", all right"),
        ),
        Check(
            "the models that serve are bit for bit the published one (digest taken independently)",
            bool(proofs) and not wrong_proofs and not unproven,
            f"{len(proofs)} live digests"
            + (f", wrong: {', '.join(wrong_proofs)}" if wrong_proofs else ", all equal")
            + (f", missing for {', '.join(unproven)}" if unproven else ""),
        ),
        Check(
            "a commit waits for no more than one generated token",
            bool(waits) and max(waits) <= 1,
            f"{len(waits)} commits, at most {max(waits, default=0)} whole tokens waited for",
        ),
        Check(
            "serving goes on in the middle of a transfer, with the old version",
            bool(while_held)
            and all(
                len(versions) >= WITNESS_TOKENS and set(versions) == {old_version}
                for versions in while_held.values()
            ),
            f"after {held.num_sent} of {held.num_tensors} tensors: "
            + ", ".join(f"{worker} {len(got)} tokens" for worker, got in while_held.items())
            + f" with {old_version}"
            if held
            else "no transfer was held",
        ),
        Check(
            "all or nothing: a worker killed in mid-round leaves the others on the old version",
            kill is not None
            and aborted is not None
            and aborted.outcome == "aborted"
            and aborted.blamed == kill.worker
            and aborted.failed_in == "transfer"
            and are_whole
            and not was_applied,
            f"{aborted.version} {aborted.outcome}, error names {aborted.blamed} in phase "
            f"{aborted.failed_in}, {', '.join(survivors)} still "
            f"{'whole' if are_whole else 'NOT PROVEN'} on {old_version}"
            if aborted
            else "no worker was killed",
        ),
        Check(
            "the killed worker rejoins, reports what it holds, catches up",
            len(rejoined) == 1
            and kill is not None
            and rejoined[0].ready.version is None
            and rejoined[0].ready.fingerprint.startswith("local:")
            and rejoined[0].ready.pid != log.traces[kill.worker][0].ready.pid
            and last is not None
            and rejoined[0].holds.fingerprint == last.fingerprint,
            ", ".join(
                f"rejoined with {trace.ready.version or 'no version'} "
                f"({trace.ready.fingerprint[:14]}), holds {trace.holds.version} now"
                for trace in rejoined
            )
            or "it did not rejoin",
        ),
        Check(
            "in the end every worker holds the trainer's last version",
            last is not None
            and last is log.rounds[-1]
            and set(fingerprints.values()) == {last.fingerprint},
            ", ".join(f"{worker} {held_now[:8]}" for worker, held_now in fingerprints.items())
            + f", trainer {str(last.fingerprint)[:8] if last else 'nothing'}",
        ),
        Check(
            "every process ends when asked",
            bool(log.exits) and not any(log.exits.values()),
            ", ".join(f"{child} exit {status}" for child, status in log.exits.items()),
        ),
    ]


# -- what happens ---------------------------------------------------------------------------------


class Main:
    """Starts the processes and plays the rounds. Use as a context manager: it ends every process.

    Raises:
        WTransferError: By every method: a process ended that should not have, or did not do its
            part in time.
    """

    def __init__(self, millions: float, num_rounds: int, progress: Progress) -> None:
        self.log = RunLog()
        self._millions = millions
        self._num_rounds = num_rounds
        self._progress = progress
        self._token = secrets.token_hex(32)
        self._children: dict[str, Child] = {}
        self._channels: dict[str, Channel] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Start every process and let the workers join; most of its time is the import of torch."""
        folder = tempfile.TemporaryDirectory(prefix="wtransfer-demo-")
        self._folder = Path(self._stack.enter_context(folder))
        self._zygote = self._stack.enter_context(Zygote(["wtransfer.demo.children"]))
        self._start("trainer")
        self._wait(lambda: self.log.listening is not None, "the trainer's start")
        for worker in WORKERS:
            self._start(worker)
        self._wait(lambda: len(self.log.traces) == len(WORKERS), "the workers' start")

    def run(self) -> None:
        """Play all rounds, after `start`, and end every process."""
        for number in range(1, self._num_rounds + 1):
            self._play(number, after_kill=number - max(2, self._num_rounds // 2))
        self._end_all()

    def _play(self, number: int, after_kill: int) -> None:
        """Train for a while, and publish; in round 0 after the kill with it, in round 1 alone."""
        trained, is_over = self.log.trained, Deadline(_TRAIN_S)
        self._wait(lambda: is_over.expired and self.log.trained is not trained, "an optimizer step")
        if after_kill == 0:
            over = self._publish_and_kill(number)
        else:
            num_workers = len(WORKERS) - 1 if after_kill == 1 else len(WORKERS)
            self._channels["trainer"].send(
                messages.Publish(number, hold=False, num_workers=num_workers)
            )
            over = self._result(number)
            self._wait(lambda: self.log.is_proven(over), f"the proofs of {over.version}")
        self.log.rows.append(row_of(self.log, over))
        style = "yellow" if over.outcome == "aborted" else "none"
        self._progress.row(cells(self.log.rows[-1]), style)
        if after_kill == 1:
            self._rejoin()

    def _publish_and_kill(self, number: int) -> messages.RoundOver:
        """Kill a worker while half of the tensors are under way, and no more than half."""
        log, trainer = self.log, self._channels["trainer"]
        trainer.send(messages.Publish(number, hold=True, num_workers=len(WORKERS)))
        self._wait(lambda: log.held is not None, "the middle of a transfer")
        for worker in WORKERS:
            self._wait_for_tokens(worker)
        # Before its channel is closed, which would ask it to end by itself.
        victim = self._children.pop(VICTIM)
        victim.kill()
        wait_for_end(victim, Deadline(_END_S))
        self._channels.pop(VICTIM).close()
        log.kill = Kill(VICTIM, number, time.monotonic())
        self._event(f"{VICTIM} killed (SIGKILL) in the middle of round {number}")
        self._wait_for_tokens(SURVIVOR)
        log.resumed_at = time.monotonic()
        trainer.send(messages.Resume())
        over = self._result(number)
        proofs = log.traces[SURVIVOR][0].proofs
        num_proofs = len(proofs)
        self._channels[SURVIVOR].send(messages.TakeDigest())
        self._wait(lambda: len(proofs) > num_proofs, f"a digest of {SURVIVOR}")
        return over

    def _rejoin(self) -> None:
        """Start the killed worker again: it catches up without a round of its own."""
        self._start(VICTIM)
        traces, last = self.log.traces[VICTIM], self.log.last_committed()
        self._wait(lambda: len(traces) > 1, f"the new {VICTIM}")
        trace, ready = traces[1], traces[1].ready
        self._event(
            f"{VICTIM} is back as process {ready.pid}: {ready.state}, has "
            f"{ready.version or 'no version'} ({ready.fingerprint[:14]})"
        )
        assert last is not None
        self._wait(lambda: trace.proof_of(last.version) is not None, f"{VICTIM} to catch up")
        self._event(f"{VICTIM} caught up: has {last.version} ({trace.holds.fingerprint[:8]})")

    def _start(self, name: str) -> None:
        function, arguments = "trainer", [self._millions, self._token]
        if self.log.listening is not None:
            function, arguments = "worker", [*arguments, name, self.log.listening.address]
        target, log = f"wtransfer.demo.children:{function}", self._folder / name

        def spawn(address: str) -> Child:
            child = self._zygote.spawn(target, address, *arguments, stdout=log, stderr=log)
            self._children[name] = child
            return child

        self._channels[name] = start_process(name, spawn)
        self._stack.callback(self._channels[name].close)

    def _result(self, number: int) -> messages.RoundOver:
        self._wait(lambda: len(self.log.rounds) == number, f"the end of round {number}")
        return self.log.rounds[-1]

    def _wait_for_tokens(self, worker: str) -> None:
        now, trace = time.monotonic(), self.log.traces[worker][-1]
        self._wait(
            lambda: len(trace.versions_between(now, float("inf"))) >= WITNESS_TOKENS,
            f"{WITNESS_TOKENS} tokens of {worker}",
        )

    def _event(self, text: str) -> None:
        self.log.events.append(text)
        self._progress.event(text)

    def _wait(self, is_reached: Callable[[], bool], what: str) -> None:
        """Take reports until a condition holds.

        Raises:
            StallError: It took too long.
            PeerLostError: A process ended.
        """
        deadline = Deadline(_STEP_S)
        while not is_reached():
            deadline.check(what)
            for name in self._channels:
                self._receive(name)
            self._progress.status(status(self.log))
            time.sleep(_POLL_S)

    def _receive(self, name: str) -> None:
        """Record the reports that a process has sent so far."""
        channel = self._channels[name]
        try:
            while channel.poll(0.0):
                self.log.add(channel.receive(messages.REPORTS))
        except WTransferError as error:
            output = (self._folder / name).read_text("utf-8", "replace") if channel.is_lost else ""
            raise PeerLostError(
                f"the demo's {name} (pid {self._children[name].pid}) failed: {error}"
                + (f"; its last output:\n{output[-4000:]}" if output else ""),
                worker=name,
            ) from error

    def _end_all(self) -> None:
        # All are asked before the first is waited for, so that they end side by side.
        for channel in self._channels.values():
            channel.send(messages.Stop())
        for name, channel in self._channels.items():
            deadline = Deadline(_END_S)
            with contextlib.suppress(PeerLostError):  # it has ended
                while not deadline.expired and channel.poll(deadline.remaining()):
                    self.log.add(channel.receive(messages.REPORTS))
            self.log.exits[name] = wait_for_end(self._children[name], deadline)


def status(log: RunLog) -> str:
    """Return what is going on."""
    parts = [f"step {log.trained.step}, loss {log.trained.loss:.2f}" if log.trained else "starting"]
    for worker, traces in log.traces.items():
        trace = traces[-1]
        version = trace.holds.version or "untrained"
        parts.append(f"{worker}: {len(trace.times)} tokens, {version}")
    return "  |  ".join(parts)


def run_weights(millions: float, num_rounds: int, *, quiet: bool) -> Result:
    """Run the demo.

    Args:
        millions: Size of the model, in million parameters.
        num_rounds: At least 4.
        quiet: Print nothing.

    Raises:
        WTransferError: A process ended that should not have, or did not do its part in time.
    """
    with (
        Progress(HEADER, LEGEND, quiet=quiet) as progress,
        Main(millions, num_rounds, progress) as main,
    ):
        main.start()
        began = time.monotonic()
        main.run()
        return result_of(main.log, time.monotonic() - began)


def result_of(log: RunLog, seconds: float) -> Result:
    """Return the outcome of a run."""
    traces = [trace for trace in log.all_traces() if len(trace.times) > 1]
    # Of the slowest process.
    usual_s = max((median(b - a for a, b in pairwise(t.times)) for t in traces), default=None)
    longest_s = max(
        (
            after - before
            for over in log.rounds
            for trace in traces
            for before, after in trace.gaps(over.started_at, over.started_at + over.total_s)
        ),
        default=None,
    )
    facts = {
        "parameters": log.listening.num_parameters if log.listening else None,
        "first_loss": log.first_loss,
        "last_loss": log.trained.loss if log.trained else None,
        "usual_gap_s": usual_s,
        "longest_gap_s": longest_s,
        "rounds": log.rows,
        "killed": log.kill._asdict() if log.kill else None,
        "events": log.events,
        "samples": [
            {"worker": each.worker, "version": each.version, "text": each.text}
            for each in log.samples
        ],
    }
    notes = [
        f"{when} ({each.worker}, {each.version or 'untrained'}):\n  {each.text}"
        for when, samples in (("before", log.samples[:1]), ("after", log.samples[-1:]))
        for each in samples
    ]
    notes.append(
        f"between two tokens: usually {cell(usual_s and usual_s * 1e3, 1)} ms, at most "
        f"{cell(longest_s and longest_s * 1e3, 1)} ms during a round"
    )
    return Result(judge(log), seconds, facts, notes)
