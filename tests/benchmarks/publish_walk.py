"""How far a steady publish walks: files, functions, hops and threads of ours, in both processes.

Run: ``python tests/benchmarks/publish_walk.py``. It publishes 40 tensors through ``shm`` from this
process to a worker in another one. The fifth round is traced with ``threading.setprofile``, from
the call of ``publish`` to its return; a hop is a call from one file of ours to another.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import torch

from wtransfer import Publisher, WorkerSession

NUM_TENSORS = 40
NUM_WARM_ROUNDS = 4
TOKEN = secrets.token_hex(16)
ROOT = "/wtransfer/"


class Walk:
    """What was called while it was on, on whichever thread."""

    def __init__(self) -> None:
        self.on = False
        self._calls: Counter[tuple[str, str]] = Counter()
        self._hops: Counter[tuple[str, str]] = Counter()
        self._threads: set[str] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame, event, _arg):
        if event != "call" or not self.on or (file := _ours(frame)) is None:
            return
        self._calls[file, frame.f_code.co_qualname] += 1
        self._threads.add(threading.current_thread().name)
        caller = frame.f_back
        while caller is not None and _ours(caller) is None:
            caller = caller.f_back
        if caller is not None and (before := _ours(caller)) != file:
            self._hops[before, file] += 1

    def found(self):
        """Return what was walked through, as plain data."""
        named = [(file, name) for file, name in self._calls if not name.endswith(">")]
        return {
            "files": sorted({file for file, _ in self._calls}),
            "functions": sorted(f"{file}::{name}" for file, name in named),
            "calls": sum(self._calls.values()),
            "hops": sum(self._hops.values()),
            "threads": sorted(self._threads - {"MainThread"}),
        }


def _ours(frame) -> str | None:
    name = frame.f_code.co_filename
    return name.rpartition(ROOT)[2] if ROOT in name and "/tests/" not in name else None


def tensors() -> dict[str, torch.Tensor]:
    """Return the weights: large and small ones."""
    sizes = [64 << 10 if number % 4 else 1 << 10 for number in range(NUM_TENSORS)]
    return {f"layer.{n}.weight": torch.ones(size) for n, size in enumerate(sizes)}


def serve(address: str, token: str) -> None:
    """Commit what comes; a line ``on`` begins the walk, any other ends it and prints it."""
    walk, model = Walk(), {name: torch.zeros_like(each) for name, each in tensors().items()}
    with WorkerSession(model, join=address, token=token) as session:
        over = threading.Event()

        def listen() -> None:
            for line in sys.stdin:
                walk.on = line.strip() == "on"
                sys.stdout.write("on\n" if walk.on else json.dumps(walk.found()) + "\n")
                sys.stdout.flush()
            over.set()

        threading.Thread(target=listen, name="MainThread", daemon=True).start()
        while not over.is_set():
            session.commit_pending(0.5)


def walk_once() -> dict[str, dict]:
    """Return the walk of one round, of both sides."""
    walk, weights = Walk(), tensors()
    with Publisher(weights, token=TOKEN) as publisher:
        worker = subprocess.Popen(
            [sys.executable, __file__, "--worker", publisher.address, TOKEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def tell(line: str) -> str:
            worker.stdin.write(f"{line}\n")
            worker.stdin.flush()
            return worker.stdout.readline()

        publisher.wait_for_workers(1, 60)
        for number in range(NUM_WARM_ROUNDS):
            assert publisher.publish(f"warm-{number}").ok
        tell("on")
        walk.on = True
        report = publisher.publish("traced")
        walk.on = False
        assert report.ok
        sides = {"trainer": walk.found(), "worker": json.loads(tell("off"))}
        worker.stdin.close()
        worker.wait(10)
        worker.stdout.close()
    return sides


def main() -> None:
    """Print the table, or with ``--json`` everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write files, functions and threads to this file")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(*arguments.worker)
        return
    sides = walk_once()
    trainer, worker = sides["trainer"], sides["worker"]
    sides["together"] = {
        "files": sorted({*trainer["files"], *worker["files"]}),
        "functions": sorted({*trainer["functions"], *worker["functions"]}),
        "calls": trainer["calls"] + worker["calls"],
        "hops": trainer["hops"] + worker["hops"],
        "threads": [*trainer["threads"], *worker["threads"]],
    }
    sys.stdout.write(f"{'':10}{'files':>8}{'functions':>11}{'calls':>8}{'hops':>8}{'threads':>9}\n")
    for side, found in sides.items():
        numbers = (found[each] for each in ("files", "functions", "calls", "hops", "threads"))
        files, functions, calls, hops, threads = (
            each if isinstance(each, int) else len(each) for each in numbers
        )
        sys.stdout.write(f"{side:10}{files:8}{functions:11}{calls:8}{hops:8}{threads:9}\n")
    for side in ("trainer", "worker"):
        sys.stdout.write(f"threads of the {side}: {', '.join(sides[side]['threads'])}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(sides, indent=1), "utf-8")


if __name__ == "__main__":
    main()
