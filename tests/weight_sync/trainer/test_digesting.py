"""The source as engines get it: every tensor is compared, digested and sent as it is then."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.errors import ManifestError, RoundAbortedError, SourceError
from wtransfer.testing.contents import contents
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.sharded import ShardedSource
from wtransfer.weight_sync.trainer.source import StateDictSource
from wtransfer.weights import ParamMeta

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3), "c": torch.empty(0, 2)}


class Custom(StateDictSource):
    """A source whose passes may differ from its metadata."""

    def __init__(self, tensors, read):
        super().__init__(tensors)
        self.iter_full = read


def planned(source, algorithm="xxh3-128"):
    made = DigestingSource(source, algorithm)
    made.plan()
    return made


@pytest.fixture
def digesting():
    return planned(StateDictSource(TENSORS))


def packed(source, nbytes=1 << 20, kind="array"):
    """What one pass copies, bucket by bucket, by name; memory is full of NaN before."""
    layout, found, memories = source.layout, {}, []

    def allocate(bucket):
        memories.append(np.full(bucket.nbytes, 0xFF, dtype=np.uint8))
        return torch.from_numpy(memories[-1]) if kind == "tensor" else memories[-1]

    for bucket in source.iter_buckets(nbytes, allocate):
        for number in range(bucket.first, bucket.last):
            start = layout.starts[number] - bucket.start
            content = memories[-1][start : start + layout.sizes[number]]
            found[layout.names[number]] = content.tobytes()
    return found


def read_all(source):
    return list(source.iter_full())


def copy_all(source):
    return list(source.iter_into(lambda meta: memoryview(bytearray(meta.nbytes))))


PASSES = [read_all, copy_all, packed]


def expected_bytes(tensors):
    return {
        name: each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, each in tensors.items()
    }


# -- what is sent


# Larger than what is read and hashed in one go, so that several reads follow each other.
STORED = {"a": torch.arange(300_001.0), "b": torch.tensor(3), "c": torch.empty(0, 2)}


@pytest.fixture
def checkpoint(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(STORED, file)
    return file


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_checkpoint_arrives_in_the_engines_memory_with_its_digests(checkpoint, kind):
    source = planned(ShardedSource(CheckpointSource(checkpoint)))
    assert packed(source, kind=kind) == expected_bytes(STORED)
    expected = {name: digest(tensor) for name, tensor in STORED.items()}
    assert dict(zip(source.layout.names, source.digests(), strict=True)) == expected


def test_a_checkpoint_is_read_into_the_engines_memory_and_nowhere_else(checkpoint, monkeypatch):
    source, read, memories, found = planned(CheckpointSource(checkpoint)), os.preadv, [], []
    num_bytes = sum(each.nbytes for each in STORED.values())
    header_nbytes = checkpoint.stat().st_size - num_bytes

    def watched(fd, buffers, offset):
        if offset >= header_nbytes:
            found.extend(np.frombuffer(each, np.uint8) for each in buffers)
        return read(fd, buffers, offset)

    def allocate(bucket):
        memories.append(np.empty(bucket.nbytes, np.uint8))
        return memories[-1]

    monkeypatch.setattr(os, "preadv", watched)
    list(source.iter_buckets(1 << 30, allocate))
    assert sum(each.nbytes for each in found) == num_bytes
    for each in found:
        assert any(np.shares_memory(each, memory) for memory in memories)


def test_a_file_that_is_cut_while_the_engine_copies_is_the_sources_error(checkpoint):
    source = planned(CheckpointSource(checkpoint))

    def allocate(bucket):
        os.truncate(checkpoint, checkpoint.stat().st_size - 4)
        return np.empty(bucket.nbytes, np.uint8)

    with pytest.raises(SourceError, match="cut off: tensor 'a' ends") as caught:
        list(source.iter_buckets(1 << 30, allocate))
    assert caught.value.piece == "a"


class Unread:
    """A tensor that a user's source has elsewhere."""

    dtype, shape, nbytes = TENSORS["a"].dtype, tuple(TENSORS["a"].shape), TENSORS["a"].nbytes

    def __init__(self, digesting):
        self._digesting = digesting

    def read(self, into, start):
        # Slow storage is no stall of the round.
        assert self._digesting[0].reading
        raise OSError("the store is gone")


def test_failed_read_of_an_unread_tensor_is_a_source_error():
    user = Custom({"a": TENSORS["a"]}, None)
    user.iter_unread = lambda: iter([("a", Unread(made))])
    made = [planned(user)]
    with pytest.raises(SourceError, match="iter_unread raised OSError: the store is gone"):
        packed(made[0])
    assert not made[0].reading


def test_yielded_tensors_are_digested_in_plan_order(digesting):
    assert contents(dict(digesting.iter_full())) == contents(TENSORS)
    assert digesting.digests() == [digest(tensor) for tensor in TENSORS.values()]


def test_copying_and_digesting_in_one_pass_gives_the_same(digesting):
    memory = {}

    def allocate(meta):
        memory[meta.name] = bytearray(TENSORS[meta.name].nbytes)
        return memoryview(memory[meta.name])

    assert [meta.name for meta, _ in digesting.iter_into(allocate)] == list(TENSORS)
    assert digesting.digests() == [digest(tensor) for tensor in TENSORS.values()]
    assert bytes(memory["a"]) == TENSORS["a"].numpy().tobytes()


def test_engine_may_do_to_its_tensors_what_it_likes():
    module = torch.nn.Linear(3, 2)
    source = planned(StateDictSource(dict(module.named_parameters())))
    for _, tensor in source.iter_full():
        assert not tensor.requires_grad
        tensor.t_()
    assert module.weight.shape == (2, 3)
    memory = {}

    def allocate(meta):
        # As an engine for devices does it: what it hands out is written to through a view.
        memory[meta.name] = torch.empty(meta.nbytes, dtype=torch.uint8).view(meta.dtype)
        return memory[meta.name].view(torch.uint8)

    list(source.iter_into(allocate))
    for name, parameter in module.named_parameters():
        assert memory[name].tolist() == parameter.flatten().tolist()


@pytest.mark.parametrize("algorithm", ["xxh3-128", "wsum64"])
@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("nbytes", [1, 1 << 12, 1 << 30])
def test_tensors_that_lie_in_any_way_are_packed_and_digested_alike(kind, algorithm, nbytes):
    module = torch.nn.Linear(20, 20)
    tensors = {
        **{f"t{number}": torch.full((10,), float(number)) for number in range(100)},
        "strided": torch.arange(12.0).view(3, 4).t(),
        "bf16": torch.full((5,), 2, dtype=torch.bfloat16),
        "large": torch.full((1 << 18,), 3.0),
        "empty": torch.empty(0),
        "scalar": torch.tensor(4),
        "part": torch.arange(8.0)[4:],
        "parameter": module.weight,
        "transposed": module.weight.t(),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "nan": torch.tensor([float("nan"), 1.0]),
        "no tensor": 3.0,
    }
    source, packed_at = planned(StateDictSource(tensors), algorithm), []
    source.on_packed = lambda: packed_at.append(1)
    sent = {name: each for name, each in tensors.items() if name != "no tensor"}
    sent["conjugate"] = sent["conjugate"].resolve_conj()
    assert packed(source, nbytes, kind) == expected_bytes(sent)
    assert packed_at == [1]
    assert source.digests() == [digest(each, algorithm) for each in sent.values()]
    assert source.nonfinite == {"nan": 1}


def test_a_source_may_yield_one_buffer_again_and_again():
    names, buffer = [f"t{number}" for number in range(30)], torch.zeros(1024)
    read = lambda: ((name, buffer.fill_(number)) for number, name in enumerate(names))  # noqa: E731
    source = planned(Custom({name: buffer.clone() for name in names}, read))
    assert packed(source) == expected_bytes(
        {name: torch.full((1024,), float(number)) for number, name in enumerate(names)}
    )


# FAULTS 8
@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "bfloat16", "float16", "float8_e5m2", "complex64"],
)
def test_nonfinite_values_are_counted_in_every_kind_of_pass(dtype):
    tensor = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), -0.0])
    for read in PASSES:
        tensors = {"w": tensor.to(getattr(torch, dtype)), "fine": torch.ones(2)}
        source = planned(StateDictSource(tensors))
        read(source)
        assert source.nonfinite == {"w": 3}


class Doubled(StateDictSource):
    """Yields other tensors than it was made of."""

    def iter_full(self):
        return iter([(name, each * 2) for name, each in super().iter_full()])


@pytest.mark.parametrize("wrap", [lambda source: source, ShardedSource])
def test_a_class_with_passes_of_its_own_is_asked_for_them(wrap):
    source = planned(wrap(Doubled(TENSORS)))
    assert packed(source) == expected_bytes({n: t * 2 for n, t in TENSORS.items()})


# -- round after round


def reshaped(tensors):
    tensors["a"].resize_(5)


def retyped(tensors):
    tensors["a"] = tensors["a"].double()


def added(tensors):
    tensors["new"] = torch.ones(4)


def removed(tensors):
    del tensors["b"]


def parted(tensors):
    tensors["tied"].data = torch.full((3,), 9.0)


def turned(tensors):
    tensors["square"].data = tensors["square"].data.t()


def replaced(tensors):
    tensors["a"] = torch.full((2,), 5.0)


def swapped(tensors):
    tensors["a"], tensors["c"] = tensors["c"], tensors["a"]


@pytest.mark.parametrize(
    "change", [reshaped, retyped, added, removed, parted, turned, replaced, swapped]
)
def test_changed_tensors_are_planned_and_sent_in_the_next_round(change):
    b = torch.ones(3)
    tensors = {
        "a": torch.zeros(2),
        "b": b,
        "c": torch.tensor([3.0, 4.0]),
        "square": torch.arange(9.0).view(3, 3),
        "tied": b.detach(),
    }
    source = DigestingSource(StateDictSource(tensors))
    layout = source.plan()
    packed(source)
    assert source.plan() is layout
    change(tensors)
    manifest = source.plan().manifest
    sent = packed(source)
    named = {name: tensors[name] for name in sent}
    assert sent == expected_bytes(named)
    assert set(tensors) - set(sent) <= ({"tied"} if change is not parted else set())
    assert source.digests() == [digest(each) for each in named.values()]
    assert [(p.name, p.shape) for p in manifest.pieces] == [
        (name, tuple(each.shape)) for name, each in named.items()
    ]


def test_metadata_of_a_class_of_ones_own_is_read_anew():
    class Meta:
        def __init__(self, tensor):
            self.name, self.dtype, self.shape, self.digest = "a", tensor.dtype, tensor.shape, None

    tensors = {"a": torch.zeros(2)}
    meta = Meta(tensors["a"])

    class Own(Custom):
        metadata = (meta,)

    source = DigestingSource(Own({}, lambda: iter(tensors.items())))
    assert source.plan().manifest.pieces[0].shape == (2,)
    tensors["a"] = torch.ones(4)
    meta.shape = (4,)
    assert source.plan().manifest.pieces[0].shape == (4,)
    assert packed(source) == expected_bytes(tensors)


def test_memory_that_moves_after_the_plan_is_read_where_it_is():
    tensors = {"a": torch.zeros(4), "b": torch.ones(4)}
    source = planned(StateDictSource(tensors))
    tensors["a"].untyped_storage().resize_(1 << 22)
    tensors["a"].fill_(7)
    assert packed(source) == expected_bytes(tensors)


# -- what is refused


@pytest.mark.parametrize("read", PASSES)
def test_weights_that_change_between_two_passes_are_caught(read):
    tensors = {"a": torch.zeros(3)}
    source = planned(StateDictSource(tensors))
    read(source)
    tensors["a"] += 1
    with pytest.raises(SourceError, match="'a' had other bytes in a second pass") as caught:
        read(source)
    assert caught.value.piece == "a"
    # A new plan forgets the digests before.
    source.plan()
    read(source)
    assert source.digests() == [digest(tensors["a"])]


def test_a_digest_that_was_known_before_is_compared():
    class Sealed(StateDictSource):
        @property
        def metadata(self):
            known = digest(torch.zeros(3))
            return [ParamMeta(m.name, m.dtype, m.shape, digest=known) for m in super().metadata]

    packed(planned(Sealed({"a": torch.zeros(3)})))
    with pytest.raises(SourceError, match="'a' has other bytes than when its digest"):
        packed(planned(Sealed({"a": torch.ones(3)})))


def test_an_engine_that_does_not_read_everything_is_caught(digesting):
    next(digesting.iter_full())
    with pytest.raises(SourceError, match="without reading 2 tensors of the source, first 'b'"):
        digesting.digests()


def freed(nbytes):
    tensor = torch.full((2, 3), 3.0)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def _bug():
    raise KeyError("my own bug")
    yield


# What sharding frameworks leave between two steps (`freed`) would publish what lies behind.
@pytest.mark.parametrize("read", PASSES)
@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([("b", TENSORS["b"])], "every pass must follow the order"),
        ([("a", TENSORS["a"].double())], r"\('a', torch.float64, .*its metadata says .*float32"),
        ([("a", TENSORS["a"].view(3, 2))], r"\('a', torch.float32, \(3, 2\)\), its metadata says"),
        ([("a", "no tensor")], r"yields \('a', 'str', \(\)\)"),
        ([(torch.ones(2), torch.ones(2, 3))], r"yields \('Tensor', "),
        (list(TENSORS.items())[:2], "ended before 'c'"),
        ([*TENSORS.items(), ("d", TENSORS["a"])], "yields 'd' after the last tensor"),
        ([("a", freed(0))], "'a' has less memory than its shape needs"),
        ([("a", freed(20))], "'a' has less memory than its shape needs"),
        ([torch.zeros(3)], "the source's iter_full raised ValueError"),
        (None, "the source's iter_full raised TypeError"),
        (_bug, "the source's iter_full raised KeyError: 'my own bug'"),
    ],
)
def test_a_source_that_contradicts_its_metadata_or_raises_is_named(pairs, text, read):
    source = planned(Custom(TENSORS, pairs if pairs is _bug else lambda: pairs))
    with pytest.raises(SourceError, match=text) as caught:
        read(source)
    assert (caught.value.__cause__ is not None) is ("raised" in text)


def test_an_error_in_the_metadata_is_the_sources():
    class Bad:
        metadata = ("no ParamMeta",)

    with pytest.raises(SourceError, match="the source's metadata raised AttributeError"):
        DigestingSource(Bad()).plan()


@pytest.mark.parametrize("error", [MemoryError, RoundAbortedError])
def test_a_shortage_and_errors_of_ours_stay_what_they_are(error):
    def read():
        raise error("no")

    with pytest.raises(error, match="no"):
        read_all(planned(Custom(TENSORS, read)))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtype_that_cannot_be_sent_is_refused_at_the_plan():
    with pytest.raises(ManifestError, match="complex32 cannot be sent"):
        planned(StateDictSource({"w": torch.zeros(2, dtype=torch.complex32)}))


PARTIAL_PASSES = {
    "tensors": lambda source: source.iter_full(),
    "copies": lambda source: source.iter_into(lambda meta: np.empty(meta.nbytes, np.uint8)),
    "buckets": lambda source: source.iter_buckets(8, lambda b: np.empty(b.nbytes, np.uint8)),
}


@pytest.mark.parametrize("kind", PARTIAL_PASSES)
def test_a_stopped_source_ends_the_engines_loop_and_is_not_said_to_be_packed(digesting, kind):
    said = []
    digesting.on_packed = lambda: said.append(1)
    passing = PARTIAL_PASSES[kind](digesting)
    next(passing)
    digesting.stop("a worker was lost")
    with pytest.raises(RoundAbortedError, match="a worker was lost"):
        list(passing)
    assert said == []


def test_a_round_that_ended_after_its_last_tensor_is_not_said_to_be_packed():
    source, said = planned(StateDictSource({"a": torch.ones(4)})), []
    source.on_packed = lambda: said.append(1)
    one_by_one = PARTIAL_PASSES["copies"](source)
    next(one_by_one)
    source.stop("a worker was lost")
    with pytest.raises(RoundAbortedError, match="a worker was lost"):
        next(one_by_one)
    assert said == []
