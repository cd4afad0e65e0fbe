"""The file engine passes the kit that third parties get, and survives disks and deaths."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from wtransfer.checkpoint.safetensors import CheckpointWriter, lay_out
from wtransfer.checkpoint.source import check
from wtransfer.checkpoint.versions import CURRENT_NAME, VersionStore, VersionWriter
from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.engines import file as file_module
from wtransfer.engines.file import ROOT_VARIABLE, FileInitInfo, FileWeightTransferEngine
from wtransfer.errors import (
    DescriptorLimitError,
    NotInitializedError,
    SourceError,
    StorageError,
    TruncatedError,
    WTransferError,
)
from wtransfer.manifest import Piece
from wtransfer.testing.contents import contents
from wtransfer.testing.engine import EngineConformance
from wtransfer.testing.zygote import Zygote
from wtransfer.transport.address import random_address
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.worker.session import WorkerSession

TOKEN = "a token of these tests"


class OnAFolder(EngineConformance):
    engine = "file"
    more: ClassVar = {}

    def options_in(self, folder):
        return {"path": str(folder / "store"), **self.more}


class TestFile(OnAFolder):
    pass


@pytest.mark.nightly
class TestFileInSmallPieces(OnAFolder):
    more: ClassVar = {"bucket_nbytes": 100, "shard_nbytes": 1000}


def strangers(store):
    """Return what is in the store beside what should be."""
    known = {CURRENT_NAME, *(each.folder for each in store.versions())}
    return sorted({each.name for each in store.root.iterdir()} - known)


# -- the worker's side


@pytest.fixture
def worker(store):
    store.root.mkdir()
    engine = FileWeightTransferEngine(WeightTransferConfig("file"), ParallelConfig())
    engine.init_transfer_engine(FileInitInfo(str(store.root)))
    yield engine
    engine.shutdown()


INFO = {
    "folder": "f",
    "file": "model.safetensors",
    "names": ["a", "b"],
    "dtype_names": ["uint8", "float32"],
    "shapes": [[3], [2]],
    "offsets": [0, 8],
}


def receive(worker, **changes):
    received = []
    worker.receive_weights(worker.parse_update_info({**INFO, **changes}), received.extend)
    return dict(received)


def write(store, data):
    (store.root / "f").mkdir()
    (store.root / "f" / "model.safetensors").write_bytes(data)


def test_a_bucket_is_read_at_its_offsets(worker, store):
    write(store, b"abc_____" + torch.tensor([1.0, 2.0]).numpy().tobytes())
    got = receive(worker)
    assert {name: t.tolist() for name, t in got.items()} == {"a": [97, 98, 99], "b": [1.0, 2.0]}


@pytest.mark.parametrize("length", range(16))
def test_a_file_that_is_too_short_is_refused_before_anything_is_allocated(worker, store, length):
    write(store, bytes(length))
    with pytest.raises(TruncatedError, match="cut off") as caught:
        receive(worker)
    assert caught.value.piece == ("a" if length < 3 else "b")
    with pytest.raises(TruncatedError):
        receive(worker, shapes=[[3], [2**40]])


@pytest.mark.parametrize("name", ["..", ".", "", "/etc", "../f", "f/g", "f\0"])
@pytest.mark.parametrize("field", ["folder", "file"])
def test_no_info_leads_out_of_the_folder(worker, field, name):
    with pytest.raises(ValueError, match="no plain name"):
        receive(worker, **{field: name})


@pytest.mark.parametrize("field", ["folder", "file"])
def test_no_link_is_followed(worker, store, field):
    write(store, bytes(16))
    planted = store.root / "f" if field == "folder" else store.root / "f" / INFO["file"]
    planted.rename(store.root / "aside")
    planted.symlink_to(store.root / "aside")
    with pytest.raises(StorageError):
        receive(worker)


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": [0]},
        {"offsets": [0, -1]},
        {"offsets": [0, True]},
        {"offsets": [0, 2**63]},
        {"dtype_names": ["uint8", "__class__"]},
        {"shapes": [[3], [-2]]},
        {"shapes": [[3], [2**62, 2**62]]},
    ],
    ids=str,
)
def test_malformed_update_infos_are_refused(worker, changes):
    with pytest.raises(ValueError, match="Invalid update_info for FileWeightTransferEngine"):
        receive(worker, **changes)


def test_a_worker_that_has_the_folder_elsewhere_says_so_by_a_variable(
    publishing, store, weights, tmp_path, monkeypatch
):
    moved = tmp_path / "mounted here"
    moved.symlink_to(store.root)
    made = publishing()
    monkeypatch.setenv(ROOT_VARIABLE, str(moved))
    assert made.publish("v1").ok
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "nothing"))
    late = made.join().session.status().worker
    (row,) = [each for each in made.publish("v2").workers if each.worker == late]
    assert (row.outcome, type(row.error)) == ("behind", StorageError)
    assert f"mount it here, or set {ROOT_VARIABLE}" in row.error.message


def test_a_worker_without_a_root_says_so(worker):
    worker.shutdown()
    with pytest.raises(NotInitializedError):
        receive(worker)


# -- files


def test_a_file_that_is_cut_while_it_is_sent_ends_the_round(publishing, store, monkeypatch):
    made = publishing()
    assert made.publish("v1").ok
    before = made.members[0].contents
    made.source["layer.0"] += 1
    monkeypatch.setattr(
        CheckpointWriter, "sync", lambda self, file: os.ftruncate(self._fds[file], 400)
    )
    with pytest.raises(TruncatedError, match=r"'layer\.\d'"):
        made.publish("v2")
    monkeypatch.undo()
    assert (made.members[0].session.version, made.members[0].contents) == ("v1", before)
    assert made.publish("v3").ok
    assert [each.version for each in store.versions()] == ["v1", "v3"]


def test_the_one_name_that_the_format_has_for_itself_is_refused():
    with pytest.raises(SourceError, match="__metadata__"):
        lay_out([Piece("__metadata__", "uint8", (1,))], 100)


def test_a_tensor_is_never_split_and_begins_where_its_dtype_may():
    pieces = [Piece("a", "bool", (3,)), Piece("b", "float64", (2,)), Piece("c", "int32", (50,))]
    shards = lay_out(pieces, 100)
    assert [list(shard.offsets) for shard in shards] == [["b", "a"], ["c"]]
    assert all(shard.offsets[n] % 8 == 0 for shard in shards for n in shard.offsets if n != "a")


# FAULTS 33


class Nth:
    """Lets the N-th call that goes to the disk fail."""

    CALLS = (
        *("open", "mkdir", "pwritev", "fsync", "fdatasync", "rename", "replace"),
        *("rmdir", "unlink", "listdir"),
    )

    def __init__(self, monkeypatch, number):
        self.number, self.left, self.fired = number, None, None
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def arm(self, n):
        # What is still removed of the round before would be counted, now so, now otherwise.
        for thread in threading.enumerate():
            if thread.name == "wtransfer-remove":
                thread.join(10.0)
        self.left, self.fired = n, None

    def _counted(self, name, call):
        def counted(*arguments, **options):
            # Only what is done by descriptor is the engine's.
            ours = name in ("pwritev", "fsync", "fdatasync") or options
            if self.left is not None and ours:
                self.left -= 1
                if self.left < 0:
                    self.left, self.fired = None, name
                    raise OSError(self.number, os.strerror(self.number))
            return call(*arguments, **options)

        return counted


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE], ids=errno.errorcode.get)
def test_any_call_to_the_disk_may_fail(publishing, store, monkeypatch, number, caplog):
    caplog.set_level("CRITICAL")
    made = publishing(shard_nbytes=100, keep=2)
    assert made.publish("v").ok
    nth = Nth(monkeypatch, number)
    fired = []
    for n in itertools.count():
        before = made.members[0].contents
        made.source["layer.0"] += 1
        nth.arm(n)
        with contextlib.suppress(StorageError, DescriptorLimitError, WTransferError):
            made.publish(f"bad {n}")
        if nth.fired is None:
            break
        fired.append(nth.fired)
        assert made.members[0].contents in (before, contents(made.source))
        made.source["layer.0"] += 1
        assert made.publish("good").ok, nth.fired
        assert made.members[0].contents == contents(made.source)
    assert {"open", "mkdir", "pwritev", "fsync", "rename", "replace"} <= set(fired)
    monkeypatch.undo()
    made.close()
    # The next publisher finds no leftovers.
    made = publishing(keep=2)
    assert made.publish("last").ok
    made.close()
    assert strangers(store) == []
    assert store.versions()[-1].version == "last"


def test_a_full_disk_ends_the_round_and_the_next_that_fits_works(fleet, mount_tmpfs):
    small_disk = mount_tmpfs("4m")
    weights = {"w": torch.zeros(300_000)}
    made = fleet(weights, engine="file", options={"path": str(small_disk / "store"), "keep": 2})
    member = made.join()
    assert made.publish("v1").ok
    weights["w"] = torch.zeros(900_000)
    with pytest.raises(WTransferError):
        made.publish("does not fit the model")
    hog = small_disk / "hog"
    hog.write_bytes(bytes(2 << 20))
    weights["w"] = torch.ones(300_000)
    with pytest.raises(StorageError, match="No space left on device; free some room there"):
        made.publish("v2")
    assert (member.session.version, float(member.model["w"].max())) == ("v1", 0.0)
    hog.unlink()
    assert made.publish("v3").ok
    made.close()
    assert strangers(VersionStore(small_disk / "store")) == []


def test_the_trainer_holds_one_tensor_in_memory_whatever_the_round(publishing, monkeypatch):
    sizes = []
    make = file_module.own_memory
    monkeypatch.setattr(file_module, "own_memory", lambda n: sizes.append(n) or make(n))
    made = publishing(bucket_nbytes=128)
    made.publish("v1")
    made.publish("v2")
    # Four tensors of 48 bytes.
    assert sizes == [0, 48]


# -- deaths (FAULTS 13, 34)


@pytest.fixture(scope="module")
def nursery():
    with Zygote(preload=["torch", "test_file"], paths=[Path(__file__).parent]) as zygote:
        yield zygote


def publish_for_ever(root, address):
    """Runs in a child: publish v1, v2, ... whose every number is that of the label."""
    weights = {f"layer.{i}": torch.zeros(1 << 14) for i in range(8)}
    options = {"path": root, "keep": 2, "bucket_nbytes": 1 << 16, "shard_nbytes": 1 << 18}
    with Publisher(
        weights, engine="file", options=options, listen=address, token=TOKEN
    ) as publisher:
        publisher.wait_for_workers(1, 20.0)
        for number in itertools.count(int(time.monotonic() * 1000)):
            for tensor in weights.values():
                tensor.fill_(number % 1_000_003)
            publisher.publish(f"v{number % 1_000_003}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_kills", [15, pytest.param(150, marks=pytest.mark.nightly)])
def test_a_publisher_killed_at_any_point_leaves_workers_whole_and_nothing_else(
    nursery, store, num_kills
):
    rng = random.Random(5)
    address = random_address()
    model = {f"layer.{i}": torch.zeros(1 << 14) for i in range(8)}
    seen = set()
    with WorkerSession(model, join=address, token=TOKEN) as session:
        for _ in range(num_kills):
            child = nursery.spawn("test_file:publish_for_ever", str(store.root), address)
            before, end = session.version, time.monotonic() + 20.0
            while session.version == before:
                assert time.monotonic() < end
                session.commit_pending(0.02)
            until = time.monotonic() + rng.uniform(0.0, 0.15)
            while time.monotonic() < until:
                session.commit_pending(0.005)
            child.kill()
            child.wait(5.0)
            session.commit_pending(0.0)
            seen.add(_whole(session, model))
            _listed_are_whole(store)
    assert len(seen) == num_kills
    _next_publisher_sweeps(store)


def _whole(session, model):
    numbers = {float(value) for tensor in model.values() for value in (tensor.min(), tensor.max())}
    assert [f"v{int(number)}" for number in numbers] == [session.version]
    return session.version


def _listed_are_whole(store):
    for version in store.versions():
        manifest, wrong = check(store.folder_of(version))
        assert (manifest.fingerprint, wrong) == (version.fingerprint, {})


def _next_publisher_sweeps(store):
    VersionWriter(store.root, 2).close()
    assert strangers(store) == []
    shutil.rmtree(store.root)
