"""The files of a shared folder: whatever is wrong with one, it is a miss and not other bytes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
from driver import Instance, answer, names_in, transfer_config
from wtransfer.connectors.storage.counts import Counts
from wtransfer.connectors.storage.files import BlockFiles, file_name
from wtransfer.connectors.storage.incoming import lock
from wtransfer.connectors.storage.room import Room
from wtransfer.connectors.storage.store import FORMAT, MAX_ASIDE, Store, shelf_name

from wtransfer.blocks import HEADER_NBYTES, BlockGeometry, BlockHeader, checksum
from wtransfer.errors import StorageError

GEOMETRY = BlockGeometry(4, (("bfloat16", 40), ("bfloat16", 24)), 1, "a model")
NAME, OTHER = b"n" * 36, b"o" * 36
PAYLOAD = bytes(range(64))
SHELF = shelf_name(b"root", "fingerprint")
AT_ONCE_S = 0.05


@pytest.fixture
def store(tmp_path):
    made = Store(str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def files(store):
    return BlockFiles(store, GEOMETRY, 0)


@pytest.fixture
def shelf(store):
    with store.make_shelf(SHELF) as opened:
        yield opened


@pytest.fixture
def path(files, shelf):
    """A block that was stored, as a path."""
    files.write(shelf, NAME, memoryview(PAYLOAD))
    return _path(shelf)


def _path(shelf):
    return Path(shelf.path) / file_name(NAME, 0)


def read(files, shelf, name=NAME):
    """Return why a block cannot be read, or its bytes."""
    into = bytearray(len(PAYLOAD))
    reason = files.read(shelf, name, memoryview(into))
    return bytes(into) if reason is None else reason


def aside(store):
    return names_in(f"{store.path}/aside")


def header(**other):
    fields = {"key": NAME, "geometry": GEOMETRY.digest, "nbytes": 64, "checksum": checksum(PAYLOAD)}
    return BlockHeader(**{**fields, **other}).pack()


def test_what_was_written_is_read(files, shelf, path, store):
    assert (read(files, shelf), files.has(shelf, NAME)) == (PAYLOAD, True)
    assert path.read_bytes() == header() + PAYLOAD
    assert names_in(f"{store.path}/incoming") == aside(store) == []


def test_what_is_not_there_is_a_miss_and_nothing_is_set_aside(files, shelf, store):
    assert (read(files, shelf), files.has(shelf, NAME)) == ("absent", False)
    assert aside(store) == []


# FAULTS 32
DAMAGED = {
    "empty": (b"", "length"),
    "only a header": (header(), "length"),
    "half a header": (header()[:60], "length"),
    "short by a byte": ((header() + PAYLOAD)[:-1], "length"),
    "long by a byte": (header() + PAYLOAD + b"x", "length"),
    "zeros": (bytes(HEADER_NBYTES + 64), "torn"),
    "another block": (header(key=OTHER) + PAYLOAD, "key"),
    "another layout": (header(geometry=b"g" * 16) + PAYLOAD, "geometry"),
    "another rank's": (header(rank=1) + PAYLOAD, "rank"),
    "another length stated": (header(nbytes=63) + PAYLOAD, "length"),
    "other bytes": (header() + PAYLOAD[::-1], "checksum"),
    "something else": (b"GIF89a" + bytes(HEADER_NBYTES + 58), "torn"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_a_miss_and_is_set_aside(files, shelf, path, store, what):
    data, reason = DAMAGED[what]
    path.write_bytes(data)
    assert read(files, shelf) == reason
    assert [each.split(".", 1)[1] for each in aside(store)] == [path.name]
    assert (read(files, shelf), path.exists()) == ("absent", False)
    # And there can be a good one again.
    files.write(shelf, NAME, memoryview(PAYLOAD))
    assert read(files, shelf) == PAYLOAD


def test_any_flipped_bit_is_a_miss(files, shelf, path):
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert read(files, shelf) in ("torn", "checksum", "format"), bit


def test_every_length_but_the_right_one_is_a_miss(files, shelf, path):
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert read(files, shelf) == "length", length


def test_what_is_set_aside_does_not_fill_the_disk(files, shelf, store):
    names = [bytes([n]) * 36 for n in range(MAX_ASIDE + 5)]
    for name in names:
        files.write(shelf, name, memoryview(PAYLOAD))
        os.truncate(f"{shelf.path}/{file_name(name, 0)}", 5)
        assert read(files, shelf, name) == "length"
    kept = [each.split(".", 1)[1] for each in aside(store)]
    assert kept == [file_name(name, 0) for name in names[5:]]


# FAULTS 36


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


@pytest.fixture(params=PLANTED)
def planted(request, path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path.rename(path.with_name("good"))
    try:
        PLANTED[request.param](path)
    except PermissionError:
        pytest.skip("devices cannot be made here")
    return path


def test_what_is_planted_is_refused_at_once(files, shelf, planted, store):
    begun = time.monotonic()
    assert read(files, shelf) == "planted"
    assert time.monotonic() - begun < AT_ONCE_S
    assert not os.path.lexists(planted)
    assert len(aside(store)) == 1
    assert planted.with_name("good").read_bytes() == header() + PAYLOAD


def test_what_is_planted_does_not_stand_in_the_way_of_a_block(files, shelf, planted):
    files.write(shelf, NAME, memoryview(PAYLOAD))
    assert read(files, shelf) == PAYLOAD
    assert planted.with_name("good").read_bytes() == header() + PAYLOAD


def test_what_is_planted_is_not_found(tmp_path, weights):
    """A whole instance over a folder full of pipes, links and folders."""
    transfer = transfer_config("SharedStorageConnector", shared_storage_path=str(tmp_path))
    with Instance(transfer) as first:
        first.serve("a", range(30))
    names = sorted((tmp_path / FORMAT).glob("blocks-*/*"))
    for each, plant in zip(names, [os.mkfifo, plant_folder, PLANTED["link"]] * 3, strict=False):
        each.unlink()
        plant(each)
    with Instance(transfer) as second:
        request = second.serve("b", range(30))
        assert (request.num_loaded, request.output_token_ids) == (0, answer(range(30)))
        assert second.serve("c", range(30)).num_loaded == 28


@pytest.mark.parametrize("what", ["link", "file", "pipe"])
def test_a_shelf_that_is_none_is_set_aside(store, files, tmp_path, what):
    place = tmp_path / FORMAT / SHELF
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    plant = {"link": lambda: place.symlink_to(elsewhere), "file": place.touch}
    plant.get(what, lambda: os.mkfifo(place))()
    with pytest.raises(StorageError):
        store.shelf(SHELF)
    with store.make_shelf(SHELF) as shelf:
        files.write(shelf, NAME, memoryview(PAYLOAD))
        assert read(files, shelf) == PAYLOAD
    assert names_in(elsewhere) == []


def test_a_shelf_on_a_disk_that_fails_is_not_set_aside(store, files, shelf, path, monkeypatch):
    opened = os.open

    def failing(name, *args, **kwargs):
        if name == SHELF:
            raise OSError(5, "Input/output error")
        return opened(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(StorageError, match="Input/output error"):
        store.make_shelf(SHELF)
    monkeypatch.undo()
    assert read(files, shelf) == PAYLOAD


# FAULTS 26


def test_a_block_that_goes_while_it_is_read_is_read_to_its_end(files, shelf, path, monkeypatch):
    preadv = os.preadv

    def evicting(fd, buffers, offset):
        path.unlink(missing_ok=True)
        path.write_bytes(header(key=OTHER) + PAYLOAD[::-1])
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", evicting)
    assert read(files, shelf) == PAYLOAD


def test_a_file_that_shrinks_while_it_is_read_is_a_miss(files, shelf, path, monkeypatch):
    preadv = os.preadv

    def shrinking(fd, buffers, offset):
        os.truncate(path, 100)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    assert read(files, shelf) == "length"


@pytest.mark.parametrize("call", ["preadv", "open"])
def test_a_block_that_the_disk_cannot_read_is_not_promised_again(
    files, path, store, monkeypatch, call
):
    """Else every request with that beginning would wait for it, and compute it after all."""
    shelf, real = store.shelf(SHELF), getattr(os, call)

    def failing(what, *args, **kwargs):
        if call == "open" and what != path.name:
            return real(what, *args, **kwargs)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        assert read(files, shelf) == "broken"
    assert (files.has(shelf, NAME), len(aside(store))) == (False, 1)
    files.write(shelf, NAME, memoryview(PAYLOAD))
    assert read(files, shelf) == PAYLOAD
    shelf.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE])
@pytest.mark.usefixtures("path")
def test_a_block_that_could_not_be_read_for_a_moment_stays(
    files, shelf, store, monkeypatch, number
):
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(number, "for now")))
        assert read(files, shelf) == "unreadable"
    assert (read(files, shelf), aside(store)) == (PAYLOAD, [])


def test_a_shelf_that_was_removed_takes_no_block_with_it(store, files, tmp_path):
    """Another instance resets the cache between our opening the shelf and our writing to it."""
    with store.make_shelf(SHELF) as shelf:
        shutil.rmtree(shelf.path)
        with pytest.raises(StorageError, match="No such file"):
            files.write(shelf, NAME, memoryview(PAYLOAD))
    assert names_in(f"{store.path}/incoming") == []
    with store.make_shelf(SHELF) as shelf:
        files.write(shelf, NAME, memoryview(PAYLOAD))
        assert read(files, shelf) == PAYLOAD


# -- room


def fill(files, shelf, number, at=0):
    for n in range(number):
        files.write(shelf, bytes([at + n]) * 36, memoryview(PAYLOAD), (at + n) * 10**9)


def kept(shelf):
    return [int(name[:2], 16) for name in shelf.names()]


def test_room_is_made_by_the_oldest_use_on_whatever_shelf(store, files, shelf):
    with store.make_shelf(shelf_name(b"root", "older")) as older:
        fill(files, older, 4)
        fill(files, shelf, 16, at=10)
        counts = Counts()
        room = Room(store, 20 * files.file_nbytes, counts)
        assert room.make(files.file_nbytes)
    # A bound of 20, a block to come, and an eighth of the bound so that it lasts a while.
    assert kept(shelf) == list(range(10, 26))
    assert counts.numbers() == {"evicted_total": 4}
    assert store.shelf(shelf_name(b"root", "older")) is None


NO_SHELVES = {
    "a file": lambda path: path.write_bytes(b""),
    "a link": lambda path: path.symlink_to("/"),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("what", NO_SHELVES)
def test_what_is_no_shelf_does_not_keep_room_from_being_made(store, files, shelf, what):
    NO_SHELVES[what](Path(store.path) / "blocks-planted")
    fill(files, shelf, 4)
    counts = Counts()
    room = Room(store, 4 * files.file_nbytes, counts)
    assert room.make(files.file_nbytes)
    assert kept(shelf) == [2, 3]
    assert counts.numbers()["shelves_skipped_planted_total"] == 1
    assert "blocks-planted" in names_in(store.path)


def test_a_disk_that_fails_is_not_taken_for_a_shelf_that_is_none(store, shelf, monkeypatch):
    def failing(name):
        raise StorageError(name) from OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store, "shelf", failing)
    with pytest.raises(StorageError):
        Room(store, 1000, Counts()).make(10)


def test_one_use_keeps_a_block(store, files, shelf):
    fill(files, shelf, 20)
    assert read(files, shelf, bytes([0]) * 36) == PAYLOAD
    assert Room(store, 20 * files.file_nbytes, Counts()).make(files.file_nbytes)
    assert kept(shelf) == [0, *range(5, 20)]


def test_what_others_write_is_seen(store, files, shelf):
    """Two rooms in one folder, each of which writes as much as it may."""
    bound = 128 * files.file_nbytes
    rooms = [Room(store, bound, Counts()) for _ in range(2)]
    most = 0
    for n in range(250):
        assert rooms[n % 2].make(files.file_nbytes)
        files.write(shelf, bytes([n]) * 36, memoryview(PAYLOAD))
        most = max(most, len(shelf.names()))
    assert 120 < most <= 128 + 2 * 2


# -- who is still writing


def test_what_a_dead_writer_has_left_is_swept_and_a_living_ones_is_not(tmp_path, store, zygote):
    living = zygote.spawn("storage_jobs:hold_incoming", str(tmp_path), "living")
    dead = zygote.spawn("storage_jobs:hold_incoming", str(tmp_path), "dead")
    incoming = tmp_path / FORMAT / "incoming"
    deadline = time.monotonic() + 10
    while len([each for each in tmp_path.iterdir() if each.suffix == ".held"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    dead.kill()
    dead.wait(5)
    os.mkfifo(incoming / "pipe")
    Store(str(tmp_path)).close()
    assert names_in(incoming) == ["living"]
    living.kill()
    living.wait(5)
    Store(str(tmp_path)).close()
    assert names_in(incoming) == []


def test_nobody_sweeps_what_is_just_being_written(tmp_path, files, shelf, monkeypatch):
    pwritev = os.pwritev

    def sweeping(fd, buffers, offset):
        Store(str(tmp_path)).close()
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", sweeping)
    files.write(shelf, NAME, memoryview(PAYLOAD))
    assert read(files, shelf) == PAYLOAD


def test_nobody_sweeps_what_has_no_lock_yet(tmp_path, files, shelf, store, monkeypatch):
    """A sweep comes between a file's creation and its lock; the writer takes another file."""
    flock, swept = fcntl.flock, []

    def sweeping(fd, how):
        if not swept:
            swept.extend(names_in(f"{store.path}/incoming"))
            Store(str(tmp_path)).close()
            assert names_in(f"{store.path}/incoming") == []
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", sweeping)
    files.write(shelf, NAME, memoryview(PAYLOAD))
    assert len(swept) == 1
    assert read(files, shelf) == PAYLOAD
    assert names_in(f"{store.path}/incoming") == []


def test_a_writer_that_meets_a_sweep_takes_another_file(files, shelf, store, monkeypatch):
    """The sweep has the lock already, and is about to remove the file."""
    flock, held = fcntl.flock, []

    def locking_first(fd, how):
        if not held:
            held.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
            flock(held[0], how)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", locking_first)
    files.write(shelf, NAME, memoryview(PAYLOAD))
    os.close(held[0])
    assert read(files, shelf) == PAYLOAD
    assert names_in(f"{store.path}/incoming") == []


def test_a_sweep_keeps_the_lock_until_the_file_is_gone(tmp_path, store, monkeypatch):
    """Else a writer could take the lock in between, and lose a file that it rightly has."""
    abandoned = Path(store.path) / "incoming" / "dead.tmp"
    abandoned.write_bytes(b"half")
    unlink, met = os.unlink, []

    def meeting(name, **where):
        if name == abandoned.name:
            fd = os.open(abandoned, os.O_RDONLY)
            met.append(lock(fd))
            os.close(fd)
        unlink(name, **where)

    monkeypatch.setattr(os, "unlink", meeting)
    Store(str(tmp_path)).close()
    assert (met, abandoned.exists()) == ([False], False)


def test_whatever_is_swept_meanwhile_every_block_is_written(tmp_path, files, shelf):
    ended = threading.Event()

    def sweep():
        sweeping = Store(str(tmp_path))
        while not ended.is_set():
            sweeping.sweep()
        sweeping.close()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for n in range(500):
            files.write(shelf, n.to_bytes(36, "big"), memoryview(PAYLOAD))
    finally:
        ended.set()
        sweeper.join()
    assert len(shelf.names()) == 500


def test_where_every_new_file_is_taken_away_a_writer_gives_up(files, shelf, store, monkeypatch):
    def taking(fd, how):
        for name in names_in(f"{store.path}/incoming"):
            Path(store.path, "incoming", name).unlink()

    monkeypatch.setattr(fcntl, "flock", taking)
    with pytest.raises(StorageError, match="taken away before it could be written"):
        files.write(shelf, NAME, memoryview(PAYLOAD))
    assert read(files, shelf) == "absent"


@pytest.fixture
def no_locks(monkeypatch):
    """A file system that has none."""

    def none(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)


@pytest.mark.parametrize(("age_s", "stays"), [(60.0, True), (7200.0, False)])
@pytest.mark.usefixtures("no_locks")
def test_without_locks_what_is_old_is_abandoned(tmp_path, store, age_s, stays):
    left = Path(store.path) / "incoming" / "left.tmp"
    left.touch()
    os.utime(left, (time.time() - age_s,) * 2)
    Store(str(tmp_path)).close()
    assert left.exists() == stays


@pytest.mark.usefixtures("no_locks")
def test_blocks_are_written_without_locks_as_well(files, shelf):
    files.write(shelf, NAME, memoryview(PAYLOAD))
    assert read(files, shelf) == PAYLOAD


def test_a_shelf_on_its_way_out_is_swept(tmp_path, store, files, shelf, path):
    Path(shelf.path).rename(tmp_path / FORMAT / "removed-0")
    Store(str(tmp_path)).close()
    assert names_in(tmp_path / FORMAT) == ["aside", "incoming"]
