"""Sources whose tensors are spread over ranks: made whole, compared, and refused."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import wtransfer
from wtransfer.engines.interface import ParamMeta
from wtransfer.errors import (
    ClosedError,
    NotInitializedError,
    ProtocolError,
    RoundAbortedError,
    RoundBusyError,
    SourceError,
    StallError,
)
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.trainer.sharded import ShardedSource
from wtransfer.weight_sync.trainer.shards import check_equal, digest_of, iter_shards, layout_between
from wtransfer.weight_sync.trainer.source import StateDictSource
from wtransfer.weight_sync.trainer.whereabouts import Note, Whereabouts

SCRIPT = Path(__file__).parent / "sharded_ranks.py"


# Before any test that has a default group.
def test_without_a_default_group_the_store_must_be_given():
    assert not dist.is_initialized()
    with pytest.raises(NotInitializedError, match="call init_process_group first, or pass store="):
        Whereabouts("actor").look()


# -- two processes


def start(kind, engine, rank, port):
    argv = [sys.executable, str(SCRIPT), kind, engine, str(rank), "2", str(port)]
    environ = {k: v for k, v in os.environ.items() if k != "WTRANSFER_TOKEN"}
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *(("fsdp", "gloo"), ("dtensors", "shm")),
        pytest.param("metadata", "shm", marks=pytest.mark.nightly),
    ],
)
def test_what_two_ranks_hold_arrives_whole_in_every_round(kind, engine):
    first = start(kind, engine, 0, 0)
    port = first.stdout.readline().strip()
    other = start(kind, engine, 1, port)
    try:
        spoken = [process.communicate(timeout=90) for process in (first, other)]
    finally:
        for process in (first, other):
            process.kill()
    assert [first.returncode, other.returncode] == [0, 0], spoken
    rounds, followed = ([json.loads(line) for line in out.splitlines()] for out, _ in spoken)
    assert len(rounds) == 3
    for number, each in enumerate(rounds):
        assert each["equal"]
        assert all(each["equal"].values()), (number, each)
    assert [r["fingerprint"] for r in rounds] == [f["fingerprint"] for f in followed]
    assert len({r["fingerprint"] for r in rounds}) == 3


# -- a world of one rank


@pytest.fixture(scope="module")
def mesh():
    """Mesh of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def sharded(mesh):
    """Tensors of two placements, and a plain one."""
    return {
        "rows": distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]),
        "plain": torch.ones(2),
        "all": distribute_tensor(torch.arange(4.0), mesh, [Replicate()]),
    }


def whole(tensors):
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}


def test_one_rank_alone_needs_no_other(sharded, fleet, engine):
    made = fleet(sharded, engine=engine, nonfinite="warn")
    member = made.join({name: torch.zeros_like(each) for name, each in whole(sharded).items()})
    assert made.publish("v1").ok
    assert contents(whole(sharded)) == member.contents
    sharded["rows"].add_(1)
    sharded["all"].fill_(float("nan"))
    report = made.publish("v2")
    assert dict(report.nonfinite) == {"all": 4}
    assert contents(whole(sharded)) == member.contents


def test_metadata_says_who_holds_what(sharded, mesh):
    rows, plain, _ = StateDictSource(sharded).metadata
    assert rows == ParamMeta("rows", torch.float32, (3, 2), (0,), mesh, (Shard(0),))
    assert plain == ParamMeta("plain", torch.float32, (2,))


def test_metadata_follows_a_tensor_that_is_placed_anew(sharded, mesh):
    source = StateDictSource(sharded)
    assert (Shard(0),) == source.metadata[0].placements
    sharded["rows"] = sharded["rows"].redistribute(mesh, [Replicate()])
    assert (Replicate(),) == source.metadata[0].placements


@pytest.mark.parametrize(("own_s", "expected_s"), [(None, 300.0), (7.0, 7.0)])
def test_the_publishers_deadline_holds_unless_the_source_has_one(own_s, expected_s):
    source = wtransfer.ShardedSource({"w": torch.ones(2)}, deadline_s=own_s)
    with wtransfer.Publisher(source, deadline_s=300.0):
        assert source.deadline_s == expected_s


class Shared(StateDictSource):
    """A source whose sharded tensors another rank holds parts of as well."""

    @property
    def metadata(self):
        found = super().metadata
        both = {"owners": (0, 1), "mesh": SimpleNamespace(mesh=torch.tensor([0, 1]))}
        return [dataclasses.replace(m, **both) if m.placements else m for m in found]


def test_a_round_that_ends_before_it_waits_for_other_ranks_does_not_wait(sharded):
    source = wtransfer.ShardedSource(Shared(sharded), store=dist.HashStore(), deadline_s=20.0)
    source.begin("v1")
    source.stop_waiting()
    with pytest.raises(RoundAbortedError):
        next(source.iter_full())
    source.close()


def test_what_is_not_sharded_passes_through():
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    source = ShardedSource(tensors)
    assert all(each is tensors[name] for name, each in source.iter_full())
    source.close()


# -- layouts


@pytest.fixture
def metadata(sharded):
    return StateDictSource(sharded).metadata


def test_equal_layouts_have_equal_digests(metadata):
    assert digest_of(layout_between(metadata, 0, 0)) == digest_of(layout_between(metadata, 0, 0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "other"}, "rank 1 has 'other': float32 [3, 2] as (S(0))"),
        ({"dtype": torch.bfloat16}, "rank 1 has 'rows': bfloat16 [3, 2]"),
        ({"shape": (2, 3)}, "rank 1 has 'rows': float32 [2, 3]"),
        ({"placements": (Replicate(),)}, "as (R) over 1 ranks on ranks [0]"),
    ],
)
def test_the_first_tensor_that_differs_is_named(metadata, change, said):
    changed = [dataclasses.replace(metadata[0], **change), *metadata[1:]]
    mine, theirs = (layout_between(each, 0, 0) for each in (metadata, changed))
    assert digest_of(mine) != digest_of(theirs)
    with pytest.raises(SourceError) as refused:
        check_equal(mine, theirs, "rank 0", "rank 1")
    assert "the trainer's ranks differ at tensor 0: rank 0 has 'rows'" in str(refused.value)
    assert said in str(refused.value)
    assert refused.value.piece == "rows"


def test_a_tensor_that_only_one_rank_has_is_named(metadata):
    mine, theirs = layout_between(metadata, 0, 0), layout_between(metadata[:2], 0, 0)
    with pytest.raises(SourceError, match=r"at tensor 2: rank 0 has 'all': .*, rank 1 has none"):
        check_equal(mine, theirs, "rank 0", "rank 1")


def test_ranks_in_other_rows_of_a_grid_are_not_compared(metadata):
    here, there = layout_between(metadata, 0, 0), layout_between(metadata, 0, 5)
    assert "on ranks [0]" in here[0][1]
    assert "on ranks" not in there[0][1]


def test_owners_without_placements_are_refused(fleet):
    class Half(StateDictSource):
        @property
        def metadata(self):
            return [dataclasses.replace(each, owners=(0, 1)) for each in super().metadata]

    made = fleet(Half({"a": torch.ones(2)}))
    made.join({"a": torch.zeros(2)})
    with pytest.raises(SourceError, match=r"'a' has owners, ranks \[0, 1\], but no mesh and no"):
        made.publish("v1")


class Divergent(StateDictSource):
    """Yields other parts than its metadata says."""

    pairs = ()

    def iter_local(self):
        yield from self.pairs


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([("other", torch.ones(3, 2))], "yields ('other',"),
        ([("rows", torch.ones(3, 2).half())], "yields ('rows', torch.float16"),
        ([("rows", torch.ones(2, 2))], "torch.float32, (3, 2)) at this place"),
        ([("rows", torch.ones(3, 2))], "ended before 'plain'"),
        (
            [("rows", torch.ones(3, 2)), ("plain", torch.ones(2)), ("all", torch.ones(4))] * 2,
            "yields 'rows' after the last tensor",
        ),
    ],
)
def test_parts_that_are_not_those_of_the_metadata_are_named(sharded, pairs, said):
    source = Divergent(sharded)
    source.pairs = pairs
    with pytest.raises(SourceError) as refused:
        list(iter_shards(source, source.metadata))
    assert said in str(refused.value)


def test_a_part_whose_storage_was_freed_is_named(sharded):
    source = Divergent(sharded)
    freed = torch.ones(3, 2)
    freed.untyped_storage().resize_(0)
    source.pairs = [("rows", freed)]
    with pytest.raises(SourceError, match="part of 'rows' has less memory"):
        list(iter_shards(source, source.metadata))


# -- finding each other


def test_a_note_is_found_and_replaced():
    store = dist.HashStore()
    place = Whereabouts("actor", store)
    assert place.look() is None
    place.leave(3, "unix:@there", "secret")
    assert Whereabouts("critic", store).look() is None
    assert Note(3, "unix:@there", "secret") == place.look()
    place.leave(4, "unix:@elsewhere", "secret")
    assert place.look().rank == 4


def test_a_token_that_all_have_is_not_written_down(monkeypatch):
    monkeypatch.setenv("WTRANSFER_TOKEN", "everybody's")
    store = dist.HashStore()
    place = Whereabouts("actor", store)
    place.leave(0, "unix:@there", "everybody's")
    assert b"everybody" not in store.get("wtransfer/publisher/actor")
    assert place.look().secret == "everybody's"


def test_what_is_no_note_is_refused():
    store = dist.HashStore()
    store.set("wtransfer/publisher/actor", '{"rank": "first"}')
    with pytest.raises(ProtocolError, match="holds something else under 'wtransfer/publisher"):
        Whereabouts("actor", store).look()


def test_a_rank_publishes_one_version_at_a_time():
    with wtransfer.TrainerRank({}, store=dist.HashStore(), deadline_s=0.5) as rank:
        errors = []

        def publish():
            try:
                rank.publish("v1")
            except StallError as error:
                errors.append(error)

        first = threading.Thread(target=publish)
        first.start()
        while not rank._busy.locked():
            assert first.is_alive()
        with pytest.raises(RoundBusyError):
            rank.publish("v2")
        first.join()
        assert errors
    with pytest.raises(ClosedError):
        rank.publish("v3")
