"""An engine raises, ends the process, runs out of memory or hangs, in any step of its life."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from wtransfer.calls import CHECK_S
from wtransfer.engines.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from wtransfer.engines.gloo import GlooTrainerEngine, GlooWeightTransferEngine
from wtransfer.engines.interface import TrainerInitInfo
from wtransfer.errors import EngineError, StagingMemoryError, StallError
from wtransfer.registry import hooks
from wtransfer.testing.contents import contents
from wtransfer.testing.fakes import MemoryEngine, MemoryTrainerEngine
from wtransfer.testing.faults import Fault
from wtransfer.testing.leftovers import Leftovers
from wtransfer.transport.rendezvous import host_rendezvous

BEFORE_A_COMMIT = ["trainer_init", "__init__", "init", "start", "send", "receive", "finish"]
HARMLESS = ["round_finished", "shutdown", "trainer_shutdown"]


@pytest.fixture(scope="module", autouse=True)
def made_once_in_a_process():
    """Let libuv, under torch's store, make the pipe that it keeps for the life of the process."""
    host_rendezvous("127.0.0.1").close()


class Trouble:
    """What shall go wrong at a step, once."""

    def __init__(self):
        self.step = None
        self.released = threading.Event()
        self.hangs = False
        self.later = None

    def at(self, step):
        if self.step != step:
            return
        self.step = None
        if self.hangs:
            self.released.wait()
        raise RuntimeError(f"trouble at {step}")


TROUBLE = Trouble()


class TroubledTrainer(MemoryTrainerEngine):
    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        TROUBLE.at("trainer_init")
        return super().trainer_init(init_info, client=client, source=source)

    def send_weights(self):
        TROUBLE.at("send")
        list(self.source.iter_full())
        if TROUBLE.step == "receive":
            # After the last sign of life of anybody, so that the engine's silence is longer.
            TROUBLE.later(3)
        super().send_weights()

    def round_finished(self, *, committed):
        TROUBLE.at("round_finished")

    def shutdown(self):
        super().shutdown()
        TROUBLE.at("trainer_shutdown")


class TroubledEngine(MemoryEngine):
    trainer_cls = TroubledTrainer

    def __init__(self, config, parallel_config):
        TROUBLE.at("__init__")
        super().__init__(config, parallel_config)

    def init_transfer_engine(self, init_info):
        TROUBLE.at("init")
        super().init_transfer_engine(init_info)

    def start_weight_update(self):
        TROUBLE.at("start")

    def receive_weights(self, update_info, load_weights):
        TROUBLE.at("receive")
        super().receive_weights(update_info, load_weights)

    def finish_weight_update(self):
        TROUBLE.at("finish")

    def shutdown(self):
        TROUBLE.at("shutdown")


class UnhurriedTrainer(TroubledTrainer):
    def send_weights(self):
        super().send_weights()
        # The waits for workers are over, also for one that was given up at its deadline.
        time.sleep(2 * CHECK_S)


class UnhurriedEngine(TroubledEngine):
    trainer_cls = UnhurriedTrainer


@pytest.fixture(scope="module")
def troubled():
    WeightTransferEngineFactory.register_engine("tests-troubled", TroubledEngine)
    return "tests-troubled"


@pytest.fixture
def trouble(later):
    TROUBLE.released.clear()
    TROUBLE.later = later
    yield TROUBLE
    TROUBLE.step, TROUBLE.hangs = None, False
    TROUBLE.released.set()


@pytest.fixture
def two_workers(fleet, troubled, weights, trouble):
    made = fleet(weights, engine=troubled, deadline_s=20.0)
    for _ in range(2):
        made.join()
    return made


CAUGHT = {
    "raise": EngineError,
    "exit": EngineError,
    "memory-error": StagingMemoryError,
    "torch-memory": StagingMemoryError,
    "enomem": StagingMemoryError,
}


@pytest.fixture
def served(fleet, engine, weights):
    """Two workers that have a version, of an engine whose calls may fail at any tensor."""
    made = fleet(weights, engine=engine)
    for _ in range(2):
        made.join()
    assert made.publish("v1").ok
    for tensor in weights.values():
        tensor.add_(1)
    return made


def states(fleet):
    return [(each.session.version, each.session.state, each.contents) for each in fleet.members]


# FAULTS 18 and whatever else an engine may raise.
@pytest.mark.parametrize("side", ["worker", "trainer"])
@pytest.mark.parametrize("action", CAUGHT)
def test_exception_of_an_engine_ends_the_round_at_every_tensor(served, faults, action, side):
    before = states(served)
    # Always the same worker: the other one may still be at the round that the fault has ended.
    place = 1 if side == "worker" else None
    for number in range(4):
        fault = Fault(action, tensor=number, side=side, worker=place)
        faults.arm(fault)
        with pytest.raises(CAUGHT[action]) as caught:
            served.publish("v2")
        assert faults.fired.pop() == fault
        assert states(served) == before
        error = caught.value
        assert error.plugin == f"engines:{served.engine}"
        assert (error.version, error.phase) == ("v2", "transfer")
        assert error.worker == ("worker-1" if side == "worker" else None)
    assert served.publish("v3").ok
    assert [each.contents for each in served.members] == [contents(served.source)] * 2


def test_an_error_that_is_kept_keeps_no_weights(fleet, engines, weights, faults, leaves_nothing):
    made = fleet(weights, engine=engines["shm"])
    made.join(commit="copy")
    leftovers = Leftovers()
    faults.arm(Fault("raise", tensor=2, side="trainer"))
    with pytest.raises(EngineError) as kept:
        made.publish("v1")
    made.close()
    assert leftovers.found(within_s=5.0) == []
    assert "the engine gives up" in str(kept.value)


@pytest.mark.parametrize("step", BEFORE_A_COMMIT)
def test_exception_of_an_engine_before_the_commit_ends_the_round_only(two_workers, trouble, step):
    trouble.step = step
    with pytest.raises(EngineError, match=f"raised RuntimeError: trouble at {step}") as caught:
        two_workers.publish("v1")
    assert caught.value.plugin == "engines:tests-troubled"
    assert {each.session.state for each in two_workers.members} == {"fresh"}
    assert two_workers.publish("v2").ok
    assert [each.contents for each in two_workers.members] == [contents(two_workers.source)] * 2


# FAULTS 14, inside the process: promise 4 (nothing hangs).
@pytest.mark.parametrize(
    "step",
    [
        *("receive", "send"),
        *(pytest.param(step, marks=pytest.mark.slow) for step in ("trainer_init", "__init__")),
    ],
)
def test_engine_that_hangs_before_the_commit_is_left_behind(
    two_workers, trouble, judged, later, step, *, until
):
    trouble.step, trouble.hangs = step, True
    by_trainer = step in ("trainer_init", "send")
    with judged(two_workers.publisher, 10):
        round_ = two_workers.publisher.publish("v1", wait=False)
        until(lambda: trouble.step is None and (by_trainer or round_._coordinator._num_waiting))
        later(8)
        time.sleep(2 * CHECK_S)  # the engine would be late by now, if it did not wait
        later(3)
        with pytest.raises(StallError) as caught:
            round_.result()
    assert ("tests-troubled" if by_trainer else "worker-") in str(caught.value)
    assert (caught.value.worker is None) is by_trainer
    assert {each.session.state for each in two_workers.members} == {"fresh"}
    # It still hangs.
    assert two_workers.publish("v2").ok
    assert [each.contents for each in two_workers.members] == [contents(two_workers.source)] * 2


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", HARMLESS)
def test_failure_of_an_engine_after_the_commit_cannot_undo_it(
    two_workers, trouble, step, hangs, caplog
):
    trouble.step, trouble.hangs = step, hangs
    for version in ("v1", "v2"):
        assert two_workers.publish(version).ok
    assert [each.contents for each in two_workers.members] == [contents(two_workers.source)] * 2
    two_workers.close()
    assert trouble.step is None
    caplog.clear()


def test_an_engine_is_not_late_when_it_has_waited_for_a_worker_that_was_given_up(
    fleet, weights, trouble, judged, later, *, until
):
    WeightTransferEngineFactory.register_engine("tests-unhurried", UnhurriedEngine)
    made = fleet(weights, engine="tests-unhurried", deadline_s=20.0, on_lost_worker="drop")
    for _ in range(2):
        made.join()
    trouble.step, trouble.hangs = "receive", True
    with judged(made.publisher, 10):
        round_ = made.publisher.publish("v1", wait=False)
        until(lambda: trouble.step is None and round_._coordinator._num_waiting)
        # Only the other one is late.
        until(lambda: any(rank.num_received for rank in round_._coordinator.state.ranks()))
        later(11)
        report = made.finish(round_)
    assert sorted(worker.outcome for worker in report.workers) == ["committed", "dropped"]


def test_only_the_rank_that_sends_initialises_the_workers():
    told = []
    client = SimpleNamespace(init_weight_transfer_engine=told.append)
    for rank in (1, 0):
        MemoryTrainerEngine.trainer_init(TrainerInitInfo(rank=rank), client=client).shutdown()
    assert len(told) == 1


def test_trainer_engine_with_hooks_hears_until_its_shutdown():
    class Info(TrainerInitInfo):
        backend = "tests-listening"

    class Listening(MemoryTrainerEngine):
        heard = 0

        @hooks.hookimpl
        def wtransfer_weights_committed(self):
            self.heard += 1

    WeightTransferTrainerFactory.register_engine("tests-listening", Listening)
    client = SimpleNamespace(init_weight_transfer_engine=lambda info: None)
    trainer = WeightTransferTrainerFactory.trainer_init(Info(), client=client)
    facts = {"version": "v", "fingerprint": "f", "round_id": "r", "worker": None}
    hooks.notify("wtransfer_weights_committed", **facts)
    trainer.shutdown()
    hooks.notify("wtransfer_weights_committed", **facts)
    assert trainer.heard == 1


def test_a_trainer_that_cannot_form_its_group_is_the_cause_whatever_a_late_worker_says(
    fleet, weights, monkeypatch, until
):
    made = fleet(weights, engine="gloo")
    made.join()
    closed, shutdown = threading.Event(), GlooTrainerEngine.shutdown
    init = GlooWeightTransferEngine.init_transfer_engine

    def fail(self, rendezvous, world_size):
        raise EngineError("the trainer has no such network")

    def init_late(self, init_info):
        assert closed.wait(10)
        init(self, init_info)

    def shut_down(self):
        shutdown(self)
        if closed.is_set():
            return
        closed.set()
        # The error of the trainer is not known to the round before this returns.
        (worker,) = made.publisher._membership.workers()
        until(lambda: worker.refusal is not None)
        assert "no rendezvous at" in str(worker.refusal)

    monkeypatch.setattr(GlooTrainerEngine, "form_group", fail)
    monkeypatch.setattr(GlooWeightTransferEngine, "init_transfer_engine", init_late)
    monkeypatch.setattr(GlooTrainerEngine, "shutdown", shut_down)
    with pytest.raises(EngineError, match="the trainer has no such network"):
        made.publish("v1")


# -- FAULTS 54: a tensor without memory


class Freeing(MemoryEngine):
    """Hands over the third tensor with its storage freed, in its first round."""

    frees = True

    def receive_weights(self, update_info, load_weights):
        def load(pairs):
            for name, tensor in pairs:
                own = tensor.clone()
                if Freeing.frees and name == "layer.2":
                    Freeing.frees = False
                    own.untyped_storage().resize_(0)
                load_weights([(name, own)])

        super().receive_weights(update_info, load)


def test_worker_outlives_an_engine_that_delivers_a_tensor_whose_storage_was_freed(fleet, weights):
    WeightTransferEngineFactory.register_engine("tests-freeing", Freeing)
    Freeing.frees = True
    made = fleet(weights, engine="tests-freeing")
    member = made.join()
    before = member.contents
    with pytest.raises(EngineError, match=r"'layer\.2' without all of its memory") as caught:
        made.publish("v1")
    assert (caught.value.worker, caught.value.piece) == ("worker-0", "layer.2")
    assert (member.session.state, member.contents) == ("fresh", before)
    assert made.publish("v2").ok
    assert member.contents == contents(weights)
