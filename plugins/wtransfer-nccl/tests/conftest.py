"""Tests of NCCL itself need GPUs and a CUDA build of torch; without them they skip, loudly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

IS_INSTALLED = importlib.util.find_spec("wtransfer_nccl") is not None
# Without the plug-in there is nothing to test; `test_installed.py` says so.
collect_ignore_glob = [] if IS_INSTALLED else ["test_[!i]*.py", "test_infos.py"]


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs NCCL, and a GPU for each of two ranks")
