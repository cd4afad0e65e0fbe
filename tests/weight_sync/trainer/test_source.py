"""Where weights come from, and what is refused there."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from wtransfer.engines.interface import ParamMeta
from wtransfer.errors import ManifestError, RoundAbortedError, SourceError
from wtransfer.testing.contents import contents
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.source import ModuleSource, StateDictSource, as_source

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3), "c": torch.empty(0, 2)}


def whole(source):
    return dict(source.iter_full())


# -- mappings and modules


@pytest.mark.parametrize("make", [StateDictSource, as_source])
def test_a_mapping_is_yielded_in_the_order_of_its_metadata(make):
    source = make(TENSORS)
    assert [meta.name for meta in source.metadata] == ["a", "b", "c"]
    assert source.metadata[0] == ParamMeta("a", torch.float32, (2, 3))
    assert contents(whole(source)) == contents(TENSORS)
    assert contents(dict(source.iter_local())) == contents(TENSORS)


def test_a_mapping_is_read_anew_in_every_round():
    tensors = {"a": torch.zeros(2)}
    source = StateDictSource(tensors)
    tensors["a"] = torch.ones(3)
    assert source.metadata[0].shape == (3,)
    assert contents(whole(source)) == contents(tensors)


def tie(tensors):
    tensors["b"] = tensors["a"]


def share(tensors):
    tensors["b"].data = tensors["a"].data


def fold(tensors):
    tensors["a"].data = tensors["a"].data.view(2, 2)


def swap(tensors):
    tensors["a"] = tensors.pop("a")


def retype(tensors):
    tensors["b"].data = tensors["b"].data.double()


def empty(tensors):
    tensors["b"].data = torch.empty(0)


@pytest.mark.parametrize("change", [tie, share, fold, swap, retype, empty])
def test_what_a_mapping_has_become_is_said_however_it_was_before(change):
    tensors = {"a": torch.zeros(4), "b": torch.ones(4)}
    source = StateDictSource(tensors)
    before = source.metadata
    change(tensors)
    for _ in range(2):
        assert source.metadata == StateDictSource(tensors).metadata != before
        assert contents(whole(source)) == contents(whole(StateDictSource(tensors)))


# FAULTS 45
def test_a_module_sends_tied_weights_once_and_buffers_too():
    module = nn.Sequential(
        nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False)
    )
    module[2].weight = module[0].weight
    sent = whole(ModuleSource(module))
    expected = {name: t for name, t in module.state_dict().items() if name != "2.weight"}
    assert contents(sent) == contents(expected)
    assert "1.num_batches_tracked" in sent


class Proxy:
    """Passes on whatever it is asked for."""

    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)


def test_a_source_may_pass_attributes_on():
    proxy = Proxy(StateDictSource({"a": torch.ones(2)}))
    assert as_source(proxy) is proxy


def test_what_engines_get_has_no_gradient():
    module = nn.Linear(3, 3)
    source = DigestingSource(ModuleSource(module))
    source.plan()
    assert not any(tensor.requires_grad for _, tensor in source.iter_full())
    memory = {}

    def allocate(meta):
        # As an engine for devices does it: what it hands out is written to through a view.
        memory[meta.name] = torch.empty(meta.nbytes, dtype=torch.uint8).view(meta.dtype)
        return memory[meta.name].view(torch.uint8)

    assert [meta.name for meta, _ in source.iter_into(allocate)] == ["weight", "bias"]
    for name, parameter in module.named_parameters():
        assert not memory[name].requires_grad
        assert memory[name].tolist() == parameter.flatten().tolist()


def test_what_is_no_source_is_refused():
    with pytest.raises(TypeError, match="cannot publish a list: expected a torch module"):
        as_source([torch.zeros(1)])


# -- the source as engines get it


class Custom(StateDictSource):
    """A source whose passes may differ from its metadata."""

    def __init__(self, metadata, pairs):
        super().__init__(metadata)
        self.pairs = pairs

    def iter_full(self):
        yield from self.pairs


@pytest.fixture
def digesting():
    source = DigestingSource(StateDictSource(TENSORS))
    source.plan()
    return source


def test_what_is_yielded_is_digested_in_plan_order(digesting):
    assert contents(whole(digesting)) == contents(TENSORS)
    assert digesting.digests() == [digest(tensor) for tensor in TENSORS.values()]


def test_copying_and_digesting_in_one_pass_gives_the_same(digesting):
    memory = {}

    def allocate(meta):
        memory[meta.name] = bytearray(TENSORS[meta.name].nbytes)
        return memoryview(memory[meta.name])

    assert [meta.name for meta, _ in digesting.iter_into(allocate)] == list(TENSORS)
    assert digesting.digests() == [digest(tensor) for tensor in TENSORS.values()]
    assert bytes(memory["a"]) == TENSORS["a"].numpy().tobytes()


def test_an_engine_that_does_not_read_everything_is_caught(digesting):
    next(digesting.iter_full())
    with pytest.raises(SourceError, match="without reading 2 tensors of the source, first 'b'"):
        digesting.digests()


def test_weights_that_change_between_two_passes_are_caught():
    tensors = {"a": torch.zeros(3)}
    source = DigestingSource(StateDictSource(tensors))
    source.plan()
    list(source.iter_full())
    tensors["a"] += 1
    with pytest.raises(SourceError, match="other bytes in a second pass") as caught:
        list(source.iter_full())
    assert caught.value.piece == "a"


def test_a_new_plan_forgets_the_digests_before():
    tensors = {"a": torch.zeros(3)}
    source = DigestingSource(StateDictSource(tensors))
    for _ in range(2):
        tensors["a"] += 1
        source.plan()
        list(source.iter_full())
    assert source.digests() == [digest(tensors["a"])]


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([("b", TENSORS["b"])], "every pass must follow the order"),
        ([("a", TENSORS["a"].double())], "its metadata says .*float32"),
        ([("a", TENSORS["a"].view(3, 2))], "its metadata says"),
        (list(TENSORS.items())[:2], "ended before 'c'"),
        ([*TENSORS.items(), ("d", TENSORS["a"])], "yields 'd' after the last tensor"),
    ],
)
def test_a_source_that_contradicts_its_metadata_is_caught(pairs, text):
    source = DigestingSource(Custom(TENSORS, pairs))
    source.plan()
    with pytest.raises(SourceError, match=text):
        list(source.iter_full())


def _bug():
    raise KeyError("my own bug")
    yield


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (_bug, "the source's iter_full raised KeyError: 'my own bug'"),
        (lambda: None, "the source's iter_full raised TypeError"),
        (lambda: iter([torch.zeros(3)]), "the source's iter_full raised ValueError"),
        (lambda: iter([("a", "no tensor")]), r"yields \('a', 'str', \(\)\)"),
        (lambda: iter([(torch.ones(2), torch.ones(2, 3))]), r"yields \('Tensor', "),
    ],
)
@pytest.mark.parametrize("method", ["iter_full", "iter_into"])
def test_an_error_in_the_source_is_the_sources(read, text, method):
    custom = Custom(TENSORS, ())
    custom.iter_full = read
    source = DigestingSource(custom)
    source.plan()
    passing = source.iter_full() if method == "iter_full" else source.iter_into(_allocate)
    with pytest.raises(SourceError, match=text) as caught:
        list(passing)
    if "raised" in text:
        assert caught.value.__cause__ is not None


def test_an_error_in_the_metadata_is_the_sources():
    class Bad:
        metadata = ("no ParamMeta",)

    with pytest.raises(SourceError, match="the source's metadata raised AttributeError"):
        DigestingSource(Bad()).plan()


@pytest.mark.parametrize("error", [MemoryError, RoundAbortedError])
def test_a_shortage_and_errors_of_ours_stay_what_they_are(error):
    def read():
        raise error("no")

    custom = Custom(TENSORS, ())
    custom.iter_full = read
    source = DigestingSource(custom)
    source.plan()
    with pytest.raises(error, match="no"):
        list(source.iter_full())


def test_a_stopped_source_ends_the_engines_loop(digesting):
    passing = digesting.iter_full()
    next(passing)
    digesting.stop("a worker was lost")
    with pytest.raises(RoundAbortedError, match="a worker was lost"):
        next(passing)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_no_update_can_hold_is_refused_at_the_plan():
    with pytest.raises(ManifestError, match="complex32 cannot be sent"):
        DigestingSource(StateDictSource({"w": torch.zeros(2, dtype=torch.complex32)})).plan()


# FAULTS 8
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.float8_e5m2,
        torch.complex64,
    ],
    ids=str,
)
def test_what_is_not_finite_is_counted_however_it_is_read(dtype):
    tensor = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), -0.0]).to(dtype)
    for read in (lambda s: list(s.iter_full()), _copy):
        source = DigestingSource(StateDictSource({"w": tensor, "fine": torch.ones(2)}))
        source.plan()
        read(source)
        assert source.nonfinite == {"w": 3}


def _allocate(meta):
    return memoryview(bytearray(meta.dtype.itemsize * torch.Size(meta.shape).numel()))


def _copy(source):
    list(source.iter_into(_allocate))


# What sharding frameworks leave between two steps; reading it would publish what lies behind.
@pytest.mark.parametrize("nbytes", [0, 16])
def test_a_tensor_whose_storage_was_freed_or_cut_is_refused(nbytes):
    freed = torch.full((1000,), 3.0)
    freed.untyped_storage().resize_(nbytes)
    source = DigestingSource(StateDictSource({"a": torch.ones(2), "b": freed}))
    source.plan()
    with pytest.raises(SourceError, match="its storage was freed or cut") as caught:
        list(source.iter_full())
    assert caught.value.piece == "b"


def test_what_an_engine_does_to_a_tensor_is_not_done_to_the_trainers():
    tensors = {"buffer": torch.ones(2, 3)}
    source = DigestingSource(StateDictSource(tensors))
    source.plan()
    for _, tensor in source.iter_full():
        tensor.t_()
    assert tensors["buffer"].shape == (2, 3)


@pytest.mark.parametrize(
    ("facts", "shape"),
    [
        ({}, None),
        ({"owners": (0, 2)}, (2,)),
        ({"owners": (0, 1, 2, 3), "mesh": types.SimpleNamespace(shape=torch.Size([2, 2]))}, (2, 2)),
    ],
    ids=["whole on every rank", "owners", "a mesh"],
)
def test_the_shape_of_a_mesh_is_told_as_plain_numbers(facts, shape):
    told = ParamMeta("a", torch.float32, (8, 8), **facts).mesh_shape
    assert told == shape
    assert type(told) in (tuple, type(None))
