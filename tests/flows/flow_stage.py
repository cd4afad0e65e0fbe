"""What trainer and worker processes of these tests share: witness, orders, weights, engine.

The witness is a file of a few bytes that the process writes and the test maps. It outlives a
SIGKILL, so it says in which phase a process died.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import sys
import threading
import time
import traceback
import unittest.mock

import torch

from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.engines.gloo import GlooWeightTransferEngine
from wtransfer.engines.shm import ShmWeightTransferEngine
from wtransfer.transport import channel
from wtransfer.transport.handshake import shake_hands

PHASES = (
    *("idle", "init", "plan", "transfer", "midst", "prepare", "vote", "commit", "between"),
    "attach",
)
ENGINES = {"shm": "witnessed", "gloo": "witnessed-gloo"}
MAX_DATAGRAM = 1 << 17
WITNESS_NBYTES = 8
_PHASE, _HOLD, _HELD = range(3)


class Witness:
    """The bytes: present phase, phase to hold at, whether it is held there."""

    def __init__(self, path):
        with open(path, "r+b") as file:  # noqa: PTH123 - mapped below
            self._bytes = mmap.mmap(file.fileno(), WITNESS_NBYTES)
        self.pace_s = 0.0

    @property
    def phase(self):
        return PHASES[self._bytes[_PHASE]]

    @property
    def held(self):
        return bool(self._bytes[_HELD])

    def hold(self, phase):
        """Let the process stop where it next enters `phase`; "idle" lets it go on."""
        self._bytes[_HOLD] = PHASES.index(phase)

    def note(self, phase):
        """Say in which phase this process is."""
        self._bytes[_PHASE] = PHASES.index(phase)

    def enter(self, phase):
        """Note a phase, and stay in it for as long as the test wants that."""
        self.note(phase)
        number = PHASES.index(phase)
        time.sleep(self.pace_s if number else 0.0)
        while number and self._bytes[_HOLD] == number:
            self._bytes[_HELD] = 1
            time.sleep(0.001)
        self._bytes[_HELD] = 0


witness: Witness | None = None


class Witnessed:
    """An engine that says how far it has come."""

    def init_transfer_engine(self, init_info):
        witness.enter("init")
        super().init_transfer_engine(init_info)
        witness.enter("idle")

    def start_weight_update(self):
        witness.enter("plan")
        super().start_weight_update()

    def receive_weights(self, update_info, load_weights):
        witness.enter("transfer")
        super().receive_weights(update_info, load_weights)

    def finish_weight_update(self):
        witness.enter("prepare")
        super().finish_weight_update()


class WitnessedShm(Witnessed, ShmWeightTransferEngine):
    """The shm engine, which can be held where it has connected to attach a segment."""

    def receive_weights(self, update_info, load_weights):
        with unittest.mock.patch.object(channel, "shake_hands", self._shake_hands):
            super().receive_weights(update_info, load_weights)

    @staticmethod
    def _shake_hands(*args):
        witness.enter("attach")
        witness.note("transfer")
        return shake_hands(*args)


class WitnessedGloo(Witnessed, GlooWeightTransferEngine):
    """The gloo engine, which can be held where a part of a broadcast has arrived."""

    def receive_weights(self, update_info, load_weights):
        num_buckets = 0

        def load_and_tell(weights):
            nonlocal num_buckets
            load_weights(weights)
            num_buckets += bool(weights)
            if num_buckets == 2:
                witness.enter("midst")
                num_buckets += 1

        super().receive_weights(update_info, load_and_tell)


class Weights(torch.nn.Module):
    """Tensors that are all filled with what follows from one number, the version's."""

    def __init__(self, num_tensors, numel):
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.empty(numel) for _ in range(num_tensors))
        self.fill(0)

    def fill(self, number):
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                layer.fill_(number + index / 256)  # exact in float32

    def numbers(self):
        """Return the number that each tensor follows from; None where its elements differ."""
        found = []
        for index, layer in enumerate(self.layers):
            first = layer.detach().view(-1)[0]
            found.append(float(first) - index / 256 if bool((layer == first).all()) else None)
        return found


class Puppet:
    """A process that does what the test says, one order after the other."""

    def __init__(self, address, witness_path, pace_s=0.0):
        global witness  # noqa: PLW0603 - one process, one witness; engines are made by name
        self.witness = witness = Witness(witness_path)
        witness.pace_s = pace_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)
        self._ended = False

    def serve(self):
        """Obey until told to end, or until the test is gone."""
        while not self._ended:
            readable, _, _ = select.select([self._socket], [], [], self.patience_s())
            if not readable:
                self.live()
                continue
            datagram = self._socket.recv(MAX_DATAGRAM)
            if not datagram:
                return
            self._answer(**json.loads(datagram))

    def patience_s(self):
        """Return how long to wait for an order before `live`; None: for ever."""
        return

    def live(self):
        """Do what the process does by itself between two orders."""

    def _answer(self, order, options):
        begun = time.monotonic()
        try:
            reply = {"value": getattr(self, order)(**options)}
        except BaseException as error:
            traceback.print_exc()
            reply = {"error": describe(error)}
        reply["begun"], reply["ended"] = begun, time.monotonic()
        self._socket.send(json.dumps(reply).encode())

    def threads(self):
        """Order: return the names of the threads."""
        return sorted(thread.name for thread in threading.enumerate())

    def end(self):
        """Order: leave in good order."""
        self.close()
        self._ended = True


def describe(error):
    """Return an error as plain data."""
    facts = ("worker", "round_id", "version", "phase", "piece", "plugin", "seconds", "restored")
    return {
        "classes": [cls.__name__ for cls in type(error).__mro__],
        "text": str(error),
        **{name: getattr(error, name, None) for name in facts},
    }


def linger():
    """Fork a child that does nothing but live on, as a data loader's would; return its pid."""
    pid = os.fork()
    if pid == 0:
        sys.stdin = None
        while True:
            time.sleep(60)
    return pid


def in_fork(call):
    """Return what `call` does in a forked child: the error, "hangs", or its value."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = repr(call())
        except BaseException as error:
            answer = type(error).__name__
        os.write(write, answer.encode()[:1000])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as answers:  # noqa: PTH123 - a descriptor
        if not select.select([answers], [], [], 5.0)[0]:
            os.kill(pid, 9)
        answer = answers.read().decode() or "hangs"
    os.waitpid(pid, 0)
    return answer


def register():
    """Make the witnessed engines known to this process."""
    WeightTransferEngineFactory.register_engine(ENGINES["shm"], WitnessedShm)
    WeightTransferEngineFactory.register_engine(ENGINES["gloo"], WitnessedGloo)
