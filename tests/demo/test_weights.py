"""The checks of the weights demo: one tampered run for each thing that they look at."""

import dataclasses
import json
from dataclasses import dataclass

import msgspec
import pytest

from wtransfer.demo.weights import (
    Hold,
    Round,
    RunLog,
    Trace,
    cells,
    judge,
    result_of,
    row_of,
    status,
)
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

    def round(self, number, began_at, **result):
        version, step = f"round-{number}", 10 * number
        over = Round(number, version, step, 5.0 - number, f"sha-{number}", 0.001, began_at)
        self.log.rounds.append(dataclasses.replace(over, ended_at=self.now, **result))

    def commit(self, number, workers, old):
        """Write one token during the transfer, the commit, and three tokens after it."""
        version, fingerprint, began_at = f"round-{number}", f"{number:032x}", self.now
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
        seconds = {"total": 0.0125}
        report = Report(version, fingerprint, "id", 10_000_000, tuple(receipts), seconds, 0.003)
        self.round(number, began_at, report=report)
        for worker in workers:
            self.prove(worker, number)

    def abort(self, number, began_at):
        error = PeerLostError("is gone", worker="worker-1", phase="transfer")
        self.round(number, began_at, error=error)


@pytest.fixture
def log():
    """Four rounds: with both workers, with a kill, without the killed worker, with both."""
    log = RunLog(losses=[5.5, 2.5])
    writer = LogWriter(log)
    for pid, worker in enumerate(BOTH):
        writer.ready(worker, pid)
    writer.tokens(BOTH, 5, None)
    writer.commit(1, BOTH, old=None)

    began_at = writer.now
    writer.tokens(BOTH, 4, "round-1")
    writer.tokens(BOTH[:1], 4, "round-1")
    log.hold = Hold(2, began_at, writer.now)
    writer.abort(2, began_at)
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


def named(name, tamper):
    tamper.__name__ = name
    return tamper


def change_report(index, **changes):
    def tamper(log):
        over = log.rounds[index]
        over.report = dataclasses.replace(over.report, **changes)

    return named(f"report {changes}", tamper)


def change_receipt(index, **changes):
    def tamper(log):
        first, *others = log.rounds[index].report.workers
        change_report(index, workers=(dataclasses.replace(first, **changes), *others))(log)

    return named(f"receipt {changes}", tamper)


def change_error(**facts):
    def tamper(log):
        error = PeerLostError("is gone", **({"worker": "worker-1", "phase": "transfer"} | facts))
        changed(log.rounds, 1, error=error)

    return named(f"error {facts}", tamper)


def change_proof(**changes):
    return named(
        f"proof {changes}", lambda log: changed(log.traces["worker-0"][0].proofs, 0, **changes)
    )


def commit_the_round_of_the_kill(log):
    changed(log.rounds, 1, error=None, report=log.rounds[0].report)


def stop_serving_when_held(log):
    trace = log.traces["worker-1"][0]
    trace.times = [at for at in trace.times if at <= log.hold.began_at]
    del trace.versions[len(trace.times) :]


def serve_the_new_version_early(log):
    versions = log.traces["worker-0"][0].versions
    versions[versions.index("round-3") - 3] = "round-2"


def apply_the_aborted_round(log):
    applied = Applied("round-2", "f2", 100.0, 100.1)
    log.traces["worker-0"][0].commits.insert(1, applied)


def digest_before_the_abort_only(log):
    changed(log.traces["worker-0"][0].proofs, 1, began_at=log.rounds[1].ended_at - 0.001)


def never_digest_the_last_round(log):
    log.traces["worker-1"][1].proofs.clear()


def digest_an_unknown_version(log):
    log.traces["worker-0"][0].add(Proof("round-9", 100.0, "sha-9", 90, True))


def change_return(**changes):
    def tamper(log):
        trace = log.traces["worker-1"][1]
        trace.ready = msgspec.structs.replace(trace.ready, **changes)

    return named(f"return {changes}", tamper)


def do_not_catch_up(log):
    changed(log.traces["worker-1"][1].commits, -1, fingerprint="old")


def do_not_rejoin(log):
    log.traces["worker-1"].pop()


def abort_the_last_round(log):
    LogWriter(log).abort(5, log.rounds[-1].began_at + 1)


def kill_at_the_end(log):
    log.exits["worker-0"] = -9


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (change_receipt(2, digests_equal=False), {RECEIPTS}),
        (change_receipt(2, fingerprint="other"), {RECEIPTS}),
        (change_receipt(2, outcome="pending"), {RECEIPTS}),
        (change_report(0, workers=()), {RECEIPTS}),
        (change_proof(digest="other"), {DIGESTS}),
        (change_proof(trained_steps=11), {DIGESTS}),
        (change_proof(tied=False), {DIGESTS}),
        (never_digest_the_last_round, {DIGESTS}),
        (digest_an_unknown_version, {DIGESTS}),
        (change_receipt(2, seconds={"wait": 0.021}), {WAITS}),
        (change_receipt(2, seconds={"wait": 0.011}), set()),
        (stop_serving_when_held, {HELD}),
        (serve_the_new_version_early, {HELD}),
        (commit_the_round_of_the_kill, {RECEIPTS, DIGESTS, ABORT}),
        (change_error(worker="worker-0"), {ABORT}),
        (change_error(worker=None), {ABORT}),
        (change_error(phase="plan"), {ABORT}),
        (apply_the_aborted_round, {ABORT}),
        (digest_before_the_abort_only, {ABORT}),
        (change_return(version="round-1"), {REJOIN}),
        (change_return(fingerprint="f"), {REJOIN}),
        (change_return(pid=1), {REJOIN}),
        (do_not_rejoin, {DIGESTS, REJOIN, EQUAL}),
        (do_not_catch_up, {REJOIN, EQUAL}),
        (abort_the_last_round, {RECEIPTS, EQUAL}),
        (kill_at_the_end, {EXITS}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_tampered_run_fails_its_check_and_no_other(log, tamper, expected):
    tamper(log)
    assert failed(log) == expected


def test_a_row_has_the_numbers_of_its_round(log):
    row = row_of(log, log.rounds[0])
    assert row["gb_per_s"] == pytest.approx(0.8)
    assert row["memcpy_share"] == pytest.approx(0.08)
    assert row["commit_pause_s"] == pytest.approx(0.002)
    assert cells(row) == ("1", "4.00", "round-1", "00000000", "10.0", "0.80", "0.08", "2.0", "2/2")
    change_proof(digest="other")(log)
    assert row_of(log, log.rounds[0])["num_equal"] == 1


def test_an_aborted_round_has_no_rate_and_says_so(log):
    row = row_of(log, log.rounds[1])
    assert row["gb_per_s"] is row["memcpy_share"] is row["commit_pause_s"] is None
    assert (row["outcome"], row["blamed"], row["failed_in"]) == ("aborted", "worker-1", "transfer")
    assert cells(row) == ("2", "3.00", "round-2", "aborted", "-", "-", "-", "-", "-")


def test_the_result_is_json_and_has_the_whole_run(log):
    result = result_of(log, 12.5, {"rounds": [row_of(log, over) for over in log.rounds]})
    assert result.ok
    facts = json.loads(json.dumps(result.facts))
    outcomes = [each["outcome"] for each in facts["rounds"]]
    assert outcomes == ["committed", "aborted", "committed", "committed"]
    assert facts["killed"] == {"worker": "worker-1", "number": 2}
    # Over the commit, and not over what is no part of a round.
    assert facts["usual_gap_s"] == pytest.approx(0.010)
    assert facts["longest_gap_s"] == pytest.approx(0.012)
    assert (facts["first_loss"], facts["last_loss"]) == (5.5, 2.5)
    assert result.notes == [
        "before (worker-0, untrained):\n  text of None",
        "after (worker-0, round-4):\n  text of round-4",
        "between two tokens: usually 10.0 ms, at most 12.0 ms during a round",
    ]


def test_the_result_of_an_empty_run_has_no_numbers():
    result = result_of(RunLog(), 1.0, {})
    assert not result.ok
    assert result.notes == ["between two tokens: usually - ms, at most - ms during a round"]


def test_status_names_step_tokens_and_versions(log):
    assert status(RunLog()) == "starting"
    assert status(log) == (
        "step 2, loss 2.50  |  worker-0: 25 tokens, round-4  |  worker-1: 4 tokens, round-4"
    )
