"""Ranks in processes of their own, as tests see them; their side is in `process_group_jobs`."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import time
from pathlib import Path

PATIENCE_S = 20.0
STOPPED = "T"


class OrderFailedError(Exception):
    """A rank raised."""

    def __init__(self, name, kind, text):
        super().__init__(f"{name}: {kind}: {text}")
        self.kind = kind
        self.text = text


class Answer:
    """What an order will come to.

    Args:
        rank: Who was told.
        number: Of the order.
    """

    def __init__(self, rank, number):
        self._rank = rank
        self._number = number
        self.begun = None
        self.ended = None

    def result(self, timeout_s=PATIENCE_S):
        """Wait, and return or raise; then `begun` and `ended` say when, in monotonic time."""
        reply = self._rank.reply(self._number, timeout_s)
        self.begun, self.ended = reply["begun"], reply["ended"]
        if "error" in reply:
            raise OrderFailedError(self._rank.name, *reply["error"])
        return reply["value"]

    def error(self, timeout_s=PATIENCE_S):
        """Wait for an order that has to fail."""
        try:
            value = self.result(timeout_s)
        except OrderFailedError as error:
            return error
        raise AssertionError(f"{self._rank.name} did not fail but returned {value!r}")


class Rank:
    """One process.

    Args:
        name: For error messages, and its socket's.
        folder: Where its socket is; a path reaches into other network namespaces.
        start: Starts the process, which shall serve at the path that is given; returns something
            with a `pid`.
        patience_s: How long the process may take to start.
    """

    def __init__(self, name, folder, start, patience_s=PATIENCE_S):
        self.name = name
        self._numbers = itertools.count()
        self._replies = {}
        path = Path(folder) / f"{name}.socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(patience_s)
            self.process = start(str(path))
            self.pid = self.process.pid
            self._socket, _ = listener.accept()

    def begin(self, order, **options):
        """Give an order; its answer is fetched later."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "order": order, "options": options}).encode())
        return Answer(self, number)

    def ask(self, order, *, within_s=PATIENCE_S, **options):
        """Give an order and wait for what comes of it."""
        return self.begin(order, **options).result(within_s)

    def reply(self, number, timeout_s):
        end = time.monotonic() + timeout_s
        while number not in self._replies:
            self._socket.settimeout(max(0.001, end - time.monotonic()))
            datagram = self._socket.recv(1 << 16)
            assert datagram, f"{self.name} has ended"
            reply = json.loads(datagram)
            self._replies[reply["id"]] = reply
        return self._replies.pop(number)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def stop(self):
        """Stop it, and wait until all its threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        end = time.monotonic() + PATIENCE_S
        while {STOPPED} != self._states():
            assert time.monotonic() < end, f"{self.name} does not stop"
            time.sleep(0.002)

    def go_on(self):
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self):
        """Let it end: its other end of the socket is closed. A stopped one has to be killed."""
        self._socket.close()

    def _states(self):
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return {(task / "stat").read_text().rpartition(")")[2][1] for task in tasks}


def form(ranks, group, *, hosts=None, root=0, **options):
    """Let ranks form a group, the one at `root` hosting the rendezvous; return what it told.

    Args:
        ranks: In the order of their ranks.
        group: Name that later orders use.
        hosts: Address of each; None: loopback.
        root: Who hosts.
        **options: Of the order `form`.
    """
    hosts = hosts or ["127.0.0.1"] * len(ranks)
    meeting = ranks[root].ask("host", host=hosts[root])
    for number, rank in enumerate(ranks):
        if number != root:
            rank.ask("join", **meeting)
    answers = [
        rank.begin(
            "form",
            group=group,
            name=meeting["name"],
            rank=number,
            size=len(ranks),
            host=hosts[number],
            **options,
        )
        for number, rank in enumerate(ranks)
    ]
    for answer in answers:
        answer.result()
    for rank in ranks:
        # The group has its own hold on the store.
        rank.ask("leave", name=meeting["name"])
    return meeting
