"""Hosts that a publisher asks to join: told at once, waited for, and let go."""

from __future__ import annotations

import contextlib
import runpy
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("uvicorn")

from wtransfer.errors import (
    AddressError,
    AddressInUseError,
    AuthenticationError,
    HostsError,
    NoWorkersError,
    PeerLostError,
    RoundBusyError,
    StallError,
)
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.http.clients import InProcessClient
from wtransfer.weight_sync.trainer.hosts import Hosts
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.worker.session import WorkerSession

HttpWorker = runpy.run_path(str(Path(__file__).with_name("http_worker.py")))["HttpWorker"]
TOKEN = "the-secret"


@pytest.fixture(autouse=True)
def token_around(monkeypatch):
    monkeypatch.setenv("WTRANSFER_TOKEN", TOKEN)


@pytest.fixture
def start_worker(weights):
    workers = []

    def start(**options):
        tensors = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        name = options.pop("name", f"w{len(workers)}")
        workers.append(HttpWorker(tensors, name=name, **{"token": TOKEN, **options}))
        return workers[-1]

    yield start
    for each in workers:
        each.close()


@pytest.fixture
def nobody():
    """URL at which nobody listens."""
    return "unix:@wt-test-nobody"


def until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_two_workers_of_one_name_are_refused(weights):
    class Namesake:
        def __init__(self, name):
            self.name = name

        def init_weight_transfer_engine(self, init_info):
            return {"worker": "same"}

    with pytest.raises(HostsError, match="a and b both call their worker 'same'"):
        Publisher(weights, hosts=[Namesake("a"), Namesake("b")], deadline_s=0.2)


def test_all_hosts_have_joined_when_the_publisher_is_there(start_worker, weights):
    workers = [start_worker() for _ in range(3)]
    with Publisher(weights, hosts=[each.address for each in workers]) as publisher:
        assert publisher.hosts == {each.address: each.session.name for each in workers}
        report = publisher.publish("v1")
    assert sorted(each.worker for each in report.workers) == ["w0", "w1", "w2"]
    assert report.ok
    assert [contents(each.tensors) for each in workers] == [contents(weights)] * 3


def test_a_token_that_is_shared_is_not_sent(start_worker, weights):
    worker = start_worker()
    with Publisher(weights, hosts=[worker.address]) as publisher:
        place = {"address": publisher.address, "host": worker.address}
        assert worker.invitations == [{"wtransfer": place}]


def test_a_publisher_of_another_token_sends_its_own(start_worker, weights):
    worker = start_worker(token="hosts-own")
    with Publisher(weights, token="mine", hosts=[worker.address], host_token="hosts-own") as it:
        place = {"address": it.address, "host": worker.address, "token": "mine"}
        assert worker.invitations == [{"wtransfer": place}]
        assert it.publish("v1").ok


def test_a_token_that_was_made_up_is_tried_on_nobody(start_worker, weights, monkeypatch):
    worker = start_worker()
    monkeypatch.delenv("WTRANSFER_TOKEN")
    with pytest.raises(AuthenticationError, match="wants a token, and none was given"):
        Publisher(weights, hosts=[worker.address])


def test_a_session_of_this_process_is_a_host_as_well(weights):
    tensors = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with (
        WorkerSession(tensors, name="here") as session,
        Publisher(weights, hosts=[InProcessClient(session)]) as publisher,
    ):
        assert publisher.hosts == {"here": "here"}
        round_ = publisher.publish("v1", wait=False)
        assert session.commit_pending(5)
        assert round_.result(5).ok


def test_hosts_are_told_when_the_publisher_closes(start_worker, weights):
    worker = start_worker()
    with Publisher(weights, hosts=[worker.address]) as publisher:
        assert publisher.publish("v1").ok
        assert worker.session.connected
    assert worker.num_left == 1
    assert not worker.session.connected
    assert (worker.session.version, contents(worker.tensors)) == ("v1", contents(weights))


class HttpEngine(HttpWorker):
    """A serving engine behind HTTP: it names no worker, and its shutdown leaves all publishers."""

    def _join(self, body):
        invitation = body["init_info"]["wtransfer"]
        if invitation.get("leave"):
            self._client.leave(invitation["address"])
        else:
            super()._join(body)
        return {"message": "Weight transfer initialized"}

    def _leave(self, _body):
        self._client.shutdown_weight_transfer_engine()
        return {}


def test_a_publisher_that_closes_has_an_engine_leave_it_and_no_other(weights):
    tensors = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with contextlib.closing(HttpEngine(tensors, token=TOKEN)) as engine:
        first = Publisher(weights, hosts=[engine.address])
        with Publisher(weights, hosts=[engine.address]) as second:
            assert [each.address for each in engine.session.links] == [
                first.address,
                second.address,
            ]
            first.close()
            assert [each.address for each in engine.session.links] == [second.address]
            assert second.publish("v1").ok
        assert engine.session.links == ()
    assert contents(tensors) == contents(weights)


def test_one_that_cannot_be_reached_is_named_and_the_others_let_go(start_worker, weights, nobody):
    worker = start_worker()
    with pytest.raises(PeerLostError, match=f"cannot reach {nobody}"):
        Publisher(weights, hosts=[worker.address, nobody])
    assert (len(worker.invitations), worker.num_left) == (1, 1)
    assert worker.session.state == "fresh"


def test_all_that_cannot_be_reached_are_named(start_worker, weights, nobody):
    stranger = start_worker(token="another")
    with pytest.raises(HostsError) as caught:
        Publisher(weights, hosts=[stranger.address, nobody])
    assert {name: type(error) for name, error in caught.value.errors.items()} == {
        stranger.address: AuthenticationError,
        nobody: PeerLostError,
    }


def test_a_host_that_is_stopped_holds_up_neither_start_nor_end_for_long(weights):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("\0wt-test-silent")
        silent.listen()
        begun = time.monotonic()
        with pytest.raises(StallError, match="unix:@wt-test-silent did not answer"):
            Publisher(weights, hosts=["unix:@wt-test-silent"], deadline_s=0.5)
        assert time.monotonic() - begun < 2.5


def test_a_host_is_named_once(weights, nobody):
    with pytest.raises(ValueError, match="named twice"):
        Publisher(weights, hosts=[nobody, nobody])


def test_a_worker_that_says_it_has_joined_and_has_not_is_missed(weights):
    class Liar:
        name = "liar"

        def init_weight_transfer_engine(self, init_info):
            return {"worker": "elsewhere"}

    with pytest.raises(NoWorkersError, match=r"elsewhere did not join within 0\.2 s"):
        Publisher(weights, hosts=[Liar()], deadline_s=0.2)


class Engine:
    """A serving engine: it names no worker, and its worker commits when it is called."""

    def __init__(self, name, weights):
        self.name = name
        self.tensors = {key: torch.zeros_like(tensor) for key, tensor in weights.items()}
        self.session = WorkerSession(self.tensors, name=f"worker of {name}")
        self.invited, self.calls = [], []
        self.error = None

    def init_weight_transfer_engine(self, init_info):
        self.invited.append(init_info)
        self.session.join(**init_info["wtransfer"])

    def start_weight_update(self):
        self.calls.append("start")

    def finish_weight_update(self, weight_version=None):
        self.calls.append(weight_version)
        if self.error is not None:
            raise self.error
        self.session.commit_pending(5)


@pytest.fixture
def engines(weights):
    made = [Engine(name, weights) for name in ("one", "two")]
    yield made
    for each in made:
        each.session.close()
        # What it has adopted lies in the trainer's memory.
        each.tensors.clear()


def test_a_serving_engine_applies_when_it_is_called(engines, weights):
    with Publisher(weights, hosts=engines, token="t") as publisher:
        place = {"address": publisher.address, "token": "t", "host": "one"}
        assert engines[0].invited == [{"wtransfer": place}]
        assert publisher.hosts == {"one": None, "two": None}
        assert publisher.publish("v1").ok
    for each in engines:
        assert each.calls == ["start", "v1"]
        assert contents(each.tensors) == contents(weights)


def test_a_dry_run_calls_no_engine(engines, weights):
    with Publisher(weights, hosts=engines) as publisher:
        assert publisher.publish("v1", dry_run=True).ok
    assert [each.calls for each in engines] == [[], []]


def test_the_report_has_the_words_of_an_engine_that_did_not_apply(engines, weights):
    engines[1].error = RuntimeError("the engine is asleep")
    with Publisher(weights, hosts=engines, deadline_s=1.0) as publisher:
        report = publisher.publish("v1")
    applied, left = sorted(report.workers, key=lambda each: each.worker)
    assert (report.outcome, applied.outcome, left.outcome) == ("mixed", "committed", "pending")
    assert "the engine is asleep" in str(left.error)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_call_that_an_engine_fails_blocks_no_later_round(engines, weights, times):
    with Publisher(weights, hosts=engines, deadline_s=1.0) as publisher:
        assert publisher.publish("v1").ok
        engines[1].error = RuntimeError("the engine is asleep")
        assert publisher.publish("v2").outcome == "mixed"
        if times > 1:
            # Asked again, it fails again: it still holds v2, and can take nothing new.
            with pytest.raises(RoundBusyError, match="worker of two"):
                publisher.publish("refused")
        engines[1].error = None
        weights["layer.0"] += 1
        report = publisher.publish("v3")
    assert report.ok, str(report)
    for each in engines:
        assert each.session.version == "v3"
        assert contents(each.tensors) == contents(weights)


def test_only_the_engine_that_is_behind_is_called_for_that(engines, weights):
    with Publisher(weights, hosts=engines) as publisher:
        assert publisher.publish("v1").ok
        engines[1].session.close()
        until(lambda: len(publisher.workers()) == 1)
        engines[1].session = WorkerSession(engines[1].tensors, name="its next worker")
        engines[1].session.join(**engines[1].invited[0]["wtransfer"])
        until(lambda: engines[1].session.version == "v1")
    assert [each.calls for each in engines] == [["start", "v1"], ["start", "v1"] * 2]


def test_an_engine_whose_workers_do_not_come_is_missed(weights):
    class Empty:
        name = "empty"

        def init_weight_transfer_engine(self, init_info):
            """Join nobody."""

    with pytest.raises(NoWorkersError, match=r"empty did not join within 0\.2 s"):
        Publisher(weights, hosts=[Empty()], deadline_s=0.2)


def test_a_restarted_host_is_found_by_asking_again(start_worker, weights):
    stays, restarted = start_worker(), start_worker()
    with Publisher(weights, hosts=[stays.address, restarted.address]) as publisher:
        assert publisher.publish("v1").ok
        restarted.close()
        until(lambda: len(publisher.workers()) == 1)
        again = start_worker(address=restarted.address, name="again")
        publisher.invite()
        until(lambda: again.session.version == "v1")
        assert publisher.publish("v2").ok
        assert len(publisher.workers()) == 2
    assert contents(again.tensors) == contents(stays.tensors) == contents(weights)


def test_a_host_can_be_added(start_worker, weights, nobody):
    first, second = start_worker(), start_worker()
    with Publisher(weights, hosts=[first.address]) as publisher:
        publisher.invite(second.address)
        assert len(publisher.publish("v1").workers) == 2
        with pytest.raises(PeerLostError):
            publisher.invite(nobody)
        # Those that are there are not troubled by one that is not.
        assert publisher.publish("v2").ok


@pytest.mark.parametrize("listen", [None, "tcp:127.0.0.1:0", "tcp:0.0.0.0:0"])
def test_a_remote_host_needs_an_address_that_it_can_dial(weights, listen):
    with pytest.raises(AddressError, match=r"--listen tcp:HOST:PORT.*--engine file"):
        Publisher(weights, listen=listen, hosts=["http://192.0.2.1:8000"])


def test_a_remote_host_may_be_asked_to_dial_an_address_of_this_host():
    class Remote:
        name, is_local = "far", False

        def init_weight_transfer_engine(self, init_info):
            return {}

    hosts = Hosts(None, 1.0)
    hosts.add([Remote()])
    hosts.invite("tcp:192.0.2.7:4000", "t")
    assert hosts.workers == {"far": None}


def test_a_publisher_that_cannot_listen_leaves_no_thread(weights):
    num_threads = threading.active_count()
    with (
        Publisher(weights, listen="unix:@wt-test-taken"),
        pytest.raises(AddressInUseError),
    ):
        Publisher(weights, listen="unix:@wt-test-taken")
    until(lambda: threading.active_count() == num_threads)
