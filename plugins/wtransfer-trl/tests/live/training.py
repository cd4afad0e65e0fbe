"""The scripts of the guide, run by tests."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

from server import environment

BESIDE = Path(__file__).with_name("beside.py")


class Training:
    """A script that trains, in a process of its own.

    Args:
        folder: Where it runs.
        script: Its text.
        arguments: Its arguments.
        env: Further environment.
        beside: What `beside.py` does meanwhile.
    """

    def __init__(self, folder, script, arguments, env, beside):
        path = folder / "train.py"
        path.write_text(script, "utf-8")
        command = [str(path), *arguments]
        if beside:
            command = [str(BESIDE), json.dumps(beside), *command]
        self.log = folder / "train.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env=environment() | env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def wait_for(self, line):
        for each in self.process.stdout:
            if each == f"{line}\n":
                return
        raise AssertionError(self.log.read_text()[-3000:])

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, *, status=0):
        """Return what it has told since, and what it has logged."""
        told, _ = self.process.communicate(timeout=300)
        logged = self.log.read_text()
        assert self.process.returncode == status, logged[-3000:]
        return told, logged


def rows_of(told):
    found = re.findall(r"^step (\d+) reward (\S+) version (\d+) stale (\d+)$", told, re.MULTILINE)
    return [(int(step), float(reward), int(v), int(stale)) for step, reward, v, stale in found]


def check_that_rewards_rise(told):
    """Check a training of 12 steps: the mean of the last 4 rewards is above that of the first."""
    rewards = [reward for _, reward, _, _ in rows_of(told)]
    assert len(rewards) == 12
    assert statistics.mean(rewards[-4:]) > statistics.mean(rewards[:4])


def versions_of(told):
    return [(step, version, stale) for step, _, version, stale in rows_of(told)]
