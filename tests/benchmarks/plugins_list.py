"""How long ``wtransfer plugins list`` takes beside a bare interpreter, with many distributions.

Run: ``python tests/benchmarks/plugins_list.py``. It lists 300 distributions, 50 of which are
plug-ins, beside what is installed; the goal is three times a bare interpreter that imports
``importlib.metadata``. Both are started in turns, and the shortest time of each counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_DISTRIBUTIONS = 300
NUM_PLUGINS = 50
NUM_RUNS = 10
GOAL = 3.0
WORDS = ("engines", "connectors", "specs")


def install(site):
    for number in range(NUM_DISTRIBUTIONS):
        info = site / f"one_{number}-1.0.dist-info"
        info.mkdir()
        text = "A line of a description.\n" * 100
        header = f"Metadata-Version: 2.1\nName: one-{number}\nVersion: 1.0\n\n{text}"
        (info / "METADATA").write_text(header)
        entry, group = f"one-{number} = one_{number}:Backend", WORDS[number % len(WORDS)]
        if number >= NUM_PLUGINS:
            entry, group = f"one-{number} = one_{number}:main", "console_scripts"
        else:
            group = f"wtransfer.{group}"
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")


def took_s(environ, *arguments):
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environ, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main():
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        environ = {**os.environ, "PYTHONPATH": folder}
        bare, listing = [], []
        for _ in range(NUM_RUNS):
            bare.append(took_s(environ, "-c", "import importlib.metadata"))
            listing.append(took_s(environ, "-m", "wtransfer", "plugins", "list"))
    ratio = min(listing) / min(bare)
    sys.stdout.write(
        f"bare {min(bare) * 1e3:.0f} ms, list {min(listing) * 1e3:.0f} ms: {ratio:.1f} x\n"
    )
    sys.stdout.write(f"goal {GOAL:g} x: {'met' if ratio <= GOAL else 'missed'}\n")


if __name__ == "__main__":
    main()
