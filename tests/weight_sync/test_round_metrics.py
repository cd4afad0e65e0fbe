"""Metrics of weight rounds, as Prometheus reads them."""

from __future__ import annotations

import contextlib
import queue
import time
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import wtransfer
from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.errors import NonfiniteError, RoundAbortedError, RoundBusyError, SchemaError
from wtransfer.metrics import RoundCollector
from wtransfer.testing.fakes import MemoryEngine
from wtransfer.weight_sync.messages import FleetStatus, RoundStatus
from wtransfer.weight_sync.report import WorkerInfo


@pytest.fixture
def scraped():
    """Register a collector as an operator would; return what a server reads: key -> number."""
    with contextlib.ExitStack() as stack:

        def observe(publisher=None, **options):
            collector = RoundCollector(publisher, **options)
            wtransfer.hooks.register(collector)
            stack.callback(wtransfer.hooks.unregister, collector)
            registry = CollectorRegistry(auto_describe=True)
            registry.register(collector)
            return lambda: {
                (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(generate_latest(registry).decode())
                for sample in family.samples
                if not sample.name.endswith(("_created", "_bucket"))
            }

        yield observe


def ended(outcome, side, error=""):
    return "wtransfer_rounds_ended_total", error, outcome, side


def changes(before, after):
    """What counts, and by how much it has grown; seconds are no count."""
    return {
        key: number - before.get(key, 0)
        for key, number in after.items()
        if key[0].endswith(("_total", "_count")) and number != before.get(key, 0)
        if not key[0].endswith("_seconds_total")
    }


def test_a_committed_round_is_counted_on_both_sides(fleet, weights, scraped, until):
    made = fleet(weights)
    for _ in range(2):
        made.join()
    read = scraped(made.publisher)
    before = read()
    assert before["wtransfer_workers", "fresh"] == 2
    assert before["wtransfer_workers_current",] == 0
    assert ("wtransfer_weights_age_seconds",) not in before

    report = made.publish("v1")

    # Nothing waits for the observers of a worker.
    until(lambda: read().get(ended("committed", "worker")) == 2)
    after = read()
    stages = ("init", "plan", "transfer", "prepare", "commit", "finish", "total")
    worker_stages = ("accept", "transfer", "verify", "wait", "commit")
    assert changes(before, after) == {
        ("wtransfer_rounds_started_total", "trainer"): 1,
        ("wtransfer_rounds_started_total", "worker"): 2,
        ("wtransfer_rounds_ended_total", "", "committed", "trainer"): 1,
        ("wtransfer_rounds_ended_total", "", "committed", "worker"): 2,
        ("wtransfer_round_verified_bytes_total",): 2 * report.nbytes,
        **{("wtransfer_round_seconds_count", stage): 1 for stage in stages},
        **{("wtransfer_round_worker_seconds_count", stage): 2 for stage in worker_stages},
    }
    assert after["wtransfer_round_seconds_sum", "total"] == pytest.approx(report.seconds["total"])
    assert after["wtransfer_weights_info", report.fingerprint, "v1"] == 1
    assert 0 <= after["wtransfer_weights_age_seconds",] < 60
    assert after["wtransfer_workers", "serving"] == 2
    assert after["wtransfer_workers_current",] == 2


def test_a_catch_up_does_not_make_the_weights_younger(fleet, weights, scraped, until, monkeypatch):
    made = fleet(weights)
    made.join()
    read = scraped(made.publisher)
    now = 0
    monkeypatch.setattr("wtransfer.metrics.time", SimpleNamespace(time=lambda: now))
    made.publish("v1")
    before, now = read(), now + 1000
    late = made.join()
    until(lambda: late.session.status().pending)
    made.step()
    ended = "wtransfer_rounds_ended_total", "", "committed", "trainer"
    until(lambda: read()[ended] == before[ended] + 1)
    assert read()["wtransfer_weights_age_seconds",] == 1000
    weights["layer.0"] += 1
    made.publish("v2")
    assert read()["wtransfer_weights_age_seconds",] == 0


def test_catch_ups_are_counted_apart(fleet, weights, scraped, until):
    made = fleet(weights)
    made.join()
    read = scraped(made.publisher)
    made.publish("v1")
    assert not [key for key in read() if key[0] == "wtransfer_catch_ups_total"]
    late = made.join()
    until(lambda: late.session.status().pending)
    made.step()
    until(lambda: read().get(("wtransfer_catch_ups_total", "", "committed")) == 1)
    assert read()[ended("committed", "trainer")] == 2


def test_a_round_under_way_shows_its_bytes_and_its_workers_where_asked(
    fleet, gated, scraped, until
):
    gated.gate.clear()
    made = fleet(gated)
    sessions = [
        made.join({name: torch.zeros_like(each) for name, each in gated.tensors.items()}).session
        for _ in range(2)
    ]
    of_the_fleet, of_all = scraped(made.publisher), scraped(made.publisher, per_worker=True)
    of_one = scraped(session=sessions[0])
    round_ = made.publisher.publish("v1", wait=False)
    assert gated.reached.wait(10.0)
    # No bucket is full, so none was announced: the worker has only the plan.
    until(lambda: ("wtransfer_update_bytes", "plan") in of_one())
    now = of_all()
    nbytes = sum(each.nbytes for each in gated.tensors.values())
    assert now["wtransfer_round_bytes", "transfer"] == nbytes
    assert 0 <= now["wtransfer_round_staged_bytes", "transfer"] < nbytes
    for session in sessions:
        status = session.status()
        info = "wtransfer_joined_worker_info", status.fingerprint, "fresh", "", status.worker
        assert now[info] == 1
        assert 0 <= now["wtransfer_joined_worker_staged_bytes", status.worker] < nbytes
        assert now["wtransfer_joined_worker_state_seconds", status.worker] >= 0
    assert not [key for key in of_the_fleet() if key[0].startswith("wtransfer_joined")]
    idle_s = of_one()["wtransfer_update_idle_seconds", "plan"]
    assert of_one()["wtransfer_update_idle_seconds", "plan"] > idle_s
    gated.gate.set()
    assert made.finish(round_).ok
    over = {name for name, *_ in of_all()} | {name for name, *_ in of_one()}
    assert not over & {"wtransfer_round_bytes", "wtransfer_update_idle_seconds"}
    assert "wtransfer_joined_worker_staged_bytes" not in over


class PausingEngine(MemoryEngine):
    """Delivers each tensor when it is let go."""

    turns: queue.SimpleQueue[None] = queue.SimpleQueue()

    def receive_weights(self, update_info, load_weights):
        def load(pairs):
            self.turns.get(timeout=10.0)
            load_weights(pairs)

        super().receive_weights(update_info, load)


def test_bytes_that_come_are_progress_of_an_update(fleet, weights, scraped, until):
    WeightTransferEngineFactory.register_engine("tests-pausing", PausingEngine)
    made = fleet(weights, engine="tests-pausing")
    session = made.join().session
    read = scraped(made.publisher)
    round_ = made.publisher.publish("v1", wait=False)
    until(lambda: (now := session.status().update) and now.phase == "transfer")
    until(lambda: session.status().update.idle_s > 0.2)
    PausingEngine.turns.put(None)
    until(lambda: session.status().update.staged_nbytes)
    now = session.status().update
    first = weights["layer.0"].nbytes
    assert (now.phase, now.staged_nbytes) == ("transfer", first)
    assert now.idle_s < now.age_s - 0.2
    until(lambda: read()["wtransfer_round_staged_bytes", "transfer"] == first)
    for _ in range(len(weights) - 1):
        PausingEngine.turns.put(None)
    assert made.finish(round_).ok


class ToldPublisher:
    """Stand-in for a publisher whose round is under way: two workers of three take part."""

    def status(self):
        workers = [
            WorkerInfo(f"w{number}", "i", 0, 1, None, "f", "fresh", nbytes=nbytes)
            for number, nbytes in enumerate((7, 5, None))
        ]
        under_way = RoundStatus("r", "v1", "transfer", 9, age_s=3.0, idle_s=1.0, is_catch_up=False)
        return FleetStatus(None, None, workers, [], {}, under_way, None)


def test_bytes_of_a_round_are_those_of_its_slowest_worker(scraped):
    now = scraped(ToldPublisher(), per_worker=True)()
    assert now["wtransfer_round_bytes", "transfer"] == 9
    assert now["wtransfer_round_staged_bytes", "transfer"] == 5
    staged = {key[1]: number for key, number in now.items() if "joined_worker_staged" in key[0]}
    assert staged == {"w0": 7, "w1": 5}


def test_refused_plans_are_counted_by_reason_and_later_failures_are_not(
    fleet, weights, scraped, until
):
    made = fleet(weights, nonfinite="reject")
    misfit = made.join({"another": torch.zeros(1)})
    read = scraped(made.publisher)
    with pytest.raises(SchemaError) as caught:
        made.publish("v1")
    assert caught.value.phase == "plan"
    until(lambda: read().get(ended("aborted", "worker", "SchemaError")) == 1)
    made.members.remove(misfit)
    misfit.session.close()
    until(lambda: not made.publisher.workers())
    made.join()
    next(each for each in weights.values() if each.is_floating_point()).view(-1)[0] = torch.nan
    with pytest.raises(NonfiniteError):
        made.publish("v2")
    until(lambda: read().get(ended("aborted", "worker", "RoundAbortedError")) == 1)
    refused = {key: number for key, number in read().items() if "plans_refused" in key[0]}
    assert refused == {("wtransfer_plans_refused_total", "SchemaError"): 1}


def test_plan_that_comes_while_a_commit_is_pending_is_counted_as_refused(
    fleet, weights, scraped, until, unapplied
):
    made = fleet(weights)
    read = scraped(made.publisher)
    unapplied(made)
    with pytest.raises(RoundBusyError):
        made.publisher.publish("v2")
    until(lambda: read().get(("wtransfer_plans_refused_total", "RoundBusyError")) == 1)
    # Beside the one that is pending, each that has ended had begun.
    now = read()
    refused = now[ended("aborted", "worker", "RoundBusyError")]
    assert now["wtransfer_rounds_started_total", "worker"] == 1 + refused


def test_refused_tokens_are_counted_at_both_ends_from_zero(fleet, weights, scraped, until):
    made = fleet(weights)
    read = scraped(made.publisher)
    before = read()
    refused = "wtransfer_peers_refused_total"
    for door in ("listener", "dialer", "http"):
        assert (refused, door, "AuthenticationError") in before
    with wtransfer.WorkerSession(
        {"w": torch.zeros(1)}, join=made.publisher.address, token="another"
    ):
        until(lambda: len(changes(before, read())) == 2)
        assert changes(before, read()) == {
            (refused, "dialer", "AuthenticationError"): 1,
            (refused, "listener", "AuthenticationError"): 1,
        }


def test_seconds_of_observers_are_summed_by_hook(fleet, weights, scraped, until):
    class Slow:
        @wtransfer.hookimpl
        def wtransfer_round_started(self):
            time.sleep(0.1)

    made = fleet(weights)
    made.join()
    read = scraped(made.publisher)
    before = read()
    seconds = "wtransfer_observers_seconds_total"
    assert {key[1] for key in before if key[0] == seconds} == {
        "wtransfer_backend_loaded",
        "wtransfer_round_aborted",
        "wtransfer_round_ended",
        "wtransfer_round_started",
        "wtransfer_weights_committed",
    }
    slow = Slow()
    wtransfer.hooks.register(slow)
    try:
        assert made.publish("v1").ok
        until(lambda: read().get(ended("committed", "worker")) == 1)
    finally:
        wtransfer.hooks.unregister(slow)
    after = read()
    grown = {key[1]: after[key] - before[key] for key in before if key[0] == seconds}
    # Once on the trainer, once on the worker.
    assert grown["wtransfer_round_started"] >= 0.2
    assert grown["wtransfer_round_aborted"] == 0


def test_an_aborted_round_is_counted_by_its_error_and_changes_nothing_else(
    fleet, weights, scraped, until
):
    made = fleet(weights, nonfinite="reject")
    made.join()
    read = scraped(made.publisher)
    first = made.publish("v1")
    until(lambda: read().get(ended("committed", "worker")) == 1)
    before = read()
    floats = next(each for each in weights.values() if each.is_floating_point())
    floats.view(-1)[0] = torch.nan
    with pytest.raises(NonfiniteError):
        made.publish("v2")
    until(lambda: read().get(ended("aborted", "worker", "RoundAbortedError")) == 1)
    after = read()
    assert changes(before, after) == {
        ("wtransfer_rounds_ended_total", "RoundAbortedError", "aborted", "worker"): 1,
        ("wtransfer_rounds_started_total", "trainer"): 1,
        ("wtransfer_rounds_started_total", "worker"): 1,
        ("wtransfer_rounds_ended_total", "NonfiniteError", "aborted", "trainer"): 1,
    }
    assert after["wtransfer_weights_info", first.fingerprint, "v1"] == 1
    assert after["wtransfer_workers_current",] == 1


def test_outcomes_of_the_publisher_are_counted_from_zero(fleet, weights, scraped):
    read = scraped(fleet(weights).publisher)()
    for outcome in ("committed", "mixed", "verified", "aborted", "failed"):
        assert read["wtransfer_rounds_ended_total", "", outcome, "trainer"] == 0


def test_a_mixed_round_shows_in_the_workers_that_hold_its_version(
    fleet, weights, scraped, join, until
):
    made = fleet(weights)
    broken = join(made)
    made.join()
    read = scraped(made.publisher)
    broken.target.takes = broken.contents
    broken.target.fails_at, broken.target.keeps_failing = 0, True
    report = made.publish("v1")
    assert report.outcome == "mixed"
    until(lambda: read().get(ended("aborted", "worker", "CommitError")))
    now = read()
    # Catch-ups of the one that stays behind may have followed, and fail as well.
    assert now["wtransfer_rounds_ended_total", "", "mixed", "trainer"] >= 1
    assert now["wtransfer_rounds_ended_total", "CommitError", "aborted", "worker"] >= 1
    assert now["wtransfer_workers_current",] == 1
    # Not all workers have it.
    assert ("wtransfer_weights_age_seconds",) not in now
    made.commit_errors.clear()


def test_a_mixed_round_that_no_worker_applied_has_an_error(fleet, weights, scraped, unapplied):
    made = fleet(weights)
    read = scraped(made.publisher)
    unapplied(made)
    assert read()["wtransfer_rounds_ended_total", "CommitError", "mixed", "trainer"] == 1


def test_every_round_of_the_publisher_ends_once_with_the_phase_it_ended_in(fleet, weights):
    ends = []

    class Ends:
        @wtransfer.hookimpl
        def wtransfer_round_ended(self, version, outcome, report, error, seconds):
            ends.append((version, outcome, report, error, [*seconds]))

    observer = Ends()
    wtransfer.hooks.register(observer)
    try:
        made = fleet(weights)
        made.join()
        report = made.publish("v1")
        round_ = made.publisher.publish("dry", dry_run=True, wait=False)
        dry = made.finish(round_)
        called_off = made.publisher.publish("off", wait=False)
        called_off.abort()
        with pytest.raises(RoundAbortedError) as caught:
            made.finish(called_off)
    finally:
        wtransfer.hooks.unregister(observer)
    phases = ["init", "plan", "transfer", "prepare"]
    assert ends[:2] == [
        ("v1", "committed", report, None, [*phases, "commit", "finish", "total"]),
        ("dry", "verified", dry, None, [*phases, "finish", "total"]),
    ]
    (version, outcome, none, error, seconds), *more = ends[2:]
    assert (version, outcome, none, error, more) == ("off", "aborted", None, caught.value, [])
    assert seconds == [*phases[: phases.index(error.phase) + 1], "total"]
