"""Folders that others write to as well: nothing leads out of them, nothing is ever half there."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import threading
import time

import pytest

from wtransfer.errors import (
    DescriptorLimitError,
    StagingMemoryError,
    StorageError,
    StorageInUseError,
)
from wtransfer.transport.files import (
    LOCK_NAME,
    Folder,
    FolderLock,
    read_at,
    storage_errors,
    temporary_of,
    write_at,
)


@pytest.fixture
def folder(tmp_path):
    with Folder(tmp_path) as opened:
        yield opened


# -- names

BAD_NAMES = ["", ".", "..", "a/b", "/etc/passwd", "../up", "a\0b", "n" * 256, "ü" * 128]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("method", ["open_file", "create_file", "folder", "make_folder", "remove"])
def test_no_name_leads_out_of_a_folder(folder, method, name):
    with pytest.raises(StorageError, match="no plain name"):
        getattr(folder, method)(name)


def test_any_other_name_will_do(folder):
    for name in ("a b", "ключ", "..a", "%s{}", "n" * 200, "\n"):
        folder.replace(name, b"x")
        assert folder.read(name, 1) == b"x"


# FAULTS 36
def make_link(path):
    path.symlink_to("/etc/passwd")


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as sock:
        os.chdir(path.parent)
        sock.bind(path.name)


PLANTED = {
    "link": make_link,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "socket": make_socket,
    "device": lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3)),
}


@pytest.mark.parametrize("what", PLANTED)
def test_only_regular_files_are_opened_and_nothing_is_waited_for(
    folder, tmp_path, monkeypatch, what
):
    monkeypatch.chdir(tmp_path)
    try:
        PLANTED[what](tmp_path / "planted")
    except PermissionError as error:
        pytest.skip(f"not allowed here: {error}")
    with pytest.raises(StorageError, match="planted"):
        folder.open_file("planted")
    with pytest.raises(StorageError, match="planted"):
        folder.read("planted", 100)


def test_a_link_to_a_folder_is_not_entered(folder, tmp_path):
    (tmp_path / "planted").symlink_to("/")
    with pytest.raises(StorageError, match="planted"):
        folder.folder("planted")


def test_removing_a_link_keeps_its_target(folder, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone" / "inner").mkdir()
    folder.remove("gone")
    folder.remove("gone")
    assert folder.names() == ["kept"]
    assert (tmp_path / "kept" / "file").read_text() == "x"


def test_sweeping_reports_the_names_that_cannot_be_removed(folder, tmp_path, monkeypatch):
    for name in ("a1", "a2", "b1"):
        (tmp_path / name).write_text("x")
    remove = Folder.remove

    def refuse(self, name):
        if name == "a2":
            raise StorageError("busy")
        remove(self, name)

    monkeypatch.setattr(Folder, "remove", refuse)
    assert folder.sweep(lambda name: name.startswith("a")) == ["a2"]
    assert folder.names() == ["a2", "b1"]


# -- reading and writing


def test_a_missing_file_reads_as_none_and_a_large_one_is_refused(folder):
    assert folder.read("nothing", 10) is None
    folder.replace("file", b"12345")
    assert folder.read("file", 5) == b"12345"
    with pytest.raises(StorageError, match="larger than 4 bytes"):
        folder.read("file", 4)


def test_readers_see_the_old_or_the_new_file_and_nothing_else(folder):
    sizes, seen, stop = (100_000, 200_000), set(), threading.Event()

    def look():
        while not stop.is_set():
            seen.add(folder.read("file", 1 << 20))

    contents = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    folder.replace("file", contents[0])
    reader = threading.Thread(target=look)
    reader.start()
    for number in range(100):
        folder.replace("file", contents[number % 2])
    stop.set()
    reader.join()
    assert seen == set(contents)
    assert folder.names() == ["file"]


@pytest.mark.parametrize("fails", ["pwritev", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(folder, monkeypatch, fails):
    folder.replace("file", b"old")

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(f"wtransfer.transport.files.os.{fails}", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        folder.replace("file", b"new")
    assert (folder.names(), folder.read("file", 10)) == (["file"], b"old")


def test_temporary_files_of_a_dead_writer_are_recognised(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("wtransfer.transport.files.os.replace", _die)
    monkeypatch.setattr("wtransfer.transport.files.os.unlink", _die)
    with pytest.raises(KeyboardInterrupt):
        folder.replace("fi.le", b"new")
    (left,) = folder.names()
    assert temporary_of(left) == "fi.le"
    assert temporary_of("fi.le") is None


def _die(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_more_buffers_than_a_call_takes_are_written_and_read_in_place(file):
    data = os.urandom(5000)
    pieces = [memoryview(data)[i : i + 1] for i in range(5000)]
    write_at(file, [memoryview(b""), *pieces], 7)
    back = [bytearray(3) for _ in range(1666)]
    assert read_at(file, [memoryview(each) for each in back], 7) == 4998
    assert b"".join(back) == data[:4998]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_that_do_a_part_are_continued(file, monkeypatch, step):
    """As the kernel may at any time: a signal, a quota, two gigabytes."""
    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, _partly(getattr(os, name), step))
    data = os.urandom(3000)
    pieces = [memoryview(data)[i : i + 500] for i in range(0, 3000, 500)]
    write_at(file, pieces, 0)
    back = [bytearray(n) for n in (1, 2999)]
    assert read_at(file, [memoryview(each) for each in back], 0) == 3000
    assert b"".join(back) == data


def _partly(call, step):
    return lambda fd, buffers, offset: call(fd, [buffers[0][:step]], offset)


def test_reading_past_the_end_tells_how_much_there_was(file):
    write_at(file, [memoryview(b"12345")], 0)
    into = bytearray(10)
    assert read_at(file, [memoryview(into)], 2) == 3


# FAULTS 33
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, StorageError),
        (errno.EDQUOT, StorageError),
        (errno.EIO, StorageError),
        (errno.EROFS, StorageError),
        (errno.EACCES, StorageError),
        (errno.ESTALE, StorageError),
        (errno.EMFILE, DescriptorLimitError),
        (errno.ENFILE, DescriptorLimitError),
        (errno.ENOMEM, StagingMemoryError),
    ],
    ids=str,
)
def test_system_errors_are_translated(number, expected):
    with (
        pytest.raises(expected, match=r"^writing it failed: ") as caught,
        storage_errors("writing it"),
    ):
        raise OSError(number, os.strerror(number))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_file_that_may_not_grow_is_an_error_and_no_signal(folder):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            folder.replace("file", bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert folder.names() == []


# -- the lock


def hold(path):
    """Runs in a child: hold the lock until killed."""
    with Folder(path) as folder:
        lock = FolderLock(folder)
        folder.replace("ready", b"")
        time.sleep(60)
        lock.release()


def start_holder(zygote, folder):
    child = zygote.spawn("test_files:hold", folder.path)
    end = time.monotonic() + 10
    while folder.read("ready", 1) is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    return child


def test_a_second_holder_is_refused_and_the_error_names_the_first(zygote, folder):
    child = start_holder(zygote, folder)
    try:
        with pytest.raises(
            StorageInUseError, match=f"process {child.pid} on {socket.gethostname()}"
        ):
            FolderLock(folder, patience_s=0.1)
    finally:
        child.kill()
        child.wait(5.0)


def test_the_lock_of_a_killed_holder_is_free(zygote, folder):
    child = start_holder(zygote, folder)
    child.kill()
    child.wait(5.0)
    FolderLock(folder, patience_s=0.0).release()
    assert folder.names() == ["ready"]


def test_a_lock_waits_for_a_holder_that_releases_it(folder):
    first = FolderLock(folder)
    threading.Timer(0.2, first.release).start()
    second = FolderLock(folder, patience_s=20.0)
    assert (first.held, second.held) == (False, True)
    # A third contender finds the second holder: the file of the first is gone.
    with pytest.raises(StorageInUseError):
        FolderLock(folder, patience_s=0.1)
    second.release()
    assert LOCK_NAME not in folder.names()


def test_a_lock_on_a_removed_file_does_not_count(folder, monkeypatch):
    first, flock = FolderLock(folder), fcntl.flock

    def late(fd, how):
        # The contender has opened the holder's file already when that one goes.
        first.release()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second = FolderLock(folder, patience_s=20.0)
    with pytest.raises(StorageInUseError):
        FolderLock(folder, patience_s=0.1)
    second.release()


def test_a_fork_of_the_holder_does_not_keep_it(folder):
    lock = FolderLock(folder)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        lock.release()
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        # What the child does with its copy is not done to ours.
        time.sleep(0.1)
        assert LOCK_NAME in folder.names()
        lock.release()
        FolderLock(folder, patience_s=0.0).release()
    finally:
        os.close(writer)
        os.waitpid(child, 0)


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_planted_lock_file_is_refused(folder, tmp_path, what):
    PLANTED[what](tmp_path / LOCK_NAME)
    with pytest.raises(StorageError):
        FolderLock(folder, patience_s=0.0)


@pytest.mark.parametrize("data", [b"my own", b"proc", b"\0" * 5000], ids=len)
def test_a_file_of_the_users_own_is_never_taken_for_the_lock(folder, data):
    folder.replace(LOCK_NAME, data)
    with pytest.raises(StorageError, match="not written by wtransfer"):
        FolderLock(folder, patience_s=0.0)
    assert folder.read(LOCK_NAME, len(data)) == data


def test_an_empty_lock_file_is_taken(folder):
    folder.replace(LOCK_NAME, b"")
    FolderLock(folder, patience_s=0.0).release()
    assert folder.names() == []


# -- full disks


def test_a_full_disk_is_an_error_that_says_so(mount_tmpfs):
    with Folder(mount_tmpfs("1m")) as folder:
        folder.replace("file", b"old")
        with pytest.raises(StorageError, match="No space left on device; free some room"):
            folder.replace("file", bytes(2 << 20))
        assert (folder.names(), folder.read("file", 10)) == (["file"], b"old")
