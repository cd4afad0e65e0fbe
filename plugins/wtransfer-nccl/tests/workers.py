"""Worker processes, and what they say."""

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

SCRIPT = Path(__file__).parent / "worker_process.py"
PATIENCE_S = 90.0


def await_workers(publisher, num):
    """Wait until the publisher knows so many, and no more."""
    end = time.monotonic() + PATIENCE_S
    while len(publisher.workers()) != num:
        assert time.monotonic() < end, f"{publisher.workers()}, expected {num}"
        time.sleep(0.01)


class WorkerProcess:
    """One of them; its output is read as it comes."""

    def __init__(self, publisher, name, device="cpu", **environment):
        self.name = name
        self._lines = queue.Queue()
        environment = {**os.environ, "WTRANSFER_TOKEN": publisher.token, **environment}
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), publisher.address, name, device],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self.next_line() == ["joined"]

    def next_line(self):
        """Return the words of the next line; none if the process has ended."""
        return self._lines.get(timeout=PATIENCE_S).split()

    def kill(self):
        self._process.kill()
        self.close()

    def close(self):
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._reader.join()
        self._process.stdout.close()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")
