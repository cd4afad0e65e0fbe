"""FAULTS 21 to 25 at a worker's HTTP server: a real process, real sockets, real floods."""

from __future__ import annotations

import collections
import contextlib
import pickle
import resource
import runpy
import socket
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")


from wtransfer import Publisher
from wtransfer.errors import PeerError, RemoteError
from wtransfer.weight_sync.http.client import HttpClient
from wtransfer.weight_sync.http.server import MAX_CONNECTIONS

PARTS = runpy.run_path(str(Path(__file__).with_name("http_worker.py")))
SOCKETS = runpy.run_path(str(Path(__file__).parents[1] / "tcp_sockets.py"))
WorkerProcess, WEIGHTS, drained = PARTS["WorkerProcess"], PARTS["WEIGHTS"], PARTS["drained"]
ROUTES = [
    b"POST /init_weight_transfer_engine",
    b"POST /start_weight_update",
    b"POST /update_weights",
    b"POST /finish_weight_update",
    b"POST /shutdown_weight_transfer_engine",
    b"POST /pause",
    b"POST /resume",
    b"GET /weight_info",
    b"GET /healthz",
    b"GET /readyz",
    b"GET /metrics",
]


@pytest.fixture(scope="module")
def worker(zygote, tmp_path_factory):
    process = WorkerProcess(zygote, tmp_path_factory.mktemp("faults")).until_ready()
    yield process
    assert process.end()[0] == 0, process.output


@pytest.fixture
def client(worker):
    return HttpClient(worker.url, worker.token)


def test_worker_listens_on_loopback_only_and_no_route_answers_a_stranger(worker):
    """FAULTS 22 and 23."""
    assert SOCKETS["listeners"](worker.child.pid) == [f"0100007F:{worker.target[1]:04X}"]
    for route in ROUTES:
        answer, seconds = worker.ask(route + b"\r\nContent-Length: 2\r\n\r\n{}", authorized=False)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert seconds < 8


@pytest.fixture
def many_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class LiveRounds:
    """Publishes to the worker over and over, and notes how each round went."""

    def __init__(self, publisher):
        self._publisher = publisher
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds, self.failures = [], []

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.is_set():
            begin = time.monotonic()
            try:
                report = self._publisher.publish(f"v{len(self.seconds) + 1}")
            except Exception as error:
                self.failures.append(str(error))
                return
            if not report.ok:
                self.failures.append(str(report))
            self.seconds.append(time.monotonic() - begin)
            time.sleep(0.01)


class Flood:
    """Connections that stay, half open or sending byte by byte, and ever more of them."""

    def __init__(self, worker):
        self._worker = worker
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._connect, self._trickle)]
        self._sockets = collections.deque()
        self.num_connections = 0

    def __enter__(self):
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for each in self._threads:
            each.join()
        while self._sockets:
            self._sockets.popleft().close()

    def _connect(self):
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                sock = self._worker.connect()
                sock.setblocking(False)
                self._sockets.append(sock)
                self.num_connections += 1
            while len(self._sockets) > 2000:
                self._sockets.popleft().close()

    def _trickle(self):
        while not self._stop.wait(0.05):
            for sock in list(self._sockets)[::2]:
                with contextlib.suppress(OSError):
                    sock.send(b"P")


@pytest.mark.parametrize(
    "num_connections", [500, pytest.param(10_000, marks=pytest.mark.nightly)], ids=str
)
def test_flood_of_connections_is_capped_and_disturbs_no_round(
    worker, client, many_descriptors, num_connections
):
    """FAULTS 24: HTTP may refuse requests while it is flooded, a joined worker takes its rounds."""
    before, most, num_answered, num_refused = worker.num_descriptors, 0, 0, 0
    with (
        Publisher(WEIGHTS, hosts=[worker.url], host_token=worker.token) as publisher,
        LiveRounds(publisher) as live,
    ):
        with Flood(worker) as flood:
            while flood.num_connections < num_connections or len(live.seconds) < 10:
                most = max(most, worker.num_descriptors)
                try:
                    client.weight_info()
                    num_answered += 1
                except (PeerError, RemoteError):
                    num_refused += 1
                if live.failures:
                    break
        end = time.monotonic() + 20
        while worker.num_descriptors > before + 8:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert client.weight_info()["worker"] == publisher.hosts[worker.url]
    print(  # noqa: T201 (the numbers are a result)
        f"{flood.num_connections} connections; {len(live.seconds)} rounds, slowest "
        f"{max(live.seconds) * 1e3:.0f} ms; requests: {num_answered} answered, {num_refused} "
        f"refused; at most {most} descriptors, {before} before"
    )
    assert live.failures == []
    # asyncio accepts a queue's worth in each of the few turns before the protocol may refuse.
    assert most < before + MAX_CONNECTIONS + 300


@pytest.mark.parametrize("route", ROUTES[:7])
def test_pickle_bytes_are_refused_and_never_unpickled(worker, client, unpickled, route):
    """FAULTS 25: in the worker's process, too, an audit hook writes down what is unpickled."""
    before = len(unpickled.found())
    body = pickle.dumps({"init_info": {"a": 1}})
    for kind in (b"application/json", b"application/octet-stream", b"application/python-pickle"):
        head = b"\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
        answer, _ = worker.ask(route + head + body)
        # Three of the routes refuse every update.
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 "))
    with worker.connect() as sock:
        sock.sendall(body)
        sock.shutdown(socket.SHUT_WR)
        drained(sock)
    assert client.weight_info()["worker"]
    assert len(unpickled.found()) == before
