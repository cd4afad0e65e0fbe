"""The gloo engine passes the kit that third parties get; groups that cannot form, or break."""

from __future__ import annotations

import functools
import pkgutil
import runpy
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.engines.collective import CollectiveInitInfo
from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.engines.gloo import (
    GlooTrainerEngine,
    GlooTrainerInitInfo,
    GlooWeightTransferEngine,
)
from wtransfer.errors import (
    AddressError,
    EngineError,
    GroupError,
    StallError,
    WTransferError,
)
from wtransfer.testing.engine import EngineConformance
from wtransfer.testing.faults import Fault
from wtransfer.transport.rendezvous import host_rendezvous
from wtransfer.weight_sync.trainer.engine_runner import EngineRunner
from wtransfer.weight_sync.trainer.source import StateDictSource

pytestmark = pytest.mark.usefixtures("libuv")
listening = runpy.run_path(str(Path(__file__).parents[1] / "tcp_sockets.py"))["listeners"]


@pytest.mark.slow  # nccl's logic passes the same kit over the same groups each time
class TestGloo(EngineConformance):
    engine = "gloo"
    # Gloo keeps a broadcast that was cut off, with its thread, until its time-out.
    options: ClassVar = {"timeout_s": 4.0}
    ends_within_s = 8.0


@pytest.mark.nightly
class TestGlooInSmallBuckets(EngineConformance):
    engine = "gloo"
    options: ClassVar = {"packed_buffer_size_bytes": 4096}


class StuckSource(StateDictSource):
    """A source that does not come to its second tensor before it is let go on."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.reached, self.go_on = False, threading.Event()

    def iter_full(self):
        for number, pair in enumerate(super().iter_full()):
            if number == 1:
                self.reached = True
                self.go_on.wait()
            yield pair


def test_a_source_that_hangs_is_blamed_and_not_a_worker_that_waits_for_it(
    fleet, weights, judged, later
):
    source = StuckSource(weights)
    made = fleet(source, engine="gloo", deadline_s=20.0)
    for _ in range(2):
        made.join({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    with judged(made.publisher, 10):
        round_ = made.publisher.publish("v1", wait=False)
        eventually(lambda: source.reached and round_._coordinator._num_waiting)
        later(11)
        with pytest.raises(StallError) as stalled:
            round_.result()
    assert "the trainer's source made no progress on the next tensor for 10 s" in str(stalled.value)
    assert stalled.value.worker is None
    source.go_on.set()
    assert made.publish("v2").ok


def test_the_cause_of_a_broken_group_is_told_and_not_the_break(fleet, faults, weights):
    WeightTransferEngineFactory.register_engine("gloo that breaks", faults.wrap("gloo"))
    made = fleet(weights, engine="gloo that breaks", options={"packed_buffer_size_bytes": 40})
    for _ in range(3):
        made.join()
    for number in range(3):
        faults.arm(Fault("raise", tensor=1, worker=number))
        with pytest.raises(EngineError, match="injected") as failed:
            made.publish("v1")
        assert failed.value.worker == f"worker-{number}"
    assert made.publish("v2").ok


def test_no_socket_listens_after_a_dry_run_a_failed_round_or_the_close(fleet, faults, weights):
    WeightTransferEngineFactory.register_engine("gloo in groups", faults.wrap("gloo"))
    before = listening()
    made = fleet(weights, engine="gloo in groups")
    for _ in range(2):
        made.join()
    for version in ("v1", "v2"):
        assert made.publish(version).ok
        assert len(listening()) == len(before) + 4, "the meeting, and each rank for the others"
    assert made.publisher.publish("dry", dry_run=True).ok
    eventually(lambda: listening() == before)
    assert made.publish("v3").ok
    faults.arm(Fault("raise", tensor=1, worker=1))
    with pytest.raises(EngineError, match="injected"):
        made.publish("fails")
    eventually(lambda: listening() == before)
    assert made.publish("v4").ok
    made.publisher.close()
    eventually(lambda: listening() == before)
    assert [member.session.version for member in made.members] == ["v4", "v4"]


class ForgetfulSource(StateDictSource):
    """A source that does not know what it has, as long as a test wants that."""

    forgets = False

    @property
    def metadata(self):
        if self.forgets:
            raise RuntimeError("I forgot")
        return super().metadata


def test_a_round_that_ends_before_its_plan_leaves_no_group_in_a_worker(fleet, weights):
    threads, before = set(threading.enumerate()), listening()
    source = ForgetfulSource(weights)
    made = fleet(source, engine="gloo")
    made.join({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    source.forgets = True
    with pytest.raises(WTransferError, match="I forgot"):
        made.publish("fails")
    source.forgets = False

    def in_groups():
        return [t for t in set(threading.enumerate()) - threads if t.name == "wtransfer-gloo"]

    eventually(lambda: (in_groups(), listening()) == ([], before))
    assert made.publish("v1").ok


def test_a_round_ends_though_its_engine_cannot_be_let_go_of(fleet, weights, monkeypatch):
    made = fleet(weights, engine="gloo")
    made.join()
    shutdown = EngineRunner.shutdown

    def breaks(runner):
        shutdown(runner)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(EngineRunner, "shutdown", breaks)
        round_ = made.publisher.publish("dry", dry_run=True, wait=False)
        assert round_.result(timeout_s=5.0).ok
    # Neither the round nor what broke stands in the way of another.
    assert made.publish("v1").ok


def eventually(condition, within_s=5.0):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class CannotForm(GlooTrainerEngine):
    """Fails on its own, while the workers wait for it."""

    def form_group(self, rendezvous, world_size):
        raise GroupError("no network here")

    def shutdown(self):
        # A worker that finds the rendezvous gone before the error is known is blamed for it.
        threading.Timer(0.3, super().shutdown).start()


def test_a_trainer_that_cannot_form_the_group_says_so_and_blames_no_worker(fleet):
    made = fleet(
        {"weight": torch.ones(3)}, engine="gloo", trainer=CannotForm, options={}, deadline_s=20.0
    )
    made.join()
    with pytest.raises(GroupError, match="no network here") as caught:
        made.publish("never")
    assert caught.value.worker is None


def test_a_worker_that_refuses_to_join_calls_the_meeting_off(fleet):
    options = {"world_size": 5}
    made = fleet({"weight": torch.ones(3)}, engine="gloo", options=options, deadline_s=20.0)
    made.join()
    with pytest.raises(GroupError, match="wrong world size"):
        made.publish("never")


def test_a_worker_that_waits_for_the_other_ranks_is_free_when_it_is_aborted():
    engine = GlooWeightTransferEngine(WeightTransferConfig(backend="gloo"), ParallelConfig())
    errors = []

    def join(info):
        with pytest.raises(GroupError, match="called off") as caught:
            engine.init_transfer_engine(info)
        errors.append(caught.value)

    for number in range(1, 3):
        hosted, info = joining_info()
        joining = threading.Thread(target=join, args=(info,))
        joining.start()
        # Not before it has arrived: torch's store goes on dialing a host that ends meanwhile.
        while not hosted.store.check(["rank1"]):
            assert joining.is_alive()
            time.sleep(0.005)
        time.sleep(0.05)
        assert joining.is_alive()
        engine.abort_weight_update()
        joining.join(10.0)
        assert len(errors) == number
        hosted.close()


def joining_info():
    """Return a meeting, whose host is here and never comes, and what workers are told of it."""
    hosted = host_rendezvous("127.0.0.1")
    return hosted, CollectiveInitInfo(hosted.host, hosted.port, hosted.name, world_size=2)


@pytest.mark.parametrize("end", ["abort_weight_update", "shutdown"])
@pytest.mark.parametrize(
    "step", ["socket.create_connection", "wtransfer.transport.rendezvous.own_address"]
)
def test_abort_or_shutdown_before_the_group_exists_calls_off_the_rendezvous(monkeypatch, step, end):
    hosted, info = joining_info()
    engine = GlooWeightTransferEngine(WeightTransferConfig(backend="gloo"), ParallelConfig())
    original = pkgutil.resolve_name(step)

    def ended_meanwhile(*args):
        monkeypatch.undo()
        getattr(engine, end)()
        return original(*args)

    monkeypatch.setattr(step, ended_meanwhile)
    with pytest.raises(GroupError, match="called off"):
        engine.init_transfer_engine(info)
    # What dials still, on a thread that was left behind, would go on until its time-out where the
    # host is gone.
    for thread in threading.enumerate():
        if thread.name == "wtransfer-rendezvous":
            thread.join(20.0)
    hosted.close()


def test_engine_that_was_shut_down_joins_no_group():
    """A thread that was left behind may come to it any time."""
    hosted, info = joining_info()
    engine = GlooWeightTransferEngine(WeightTransferConfig(backend="gloo"), ParallelConfig())
    engine.shutdown()
    with pytest.raises(GroupError, match="called off"):
        engine.init_transfer_engine(info)
    hosted.close()


def test_a_group_that_was_formed_when_its_engine_ended_is_let_go_of(monkeypatch):
    engine = GlooWeightTransferEngine(WeightTransferConfig(backend="gloo"), ParallelConfig())
    hosted, info = joining_info()
    closed = []

    def formed(*_):
        engine.shutdown()
        return SimpleNamespace(close=lambda: closed.append(1))

    monkeypatch.setattr(engine, "form_group", formed)
    with pytest.raises(GroupError, match="called off"):
        engine.init_transfer_engine(info)
    assert closed == [1]
    hosted.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_wildcard_host_is_refused_and_the_error_asks_for_a_reachable_address(fleet, host):
    made = fleet({"weight": torch.ones(3)}, engine="gloo", options={"host": host})
    made.join()
    with pytest.raises(AddressError, match="name the one at which workers reach this machine"):
        made.publish("never")


@pytest.mark.parametrize("value", ["soon", "nan", 0, -1.0, "inf", 1.1e9, 10**400], ids=range(7))
def test_a_time_that_cannot_be_is_named(value):
    info = {"master_address": "h", "master_port": 1, "rendezvous": "r", "world_size": 2}
    assert CollectiveInitInfo(**info, timeout_s=1e9).timeout_s == 1e9
    for make in (GlooTrainerInitInfo, functools.partial(CollectiveInitInfo, **info)):
        with pytest.raises(ValueError, match=r"timeout_s`? is .*, expected seconds > 0, at most"):
            make(timeout_s=value)


@pytest.mark.parametrize(
    ("option", "value"),
    [("packed_buffer_size_bytes", "abc"), ("packed_buffer_size_bytes", 0), ("world_size", 1)],
)
def test_an_option_that_cannot_be_is_named(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value!r}, expected a whole number"):
        GlooTrainerInitInfo(**{option: value})
