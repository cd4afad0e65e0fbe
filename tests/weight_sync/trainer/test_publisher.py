"""Who may publish what, when; joiners, lost workers, policies, and rounds that are not alone."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import pytest
import torch

from wtransfer.engines.interface import ParamMeta
from wtransfer.errors import (
    ClosedError,
    ManifestError,
    NonfiniteError,
    NoWorkersError,
    PluginBlockedError,
    RoundAbortedError,
    RoundBusyError,
    SchemaError,
    SourceError,
    StagingMemoryError,
    StallError,
    UnknownBackendError,
)
from wtransfer.testing.contents import contents
from wtransfer.testing.faults import Fault
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.trainer.source import StateDictSource
from wtransfer.weight_sync.worker.session import WorkerSession


class Gated(StateDictSource):
    """A source whose passes wait at the second tensor while the gate is closed."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.tensors = tensors
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def iter_full(self):
        for number, pair in enumerate(super().iter_full()):
            if number == 1:
                self.reached.set()
                self.gate.wait()
            yield pair


@pytest.fixture
def gated(weights):
    source = Gated(weights)
    yield source
    source.gate.set()


def like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# -- joining


def test_a_publisher_that_made_its_token_says_where_to_read_it(weights, monkeypatch):
    monkeypatch.delenv("WTRANSFER_TOKEN", raising=False)
    monkeypatch.delenv("WTRANSFER_TOKEN_FILE", raising=False)
    with (
        Publisher(weights) as publisher,
        pytest.raises(NoWorkersError, match="its `token`"),
    ):
        publisher.wait_for_workers(1, timeout_s=0.01)
    with Publisher(weights, token="given") as publisher:
        with pytest.raises(NoWorkersError) as caught:
            publisher.wait_for_workers(1, timeout_s=0.01)
        assert "`token`" not in str(caught.value)


def test_a_wrong_token_is_logged_once_on_each_side(weights, caplog):
    with Publisher(weights) as publisher:
        session = WorkerSession(like(weights), join=publisher.address, token="wrong")
        until(lambda: session.refusal is not None and publisher.refusal is not None)
        session.close()
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert sorted("refused a peer" in each.getMessage() for each in warnings) == [False, True]
    assert all("token" in each.getMessage() for each in warnings)


WITHOUT_DESCRIPTORS = """
import os, resource, sys
import torch
from wtransfer import Publisher
from wtransfer.errors import DescriptorLimitError

weights = {"a": torch.zeros(4)}
Publisher(weights).close()  # whatever is imported once is imported now
limit = max(map(int, os.listdir("/proc/self/fd"))) + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
taken, before = [], None
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
failures = 0
while True:
    try:
        publisher = Publisher(weights)
        break
    except DescriptorLimitError as error:
        assert "ulimit -n" in str(error), error
        failures += 1
        os.close(taken.pop())
print(failures > 0)
publisher.close()
"""


def test_too_few_descriptors_are_named():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


# -- before a round


def test_without_workers_nothing_is_published(fleet, weights):
    made = fleet(weights)
    with pytest.raises(NoWorkersError, match="0 workers have joined, 1 are needed"):
        made.publisher.publish("v1")
    made.join()
    assert made.publish("v2").ok


def test_fewer_workers_than_wanted_are_too_few(fleet, weights):
    made = fleet(weights, min_workers=2)
    made.join()
    with pytest.raises(NoWorkersError, match="1 workers have joined, 2 are needed"):
        made.publisher.publish("v1")
    with pytest.raises(NoWorkersError, match="wait_for_workers"):
        made.publisher.wait_for_workers(2, timeout_s=0.05)
    made.join()
    made.publisher.wait_for_workers(2, timeout_s=5)
    assert made.publish("v2").ok


@pytest.mark.parametrize("version", ["", "v" * 257, 7, None])
def test_a_label_is_short_text(fleet, weights, version):
    made = fleet(weights)
    made.join()
    with pytest.raises(ValueError, match="expected a label of 1 to 256 characters"):
        made.publisher.publish(version)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"on_lost_worker": "ignore"},
            "on_lost_worker is 'ignore', expected one of 'abort', 'drop'",
        ),
        ({"nonfinite": "hide"}, "expected one of 'allow', 'warn', 'reject'"),
        ({"options": {"colour": "red"}}, "has the fields: .*bucket_nbytes"),
        ({"options": {"bucket_nbytes": 0}}, "bucket_nbytes is 0, expected > 0"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(weights, arguments, text):
    with pytest.raises(ValueError, match=text):
        Publisher(weights, **arguments)


def test_an_unknown_engine_is_refused_with_those_that_exist(weights):
    with pytest.raises(UnknownBackendError, match="shm"):
        Publisher(weights, engine="carrier-pigeon")


def test_a_closed_publisher_refuses_to_be_used(fleet, weights):
    publisher = fleet(weights).publisher
    publisher.close()
    publisher.close()
    with pytest.raises(ClosedError):
        publisher.publish("v1")
    with pytest.raises(ClosedError):
        publisher.wait_for_workers(1)


# -- the plan


# FAULTS 1
def test_a_model_of_another_form_is_refused_before_any_byte_moves(fleet, engine, weights, faults):
    made = fleet(weights, engine=engine)
    fitting = made.join()
    assert made.publish("v1").ok
    before = fitting.contents
    other = like(weights)
    other["layer.1"] = torch.zeros(4, 3)
    other["layer.2"] = torch.zeros(3, 4, dtype=torch.float64)
    other["layer.9"] = other.pop("layer.3")
    misfit = made.join(other)
    # Would fire with the first tensor that moves.
    faults.arm(Fault("drop", tensor=0))
    with pytest.raises(SchemaError, match="does not fit the target in 4 of its names") as caught:
        made.publish("v2")
    assert faults.fired == []
    assert caught.value.mismatches == [
        "layer.1: wanted float32 [4, 3], got float32 [3, 4]",
        "layer.2: wanted float64 [3, 4], got float32 [3, 4]",
        "layer.3: wanted nothing (the target has no such name), got float32 [3, 4]",
        "layer.9: wanted float32 [3, 4], got nothing",
    ]
    assert (caught.value.worker, caught.value.phase) == ("worker-1", "plan")
    assert fitting.contents == before
    assert misfit.session.state == "fresh"
    made.leave(misfit)
    faults.disarm()
    assert made.publish("v3").ok


# FAULTS 45
def test_another_float_is_refused_unless_it_was_declared(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    made.join({name: tensor.bfloat16() for name, tensor in weights.items()})
    with pytest.raises(SchemaError, match=r"wanted bfloat16 .*, got float32"):
        made.publish("v1")


class Huge(StateDictSource):
    """Says that it has more than any machine could stage."""

    moved = False

    @property
    def metadata(self):
        return [ParamMeta("w", torch.uint8, (2**50,))]

    def iter_full(self):
        self.moved = True
        yield "w", torch.empty(2**50, dtype=torch.uint8)


class Anything:
    """A target that takes whatever comes."""

    def schema(self):
        return None

    def apply(self, tensors):
        """Keep nothing."""

    def capture(self):
        return None


# FAULTS 46
def test_what_cannot_be_staged_is_refused_before_any_byte_moves(fleet, engine):
    source = Huge({})
    made = fleet(source, engine=engine)
    made.join(Anything())
    with pytest.raises(StagingMemoryError) as caught:
        made.publish("v1")
    assert not source.moved
    assert caught.value.phase == ("plan" if engine == "tests-memory" else "transfer")


# FAULTS 2, 4
@pytest.mark.parametrize(
    "meta",
    [
        ParamMeta("", torch.float32, (1,)),
        ParamMeta("\ud800", torch.float32, (1,)),
        ParamMeta("layer.1", torch.float32, (1,)),
        ParamMeta("w", torch.float32, (2**62,)),
        ParamMeta("w", torch.float32, (-1,)),
        ParamMeta("w", torch.complex32, (1,)),
    ],
    ids=["no name", "no text", "twice", "too large", "negative", "no wire dtype"],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_source_that_no_manifest_can_hold_ends_its_round_only(fleet, weights, meta):
    class Extended(StateDictSource):
        extra = ()

        @property
        def metadata(self):
            return [*super().metadata, *self.extra]

    source = Extended(weights)
    made = fleet(source)
    made.join(like(weights))
    source.extra = (meta,)
    with pytest.raises(ManifestError):
        made.publish("v1")
    source.extra = ()
    assert made.publish("v2").ok


def test_a_source_that_loses_a_tensor_on_the_way_ends_its_round_only(fleet, engine, weights):
    class Losing(StateDictSource):
        loses = True

        def iter_full(self):
            pairs = list(super().iter_full())
            yield from pairs[:-1] if self.loses else pairs

    source = Losing(weights)
    made = fleet(source, engine=engine)
    made.join(like(weights))
    with pytest.raises(SourceError, match=r"ended before 'layer\.3'"):
        made.publish("v1")
    source.loses = False
    assert made.publish("v2").ok


# -- during a round


def test_a_second_round_is_refused_with_holder_and_age(fleet, engine, gated):
    made = fleet(gated, engine=engine)
    member = made.join(like(gated.tensors))
    gated.gate.clear()
    round_ = made.publisher.publish("v1", wait=False)
    assert gated.reached.wait(5)
    with pytest.raises(RoundBusyError, match=r"'v1'\) is under way since \d+\.\d s") as busy:
        made.publisher.publish("v2")
    assert busy.value.round_id == round_.round_id
    gated.gate.set()
    assert made.finish(round_).ok
    assert member.contents == contents(gated.tensors)


def test_once_packed_the_trainer_may_train_on(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    member = made.join()
    for version in ("v1", "v2"):
        sent = contents(weights)
        round_ = made.publisher.publish(version, wait=False)
        round_.packed(timeout_s=5)
        for tensor in weights.values():
            tensor.add_(1)
        report = made.finish(round_)
        assert report.ok
        assert member.contents == sent
        assert 0 < report.packed_s <= report.seconds["total"]


def test_waiting_for_a_round_is_bounded_and_does_not_end_it(fleet, gated):
    made = fleet(gated)
    made.join(like(gated.tensors))
    gated.gate.clear()
    round_ = made.publisher.publish("v1", wait=False)
    with pytest.raises(StallError, match=r"not ended in 0.05 s"):
        round_.result(timeout_s=0.05)
    with pytest.raises(StallError, match="not packed"):
        round_.packed(timeout_s=0.05)
    gated.gate.set()
    assert made.finish(round_).ok


# FAULTS 19, from the caller's side
def test_an_aborted_round_is_over_within_a_second_and_a_second_abort_does_nothing(
    fleet, engine, gated
):
    made = fleet(gated, engine=engine)
    member = made.join(like(gated.tensors))
    assert made.publish("v1").ok
    before = member.contents
    gated.tensors["layer.0"].add_(1)
    gated.reached.clear()
    gated.gate.clear()
    round_ = made.publisher.publish("v2", wait=False)
    assert gated.reached.wait(5)
    begun = time.monotonic()
    round_.abort("enough")
    round_.abort("again")
    gated.gate.set()
    with pytest.raises(RoundAbortedError, match="aborted: enough") as caught:
        round_.result(timeout_s=5)
    assert time.monotonic() - begun < 1.0
    assert (caught.value.phase, caught.value.version) == ("transfer", "v2")
    round_.abort("after the end")
    assert member.contents == before
    assert made.publish("v3").ok
    assert member.contents == contents(gated.tensors)


def test_closing_the_publisher_ends_its_round(fleet, engine, gated):
    made = fleet(gated, engine=engine)
    member = made.join(like(gated.tensors))
    gated.gate.clear()
    round_ = made.publisher.publish("v1", wait=False)
    assert gated.reached.wait(5)
    threading.Timer(0.2, gated.gate.set).start()
    made.publisher.close()
    with pytest.raises(RoundAbortedError, match="the publisher was closed"):
        round_.result(timeout_s=5)
    assert member.session.state == "fresh"


# FAULTS 12: whoever is lost decides nothing for the rest, if that is wished.
@pytest.mark.parametrize("policy", ["abort", "drop"])
def test_a_worker_that_leaves_during_a_round(fleet, engine, gated, policy):
    made = fleet(gated, engine=engine, on_lost_worker=policy)
    stays, leaves = made.join(like(gated.tensors)), made.join(like(gated.tensors))
    assert made.publish("v1").ok
    before = stays.contents
    gated.tensors["layer.0"].add_(1)
    gated.reached.clear()
    gated.gate.clear()
    round_ = made.publisher.publish("v2", wait=False)
    assert gated.reached.wait(5)
    made.leave(leaves)
    gated.gate.set()
    if policy == "abort":
        with pytest.raises(ConnectionError, match="worker-1"):
            made.finish(round_)
        assert stays.contents == before
    else:
        report = made.finish(round_)
        assert {each.worker: each.outcome for each in report.workers} == {
            "worker-0": "committed",
            "worker-1": "dropped",
        }
        assert stays.contents == contents(gated.tensors)
    assert made.publish("v3").ok


def test_the_last_worker_is_never_dropped(fleet, gated):
    made = fleet(gated, on_lost_worker="drop")
    leaves = made.join(like(gated.tensors))
    gated.gate.clear()
    round_ = made.publisher.publish("v1", wait=False)
    assert gated.reached.wait(5)
    made.leave(leaves)
    gated.gate.set()
    with pytest.raises(ConnectionError, match="worker-0"):
        round_.result(timeout_s=5)


# -- who may take part


def test_a_worker_takes_only_the_engines_that_it_allows(fleet, engines, weights):
    made = fleet(weights, engine=engines["shm"])
    strict = made.join(engines=["file", "shm"])
    for _ in range(2):
        with pytest.raises(PluginBlockedError, match="allows only 'file', 'shm'") as caught:
            made.publish("v1")
        assert (caught.value.worker, caught.value.phase) == ("worker-0", "init")
        assert caught.value.plugin == f"engines:{engines['shm']}"
    made.leave(strict)
    made.join(engines=[engines["shm"]])
    assert made.publish("v2").ok


def test_a_late_joiner_is_served_at_once_where_the_engine_can(fleet, weights):
    made = fleet(weights, engine="shm")
    made.join()
    report = made.publish("v1")
    sent = contents(weights)
    # The trainer has gone on; a joiner gets what was committed, not what is there now.
    weights["layer.0"].add_(1)
    late = made.join()
    assert late.session.commit_pending(5)
    assert (late.session.version, late.session.fingerprint) == ("v1", report.fingerprint)
    assert late.contents == sent


def test_a_late_joiner_stays_behind_where_the_engine_cannot(fleet, engines, weights):
    made = fleet(weights, engine=engines["memory"])
    made.join()
    assert made.publish("v1").ok
    late = made.join()
    assert not late.session.commit_pending(0.3)
    assert late.session.state == "fresh"
    assert made.publish("v2").ok
    assert late.contents == contents(weights)


def test_a_joiner_during_a_round_is_named_and_served_after_it(fleet, gated):
    made = fleet(gated, engine="shm")
    made.join(like(gated.tensors))
    gated.gate.clear()
    round_ = made.publisher.publish("v1", wait=False)
    assert gated.reached.wait(5)
    late = made.join(like(gated.tensors))
    gated.gate.set()
    report = made.finish(round_)
    assert {each.worker: each.outcome for each in report.workers} == {
        "worker-0": "committed",
        "worker-1": "behind",
    }
    until(lambda: made.step() or late.session.version == "v1")
    assert late.contents == contents(gated.tensors)


def test_the_same_weights_have_the_same_fingerprint_under_any_label(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    made.join()
    first, second = made.publish("v1"), made.publish("v2")
    assert first.fingerprint == second.fingerprint == made.publisher.fingerprint
    assert first.round_id != second.round_id
    assert made.publisher.version == "v2"


def test_a_report_can_be_read(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    made.join()
    report = made.publish("step-7")
    text = str(report)
    assert "step-7  committed" in text
    assert "worker-0  committed  holds step-7  192 bytes, digests equal" in text
    assert report.nbytes == 192
    phases = {"init", "plan", "transfer", "prepare", "commit", "finish", "total"}
    assert set(report.seconds) == phases
    assert set(report.workers[0].seconds) == {"accept", "transfer", "verify", "wait", "commit"}


# -- FAULTS 8: NaN and infinity


@pytest.fixture
def poisoned(weights):
    weights["layer.1"][0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    weights["layer.3"][0, 0] = float("nan")
    return weights


def test_nonfinite_weights_travel_by_default(fleet, engine, poisoned):
    made = fleet(poisoned, engine=engine)
    member = made.join()
    report = made.publish("v1")
    assert report.ok
    assert report.nonfinite == {}
    assert member.contents == contents(poisoned)
    poisoned["layer.1"].zero_()
    poisoned["layer.3"].zero_()
    assert made.publish("v2").nonfinite == {}


def test_nonfinite_weights_can_be_warned_of(fleet, engine, poisoned, caplog):
    made = fleet(poisoned, engine=engine, nonfinite="warn")
    made.join()
    with caplog.at_level(logging.WARNING, "wtransfer"):
        assert made.publish("v1").ok
    assert "v1: 2 tensors hold NaN or infinity, first 'layer.1' with 3 elements" in caplog.text


def test_nonfinite_weights_can_be_rejected(fleet, engine, poisoned):
    made = fleet(poisoned, engine=engine, nonfinite="reject")
    member = made.join()
    with pytest.raises(
        NonfiniteError, match=r"first 'layer\.1' with 3 .* policy is 'reject'"
    ) as bad:
        made.publish("v1")
    assert bad.value.piece == "layer.1"
    assert member.session.state == "fresh"
    poisoned["layer.1"].zero_()
    poisoned["layer.3"].zero_()
    assert made.publish("v2").ok
