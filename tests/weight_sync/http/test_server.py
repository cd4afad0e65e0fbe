"""A worker behind HTTP: routes, token, limits, and its end."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import pickle
import re
import runpy
import secrets
import select
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

pytest.importorskip("uvicorn")

from wtransfer import Publisher, WorkerServer, WorkerSession
from wtransfer.errors import (
    AddressInUseError,
    AuthenticationError,
    NotInitializedError,
    StallError,
)
from wtransfer.metrics import RoundCollector
from wtransfer.testing.contents import contents
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.http import server as http_server
from wtransfer.weight_sync.http.client import HttpClient
from wtransfer.weight_sync.worker.target import StateDictTarget

HttpWorker = runpy.run_path(str(Path(__file__).with_name("worker_in_process.py")))["HttpWorker"]
TOKEN = "the-secret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def start(weights, leaves_nothing):
    workers = []

    def make(**options):
        tensors = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        workers.append(HttpWorker(tensors, **{"token": TOKEN, **options}))
        return workers[-1]

    yield make
    for each in workers:
        each.close()


@pytest.fixture
def worker(start):
    return start()


@pytest.fixture
def http(worker):
    """An httpx client with the token."""
    with worker.http(headers=BEARER) as client:
        yield client


def until_closed(sock):
    """Return what a peer sends until it closes, which must not take long."""
    received = b""
    sock.settimeout(10.0)
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(1024):
            received += chunk
    return received


def joined(worker):
    """Return the address of the worker's publisher; None if it has none."""
    return worker.session.status().publisher


def join(worker, publisher, **more):
    place = {"address": getattr(publisher, "address", publisher), **more}
    return worker.client.init_weight_transfer_engine({"wtransfer": place})


# -- publishers


def test_publisher_registers_and_updates_worker(worker, http, weights):
    info = worker.client.weight_info()
    assert (info["weight_version"], info["state"], info["verified"]) == (None, "fresh", None)
    with Publisher(weights, hosts=[worker.address], host_token=TOKEN) as publisher:
        assert publisher.hosts == {worker.address: "w0"}
        # Also while the host is paused.
        http.post("/pause")
        report = publisher.publish("v1")
        info = worker.client.weight_info()
    assert (info["weight_version"], info["fingerprint"]) == ("v1", report.fingerprint)
    assert (info["state"], info["verified"], info["worker"]) == ("serving", "digests", "w0")
    assert info["paused"] == "abort"
    assert contents(weights) == contents(worker.tensors)
    assert joined(worker) is None


def test_digests_are_those_of_the_tensors(worker):
    digests = worker.client.weight_info(digests=True)["digests"]
    assert digests == {name: digest(tensor) for name, tensor in worker.tensors.items()}


def test_registration_is_idempotent(worker, weights):
    with Publisher(weights, token=TOKEN) as publisher:
        for _ in range(2):
            assert join(worker, publisher)["worker"] == "w0"
        assert joined(worker) == publisher.address
        assert worker.num_joined == 1


def test_publisher_that_refuses_the_worker_is_left_and_the_caller_gets_its_error(worker, weights):
    with (
        Publisher(weights, token="another") as publisher,
        pytest.raises(AuthenticationError, match="could not prove that it knows the token"),
    ):
        join(worker, publisher, token="not this one")
    assert joined(worker) is None


def test_unreachable_publisher_is_left(worker, monkeypatch):
    monkeypatch.setattr(http_server, "JOIN_S", 0.2)
    with pytest.raises(StallError, match=r"unix:@wt-absent was not reached within 0\.2 s"):
        join(worker, "unix:@wt-absent")
    assert joined(worker) is None


def test_lost_publisher_is_replaced_also_at_its_address_with_another_token(worker, weights, until):
    first, second = (f"unix:@wt-test-{secrets.token_hex(8)}" for _ in range(2))
    for address, token in ((first, "a"), (first, "b"), (second, "b")):
        # Its end does not deregister: the worker is not among its hosts.
        with Publisher(weights, listen=address, token=token) as publisher:
            join(worker, publisher, token=token)
            assert joined(worker) == address
        until(lambda: not worker.session.status().connected)


@pytest.mark.parametrize("owner_joins", ["never", "before", "afterwards"])
@pytest.mark.parametrize("way", ["shutdown", "leave", "close"])
def test_registered_publisher_is_left_and_the_owners_is_not(
    worker, http, weights, owner_joins, way
):
    with Publisher(weights, token=TOKEN) as publisher:
        if owner_joins == "before":
            worker.session.join(publisher.address)
        join(worker, publisher)
        if owner_joins == "afterwards":
            worker.session.leave(publisher.address)
            worker.session.join(publisher.address)
        worker.client.leave("unix:@wt-never-joined")
        if way == "shutdown":
            left = http.post("/shutdown_weight_transfer_engine").json()["left"]
            assert left == ([publisher.address] if owner_joins == "never" else [])
        elif way == "leave":
            worker.client.leave(publisher.address)
        else:
            worker.server.close()
        assert joined(worker) == (None if owner_joins == "never" else publisher.address)


def test_second_publisher_is_refused_while_the_first_is_connected(worker, http, weights):
    with Publisher(weights, token=TOKEN) as first, Publisher(weights, token=TOKEN) as second:
        join(worker, first)
        body = {"init_info": {"wtransfer": {"address": second.address}}}
        answer = http.post("/init_weight_transfer_engine", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "RoundBusyError")
        assert first.address in answer.json()["error"]["message"]
        assert joined(worker) == first.address
        worker.client.leave(first.address)
        join(worker, second)
        assert joined(worker) == second.address


def test_invalid_address_is_a_value_error(worker):
    with pytest.raises(ValueError, match="is no address"):
        join(worker, "over there")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("init_weight_transfer_engine", {"init_info": {"master_address": "10.0.0.1"}}),
        ("start_weight_update", None),
        ("update_weights", {"update_info": {"names": ["x" * 100] * 40_000}}),
        ("finish_weight_update", {"weight_version": "v1"}),
    ],
)
def test_updates_outside_of_rounds_are_refused(worker, http, route, body):
    answer = http.post(f"/{route}", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "NotInitializedError")
    assert "in rounds of a wtransfer Publisher only" in answer.json()["error"]["message"]
    # The connection survives the body, which was not read.
    assert http.get("/healthz").status_code == 200
    if body is None:
        with pytest.raises(NotInitializedError):
            worker.client.start_weight_update()


# -- the host


def test_pause_and_resume_call_the_host(start):
    calls = []
    worker = start(on_pause=calls.append, on_resume=lambda: calls.append("resume"))
    with worker.http(headers=BEARER) as http:
        assert http.post("/pause?mode=wait").status_code == 200
        assert worker.client.weight_info()["paused"] == "wait"
        assert http.post("/resume").status_code == 200
    assert (calls, worker.client.weight_info()["paused"]) == (["wait", "resume"], None)


def test_error_of_the_host_reaches_the_caller(start, caplog):
    def refuse(_mode):
        raise RuntimeError("no\r\nX-Evil: 1\r\n\r\n\u2028")

    worker = start(on_pause=refuse)
    with worker.http(headers=BEARER) as http:
        answer = http.post("/pause")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "EngineError")
    assert "X-Evil: 1" in answer.json()["error"]["message"]
    assert "x-evil" not in answer.headers
    assert worker.client.weight_info()["paused"] is None


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /admin", 404),
        ("GET /pause", 405),
        ("POST /pause?mode=now", 400),
        ("GET /weight_info?digests=perhaps", 400),
    ],
)
def test_wrong_request_is_an_error_in_our_form(http, request_line, status):
    answer = http.request(*request_line.split())
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "ProtocolError")


def test_health_is_good_until_the_worker_is_empty(start, weights, caplog, report_of):
    class Fragile(StateDictTarget):
        def apply(self, tensors):
            raise RuntimeError("broken for good")

    tensors = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    worker = start(target=Fragile(tensors, "copy"))
    with (
        worker.http(headers=BEARER) as http,
        Publisher(weights, hosts=[worker.address], host_token=TOKEN) as publisher,
    ):
        assert http.get("/healthz").status_code == 200
        report_of(publisher.publish, "v1")
        assert worker.client.weight_info()["state"] == "empty"
        assert http.get("/healthz").status_code == 503
    # Its records keep the error, and the error the tensors.
    caplog.clear()


def test_readiness_is_of_the_weights_that_are_asked_for(worker, http, weights):
    def ready(**params):
        answer = http.get("/readyz", params=params)
        assert answer.json()["ready"] == (answer.status_code == 200)
        return answer.status_code

    with Publisher(weights, hosts=[worker.address], host_token=TOKEN) as publisher:
        fingerprint = publisher.publish("v1").fingerprint
    assert [ready(), ready(fingerprint=fingerprint), ready(fingerprint="other")] == [200, 200, 503]
    # A slip would else be an answer about any weights.
    answer = http.get("/readyz", params={"fingerpint": fingerprint})
    assert (answer.status_code, "'fingerpint'" in answer.text) == (400, True)
    http.post("/pause")
    assert [ready(), ready(fingerprint=fingerprint)] == [503, 503]
    http.post("/resume")
    assert ready(fingerprint=fingerprint) == 200
    worker.session.weights_lost("put to sleep")
    assert [ready(), ready(fingerprint=fingerprint)] == [503, 503]


def test_metrics_are_those_of_the_given_registry(start, weights):
    registry = CollectorRegistry()
    worker = start(metrics=registry)
    rounds = RoundCollector(session=worker.session)
    registry.register(rounds)
    with worker.http(headers=BEARER) as http:
        with Publisher(weights, hosts=[worker.address], host_token=TOKEN) as publisher:
            fingerprint = publisher.publish("v1").fingerprint
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    labels = f'fingerprint="{fingerprint}",state="serving",version="v1",worker="w0"'
    assert f"wtransfer_worker_info{{{labels}}} 1.0" in answer.text
    assert "wtransfer_worker_state_seconds " in answer.text
    # Its circle with the session.
    registry.unregister(rounds)


def test_refused_tokens_of_requests_are_counted(start):
    registry = CollectorRegistry()
    worker = start(metrics=registry)
    rounds = RoundCollector(session=worker.session)
    registry.register(rounds)
    labels = {"door": "http", "error": "AuthenticationError"}

    def counted():
        return registry.get_sample_value("wtransfer_peers_refused_total", labels)

    before = counted()
    for given in ({}, {"authorization": "Bearer another"}, BEARER):
        with worker.http(headers=given) as http:
            http.get("/metrics")
    assert counted() == before + 2
    registry.unregister(rounds)


def test_metrics_that_are_not_there_say_how_to_get_them(http):
    answer = http.get("/metrics")
    assert (answer.status_code, "wtransfer[metrics]" in answer.text) == (404, True)


# -- bodies

MALFORMED = {
    "no JSON": b"{",
    "not a number": b'{"init_info": {"a": NaN}}',
    "infinity": b'{"init_info": {"a": Infinity}}',
    "a name twice": b'{"init_info": {}, "init_info": {"wtransfer": {}}}',
    "a name twice, deep": b'{"init_info": {"a": {"b": 1, "b": 2}}}',
    "deeply nested": b'{"init_info": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "deep list": b"[" * 900_000,
    "another shape": b'{"init_info": [1, 2]}',
    "a list": b"[]",
    "unknown field": b'{"init_info": {}, "pickled": "gASVAAAA"}',
    "missing field": b"{}",
    "no text": b'{"init_info": {"\xff\xfe": 1}}',
    "half a character": b'{"init_info": {"a": "\\ud800"}}',
    "huge number": b'{"init_info": {"wtransfer": {"address": ' + b"9" * 500_000 + b"}}}",
    "other bytes": b"\xff" + secrets.token_bytes(4096),
    "pickle": pickle.dumps({"init_info": {}}),
    "publisher and more": b'{"init_info": {"wtransfer": {"address": "unix:@a"}, "rank": 1}}',
    "publisher without address": b'{"init_info": {"wtransfer": {}}}',
    "address is a number": b'{"init_info": {"wtransfer": {"address": 4}}}',
    "unknown field of it": b'{"init_info": {"wtransfer": {"address": "unix:@a", "module": "x"}}}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_malformed_body_is_refused_and_never_unpickled(worker, http, body, unpickled):
    before = unpickled.by_us()
    answer = http.post("/init_weight_transfer_engine", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "ProtocolError")
    assert (joined(worker), worker.client.weight_info()["state"]) == (None, "fresh")
    assert before == unpickled.by_us()


@pytest.mark.parametrize("content_type", ["application/octet-stream", "text/plain", None])
def test_body_of_another_type_is_refused(http, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = http.post("/init_weight_transfer_engine", content=b'{"init_info":{}}', headers=headers)
    assert answer.status_code == 400
    assert "expected 'application/json'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("head", "sent", "status"),
    [
        (f"Content-Length: {(1 << 20) + 1}\r\n", "", 413),
        ("Content-Length: 1000\r\nContent-Type: application/json\r\n", " ", 408),
    ],
    ids=["announced too long", "trickles in"],
)
def test_body_is_cut_off(worker, monkeypatch, head, sent, status):
    monkeypatch.setattr(http_server, "BODY_S", 0.3)
    line = "POST /init_weight_transfer_engine HTTP/1.1\r\nHost: w\r\n"
    with worker.raw() as sock:
        sock.sendall(f"{line}Authorization: Bearer {TOKEN}\r\n{head}\r\n".encode())
        with contextlib.suppress(OSError):
            for _ in range(100 if sent else 0):
                sock.sendall(sent.encode())
                time.sleep(0.01)
        received = until_closed(sock)
    assert received.startswith(f"HTTP/1.1 {status} ".encode())


def test_body_of_unknown_length_is_read_up_to_the_limit(http):
    pieces = (b" " * 4096 for _ in range(1000))
    answer = http.post("/init_weight_transfer_engine", content=pieces, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "LimitError")


# -- the token

BASIC = base64.b64encode(f"wtransfer:{TOKEN}".encode()).decode()
GOOD = [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Basic {BASIC}"]
BAD = [
    None,
    "",
    "Bearer",
    TOKEN,
    f"Bearer {TOKEN}x",
    f"Bearer {TOKEN[:-1]}",
    f"Basic {TOKEN}",
    "Basic !!!!",
    f"Basic {base64.b64encode(TOKEN.encode()).decode()}",
    f"Digest {TOKEN}",
    "Bearer \u00e9".encode(),
]


def test_token_beyond_ascii_is_compared_by_its_bytes(start):
    worker = start(token="voil\u00e0")  # ends with a byte that is a space in Latin-1
    assert worker.client.weight_info()["worker"] == "w0"


@pytest.mark.parametrize("authorization", GOOD)
def test_token_comes_as_bearer_or_as_password_and_once(worker, authorization):
    with worker.http(headers={"Authorization": authorization}) as http:
        assert http.get("/healthz").status_code == 200
    twice = [("Authorization", authorization), ("Authorization", "x")]
    with worker.http(headers=twice) as http:
        assert http.get("/healthz").status_code == 401


@pytest.mark.parametrize("authorization", BAD)
def test_no_route_answers_without_the_token(worker, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    with worker.http(headers=headers) as http:
        routes = ("/healthz", "/readyz", "/metrics", "/weight_info", "/nothing")
        answers = [http.get(path) for path in routes]
    for answer in answers:
        assert (answer.status_code, answer.headers["connection"]) == (401, "close")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "AuthenticationError"
        assert TOKEN not in answer.text


def test_stranger_is_refused_before_its_body_is_read_and_for_little_memory(worker):
    """FAULTS 23: closed long before `BODY_S`, not asked to continue, at most 64 KiB allocated."""
    head = (
        b"POST /update_weights HTTP/1.1\r\nHost: w\r\nExpect: 100-continue\r\n"
        b"Content-Length: 60000000\r\n"
    )
    payload = bytes(8 << 20)

    def stranger():
        with worker.raw() as sock:
            sock.sendall(head + b"Authorization: Bearer wrong\r\n\r\n")
            with contextlib.suppress(OSError):
                sock.sendall(payload)
            return until_closed(sock)

    stranger()  # imports and caches of the first time are not counted
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        received = stranger()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 64 << 10
    assert received.startswith(b"HTTP/1.1 401 ")


def test_peer_of_another_user_is_cut_off(worker, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with worker.raw() as sock:
        with contextlib.suppress(OSError):
            sock.sendall(f"GET /healthz HTTP/1.1\r\nHost: w\r\n{GOOD[0]}\r\n\r\n".encode())
        assert until_closed(sock) == b""


def test_server_without_a_token_makes_its_own(start, monkeypatch):
    monkeypatch.delenv("WTRANSFER_TOKEN", raising=False)
    one, other = start(token=None), start(token=None)
    assert HttpClient(one.address, one.server.token).weight_info()["worker"] == "w0"
    with pytest.raises(AuthenticationError):
        HttpClient(one.address, other.server.token).weight_info()


GUIDE = Path(http_server.__file__).parents[2] / "engines" / "README.md"


def test_every_route_that_is_documented_answers_and_the_guide_has_them_all(http):
    routes = set(re.findall(r"``?(/[a-z_]+)``", http_server.__doc__))
    guide = GUIDE.read_text("utf-8")
    assert {"/readyz", "/finish_weight_update"} <= routes
    assert {
        route for route in routes if f"{route}?" not in guide and f"{route}`" not in guide
    } == set()
    assert "Authorization: Bearer TOKEN" in guide
    # Each by a method that it has not: it is there, and nothing happens.
    assert {http.delete(route).status_code for route in routes} == {405}


# -- connections


@pytest.mark.parametrize(
    "begun", [b"", b"GET /healthz HT", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 99]
)
def test_connection_without_a_whole_header_is_cut_within_a_second(worker, begun):
    begin = time.monotonic()
    with worker.raw() as sock:
        trickles = len(begun) > 100
        with contextlib.suppress(OSError):
            for part in (begun[n : n + 1] for n in range(len(begun))) if trickles else [begun]:
                sock.sendall(part)
                time.sleep(0.01 * trickles)
        received = until_closed(sock)
    assert received.startswith(b"HTTP/1.1 408 ")
    # Bytes that trickle in for six seconds win no time.
    assert 0.5 < time.monotonic() - begin < 5


def test_request_that_was_late_is_sent_again(worker):
    class LateClient(HttpClient):
        num_connections = 0

        def _check_user(self, event, info):
            super()._check_user(event, info)
            if event.startswith("connection.connect") and event.endswith(".complete"):
                self.num_connections += 1
                if self.num_connections == 1:
                    time.sleep(http_server.HEADER_S + 0.4)

    client = LateClient(worker.client.url.name, worker.client.token)
    assert client.weight_info()["state"] == "fresh"
    assert client.num_connections == 2


@pytest.mark.parametrize("begun", [b"GET /hea", b"POST /nothing HTTP/1.1\r\nHost: w\r\n"])
def test_second_header_of_a_connection_has_the_same_limit(worker, begun):
    ask = f"GET /healthz HTTP/1.1\r\nHost: w\r\nAuthorization: {GOOD[0]}\r\n\r\n".encode()
    with worker.raw() as sock:
        sock.sendall(ask)
        answer = b""
        while not answer.endswith(b"}"):
            answer += sock.recv(4096)
        time.sleep(1.1)  # uvicorn keeps a connection between two requests for 5 s
        sock.sendall(begun)
        assert until_closed(sock).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "junk",
    [
        pickle.dumps([1]),
        b"\x16\x03\x01\x02\x00",
        b"\0" * 4096,
        b"GET / HTTP/9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"a: " + b"b" * (64 << 10),
    ],
    ids=["pickle", "tls", "zeros", "version", "endless header"],
)
def test_junk_is_refused_and_not_logged(worker, junk, caplog):
    with worker.raw() as sock:
        with contextlib.suppress(OSError):
            sock.sendall(junk)
        received = until_closed(sock)
    assert received.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 ")) or received == b""
    assert worker.client.weight_info()["state"] == "fresh"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_silent_connections_beyond_the_limit_are_closed_at_once_the_oldest_first(
    start, monkeypatch, until
):
    """FAULTS 24: rounds go on, and so do requests: a connection that has sent none makes room."""
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(http_server, "HEADER_S", 60)
    worker = start()
    weights = {name: tensor + 1 for name, tensor in worker.tensors.items()}
    with (
        Publisher(weights, hosts=[worker.address], host_token=TOKEN) as publisher,
        contextlib.ExitStack() as stack,
    ):
        socks = [stack.enter_context(worker.raw()) for _ in range(32)]

        def closed():
            return select.select(socks, [], [], 0)[0]

        until(lambda: len(closed()) >= 24)
        # One more where the invitation's connection was not gone yet.
        assert closed() == socks[: len(closed())]
        assert len(closed()) <= 25
        assert worker.client.weight_info()["worker"]
        assert closed() == socks[: len(closed())]
        assert publisher.publish("v1").ok
    until(lambda: len(worker.server._server.server_state.connections) == 0)
    assert worker.client.weight_info()["weight_version"] == "v1"


# -- where it listens, and its end


def test_port_in_use_is_named(start):
    """FAULTS 21; that nothing is left half open, the fixture sees."""
    address = start(address="tcp:127.0.0.1:0").server.address
    with (
        WorkerSession({"a": torch.zeros(1)}, token=TOKEN) as session,
        pytest.raises(AddressInUseError, match=re.escape(address)),
    ):
        WorkerServer(session, listen=address, token=TOKEN)


def test_default_address_is_loopback(caplog):
    with (
        WorkerSession({"a": torch.zeros(1)}, token=TOKEN) as session,
        WorkerServer(session) as server,
    ):
        assert re.fullmatch(r"tcp:127\.0\.0\.1:[1-9]\d*", server.address)
        assert server.url == server.address.replace("tcp:", "http://")
        assert HttpClient(server.url, server.token).weight_info()["state"] == "fresh"
    assert caplog.records == []


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_listening_on_all_interfaces_is_warned_of(host, caplog):
    # The socket that is looked for: no test listens where other hosts could reach it.
    class Everywhere(http_server.ListeningSocket):
        def __init__(self, _text, **options):
            super().__init__("tcp:127.0.0.1:0", **options)
            self.address = f"tcp:{host}:1"

    with (
        pytest.MonkeyPatch.context() as patch,
        WorkerSession({"a": torch.zeros(1)}, token=TOKEN) as session,
    ):
        patch.setattr(http_server, "ListeningSocket", Everywhere)
        WorkerServer(session, listen=f"tcp:{host}:0", token=TOKEN).close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"tcp:{host}:1 listens on all interfaces" in record.getMessage()


def test_socket_file_is_the_owners_and_removed_on_close(start, tmp_path):
    path = tmp_path / "worker"
    worker = start(address=f"unix:{path}")
    assert path.stat().st_mode & 0o777 == 0o600
    assert worker.client.weight_info()["worker"] == "w0"
    worker.server.close()
    assert not path.exists()


def test_close_answers_requests_that_hang(start):
    entered, leave = threading.Event(), threading.Event()

    def pause(_mode):
        entered.set()
        leave.wait(10)

    worker = start(on_pause=pause)
    answers = []

    def call():
        with worker.http(headers=BEARER, timeout=10) as http:
            answers.append(http.post("/pause"))

    calling = threading.Thread(target=call)
    calling.start()
    entered.wait(5)
    worker.server.close()
    calling.join(5)
    assert not leave.is_set()
    leave.set()
    assert [(a.status_code, a.json()["error"]["type"]) for a in answers] == [(503, "ClosedError")]
    worker.server.close()


def test_close_ends_a_registration_under_way(start, monkeypatch, until):
    monkeypatch.setattr(http_server, "JOIN_S", 1000.0)
    worker = start()
    failed = []

    def call():
        try:
            join(worker, "unix:@wt-absent")
        except Exception as error:
            failed.append(type(error).__name__)

    calling = threading.Thread(target=call)
    calling.start()
    until(lambda: worker.num_joined)
    worker.server.close()
    calling.join(5)
    assert failed == ["ClosedError"]
    assert joined(worker) is None


def test_program_ends_with_an_open_server(run_program):
    code = """
import torch, wtransfer
from wtransfer.weight_sync.http.client import HttpClient
session = wtransfer.WorkerSession({"a": torch.zeros(1)}, token="t")
server = wtransfer.WorkerServer(session, token="t")
client = HttpClient(server.url, "t")
client.weight_info(digests=True)
try:
    client.start_weight_update()
except wtransfer.errors.NotInitializedError:
    print("refused")
"""
    program = run_program(code)
    assert (program.wait(60), program.out(), program.err()) == (0, "refused\n", "")


def test_without_the_extra_the_error_says_what_to_install():
    code = "import sys; sys.modules['starlette'] = None; import wtransfer; wtransfer.WorkerServer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "PluginNotInstalledError: a worker behind HTTP" in done.stderr
    assert 'pip install "wtransfer[server]"' in done.stderr
