"""The checks of the weights demo: one tampered run for each thing that they look at."""

import dataclasses
from dataclasses import dataclass

import msgspec
import pytest

from wtransfer.demo.weights import Hold, Round, RunLog, Trace, cells, judge, row_of
from wtransfer.demo.worker import Applied, Proof, Ready, Tokens
from wtransfer.errors import PeerLostError
from wtransfer.weight_sync.report import Report, WorkerReport

TOKEN_S = 0.010
COMMIT_S = 0.002
BOTH = ("worker-0", "worker-1")
RECEIPTS, DIGESTS, WAITS, HELD, ABORT, REJOIN, EQUAL, EXITS = range(8)


@dataclass
class LogWriter:
    """Writes the log of a run in which everything is as promised."""

    log: RunLog
    now: float = 100.0

    def ready(self, worker, pid):
        trace = Trace(Ready(pid, None, f"local:{pid:032x}", "fresh"))
        self.log.traces.setdefault(worker, []).append(trace)

    def tokens(self, workers, num_tokens, version):
        for worker in workers:
            ended_at = tuple(self.now + TOKEN_S * (i + 1) for i in range(num_tokens))
            self.log.traces[worker][-1].add(Tokens(version, ended_at, f"text of {version}"))
        self.now += TOKEN_S * num_tokens

    def prove(self, worker, number):
        trace = self.log.traces[worker][-1]
        trace.add(Proof(f"round-{number}", self.now, f"sha-{number}", 10 * number, True))

    def round(self, number, **result):
        facts = (f"round-{number}", 10 * number, 5.0 - number, f"sha-{number}")
        self.log.rounds.append(Round(number, *facts, ended_at=self.now, **result))

    def commit(self, number, workers, old):
        """Write one token during the transfer, the commit, and three tokens after it."""
        version, fingerprint = f"round-{number}", f"{number:032x}"
        self.tokens(workers, 1, old)
        for worker in workers:
            applied = Applied(version, fingerprint, self.now, self.now + COMMIT_S)
            self.log.traces[worker][-1].add(applied)
        self.now += COMMIT_S
        self.tokens(workers, 3, version)
        receipts = [
            WorkerReport(
                *(worker, worker, 0, "committed", version, fingerprint),
                digests_equal=True,
                seconds={"wait": 0.5 * TOKEN_S},
            )
            for worker in workers
        ]
        receipts += [  # as every report of a round without the killed one says
            WorkerReport(worker, worker, 0, "gone", old, "")
            for worker in BOTH
            if worker not in workers
        ]
        seconds = {"total": 0.0125}
        report = Report(version, fingerprint, "id", 10_000_000, tuple(receipts), seconds, 0.003)
        self.round(number, report=report)
        for worker in workers:
            self.prove(worker, number)

    def abort(self, number, worker="worker-1", phase="transfer"):
        self.round(number, error=PeerLostError("is gone", worker=worker, phase=phase))


@pytest.fixture
def log():
    """Four rounds: with both workers, with a kill, without the killed worker, with both."""
    log = RunLog()
    writer = LogWriter(log)
    for pid, worker in enumerate(BOTH):
        writer.ready(worker, pid)
    writer.tokens(BOTH, 5, None)
    writer.commit(1, BOTH, old=None)

    began_at = writer.now
    writer.tokens(BOTH, 4, "round-1")
    writer.tokens(BOTH[:1], 4, "round-1")
    log.hold = Hold(2, "round-1", began_at, writer.now)
    writer.abort(2)
    writer.prove("worker-0", 1)

    writer.commit(3, BOTH[:1], old="round-1")
    writer.ready("worker-1", 7)
    writer.commit(4, BOTH, old="round-3")
    log.exits = {"worker-0": 0, "worker-1": 0}
    return log


def failed(log):
    return {number for number, check in enumerate(judge(log)) if not check.kept}


def test_a_run_as_promised_is_accepted(log):
    assert failed(log) == set()


def test_an_empty_run_keeps_no_promise():
    assert failed(RunLog()) == set(range(8))


def changed(container, key, **changes):
    is_struct = isinstance(container[key], msgspec.Struct)
    replace = msgspec.structs.replace if is_struct else dataclasses.replace
    container[key] = replace(container[key], **changes)


def change_receipt(log, **changes):
    report = log.rounds[2].report
    receipt = dataclasses.replace(report.workers[0], **changes)
    log.rounds[2].report = dataclasses.replace(report, workers=(receipt,))


def change_return(log, **changes):
    trace = log.traces["worker-1"][1]
    trace.ready = msgspec.structs.replace(trace.ready, **changes)


def change_abort(log, **facts):
    LogWriter(log, log.rounds[1].ended_at).abort(2, **facts)
    log.rounds[1] = log.rounds.pop()


def stop_serving_when_held(log):
    trace = log.traces["worker-1"][0]
    trace.tokens = [each for each in trace.tokens if each[0] <= log.hold.began_at]


def serve_the_new_version_early(log):
    tokens = log.traces["worker-0"][0].tokens
    at = [version for _, version in tokens].index("round-3") - 3
    tokens[at] = (tokens[at][0], "round-2")


def survivor(log):
    return log.traces["worker-0"][0]


def rejoined(log):
    return log.traces["worker-1"][1]


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (lambda log: change_receipt(log, digests_equal=False), {RECEIPTS}),
        (lambda log: change_receipt(log, fingerprint="other"), {RECEIPTS}),
        (lambda log: change_receipt(log, outcome="pending"), {RECEIPTS}),
        (lambda log: changed(survivor(log).proofs, 0, digest="other"), {DIGESTS}),
        (lambda log: changed(survivor(log).proofs, 0, trained_steps=11), {DIGESTS}),
        (lambda log: changed(survivor(log).proofs, 0, tied=False), {DIGESTS}),
        (lambda log: rejoined(log).proofs.clear(), {DIGESTS}),
        (lambda log: change_receipt(log, seconds={"wait": 0.021}), {WAITS}),
        (lambda log: change_receipt(log, seconds={"wait": 0.011}), set()),
        (stop_serving_when_held, {HELD}),
        (serve_the_new_version_early, {HELD}),
        (
            lambda log: changed(log.rounds, 1, error=None, report=log.rounds[0].report),
            {RECEIPTS, DIGESTS, ABORT},
        ),
        (lambda log: change_abort(log, worker="worker-0"), {ABORT}),
        (lambda log: change_abort(log, phase="plan"), {ABORT}),
        (
            lambda log: survivor(log).commits.insert(1, Applied("round-2", "f2", 100.0, 100.1)),
            {ABORT},
        ),
        # It was digested before the abort only.
        (lambda log: changed(survivor(log).proofs, 1, began_at=log.hold.began_at), {ABORT}),
        (lambda log: change_return(log, version="round-1"), {REJOIN}),
        (lambda log: change_return(log, fingerprint="f"), {REJOIN}),
        (lambda log: change_return(log, pid=1), {REJOIN}),
        (lambda log: log.traces["worker-1"].pop(), {DIGESTS, REJOIN, EQUAL}),
        (lambda log: changed(rejoined(log).commits, -1, fingerprint="old"), {REJOIN, EQUAL}),
        (lambda log: LogWriter(log).abort(5), {RECEIPTS, EQUAL}),
        (lambda log: log.exits.update({"worker-0": -9}), {EXITS}),
    ],
)
def test_a_tampered_run_fails_its_check_and_no_other(log, tamper, expected):
    tamper(log)
    assert failed(log) == expected


def test_a_row_has_the_numbers_of_its_round(log):
    row = row_of(log, log.rounds[0])
    assert row["gb_per_s"] == pytest.approx(0.8)
    assert row["commit_pause_s"] == pytest.approx(0.002)
    assert cells(row) == ("1", "4.00", "round-1", "00000000", "10.0", "0.80", "2.0", "2/2")
    changed(survivor(log).proofs, 0, digest="other")
    assert row_of(log, log.rounds[0])["num_equal"] == 1


def test_an_aborted_round_has_no_rate_and_says_so(log):
    row = row_of(log, log.rounds[1])
    assert (row["outcome"], row["error"]) == ("aborted", str(log.rounds[1].error))
    assert cells(row) == ("2", "3.00", "round-2", "aborted", "-", "-", "-", "-")
