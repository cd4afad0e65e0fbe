"""The tests need TRL beside a vLLM: wtransfer-vllm's `tests/make_env.py` makes the environment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

VLLM_TESTS = Path(__file__).parents[2] / "wtransfer-vllm" / "tests"
sys.path[:0] = [str(Path(__file__).parent), str(VLLM_TESTS), str(VLLM_TESTS / "live")]

NEEDED = ("wtransfer_trl", "trl", "vllm", "peft")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]


def pytest_configure(config):
    # What TRL and vLLM warn of at import is theirs.
    config.addinivalue_line("filterwarnings", "ignore:TRL currently supports vLLM:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("markers", "live: needs vLLM")
    config.addinivalue_line("markers", "nightly: too long for the gate")
