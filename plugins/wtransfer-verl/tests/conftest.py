"""The tests need verl and Ray: `make_env.py` makes the environment. Elsewhere none is collected."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Beside these tests, the module by which vLLM's run Ray.
OF_VLLM = Path(__file__).parents[2] / "wtransfer-vllm" / "tests" / "live"
sys.path[:0] = [str(Path(__file__).parent), str(OF_VLLM)]

NEEDED = ("wtransfer_verl", "verl", "ray")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]


def pytest_configure(config):
    # Warnings at the import of verl and Ray are theirs.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::FutureWarning")
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")
