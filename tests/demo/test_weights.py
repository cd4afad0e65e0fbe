"""The checks of the weights demo: one tampered run for each thing that they look at."""

import json
from dataclasses import dataclass

import msgspec
import pytest

from wtransfer.demo.messages import (
    Applied,
    Held,
    Listening,
    Proof,
    Ready,
    Receipt,
    RoundOver,
    Sample,
    Tokens,
    Trained,
)
from wtransfer.demo.weights import (
    Kill,
    RunLog,
    WorkerTrace,
    cells,
    judge,
    result_of,
    row_of,
    status,
)

TOKEN_S = 0.010
COMMIT_S = 0.002
BOTH = ("worker-0", "worker-1")
RECEIPTS, DIGESTS, WAITS, HELD, ABORT, REJOIN, EQUAL, EXITS = range(8)


@dataclass
class LogWriter:
    """Writes the log of a run in which everything is as promised."""

    log: RunLog
    now: float = 100.0

    def tokens(self, workers, num_tokens, version):
        for worker in workers:
            ended_at = tuple(self.now + TOKEN_S * (i + 1) for i in range(num_tokens))
            self.log.add(Tokens(worker, version, ended_at))
        self.now += TOKEN_S * num_tokens

    def ready(self, worker, pid):
        self.log.add(Ready(worker, pid, None, f"local:{pid:032x}", "fresh"))

    def commit(self, number, workers, old):
        """Write one token during the transfer, the commit, and three tokens after it."""
        version, fingerprint = f"round-{number}", f"{number:032x}"
        started_at = self.now
        self.tokens(workers, 1, old)
        for worker in workers:
            commit = (self.now, self.now + COMMIT_S)
            self.log.add(Applied(worker, version, fingerprint, *commit))
        self.now += COMMIT_S
        self.tokens(workers, 3, version)
        receipts = tuple(Receipt(w, "committed", fingerprint, True, 0.5 * TOKEN_S) for w in workers)
        self.log.add(
            RoundOver(
                number=number,
                version=version,
                outcome="committed",
                step=10 * number,
                loss=5.0 - number,
                digest=f"sha-{number}",
                memcpy_s=0.001,
                started_at=started_at,
                fingerprint=fingerprint,
                nbytes=10_000_000,
                packed_s=0.003,
                total_s=0.0125,
                receipts=receipts,
            )
        )
        for worker in workers:
            self.prove(worker, number)

    def abort(self, number, started_at):
        self.log.add(
            RoundOver(
                number=number,
                version=f"round-{number}",
                outcome="aborted",
                step=10 * number,
                loss=3.0,
                digest=f"sha-{number}",
                memcpy_s=0.001,
                started_at=started_at,
                total_s=self.now - started_at,
                error="worker-1 was lost",
                blamed="worker-1",
                failed_in="transfer",
            )
        )

    def prove(self, worker, number):
        self.log.add(Proof(worker, f"round-{number}", f"sha-{number}", 10 * number, True))


@pytest.fixture
def log():
    """Four rounds: with both workers, with a kill, without the killed worker, with both."""
    log = RunLog()
    writer = LogWriter(log)
    log.add(Listening("unix:@x", 1000))
    for pid, worker in enumerate(BOTH):
        writer.ready(worker, pid)
    writer.tokens(BOTH, 5, None)
    log.add(Trained(1, 5.5))
    log.add(Sample("worker-0", None, "q#.x"))
    writer.commit(1, BOTH, old=None)

    started_at = writer.now
    log.add(Held(writer.now, 10, 20))
    writer.tokens(BOTH, 4, "round-1")
    log.kill = Kill("worker-1", 2, writer.now)
    writer.tokens(BOTH[:1], 4, "round-1")
    log.resumed_at = writer.now
    writer.abort(2, started_at)
    writer.prove("worker-0", 1)

    writer.commit(3, BOTH[:1], old="round-1")
    writer.ready("worker-1", 7)
    log.events.append("worker-1 is back")
    writer.commit(4, BOTH, old="round-3")
    log.add(Trained(50, 2.5))
    log.add(Sample("worker-0", "round-4", "The class"))
    log.rows = [row_of(log, over) for over in log.rounds]
    log.exits = {"trainer": 0, "worker-0": 0, "worker-1": 0}
    return log


def failed(log):
    return {number for number, check in enumerate(judge(log)) if not check.kept}


def test_a_run_as_promised_is_accepted(log):
    assert failed(log) == set()


def test_an_empty_run_keeps_no_promise():
    assert failed(RunLog()) == set(range(8))


def changed(container, key, **changes):
    container[key] = msgspec.structs.replace(container[key], **changes)


def named(name, tamper):
    tamper.__name__ = name
    return tamper


def change_round(index, **changes):
    return named(f"round {changes}", lambda log: changed(log.rounds, index, **changes))


def change_receipt(index, **changes):
    def tamper(log):
        first, *others = log.rounds[index].receipts
        changed(log.rounds, index, receipts=(msgspec.structs.replace(first, **changes), *others))

    return named(f"receipt {changes}", tamper)


def change_proof(**changes):
    return named(
        f"proof {changes}", lambda log: changed(log.traces["worker-0"][0].proofs, 0, **changes)
    )


def stop_serving_when_held(log):
    trace = log.traces["worker-1"][0]
    trace.times = [at for at in trace.times if at <= log.held.at]
    del trace.versions[len(trace.times) :]


def serve_the_new_version_early(log):
    versions = log.traces["worker-0"][0].versions
    versions[versions.index("round-3") - 3] = "round-2"


def claim_a_version(log):
    trace = log.traces["worker-1"][1]
    trace.ready = msgspec.structs.replace(trace.ready, version="round-1", fingerprint="f")


def rejoin_with_fingerprint_only(log):
    trace = log.traces["worker-1"][1]
    trace.ready = msgspec.structs.replace(trace.ready, fingerprint="f")


def apply_the_aborted_round(log):
    trace = log.traces["worker-0"][0]
    trace.commits.insert(1, Applied("worker-0", "round-2", "f2", 100.0, 100.1))


def forget_the_digest_after_the_abort(log):
    proofs = log.traces["worker-0"][0].proofs
    proofs.remove(next(proof for proof in proofs if proof.version == "round-1"))


def never_digest_the_last_round(log):
    log.traces["worker-1"][1].proofs.clear()


def digest_an_unknown_version(log):
    log.add(Proof("worker-0", "round-9", "sha-9", 90, True))


def do_not_catch_up(log):
    changed(log.traces["worker-1"][1].commits, -1, fingerprint="old")


def do_not_rejoin(log):
    log.traces["worker-1"].pop()


def rejoin_as_the_same_process(log):
    trace = log.traces["worker-1"][1]
    trace.ready = msgspec.structs.replace(trace.ready, pid=log.traces["worker-1"][0].ready.pid)


def abort_the_last_round(log):
    LogWriter(log, log.rounds[-1].started_at + 1).abort(5, log.rounds[-1].started_at + 1)


def kill_at_the_end(log):
    log.exits["worker-0"] = -9


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (change_receipt(0, digests_equal=False), {RECEIPTS}),
        (change_receipt(0, fingerprint="other"), {RECEIPTS}),
        (change_receipt(0, outcome="pending"), {RECEIPTS}),
        (change_round(0, receipts=()), {RECEIPTS}),
        (change_round(2, outcome="mixed"), {RECEIPTS}),
        (change_proof(digest="other"), {DIGESTS}),
        (change_proof(trained_steps=11), {DIGESTS}),
        (change_proof(tied=False), {DIGESTS}),
        (never_digest_the_last_round, {DIGESTS}),
        (digest_an_unknown_version, {DIGESTS}),
        (change_receipt(2, waited_s=0.021), {WAITS}),
        (change_receipt(2, waited_s=0.011), set()),
        (stop_serving_when_held, {HELD}),
        (serve_the_new_version_early, {HELD}),
        (change_round(1, outcome="committed"), {ABORT}),
        (change_round(1, blamed="worker-0"), {ABORT}),
        (change_round(1, blamed=None), {ABORT}),
        (change_round(1, failed_in="plan"), {ABORT}),
        (apply_the_aborted_round, {ABORT}),
        (forget_the_digest_after_the_abort, {ABORT}),
        (claim_a_version, {REJOIN}),
        (rejoin_with_fingerprint_only, {REJOIN}),
        (rejoin_as_the_same_process, {REJOIN}),
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
    row = log.rows[0]
    assert row["gb_per_s"] == pytest.approx(0.8)
    assert row["memcpy_share"] == pytest.approx(0.08)
    assert row["commit_pause_s"] == pytest.approx(0.002)
    assert cells(row) == ("1", "4.00", "round-1", "00000000", "10.0", "0.80", "0.08", "2.0", "2/2")


def test_a_live_model_with_other_weights_is_not_counted_as_equal(log):
    change_proof(digest="other")(log)
    assert row_of(log, log.rounds[0])["num_equal"] == 1


def test_an_aborted_round_has_no_rate_and_says_so(log):
    row = log.rows[1]
    assert row["gb_per_s"] is row["memcpy_share"] is row["commit_pause_s"] is None
    assert (row["blamed"], row["failed_in"]) == ("worker-1", "transfer")
    assert cells(row) == ("2", "3.00", "round-2", "aborted", "-", "-", "-", "-", "-")


def test_gaps_are_taken_over_reports_and_over_commits():
    trace = WorkerTrace(Ready("w", 1, None, "local:1", "fresh"))
    assert trace.gaps(0.0, 9.0) == []
    trace.times = [1.0, 2.0, 3.0, 7.0, 8.0]
    assert trace.gaps(3.5, 4.0) == [(3.0, 7.0)]
    assert trace.gaps(1.5, 2.5) == [(1.0, 2.0), (2.0, 3.0)]
    assert trace.gaps(8.0, 9.0) == []


def test_versions_between_excludes_the_ends():
    trace = WorkerTrace(Ready("w", 1, None, "local:1", "fresh"))
    trace.times, trace.versions = [1.0, 2.0, 3.0, 7.0, 8.0], [None, None, None, "v1", "v1"]
    assert trace.versions_between(1.0, 8.0) == [None, None, "v1"]


def test_the_result_is_json_and_has_the_whole_run(log):
    result = result_of(log, 12.5)
    assert result.ok
    facts = json.loads(json.dumps(result.facts))
    assert [each["outcome"] for each in facts["rounds"]] == [
        *("committed", "aborted"),
        *("committed", "committed"),
    ]
    assert facts["killed"] == {"worker": "worker-1", "number": 2, "at": log.kill.at}
    assert facts["usual_gap_s"] == pytest.approx(0.010)
    assert facts["longest_gap_s"] == pytest.approx(0.012)
    assert (facts["parameters"], facts["first_loss"], facts["last_loss"]) == (1000, 5.5, 2.5)
    assert facts["events"] == ["worker-1 is back"]
    assert result.notes == [
        "before (worker-0, untrained):\n  q#.x",
        "after (worker-0, round-4):\n  The class",
        "between two tokens: usually 10.0 ms, at most 12.0 ms during a round",
    ]


def test_the_result_of_an_empty_run_has_no_numbers():
    result = result_of(RunLog(), 1.0)
    assert not result.ok
    assert result.notes == ["between two tokens: usually - ms, at most - ms during a round"]


def test_status_names_step_tokens_and_versions(log):
    assert status(RunLog()) == "starting"
    assert status(log) == (
        "step 50, loss 2.50  |  worker-0: 25 tokens, round-4  |  worker-1: 4 tokens, round-4"
    )
