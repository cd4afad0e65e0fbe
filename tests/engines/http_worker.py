"""A small worker behind HTTP: the routes that publishers use, and a model that takes steps."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route

from wtransfer.errors import CommitError, WTransferError, to_wire
from wtransfer.weight_sync.http.clients import InProcessClient
from wtransfer.weight_sync.worker.session import WorkerSession


class HttpWorker:
    """Serves a session at an abstract Unix address, and steps its model."""

    def __init__(self, tensors, *, token, name="w0", address=None, steps=True):
        self.tensors = tensors
        self.address = address or f"unix:@wt-test-{secrets.token_hex(8)}"
        self.session = WorkerSession(tensors, name=name, token=token, commit="copy", deadline_s=5)
        self.invitations, self.num_left = [], 0
        self._token = token
        self._client = InProcessClient(self.session)
        routes = {"init": self._init, "shutdown": self._shutdown}
        app = Starlette(
            routes=[
                Route(f"/{name}_weight_transfer_engine", route, methods=["POST"])
                for name, route in routes.items()
            ]
        )
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.address[6:]}")
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        serve = {"target": self._server.run, "kwargs": {"sockets": [self._socket]}}
        self.stopping = threading.Event()
        self._threads = [threading.Thread(**serve, name="host")]
        if steps:
            self._threads.append(threading.Thread(target=self.step, name="model"))
        for each in self._threads:
            each.start()
        while not self._server.started:
            time.sleep(0.002)

    def step(self):
        while not self.stopping.is_set():
            with contextlib.suppress(CommitError):
                self.session.commit_pending(0.01)

    async def _init(self, request):
        return await self._answer(request, self._join)

    async def _shutdown(self, request):
        return await self._answer(request, self._leave)

    def _join(self, body):
        self.invitations.append(body["init_info"])
        return self._client.init_weight_transfer_engine(body["init_info"])

    def _leave(self, body):
        self._client.leave(body["address"])
        self.num_left += 1
        return {}

    async def _answer(self, request, act):
        if request.headers.get("authorization") != f"Bearer {self._token}":
            return JSONResponse({"error": {"message": "no"}}, 401)
        try:
            return JSONResponse(await run_in_threadpool(act, await request.json()))
        except WTransferError as error:
            kind, message, facts = to_wire(error)
            document = {"type": kind, "message": message, **facts}
            return JSONResponse({"error": document}, 400)

    def close(self):
        self.stopping.set()
        self._server.should_exit = True
        for each in self._threads:
            each.join(5)
        self.session.close()
        self._socket.close()


def push(arguments, token):
    """Run ``wtransfer push`` in a child."""
    import os

    os.environ["WTRANSFER_TOKEN"] = token
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from wtransfer.cli import main

    main(["push", *arguments])
