"""The watch over the whole run: it sees what it is there to see (FAULTS 25).

That nothing was seen is checked at the end of the run, in ``tests/conftest.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wtransfer.testing.zygote import Zygote

PLAIN = "import pickle; pickle.loads(pickle.dumps([1]))"
FILE = "import io, pickle; pickle.load(io.BytesIO(pickle.dumps([1])))"
GLOBAL = "import _pickle, pickle; _pickle.loads(pickle.dumps(print))"
TORCH = (
    "import io, torch; f = io.BytesIO(); torch.save({'w': torch.zeros(1)}, f); f.seek(0); "
    "torch.load(f, weights_only=False)"
)


@pytest.fixture
def record(unpickled, tmp_path, monkeypatch):
    """A record of its own, so that what these tests do on purpose is not held against the run."""
    own = type(unpickled)(tmp_path / "unpickled")
    monkeypatch.setenv("WTRANSFER_TESTS_UNPICKLED", str(own.path))
    return own


def run(code, file="somewhere.py"):
    source = f"exec(compile({code!r}, {file!r}, 'exec'))"
    subprocess.run([sys.executable, "-c", source], check=True, env=os.environ, timeout=60)


@pytest.mark.parametrize(
    "code",
    [PLAIN, FILE, GLOBAL, pytest.param(TORCH, marks=pytest.mark.slow)],
    ids=["plain", "file", "C", "torch"],
)
def test_every_way_to_unpickle_is_seen_in_other_processes(record, code):
    run(code)
    assert record.found() != []


def test_unpickling_with_our_code_on_the_stack_is_attributed_to_us(record):
    run(PLAIN, file="/lib/wtransfer/weight_sync/worker/session.py")
    run(PLAIN, file="/lib/hypothesis/database.py")
    assert [each["event"] for each in record.by_us()] == ["pickle.loads"]
    assert len(record.found()) == 2


def test_forked_children_are_watched(record):
    with Zygote(preload=[], paths=[Path(__file__).parent]) as zygote:
        child = zygote.spawn("unpickling:main")
        assert child.wait(10.0) == 0
    assert {each["pid"] for each in record.found()} == {child.pid}


def test_nothing_was_unpickled_where_peers_are_heard(unpickled):
    # So far; the end of the run looks again.
    assert unpickled.by_us() == []
