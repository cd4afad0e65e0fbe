"""What a model computes with and no reload reaches."""

import types

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

from vllm.config import CompilationConfig

from wtransfer_vllm.reach import MADE_ONCE, check_reach
from wtransfer_vllm.reload import ReloadError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_head_that_is_no_registered_module_is_refused_by_the_way_to_it():
    model = Model()
    model.heads = {"embed": nn.Linear(2, 2)}
    with pytest.raises(ReloadError, match=r"^Model takes no update: heads\.embed \(Linear\) is no"):
        check_reach(model)


def test_layers_of_another_model_that_vllms_configuration_holds_are_not_this_ones():
    model = Model()
    model.config = CompilationConfig()
    model.config.static_forward_context["draft"] = nn.Linear(2, 2)
    check_reach(model)


@pytest.mark.parametrize("name", MADE_ONCE)
def test_copy_of_weights_that_a_layer_makes_once_is_refused_as_soon_as_it_is_there(name):
    model = Model()
    setattr(model.layer, name, None)
    check_reach(model)
    setattr(model.layer, name, torch.ones(1))
    with pytest.raises(ReloadError, match=f"Model takes no update: layer 'layer' keeps {name}, "):
        check_reach(model)


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.parametrize("is_packed", [True, False])
def test_view_of_a_parameter_is_refused_once_a_kernel_has_packed_that(is_packed):
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model()
    model.layer.weight.requires_grad_(requires_grad=False)
    model.register_buffer("view", model.layer.weight.view(-1), persistent=False)
    model.register_buffer("table", torch.ones(2), persistent=False)
    record_metadata_for_reloading(model)
    if not is_packed:
        check_reach(model)
        return
    model.layer.weight.data = model.layer.weight.data.clone()
    with pytest.raises(ReloadError, match="buffer 'view' of layer '' was a view of a parameter"):
        check_reach(model)


@pytest.mark.parametrize("is_due", [True, False])
def test_table_that_a_first_step_makes_of_weights_is_refused_before_it_as_well(is_due):
    model = Model()
    model.layer.update_cache = is_due
    with pytest.raises(ReloadError, match="layer 'layer' keeps cos_sin_cache, made of weights"):
        check_reach(model)


@pytest.mark.parametrize("which", "kvo")
@pytest.mark.parametrize(
    ("kernel", "scale", "is_refused"),
    [
        ({"bmm1_scale": 0.5, "bmm2_scale": 1.0}, 2.0, True),
        ({"bmm1_scale": 0.5, "bmm2_scale": 1.0}, 1.0, False),
        ({"bmm1_scale": None}, 2.0, False),
        ({}, 2.0, False),
    ],
)
def test_scales_of_kv_that_a_kernel_has_taken_in_are_refused(kernel, scale, is_refused, which):
    model = Model()
    model.layer.impl = types.SimpleNamespace(**kernel)
    model.layer._q_scale_float = 1.0
    setattr(model.layer, f"_{which}_scale_float", scale)
    if is_refused:
        with pytest.raises(ReloadError, match=r"layer 'layer' keeps impl\.bmm1_scale, "):
            check_reach(model)
    else:
        check_reach(model)
