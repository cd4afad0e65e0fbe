"""Measure what a connector gives and costs in a live vLLM, in one run: compare ratios only.

    ENV/bin/python plugins/wtransfer-vllm/tests/benchmarks/bench_kv.py [--layers 8 --hidden 512]

Printed: the time to first token where the prefix is loaded and where it is computed; the time of a
step without hits, without a connector and with each; and the pause of a commit beside a running
request. Rounds alternate between the engines, so that a busy machine slows all of them.
"""

# ruff: noqa: E402, T201  # a script beside the tests, whose numbers are its output
from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "live")]

import tiny_models
import wtransfer
from engines import publish
from kv import OFFLOADING, STORAGE, forget_prefixes, start

NUM_TOKENS = 448
"""Tokens of a prompt: 14 blocks of 32."""
ENGINES = {
    "no connector": None,
    "OffloadingConnector": OFFLOADING,
    "SharedStorageConnector": STORAGE,
}


def prompt(number):
    return f"Prompt number {number:6}. " + "All of it is alike, but for its number. " * 11


def median_ms(seconds):
    return f"{statistics.median(seconds) * 1e3:8.2f} ms"


def time_first_tokens(engines, rounds):
    """Print the time to first token, of prompts that are new and of the same ones again."""
    times = {(name, how): [] for name in engines for how in ("computed", "loaded")}
    for number in range(rounds):
        for name, engine in engines.items():
            for how in ("computed", "loaded") if ENGINES[name] else ("computed",):
                times[name, how].append(engine.do("time_first_token", prompt(number)[:NUM_TOKENS]))
                forget_prefixes(engine)
    for (name, how), seconds in times.items():
        if seconds:
            print(f"time to first token, {how:8} {median_ms(seconds)}   {name}")


def time_steps(engines, rounds):
    """Print the time of a step of 16 running requests that find nothing."""
    times = {name: [] for name in engines}
    for number in range(rounds):
        for name, engine in engines.items():
            times[name] += engine.do("time_steps", 16, 40, f"round {number}")
    plain = statistics.median(times["no connector"])
    for name, seconds in times.items():
        ratio = statistics.median(seconds) / plain
        print(f"a step without hits           {median_ms(seconds)}   {name} (x {ratio:.3f})")


def time_commit(folder, model, weights):
    """Print the longest gap between two tokens of a running request around a commit."""
    options = {"weight_transfer_config": {"backend": "shm"}}
    engine = start(folder, model, OFFLOADING, **options)
    with wtransfer.Publisher(weights) as publisher:
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        engine.do("begin", "running", "tell me a long story", 400)
        engine.do("step", 20)  # its prompt, and what is made once
        normal = engine.do("step", 280)["longest_s"]
        report = publish(publisher, engine, "b")
        gap = engine.do("step", 3)["longest_s"]
    seconds = report.workers[0].seconds["commit"]
    print(f"commit: reload                {median_ms([seconds])}")
    print(f"commit: step after it         {median_ms([gap])}   (300 tokens computed anew)")
    print(f"longest step before it        {median_ms([normal])}")
    engine.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shape = {"layers": settings.layers, "hidden": settings.hidden}
        tiny_models.make(root / "A", 1, **shape)
        weights = tiny_models.weights(2, **shape)
        engines = {name: start(root, root / "A", kind) for name, kind in ENGINES.items()}
        try:
            time_first_tokens(engines, settings.rounds)
            time_steps(engines, settings.rounds)
        finally:
            for engine in engines.values():
                engine.close()
        time_commit(root, root / "A", weights)


if __name__ == "__main__":
    main()
