"""A worker behind HTTP, and the thread that owns its model."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading

import httpx

from wtransfer import WorkerServer, WorkerSession
from wtransfer.errors import CommitError
from wtransfer.weight_sync.http.client import HttpClient
from wtransfer.weight_sync.worker.target import as_target


class HttpWorker:
    """Serves a session, by default at an abstract Unix address, and steps its model."""

    def __init__(
        self, tensors, *, token, name="w0", address=None, target=None, steps=True, **options
    ):
        self.tensors = tensors
        self.target = as_target(target or tensors, "copy")
        self.session = WorkerSession(self.target, name=name, token=token or "own", deadline_s=5)
        self.num_joined = self.num_left = 0
        join, leave = self.session.join, self.session.leave

        def count_join(*args, **kwargs):
            self.num_joined += 1
            join(*args, **kwargs)

        def count_leave(*args):
            self.num_left += 1
            leave(*args)

        self.session.join, self.session.leave = count_join, count_leave
        listen = address or f"unix:@wt-test-{secrets.token_hex(8)}"
        self.server = WorkerServer(self.session, listen=listen, token=token, **options)
        self.address = self.server.url
        self.client = HttpClient(self.address, self.server.token)
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self.step, name="model")
        if steps:
            self._thread.start()

    def step(self):
        while not self.stopping.is_set():
            with contextlib.suppress(CommitError):
                self.session.commit_pending(0.01)

    def http(self, **options):
        """Return an httpx client without credentials."""
        socket_name = "\0" + self.server.address.removeprefix("unix:@")
        transport = httpx.HTTPTransport(uds=socket_name, verify=False)
        return httpx.Client(transport=transport, base_url="http://worker", **options)

    def raw(self):
        """Return a connection."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect("\0" + self.server.address.removeprefix("unix:@"))
        return sock

    def close(self):
        self.stopping.set()
        if self._thread.is_alive():
            self._thread.join(5)
        self.server.close()
        self.session.close()
        # The wrappers make a circle.
        vars(self.session).pop("join", None)
        vars(self.session).pop("leave", None)


def push(arguments, token):
    """Run ``wtransfer push`` in a child."""
    os.environ["WTRANSFER_TOKEN"] = token
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from wtransfer.cli import main

    main(["push", *arguments])
