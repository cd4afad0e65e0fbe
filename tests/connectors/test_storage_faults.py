"""A disk that is full, read-only or failing costs hits, and nothing else. FAULTS 33."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from host import Host, check_whole, names_in

from wtransfer.errors import StorageError
from wtransfer.specs import tier
from wtransfer.specs.file import FORMAT

PROMPT, OTHER, NEXT = (list(range(first, first + 30)) for first in (0, 50, 100))


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    """Let the tier be tried again at once after failures."""
    monkeypatch.setattr(tier, "PAUSE_S", 0.0)


CALLS = [
    *((os, name) for name in ("open", "mkdir", "stat", "fstat", "scandir", "listdir", "rename")),
    *((os, name) for name in ("replace", "pwritev", "preadv", "fchmod", "utime")),
    (fcntl, "flock"),
]
FOR_EVER = (errno.ENOSPC, errno.EROFS, errno.EMFILE)
CASES = [
    pytest.param(errno.EIO, False, 7, id="EIO once"),
    *(
        # A read-only disk is a real one, below.
        pytest.param(
            each,
            True,
            3,
            id=f"{errno.errorcode[each]} for ever",
            marks=pytest.mark.nightly if each == errno.EROFS else pytest.mark.slow,
        )
        for each in FOR_EVER
    ),
    *(
        pytest.param(
            each,
            for_ever,
            1,
            id=f"{errno.errorcode[each]} {'for ever' if for_ever else 'once'} at every call",
            marks=[pytest.mark.nightly, pytest.mark.timeout(600)],
        )
        for for_ever, numbers in ((False, (errno.EIO, *FOR_EVER)), (True, FOR_EVER))
        for each in numbers
    ),
]


@pytest.fixture(
    params=[
        pytest.param(0, id="the tier alone"),
        pytest.param(3 << 12, id="under an arena", marks=pytest.mark.slow),
    ]
)
def arena_bytes(request):
    """Of the arena over the folder: four blocks, or none."""
    return request.param


@pytest.fixture
def make(drawn, arena_bytes):
    """Maker of hosts over a folder."""

    def made(path, **more):
        options = {"shared_storage_path": str(path), "max_bytes": 1 << 20, **more}
        options |= {"cpu_bytes_to_use": arena_bytes, "engine_id": f"host {os.getpid()}"}
        return Host(drawn, "SharedStorageConnector", **options)

    return made


@pytest.fixture
def again(arena_bytes):
    """What is in the folder once it has been served anew: an arena may have the other already."""
    return NEXT if arena_bytes else PROMPT


class Failing:
    """Lets calls of the system fail, of those that a connector makes of files."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch

    @contextlib.contextmanager
    def at(self, first, number, *, for_ever):
        """Fail at a call, or from there on; yields how many calls there were, and how many failed.

        In between only the work that the test does runs, in this thread.
        """
        seen = {"calls": 0, "failed": 0}

        def wrap(call):
            def wrapped(*args, **kwargs):
                seen["calls"] += 1
                due = seen["calls"] >= first if for_ever else seen["calls"] == first
                if due:
                    seen["failed"] += 1
                    raise OSError(number, os.strerror(number))
                return call(*args, **kwargs)

            return wrapped

        with self._monkeypatch.context() as patch:
            for module, name in CALLS:
                patch.setattr(module, name, wrap(getattr(module, name)))
            yield seen


@pytest.fixture
def failing(monkeypatch):
    return Failing(monkeypatch)


def serve(made):
    """Store, evict, and load what was stored before; a host checks what comes of it."""
    for prompt in (PROMPT[:17], OTHER[:17], PROMPT):
        made.serve(prompt, 2)
        made.settle()


@pytest.mark.parametrize(("number", "for_ever", "step"), CASES)
def test_serving_goes_on_whichever_call_fails(
    make, again, tmp_path, failing, *, number, for_ever, step
):
    with make(tmp_path / "count") as made, failing.at(10**9, number, for_ever=False) as seen:
        serve(made)
    num_calls = seen["calls"]
    assert num_calls > 60
    for first in range(1, num_calls + 1, step):
        path = tmp_path / str(first)
        with make(path) as made:
            with failing.at(first, number, for_ever=for_ever):
                serve(made)
            check_whole(path)
            assert names_in(path / FORMAT / "incoming") == []
            # C4: without a restart the next one works.
            made.serve(again, 2)
            made.settle()
        with make(path) as fresh:
            assert fresh.serve(again, 2).loaded == 7, first


# -- real ones


@pytest.fixture
def small_disk(mount_tmpfs):
    """A file system of 256 kilobytes."""
    return mount_tmpfs("256k")


def test_a_disk_that_another_process_has_filled(make, again, small_disk):
    with make(small_disk, max_bytes=1 << 30) as made:
        with (small_disk / "big").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        serve(made)
        assert check_whole(small_disk) == 0
        (small_disk / "big").unlink()
        made.serve(again)
        made.settle()
        assert check_whole(small_disk) == 7


def test_a_disk_that_becomes_read_only_still_serves_what_it_has(make, small_disk):
    with make(small_disk) as made:
        made.serve(PROMPT)
        made.settle()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with make(small_disk) as made:
        assert made.serve(PROMPT + PROMPT, 2).loaded == 7
        made.settle()
        assert made.stats["put_failures_StorageError_total"] > 0


def test_damaged_block_on_a_read_only_disk_is_met_once(make, small_disk):
    with make(small_disk) as made:
        made.serve(PROMPT)
        made.settle()
    for each in small_disk.glob(f"{FORMAT}/blocks/*"):
        os.truncate(each, 9)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with make(small_disk) as made:
        assert [made.serve(PROMPT, 2).failures for _ in range(2)] == [1, 0]


def test_a_read_only_disk_with_nothing_on_it_says_so_at_once(make, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match=r"wtransfer-kv-2.* failed"):
        make(small_disk)


@pytest.mark.slow
def test_too_many_open_files(tmp_path):
    """In a process of its own, as it has no descriptor left; DescriptorLimitError is soft, too."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from host import Host, names_in
from wtransfer.specs import tier
from wtransfer.testing.mini_engine.model import LocalWeights
tier.PAUSE_S = 0.0
made = Host(LocalWeights(0), "SharedStorageConnector", shared_storage_path={str(tmp_path)!r})
made.serve(range(100, 110), 2)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
made.serve(range(30), 2)
assert made.stats["put_failures_DescriptorLimitError_total"] > 0, made.stats
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
made.serve(range(30), 2)
assert made.serve(range(30), 2).loaded == 7
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
