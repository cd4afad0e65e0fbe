"""Ends of control channels for tests: recorded callbacks, raw sockets, real processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from wtransfer.transport.address import parse_address
from wtransfer.transport.channel import Dialer, Listener
from wtransfer.transport.framing import FrameReader
from wtransfer.transport.handshake import HANDSHAKE, WorkerHandshake

PATIENCE_S = 10.0
PEER_SCRIPT = Path(__file__).with_name("channel_peer.py")


@pytest.fixture(scope="session")
def messages():
    """The module that defines the messages of these tests: Note, Word, CODEC."""
    spec = importlib.util.spec_from_file_location("channel_peer", PEER_SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder:
    """Callbacks that keep what they were called with."""

    def __init__(self):
        self.opened = queue.Queue()
        self.received = queue.Queue()
        self.closed = queue.Queue()
        self.refused = queue.Queue()

    def callbacks(self):
        return {
            "on_open": self.opened.put,
            "on_message": lambda connection, message: self.received.put((connection, message)),
            "on_close": lambda connection, error: self.closed.put((connection, error)),
            "on_refused": self.refused.put,
        }

    def connection(self):
        return self.opened.get(timeout=PATIENCE_S)

    def message(self):
        return self.received.get(timeout=PATIENCE_S)[1]

    def close_error(self):
        return self.closed.get(timeout=PATIENCE_S)[1]

    def refusal(self):
        return self.refused.get(timeout=PATIENCE_S)


@pytest.fixture
def recorder():
    return Recorder


@pytest.fixture
def channel(messages, leaves_nothing):
    """Makers of listeners and dialers that are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def listen(recorder=None, **options):
            recorder = recorder or Recorder()
            listener = Listener(messages.CODEC, **recorder.callbacks() | options)
            stack.callback(listener.close)
            return listener, recorder

        def dial(listener=None, recorder=None, **options):
            recorder = recorder or Recorder()
            if listener is not None:
                options = {"address": listener.address, "token": listener.token} | options
            dialer = Dialer(messages.CODEC, **recorder.callbacks() | options)
            stack.callback(dialer.close)
            return dialer, recorder

        def pair(**options):
            listener, trainer = listen(**options)
            dialer, worker = dial(listener)
            return SimpleNamespace(
                listener=listener,
                dialer=dialer,
                trainer=trainer,
                worker=worker,
                to_worker=trainer.connection(),
                to_trainer=worker.connection(),
            )

        yield SimpleNamespace(listen=listen, dial=dial, pair=pair)


class RawPeer:
    """A blocking socket that does exactly what a test tells it."""

    def __init__(self, address):
        where = parse_address(address)
        self.socket = socket.socket(where.family)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(where.target)

    def send(self, data):
        # The other side may have had enough already; what it says is what a test looks at.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def until_closed(self):
        """Wait until the other side has closed."""
        with contextlib.suppress(ConnectionResetError):
            while self.socket.recv(65536):
                pass

    def shake_hands(self, token):
        handshake, reader = WorkerHandshake(token), FrameReader(HANDSHAKE)
        while not handshake.complete:
            for message in reader.feed(self.socket.recv(1024)):
                answer = handshake.receive(message)
                if answer is not None:
                    self.send(HANDSHAKE.encode(answer))
        return self


@pytest.fixture
def raw_peer(leaves_nothing):
    """Maker of raw peers that are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(address):
            peer = RawPeer(address)
            stack.callback(peer.socket.close)
            return peer

        yield make


class PeerProcess:
    """A process that runs `channel_peer.py`."""

    def __init__(self, *arguments, token):
        self.process = subprocess.Popen(
            [sys.executable, str(PEER_SCRIPT), *arguments],
            env={**os.environ, "WTRANSFER_TOKEN": token},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def line(self):
        return self.process.stdout.readline().split()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def peer_process():
    """Maker of peers in processes of their own, which are killed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(*arguments, token):
            peer = PeerProcess(*arguments, token=token)
            stack.callback(peer.end)
            return peer

        yield make
