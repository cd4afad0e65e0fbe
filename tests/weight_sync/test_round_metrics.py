"""Metrics of weight rounds, as Prometheus reads them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import wtransfer
from wtransfer.errors import NonfiniteError, RoundAbortedError
from wtransfer.metrics import RoundCollector


@pytest.fixture
def scraped():
    """Register a collector as an operator would; return what a server reads: key -> number."""
    with contextlib.ExitStack() as stack:

        def observe(publisher=None):
            collector = RoundCollector(publisher)
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
    """What counts, and by how much it has grown."""
    return {
        key: number - before.get(key, 0)
        for key, number in after.items()
        if key[0].endswith(("_total", "_count")) and number != before.get(key, 0)
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
