"""Who may publish what, when; joiners, lost workers, policies, and rounds that are not alone."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
import torch

from wtransfer.errors import (
    AddressInUseError,
    ClosedError,
    ManifestError,
    NonfiniteError,
    NoWorkersError,
    PluginBlockedError,
    RoundAbortedError,
    RoundBusyError,
    SchemaError,
    StagingMemoryError,
    StallError,
    UnknownBackendError,
)
from wtransfer.registry import hooks
from wtransfer.testing.contents import contents
from wtransfer.testing.faults import Fault
from wtransfer.transport.address import random_address
from wtransfer.weight_sync.trainer.publisher import CLOSE_GRACE_S, Publisher
from wtransfer.weight_sync.trainer.source import StateDictSource
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weights import ParamMeta


def like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


# -- joining


def test_a_wrong_token_is_logged_once_on_each_side(weights, caplog, until):
    with Publisher(weights) as publisher:
        session = WorkerSession(like(weights), join=publisher.address, token="wrong")
        until(lambda: session.status().refusal is not None and publisher.refusal is not None)
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


def test_too_few_descriptors_are_named(run_program):
    program = run_program(WITHOUT_DESCRIPTORS)
    assert (program.wait(60), program.out()) == (0, "True\n"), program.err()


def test_publisher_that_cannot_listen_leaves_no_thread(weights, until):
    num_threads = threading.active_count()
    with (
        Publisher(weights, listen="unix:@wt-test-taken"),
        pytest.raises(AddressInUseError),
    ):
        Publisher(weights, listen="unix:@wt-test-taken")
    until(lambda: threading.active_count() == num_threads)


def test_cell_of_a_notebook_that_is_run_twice_is_told_where_the_first_publisher_was_made(weights):
    cell = compile("\npublisher = Publisher(weights, listen=address)", "cell-7", "exec")
    names = {"Publisher": Publisher, "weights": weights, "address": random_address()}
    exec(cell, names)
    with (
        names["publisher"] as publisher,
        WorkerSession(like(weights), join=publisher.address, token=publisher.token) as session,
    ):
        with pytest.raises(AddressInUseError, match=r"this process .* made at cell-7:2"):
            exec(cell, names)
        publisher.wait_for_workers(1)
        round_ = publisher.publish("step-1", wait=False)
        session.wait_for("step-1", 10.0)
        assert round_.result().ok


# -- before a round


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


@pytest.mark.parametrize("version", ["", "v" * 257, 7, None, "half of a pair \ud800"])
def test_a_label_is_short_text(fleet, weights, version):
    made = fleet(weights)
    made.join()
    with pytest.raises(ValueError, match="expected a label of 1 to 256 characters"):
        made.publisher.publish(version)
    with pytest.raises(ValueError, match="expected a label of 1 to 256 characters"):
        asyncio.run(made.publisher.publish_async(version))


def test_a_closed_publisher_refuses_to_be_used(fleet, weights):
    publisher = fleet(weights).publisher
    publisher.close()
    publisher.close()
    with pytest.raises(ClosedError):
        publisher.publish("v1")
    with pytest.raises(ClosedError):
        publisher.wait_for_workers(1)


BAD = {
    "min_workers": [0, -3, True, 1.0, "1", None],
    "deadline_s": [0, -1, float("nan"), float("inf"), "5", True, None],
    "on_lost_worker": ["ignore"],
    "nonfinite": ["hide"],
    "options": [{"colour": "red"}, {"bucket_nbytes": 0}],
    "engine": ["carrier-pigeon"],
}
TEXTS = {
    "min_workers": "min_workers is .*, expected an integer >= 1",
    "deadline_s": "deadline_s is .*, expected a finite number",
    "on_lost_worker": "on_lost_worker is 'ignore', expected one of 'abort', 'drop'",
    "nonfinite": "expected one of 'allow', 'warn', 'reject'",
    "options": "unknown field `colour`; the.* bucket_nbytes|bucket_nbytes is 0, expected > 0",
    "engine": "shm",
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_invalid_publisher_option_is_refused_at_once(weights, name, value):
    with pytest.raises((ValueError, UnknownBackendError), match=TEXTS[name]):
        Publisher(weights, **{name: value})


# -- the plan


# FAULTS 1
def test_a_model_of_another_form_is_refused_before_any_byte_moves(fleet, engine, weights, faults):
    made = fleet(weights, engine=engine)
    fitting = made.join()
    before = fitting.contents
    other = like(weights)
    other["layer.1"] = torch.zeros(4, 3)
    other["layer.2"] = torch.zeros(3, 4, dtype=torch.float64)
    other["layer.9"] = other.pop("layer.3")
    misfit = made.join(other)
    # Would fire with the first tensor that moves.
    faults.arm(Fault("drop", tensor=0))
    with pytest.raises(SchemaError, match="does not fit the target in 4 of its names") as caught:
        made.publish("v1")
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
    assert made.publish("v2").ok


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
def test_update_that_cannot_be_staged_is_refused_before_any_byte_moves(fleet, engine):
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


def test_a_joiner_during_a_round_is_named_and_served_after_it(fleet, gated, until):
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


def test_a_report_can_be_read(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    made.join()
    report = made.publish("step-7")
    text = str(report)
    assert "step-7  committed" in text
    assert "worker-0  committed  holds step-7  192 bytes, digests equal" in text
    assert report.nbytes == 192
    seconds = dict(report.seconds)
    assert list(seconds) == ["init", "plan", "transfer", "prepare", "commit", "finish", "total"]
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total)
    assert f"in {total:.3f} s" in text
    assert all(f"{name} {each:.3f}s" in text for name, each in seconds.items())
    assert set(report.workers[0].seconds) == {"accept", "transfer", "verify", "wait", "commit"}


# -- FAULTS 8: NaN and infinity


@pytest.fixture
def poisoned(weights):
    weights["layer.1"][0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    weights["layer.3"][0, 0] = float("nan")
    return weights


def test_nonfinite_weights_travel_unseen_or_are_warned_of(fleet, poisoned, caplog):
    unseen, warned = fleet(poisoned), fleet(poisoned, nonfinite="warn")
    member = unseen.join()
    warned.join()
    with caplog.at_level(logging.WARNING, "wtransfer"):
        assert unseen.publish("v1").nonfinite == {}
        assert caplog.text == ""
        assert warned.publish("v1").nonfinite == {"layer.1": 3, "layer.3": 1}
    assert member.contents == contents(poisoned)
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


# -- observers


class Waiter:
    """Waits, in a hook of the round's thread, for the round itself."""

    def __init__(self):
        self.round = None
        self.raised = []

    @hooks.hookimpl
    def wtransfer_weights_committed(self, worker):
        if worker is None:
            for wait in (self.round.result, self.round.packed):
                with pytest.raises(RoundBusyError, match="on the round's own thread") as caught:
                    wait()
                self.raised.append(caught.value)


def test_an_observer_that_waits_for_its_own_round_is_told_so(fleet, weights):
    made = fleet(weights, engine="shm")
    made.join()
    waiter = Waiter()
    hooks.register(waiter)
    try:
        waiter.round = made.publisher.publish("v1", wait=False)
        assert made.finish(waiter.round).ok
    finally:
        hooks.unregister(waiter)
    assert len(waiter.raised) == 2


class Hanging:
    """Returns, of a round's hooks, when it is let go."""

    def __init__(self):
        self.gate, self.over = threading.Event(), threading.Event()

    @hooks.hookimpl
    def wtransfer_round_started(self, worker):
        if worker is None:
            self.gate.wait(10.0)
            self.over.set()


def test_an_observer_that_hangs_costs_a_round_its_deadline_and_no_more(fleet, weights, caplog):
    made = fleet(weights, engine="shm", deadline_s=1.0)
    made.join()
    hanging = Hanging()
    hooks.register(hanging)
    try:
        assert made.publish("v1").ok
        assert "wtransfer_round_started has not returned within 1 s from" in caplog.text
        # The observer is not called again: the second round does not wait for it.
        assert made.publish("v2").ok
        assert "wtransfer_round_started is kept from" in caplog.text
    finally:
        hooks.unregister(hanging)
        hanging.gate.set()
        assert hanging.over.wait(5.0)


class Closer:
    """Closes the publisher from within a hook of its round."""

    def __init__(self, publisher):
        self.publisher, self.took_s = publisher, None

    @hooks.hookimpl
    def wtransfer_round_ended(self):
        begun = time.monotonic()
        self.publisher.close()
        self.took_s = time.monotonic() - begun


def test_an_observer_may_close_the_publisher(fleet, weights):
    made = fleet(weights, engine="shm")
    made.join()
    closer = Closer(made.publisher)
    hooks.register(closer)
    try:
        assert made.publish("v1").ok
    finally:
        hooks.unregister(closer)
    assert closer.took_s < CLOSE_GRACE_S
