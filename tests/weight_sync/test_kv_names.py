"""What a session says its process computes with: KV cache of other weights is told by it."""

from __future__ import annotations

import gc

import pytest
import torch

from wtransfer.testing.contents import contents
from wtransfer.weight_sync.worker import committer as committer_module
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weight_sync.worker.target import StateDictTarget
from wtransfer.weight_version import ProcessWeights


class Watching(StateDictTarget):
    """Notes what the process is said to compute with while its weights change."""

    def __init__(self, tensors, process):
        super().__init__(tensors, "copy")
        self.process = process
        self.seen = []
        self.refuses = lambda _tensors: False

    def apply(self, tensors):
        self.seen.append(self.process.version())
        super().apply(tensors)
        if self.refuses(tensors):
            raise RuntimeError("the model says no")


@pytest.fixture
def process(monkeypatch):
    """The names of this process as if the test were alone in it."""
    made = ProcessWeights()
    monkeypatch.setattr(committer_module, "process_weights", made)
    return made


@pytest.fixture
def joined(fleet, weights, process):
    made = fleet(weights, engine="shm")
    target = Watching({name: torch.zeros_like(each) for name, each in weights.items()}, process)
    member = made.join(target)
    return made, member, target


def test_a_commit_changes_the_name_and_meanwhile_there_is_none(joined, process):
    made, member, target = joined
    before = process.version()
    assert before.fingerprint == member.session.fingerprint
    report = made.publish("v1")
    assert target.seen == [None]
    assert process.version().fingerprint == report.fingerprint == member.session.fingerprint
    assert process.version().epoch > before.epoch


def test_weights_that_cannot_be_restored_have_a_local_fingerprint(
    joined, process, caplog, report_of
):
    made, member, target = joined
    assert made.publish("v1").ok
    before = process.version()
    made.source["layer.0"] += 1
    target.refuses = lambda _tensors: True
    report_of(made.publish, "v2")
    assert member.session.state == "empty"
    assert process.version().fingerprint.startswith("local:")
    assert process.version().fingerprint == member.session.fingerprint != before.fingerprint
    # What it has logged holds tensors, by the traceback.
    caplog.clear()


def test_model_that_may_compute_with_something_else_shares_no_name(joined, process):
    made, member, target = joined
    target.proven = False
    names = {made.publish(version).fingerprint for version in ("v1", "v2")}
    assert names == {member.session.fingerprint}
    kept = process.version().fingerprint
    assert kept.startswith("local:")
    assert made.publish("v3").ok
    # Not even with itself: each commit may have gone wrong in its own way.
    assert process.version().fingerprint not in (kept, *names)
    target.proven = True
    assert made.publish("v4").ok
    assert process.version().fingerprint == member.session.fingerprint


def test_a_closed_session_watches_over_nothing(joined, process):
    made, member, _ = joined
    report = made.publish("v1")
    member.session.close()
    assert process.version().fingerprint.startswith("local:")
    assert process.version().fingerprint != report.fingerprint


def test_a_forgotten_session_watches_over_nothing(process):
    model = torch.nn.Linear(1, 1)
    own = process.version().fingerprint
    lost = WorkerSession(model).fingerprint
    gc.collect()
    before = process.version().fingerprint
    assert before not in (lost, own)
    with WorkerSession(model) as session:
        assert process.version().fingerprint == session.fingerprint != before
    del model, session
    gc.collect()
    assert process.version().fingerprint == own


def test_a_model_that_is_vouched_for_keeps_its_name_until_the_first_commit(fleet, process):
    trainer, worker = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    process.vouch(worker)
    vouched = process.version().fingerprint
    made = fleet(trainer)
    member = made.join(worker)
    assert not member.session.commit_pending()
    assert process.version().fingerprint == vouched
    # For publishers it is a fresh worker: no update has brought what it has.
    (seen,) = made.publisher.workers()
    assert (seen.fingerprint, seen.state) == (member.session.fingerprint, "fresh")
    assert seen.fingerprint.startswith("local:")
    report = made.publish("v1")
    assert process.version().fingerprint == report.fingerprint != vouched


def test_a_first_commit_that_fails_leaves_the_vouched_name(
    fleet, weights, process, caplog, report_of
):
    own = {name: torch.zeros_like(each) for name, each in weights.items()}
    target, model = Watching(own, process), torch.nn.Module()
    target.vouched_as = model
    process.vouch_by_fingerprint("0" * 32, model)
    made = fleet(weights, engine="shm")
    member = made.join(target)
    refused = contents(made.source)
    target.refuses = lambda tensors: contents(tensors) == refused
    report_of(made.publish, "v1")
    assert member.session.state == "behind"
    assert process.version().fingerprint == "0" * 32
    target.refuses = lambda _tensors: False
    assert made.publish("v2").ok
    assert process.version().fingerprint == member.session.fingerprint
    # What it has logged holds tensors, by the traceback.
    caplog.clear()


def test_lost_weights_lose_the_vouched_name(process):
    model = torch.nn.Linear(1, 1)
    process.vouch(model)
    vouched = process.version().fingerprint
    with WorkerSession(model) as session:
        session.weights_lost("asleep")
        assert process.version().fingerprint == session.fingerprint != vouched


@pytest.fixture
def named(fleet, monkeypatch):
    """Return the KV name, the fingerprint and the update's in a worker that has cast an update."""

    def publish(dtypes, *, wire=torch.float32, cast=True):
        weights = {name: torch.arange(4).to(wire) for name in dtypes}
        process = ProcessWeights()
        monkeypatch.setattr(committer_module, "process_weights", process)
        made = fleet(weights, engine="shm")
        model = {name: torch.zeros(4, dtype=dtype) for name, dtype in dtypes.items()}
        member = made.join(model, cast=cast)
        report = made.publish("v1")
        assert report.ok
        assert report.fingerprint == member.session.fingerprint
        return process.version().fingerprint, report.fingerprint

    return publish


def test_workers_that_cast_one_update_share_a_name_only_if_they_have_the_same_dtypes(named):
    single, brain = torch.float32, torch.bfloat16
    found = [
        named({"a": brain, "b": brain}),
        named({"a": brain, "b": brain}),
        named({"a": torch.float16, "b": torch.float16}),
        named({"a": brain, "b": single}),
        named({"a": single, "b": brain}),
        named({"a": single, "b": single}),
        named({"a": single, "b": single}, cast=False),
    ]
    (fingerprint,) = {of_update for _, of_update in found}
    names = [name for name, _ in found]
    assert names[0] == names[1]
    assert names[5:] == [fingerprint, fingerprint], "nothing was cast"
    assert len({*names}) == 5


def test_after_a_failed_commit_the_old_name_is_back_with_another_epoch(fleet, process, report_of):
    source = {"w": torch.ones(4)}
    made = fleet(source, engine="shm")
    target = Watching({"w": torch.zeros(4, dtype=torch.bfloat16)}, process)
    made.join(target, cast=True)
    assert made.publish("v1").ok
    before = process.version()
    source["w"] += 1
    refused = contents(source)
    target.refuses = lambda tensors: contents(tensors) == refused
    report_of(made.publish, "v2")
    assert process.version().fingerprint == before.fingerprint
    assert process.version().epoch > before.epoch
    assert target.seen[-2:] == [None, None]
