"""A worker behind HTTP: what its routes do, whom they answer, and what is refused before that."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import logging
import pickle
import re
import secrets
import socket
import sys
import threading
import time
import tracemalloc

import pytest
import torch

pytest.importorskip("uvicorn")

import httpx
import requests
from starlette.applications import Starlette
from starlette.routing import Mount

from wtransfer.errors import (
    AddressInUseError,
    AuthenticationError,
    CommitError,
    EngineError,
    PluginNotInstalledError,
    ProtocolError,
    StallError,
    UnknownBackendError,
)
from wtransfer.testing.contents import contents
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.http import door, gate, invitations, protocol
from wtransfer.weight_sync.http.clients import HttpClient
from wtransfer.weight_sync.http.worker_server import WorkerServer, worker_app
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weight_sync.worker.target import StateDictTarget

TOKEN = "the-secret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
JSON = {"Content-Type": "application/json"}


class Worker:
    """A served session, and the thread that owns its model."""

    def __init__(self, tensors, target=None, **options):
        self.tensors = tensors
        self.session = WorkerSession(
            target or tensors, name="w0", token=TOKEN, commit="copy", deadline_s=5
        )
        options = {"listen": f"unix:@wt-test-{secrets.token_hex(8)}", "token": TOKEN, **options}
        self.server = WorkerServer(self.session, **options)
        self.client = HttpClient(self.server.url, TOKEN)
        self._stopping = threading.Event()
        self._model = threading.Thread(target=self._step, name="model")
        self._model.start()

    def _step(self):
        while not self._stopping.is_set():
            with contextlib.suppress(CommitError):
                self.session.commit_pending(0.01)

    def http(self, **options):
        """Return an httpx client without credentials."""
        target = self.server.address.removeprefix("unix:@")
        transport = httpx.HTTPTransport(uds=f"\0{target}", verify=False)
        return httpx.Client(transport=transport, base_url="http://worker", **options)

    def raw(self):
        """Return a connection."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(f"\0{self.server.address.removeprefix('unix:@')}")
        return sock

    def close(self):
        self._stopping.set()
        self._model.join()
        self.server.close()
        self.session.close()


@pytest.fixture
def start(weights, leaves_nothing):
    workers = []

    def make(**options):
        tensors = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        workers.append(Worker(tensors, **options))
        return workers[-1]

    yield make
    for each in workers:
        each.close()


@pytest.fixture
def worker(start):
    return start()


@pytest.fixture
def tcp_worker(start):
    return start(listen="tcp:127.0.0.1:0")


@pytest.fixture
def http(worker):
    """An httpx client with the token."""
    with worker.http(headers=BEARER) as client:
        yield client


def until_closed(sock, within_s=5.0):
    """Return what a peer sends until it hangs up, and the seconds that took."""
    begin, received = time.monotonic(), b""
    sock.settimeout(within_s)
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(1024):
            received += chunk
    return received, time.monotonic() - begin


def until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# -- publishers


def test_a_publisher_invites_the_worker_and_brings_it_new_weights(worker, weights):
    with Publisher(weights, hosts=[worker.server.url], host_token=TOKEN) as publisher:
        assert publisher.hosts == {worker.server.url: "w0"}
        report = publisher.publish("v1")
        info = worker.client.weight_info()
    assert (info["weight_version"], info["fingerprint"]) == ("v1", report.fingerprint)
    assert (info["state"], info["verified"], info["worker"]) == ("serving", "digests", "w0")
    assert contents(weights) == contents(worker.tensors)


def test_before_any_update_nothing_is_claimed(worker):
    info = worker.client.weight_info()
    assert (info["weight_version"], info["state"], info["verified"]) == (None, "fresh", None)


def test_digests_are_those_of_the_tensors(worker):
    digests = worker.client.weight_info(digests=True)["digests"]
    assert digests == {name: digest(tensor) for name, tensor in worker.tensors.items()}


def test_an_invitation_can_be_repeated(worker, weights):
    with Publisher(weights, token=TOKEN) as publisher:
        for _ in range(2):
            worker.client.init_weight_transfer_engine({"wtransfer": {"address": publisher.address}})
        assert [publisher.address] == [link.address for link in worker.session.links]


def test_a_publisher_that_refuses_the_worker_is_not_joined_and_the_caller_hears_why(
    worker, weights
):
    with Publisher(weights, token="another") as publisher:
        place = {"address": publisher.address, "token": "not this one"}
        with pytest.raises(AuthenticationError, match="could not prove that it knows the token"):
            worker.client.init_weight_transfer_engine({"wtransfer": place})
    assert worker.session.links == ()


def test_a_publisher_that_is_not_there_is_not_joined(worker, monkeypatch):
    monkeypatch.setattr(invitations, "ARRIVE_S", 0.2)
    with pytest.raises(StallError, match=r"unix:@wt-nobody was not reached within 0\.2 s"):
        worker.client.init_weight_transfer_engine({"wtransfer": {"address": "unix:@wt-nobody"}})
    assert worker.session.links == ()


def test_publishers_that_are_gone_do_not_pile_up(worker, weights):
    for _ in range(3):
        publisher = Publisher(weights, token=TOKEN)
        worker.client.init_weight_transfer_engine({"wtransfer": {"address": publisher.address}})
        publisher.close()  # without a word to the worker: it does not have it in its hosts
    with Publisher(weights, token=TOKEN) as last:
        until(lambda: not worker.session.connected)
        worker.client.init_weight_transfer_engine({"wtransfer": {"address": last.address}})
        assert [last.address] == [link.address for link in worker.session.links]


def test_a_shutdown_leaves_what_requests_have_joined_and_nothing_else(worker, weights):
    with Publisher(weights, token=TOKEN) as own, Publisher(weights, token=TOKEN) as invited:
        worker.session.join(own.address)
        for each in (own, invited):
            worker.client.init_weight_transfer_engine({"wtransfer": {"address": each.address}})
        worker.client.shutdown_weight_transfer_engine()
        assert [own.address] == [link.address for link in worker.session.links]


def test_a_shutdown_with_an_address_leaves_that_publisher(worker, weights):
    with Publisher(weights, token=TOKEN) as one, Publisher(weights, token=TOKEN) as other:
        for each in (one, other):
            worker.client.init_weight_transfer_engine({"wtransfer": {"address": each.address}})
        worker.client.leave(one.address)
        assert [other.address] == [link.address for link in worker.session.links]


def test_what_is_no_address_is_refused(worker):
    with pytest.raises(ValueError, match="is no address"):
        worker.client.init_weight_transfer_engine({"wtransfer": {"address": "over there"}})


# -- the host


def test_pause_and_resume_are_the_hosts_business_and_visible(start):
    calls = []
    worker = start(on_pause=calls.append, on_resume=lambda: calls.append("resume"))
    worker.client.pause("wait")
    assert worker.client.weight_info()["paused"] == "wait"
    worker.client.resume()
    assert (calls, worker.client.weight_info()["paused"]) == (["wait", "resume"], None)


def test_an_update_is_applied_while_the_host_pauses(worker, weights):
    with Publisher(weights, hosts=[worker.server.url], host_token=TOKEN) as publisher:
        worker.client.pause()
        assert publisher.publish("v1").ok
    assert worker.client.weight_info()["paused"] == "abort"


def test_a_host_that_cannot_pause_is_not_paused(start):
    def refuse(_mode):
        raise RuntimeError("requests are stuck")

    worker = start(on_pause=refuse)
    with pytest.raises(EngineError, match="requests are stuck"):
        worker.client.pause()
    assert worker.client.weight_info()["paused"] is None


def test_an_unknown_way_to_pause_is_refused(worker):
    with pytest.raises(ProtocolError, match="expected one of abort, wait, keep"):
        worker.client.pause("now")


def test_health_is_good_until_the_worker_is_empty(start, weights, caplog):
    class Fragile(StateDictTarget):
        def apply(self, tensors):
            raise RuntimeError("broken for good")

    tensors = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    worker = start(target=Fragile(tensors, "copy"))
    with (
        worker.http(headers=BEARER) as http,
        Publisher(weights, hosts=[worker.server.url], host_token=TOKEN) as publisher,
    ):
        assert http.get("/healthz").status_code == 200
        publisher.publish("v1")
        assert worker.client.weight_info()["state"] == "empty"
        assert http.get("/healthz").status_code == 503
    # Its records keep the error, and the error the tensors.
    caplog.clear()


# -- errors reach the caller


def test_the_first_line_of_an_error_stands_in_the_status_line(tcp_worker):
    url = tcp_worker.server.url.replace("//", f"//wtransfer:{TOKEN}@")
    response = requests.post(f"{url}/start_weight_update", json=None, timeout=5)
    with pytest.raises(requests.HTTPError, match=r"403 .*rounds of a wtransfer Publisher only"):
        response.raise_for_status()


def test_error_texts_cannot_break_the_status_line(start):
    def refuse(_mode):
        raise RuntimeError("no\r\nX-Evil: 1\r\n\r\n\u2028")

    worker = start(on_pause=refuse)
    with worker.http(headers=BEARER) as http:
        answer = http.post("/pause")
    assert (answer.status_code, answer.reason_phrase) == (500, "EngineError: RuntimeError: no?")
    assert "x-evil" not in answer.headers
    assert "X-Evil: 1" in answer.json()["error"]["message"]


def test_an_unknown_route_and_a_wrong_method_are_errors_like_others(http):
    for answer, status in ((http.get("/admin"), 404), (http.get("/pause"), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "ProtocolError"


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
    "other bytes": secrets.token_bytes(4096),
    "pickle": pickle.dumps({"init_info": {}}),
    "invitation and more": b'{"init_info": {"wtransfer": {"address": "unix:@a"}, "rank": 1}}',
    "invitation without address": b'{"init_info": {"wtransfer": {}}}',
    "invitation to a number": b'{"init_info": {"wtransfer": {"address": 4}}}',
    "invitation with more": b'{"init_info": {"wtransfer": {"address": "unix:@a", "module": "x"}}}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_body_is_refused_and_harms_nothing(worker, http, body, unpickled):
    before = unpickled.by_us()
    answer = http.post("/init_weight_transfer_engine", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "ProtocolError")
    assert (worker.session.links, worker.client.weight_info()["state"]) == ((), "fresh")
    assert before == unpickled.by_us()


def test_many_names_cost_no_more_than_they_are_long(http):
    names = [f'"{i:x}":1' for i in range(95_000)]
    body = '{"init_info": {' + ",".join([*names, names[-1]]) + "}}"
    begin = time.monotonic()
    answer = http.post("/init_weight_transfer_engine", content=body.encode(), headers=JSON)
    assert time.monotonic() - begin < 1.0
    assert answer.status_code == 400
    assert "'17317' appears twice in one object" in answer.json()["error"]["message"]


BUCKET = {"folder": "f", "file": "g"}
ODD_INFOS = {
    "root is a number": ("init", {"root": 5}, "`root` is of type int, expected str"),
    "root is missing": ("init", {}, "'root'"),
    "root is relative": ("init", {"root": "rel"}, "`root` is 'rel', expected an absolute path"),
    "root ends early": ("init", {"root": "/a\0b"}, "`root` is '/a\\x00b', expected an absolute"),
    "folder is a number": (
        "update",
        {**BUCKET, "folder": 7},
        "`folder` is of type int, expected str",
    ),
    "file is a list": ("update", {**BUCKET, "file": []}, "`file` is of type list, expected str"),
    "names is a text": (
        "update",
        {**BUCKET, "names": "ab"},
        "`names` is of type str, expected list",
    ),
    "a name is a list": ("update", {**BUCKET, "names": [[]]}, "`names[0]` is of type list"),
    "a dtype is a list": (
        "update",
        {**BUCKET, "dtype_names": [[]]},
        "`dtype_names[0]` is of type list",
    ),
    "a shape is a number": ("update", {**BUCKET, "shapes": [[], 5]}, "`shapes[1]` is of type int"),
    "an offset is a text": ("update", {**BUCKET, "offsets": ["0"]}, "`offsets[0]` is of type str"),
    "another length": ("update", {**BUCKET, "names": ["a"]}, "`dtype_names` has 0 entries"),
}


@pytest.mark.parametrize(("kind", "info", "text"), ODD_INFOS.values(), ids=ODD_INFOS)
def test_an_info_that_does_not_fit_its_engine_names_the_field(start, tmp_path, kind, info, text):
    worker = start(accept_unsealed="file")
    with worker.http(headers=BEARER) as http:
        init = {"init_info": {"root": str(tmp_path)} if kind == "update" else info}
        answer = http.post("/init_weight_transfer_engine", json=init)
        if kind == "update":
            assert answer.status_code == 200
            assert http.post("/start_weight_update").status_code == 200
            answer = http.post("/update_weights", json={"update_info": info})
    assert text in answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert worker.client.weight_info()["state"] == "fresh"


@pytest.mark.parametrize("content_type", ["application/octet-stream", "text/plain", None])
def test_a_body_of_another_type_is_refused(http, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = http.post("/init_weight_transfer_engine", content=b'{"init_info":{}}', headers=headers)
    assert answer.status_code == 400
    assert "expected 'application/json'" in answer.json()["error"]["message"]


def test_huge_numbers_are_refused_or_harmless(http):
    body = b'{"init_info": {"wtransfer": {"address": ' + b"9" * 500_000 + b"}}}"
    assert http.post("/init_weight_transfer_engine", content=body, headers=JSON).status_code == 400


def test_a_body_that_is_too_large_is_refused_before_it_is_read(worker):
    head = (
        f"POST /init_weight_transfer_engine HTTP/1.1\r\nHost: w\r\n"
        f"Authorization: Bearer {TOKEN}\r\nContent-Length: {(1 << 20) + 1}\r\n\r\n"
    )
    with worker.raw() as sock:
        sock.sendall(head.encode())
        received, seconds = until_closed(sock)
    assert received.startswith(b"HTTP/1.1 413 LimitError")
    assert seconds < 1


def test_a_body_of_unknown_length_is_read_up_to_the_limit(http):
    pieces = (b" " * 4096 for _ in range(1000))
    answer = http.post("/init_weight_transfer_engine", content=pieces, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "LimitError")


def test_an_update_may_be_larger_than_other_bodies(http):
    body = {"update_info": {"names": ["x" * 100] * 40_000}}
    # It is read, judged, and refused for another reason.
    assert http.post("/update_weights", json=body).status_code == 403


def test_a_body_that_comes_byte_by_byte_is_waited_for_only_so_long(worker, monkeypatch):
    monkeypatch.setattr(gate, "BODY_S", 0.3)
    head = (
        f"POST /pause HTTP/1.1\r\nHost: w\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    )
    with worker.raw() as sock:
        sock.sendall(head.encode())
        with contextlib.suppress(OSError):
            for _ in range(100):
                sock.sendall(b" ")
                time.sleep(0.01)
        received, _ = until_closed(sock)
    assert received.startswith(b"HTTP/1.1 408 StallError: the body was not complete within 0.3 s")


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


@pytest.mark.parametrize("authorization", GOOD)
def test_the_token_comes_as_bearer_or_as_password(worker, authorization):
    with worker.http(headers={"Authorization": authorization}) as http:
        assert http.get("/healthz").status_code == 200


@pytest.mark.parametrize("authorization", BAD)
def test_without_the_token_nothing_is_answered(worker, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    with worker.http(headers=headers) as http:
        answers = [http.get(path) for path in ("/healthz", "/weight_info", "/nothing")]
    for answer in answers:
        assert (answer.status_code, answer.headers["connection"]) == (401, "close")
        assert answer.json()["error"]["type"] == "AuthenticationError"
        assert TOKEN not in answer.text


def test_two_tokens_are_none(worker):
    with worker.http(headers=[("Authorization", GOOD[0]), ("Authorization", "x")]) as http:
        assert http.get("/healthz").status_code == 401


def test_a_stranger_is_refused_before_its_body_is_read_and_for_little_memory(worker):
    """FAULTS 23: closed within 1 s, at most 64 KiB allocated."""
    head = b"POST /update_weights HTTP/1.1\r\nHost: w\r\nContent-Length: 60000000\r\n"

    def stranger():
        with worker.raw() as sock:
            sock.sendall(head + b"Authorization: Bearer wrong\r\n\r\n")
            with contextlib.suppress(OSError):
                sock.sendall(bytes(8 << 20))
            return until_closed(sock)

    stranger()  # what is imported and cached once is not counted
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        payload = 8 << 20
        received, seconds = stranger()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The 8 MiB are the test's own.
    assert peak - before - payload < 64 << 10
    assert received.startswith(b"HTTP/1.1 401 ")
    assert seconds < 1


def test_a_stranger_is_not_asked_to_go_on(worker):
    head = (
        b"POST /update_weights HTTP/1.1\r\nHost: w\r\nExpect: 100-continue\r\n"
        b"Content-Length: 60000000\r\n\r\n"
    )
    with worker.raw() as sock:
        sock.sendall(head)
        received, _ = until_closed(sock)
    assert received.startswith(b"HTTP/1.1 401 ")


def test_a_server_without_a_token_makes_one_that_nobody_else_has(start, monkeypatch):
    monkeypatch.delenv("WTRANSFER_TOKEN", raising=False)
    one, other = start(token=None), start(token=None)
    assert one.server.token != other.server.token
    assert HttpClient(one.server.url, one.server.token).weight_info()["worker"] == "w0"
    with pytest.raises(AuthenticationError):
        HttpClient(one.server.url, other.server.token).weight_info()


# -- connections


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HT"])
def test_who_sends_no_whole_request_is_gone_within_a_second(worker, begun):
    with worker.raw() as sock:
        sock.sendall(begun)
        received, seconds = until_closed(sock)
    assert received == b""
    assert 0.5 < seconds < 1.2


def test_a_header_that_comes_byte_by_byte_is_cut(worker):
    begin = time.monotonic()
    with worker.raw() as sock, contextlib.suppress(OSError):
        for byte in b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 1000:
            sock.sendall(bytes([byte]))
            time.sleep(0.01)
    assert 0.5 < time.monotonic() - begin < 1.5


def test_a_second_request_of_a_connection_is_waited_for_no_longer(worker, http):
    with worker.raw() as sock:
        sock.sendall(
            f"GET /healthz HTTP/1.1\r\nHost: w\r\nAuthorization: {GOOD[0]}\r\n\r\n".encode()
        )
        answer = b""
        while not answer.endswith(b"}"):
            answer += sock.recv(4096)
        time.sleep(1.1)  # idle connections may stay; uvicorn ends them after 5 s
        sock.sendall(b"GET /hea")
        received, seconds = until_closed(sock)
    assert received == b""
    assert seconds < 1.2


@pytest.mark.parametrize(
    "junk", [pickle.dumps([1]), b"\x16\x03\x01\x02\x00", b"\0" * 4096, b"GET / HTTP/9\r\n\r\n"]
)
def test_what_is_not_http_is_refused_without_a_word_in_the_log(worker, junk, caplog):
    with worker.raw() as sock:
        sock.sendall(junk)
        received, seconds = until_closed(sock)
    assert received.startswith(b"HTTP/1.1 400 ") or received == b""
    assert seconds < 1.2
    assert worker.client.weight_info()["state"] == "fresh"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_header_that_does_not_end_is_refused(worker):
    with worker.raw() as sock:
        with contextlib.suppress(OSError):
            sock.sendall(b"GET /healthz HTTP/1.1\r\n" + b"a: " + b"b" * (64 << 10))
        received, seconds = until_closed(sock)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert seconds < 1


def test_who_does_not_read_the_answer_is_cut(worker, monkeypatch):
    monkeypatch.setattr(protocol, "UNREAD_ANSWER_S", 0.2)
    request = (
        f"GET /weight_info?digests=true HTTP/1.1\r\nHost: w\r\nAuthorization: {GOOD[0]}\r\n\r\n"
    )
    with worker.raw() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begin < 4:
                sock.sendall(request.encode())
    assert time.monotonic() - begin < 4


def test_a_full_house_makes_room_for_a_newcomer_but_not_at_the_cost_of_a_running_request(
    start, monkeypatch
):
    monkeypatch.setattr(door.Door.__init__, "__defaults__", (4,))
    entered, leave = threading.Event(), threading.Event()

    def pause(_mode):
        entered.set()
        leave.wait(5)

    worker = start(on_pause=pause)
    pausing = threading.Thread(target=worker.client.pause)
    pausing.start()
    entered.wait(5)
    with contextlib.ExitStack() as stack:
        begin = time.monotonic()
        for _ in range(6):
            stack.enter_context(worker.raw())
        assert worker.client.weight_info()["state"] == "fresh"
        # Before the strangers' own time was over.
        assert time.monotonic() - begin < 0.7
        leave.set()
        pausing.join()
    assert worker.client.weight_info()["paused"] == "abort"


# -- where it listens, and its end


def test_a_port_in_use_is_named_at_once(tcp_worker):
    """FAULTS 21; that nothing is left half open, the fixture sees."""
    with WorkerSession({"a": torch.zeros(1)}, token=TOKEN) as session:
        begin = time.monotonic()
        with pytest.raises(AddressInUseError, match=re.escape(tcp_worker.server.address)):
            WorkerServer(session, listen=tcp_worker.server.address, token=TOKEN)
        assert time.monotonic() - begin < 0.1


def test_by_default_only_this_host_can_reach_it(start):
    worker = start(listen="tcp:127.0.0.1:0")
    assert re.fullmatch(r"tcp:127\.0\.0\.1:[1-9]\d*", worker.server.address)
    assert worker.server.url == worker.server.address.replace("tcp:", "http://")
    assert worker.client.weight_info()["worker"] == "w0"


def test_a_socket_file_is_the_owners_and_goes_with_the_server(start, tmp_path):
    worker = start(listen=f"unix:{tmp_path}/worker")
    path = tmp_path / "worker"
    assert path.stat().st_mode & 0o777 == 0o600
    assert worker.client.weight_info()["worker"] == "w0"
    worker.server.close()
    assert not path.exists()


def test_closing_does_not_wait_for_requests_that_hang(start, caplog):
    entered, leave = threading.Event(), threading.Event()

    def pause(_mode):
        entered.set()
        leave.wait(5)

    worker = start(on_pause=pause)
    failed = []

    def call():
        try:
            worker.client.pause()
        except Exception as error:
            failed.append(error)

    calling = threading.Thread(target=call)
    calling.start()
    entered.wait(5)
    begin = time.monotonic()
    worker.server.close()
    assert time.monotonic() - begin < 1
    calling.join(5)
    leave.set()
    assert [type(error).__name__ for error in failed] == ["ClosedError"]
    worker.server.close()
    gc.collect()
    assert caplog.records == []


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    with (
        WorkerSession({"a": torch.zeros(1)}, token=TOKEN) as session,
        pytest.raises(PluginNotInstalledError, match=r'pip install "wtransfer\[server\]"'),
    ):
        WorkerServer(session, token=TOKEN)


def test_an_engine_that_does_not_exist_is_refused_at_the_start():
    with (
        WorkerSession({"a": torch.zeros(1)}, token=TOKEN) as session,
        pytest.raises(UnknownBackendError, match="ncll"),
    ):
        WorkerServer(session, token=TOKEN, accept_unsealed="ncll")


# -- in a server of one's own


def test_the_routes_can_be_mounted(monkeypatch):
    monkeypatch.delenv("WTRANSFER_TOKEN", raising=False)
    with WorkerSession({"a": torch.zeros(1)}, name="w0", token=TOKEN) as session:
        with pytest.raises(AuthenticationError, match="no token for the worker's routes"):
            worker_app(session)
        app = Starlette(routes=[Mount("/weights", worker_app(session, token=TOKEN))])

        async def ask(headers):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.get("/weights/weight_info", headers=headers)

        assert asyncio.run(ask({})).status_code == 401
        assert asyncio.run(ask(BEARER)).json()["worker"] == "w0"
