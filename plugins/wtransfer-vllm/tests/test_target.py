"""vLLM's own layerwise reload, on a model of one layer, from checkpoint to update and back."""

import types
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

from wtransfer.errors import SourceError

from wtransfer_vllm.reload import ReloadError
from wtransfer_vllm.target import VllmTarget

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of what vLLM imports
    from vllm.config import LoadConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

CHECKPOINT = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.ones(2)}
UPDATE = {"layer.weight": torch.full((2, 2), 2.0), "layer.bias": torch.full((2,), 2.0)}


class Model(nn.Module):
    """Loads as models of vLLM do, and fails after as many tensors as a test says."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.fails_after = None
        self.dtypes = set()

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for index, (name, tensor) in enumerate(weights):
            if index == self.fails_after:
                raise OSError("half way")
            self.dtypes.add(tensor.dtype)
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], tensor)


@pytest.fixture
def model():
    model = Model()
    record_metadata_for_reloading(model)
    model.load_weights(CHECKPOINT.items())
    return model


@pytest.fixture
def target(model, tmp_path):
    return make_target(model, tmp_path, CHECKPOINT)


def make_target(model, folder, checkpoint, **hf_config):
    bag = types.SimpleNamespace
    save_file(checkpoint, folder / "model.safetensors")
    return VllmTarget(
        model,
        bag(
            model_config=bag(model=str(folder), hf_config=bag(**hf_config), dtype=torch.float32),
            load_config=bag(load_format="auto"),
        ),
    )


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8:block128x128"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        (None, ""),
    ],
)
def test_target_states_how_its_checkpoint_is_quantised(model, tmp_path, settings, scheme):
    given = {} if settings is None else {"quantization_config": settings}
    assert make_target(model, tmp_path, CHECKPOINT, **given).scheme == scheme


def held(model):
    return {
        name: parameter.detach().unique().tolist() for name, parameter in model.state_dict().items()
    }


def test_applied_update_is_the_way_back_from_the_next(model, target):
    assert {name: spec.shape for name, spec in target.schema().items()} == {
        "layer.weight": (2, 2),
        "layer.bias": (2,),
    }
    target.apply(UPDATE)
    assert held(model) == {"layer.weight": [2.0], "layer.bias": [2.0]}
    assert target.capture() is UPDATE
    target.forget()
    assert target.capture() is None


def test_update_in_another_dtype_is_cast_before_the_loaders(model, target):
    model.dtypes.clear()
    target.apply({name: tensor.double() for name, tensor in UPDATE.items()})
    assert model.dtypes == {torch.float32}
    assert held(model) == {"layer.weight": [2.0], "layer.bias": [2.0]}


def test_failed_load_leaves_no_parts_to_the_next(model, target):
    way_back = target.capture()
    model.fails_after = 1
    with pytest.raises(OSError, match="half way"):
        target.apply(UPDATE)
    assert target.capture() is None
    # Neither completed over memory that was never written ...
    assert held(model) == {"layer.weight": [1.0], "layer.bias": [1.0]}
    model.fails_after = None
    target.apply(way_back)
    # ... nor counted among the elements of the next load.
    assert held(model) == {"layer.weight": [1.0], "layer.bias": [1.0]}


def test_overwritten_checkpoint_is_no_way_back(target, tmp_path):
    way_back = target.capture()
    save_file(UPDATE, tmp_path / "model.safetensors")
    assert target.capture() is None
    with pytest.raises(SourceError, match="was overwritten since"):
        target.apply(way_back)


class Packing(UnquantizedEmbeddingMethod):
    """Keeps what a head consisted of when it was packed last, as the kernels of CPUs do."""

    def process_weights_after_loading(self, layer):
        layer.packed = layer.weight.detach().clone()


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.embed_tokens, self.lm_head = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.lm_head.quant_method = Packing()


def test_tied_head_is_packed_again_and_may_come_under_either_name(tmp_path):
    model = Tied()
    record_metadata_for_reloading(model)
    ones = {"embed_tokens.weight": torch.ones(2, 2), "layer.weight": torch.ones(1, 1)}
    target = make_target(model, tmp_path, ones | {"lm_head.weight": torch.ones(2, 2)})
    assert target.schema()["embed_tokens.weight"].aliases == ("lm_head.weight",)
    target.apply({name: 2 * tensor for name, tensor in ones.items()})
    assert model.lm_head.packed.unique().tolist() == [2.0]


class Routed(Tied):
    """Its head is its own; one of its layers has two names, as routers and parts of MLA have."""

    def __init__(self):
        super().__init__()
        self.lm_head.weight = nn.Parameter(torch.zeros(2, 2))
        self.experts = nn.Module()
        self.experts.gate = self.layer


def test_layer_under_two_names_does_not_tie_the_head(tmp_path):
    ones = {"embed_tokens.weight": torch.ones(2, 2), "layer.weight": torch.ones(1, 1)}
    checkpoint = ones | {"lm_head.weight": torch.ones(2, 2)}
    assert make_target(Routed(), tmp_path, checkpoint).schema().keys() == checkpoint.keys()


class Finished(Model):
    """vLLM finishes it once it is loaded, and not once it is reloaded."""

    def process_weights_after_loading(self):
        self.made = self.layer.weight.sum()


def test_model_that_vllm_finishes_after_the_first_load_takes_no_update(tmp_path):
    model = Finished()
    record_metadata_for_reloading(model)
    target = make_target(model, tmp_path, CHECKPOINT)
    for _ in range(2):
        with pytest.raises(ReloadError, match=r"Finished takes no update: .* the first load only"):
            target.prove()
    assert not target.proven


class ReadsFurtherFiles(Model):
    """vLLM reads a head from a file of its own, beside the checkpoint."""

    secondary_weights = ("head.pt",)

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2, bias=False)


def reads_further_files():
    model = ReadsFurtherFiles()
    record_metadata_for_reloading(model)
    model.load_weights({**CHECKPOINT, "head.weight": torch.ones(2, 2)}.items())
    return model


def test_weights_from_further_files_are_missed_by_the_proof_as_by_an_update(tmp_path):
    model = reads_further_files()
    target = make_target(model, tmp_path, CHECKPOINT)
    before = held(model)
    with pytest.raises(ReloadError, match=r"layer 'head', parameter 'weight': received no elem"):
        target.prove()
    assert held(model) == before


def test_weights_from_further_files_are_refused_where_no_checkpoint_is_on_disk(tmp_path):
    target = make_target(reads_further_files(), tmp_path, CHECKPOINT)
    target.checkpoint = None
    target._vllm_config.load_config = LoadConfig(load_format="pt")
    with pytest.raises(ReloadError, match="reads weights of it from further files, which no upd"):
        target.prove()


def test_checkpoint_that_serves_is_what_the_proof_loads(target, tmp_path):
    target.prove()
    assert target.proven
    other = make_target(target._model, tmp_path, {n: 2 * t for n, t in CHECKPOINT.items()})
    with pytest.raises(ReloadError, match="other bits"):
        other.prove()


def test_load_that_breaks_off_within_the_proof_is_told_by_its_own_error(model, target):
    model.fails_after = 0
    with pytest.raises(ReloadError, match=r"cannot reload the .* serves: OSError: half way\."):
        target.prove()


def test_overwritten_checkpoint_proves_nothing(target, tmp_path):
    save_file(UPDATE, tmp_path / "model.safetensors")
    with pytest.raises(ReloadError, match="which was overwritten since; restart vLLM"):
        target.prove()
