"""vLLM's own layerwise reload on small models, each with one thing that it leaves out."""

import re
import types
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

from wtransfer_vllm.proof import UNREAD, prove
from wtransfer_vllm.reload import ReloadError, reload

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of what vLLM imports
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload import layerwise, record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

CONFIG = types.SimpleNamespace(
    model_config=types.SimpleNamespace(dtype=torch.float32, quantization=None)
)


class Doubling(QuantizeMethodBase):
    """Puts twice the weight into the kernel's parameter."""

    def create_weights(self, layer, *args, **options):
        raise NotImplementedError

    def apply(self, layer, *args, **options):
        raise NotImplementedError

    def process_weights_after_loading(self, layer):
        layer.weight = nn.Parameter(2 * layer.weight.data, requires_grad=False)
        self.made_of = layer.weight.clone()


class Linear(nn.Module):
    def __init__(self, method=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.quant_method = method


class Model(nn.Module):
    """Loads by weight loaders, as most models of vLLM do."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], tensor)

    def load_first(self, weights):
        """Load and process, as vLLM does at the start."""
        record_metadata_for_reloading(self)
        self.load_weights(weights.items())
        for layer in self.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(layer)
        for layer in self.modules():
            if isinstance(layer, AttentionLayerBase):
                layer.process_weights_after_loading(torch.float32)
        return self


class Copying(Model):
    """Copies into parameters itself, of some only a part at a time."""

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].data[:2].copy_(tensor[:2])
                parameters[name][2:].copy_(tensor[2:])


def weights_of(model, value):
    parameters = model.named_parameters()
    return {
        name: torch.full(each.shape, float(value + index))
        for index, (name, each) in enumerate(parameters)
    }


def state_of(model):
    """Return everything that a proof must leave as it is."""
    tensors = {
        name: (id(each), each.clone()) for name, each in model.state_dict(keep_vars=True).items()
    }
    others = {
        name: {key: value for key, value in vars(layer).items() if not key.startswith("_")}
        for name, layer in model.named_modules()
    }
    return tensors, others


def check_same(model, before):
    tensors, others = before
    now, others_now = state_of(model)
    assert [(name, number) for name, (number, _) in now.items()] == [
        (name, number) for name, (number, _) in tensors.items()
    ]
    assert all(torch.equal(now[name][1], each) for name, (_, each) in tensors.items())
    assert others_now == others


@pytest.mark.parametrize("kind", [Model, Copying])
def test_reload_of_what_serves_is_proven_and_the_next_set_is_loaded_as_at_the_start(kind):
    model = kind(one=Linear(Doubling()), two=Linear())
    first, second = weights_of(model, 1), weights_of(model, 5)
    model.load_first(first)
    before, held = state_of(model), model.one.quant_method.made_of
    prove(model, CONFIG, first.items())
    check_same(model, before)
    assert model.one.quant_method.made_of is held
    reload(model, CONFIG, second.items())
    fresh = kind(one=Linear(Doubling()), two=Linear()).load_first(second)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True)
    )
    # Into the memory that kernels and captured graphs have the address of.
    assert [id(each) for each in model.parameters()] == [number for number, _ in before[0].values()]
    prove(model, CONFIG, second.items())
    with pytest.raises(ReloadError, match="'one', parameter 'weight': other bits"):
        prove(model, CONFIG, first.items())


class Biased(Linear):
    """Has a tensor that vLLM's reload leaves in its place."""

    def __init__(self, method=None):
        super().__init__(method)
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)


class Replacing(Model):
    """Makes the biases anew as it loads, instead of writing to them; or some other one."""

    def __init__(self, factor=1, **layers):
        super().__init__(**layers)
        self.factor = factor

    def load_weights(self, weights):
        def others():
            for name, weight in weights:
                if name.endswith("bias"):
                    bias = nn.Parameter(weight * self.factor, requires_grad=False)
                    self.get_submodule(name.rpartition(".")[0]).bias = bias
                else:
                    yield name, weight

        return super().load_weights(others())


@pytest.mark.parametrize("order", [1, -1], ids=["weight first", "bias first"])
@pytest.mark.parametrize("kind", [Model, Replacing])
def test_bias_is_proven_whether_a_loader_writes_to_it_or_makes_it_anew(kind, order):
    model = kind(one=Biased(Doubling()))
    first = dict([*weights_of(model, 1).items()][::order])
    model.load_first(first)
    before = state_of(model)
    prove(model, CONFIG, first.items())
    check_same(model, before)
    other = first | {"one.bias": first["one.bias"] + 1}
    with pytest.raises(ReloadError, match="'one', parameter 'bias': other bits"):
        prove(model, CONFIG, [(name, other[name]) for name in first])
    with pytest.raises(ReloadError, match="'one', parameter 'bias': other bits"):
        prove(model, CONFIG, [(name, each) for name, each in first.items() if "bias" not in name])
    if kind is Replacing:
        model.factor = 2
        with pytest.raises(ReloadError, match="'one', parameter 'bias': other bits"):
            prove(model, CONFIG, first.items())
        model.factor = 1
    check_same(model, before)


class Lazy(Doubling):
    """Processes a layer the first time only."""

    def process_weights_after_loading(self, layer):
        if not hasattr(self, "made_of"):
            super().process_weights_after_loading(layer)


def test_method_that_processes_once_is_found():
    model = Model(one=Linear(Lazy()), two=Linear())
    first = weights_of(model, 1)
    model.load_first(first)
    before = state_of(model)
    with pytest.raises(ReloadError, match=r"Model .not quantised.*layer 'one', parameter 'weight'"):
        prove(model, CONFIG, first.items())
    check_same(model, before)


def test_layer_that_receives_nothing_is_found_and_one_that_shares_its_tensor_is_not():
    model = Model(one=Linear(), two=Linear(), head=Linear())
    model.head.weight = model.one.weight
    first = weights_of(model, 1)
    model.load_first(first)
    before = state_of(model)
    prove(model, CONFIG, first.items())
    del first["two.weight"]
    with pytest.raises(ReloadError, match="layer 'two', parameter 'weight': received no elements"):
        prove(model, CONFIG, first.items())
    check_same(model, before)
    with pytest.raises(ReloadError, match="received no elements"):
        reload(model, CONFIG, first.items())
    assert torch.equal(model.two.weight, before[0]["two.weight"][1])


class Table(nn.Module):
    """Has a buffer, which is in a checkpoint or is not."""

    def __init__(self, *, persistent):
        super().__init__()
        self.register_buffer("table", torch.full((4, 4), 3.0), persistent=persistent)


@pytest.fixture
def warned(monkeypatch):
    """Layers of which vLLM says that they were not loaded."""
    said = []
    monkeypatch.setattr(layerwise.logger, "warning", lambda text, *values: said.append(values[0]))
    return said


def test_layer_is_said_to_be_not_loaded_only_where_a_checkpoint_has_something_of_it(warned):
    model = Model(one=Linear(), head=Linear(), positions=Table(persistent=False))
    model.head.weight = model.one.weight
    first, second = weights_of(model, 1), weights_of(model, 5)
    model.load_first(first)
    prove(model, CONFIG, first.items())
    reload(model, CONFIG, second.items())
    assert warned == []
    assert model.positions.table.unique().tolist() == [3.0]
    assert not model.positions.state_dict()
    with pytest.raises(ReloadError, match="received no elements"):
        reload(model, CONFIG, ())
    assert warned == ["Linear", "Linear"]
    model = Model(one=Linear(), saved=Table(persistent=True))
    model.load_first(weights_of(Model(one=model.one), 1))
    reload(model, CONFIG, weights_of(Model(one=model.one), 2).items())
    assert warned[2:] == ["Table"]


def load_half(parameter, tensor):
    parameter.data[:2].copy_(tensor[:2])


def test_memory_that_is_not_written_does_not_pass_for_what_it_was():
    # Freed memory has the bytes of what was there before: with luck, those that serve.
    model = Model(one=Linear())
    model.one.weight.weight_loader = load_half
    first = weights_of(model, 1)
    model.load_first(first)
    with torch.no_grad():
        model.one.weight[2:] = 1
    with pytest.raises(ReloadError, match="layer 'one', parameter 'weight': other bits"):
        prove(model, CONFIG, first.items())


@pytest.mark.parametrize("name", ["weight_shape", "bias"])
def test_only_a_parameter_that_no_kernel_reads_may_differ(name):
    model = Model(one=Linear())
    model.one.register_parameter(name, nn.Parameter(torch.zeros(2), requires_grad=False))
    first = weights_of(model, 1)
    model.load_first(first)
    with torch.no_grad():
        getattr(model.one, name)[0] = 7
    if name in UNREAD:
        prove(model, CONFIG, first.items())
    else:
        with pytest.raises(ReloadError, match="layer 'one', parameter 'bias': other bits"):
            prove(model, CONFIG, first.items())


def test_parameters_that_no_kernel_reads_are_read_nowhere_in_vllm():
    names = "|".join(UNREAD)
    reads = re.compile(rf"\blayer\.({names})\b|getattr\([^)]*[\"']({names})[\"']")
    sources = Path(layerwise.__file__).parents[2]
    found = {
        line.strip()
        for path in (*sources.glob("layers/**/*.py"), *sources.glob("kernels/**/*.py"))
        for line in path.read_text("utf-8").splitlines()
        if reads.search(line)
    }
    assert found == set()


class Packing(UnquantizedEmbeddingMethod):
    """Keeps what a head consisted of when it was packed last, as the kernels of CPUs do."""

    def process_weights_after_loading(self, layer):
        layer.packed = layer.weight.detach().clone()


def test_head_that_shares_its_tensor_under_any_name_is_packed_again():
    model = Model(wte=Linear(), head=Linear(Packing()))
    model.head.weight = model.wte.weight
    first, second = weights_of(model, 1), weights_of(model, 5)
    model.load_first(first)
    prove(model, CONFIG, first.items())
    assert model.head.packed.unique().tolist() == [1.0]
    reload(model, CONFIG, second.items())
    assert model.head.packed.unique().tolist() == [5.0]


class Attention(nn.Module, AttentionLayerBase):
    """Packs the weight of another layer for itself and frees it, as MLA does on CPUs with AMX."""

    def __init__(self, projection):
        super().__init__()
        self.impl = [projection]  # no submodule
        self.packed = None
        self.fails = False

    def get_attn_backend(self):
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError

    def process_weights_after_loading(self, dtype):
        if self.fails:
            raise OSError("cannot pack")
        (projection,) = self.impl
        assert projection.weight.numel() == 16
        self.packed = projection.weight.data.clone()
        projection.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def test_weight_that_another_layer_packs_and_frees_is_there_for_it():
    projection = Linear()
    model = Model(projection=projection, attention=Attention(projection), other=Linear())
    first, second = weights_of(model, 1), weights_of(model, 5)
    model.load_first(first)
    before = state_of(model)
    prove(model, CONFIG, first.items())
    check_same(model, before)
    reload(model, CONFIG, second.items())
    assert (model.attention.packed.unique().tolist(), projection.weight.numel()) == ([5.0], 0)
    reload(model, CONFIG, first.items())
    assert (model.attention.packed.unique().tolist(), projection.weight.numel()) == ([1.0], 0)


def test_layer_that_cannot_be_processed_leaves_the_others_their_tensors():
    projection = Linear()
    model = Model(projection=projection, attention=Attention(projection), other=Linear())
    first = weights_of(model, 1)
    model.load_first(first)
    before = state_of(model)
    model.attention.fails = True
    with pytest.raises(ReloadError, match="layer 'attention': OSError: cannot pack"):
        prove(model, CONFIG, first.items())
    model.attention.fails = False
    check_same(model, before)
    model.attention.fails = True
    with pytest.raises(ReloadError, match="layer 'attention': OSError: cannot pack"):
        reload(model, CONFIG, first.items())
    assert not any(each.is_meta for each in model.parameters())
    model.attention.fails = False
    reload(model, CONFIG, first.items())
    assert torch.equal(model.other.weight, before[0]["other.weight"][1])
    assert (model.attention.packed.unique().tolist(), projection.weight.numel()) == ([1.0], 0)


def test_loader_that_raises_is_quoted_and_changes_nothing():
    model = Model(one=Linear(Doubling()), two=Linear())
    first = weights_of(model, 1)
    model.load_first(first)
    before = state_of(model)
    wrong = first | {"three.weight": torch.ones(4, 4)}
    with pytest.raises(ReloadError, match=r"cannot reload the weights .*KeyError: 'three.weight'"):
        prove(model, CONFIG, wrong.items())
    check_same(model, before)
    prove(model, CONFIG, first.items())


class Buffered(Linear):
    """Has a buffer that is kept with the weights and made anew from none of them."""

    def __init__(self, *, persistent):
        super().__init__()
        self.register_buffer("scale", torch.full((2,), 3.0), persistent=persistent)


@pytest.mark.parametrize("persistent", [True, False])
def test_buffer_that_a_reload_would_fill_with_anything_is_found(persistent):
    model = Model(one=Buffered(persistent=persistent))
    first = weights_of(model, 1)
    model.load_first(first)
    before = state_of(model)
    if persistent:
        # Copied from memory that no loader has written to.
        with pytest.raises(ReloadError, match="layer 'one', parameter 'scale': other bits"):
            prove(model, CONFIG, first.items())
    else:
        prove(model, CONFIG, first.items())
    check_same(model, before)


def test_dummies_are_proven_without_weights():
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    model = Model(one=Linear(Doubling()), two=Linear())
    record_metadata_for_reloading(model)
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, CONFIG.model_config)
    model.one.quant_method.process_weights_after_loading(model.one)
    before = state_of(model)
    prove(model, CONFIG, None)
    check_same(model, before)
    model.one.quant_method.process_weights_after_loading = lambda layer: None
    with pytest.raises(ReloadError, match="'one', parameter 'weight': other bits"):
        prove(model, CONFIG, None)


class Pointing(Doubling):
    """Its kernel has no tensor of its own, but the address of one that it was made with."""

    def process_weights_after_loading(self, layer):
        self.handler = ops.create_onednn_scaled_mm(None, layer.weight, torch.float32)


def test_scales_that_a_kernel_points_to_are_kept_with_it(monkeypatch):
    def create(weight, scales, output_type):
        return types.SimpleNamespace(pointed=weakref.ref(scales))

    monkeypatch.setattr(ops, "create_onednn_scaled_mm", create)
    model = Model(layer=Linear(Pointing()))
    model.load_first(weights_of(model, 1))
    reload(model, CONFIG, weights_of(model, 2).items())
    scales = model.layer.quant_method.handler.pointed()
    assert scales is not None
    assert scales.unique().tolist() == [2.0]
    assert ops.create_onednn_scaled_mm is create


class Handler(Doubling):
    """Packs the weight away, as a kernel of CPUs does that is made for torch's default dtype."""

    def process_weights_after_loading(self, layer):
        self.made_in = (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
        self.packed = 2 * layer.weight.detach()
        layer.weight = None

    def apply(self, layer, rows):
        return rows @ self.packed


class Forgetful(Handler):
    """Packs what came first, whatever comes later."""

    def process_weights_after_loading(self, layer):
        packed = vars(self).get("packed")
        super().process_weights_after_loading(layer)
        self.packed = self.packed if packed is None else packed + 1


def packed_model(method, **attributes):
    model = Model(one=Linear(method))
    vars(model.one).update({"input_size": 4, "params_dtype": torch.float32} | attributes)
    first = {"one.weight": torch.ones(4, 4)}
    return model.load_first(first), first


def test_kernels_are_made_as_at_the_first_load():
    model, first = packed_model(Handler())
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(dtype=torch.bfloat16, quantization=None)
    )
    before = torch.get_default_dtype()
    with torch.inference_mode():
        reload(model, config, first.items())
    assert model.one.quant_method.made_in == (torch.bfloat16, False, False)
    assert torch.get_default_dtype() == before


def test_weight_that_is_in_no_tensor_is_proven_by_the_layers_output():
    model, first = packed_model(Handler())
    prove(model, CONFIG, first.items())
    assert (model.one.weight, model.one.quant_method.packed.unique().tolist()) == (None, [2.0])
    reload(model, CONFIG, {"one.weight": torch.full((4, 4), 3.0)}.items())
    assert (model.one.weight, model.one.quant_method.packed.unique().tolist()) == (None, [6.0])
    model, first = packed_model(Forgetful())
    with pytest.raises(ReloadError, match=r"parameter 'weight': packed .* it gives other answers"):
        prove(model, CONFIG, first.items())
    assert (model.one.weight, model.one.quant_method.packed.unique().tolist()) == (None, [2.0])


def test_weight_that_is_in_no_tensor_and_cannot_be_compared_refuses():
    model, first = packed_model(Handler(), input_size=None)
    with pytest.raises(ReloadError, match="in none of its tensors, and cannot be compared"):
        prove(model, CONFIG, first.items())
    assert (model.one.weight, model.one.quant_method.packed.unique().tolist()) == (None, [2.0])


def test_parameter_that_is_none_is_there_after_a_reload_that_fails():
    model, _ = packed_model(Handler())
    with pytest.raises(ReloadError, match="received no elements"):
        reload(model, CONFIG, ())
    assert (model.one.weight, model.one.quant_method.packed.unique().tolist()) == (None, [2.0])
