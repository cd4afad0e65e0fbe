"""A folder of versions: listed ones are whole, others are removed, nothing else is touched."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.checkpoint.versions import CURRENT_NAME, Version, VersionWriter
from wtransfer.errors import (
    DigestMismatchError,
    ManifestError,
    RoundAbortedError,
    SourceError,
    StorageInUseError,
    VersionNotKeptError,
)
from wtransfer.testing.contents import contents
from wtransfer.transport.files import LOCK_NAME, Folder
from wtransfer.weight_sync.trainer.publisher import Publisher


def publish(made, label, *, change=True):
    made.source["layer.0"] += 1 if change else 0
    report = made.publish(label)
    assert report.ok
    return contents(made.source), report.fingerprint


def go_back(made, label):
    return made.finish(made.publisher.rollback(label, wait=False))


def labels(store):
    return [each.version for each in store.versions()]


def folders(store):
    return sorted(each.name for each in store.root.iterdir() if each.is_dir())


def settled(store, number):
    """Return the folders once there are so many: old ones go on a thread of its own."""
    end = time.monotonic() + 5.0
    while len(found := folders(store)) != number and time.monotonic() < end:
        time.sleep(0.005)
    return found


# -- kept


def test_keep_bounds_the_versions_and_the_last_is_current(publishing, store):
    made = publishing(keep=2)
    for number in range(4):
        publish(made, f"v{number}")
    assert labels(store) == ["v2", "v3"]
    assert [each.folder for each in store.versions()] == settled(store, 2)
    assert [each.version for each in made.publisher.kept()] == ["v2", "v3"]


def test_a_version_is_a_checkpoint_that_others_can_read(publishing, store):
    made = publishing()
    sent, fingerprint = publish(made, "v1")
    folder = store.folder_of(store.versions()[-1])
    assert contents(load_file(folder / "model.safetensors")) == sent
    assert json.loads((folder / "wtransfer.json").read_text())["fingerprint"] == fingerprint


def test_many_files_are_a_checkpoint_with_an_index(publishing, store):
    made = publishing(shard_nbytes=50)
    sent, _ = publish(made, "v1")
    folder = store.folder_of(store.versions()[-1])
    assert contents(dict(CheckpointSource(folder).iter_full())) == sent
    assert [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)] == sorted(
        each.name for each in folder.glob("*.safetensors")
    )


def test_the_same_weights_are_kept_once(publishing, store):
    made = publishing()
    sent, _ = publish(made, "a")
    publish(made, "b", change=False)
    assert labels(store) == ["a", "b"]
    assert len(settled(store, 1)) == 1
    publish(made, "c")
    assert go_back(made, "a").ok
    assert made.members[0].contents == sent
    assert labels(store) == ["b", "c", "a"]


@pytest.mark.parametrize(
    "label",
    [
        "..",
        "/etc/passwd",
        "../../up",
        "a\0b",
        "n" * 256,
        "重み",
        "\n",
        LOCK_NAME,
        CURRENT_NAME,
        " ",
    ],
    ids=repr,
)
def test_any_label_is_harmless_and_found_again(publishing, store, label):
    made = publishing()
    sent, _ = publish(made, label)
    publish(made, "other")
    assert go_back(made, label).ok
    assert (made.members[0].session.version, made.members[0].contents) == (label, sent)
    # By what the listing itself says: old folders are being removed.
    files = {each.name for each in os.scandir(store.root) if not each.is_dir()}
    assert files == {CURRENT_NAME, LOCK_NAME}
    assert [e.name for e in store.root.parent.iterdir()] == [store.root.name]


FIRST_FINGERPRINT = "f6e7bffea159dcde648b11ed127d1ec7"
FIRST_INDEX = {
    "format": "wtransfer-versions/1",
    "versions": [
        {
            "version": "v1",
            "fingerprint": FIRST_FINGERPRINT,
            "nbytes": 8,
            "committed_at": 1700000000.5,
            "folder": "00000001-f6e7bffea159",
        }
    ],
}
FIRST_PIECE = {"name": "a", "dtype": "float32", "shape": [2]}
FIRST_MANIFEST = {
    "format": "wtransfer/1",
    "version": "v1",
    "fingerprint": FIRST_FINGERPRINT,
    "created_at": 1700000000.25,
    "algorithm": "xxh3-128",
    "pieces": [FIRST_PIECE | {"digest": "4533ce61c4655ba3c3e077b25dd1d769"}],
}


def test_a_folder_of_the_first_release_is_read(store):
    (found,) = FIRST_INDEX["versions"]
    folder = store.root / found["folder"]
    folder.mkdir(parents=True)
    (store.root / CURRENT_NAME).write_text(json.dumps(FIRST_INDEX))
    (folder / "wtransfer.json").write_text(json.dumps(FIRST_MANIFEST))
    save_file({"a": torch.tensor([1.0, 2.0])}, folder / "model.safetensors")
    (version,) = store.versions()
    assert msgspec.to_builtins(version) == found
    source = store.source(version)
    assert source.manifest.version == "v1"
    assert contents(dict(source.iter_full())) == contents({"a": torch.tensor([1.0, 2.0])})


# -- gone back to


def test_a_rollback_is_bit_identical_and_a_version_like_any(publishing, store):
    made = publishing()
    first, fingerprint = publish(made, "v1")
    publish(made, "v2")
    report = go_back(made, "v1")
    assert report.ok
    assert (report.fingerprint, made.members[0].contents) == (fingerprint, first)
    assert labels(store) == ["v2", "v1"]
    assert len(settled(store, 2)) == 2
    late = made.join()
    assert late.session.commit_pending(5.0)
    assert late.contents == first


def test_the_first_act_of_a_publisher_may_be_to_go_back(publishing, store):
    made = publishing()
    first, _ = publish(made, "v1")
    publish(made, "v2")
    made.close()
    made = publishing()
    assert go_back(made, "v1").ok
    assert made.members[0].contents == first


def test_a_label_that_was_used_twice_means_the_later_one(publishing):
    made = publishing()
    publish(made, "v")
    second, _ = publish(made, "v")
    publish(made, "w")
    assert go_back(made, "v").ok
    assert made.members[0].contents == second


def test_rollback_to_an_unknown_label_lists_the_versions_that_are_kept(publishing):
    made = publishing(keep=1)
    publish(made, "v1")
    publish(made, "v2")
    with pytest.raises(VersionNotKeptError, match="no version 'v1' to go back to; kept are: 'v2'"):
        made.publisher.rollback("v1")


def test_a_new_folder_has_no_versions(store, weights):
    options = {"path": str(store.root)}
    with Publisher(weights, engine="file", options=options) as publisher:
        assert list(publisher.kept()) == []


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_version_is_not_gone_back_to(publishing, store):
    made = publishing()
    publish(made, "v1")
    second, _ = publish(made, "v2")
    flip(store.folder_of(store.versions()[0]) / "model.safetensors")
    with pytest.raises((SourceError, DigestMismatchError), match=r"'layer\.3'"):
        go_back(made, "v1")
    assert (made.members[0].session.version, made.members[0].contents) == ("v2", second)
    assert labels(store) == ["v1", "v2"]
    assert go_back(made, "v2").ok


def test_the_weights_of_another_version_are_not_gone_back_to(publishing, store):
    made = publishing()
    publish(made, "v1")
    publish(made, "v2")
    first, second = (store.folder_of(each) for each in store.versions())
    shutil.rmtree(first)
    shutil.copytree(second, first)
    with pytest.raises(ManifestError, match="should hold the weights with the fingerprint"):
        made.publisher.rollback("v1")


@pytest.mark.parametrize("linked", ["", "model.safetensors", "wtransfer.json"])
def test_a_rollback_follows_no_symbolic_link(publishing, store, linked):
    made = publishing()
    publish(made, "v1")
    second, _ = publish(made, "v2")
    path = store.folder_of(store.versions()[0]) / linked
    path.rename(store.root / "aside")
    path.symlink_to(store.root / "aside")
    with pytest.raises((SourceError, ManifestError), match="symbolic link"):
        made.publisher.rollback("v1")
    assert made.members[0].contents == second


# -- not committed


@pytest.mark.parametrize("how", ["aborted", "failed", "dry run"])
def test_uncommitted_versions_are_removed_and_never_listed(publishing, store, how):
    made = publishing()
    publish(made, "v1")
    made.source["layer.0"] += 1
    if how == "aborted":
        round_ = made.publisher.publish("v2", wait=False)
        round_.abort("the test says so")
        with pytest.raises(RoundAbortedError):
            made.finish(round_)
    elif how == "failed":
        whole = made.source["layer.2"]
        made.source["layer.2"] = freed = whole.clone()
        freed.untyped_storage().resize_(0)
        with pytest.raises(SourceError, match=r"'layer\.2' has less memory"):
            made.publish("v2")
        made.source["layer.2"] = whole
    else:
        assert made.finish(made.publisher.publish("v2", wait=False, dry_run=True)).ok
    assert labels(store) == ["v1"]
    assert len(settled(store, 1)) == 1
    made.source["layer.0"] += 1
    assert publish(made, "v3")
    assert labels(store) == ["v1", "v3"]


# -- one publisher at a time


def test_a_second_publisher_is_refused_and_told_of_the_first(publishing, store, monkeypatch):
    monkeypatch.setattr("wtransfer.transport.files.FolderLock.__init__.__defaults__", (0.1,))
    first = publishing()
    publish(first, "v1")
    second = publishing()
    with pytest.raises(StorageInUseError, match=f"in use by process {os.getpid()} on "):
        second.publish("v2")
    assert labels(store) == ["v1"]
    first.close()
    assert publish(second, "v2")
    assert labels(store) == ["v1", "v2"]


def test_a_publisher_whose_lock_file_was_removed_loses_no_version_of_another(
    publishing, store, monkeypatch
):
    monkeypatch.setattr("wtransfer.transport.files.FolderLock.__init__.__defaults__", (0.1,))
    first = publishing()
    publish(first, "v1")
    (store.root / LOCK_NAME).unlink()
    second = publishing()
    publish(second, "v2")
    with pytest.raises(StorageInUseError, match=f"in use by process {os.getpid()} on "):
        first.publish("v3")
    assert labels(store) == ["v1", "v2"]
    second.close()
    assert publish(first, "v4")
    assert labels(store) == ["v1", "v2", "v4"]


def test_a_writer_that_loses_its_lock_while_it_writes_changes_nothing(publishing, store):
    publish(publishing(), "v1")
    made = VersionWriter(store.root.with_name("other"), 3)
    name, folder = made.begin()
    folder.close()
    (store.root.with_name("other") / LOCK_NAME).unlink()
    taken_over = VersionWriter(store.root.with_name("other"), 3)
    for change in (
        lambda: made.publish(name, "0" * 32),
        lambda: made.commit(store.versions()[0]),
    ):
        with pytest.raises(StorageInUseError, match="removed or replaced by hand"):
            change()
    made.close()
    # The lock file that is there now is the other writer's.
    assert taken_over.begin()[1].close() is None
    taken_over.close()


def test_others_can_never_write_to_a_version_whatever_the_umask(publishing, store):
    before = os.umask(0)
    try:
        publish(publishing(shard_nbytes=50), "v1")
    finally:
        os.umask(before)
    found = [store.root, *store.root.rglob("*")]
    assert [each for each in found if each.stat().st_mode & 0o002] == []
    assert len(found) == 10


def test_closing_waits_for_every_removal(publishing, store, monkeypatch):
    made = publishing(keep=1)
    publish(made, "v1")
    remove, calls = Folder.remove, []

    def first_is_slow(folder, name):
        calls.append(name)
        if len(calls) == 1:
            time.sleep(0.3)
        remove(folder, name)

    monkeypatch.setattr(Folder, "remove", first_is_slow)
    publish(made, "v2")
    publish(made, "v3")
    made.close()
    assert [each.name for each in threading.enumerate() if each.name == "wtransfer-remove"] == []
    assert len(folders(store)) == 1


@pytest.fixture
def on_removal(monkeypatch):
    """Call something before a thread that removes superseded versions is started."""
    start = threading.Thread.start

    def set_call(call):
        def started(thread):
            if thread.name == "wtransfer-remove":
                call()
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", started)

    return set_call


def committable(store):
    """Return a writer, and a version that it has written and not committed."""
    made = VersionWriter(store.root, 1)
    name, folder = made.begin()
    folder.close()
    found = made.publish(name, "0" * 32)
    return made, Version("v1", "0" * 32, 0, 0.0, found)


def test_closing_while_a_version_is_committed_waits_for_its_removals(store, on_removal):
    # An engine that is left behind in a commit is closed from another thread.
    made, version = committable(store)
    starting, go_on = threading.Event(), threading.Event()
    on_removal(lambda: (starting.set(), go_on.wait(5.0)))
    with ThreadPoolExecutor(2) as pool:
        committing = pool.submit(made.commit, version)
        assert starting.wait(5.0)
        closing = pool.submit(made.close)
        wait([closing], 0.1)
        go_on.set()
        committing.result(5.0)
        closing.result(5.0)
    assert [each.name for each in threading.enumerate() if each.name == "wtransfer-remove"] == []
    assert labels(store) == ["v1"]
    assert not (store.root / LOCK_NAME).exists()


def test_commit_whose_removal_gets_no_thread_keeps_no_other_publisher_out(store, on_removal):
    made, version = committable(store)

    def refuse():
        raise RuntimeError("can't start new thread")

    on_removal(refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        made.commit(version)
    made.close()
    assert labels(store) == ["v1"]
    assert not (store.root / LOCK_NAME).exists()


# -- leftovers


def test_leftovers_of_the_dead_are_swept_and_nothing_else(publishing, store):
    made = publishing()
    publish(made, "v1")
    made.close()
    root = store.root
    for name in (".incoming-0123456789abcdef", "00000099-0123456789ab", "mine", "1-0"):
        (root / name).mkdir()
        (root / name / "file").write_text("x")
    for name in (f".{CURRENT_NAME}.0123456789abcdef.tmp", ".other.0123456789abcdef.tmp", "notes"):
        (root / name).write_text("x")
    (root / ".incoming-fedcba9876543210").symlink_to(root / "mine")
    VersionWriter(root, 3).close()
    assert {e.name for e in root.iterdir()} == {
        CURRENT_NAME,
        store.versions()[0].folder,
        "mine",
        "1-0",
        ".other.0123456789abcdef.tmp",
        "notes",
    }
    assert (root / "mine" / "file").read_text() == "x"


VERSION = {
    "version": "v",
    "fingerprint": "0" * 32,
    "nbytes": 0,
    "committed_at": 0,
    "folder": "00000001-000000000000",
}


@pytest.mark.parametrize(
    "listing",
    [
        "",
        "{",
        "[]",
        '{"format": "wtransfer-versions/2", "versions": []}',
        *(
            json.dumps({"format": "wtransfer-versions/1", "versions": [VERSION | change]})
            for change in (
                {"folder": "../up"},
                {"folder": "00000001-000000000000\n"},
                {"folder": "/etc"},
                {"fingerprint": "local:1"},
                {"nbytes": -1},
                {"version": None},
            )
        ),
        "[" * 100_000,
        " " * (5 << 20),
    ],
    ids=lambda text: text[:80].strip(),
)
def test_a_damaged_index_stops_writers_and_nothing_is_removed(publishing, store, listing):
    made = publishing()
    publish(made, "v1")
    made.close()
    (store.root / CURRENT_NAME).write_text(listing)
    before = folders(store)
    with pytest.raises(ManifestError, match=r"current\.json' cannot be read"):
        VersionWriter(store.root, 3)
    with pytest.raises(ManifestError, match=r"current\.json' cannot be read"):
        store.versions()
    assert folders(store) == before
    # The lock was released.
    assert not (store.root / LOCK_NAME).exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "path"),
        ({"path": ""}, "path is empty"),
        ({"path": "x", "keep": 0}, "keep is 0"),
        ({"path": "x", "keep": 1001}, "keep is 1001"),
        ({"path": "x", "keep": 2.5}, r"Expected `int`, got `float` - at `\$.keep`"),
        ({"path": "x", "keep": True}, r"Expected `int`, got `bool` - at `\$.keep`"),
        ({"path": "x", "bucket_nbytes": -1}, "bucket_nbytes is -1"),
        ({"path": "x", "shard_nbytes": "much"}, r"got `str` - at `\$.shard_nbytes`"),
        ({"path": "x", "color": "red"}, "color"),
    ],
)
def test_invalid_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Publisher({"w": torch.zeros(1)}, engine="file", options=options)
