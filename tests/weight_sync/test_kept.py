"""A trainer of a part of the checkpoint: the rest stays, and every worker proves that it has it."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from contextlib import closing

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wtransfer import WorkerSession
from wtransfer.checkpoint.base_checkpoint import BaseCheckpoint
from wtransfer.deadline import Deadline
from wtransfer.errors import CommitError, DigestMismatchError, SchemaError, SourceError
from wtransfer.manifest import KeptPiece, Piece
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.identity import module_fingerprint
from wtransfer.weight_sync.trainer.source import StateDictSource
from wtransfer.weight_sync.worker import kept as kept_tensors
from wtransfer.weight_sync.worker.target import StateDictTarget

TOWER = ("tower.0", "tower.1", "tower.small")
HEAD = "mtp.head"


def checkpoint(seed=0):
    """The whole: a language part, which is trained, a tower of large and small tensors, a head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layer.0": (3, 4), "layer.1": (3, 4), "tower.0": (128, 64), "tower.1": (128, 64)}
    shapes |= {"tower.small": (3, 4), HEAD: (3, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def trained(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("layer")}


@pytest.fixture
def base(tmp_path):
    save_file(checkpoint(), tmp_path / "model.safetensors")
    return tmp_path


def test_set_is_the_whole_and_its_part_travels(fleet, base, commit, engine, caplog):
    caplog.set_level(logging.INFO)
    part, held = trained(checkpoint()), copied(checkpoint())
    made = fleet(part, base=base, engine=engine)
    made.join(held, commit=commit)
    for number in range(4):
        part["layer.0"] += 1
        report = made.publish(f"v{number}")
        whole = checkpoint() | part
        assert contents(held) == contents(whole)
        assert report.fingerprint == module_fingerprint(whole) == report.workers[0].fingerprint
        assert report.nbytes == sum(each.nbytes for each in part.values())
    assert "4 of 6 tensors stay as the workers have them" in caplog.text
    assert caplog.text.count("tensors stay") == 1


def test_worker_of_another_base_refuses_by_the_first_name(fleet, base):
    part, other = trained(checkpoint()), checkpoint()
    other["tower.1"][5, 7] += 1
    held, right = copied(other), copied(checkpoint())
    made = fleet(part, base=base)
    member = made.join(held)
    made.join(right)
    part["layer.0"] += 1
    with pytest.raises(
        DigestMismatchError, match=r"'tower.1' is not sent, .*other bytes"
    ) as caught:
        made.publish("v1")
    assert (caught.value.piece, caught.value.worker) == ("tower.1", "worker-0")
    assert contents(held) == contents(other)
    assert contents(right) == contents(checkpoint())
    assert member.session.state == "fresh"
    # The same worker takes a whole update, after which it has what the publisher keeps.
    made.leave(member)
    assert made.publish("v2").ok


def test_whole_update_between_is_not_taken_for_the_base(fleet, base):
    part, held = trained(checkpoint()), copied(checkpoint())
    made = fleet(part, base=base)
    member = made.join(held)
    assert made.publish("v1").ok
    made.leave(member)
    whole = fleet(checkpoint(7))
    again = whole.join(held)
    assert whole.publish("other").ok
    whole.leave(again)
    made.join(held)
    with pytest.raises(DigestMismatchError, match=r"'mtp\.head' is not sent"):
        made.publish("v2")
    assert contents(held) == contents(checkpoint(7))


def test_tensor_that_was_overwritten_between_two_rounds_ends_the_second(fleet, base, commit):
    part, held = trained(checkpoint()), copied(checkpoint())
    made = fleet(part, base=base)
    made.join(held, commit=commit)
    assert made.publish("v1").ok
    held["tower.0"].data[3, 3] += 1
    part["layer.0"] += 1
    if commit == "adopt":
        with pytest.raises(DigestMismatchError, match=r"'tower\.0'"):
            made.publish("v2")
        held["tower.0"].data[3, 3] = checkpoint()["tower.0"][3, 3]
    # A copied set is beside the model, and is what the commit applies.
    assert made.publish("v3").ok
    assert contents(held) == contents(checkpoint() | part)


def test_tensor_that_is_overwritten_between_plan_and_commit_is_not_committed(fleet, base):
    part, held = trained(checkpoint()), copied(checkpoint())
    made = fleet(part, base=base)
    member = made.join(held, keep_previous=False)
    part["layer.0"] += 1
    round_ = made.publisher.publish("v1", wait=False)
    while not member.session.status().pending:
        pass
    held["tower.0"][0, 0] += 1
    with pytest.raises(CommitError, match=r"'tower\.0' is not sent"):
        member.session.commit_pending()
    with pytest.raises(CommitError, match="no worker holds"):
        round_.result()
    assert torch.equal(held["layer.0"], checkpoint()["layer.0"])
    # Others have written to its model: it is not what it was.
    assert member.session.state == "empty"


def test_proof_of_much_takes_longer_than_the_deadline(fleet, base, monkeypatch):
    part, held = trained(checkpoint()), copied(checkpoint())
    made = fleet(part, base=base, deadline_s=1.0)
    made.join(held)
    prove, proven = kept_tensors.digest, []

    def prove_slowly(tensor, algorithm):
        proven.append(tensor)
        # Before the worker accepts; what it has is proven once more as it is applied.
        time.sleep(0.5 if len(proven) <= 4 else 0)
        return prove(tensor, algorithm)

    monkeypatch.setattr(kept_tensors, "digest", prove_slowly)
    part["layer.0"] += 1
    assert made.publish("v1").ok
    assert contents(held) == contents(checkpoint() | part)


def test_floats_that_were_cast_are_proven_in_the_dtype_that_the_model_has(fleet, tmp_path, commit):
    whole = {name: each.bfloat16() for name, each in checkpoint().items()}
    save_file(whole, tmp_path / "model.safetensors")
    held, source = copied(whole), Changing({name: each.float() for name, each in whole.items()})
    made = fleet(source, base=tmp_path)
    made.join(held, commit=commit, cast=True)
    assert made.publish("whole").ok
    source.tensors = trained(whole)
    source.tensors["layer.0"] += 1
    assert made.publish("part").ok
    assert contents(held) == contents(whole | source.tensors)


def test_base_that_is_changed_before_it_was_read_is_named(fleet, base):
    held = copied(checkpoint())
    made = fleet(trained(checkpoint()), base=base)
    made.join(held)
    save_file(checkpoint(5), base / "model.safetensors")
    with pytest.raises(SourceError, match=r"the base was changed since .* before 'mtp\.head'"):
        made.publish("v1")


class Changing:
    """A source of a part at one time, and of the whole at another."""

    def __init__(self, tensors):
        self.tensors = tensors

    @property
    def metadata(self):
        return StateDictSource(self.tensors).metadata

    def iter_full(self):
        return iter(self.tensors.items())

    iter_local = iter_full


class Failing(StateDictTarget):
    """A model that raises at its last tensor, once it has taken the others; every other time."""

    fails = False
    num_failed = 0

    def apply(self, tensors):
        self.num_failed += self.fails
        if not self.num_failed % 2:
            super().apply(tensors)
            return
        *first, last = tensors.items()
        super().apply(dict(first))
        raise RuntimeError(f"no {last[0]}")


def test_way_back_has_the_whole_set(fleet, base, commit):
    part, held = trained(checkpoint()), copied(checkpoint())
    target = Failing(held, commit)
    made = fleet(part, base=base)
    made.join(target)
    part["layer.0"] += 1
    target.fails = True
    with pytest.raises(CommitError, match="no worker holds"):
        made.publish("v1")
    assert contents(held) == contents(checkpoint())
    target.fails = False
    assert made.publish("v2").ok
    assert contents(held) == contents(checkpoint() | part)


def test_whole_update_that_fails_after_a_part_leaves_the_whole_set(fleet, base, commit):
    source = checkpoint()
    held, part = copied(source), trained(source)
    target = Failing(held, commit)

    changing = Changing(part)
    made = fleet(changing, base=base)
    made.join(target)
    part["layer.0"] += 1
    assert made.publish("v1").ok
    first = contents(held)
    changing.tensors = checkpoint(7)
    target.fails = True
    with pytest.raises(CommitError, match="no worker holds"):
        made.publish("v2")
    assert contents(held) == first == contents(source | part)
    target.fails = False
    assert made.publish("v3").ok
    assert contents(held) == contents(checkpoint(7))


def test_sets_of_earlier_rounds_are_let_go(fleet, base, commit):
    seen = []

    class Noting(StateDictTarget):
        def apply(self, tensors):
            seen.append(weakref.ref(tensors["layer.0"]))
            super().apply(tensors)

    part, held = trained(checkpoint()), copied(checkpoint())
    made = fleet(part, base=base)
    made.join(Noting(held, commit))
    for number in range(4):
        part["layer.0"] += 1
        assert made.publish(f"v{number}").ok
    gc.collect()
    # The last is what a failed commit would go back to.
    assert [each() is None for each in seen] == [True, True, True, False]


def test_tied_name_does_not_stay_with_old_bytes(fleet, tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    torch.manual_seed(0)
    model, served = Tied(), Tied()
    whole = {name: each.detach().clone() for name, each in model.state_dict().items()}
    assert set(whole) == {"embed.weight", "head.weight"}
    save_file(whole | {"tower": torch.ones(2)}, tmp_path / "model.safetensors")
    served.register_buffer("tower", torch.ones(2))
    made = fleet(model, base=tmp_path)
    made.join(served)
    with torch.no_grad():
        model.embed.weight.add_(1)
    report = made.publish("v1")
    assert report.ok
    assert report.nbytes == model.embed.weight.nbytes
    assert torch.equal(served.head.weight, model.embed.weight)
    # A source that does not tell that names are tied is refused, and not half of the tie committed.
    plain = fleet({"embed.weight": model.embed.weight.detach() + 1}, base=tmp_path)
    other = Tied()
    other.load_state_dict(whole)
    other.register_buffer("tower", torch.ones(2))
    plain.join(other)
    with pytest.raises(SchemaError, match=r"'embed.weight' and 'head.weight' are one tensor"):
        plain.publish("v1")


def test_missing_names_hint_at_the_base(fleet):
    made = fleet(trained(checkpoint()))
    made.join(copied(checkpoint()))
    with pytest.raises(SchemaError, match=r"Publisher\(base=FOLDER\)"):
        made.publish("v1")


def test_tensors_that_stay_are_not_cast(fleet, base):
    held = {name: tensor.double() for name, tensor in checkpoint().items()}
    made = fleet(trained(checkpoint()), base=base)
    made.join(held, cast=True)
    with pytest.raises(SchemaError, match=r"in 4 of its names:\n  tower.0|mtp.head"):
        made.publish("v1")


def test_target_that_cannot_tell_what_it_has_refuses(fleet, base):
    class Opaque:
        def schema(self):
            return None

        def apply(self, tensors):
            self.tensors = dict(tensors)

        def capture(self):
            return None

    made = fleet(trained(checkpoint()), base=base)
    made.join(Opaque())
    with pytest.raises(SchemaError, match="cannot be told"):
        made.publish("v1")


def test_late_worker_is_brought_the_part_and_proves_the_rest(fleet, base):
    part = trained(checkpoint())
    made = fleet(part, base=base)
    made.join(copied(checkpoint()))
    part["layer.0"] += 1
    report = made.publish("v1")
    late, wrong = copied(checkpoint()), copied(checkpoint(3))
    made.join(late)
    for _ in range(500):
        made.step()
        if contents(late) == contents(checkpoint() | part):
            break
    assert contents(late) == contents(checkpoint() | part)
    made.join(wrong)
    part["layer.0"] += 1
    report = made.publish("v2")
    assert report.ok
    (left_out,) = [each for each in report.workers if each.outcome == "behind"]
    assert isinstance(left_out.error, DigestMismatchError)
    assert "not sent" in left_out.error.message
    assert contents(wrong) == contents(checkpoint(3))
    assert report.workers[0].fingerprint == module_fingerprint(late)


def test_versions_in_files_state_what_stays(fleet, base, tmp_path):
    part = trained(checkpoint())
    made = fleet(part, base=base, engine="file", options={"path": str(tmp_path / "store")})
    held = copied(checkpoint())
    made.join(held)
    first = made.publish("v1").fingerprint
    part["layer.0"] += 1
    assert made.publish("v2").fingerprint != first
    report = made.finish(made.publisher.rollback("v1", wait=False))
    assert (report.fingerprint, report.ok) == (first, True)
    assert contents(held) == contents(checkpoint())


def test_worker_that_follows_versions_in_files_proves_what_stays(fleet, base, tmp_path):
    part, store = trained(checkpoint()), tmp_path / "store"
    made = fleet(part, base=base, engine="file", options={"path": str(store)})
    made.join(copied(checkpoint()))
    part["layer.0"] += 1
    fingerprint = made.publish("v1").fingerprint
    right, wrong = copied(checkpoint()), copied(checkpoint(5))
    with (
        closing(WorkerSession(right, join=f"file:{store}")) as follower,
        closing(WorkerSession(wrong, join=f"file:{store}")) as other,
    ):
        deadline = Deadline(10.0)
        while follower.version != "v1" or other.status().refusal is None:
            deadline.check("both workers")
            follower.commit_pending(0.01)
            other.commit_pending(0.01)
        assert (follower.fingerprint, contents(right)) == (
            fingerprint,
            contents(checkpoint() | part),
        )
        assert "is not sent, and this worker has other bytes" in str(other.status().refusal)
    assert contents(wrong) == contents(checkpoint(5))


def test_base_is_read_once_and_by_each_algorithm(base, monkeypatch):
    checkpoint_, read = BaseCheckpoint(base), []
    tensor = checkpoint_._source.tensor
    monkeypatch.setattr(
        checkpoint_._source, "tensor", lambda name: read.append(name) or tensor(name)
    )
    sent = StateDictSource(trained(checkpoint())).metadata
    moved = []
    found = checkpoint_.kept(sent, (), "xxh3-128", lambda: moved.append(1))
    assert [each.piece.name for each in found] == sorted([*TOWER, HEAD])
    assert (len(read), len(moved)) == (4, 4)
    assert checkpoint_.kept(sent, (), "xxh3-128", lambda: moved.append(1)) == found
    assert len(read) == 4
    assert checkpoint_.kept(sent, (), "wsum64", lambda: None) != found


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layer.9": torch.zeros(3, 4)}, r"has 'layer\.9', which the base does not have"),
        ({"layer.0": torch.zeros(4, 3)}, r"float32 \[4, 3\], the base as float32 \[3, 4\]"),
        (
            {"layer.0": torch.zeros(3, 4, dtype=torch.int8)},
            r"as int8 \[3, 4\], the base as float32",
        ),
    ],
    ids=["name", "shape", "dtype"],
)
def test_tensor_that_the_base_does_not_have_so_is_refused_before_a_byte_moves(
    fleet, base, wrong, words
):
    held = copied(checkpoint())
    made = fleet(trained(checkpoint()) | wrong, base=base)
    made.join(held)
    with pytest.raises(SourceError, match=words):
        made.publish("v1")
    assert contents(held) == contents(checkpoint())


def test_source_without_a_tensor_is_refused(fleet, base):
    made = fleet({}, base=base)
    made.join(copied(checkpoint()))
    with pytest.raises(SourceError, match="has no tensor"):
        made.publish("v1")


def test_folder_without_a_checkpoint_is_refused_at_once(fleet, base, tmp_path):
    with pytest.raises(SourceError, match="expected the folder of a checkpoint"):
        fleet(trained(checkpoint()), base=base / "model.safetensors")
    (base / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="no checkpoint"):
        fleet(trained(checkpoint()), base=tmp_path)


def test_kept_pieces_are_judged_as_others():
    from wtransfer.errors import ManifestError
    from wtransfer.manifest import Identities, Manifest

    a, b = Piece("a", "float32", (2,)), Piece("b", "float32", (3,))
    digests = ["0" * 32, "1" * 32]
    both = Identities(Manifest((a, b))).fingerprint(digests)
    part = Manifest((a,), kept=(KeptPiece(b, digests[1]),))
    part.check()
    assert Identities(part).fingerprint(digests[:1]) == both
    assert (part.nbytes, len(part.whole)) == (8, 2)
    assert part.identity() != Manifest((a,)).identity()
    for wrong, words in (
        (KeptPiece(a, digests[1]), "more than once"),
        (KeptPiece(b, "short"), "32 hexadecimal digits"),
        (KeptPiece(Piece("b", "int3", (3,)), digests[1]), "int3"),
    ):
        with pytest.raises(ManifestError, match=words):
            Manifest((a,), kept=(wrong,)).check()
    with pytest.raises(ValueError, match="2 digests for 1 pieces"):
        Identities(part).fingerprint(digests)
