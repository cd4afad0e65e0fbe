"""What holds for every test."""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

AUDIT = Path(__file__).parent / "audit"

# A runner that was started in the background hands down an ignored SIGINT, and so would every
# process that a test starts and interrupts. With a handler here, they begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Torch's store asks for the name of every address that it connects to, and an answer that is lost
# costs it five seconds: tests of waits that end in time would take that for their own.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


class Unpickled:
    """Where every interpreter of the test run notes what it unpickles (FAULTS 25)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def found(self) -> list[dict[str, object]]:
        """Return what was noted so far, by whichever process."""
        lines = self.path.read_text("utf-8").splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]

    def by_us(self) -> list[dict[str, object]]:
        """Return what was unpickled with a module of wtransfer on the stack."""
        return [each for each in self.found() if any(map(_is_ours, each["stack"]))]


def _is_ours(frame: str) -> bool:
    return "/wtransfer/" in frame and "/tests/" not in frame


def _watch() -> Unpickled:
    audit = runpy.run_path(str(AUDIT / "sitecustomize.py"))
    folder = Path(tempfile.mkdtemp(prefix="wtransfer-tests-"))
    os.environ[audit["RECORD"]] = str(folder / "unpickled")
    # Whatever the tests start is watched as well: Python imports a `sitecustomize` that it finds.
    paths = [str(AUDIT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    audit["watch"]()
    return Unpickled(folder / "unpickled")


UNPICKLED = _watch()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def unpickled():
    """The record of what was unpickled, in all processes of this run."""
    return UNPICKLED


@pytest.fixture
def one_thread():
    """Let torch compute on one thread: the same bits each time, and few steps of many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def leaves_nothing():
    """Fail a test that leaves threads, descriptors or shared memory behind (FAULTS, C3)."""
    from wtransfer.testing.leftovers import Leftovers

    leftovers = Leftovers()
    yield
    assert leftovers.found(within_s=5.0) == []


def pytest_collection_finish():
    """Spare every later collection of garbage what lives as long as the run: thousands of tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    """Let the run fail if anything was unpickled where peers are heard."""
    found = UNPICKLED.by_us()
    if found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Say what was unpickled, and where."""
    found = UNPICKLED.by_us()
    terminalreporter.section("unpickled where peers are heard")
    terminalreporter.line(f"{len(found)} times in all processes of this run")
    for each in found[:5]:
        terminalreporter.line(json.dumps(each, indent=1))


def pytest_unconfigure():
    """Remove the record."""
    shutil.rmtree(UNPICKLED.path.parent, ignore_errors=True)
