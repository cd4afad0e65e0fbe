"""What the proof of vLLM's reload costs, beside that reload, in one process and in turn.

    ENV/bin/python plugins/wtransfer-vllm/tests/benchmarks/bench_reload.py [--gib 2] [--repeat 3]

Prints seconds, and the growth of the process's memory at its peak; both of one reading of the
checkpoint from the page cache.
"""

# ruff: noqa: T201  # a script beside the tests, whose numbers are its output
from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_models
from vllm import LLM
from vllm.model_executor.model_loader import get_model_loader

from wtransfer_vllm.proof import prove

HIDDEN = 2048
LAYER_NBYTES = 9 * HIDDEN**2 * 2


def memory_mib(field):
    """Return a number of the kernel's about this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 1024


def measure(call):
    """Return the seconds of a call, and by how many MiB it has grown the process at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before, begun = memory_mib("VmRSS"), time.perf_counter()
    call()
    return time.perf_counter() - begun, memory_mib("VmHWM") - before


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each")
    options = parser.parse_args()
    layers = max(1, round(options.gib * 2**30 / LAYER_NBYTES))
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.make(Path(folder) / "A", 1, layers=layers, hidden=HIDDEN)
        llm = LLM(
            model=str(model), dtype="bfloat16", max_model_len=512, enforce_eager=True,
            kv_cache_memory_bytes=256 << 20,
        )  # fmt: skip
        core = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        served, loader = (
            worker.model_runner.model,
            get_model_loader(llm.llm_engine.vllm_config.load_config),
        )
        calls = {
            "vLLM's reload_weights": worker.model_runner.reload_weights,
            "proof": lambda: prove(
                served, worker.vllm_config, loader.get_all_weights(worker.model_config, served)
            ),
        }
        found = {name: [] for name in calls}
        for _ in range(options.repeat):
            for name, call in calls.items():
                found[name].append(measure(call))
    print(f"{layers} layers, {layers * LAYER_NBYTES / 2**30:.2f} GiB")
    for name, measured in found.items():
        seconds, mib = zip(*measured, strict=True)
        print(
            f"{name:24} {statistics.median(seconds):7.3f} s ({min(seconds):.3f} to "
            f"{max(seconds):.3f}), {max(mib):7.0f} MiB more at its peak"
        )


if __name__ == "__main__":
    main()
