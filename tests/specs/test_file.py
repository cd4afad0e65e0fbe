"""Tier ``file``: whole blocks or none, within the folder and the bound. FAULTS 32 to 36."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from wtransfer import deadline
from wtransfer.errors import DescriptorLimitError, OffloadingOptionError, StorageError
from wtransfer.specs import file
from wtransfer.specs import tier as tiers
from wtransfer.specs.file import FORMAT, FileTier

pytestmark = pytest.mark.usefixtures("leaves_nothing")

KEY, OTHER = b"k" * 38, b"o" * 38
DATA = bytes(range(200))
NBYTES = len(DATA)
AT_ONCE_S = 5.0  # a pipe holds up whoever opens it for good


def file_tier(**options):
    return tiers.open_tier(FileTier, options)


@pytest.fixture
def open_tier(tmp_path):
    """Open tiers over one folder."""
    made = []

    def make(**options):
        made.append(file_tier(shared_storage_path=str(tmp_path / "shared"), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def tier(open_tier):
    return open_tier()


@pytest.fixture
def blocks(tmp_path):
    return tmp_path / "shared" / FORMAT / "blocks"


@pytest.fixture
def incoming(tmp_path):
    return tmp_path / "shared" / FORMAT / "incoming"


def put(tier, key=KEY, data=DATA):
    tier.put(key, memoryview(data))


def get(tier, key=KEY, nbytes=NBYTES):
    """Return what is kept, or None."""
    into = bytearray(nbytes)
    return bytes(into) if tier.get(key, memoryview(into)) else None


# -- bytes by key


def test_put_get_contains_remove(tier, open_tier, incoming):
    assert (tier.contains([KEY, OTHER]), get(tier)) == ([False, False], None)
    put(tier)
    put(tier, OTHER, DATA[::-1])
    second = open_tier()
    assert (get(second), get(second, OTHER)) == (DATA, DATA[::-1])
    tier.remove([KEY, b"never"])
    assert (second.contains([KEY, OTHER]), get(second)) == ([False, True], None)
    assert list(incoming.iterdir()) == []


def test_put_replaces(tier):
    put(tier)
    put(tier, data=DATA[::-1])
    assert get(tier) == DATA[::-1]


@pytest.mark.parametrize("nbytes", [0, 1, NBYTES - 1, NBYTES + 1])
def test_other_length_is_a_miss(tier, nbytes):
    put(tier)
    assert get(tier, nbytes=nbytes) is None


@pytest.mark.parametrize("call", ["fstat", "preadv"])
def test_reader_keeps_the_block_it_has_opened(tier, monkeypatch, call):
    put(tier)
    real = getattr(os, call)

    def replace_and_read(fd, *args):
        if Path(f"/proc/self/fd/{fd}").readlink().name == KEY.hex():
            monkeypatch.undo()
            put(tier, data=DATA[::-1])
            tier.remove([KEY])
        return real(fd, *args)

    monkeypatch.setattr(os, call, replace_and_read)
    assert get(tier) == DATA
    assert not tier.contains([KEY])[0]


def test_file_that_shrinks_while_it_is_read_is_a_miss(tier, blocks, monkeypatch):
    put(tier)
    preadv = os.preadv

    def shrink_and_read(*args):
        os.truncate(blocks / KEY.hex(), 100)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", shrink_and_read)
    assert get(tier) is None


def test_folder_removed_by_hand_is_made_again(tier, tmp_path):
    put(tier)
    shutil.rmtree(tmp_path / "shared")
    assert (get(tier), tier.contains([KEY])) == (None, [False])
    put(tier)
    assert get(tier) == DATA


def test_reader_finds_what_is_put_after_the_folder_was_removed_by_hand(open_tier, tmp_path):
    """The scheduler's side never puts."""
    writer, reader = open_tier(), open_tier()
    put(writer)
    assert reader.contains([KEY]) == [True]
    shutil.rmtree(tmp_path / "shared")
    put(writer)
    assert (reader.contains([KEY]), get(reader)) == ([True], DATA)


# -- what others plant


def plant_socket(path):
    with socket.socket(socket.AF_UNIX) as sock:
        os.chdir(path.parent)
        sock.bind("s")
        Path("s").rename(path)


def plant_folder(path):
    path.mkdir()
    (path / "inside").write_text("x")


PLANTED = {
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to a good block": lambda path: path.symlink_to(path.with_name("good")),
    "second name of a good block": lambda path: os.link(path.with_name("good"), path),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "folder": plant_folder,
    "socket": plant_socket,
    "device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5)),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_entry_is_a_miss_at_once_and_is_replaced(tier, blocks, what, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    put(tier)
    path, good = blocks / KEY.hex(), blocks / "good"
    path.rename(good)
    try:
        PLANTED[what](path)
    except PermissionError:
        pytest.skip("devices cannot be made here")
    begun = time.monotonic()
    assert (get(tier), tier.contains([KEY])) == (None, [False])
    assert time.monotonic() - begun < AT_ONCE_S
    put(tier)
    assert (get(tier), tier.contains([KEY]), good.read_bytes()) == (DATA, [True], DATA)


@pytest.mark.parametrize("name", [FORMAT, f"{FORMAT}/blocks", f"{FORMAT}/incoming"])
@pytest.mark.parametrize("what", ["link", "file", "open to others", "of another user"])
def test_folder_that_is_not_private_is_refused(open_tier, tmp_path, name, what):
    open_tier().close()
    path = tmp_path / "shared" / name
    if what == "open to others":
        path.chmod(0o777)
    elif what == "of another user":
        with contextlib.suppress(PermissionError):
            os.chown(path, 1234, -1)
        if path.stat().st_uid != 1234:
            pytest.skip("only root gives files away")
    else:
        shutil.rmtree(path)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        path.symlink_to(elsewhere) if what == "link" else path.touch()
    with pytest.raises(StorageError, match=r"not this user's alone|opening the folder"):
        open_tier()


def test_files_are_private(tier, tmp_path):
    before = os.umask(0)
    try:
        put(tier)
    finally:
        os.umask(before)
    inner = tmp_path / "shared" / FORMAT
    assert {path.stat().st_mode & 0o077 for path in (inner, *inner.rglob("*"))} == {0}


# -- the bound


def kept(tier, number):
    return [
        n
        for n, there in enumerate(tier.contains([bytes([n]) * 38 for n in range(number)]))
        if there
    ]


def test_least_recently_used_is_evicted(open_tier, blocks):
    tier = open_tier(max_bytes=10 * NBYTES)
    # Names that sort against the order of use, as fast as may be.
    keys = [bytes([200 - n]) * 38 for n in range(11)]
    for key in keys[:10]:
        put(tier, key)
    assert get(tier, keys[0]) == DATA
    put(tier, keys[10])
    # Room for one, and an eighth of the bound so that it lasts for a while.
    assert tier.contains(keys) == [n == 0 or n >= 4 for n in range(11)]
    assert tier.get_stats() == {"files_evicted_total": 3}


def test_put_notes_the_time_itself(tier, blocks, monkeypatch):
    """The system's own clock of files may be too coarse to order the blocks of a prefix."""
    monkeypatch.setattr(time, "time_ns", lambda: 123_456_789)
    put(tier)
    assert (blocks / KEY.hex()).stat().st_mtime_ns == 123_456_789


def test_bound_holds_for_blocks_that_are_small_beside_it(open_tier, blocks):
    tier = open_tier(max_bytes=200 * NBYTES)
    for n in range(450):
        put(tier, n.to_bytes(2, "big") * 19)
        assert len(list(blocks.iterdir())) <= 200


def test_bound_counts_what_other_processes_write(open_tier, blocks):
    tiers = [open_tier(max_bytes=64 * NBYTES) for _ in range(3)]
    for n in range(200):
        put(tiers[n % 3], bytes([n]) * 38)
        total = sum(each.stat().st_size for each in blocks.iterdir())
        assert total <= (64 + 3) * NBYTES
    assert total > 32 * NBYTES


def test_smallest_bound_holds(open_tier, blocks):
    large, small = open_tier(), open_tier(max_bytes=4 * NBYTES)
    for n in range(20):
        put(large, bytes([n]) * 38)
    put(small)
    assert sum(each.stat().st_size for each in blocks.iterdir()) <= 4 * NBYTES


def test_block_above_the_bound_is_refused(open_tier, blocks):
    with pytest.raises(StorageError, match="max_bytes=10 is less than a block of 200 bytes"):
        put(open_tier(max_bytes=10))
    assert list(blocks.iterdir()) == []


# -- writers that died


def test_leftovers_of_a_dead_writer_are_swept_and_a_living_ones_are_not(tier, open_tier, incoming):
    with tier._folders.temporary() as (name, _):
        # Of a process that died: nothing locks it.
        (incoming / "0123").write_bytes(b"half a bl")
        open_tier()
        assert [each.name for each in incoming.iterdir()] == [name]


def test_start_does_not_wait_until_all_leftovers_are_swept(open_tier, incoming, monkeypatch):
    open_tier().close()
    for number in range(20):
        (incoming / f"{number:016x}").write_bytes(b"half a bl")
    # A disk that takes its time: by a clock that goes on with each lock.
    clock, real = [0.0], fcntl.flock

    def slow(fd, how):
        clock[0] += 0.4 * file.SWEEP_S
        return real(fd, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    tier = open_tier()
    assert len(list(incoming.iterdir())) == 17
    # Those that are left go with what is put, which waits no longer for them either.
    left = []
    while not left or left[-1]:
        put(tier)
        left.append(len(list(incoming.iterdir())))
    assert left[:3] == [14, 11, 8]


def test_sweep_goes_on_where_a_file_system_locks_only_what_may_be_written(
    open_tier, incoming, monkeypatch
):
    open_tier().close()
    flock = fcntl.flock

    def as_on_nfs(fd, how):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    for each in ("0123", "4567"):
        (incoming / each).write_bytes(b"half a bl")
    open_tier()
    assert list(incoming.iterdir()) == []


@pytest.mark.parametrize("swept", ["removed", "locked"])
def test_put_writes_again_where_a_sweep_came_before_its_lock(tier, incoming, monkeypatch, swept):
    flock, files = fcntl.flock, []

    def sweep_and_lock(fd, how):
        files.append(fd)
        if len(files) == 1 and swept == "locked":
            raise BlockingIOError
        if len(files) == 1:
            for each in incoming.iterdir():
                each.unlink()
        return flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", sweep_and_lock)
    put(tier)
    assert (get(tier), len(files)) == (DATA, 2)


@pytest.mark.parametrize("age_s", [10, 7200])
def test_without_locks_old_leftovers_are_swept(tier, open_tier, incoming, monkeypatch, age_s):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    put(tier)
    left, planted = incoming / "0123", incoming / "4567"
    left.write_bytes(b"half a bl")
    planted.mkdir()
    for each in (left, planted):
        os.utime(each, (time.time() - age_s,) * 2)
    open_tier()
    is_young = age_s < 3600
    assert (left.exists(), planted.exists(), get(tier)) == (is_young, is_young, DATA)


# -- disks


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "pwritev", "replace", "fchmod"])
def test_failed_put_leaves_nothing_and_the_next_one_works(
    tier, tmp_path, monkeypatch, number, call
):
    put(tier, OTHER)
    folder = tmp_path / "shared" / FORMAT

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises((StorageError, DescriptorLimitError)):
            put(tier)
    assert list((folder / "incoming").iterdir()) == []
    assert not (folder / "blocks" / KEY.hex()).exists()
    put(tier)
    assert get(tier) == DATA


@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
def test_failed_get_is_an_error_and_the_block_stays(tier, monkeypatch, call):
    put(tier)

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StorageError, match="Input/output error"):
            get(tier)
    assert get(tier) == DATA


def test_full_disk_evicts_the_oldest(mount_tmpfs):
    place = mount_tmpfs("256k")
    tier, data = file_tier(shared_storage_path=str(place)), bytes(20_000)

    def succeeds(n):
        try:
            put(tier, bytes([n]) * 38, data)
        except StorageError as error:
            return "No space left" not in str(error)
        return True

    try:
        failed = [n for n in range(60) if not succeeds(n)]
        assert 0 < len(failed) < 30
        assert kept(tier, 60)[-1] >= 58
        assert list((place / FORMAT / "incoming").iterdir()) == []
    finally:
        tier.close()


# -- options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "missing required field `shared_storage_path`"),
        ({"shared_storage_path": ""}, "length >= 1"),
        ({"shared_storage_path": "a\0b"}, "shared_storage_path"),
        ({"shared_storage_path": "x", "max_byte": 1}, "unknown field `max_byte`; the options are"),
        ({"shared_storage_path": "x", "max_bytes": 0}, ">= 1"),
        ({"shared_storage_path": "x", "max_bytes": "1G"}, "max_bytes"),
    ],
)
def test_option_that_cannot_be_used_is_refused(options, text):
    with pytest.raises(OffloadingOptionError, match=text):
        file_tier(**options)


def test_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="making the folder"):
        file_tier(shared_storage_path=str(tmp_path / "file"))
