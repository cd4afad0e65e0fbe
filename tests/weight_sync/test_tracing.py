"""Spans of weight rounds, as an exporter of OpenTelemetry gets them."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import wtransfer
from wtransfer.errors import NonfiniteError
from wtransfer.tracing import RoundTracer

PHASES = ["init", "plan", "transfer", "prepare", "commit", "finish"]


@pytest.fixture
def traced():
    """A tracer whose spans are kept, and a function that returns those of a name.

    A test names it before its fleet: every span must have ended when the fleet is closed.
    """
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RoundTracer(provider)
    wtransfer.hooks.register(tracer)
    yield (
        provider.get_tracer("test"),
        lambda *names: [each for each in exporter.get_finished_spans() if each.name in names],
    )
    wtransfer.hooks.unregister(tracer)
    provider.shutdown()
    assert tracer._open == {}


def test_a_round_is_a_span_of_its_phases_within_the_callers(traced, fleet, weights, until):
    made = fleet(weights)
    for _ in range(2):
        made.join()
    tracer, spans = traced
    with tracer.start_as_current_span("step"):
        round_ = made.publisher.publish("v1", wait=False)
    report = made.finish(round_)
    (step,) = spans("step")
    (span,) = spans("wtransfer.round")
    assert span.parent.span_id == step.context.span_id
    assert span.attributes == {
        "wtransfer.round_id": report.round_id,
        "wtransfer.version": "v1",
        "wtransfer.outcome": "committed",
        "wtransfer.num_workers": 2,
        "wtransfer.nbytes": report.nbytes,
        "wtransfer.fingerprint": report.fingerprint,
    }
    assert span.status.status_code is StatusCode.UNSET
    phases = spans(*PHASES)
    assert [each.name for each in phases] == PHASES
    assert {each.parent.span_id for each in phases} == {span.context.span_id}
    for one, next_one in itertools.pairwise(phases):
        assert one.end_time == next_one.start_time
    for each in phases:
        assert each.end_time - each.start_time == pytest.approx(
            report.seconds[each.name] * 1e9, abs=1
        )
    assert phases[0].start_time == span.start_time
    assert phases[-1].end_time <= span.end_time
    until(lambda: len(spans("wtransfer.update")) == 2)
    updates = spans("wtransfer.update")
    assert {each.attributes["wtransfer.worker"] for each in updates} == {"worker-0", "worker-1"}
    for each in updates:
        assert each.attributes["wtransfer.round_id"] == report.round_id
        assert each.attributes["wtransfer.fingerprint"] == report.fingerprint


def test_sessions_of_one_name_have_a_span_each(traced, fleet, weights, until):
    made = fleet(weights)
    # The default name: that of the process.
    names = {made.join(name="").session.status().worker for _ in range(2)}
    made.publisher.wait_for_workers(2)
    assert made.publish("v1").ok
    _, spans = traced
    (span,) = spans("wtransfer.round")
    assert span.attributes["wtransfer.num_workers"] == 2
    until(lambda: len(spans("wtransfer.update")) == 2)
    updates = spans("wtransfer.update")
    assert {each.attributes["wtransfer.worker"] for each in updates} == names
    assert len(names) == 1


def test_an_aborted_round_is_an_error_in_the_phase_where_it_ended(traced, fleet, weights, until):
    made = fleet(weights, nonfinite="reject")
    made.join()
    next(each for each in weights.values() if each.is_floating_point()).view(-1)[0] = torch.nan
    with pytest.raises(NonfiniteError):
        made.publish("v1")
    _, spans = traced
    (span,) = spans("wtransfer.round")
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description.startswith("NonfiniteError: ")
    assert span.attributes["wtransfer.outcome"] == "aborted"
    assert [each.name for each in span.events] == ["exception"]
    failed = [each.status.status_code is StatusCode.ERROR for each in spans(*PHASES)]
    assert failed == [False, False, False, True]
    until(lambda: spans("wtransfer.update"))
    (update,) = spans("wtransfer.update")
    assert update.status.status_code is StatusCode.ERROR


def test_a_mixed_round_is_an_error_as_well(traced, fleet, weights, torn):
    made = fleet(weights)
    made.join(torn, keep_previous=False)
    made.join()
    assert made.publish("v1").outcome == "mixed"
    _, spans = traced
    span = spans("wtransfer.round")[0]
    assert (span.status.status_code, span.attributes["wtransfer.outcome"]) == (
        StatusCode.ERROR,
        "mixed",
    )
    made.commit_errors.clear()


def test_a_round_that_no_worker_applied_failed_at_its_commit(traced, fleet, weights, unapplied):
    made = fleet(weights)
    report = unapplied(made)
    _, spans = traced
    (span,) = spans("wtransfer.round")
    assert span.status.description.startswith("CommitError: no worker holds 'v1'")
    assert span.attributes["wtransfer.fingerprint"] == report.fingerprint
    failed = [each.name for each in spans(*PHASES) if each.status.status_code is StatusCode.ERROR]
    assert failed == ["commit"]


def test_a_round_of_an_event_loop_belongs_to_the_span_of_its_task(traced, fleet, weights):
    made = fleet(weights)
    made.join()
    tracer, spans = traced

    async def main():
        with tracer.start_as_current_span("step"):
            publishing = asyncio.create_task(made.publisher.publish_async("v1"))
        while not publishing.done():
            await made.members[0].session.commit_pending_async(0.02)
        return await publishing

    assert asyncio.run(main()).ok
    (step,), (span,) = spans("step"), spans("wtransfer.round")
    assert span.parent.span_id == step.context.span_id


def test_without_opentelemetry_it_says_what_to_install():
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from wtransfer.errors import PluginNotInstalledError\n"
        "from wtransfer.tracing import RoundTracer\n"
        "try:\n    RoundTracer()\n"
        "except PluginNotInstalledError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        'tracing needs opentelemetry-api, which is not installed: pip install "wtransfer[tracing]"'
    )
