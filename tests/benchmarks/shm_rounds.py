"""Measure rounds through shared memory: one worker process, large tensors and many small ones.

Run by hand: ``python tests/benchmarks/shm_rounds.py [GiB] [--only large|small]``. A ratio of 1
means that a round costs as much as two plain copies of its bytes.
"""

# ruff: noqa: T201 - numbers on stdout are the result

from __future__ import annotations

import argparse
import ctypes
import os
import select
import statistics
import subprocess
import sys
import time

import torch

from wtransfer.engines.publisher import Publisher
from wtransfer.engines.session import WorkerSession

GIB = 1 << 30
NUM_ROUNDS = 6
HIDDEN, MLP, VOCABULARY = 4096, 14336, 128256
SMALL = {"number": 20_000, "nbytes": 4096}

_WORKER = "from runpy import run_path; import sys; run_path(sys.argv[1])['serve'](*sys.argv[2:])"


def llama(nbytes):
    """Return tensors with the shapes of a Llama, as many layers as fit, in bfloat16."""
    shapes = {"embed": (VOCABULARY // 8, HIDDEN)}
    layer = {
        "q": (HIDDEN, HIDDEN),
        "k": (HIDDEN // 4, HIDDEN),
        "v": (HIDDEN // 4, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate": (MLP, HIDDEN),
        "up": (MLP, HIDDEN),
        "down": (HIDDEN, MLP),
        "norm": (HIDDEN,),
    }
    number = 0
    while 2 * sum(torch.Size(shape).numel() for shape in shapes.values()) < nbytes:
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        number += 1
    return {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def small(number, nbytes):
    """Return many small tensors."""
    return {f"t{index}": torch.ones(nbytes // 2, dtype=torch.bfloat16) for index in range(number)}


def one_big(number, nbytes):
    """Return the same bytes in one tensor."""
    return {"t": torch.ones(number * nbytes // 2, dtype=torch.bfloat16)}


SETS = {"llama": llama, "small": small, "one": one_big}


def build(kind, arguments):
    """Return the tensors that a command line names."""
    return SETS[kind](*map(int, arguments.split(",")))


def serve(kind, arguments, commit, address):
    """Be the worker, until standard input ends."""
    tensors = build(kind, arguments)
    with WorkerSession(tensors, join=address, commit=commit) as session:
        while not _stdin_ended():
            session.commit_pending(0.2)


def _stdin_ended():
    return bool(select.select([sys.stdin], [], [], 0)[0])


def copy_seconds(nbytes):
    """Return the least time of a plain copy between two buffers that have been touched."""
    source, target = bytearray(nbytes), bytearray(nbytes)
    kept = [(ctypes.c_char * nbytes).from_buffer(each) for each in (source, target)]
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        ctypes.memmove(kept[1], kept[0], nbytes)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def rounds(kind, arguments, commit):
    """Return size and seconds by stage of every round after the first two, which touch memory."""
    tensors = build(kind, arguments)
    with Publisher(tensors) as publisher:
        worker = subprocess.Popen(
            [sys.executable, "-c", _WORKER, __file__, kind, arguments, commit, publisher.address],
            stdin=subprocess.PIPE,
            env={**os.environ, "WTRANSFER_TOKEN": publisher.token},
        )
        try:
            publisher.wait_for_workers(1, 120)
            reports = [publisher.publish(f"v{number}") for number in range(NUM_ROUNDS)]
        finally:
            worker.stdin.close()
            worker.wait(30)
    assert all(report.ok for report in reports)
    return reports[2:]


def seconds_by_stage(reports):
    """Return the medians, trainer's and worker's stages together."""
    found = {}
    for report in reports:
        for stage, seconds in {**report.seconds, **_of_worker(report)}.items():
            found.setdefault(stage, []).append(seconds)
    return {stage: statistics.median(values) for stage, values in found.items()}


def _of_worker(report):
    return {f"worker {stage}": s for stage, s in report.workers[0].seconds.items()}


def main():
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gib", nargs="?", type=float, default=2.0)
    parser.add_argument("--only", choices=["large", "small"])
    options = parser.parse_args()
    if options.only != "small":
        large(int(options.gib * GIB))
    if options.only != "large":
        many_small()


def large(nbytes):
    """Print the share of two plain copies in a round of large tensors."""
    for commit in ("adopt", "copy"):
        reports = rounds("llama", str(nbytes), commit)
        copy_s = copy_seconds(reports[0].nbytes)
        stages = seconds_by_stage(reports)
        told = "  ".join(f"{stage} {seconds:.3f}" for stage, seconds in stages.items())
        gib = reports[0].nbytes / GIB
        print(f"{commit}: {gib:.2f} GiB, memcpy {copy_s:.3f} s ({gib / copy_s:.1f} GiB/s)")
        print(f"  (2 x memcpy) / round = {2 * copy_s / stages['total']:.2f}    {told}")


def many_small():
    """Print what a small tensor costs above its bytes."""
    arguments = f"{SMALL['number']},{SMALL['nbytes']}"
    totals = {}
    for kind in ("small", "one"):
        stages = seconds_by_stage(rounds(kind, arguments, "adopt"))
        totals[kind] = stages["total"]
        print(f"{kind}:", "  ".join(f"{stage} {s:.4f}" for stage, s in stages.items()))
    each_us = (totals["small"] - totals["one"]) / SMALL["number"] * 1e6
    print(f"{SMALL['number']} x {SMALL['nbytes']} bytes: {each_us:.1f} us each above one tensor")


if __name__ == "__main__":
    main()
