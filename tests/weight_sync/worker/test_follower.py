"""Workers that come when the publisher has gone, and take the current version from its folder."""

from __future__ import annotations

import logging
import shutil
import threading
import time

import pytest
import torch

from wtransfer import WorkerSession
from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.checkpoint.versions import CURRENT_NAME
from wtransfer.errors import (
    AddressError,
    CommitError,
    DigestMismatchError,
    ManifestError,
    RoundBusyError,
    SourceError,
    StagingMemoryError,
    WTransferError,
)
from wtransfer.registry import hooks
from wtransfer.testing.contents import contents
from wtransfer.testing.fleet import Fleet
from wtransfer.weight_sync.worker.target import StateDictTarget

PATIENCE_S = 5.0


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr("wtransfer.weight_sync.worker.follower.POLL_S", 0.02)
    monkeypatch.setattr("wtransfer.weight_sync.worker.follower.RETRY_S", 0.1)


@pytest.fixture
def publish(store, weights):
    """Publishes what the weights are now, with a publisher that is gone afterwards."""

    def publish(*labels, keep=3, **options):
        options = {"path": str(store.root), "keep": keep, **options}
        with Fleet(weights, engine="file", options=options) as made:
            made.join()
            for label in labels:
                weights["layer.0"] += 1
                assert made.publish(label).ok
        return contents(weights)

    return publish


@pytest.fixture
def follow(store, weights):
    """Makes sessions that follow the store and are closed at the end."""
    sessions = []

    def follow(model=None, **options):
        model = model or {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        session = WorkerSession(model, join=f"file:{store.root}", name="follower", **options)
        sessions.append(session)
        return model, session

    yield follow
    while sessions:
        sessions.pop().close()


def test_a_worker_takes_the_current_version_long_after_the_publisher_has_gone(
    store, publish, follow
):
    sent = publish("v1", "v2")
    model, session = follow()
    assert session.commit_pending(PATIENCE_S)
    assert ("v2", store.versions()[-1].fingerprint) == (session.version, session.fingerprint)
    status = session.status()
    assert (status.state, status.refusal, status.connected) == ("serving", None, True)
    assert sent == contents(model)
    assert not session.commit_pending(0.2)


def test_a_folder_may_be_joined_before_it_exists_and_without_a_token(publish, follow):
    model, session = follow()
    assert (session.status().connected, session.state) == (False, "fresh")
    assert not session.commit_pending(0.1)
    sent = publish("v1")
    assert session.commit_pending(PATIENCE_S)
    assert sent == contents(model)


def test_a_version_of_the_same_weights_is_not_taken_again(store, publish, follow, weights):
    publish("v1")
    _, session = follow()
    assert session.commit_pending(PATIENCE_S)
    weights["layer.0"] -= 1
    publish("the same")
    assert not session.commit_pending(0.3)
    assert session.fingerprint == store.versions()[-1].fingerprint


def test_a_worker_may_leave_and_keeps_what_it_has(store, publish, follow):
    sent = publish("v1")
    model, session = follow()
    assert session.commit_pending(PATIENCE_S)
    session.leave(f"file:{store.root}/")
    publish("v2")
    assert not session.commit_pending(0.2)
    assert (session.version, contents(model)) == ("v1", sent)
    session.join(f"file:{store.root}")
    assert session.commit_pending(PATIENCE_S)
    assert session.version == "v2"


@pytest.mark.parametrize("address", ["file:", "file:relative/path", "file:/a\0b"])
def test_an_address_that_is_no_absolute_path_is_refused(follow, address):
    _, session = follow()
    with pytest.raises(AddressError, match="expected 'file:/absolute/path'"):
        session.join(address)


def test_a_rank_of_several_cannot_follow(follow):
    with pytest.raises(ValueError, match="all ranks commit or none"):
        follow(rank=0, num_ranks=2)


# -- damage


def flip(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    # The last tensor's last byte.
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lose_the_manifest(folder):
    (folder / "wtransfer.json").unlink()


def link(folder):
    (folder / "model.safetensors").rename(folder / "elsewhere")
    (folder / "model.safetensors").symlink_to("elsewhere")


DAMAGE = [
    (flip, DigestMismatchError, "'layer.3'"),
    (truncate, SourceError, "'layer.3'"),
    (lose_the_manifest, ManifestError, "manifest is missing"),
    (link, WTransferError, "symbolic link"),
]


@pytest.mark.parametrize("damaged", DAMAGE, ids=lambda each: each[0].__name__)
def test_a_damaged_version_is_refused_and_named_and_the_next_good_one_is_taken(
    store, publish, follow, caplog, damaged, *, until
):
    damage, error, text = damaged
    first = publish("v1")
    model, session = follow()
    assert session.commit_pending(PATIENCE_S)
    with caplog.at_level(logging.WARNING, "wtransfer.weight_sync.worker.follower"):
        spoilt(store, publish, damage)
        until(lambda: session.status().refusal is not None)
        assert not session.commit_pending(0.4)
    assert text in str(session.status().refusal)
    assert isinstance(session.status().refusal, error)
    assert (session.version, session.state, contents(model)) == ("v1", "serving", first)
    # Tried again in between, and said once.
    assert sum("refuses" in record.message for record in caplog.records) == 1
    good = publish("v3")
    assert session.commit_pending(PATIENCE_S)
    assert (session.version, session.status().refusal, contents(model)) == ("v3", None, good)


def spoilt(store, publish, damage):
    """Publish a version and damage it before any follower sees it."""
    kept = (store.root / CURRENT_NAME).read_bytes()
    elsewhere = store.root.with_name("elsewhere")
    shutil.copytree(store.root, elsewhere)
    store.root, root = elsewhere, store.root
    publish("v2")
    damage(store.folder_of(store.versions()[-1]))
    assert kept == (root / CURRENT_NAME).read_bytes()
    for each in elsewhere.iterdir():
        if each.is_dir() and not (root / each.name).exists():
            shutil.copytree(each, root / each.name, symlinks=True)
    (elsewhere / CURRENT_NAME).replace(root / CURRENT_NAME)
    store.root = root


def test_a_repaired_version_is_taken_without_a_new_one(store, publish, follow, until):
    sent = publish("v1")
    folder = store.folder_of(store.versions()[-1])
    whole = (folder / "model.safetensors").read_bytes()
    flip(folder)
    model, session = follow()
    until(lambda: session.status().refusal is not None)
    (folder / "model.safetensors").write_bytes(whole)
    assert session.commit_pending(PATIENCE_S)
    assert (session.status().refusal, contents(model)) == (None, sent)


def test_a_listing_that_cannot_be_read_is_a_refusal(store, publish, follow, until):
    publish("v1")
    _, session = follow()
    assert session.commit_pending(PATIENCE_S)
    (store.root / CURRENT_NAME).write_text("{")
    until(lambda: isinstance(session.status().refusal, ManifestError))
    assert (session.version, session.state) == ("v1", "serving")


def test_without_memory_for_it_nothing_is_begun(publish, follow, monkeypatch, until):
    publish("v1")
    monkeypatch.setattr("wtransfer.transport.memory.available_memory", lambda: 10)
    _, session = follow()
    until(lambda: session.status().refusal is not None)
    assert isinstance(session.status().refusal, StagingMemoryError)


def test_a_model_that_refuses_is_asked_again_and_less_often(publish, follow, weights):
    class Moody(StateDictTarget):
        fails = 2

        def apply(self, tensors):
            if self.fails:
                self.fails -= 1
                raise ValueError("not in the mood")
            super().apply(tensors)

    publish("v1")
    model = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    _, session = follow(Moody(model))
    # The second failure is that of going back: nothing is whole then.
    with pytest.raises(CommitError, match="not in the mood"):
        session.commit_pending(PATIENCE_S)
    assert session.state == "empty"
    assert session.commit_pending(PATIENCE_S)
    assert (session.version, contents(model)) == ("v1", contents(weights))


# -- observed


class Ends:
    """Notes which rounds of a follower began, and how each ended."""

    def __init__(self):
        self.labels, self.ends = {}, {}

    @hooks.hookimpl
    def wtransfer_round_started(self, round_id, version, worker):
        if worker is not None:
            self.labels[round_id] = version

    @hooks.hookimpl
    def wtransfer_weights_committed(self, round_id, worker):
        if worker is not None:
            self.ends[self.labels[round_id]] = "committed"

    @hooks.hookimpl
    def wtransfer_round_aborted(self, error, round_id, worker):
        if worker is not None:
            self.ends[self.labels[round_id]] = str(error)


@pytest.fixture
def observed():
    observer = Ends()
    hooks.register(observer)
    yield observer.ends
    hooks.unregister(observer)


class Refusing(StateDictTarget):
    def apply(self, tensors):
        raise ValueError("not in the mood")


def decline(session):
    assert session.discard_pending()


def fail(session):
    with pytest.raises(CommitError):
        session.commit_pending()


def commit(session):
    assert session.commit_pending()


@pytest.mark.parametrize(
    "case",
    [
        (commit, "committed"),
        (decline, "declined the version"),
        (fail, "not in the mood"),
        (WorkerSession.close, "session was closed"),
    ],
    ids=lambda case: case[0].__name__,
)
def test_observers_see_the_end_of_an_offered_version(
    publish, weights, follow, observed, case, *, until
):
    end, text = case
    publish("v1")
    observed.clear()
    model = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    _, session = follow(Refusing(model) if end is fail else model)
    until(lambda: session.state == "pending")
    end(session)
    until(lambda: "v1" in observed)
    assert text in observed["v1"]
    if end is decline:
        # It is not offered again, and the next one is.
        assert not session.commit_pending(0.3)
        publish("v2")
        assert session.commit_pending(PATIENCE_S)
        assert session.version == "v2"


def test_a_version_that_comes_while_another_waits_is_taken_after_it(publish, follow, until):
    publish("v1")
    _, session = follow()
    until(lambda: session.state == "pending")
    publish("v2")
    time.sleep(0.1)
    for version in ("v1", "v2"):
        assert session.commit_pending(PATIENCE_S)
        assert session.version == version


def test_leaving_while_a_version_is_read_ends_the_reading(
    publish, follow, store, paused_reading, until
):
    reading, go_on, read = paused_reading
    publish("v1")
    _, session = follow()
    assert reading.wait(PATIENCE_S)
    leaving = threading.Thread(target=lambda: session.leave(f"file:{store.root}"))
    leaving.start()
    until(lambda: session.status().publisher is None)
    go_on.set()
    leaving.join(PATIENCE_S)
    assert not session.commit_pending(0.1)
    assert (session.state, session.status().refusal) == ("fresh", None)
    assert len(read) == 1


# -- beside a live publisher


def test_folder_is_refused_while_a_publisher_is_connected_and_the_other_way_round(
    fleet, store, publish, weights
):
    listed = publish("listed")
    made = fleet(weights, engine="shm")
    member, address = made.join(), made.publisher.address
    with pytest.raises(RoundBusyError, match=f"its publisher is {address}, connected for"):
        member.session.join(f"file:{store.root}")
    member.session.leave(address)
    member.session.join(f"file:{store.root}")
    assert member.session.commit_pending(PATIENCE_S)
    assert (member.session.version, member.contents) == ("listed", listed)
    with pytest.raises(RoundBusyError, match=f"its publisher is file:{store.root}"):
        member.session.join(address, token=made.publisher.token)


def test_folder_takes_the_place_of_a_publisher_that_was_lost(fleet, store, publish, weights):
    listed = publish("listed")
    made = fleet(weights, engine="shm")
    member = made.join()
    made.publisher.close()
    member.session.join(f"file:{store.root}")
    assert member.session.commit_pending(PATIENCE_S)
    assert (member.session.version, member.contents) == ("listed", listed)


@pytest.fixture
def paused_reading(monkeypatch):
    """Followers stop after their first tensor: events that say so and end it, and what was read."""
    reading, go_on, names = threading.Event(), threading.Event(), []
    read = CheckpointSource.iter_full

    def slowly(source):
        for pair in read(source):
            names.append(pair[0])
            reading.set()
            assert go_on.wait(PATIENCE_S)
            yield pair

    monkeypatch.setattr(CheckpointSource, "iter_full", slowly)
    return reading, go_on, names
