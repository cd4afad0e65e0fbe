"""Endpoints that a publisher registers with: asked at once, waited for, and left."""

from __future__ import annotations

import runpy
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("uvicorn")

from wtransfer import Publisher, WorkerSession
from wtransfer.errors import (
    AddressError,
    AddressInUseError,
    AuthenticationError,
    HostsError,
    NoWorkersError,
    PeerLostError,
    RemoteError,
    RoundBusyError,
    StallError,
)
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.http.client import HttpClient
from wtransfer.weight_sync.trainer.endpoints import Endpoints

HTTP = Path(__file__).parents[1] / "http"
HttpWorker = runpy.run_path(str(HTTP / "http_worker.py"))["HttpWorker"]
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
def absent():
    """URL without a listener."""
    return "unix:@wt-test-absent"


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


def test_all_workers_have_joined_when_the_publisher_is_made(start_worker, weights):
    workers = [start_worker() for _ in range(3)]
    with Publisher(weights, hosts=[each.address for each in workers]) as publisher:
        assert publisher.hosts == {each.address: each.session.name for each in workers}
        report = publisher.publish("v1")
    assert sorted(each.worker for each in report.workers) == ["w0", "w1", "w2"]
    assert report.ok
    assert [contents(each.tensors) for each in workers] == [contents(weights)] * 3


class Recorder(HttpClient):
    """An HTTP client that notes what it sends."""

    def init_weight_transfer_engine(self, init_info):
        self.sent = init_info["wtransfer"]
        return super().init_weight_transfer_engine(init_info)


def test_shared_token_is_not_sent(start_worker, weights):
    client = Recorder(start_worker().address, TOKEN)
    with Publisher(weights, hosts=[client]) as publisher:
        assert client.sent == {"address": publisher.address, "host": client.name}


def test_publisher_of_another_token_sends_its_own(start_worker, weights):
    client = Recorder(start_worker(token="hosts-own").address, "hosts-own")
    with Publisher(weights, token="mine", hosts=[client]) as it:
        assert client.sent == {"address": it.address, "host": client.name, "token": "mine"}
        assert it.publish("v1").ok


def test_host_token_is_that_of_urls(start_worker, weights):
    worker = start_worker(token="hosts-own")
    with Publisher(weights, token="mine", hosts=[worker.address], host_token="hosts-own") as it:
        assert it.publish("v1").ok


def test_generated_token_is_not_sent_to_endpoints(start_worker, weights, monkeypatch):
    worker = start_worker()
    monkeypatch.delenv("WTRANSFER_TOKEN")
    with pytest.raises(AuthenticationError, match="wants a token, and none was given"):
        Publisher(weights, hosts=[worker.address])


def test_closed_publisher_deregisters(start_worker, weights):
    worker = start_worker()
    with Publisher(weights, hosts=[worker.address]) as publisher:
        assert publisher.publish("v1").ok
        assert worker.session.connected
    assert worker.num_left == 1
    assert not worker.session.connected
    assert (worker.session.version, contents(worker.tensors)) == ("v1", contents(weights))


def test_unreachable_endpoint_is_named_and_the_others_are_left(start_worker, weights, absent):
    worker = start_worker()
    with pytest.raises(PeerLostError, match=f"cannot reach {absent}"):
        Publisher(weights, hosts=[worker.address, absent])
    assert (worker.num_joined, worker.num_left) == (1, 1)
    assert worker.session.state == "fresh"


def test_every_failed_endpoint_is_named(start_worker, weights, absent):
    stranger = start_worker(token="another")
    with pytest.raises(HostsError) as caught:
        Publisher(weights, hosts=[stranger.address, absent])
    assert {name: type(error) for name, error in caught.value.errors.items()} == {
        stranger.address: AuthenticationError,
        absent: PeerLostError,
    }


def test_stopped_endpoint_is_given_up_in_time(weights):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("\0wt-test-silent")
        silent.listen()
        begun = time.monotonic()
        with pytest.raises(StallError, match="unix:@wt-test-silent did not answer"):
            Publisher(weights, hosts=["unix:@wt-test-silent"], deadline_s=0.5)
        assert time.monotonic() - begun < 2.5


def test_token_in_the_url_of_a_serving_engine_is_warned_of(caplog):
    class Engine(HttpClient):
        def init_weight_transfer_engine(self, init_info):
            """Name no worker."""

        def get_world_size(self):
            return 1

    endpoints = Endpoints("shared", 1.0)
    urls = ["http://wtransfer:s3cret@127.0.0.1:9", "http://127.0.0.1:10"]
    endpoints.add([Engine(url, "shared") for url in urls])
    endpoints.register("unix:@p", "shared")
    (record,) = caplog.records
    assert "the token in the URL of http://127.0.0.1:9 is of no use" in record.getMessage()
    assert "WTRANSFER_TOKEN of its own environment" in record.getMessage()


@pytest.mark.parametrize("failing", [1, 2])
def test_failures_of_endpoints_hide_none(failing):
    class Endpoint:
        def __init__(self, name, error=None):
            self.name, self.error = name, error

        def init_weight_transfer_engine(self, init_info):
            if self.error is not None:
                raise self.error

    errors = [PeerLostError("no route"), KeyError("odd")][:failing]
    endpoints = Endpoints(None, 1.0)
    endpoints.add([Endpoint("good"), *(Endpoint(f"bad-{i}", e) for i, e in enumerate(errors))])
    with pytest.raises((HostsError, PeerLostError)) as caught:
        endpoints.register("unix:@p", "t")
    if failing == 1:
        assert caught.value is errors[0]
    else:
        assert {k: type(e) for k, e in caught.value.errors.items()} == {
            "bad-0": PeerLostError,
            "bad-1": RemoteError,
        }
        for text in ("2 of 3 hosts failed", "bad-0: no route", "bad-1: bad-1: KeyError: 'odd'"):
            assert text in str(caught.value)


def test_endpoint_named_twice_is_refused(weights, absent):
    with pytest.raises(ValueError, match="named twice"):
        Publisher(weights, hosts=[absent, absent])


def test_worker_that_claims_to_have_joined_is_missed(weights):
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


def test_serving_engine_applies_when_it_is_called(engines, weights):
    with Publisher(weights, hosts=engines, token="t") as publisher:
        place = {"address": publisher.address, "token": "t", "host": "one"}
        assert engines[0].invited == [{"wtransfer": place}]
        assert publisher.hosts == {"one": None, "two": None}
        assert publisher.publish("v1").ok
    for each in engines:
        assert each.calls == ["start", "v1"]
        assert contents(each.tensors) == contents(weights)


def test_dry_run_calls_no_engine(engines, weights):
    with Publisher(weights, hosts=engines) as publisher:
        assert publisher.publish("v1", dry_run=True).ok
    assert [each.calls for each in engines] == [[], []]


def test_report_has_the_error_of_an_engine_that_did_not_apply(engines, weights):
    engines[1].error = RuntimeError("the engine is asleep")
    with Publisher(weights, hosts=engines, deadline_s=1.0) as publisher:
        report = publisher.publish("v1")
    applied, left = sorted(report.workers, key=lambda each: each.worker)
    assert (report.outcome, applied.outcome, left.outcome) == ("mixed", "committed", "pending")
    assert "the engine is asleep" in str(left.error)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_failed_call_of_an_engine_blocks_no_later_round(engines, weights, times):
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


def test_only_the_engine_that_is_behind_is_called(engines, weights):
    with Publisher(weights, hosts=engines) as publisher:
        assert publisher.publish("v1").ok
        engines[1].session.close()
        until(lambda: len(publisher.workers()) == 1)
        engines[1].session = WorkerSession(engines[1].tensors, name="its next worker")
        engines[1].session.join(**engines[1].invited[0]["wtransfer"])
        until(lambda: engines[1].session.version == "v1")
    assert [each.calls for each in engines] == [["start", "v1"], ["start", "v1"] * 2]


def test_engine_whose_workers_do_not_join_is_missed(weights):
    class Empty:
        name = "empty"

        def init_weight_transfer_engine(self, init_info):
            """Join no publisher."""

    with pytest.raises(NoWorkersError, match=r"empty did not join within 0\.2 s"):
        Publisher(weights, hosts=[Empty()], deadline_s=0.2)


def test_restarted_endpoint_is_found_by_invite(start_worker, weights):
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


def test_endpoint_can_be_added(start_worker, weights, absent):
    first, second = start_worker(), start_worker()
    with Publisher(weights, hosts=[first.address]) as publisher:
        publisher.invite(second.address)
        assert len(publisher.publish("v1").workers) == 2
        with pytest.raises(PeerLostError):
            publisher.invite(absent)
        # Those that are there are not troubled by one that is not.
        assert publisher.publish("v2").ok


@pytest.mark.parametrize("listen", [None, "tcp:127.0.0.1:0", "tcp:0.0.0.0:0"])
def test_remote_endpoint_needs_an_address_that_it_can_dial(weights, listen):
    with pytest.raises(AddressError, match=r"--listen tcp:HOST:PORT.*--engine file"):
        Publisher(weights, listen=listen, hosts=["http://192.0.2.1:8000"])


def test_remote_endpoint_may_dial_an_address_of_this_host():
    class Remote:
        name, is_local = "far", False

        def init_weight_transfer_engine(self, init_info):
            return {}

    endpoints = Endpoints(None, 1.0)
    endpoints.add([Remote()])
    endpoints.register("tcp:192.0.2.7:4000", "t")
    assert endpoints.workers == {"far": None}


def test_publisher_that_cannot_listen_leaves_no_thread(weights):
    num_threads = threading.active_count()
    with (
        Publisher(weights, listen="unix:@wt-test-taken"),
        pytest.raises(AddressInUseError),
    ):
        Publisher(weights, listen="unix:@wt-test-taken")
    until(lambda: threading.active_count() == num_threads)
