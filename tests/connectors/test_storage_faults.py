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
from driver import Instance, answer, names_in, transfer_config

from wtransfer.errors import StorageError
from wtransfer.kv.header import HEADER_NBYTES, BlockHeader, checksum
from wtransfer.specs.file import FORMAT
from wtransfer.specs.tier import rank_key

pytestmark = pytest.mark.usefixtures("weights")

PROMPT = list(range(30))
CALLS = [
    *((os, name) for name in ("open", "mkdir", "stat", "fstat", "scandir", "listdir", "rename")),
    *((os, name) for name in ("replace", "pwritev", "preadv", "fchmod", "utime")),
    (fcntl, "flock"),
]
ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENOMEM]
QUICK = {(errno.EIO, False)}
CASES = [
    pytest.param(
        *(case := (number, for_ever)),
        id=f"{errno.errorcode[number]} {'from then on' if for_ever else 'once'}",
        marks=() if case in QUICK else pytest.mark.slow,
    )
    for number in ERRORS
    for for_ever in (False, True)
]


def make(path, **more):
    options = {"shared_storage_path": str(path), "max_bytes": 1 << 20, **more}
    return Instance(transfer_config("SharedStorageConnector", **options))


def check_whole(path):
    """Fail if a file is not what its name says; return how many there are."""
    found = list(path.glob(f"{FORMAT}/blocks/*"))
    for each in found:
        data = each.read_bytes()
        header = BlockHeader.unpack(data[:HEADER_NBYTES])
        assert isinstance(header, BlockHeader), each
        assert rank_key(header.key, header.rank).hex() == each.name
        assert header.checksum == checksum(data[HEADER_NBYTES:])
    return len(found)


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
    """Store, and load what was stored before; return what came of it."""
    requests = [made.serve("a", PROMPT[:17], 2), made.serve("b", PROMPT, 2)]
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize(("number", "for_ever"), CASES)
def test_serving_goes_on_whichever_call_fails(tmp_path, failing, number, for_ever):
    expected = [answer(PROMPT[:17], 2), answer(PROMPT, 2)]
    with make(tmp_path / "count") as made, failing.at(10**9, number, for_ever=False) as seen:
        assert serve(made) == expected
    num_calls = seen["calls"]
    assert num_calls > 60
    for first in range(1, num_calls + 1, 1 if for_ever else 3):
        path = tmp_path / str(first)
        with make(path) as made:
            with failing.at(first, number, for_ever=for_ever):
                assert serve(made) == expected, first
            check_whole(path)
            assert names_in(path / FORMAT / "incoming") == []
            # C4: without a restart the next one works.
            assert made.serve("c", PROMPT, 2).output_token_ids == expected[1]
        with make(path) as fresh:
            assert fresh.serve("d", PROMPT, 2).num_loaded == 28, first


# -- real ones


@pytest.fixture
def small_disk(mount_tmpfs):
    """A file system of 256 kilobytes."""
    return mount_tmpfs("256k")


def test_a_full_disk_keeps_what_was_used_last(small_disk):
    """The bound is more than the disk has: what is oldest makes room there, too."""
    with make(small_disk, max_bytes=1 << 30) as made:
        for n in range(40):
            prompt = [n, *PROMPT]
            assert made.serve(f"r{n}", prompt).output_token_ids == answer(prompt)
        check_whole(small_disk)
        numbers = made.workers[0].get_stats()
        assert numbers["put_failures_StorageError_total"] > 0
        assert numbers["files_evicted_total"] > 0
        # What failed is not stored; but nor does the disk stay full of what nobody wants.
        again = [made.serve(f"again{n}", [n, *PROMPT]).num_loaded for n in (39, 38)]
        assert max(again) > 0
        assert names_in(small_disk / FORMAT / "incoming") == []


def test_a_disk_that_somebody_else_has_filled(small_disk):
    with make(small_disk, max_bytes=1 << 30) as made:
        with (small_disk / "big").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert serve(made) == [answer(PROMPT[:17], 2), answer(PROMPT, 2)]
        assert check_whole(small_disk) == 0
        (small_disk / "big").unlink()
        made.serve("c", PROMPT)
        assert check_whole(small_disk) == 7


def test_a_disk_that_becomes_read_only_still_serves_what_it_has(small_disk):
    with make(small_disk) as made:
        made.serve("a", PROMPT)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with make(small_disk) as made:
        longer = PROMPT + PROMPT
        request = made.serve("b", longer, 2)
        assert (request.num_loaded, request.output_token_ids) == (28, answer(longer, 2))
        assert made.workers[0].get_stats()["put_failures_StorageError_total"] > 0


def test_damaged_block_on_a_read_only_disk_is_met_once(small_disk):
    with make(small_disk) as made:
        made.serve("a", PROMPT)
    for each in small_disk.glob(f"{FORMAT}/blocks/*"):
        os.truncate(each, 9)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with make(small_disk) as made:
        for name, num_failures in (("b", 1), ("c", 0)):
            request = made.serve(name, PROMPT, 2)
            expected = (num_failures, answer(PROMPT, 2))
            assert (request.num_failures, request.output_token_ids) == expected


def test_a_read_only_disk_with_nothing_on_it_says_so_at_once(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match=r"wtransfer-kv-2.* failed"):
        make(small_disk)


@pytest.mark.slow
def test_too_many_open_files(tmp_path):
    """In a process of its own, as it has no descriptor left; DescriptorLimitError is soft, too."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import driver
from wtransfer.weight_version import process_weights
process_weights.hold("fingerprint-1")
expected = driver.answer(range(30), 2)
made = driver.Instance(driver.transfer_config(
    "SharedStorageConnector", shared_storage_path={str(tmp_path)!r}))
made.serve("first", range(100, 110), 2)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
assert made.serve("a", range(30), 2).output_token_ids == expected
stats = made.workers[0].get_stats()
assert stats["put_failures_DescriptorLimitError_total"] > 0, stats
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
made.serve("b", range(30), 2)
assert made.serve("c", range(30), 2).num_loaded == 28
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
