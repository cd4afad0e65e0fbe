"""The form of weights on the wire: names and views of a form that loses and doubles nothing."""

from __future__ import annotations

import logging
import re
import resource
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import wtransfer
from wtransfer import Publisher
from wtransfer.errors import SourceError
from wtransfer.weight_sync.checkpoint_form import ModuleForm, StreamForm, in_form
from wtransfer.weight_sync.storages import memory_of
from wtransfer.weight_sync.trainer.source import as_source
from wtransfer.weights import ParamMeta


def fused():
    """Weights as a trainer may hold them: two projections in one tensor, and experts stacked."""
    return {
        "qk": torch.arange(24.0).view(6, 4),
        "experts": torch.arange(24.0).view(2, 3, 4) + 100,
        "norm": torch.ones(4),
    }


def split(tensors):
    """Return the form of the checkpoint: views of the same memory."""
    formed = {"norm": tensors["norm"], "q": tensors["qk"][:4], "k": tensors["qk"][4:]}
    formed |= {f"experts.{n}": each.t() for n, each in enumerate(tensors["experts"])}
    return formed


def whole(source):
    return {name: each.clone() for name, each in source.iter_full()}


def test_form_of_views_is_sent_without_a_copy(caplog):
    tensors = fused()
    source = as_source(tensors, split)
    names = [meta.name for meta in source.metadata]
    assert names == ["norm", "q", "k", "experts.0", "experts.1"]
    sent = dict(source.iter_full())
    own = {each.untyped_storage().data_ptr() for each in tensors.values()}
    assert {each.untyped_storage().data_ptr() for each in sent.values()} == own
    assert torch.equal(sent["experts.1"], tensors["experts"][1].t())
    tensors["qk"].fill_(7.0)
    assert torch.equal(whole(source)["k"], torch.full((2, 4), 7.0))
    assert caplog.records == []


def test_form_is_asked_again_only_when_the_tensors_are_others():
    tensors, calls = fused(), []

    def counted(given):
        calls.append(1)
        return split(given)

    source = as_source(tensors, counted)
    for value in (1.0, 2.0):
        # New memory, of the same shape: an optimizer or a commit may replace it.
        tensors["qk"] = torch.full((6, 4), value)
        assert torch.equal(whole(source)["k"], torch.full((2, 4), value))
        assert [meta.name for meta in source.metadata] == list(split(tensors))
    assert len(calls) == 1
    tensors["experts"] = torch.ones(3, 3, 4)
    assert "experts.2" in whole(source)
    assert len(calls) == 2


def test_parts_of_one_buffer_are_found_where_they_lie_now():
    flat = torch.arange(8.0)
    tensors = {"a": flat[:4], "b": flat[4:]}
    source = as_source(tensors, lambda t: {"a": t["a"], "b.0": t["b"][:2], "b.1": t["b"][2:]})
    assert whole(source)["b.1"].tolist() == [6.0, 7.0]
    tensors |= {"a": flat[2:6], "b": torch.arange(10.0, 14.0)}
    assert whole(source)["b.1"].tolist() == [12.0, 13.0]
    flat = torch.arange(20.0, 32.0)
    tensors |= {"a": flat[:4], "b": flat[8:]}
    assert whole(source)["b.1"].tolist() == [30.0, 31.0]
    tensors |= {"b": flat[4:8]}
    assert whole(source)["b.1"].tolist() == [26.0, 27.0]
    # Each alone in its memory, of which it is not the begin.
    tensors |= {"a": torch.ones(4), "b": torch.arange(40.0, 48.0)[4:]}
    for _ in range(2):
        assert whole(source)["b.1"].tolist() == [46.0, 47.0]
    tensors |= {"b": torch.arange(50.0, 58.0)[::2]}
    assert whole(source)["b.1"].tolist() == [54.0, 56.0]


def test_form_of_another_dtype_has_it_in_every_round():
    source = as_source({"w": torch.arange(4.0)}, lambda t: {"w": t["w"].view(torch.int32)})
    for _ in range(2):
        assert torch.equal(whole(source)["w"], torch.arange(4.0).view(torch.int32))


def test_form_that_copies_is_told_once_and_sends_present_values(caplog):
    tensors = fused()
    source = as_source(tensors, lambda each: {**split(each), "q": each["qk"][:4] * 1.0})
    with caplog.at_level(logging.WARNING, "wtransfer"):
        for value in (1.0, 2.0):
            tensors["qk"].fill_(value)
            assert torch.equal(whole(source)["q"], torch.full((4, 4), value))
    (record,) = caplog.records
    assert "copies 1 of 5 tensors in every round (64 bytes, first 'q')" in record.getMessage()


@pytest.mark.parametrize(
    ("form", "error"),
    [
        (lambda t: {"qk": t["qk"], "norm": t["norm"]}, "has lost 96 bytes of 'experts'"),
        (lambda t: {**split(t), "q": t["qk"][:3]}, "has lost 16 bytes of 'qk'"),
        (lambda t: {**split(t), "again": t["qk"]}, "has 96 bytes of 'qk' twice"),
        (lambda t: {**split(t), "k": t["qk"][3:5]}, "has 16 bytes of 'qk' twice"),
        (lambda t: {**split(t), "k": t["qk"][:2].t()}, "has 32 bytes of 'qk' twice"),
        (lambda t: {**split(t), "again": t["norm"].clone()}, "16 bytes too many, as .*'again'"),
        (lambda t: t["not there"], "KeyError: 'not there'"),
        (lambda _: None, "TypeError"),
    ],
    ids=["lost", "part", "doubled", "shifted", "transposed", "copied", "raises", "no mapping"],
)
def test_form_that_is_not_of_the_whole_is_refused(form, error):
    with pytest.raises(SourceError, match=error):
        _ = as_source(fused(), form).metadata


@pytest.mark.parametrize(
    ("view", "error"),
    [
        (lambda t: t[:1].expand(4, 4), "has 48 bytes of 'w' twice"),
        (lambda t: t.as_strided((4, 4), (0, 1)), "has 48 bytes of 'w' twice"),
        (lambda t: t.as_strided((2, 2, 4), (0, 4, 1)), "has 32 bytes of 'w' twice"),
        (lambda t: t.as_strided((4, 4), (2, 1)), "has 24 bytes of 'w' twice"),
        (lambda t: t.as_strided((4, 4), (1, 2)), "has 24 bytes of 'w' twice"),
        (lambda t: t.as_strided((4, 4), (4, 1), 4), "has 16 bytes beside 'w'"),
        (lambda t: t.as_strided((5, 4), (4, 1)), "has 16 bytes beside 'w'"),
        (lambda t: t[:1].clone().expand(4, 4), "has 48 bytes of the copy 'w' twice"),
    ],
    ids=["expand", "stride 0", "half", "windows", "turned", "beside", "beyond", "copy"],
)
def test_form_is_judged_by_memory_where_it_has_as_many_bytes(view, error):
    # Alone in its memory, of which it is not all.
    tensors = {"w": torch.arange(20.0).view(5, 4)[:4]}
    with pytest.raises(SourceError, match=error) as caught:
        _ = as_source(tensors, lambda t: {"w": view(t["w"])}).metadata
    assert caught.value.piece == "w"


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t.unflatten(1, (2, 2)).transpose(0, 2),
        lambda t: t.view(torch.int16),
        lambda t: t.t().contiguous(),
    ],
    ids=["transposed", "split", "as integers", "copy"],
)
def test_form_of_all_elements_in_any_order_is_sent(view):
    gaps = torch.arange(24.0).view(4, 6)[:, 1:5]
    assert in_form({"w": gaps}, lambda t: {"w": view(t["w"])}).tensors["w"].nbytes == gaps.nbytes


def test_sparse_tensor_is_renamed_or_copied_as_a_whole():
    sparse = torch.eye(3).to_sparse()
    for form in (lambda t: {"x": t["w"]}, lambda t: {"x": t["w"].clone()}):
        assert list(in_form({"w": sparse}, form).tensors) == ["x"]
    with pytest.raises(SourceError, match="has lost 36 bytes of 'w'"):
        in_form({"w": sparse}, lambda _: {})


def test_expanded_tensor_of_the_models_own_is_sent_as_it_is():
    expanded = torch.ones(1, 4).expand(3, 4)
    for form in (dict, lambda t: {"w": t["w"].t()}, lambda t: {"w": t["w"].contiguous()}):
        assert in_form({"w": expanded}, form).tensors["w"].numel() == 12


@pytest.mark.parametrize(
    ("form", "error"),
    [
        (
            lambda t: {name: each.double() for name, each in t.items()},
            "has 'qk' as a copy of torch.float64, in place of torch.float32",
        ),
        (
            lambda t: {**t, "norm": t["norm"].bfloat16()},
            "has 'norm' as a copy of torch.bfloat16, in place of torch.float32",
        ),
        # As many bytes, and other numbers.
        (
            lambda t: {**t, "norm": t["norm"].int()},
            "has 'norm' as a copy of torch.int32, in place of torch.float32",
        ),
        (
            lambda t: {**t, "qk": nn.functional.pad(t["qk"], (0, 0, 0, 2))},
            "has 32 bytes too many, as copies, first 'qk'",
        ),
        (lambda t: {**t, "qk": t["qk"][:5]}, "has lost 16 bytes of 'qk'"),
    ],
    ids=["cast up", "cast down", "same size", "padded", "cut"],
)
def test_form_that_casts_cuts_or_pads_is_told_what_does(form, error):
    advice = "cast, cut or padded are so before: publish a mapping of such tensors, without form="
    with pytest.raises(SourceError, match=f"{error}; a form keeps every element, .*{advice}"):
        _ = as_source(fused(), form).metadata


@pytest.mark.parametrize("form", [1, {}, "dict"])
def test_form_that_is_no_function_is_refused(form):
    with pytest.raises(TypeError, match=f"form is {form!r}, expected a function of names"):
        Publisher(fused(), form=form)


def test_two_names_of_one_tensor_are_one_in_any_form():
    weight = torch.ones(3, 2)
    formed = in_form({"embed": weight, "head": weight}, lambda t: {f"model.{n}": t[n] for n in t})
    assert list(formed.tensors) == ["model.embed", "model.head"]
    assert as_source(formed.tensors).metadata[0].name == "model.embed"
    assert len(as_source(formed.tensors).metadata) == 1


def test_published_form_arrives_in_a_worker_that_has_it(fleet):
    model = nn.ParameterDict({name: nn.Parameter(each) for name, each in fused().items()})
    worker = {name: torch.zeros_like(each) for name, each in split(fused()).items()}
    made = fleet(model, form=split)
    made.join(worker)
    with torch.no_grad():
        model["qk"].fill_(5.0)
    assert made.publish("v1").ok
    assert torch.equal(worker["q"], torch.full((4, 4), 5.0))
    assert torch.equal(worker["experts.0"], fused()["experts"][0].t())


def test_form_of_the_guide_splits_experts():
    guide = Path(wtransfer.__file__).with_name("engines") / "README.md"
    (code,) = re.findall(r"```python\n(def split_experts.*?)\n\n\n", guide.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # the guide's own
    tensors = {"layer.experts.w": torch.arange(6.0).view(3, 2), "norm": torch.ones(2)}
    sent = whole(as_source(tensors, names["split_experts"]))
    assert list(sent) == ["norm", *(f"layer.experts.{n}.w" for n in range(3))]
    assert torch.equal(sent["layer.experts.1.w"], torch.tensor([2.0, 3.0]))
    assert "layer.experts.w" in tensors


def test_source_of_ones_own_takes_no_form():
    with pytest.raises(TypeError, match=r"form= is for a module or a mapping"):
        Publisher(as_source(fused()), form=dict)


@pytest.mark.parametrize("wrap", ["compile", "inner compile", "ddp"])
def test_wrappers_add_nothing_to_names(wrap):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    names = list(model.state_dict())
    if wrap == "compile":
        model = torch.compile(model, backend="eager")
    elif wrap == "inner compile":
        model[1] = torch.compile(model[1], backend="eager")
        assert "_orig_mod" in list(model.state_dict())[2]
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = nn.parallel.DistributedDataParallel(model)
        finally:
            dist.destroy_process_group()
    assert list(ModuleForm(model).formed().tensors) == names


class Converted(nn.Module):
    """A model of a transformers whose form is its own."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form


@pytest.fixture
def transformers_of(monkeypatch):
    """Stand in for transformers, as far as a form asks it."""
    modeling = ModuleType("transformers.modeling_utils")
    modeling.PreTrainedModel = Converted
    modeling.revert_weight_conversion = lambda model, tensors: model.form(tensors)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", modeling)
    return modeling


def told(tensors):
    return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in tensors]


@pytest.mark.usefixtures("transformers_of")
def test_stream_passes_in_the_form_by_views_of_one_tensor_after_the_other():
    tensors = fused()
    form = StreamForm(Converted(split))
    announced = form.announce(told(tensors.items()))
    assert [meta.name for meta in announced] == ["q", "k", "experts.0", "experts.1", "norm"]
    for value in (0.0, 1.0):
        tensors["qk"].add_(value)
        sent, wanted = dict(form.of(tensors.items())), split(tensors)
        assert told(sent.items()) == announced
        assert all(torch.equal(each, wanted[name]) for name, each in sent.items())
        assert {memory_of(each) for each in sent.values()} == set(map(memory_of, tensors.values()))
    turned = dict(reversed(tensors.items()))
    announced = form.announce(told(turned.items()))
    assert told(form.of(turned.items())) == announced


@pytest.mark.usefixtures("transformers_of")
def test_tensor_of_a_stream_may_have_gaps_and_gradients():
    tensors = fused()
    tensors["qk"] = torch.arange(48.0).view(6, 8)[:, :4].requires_grad_()
    tensors["experts"] = tensors["experts"].transpose(0, 1).contiguous().transpose(0, 1)
    form, wanted = StreamForm(Converted(split)), split(tensors)
    form.announce(told(tensors.items()))
    assert all(torch.equal(each, wanted[name]) for name, each in form.of(tensors.items()))


@pytest.mark.usefixtures("transformers_of")
def test_parts_of_a_stream_are_known_until_it_is_announced_otherwise():
    calls = []

    def counted(tensors):
        calls.append(list(tensors))
        return split(tensors)

    form, tensors = StreamForm(Converted(counted)), fused()
    for _ in range(2):
        form.announce(told(tensors.items()))
    assert len(calls) == 1
    tensors["experts"] = torch.ones(3, 3, 4)
    # Announced as it was before, it is its reader's to refuse.
    assert dict(form.of(tensors.items()))["experts"] is tensors["experts"]
    assert "experts.2" in [meta.name for meta in form.announce(told(tensors.items()))]
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("form", "error"),
    [
        (
            lambda t: {
                "norm": t["norm"],
                "both": torch.cat([t["qk"].view(-1), t["experts"].view(-1)]),
            },
            "Converted: 'both' is no view of one tensor",
        ),
        (lambda t: {**split(t), "q": t["qk"][:4] * 1.0}, "Converted: 'q' is no view of one tensor"),
        (lambda t: {**split(t), "q": t["qk"][:3]}, "Converted: the form has lost 16 bytes of 'qk'"),
        (lambda t: t["not there"], "Converted: .*KeyError: 'not there'"),
    ],
    ids=["two sources", "copy", "lost", "raises"],
)
@pytest.mark.usefixtures("transformers_of")
def test_form_of_a_stream_that_is_not_of_its_parts_is_refused(form, error):
    stream = StreamForm(Converted(form))
    for _ in range(2):
        with pytest.raises(SourceError, match=error):
            stream.announce(told(fused().items()))


@pytest.mark.usefixtures("transformers_of")
def test_tensor_of_a_stream_that_has_no_addresses_on_this_host_is_named():
    with pytest.raises(SourceError, match="Converted: the form of 'w' cannot be had") as caught:
        StreamForm(Converted(dict)).announce([ParamMeta("w", torch.float32, (1 << 58,))])
    assert caught.value.piece == "w"


@pytest.mark.parametrize("kind", ["other model", "quantised", "release 4", "no transformers"])
def test_stream_of_a_model_without_another_form_passes_as_it_is(transformers_of, kind):
    model = nn.Linear(1, 1) if kind == "other model" else Converted(split)
    if kind == "quantised":
        model.hf_quantizer = object()
    elif kind == "release 4":
        del transformers_of.revert_weight_conversion
    elif kind == "no transformers":
        del sys.modules["transformers.modeling_utils"]
    form, tensors = StreamForm(model), fused()
    assert form.announce(told(tensors.items())) == told(tensors.items())
    assert all(each is tensors[name] for name, each in form.of(tensors.items()))


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.usefixtures("transformers_of")
def test_model_whose_way_back_quantises_is_its_own_form(is_quantised):
    def operation(module):
        return type("Operation", (SimpleNamespace,), {"__module__": module})

    back = "transformers.integrations.fp8" if is_quantised else "transformers.core_model_loading"
    way = operation("transformers.integrations.fp8")(reverse_op=operation(back)())
    model, tensors = Converted(split), fused()
    model._weight_conversions = [SimpleNamespace(operations=[way])]
    announced = StreamForm(model).announce(told(tensors.items()))
    assert {meta.name for meta in announced} == set(tensors if is_quantised else split(tensors))


@pytest.mark.usefixtures("transformers_of")
def test_names_of_one_tensor_pass_as_they_come():
    # A trainer that yields a tied tensor twice has two of them.
    weight = torch.ones(3, 2)
    form = StreamForm(Converted(lambda t: {f"model.{name}": each for name, each in t.items()}))
    stream = [("embed", weight), ("head", weight)]
    assert [meta.name for meta in form.announce(told(stream))] == ["model.embed", "model.head"]
    assert all(each is weight for _, each in form.of(stream))


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.usefixtures("transformers_of")
def test_form_of_a_stream_is_found_without_its_memory(is_deterministic):
    whole = [ParamMeta(f"experts.{n}", torch.bfloat16, (64, 1 << 11, 1 << 10)) for n in range(16)]

    def apart(tensors):
        return {
            f"{name}.{n}": part.t() for name, each in tensors.items() for n, part in enumerate(each)
        }

    torch.use_deterministic_algorithms(is_deterministic)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        announced = StreamForm(Converted(apart)).announce(whole)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert sum(meta.nbytes for meta in announced) == sum(meta.nbytes for meta in whole) == 4 << 30
    assert (after - before) << 10 < 64 << 20
