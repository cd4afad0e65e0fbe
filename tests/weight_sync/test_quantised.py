"""A publisher whose workers hold a quantised checkpoint: each weight travels in its form."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors.torch import save_file

from wtransfer import Publisher
from wtransfer.errors import NonfiniteError, SchemaError, SourceError
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.source import as_source
from wtransfer.weight_sync.worker.target import StateDictTarget

ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": ACTIVATIONS,
        }
    },
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT8_NAME, FP8_NAME = "compressed-tensors:int8:channel:symmetric", "fp8:block128x128"
LAYERS = ("a.weight", "b.weight")


def weights(seed=0):
    """Weights in training: two matrices that the checkpoint has quantised, and two others."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (9, 64), "a.weight": (48, 64), "b.weight": (64, 48), "norm": (64,)}
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def in_int8(tensors, layers=LAYERS):
    """Return the form of the checkpoint, quantised by other code than the publisher's."""
    made = {}
    for name, tensor in tensors.items():
        if name not in layers:
            made[name] = tensor.clone()
            continue
        scale = torch.stack([row.abs().max() / 127.5 for row in tensor])[:, None]
        made[name] = (tensor / scale).round().clamp(-128, 127).to(torch.int8)
        made[f"{name}_scale"] = scale
    return made


def in_fp8(tensors, layers=LAYERS):
    made = {}
    for name, tensor in tensors.items():
        made[name] = tensor.clone()
        if name in layers:
            scale = (tensor.float().abs().max() / 448).reshape(1, 1)
            made[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            made[f"{name}_scale_inv"] = scale
    return made


@pytest.fixture
def base(tmp_path):
    """Return a writer of a checkpoint that workers were started with."""

    def write(tensors, settings, name="base"):
        folder = tmp_path / name
        folder.mkdir()
        config = {} if settings is None else {"quantization_config": settings}
        (folder / "config.json").write_text(json.dumps(config))
        whole = {name: each.contiguous() for name, each in tensors.items()}
        save_file(whole, folder / "model.safetensors")
        return folder

    return write


class Quantised(StateDictTarget):
    """A target that states its scheme."""

    scheme = INT8_NAME


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), each.view(torch.uint8)), name


def zeros(tensors):
    return {name: torch.zeros_like(each) for name, each in tensors.items()}


@pytest.mark.usefixtures("libuv")
@pytest.mark.parametrize("engine", ["shm", "file", "gloo"])
@pytest.mark.parametrize("make", [in_int8, in_fp8])
def test_worker_computes_with_the_form_of_the_checkpoint_round_after_round(
    fleet, base, engine, make, tmp_path
):
    settings = INT8 if make is in_int8 else FP8
    options = {"path": str(tmp_path / "store")} if engine == "file" else {}
    model, worker = weights(), zeros(make(weights()))
    folder = base(make(weights(1)), settings)
    made = fleet(model, base=folder, engine=engine, options=options)
    made.join(worker)
    for seed in range(3):
        for name, each in weights(seed).items():
            model[name].copy_(each)
        report = made.publish(f"v{seed}")
        assert report.ok
        assert report.workers[0].digests_equal
        same(worker, make(model))


def test_scales_come_before_their_weight_and_nothing_else_is_changed(base):
    model = weights()
    source = as_source(model, None, base(in_int8(model), INT8))
    rows = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata]
    assert rows == [
        ("embed.weight", torch.bfloat16, (9, 64)),
        ("a.weight_scale", torch.bfloat16, (48, 1)),
        ("a.weight", torch.int8, (48, 64)),
        ("b.weight_scale", torch.bfloat16, (64, 1)),
        ("b.weight", torch.int8, (64, 48)),
        ("norm", torch.bfloat16, (64,)),
    ]
    sent = dict(source.iter_full())
    assert [*sent] == [name for name, *_ in rows] == [name for name, _ in source.iter_local()]
    assert sent["norm"] is model["norm"]


def test_base_that_is_not_quantised_leaves_the_source_as_it_is(base):
    source = as_source(weights())
    assert as_source(source, None, base(weights(), None)) is source


def test_plan_names_the_scheme_and_the_fingerprint_is_that_of_the_bytes(base):
    model = weights()
    digested = []
    for make, settings in ((in_int8, INT8), (in_fp8, FP8), (dict, None)):
        source = as_source(model, None, base(make(model), settings, make.__name__))
        reading = DigestingSource(source)
        reading.plan()
        list(reading.iter_full())
        digested.append((reading.manifest, reading.layout.fingerprint(reading.digests())))
        unnamed = DigestingSource(as_source(dict(source.iter_full())))
        unnamed.plan()
        list(unnamed.iter_full())
        assert unnamed.layout.fingerprint(unnamed.digests()) == digested[-1][1]
        same_plan = unnamed.manifest.identity() == reading.manifest.identity()
        assert same_plan == (settings is None)
    assert [manifest.scheme for manifest, _ in digested] == [INT8_NAME, FP8_NAME, ""]
    assert len({fingerprint for _, fingerprint in digested}) == 3


def test_one_quantised_weight_is_in_memory_at_a_time(base):
    names = [f"layer.{number}.weight" for number in range(6)]
    model = {name: torch.randn(32, 32) for name in names}
    source = as_source(model, None, base(in_int8(model, names), INT8))
    gone = []
    for name, each in source.iter_full():
        if name in names:
            assert all(before() is None for before in gone)
            gone.append(weakref.ref(each))
        del each
    assert len(gone) == 6


@pytest.mark.parametrize("method", ["iter_full", "iter_unread"])
def test_whole_weight_that_a_source_makes_is_gone_before_the_next_is_made(base, method):
    model, alive = weights(), []

    class Gathering:
        metadata = as_source(model).metadata

        def iter_full(self):
            for name, each in model.items():
                assert all(before() is None for before in alive)
                made = each.clone()
                alive.append(weakref.ref(made))
                yield name, made
                del made

    source = as_source(Gathering(), None, base(in_int8(model), INT8))
    for _, each in getattr(source, method)():
        del each
    assert len(alive) == 4


def test_source_of_a_round_that_states_no_scheme_has_a_plan_without_one(base):
    model = weights()
    reading = DigestingSource(as_source(model, None, base(in_int8(model), INT8)))
    assert reading.plan().manifest.scheme == INT8_NAME
    same_form = as_source(dict(as_source(model, None, base(in_int8(model), INT8, "b")).iter_full()))
    assert reading.plan(instead=same_form).manifest.scheme == ""
    assert reading.plan().manifest.scheme == INT8_NAME


def test_second_pass_of_a_round_reads_the_same(base):
    model = weights()
    reading = DigestingSource(as_source(model, None, base(in_int8(model), INT8)))
    reading.plan()
    list(reading.iter_full())
    for meta, memory in reading.iter_into(lambda meta: torch.empty(meta.nbytes, dtype=torch.uint8)):
        assert memory.numel() == meta.nbytes
    model["a.weight"] += 1
    with pytest.raises(SourceError, match=r"'a\.weight_scale' had other bytes in a second pass"):
        list(reading.iter_full())


# -- refused before a byte moves


def test_update_of_another_scheme_is_refused_and_both_are_named(fleet, base):
    model = weights()
    made = fleet(model, base=base(in_fp8(model), FP8))
    worker = in_int8(model)
    made.join(Quantised(worker))
    with pytest.raises(
        SchemaError, match=f"quantised as '{FP8_NAME}', the target as '{INT8_NAME}'"
    ):
        made.publish("v1")
    same(worker, in_int8(model))


def test_update_of_the_same_scheme_is_taken_by_a_target_that_states_it(fleet, base):
    model = weights()
    made = fleet(model, base=base(in_int8(model), INT8))
    made.join(Quantised(worker := zeros(in_int8(model))))
    assert made.publish("v1").ok
    same(worker, in_int8(model))


def test_update_that_is_not_quantised_is_refused_with_what_would_make_it_fit(fleet):
    made = fleet(weights())
    made.join(Quantised(in_int8(weights())))
    with pytest.raises(SchemaError) as caught:
        made.publish("v1")
    assert f"the target is quantised as {INT8_NAME}" in str(caught.value)
    assert "Publisher(base=FOLDER)" in str(caught.value)
    assert "a.weight: wanted int8" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"a.weight": torch.ones(40, 64)}, r"'a\.weight' has shape \[40, 64\] in the model and"),
        ({"a.weight": torch.ones(48, 64, dtype=torch.int32)}, "'a.weight' is torch.int32 in the"),
        ({"a.weight": torch.ones(48, 64).to(torch.float8_e5m2)}, "only floats of 16 bits and more"),
        (
            {"a.weight": None, "b.weight": None},
            "none of the 2 weights that the checkpoint has quantised, first 'a.weight'.*form=",
        ),
    ],
    ids=["shape", "integers", "float8", "names"],
)
def test_model_that_the_checkpoint_does_not_fit_is_refused_by_name(fleet, base, change, error):
    model = {n: each for n, each in (weights() | change).items() if each is not None}
    made = fleet(model, base=base(in_int8(weights()), INT8))
    made.join(in_int8(weights()))
    with pytest.raises(SourceError, match=error):
        made.publish("v1")


def test_base_that_cannot_be_made_is_refused_when_the_publisher_is_made(base):
    folder = base(in_int8(weights()), INT8 | {"format": "pack-quantized"})
    with pytest.raises(SourceError, match=r"base.*'pack-quantized'.*cannot be made of the weights"):
        Publisher(weights(), base=folder)
    with pytest.raises(SourceError, match="expected the folder of a checkpoint"):
        Publisher(weights(), base=folder / "nothing")


def test_head_that_is_tied_in_training_and_quantised_in_the_checkpoint_is_refused(fleet, base):
    model = weights()
    model["lm_head.weight"] = model["embed.weight"]
    apart = weights() | {"lm_head.weight": weights()["embed.weight"].clone()}
    there = in_int8(apart, [*LAYERS, "lm_head.weight"])
    made = fleet(model, base=base(there, INT8))
    made.join(there)
    with pytest.raises(SchemaError, match=r"lm_head\.weight: wanted int8 .*got nothing") as caught:
        made.publish("v1")
    assert "tied in the model of the publisher travel once" in caught.value.message
    # It has a base.
    assert "base=" not in caught.value.message


def test_head_that_is_tied_in_training_is_sent_apart_as_the_refusal_says(fleet, base):
    model = weights()
    model["lm_head.weight"] = model["embed.weight"].clone()
    there = in_int8(model, [*LAYERS, "lm_head.weight"])
    made = fleet(model, base=base(there, INT8))
    made.join(there)
    assert made.publish("v1").ok


# -- together with what else a publisher does


def test_experts_are_split_first_and_quantised_by_the_names_of_the_checkpoint(fleet, base):
    model = {"experts": torch.randn(3, 16, 32).to(torch.bfloat16)}

    def split(tensors):
        return {f"experts.{n}.weight": each.t() for n, each in enumerate(tensors["experts"])}

    there = in_int8(split(model), split(model))
    made = fleet(model, form=split, base=base(there, INT8))
    made.join(worker := zeros(there))
    assert made.publish("v1").ok
    same(worker, there)


def test_weights_that_are_in_the_form_already_travel_as_they_are(base):
    model = in_int8(weights())
    source = as_source(model, None, base(in_int8(weights(1)), INT8))
    same(dict(source.iter_full()), model)
    assert [meta.name for meta in source.metadata] == list(model)


def test_kept_version_goes_back_by_its_own_scheme(fleet, base, tmp_path):
    model = weights()
    options = {"path": str(tmp_path / "store")}
    made = fleet(model, base=base(in_int8(model), INT8), engine="file", options=options)
    made.join(Quantised(worker := zeros(in_int8(model))))
    made.publish("v1")
    first = in_int8(model)
    model["a.weight"] += 1
    made.publish("v2")
    kept = made.publisher.rollback("v1", wait=False)
    assert made.finish(kept).ok
    same(worker, first)
    stored = json.loads(next((tmp_path / "store").rglob("wtransfer.json")).read_text())
    assert stored["scheme"] == INT8_NAME


def test_nonfinite_weights_are_found_in_their_scales(fleet, base):
    model = weights()
    made = fleet(model, base=base(in_int8(model), INT8), nonfinite="reject")
    made.join(zeros(in_int8(model)))
    assert made.publish("v1").ok
    model["a.weight"][3, 4] = float("nan")
    with pytest.raises(NonfiniteError, match=r"a\.weight_scale"):
        made.publish("v2")


def test_weight_that_is_quantised_already_comes_with_its_scale(base):
    held = in_fp8(weights())
    folder = base(held, FP8)
    lost = {name: each for name, each in held.items() if name != "b.weight_scale_inv"}
    with pytest.raises(
        SourceError, match=r"'b\.weight' is quantised already .*b\.weight_scale_inv"
    ):
        _ = as_source(lost, None, folder).metadata
