"""``wtransfer worker`` processes, seen from outside."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

READY = re.compile(r"^ready: (\S+) ", re.MULTILINE)
PATIENCE_S = 30.0
WEIGHTS = {f"layer.{i}": torch.full((64, 64), float(i)) for i in range(8)}


class WorkerProcess:
    """One worker, forked from a zygote: it runs the command that users run.

    Where an engine is installed, if `site` is that folder.
    """

    def __init__(self, zygote, folder, *more, listen="tcp:127.0.0.1:0", token=None, site=None):
        self.token = token or secrets.token_hex(16)
        self.log = folder / f"worker-{secrets.token_hex(4)}.log"
        checkpoint, token_file = folder / "checkpoint", folder / "token"
        if not checkpoint.exists():
            checkpoint.mkdir()
            save_file(WEIGHTS, checkpoint / "model.safetensors")
        token_file.touch(mode=0o600)
        token_file.write_text(self.token)
        arguments = ["--checkpoint", str(checkpoint), "--listen", listen, *more]
        self.child = zygote.spawn(
            "programs:command",
            ["worker", "--token-file", str(token_file), *arguments],
            None if site is None else str(site),
            stdout=self.log,
            stderr=self.log,
        )
        self.url = None

    @property
    def output(self):
        return self.log.read_text() if self.log.exists() else ""

    def until_ready(self):
        end = time.monotonic() + PATIENCE_S
        while (found := READY.search(self.output)) is None:
            assert self.child.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.005)
        self.url = found[1]
        return self

    def until_it_says(self, text):
        end = time.monotonic() + PATIENCE_S
        while text not in self.output:
            assert time.monotonic() < end, self.output
            time.sleep(0.005)

    @property
    def family(self):
        return socket.AF_INET if self.url.startswith("http:") else socket.AF_UNIX

    @property
    def target(self):
        if self.family == socket.AF_UNIX:
            return self.url.removeprefix("unix:").replace("@", "\0", 1)
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def connect(self):
        sock = socket.socket(self.family)
        try:
            sock.settimeout(10)
            sock.connect(self.target)
        except BaseException:
            sock.close()
            raise
        return sock

    def ask(self, request, *, authorized=True):
        """Send a request's bytes; return all that comes until the end, and the seconds."""
        line, _, rest = request.partition(b"\r\n")
        proof = f"Authorization: Bearer {self.token}\r\n".encode() if authorized else b""
        head = line + b" HTTP/1.1\r\nHost: w\r\nConnection: close\r\n" + proof
        begin = time.monotonic()
        with self.connect() as sock:
            with contextlib.suppress(OSError):
                sock.sendall(head + rest)
            return drained(sock), time.monotonic() - begin

    @property
    def num_descriptors(self):
        return len(list(Path(f"/proc/{self.child.pid}/fd").iterdir()))

    def end(self):
        """End it by SIGTERM; return its code and the seconds that took."""
        begin = time.monotonic()
        if self.child.poll() is None:
            os.kill(self.child.pid, signal.SIGTERM)
        return self.child.wait(10.0), time.monotonic() - begin


def drained(sock):
    received = b""
    with contextlib.suppress(OSError):
        while chunk := sock.recv(65536):
            received += chunk
    return received
