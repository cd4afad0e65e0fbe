"""Several replicas behind one address: all of them take part in a round, or it does not begin."""

from __future__ import annotations

import secrets
import socket
import threading
import time

import pytest
import torch

pytest.importorskip("uvicorn")

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route

from wtransfer import Publisher, WorkerSession
from wtransfer.errors import NoWorkersError
from wtransfer.testing.contents import contents


class Server:
    """A serving engine behind HTTP, with vLLM's routes: each replica is an instance of its own.

    Args:
        weights: What its models have, as zeros.
        num_replicas: How many there are.
        says: World size that it tells; None: it has no such route.
    """

    def __init__(self, weights, num_replicas, says):
        self.url = f"unix:@wt-test-{secrets.token_hex(8)}"
        self.replicas = [
            {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            for _ in range(num_replicas)
        ]
        self.late, self.late_s = 0, None
        self.host_ranks = None
        self.sessions = []
        self.left, self.num_shutdowns = [], 0
        self._says = says
        routes = {
            "init_weight_transfer_engine": self._init,
            "start_weight_update": lambda _body: {},
            "finish_weight_update": self._finish,
            "shutdown_weight_transfer_engine": self._shutdown,
        }
        app = Starlette(
            routes=[
                *(
                    Route(f"/{name}", _endpoint(act), methods=["POST"])
                    for name, act in routes.items()
                ),
                *([] if says is None else [Route("/get_world_size", self._size)]),
            ]
        )
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.url[6:]}")
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="host"
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.002)

    async def _size(self, request):
        assert request.query_params["include_dp"] == "true"
        return JSONResponse({"world_size": self._says})

    def _init(self, body):
        invitation = body["init_info"]["wtransfer"]
        if invitation.get("leave"):
            self.left.append(invitation["address"])
            for session in self.sessions:
                session.leave(invitation["address"])
            return {}
        self.invitation = invitation
        for number in range(len(self.sessions), len(self.replicas) - self.late):
            self.bring(number)
        if self.late_s is not None:
            threading.Timer(self.late_s, lambda: self.bring(len(self.sessions))).start()
        return {"message": "as vLLM says it: naming no worker"}

    def bring(self, number):
        """Let a replica join."""
        session = WorkerSession(self.replicas[number], name=f"replica-{number}", commit="copy")
        session.host_ranks = self.host_ranks
        session.join(**self.invitation)
        self.sessions.append(session)
        return session

    def _shutdown(self, _body):
        self.num_shutdowns += 1
        return {}

    def _finish(self, _body):
        applied = [session.commit_pending(5.0) for session in self.sessions]
        assert all(applied)
        return {}

    def close(self):
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()
        for session in self.sessions:
            session.close()


def _endpoint(act):
    async def endpoint(request):
        body = await request.body()
        return JSONResponse(await run_in_threadpool(act, await request.json() if body else {}))

    return endpoint


@pytest.fixture(autouse=True)
def token_around(monkeypatch):
    monkeypatch.setenv("WTRANSFER_TOKEN", "the-secret")


@pytest.fixture
def serve(weights):
    servers = []

    def serve(num_replicas=2, says=2):
        servers.append(Server(weights, num_replicas, says))
        return servers[-1]

    yield serve
    for each in servers:
        each.close()


def until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_every_replica_behind_an_address_is_waited_for_and_updated(serve, weights):
    server = serve()
    server.late, server.late_s = 1, 0.3
    with Publisher(weights, hosts=[server.url], deadline_s=10) as publisher:
        report = publisher.publish("v1")
    assert {each.worker: each.outcome for each in report.workers} == {
        "replica-0": "committed",
        "replica-1": "committed",
    }
    assert [contents(each) for each in server.replicas] == [contents(weights)] * 2


def test_a_replica_that_does_not_come_is_missed_by_address_and_number(serve, weights):
    server = serve()
    server.late = 1
    with pytest.raises(NoWorkersError) as caught:
        Publisher(weights, hosts=[server.url], deadline_s=0.3)
    assert f"{server.url} (1 of 2 ranks) did not join within 0.3 s" in caught.value.message


def test_no_round_begins_without_a_replica_that_was_lost(serve, weights):
    server = serve()
    with Publisher(weights, hosts=[server.url], deadline_s=0.5) as publisher:
        assert publisher.publish("v1").ok
        server.sessions.pop().close()
        until(lambda: len(publisher.workers()) == 1)
        before = [contents(each) for each in server.replicas]
        weights["layer.0"] += 1
        with pytest.raises(NoWorkersError, match=r"\(1 of 2 ranks\): the rest was lost"):
            publisher.publish("v2")
        # Both go on with the same, and the one that comes back is part of the next round.
        assert [contents(each) for each in server.replicas] == before
        server.bring(1)
        assert publisher.publish("v3").ok
    assert [contents(each) for each in server.replicas] == [contents(weights)] * 2


def test_rounds_go_on_without_a_lost_replica_where_the_rules_say_so(serve, weights):
    server = serve()
    with Publisher(weights, hosts=[server.url], deadline_s=0.5, on_lost_worker="drop") as publisher:
        assert publisher.publish("v1").ok
        server.sessions.pop().close()
        until(lambda: len(publisher.workers()) == 1)
        assert [each.worker for each in publisher.publish("v2").workers] == ["replica-0"]


def test_a_server_that_is_gone_as_a_whole_does_not_stop_the_others(serve, weights):
    stays, goes = serve(), serve()
    with Publisher(weights, hosts=[stays.url, goes.url], deadline_s=5) as publisher:
        assert len(publisher.publish("v1").workers) == 4
        while goes.sessions:
            goes.sessions.pop().close()
        until(lambda: len(publisher.workers()) == 2)
        assert len(publisher.publish("v2").workers) == 2


@pytest.mark.parametrize("says", [None, 2])
def test_a_server_of_a_group_of_servers_is_not_asked_for_the_ranks_of_the_others(
    serve, weights, says
):
    # Each says the size of the whole group; its workers know that it leads to one of them only.
    servers = [serve(num_replicas=1, says=says) for _ in range(2)]
    for each in servers:
        each.host_ranks = 1
    with Publisher(weights, hosts=[each.url for each in servers], deadline_s=5) as publisher:
        assert len(publisher.publish("v1").workers) == 2


def test_closed_publisher_is_left_without_a_shutdown_of_the_engine(serve, weights):
    server = serve()
    with Publisher(weights, hosts=[server.url], deadline_s=10) as publisher:
        address = publisher.address
    # A shutdown would leave the publishers of others, too.
    assert (server.left, server.num_shutdowns) == ([address], 0)
