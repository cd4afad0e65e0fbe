"""A worker's session: what it proves, what it refuses, and what it says of it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from wtransfer import WeightTransferEngineFactory
from wtransfer.errors import (
    CommitError,
    DigestMismatchError,
    SchemaError,
    StallError,
)
from wtransfer.testing.contents import contents
from wtransfer.testing.fakes import MemoryEngine
from wtransfer.weight_sync.worker import committer as committer_module
from wtransfer.weight_sync.worker import staging as staging_module
from wtransfer.weight_sync.worker.target import StateDictTarget
from wtransfer.weight_version import ProcessWeights

MIB = 1 << 20


def fresh(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


# -- FAULTS 48: the model changes between the vote and the commit


class Tied(torch.nn.Module):
    """Two layers that share their weight."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.c = torch.nn.Parameter(torch.zeros(3))
        self.d = torch.nn.Parameter(torch.ones(3))


def module():
    return Tied()


def mapping():
    tensors = {"a": torch.zeros(3, 3), "c": torch.zeros(3), "d": torch.ones(3)}
    return tensors | {"b": tensors["a"]}


def put(model, name, tensor):
    """Give a model another tensor, in the place of the one of this name if it has one."""
    if isinstance(model, dict):
        model[name] = tensor
    else:
        setattr(model, name, torch.nn.Parameter(tensor))


def add_name(model):
    put(model, "new", torch.full((2,), 5.0))


def add_buffer(model):
    if isinstance(model, dict):
        add_name(model)
    else:
        model.register_buffer("buffer", torch.full((2,), 5.0))


def lose_name(model):
    del (model if isinstance(model, dict) else model._parameters)["c"]


def reshape(model):
    put(model, "c", torch.full((5,), 5.0))


def retype(model):
    put(model, "c", torch.full((3,), 5.0, dtype=torch.float64))


def lose_memory(model):
    part = model["c"] if isinstance(model, dict) else model.c
    part.untyped_storage().resize_(0)


def untie(model, tensor=None):
    if isinstance(model, dict):
        model["b"] = model["b"].clone() if tensor is None else tensor
    else:
        weight = model.b.weight.detach().clone() if tensor is None else tensor
        model.b.weight = torch.nn.Parameter(weight)


def untie_from_other_bytes(model):
    untie(model, torch.full((3, 3), 5.0))


def tie_to_other_bytes(model):
    """Tie the third tensor to the one that is tied to none: what it had is gone."""
    if isinstance(model, dict):
        model["d"] = model["c"]
    else:
        model.d = model.c


@pytest.fixture
def changed(fleet):
    """Maker of a worker, and its round, whose model is changed after the vote for v2."""

    def run(make, change, **options):
        source = make()
        made = fleet(source)
        member = made.join(make(), **options)
        assert made.publish("v1").ok
        with torch.no_grad():
            for each in source.values() if isinstance(source, dict) else source.parameters():
                each.add_(1)
        round_ = made.publisher.publish("v2", wait=False)
        while not member.session.status().pending:
            assert not round_.done
        change(member.model)
        return member, round_

    return run


@pytest.fixture
def process(monkeypatch):
    """The names of this process as if the test were alone in it."""
    made = ProcessWeights()
    monkeypatch.setattr(committer_module, "process_weights", made)
    return made


@pytest.mark.parametrize("make", [module, mapping])
def test_model_whose_ties_changed_after_the_vote_keeps_the_old_version_whole(
    changed, make, commit, report_of
):
    member, round_ = changed(make, untie, commit=commit)
    before = member.contents
    with pytest.raises(CommitError, match="has changed in") as caught:
        member.session.commit_pending()
    assert caught.value.restored
    assert (member.session.version, member.session.state) == ("v1", "behind")
    assert member.contents == before
    report = report_of(round_.result, 5)
    assert [each.outcome for each in report.workers] == ["restored"]


@pytest.mark.parametrize(
    "change",
    [
        add_name,
        add_buffer,
        lose_name,
        reshape,
        retype,
        lose_memory,
        untie_from_other_bytes,
        tie_to_other_bytes,
    ],
)
@pytest.mark.parametrize("make", [module, mapping])
def test_model_that_is_not_the_old_version_any_more_after_the_vote_has_no_name(
    changed, make, change, process, caplog
):
    member, round_ = changed(make, change)
    before = None if change is lose_memory else member.contents
    v1 = process.version().fingerprint
    with pytest.raises(CommitError, match="must not serve") as caught:
        member.session.commit_pending()
    assert not caught.value.restored
    assert (member.session.version, member.session.state) == (None, "empty")
    assert process.version().fingerprint == member.session.fingerprint != v1
    assert before is None or member.contents == before
    with pytest.raises(CommitError, match="no worker holds") as told:
        round_.result(5)
    assert [each.outcome for each in told.value.report.workers] == ["empty"]
    # What was logged holds tensors, by the traceback.
    caplog.clear()


class Loader:
    """A target of a user's own, which writes to the tensors that its model has."""

    def __init__(self, tensors):
        self.own = StateDictTarget(tensors, "copy")
        self.schema, self.apply = self.own.schema, self.own.apply

    def capture(self):
        """Return None: it has no way back to what no update has brought."""


@pytest.mark.parametrize("change", [add_name, lose_name, reshape, retype, untie])
def test_target_of_a_users_own_whose_model_changed_after_the_vote_has_no_name(
    fleet, change, caplog
):
    tensors = mapping()
    made = fleet(mapping())
    member = made.join(Loader(tensors))
    assert made.publish("v1").ok
    made.source["a"] += 1
    round_ = made.publisher.publish("v2", wait=False)
    while not member.session.status().pending:
        assert not round_.done
    change(tensors)
    with pytest.raises(CommitError) as caught:
        member.session.commit_pending(5)
    assert not caught.value.restored
    assert (member.session.version, member.session.state) == (None, "empty")
    caplog.clear()


@pytest.mark.parametrize("change", [untie, add_name])
def test_without_a_way_back_a_model_that_changed_after_the_vote_has_no_name(
    changed, change, caplog
):
    member, _ = changed(mapping, change, keep_previous=False)
    with pytest.raises(CommitError) as caught:
        member.session.commit_pending()
    assert not caught.value.restored
    assert member.session.state == "empty"
    caplog.clear()


def test_name_that_came_before_the_plan_and_is_not_in_the_old_version_is_not_restored(
    fleet, join, weights, caplog
):
    made = fleet(weights)
    member = join(made)
    assert made.publish("v1").ok
    member.model["new"] = torch.zeros(3)
    weights["new"] = torch.ones(3)
    # It takes v1 again, and v2 never: the publisher sends that once more.
    member.target.takes = contents({name: weights[name] for name in weights if name != "new"})
    member.target.fails_at, member.target.keeps_failing = len(weights) - 1, True
    with pytest.raises(CommitError, match="no worker holds"):
        made.publish("v2")
    assert [each.restored for each in made.commit_errors] == [False] * len(made.commit_errors)
    assert made.commit_errors
    assert (member.session.version, member.session.state) == (None, "empty")
    caplog.clear()


# -- proof


class Rewriting(MemoryEngine):
    """Declares that its memory stays for the round, and writes to it once more."""

    tensors_valid_until: ClassVar[str] = "round"

    def receive_weights(self, update_info, load_weights):
        kept = []

        def load(pairs):
            kept.extend((name, tensor.clone()) for name, tensor in pairs)

        super().receive_weights(update_info, load)
        load_weights(kept)
        kept[1][1].zero_()


def test_memory_that_an_engine_rewrites_before_the_seal_is_not_committed(fleet, weights):
    WeightTransferEngineFactory.register_engine("tests-rewriting", Rewriting)
    made = fleet(weights, engine="tests-rewriting")
    member = made.join()
    before = member.contents
    with pytest.raises(DigestMismatchError, match=r"layer\.1") as caught:
        made.publish("v1")
    assert caught.value.pieces == ["layer.1"]
    assert member.contents == before


class Keeping(MemoryEngine):
    """Declares that its memory stays for the round, and that nothing writes there."""

    tensors_valid_until: ClassVar[str] = "round"
    writes_after_return: ClassVar[bool] = False

    def receive_weights(self, update_info, load_weights):
        def load(pairs):
            load_weights([(name, tensor.clone()) for name, tensor in pairs])

        super().receive_weights(update_info, load)


class DerivedFromKeeping(Keeping):
    """Declares nothing itself."""


@pytest.mark.parametrize(("engine", "num"), [(Keeping, 0), (DerivedFromKeeping, 1)])
def test_only_an_engine_that_says_itself_that_it_writes_no_more_is_digested_once(
    fleet, weights, monkeypatch, engine, num
):
    digested = []
    monkeypatch.setattr(
        staging_module.Staging,
        "digest_again",
        lambda staging, again=staging_module.Staging.digest_again: digested.append(again(staging)),
    )
    name = f"tests-{engine.__name__.lower()}"
    WeightTransferEngineFactory.register_engine(name, engine)
    made = fleet(weights, engine=name)
    made.join()
    assert made.publish("v1").ok
    assert len(digested) == num


@pytest.mark.parametrize("commit", ["adopt", "copy"])
@pytest.mark.parametrize("numel", [4, 40_000])
def test_bools_of_any_byte_arrive_and_are_restored_as_they_were(fleet, commit, numel):
    bits = torch.arange(numel, dtype=torch.int64).to(torch.uint8)
    source = {"flags": bits.view(torch.bool), "w": torch.ones(3)}
    made = fleet(source)
    member = made.join(commit=commit)
    for version in ("v1", "v2"):
        assert made.publish(version).ok
        assert member.contents == contents(source)


def test_digests_are_those_of_the_present_weights_and_copy_nothing(fleet):
    source = {"big": torch.ones(64 * MIB // 4), "small": torch.ones(3)}
    made = fleet(source)
    member = made.join(commit="copy")
    assert made.publish("v1").ok
    peak = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5", "utf-8")
    before = _peak_nbytes(peak)
    found = member.session.digests()
    assert _peak_nbytes(peak) - before < 16 * MIB
    with torch.no_grad():
        member.model["small"][0] = 2
    changed = member.session.digests()
    assert [name for name in found if found[name] != changed[name]] == ["small"]


def _peak_nbytes(status):
    line = next(x for x in status.read_text("utf-8").splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


# -- what a worker says


def test_refused_update_is_logged_and_kept_until_one_is_applied(fleet, weights, caplog):
    made = fleet(weights)
    wrong = fresh(weights)
    wrong["layer.1"] = torch.zeros(2)
    member = made.join(wrong)
    assert member.session.status().last_error is None
    with caplog.at_level(logging.WARNING), pytest.raises(SchemaError):
        made.publish("v1")
    assert isinstance(member.session.status().last_error, SchemaError)
    assert "layer.1" in str(member.session.status().last_error)
    assert "worker-0 refuses an update: " in caplog.text
    wrong["layer.1"] = torch.zeros(3, 4)
    assert made.publish("v2").ok
    assert member.session.status().last_error is None


def test_a_closed_session_has_no_publisher(fleet, weights):
    made = fleet(weights)
    session = made.join().session
    assert session.status().publisher == made.publisher.address
    session.close()
    assert session.status().publisher is None
    assert not session.status().connected


def test_wait_for_applies_what_comes_until_the_version_is_there(fleet, weights):
    made = fleet(weights)
    member = made.join()
    round_ = made.publisher.publish("v1", wait=False)
    member.session.wait_for("v1", timeout_s=5)
    assert round_.result(5).ok
    assert member.session.version == "v1"
    member.session.wait_for("v1", timeout_s=0)


def test_wait_for_ends_at_its_time_and_says_what_is_known(fleet, weights):
    made = fleet(weights)
    wrong = fresh(weights)
    wrong["layer.1"] = torch.zeros(2)
    member = made.join(wrong)
    with pytest.raises(StallError, match=r"'v2' has not come within 0\.05 s: a publisher is conn"):
        member.session.wait_for("v2", timeout_s=0.05)
    with pytest.raises(SchemaError):
        made.publish("v1")
    with pytest.raises(StallError, match=r"(?s)last error: .*layer\.1"):
        member.session.wait_for("v2", timeout_s=0.05)


ROUND = """
import torch
from wtransfer.testing.fleet import Fleet
with Fleet({"w": torch.ones(3)}) as fleet:
    fleet.join()
    assert fleet.publish("v1").ok
"""


@pytest.mark.slow  # an interpreter of its own, with torch
def test_round_runs_where_bytes_in_text_are_errors():
    ran = subprocess.run(
        [sys.executable, "-bb", "-c", ROUND],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
