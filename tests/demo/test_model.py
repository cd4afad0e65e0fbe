import pytest
import torch
from torch import nn

from wtransfer.demo.model import ByteTransformer, Learner, live_digest

WIDTH = 64


@pytest.fixture(autouse=True)
def as_in_the_demo(one_thread):
    """And many small steps on several threads of a busy machine take minutes."""


@pytest.fixture
def model():
    return ByteTransformer(WIDTH, seed=0)


def test_training_learns_counts_its_steps_in_the_weights_and_keeps_the_tie(model):
    assert model.is_tied
    learner = Learner(model)
    losses = [learner.step() for _ in range(40)]
    assert losses[0] > 5.0
    assert losses[-1] < losses[0] - 1.5
    assert int(model.state_dict()["trained_steps"]) == 40
    assert model.is_tied
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    assert not model.is_tied


@pytest.mark.parametrize("millions", [4.0, 25.0, 150.0])
def test_a_model_has_about_as_many_parameters_as_asked_for(millions):
    with torch.device("meta"):
        model = ByteTransformer.of_size(millions, seed=0)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 0.7 <= num_parameters / (millions * 1e6) <= 1.3


def test_equal_models_have_equal_digests_and_every_tensor_counts_to_its_last_bit(model):
    whole = live_digest(model)
    other = ByteTransformer(WIDTH, seed=5)
    assert live_digest(other) != whole
    other.load_state_dict(model.state_dict())
    assert live_digest(other) == whole
    for tensor in model.state_dict().values():
        flat = tensor.view(-1).view(torch.uint8)
        flat[-1] ^= 1
        assert live_digest(model) != whole
        flat[-1] ^= 1
    assert live_digest(model) == whole


def test_equal_bytes_in_another_shape_dtype_or_name_differ():
    def digest(name, tensor):
        module = nn.Module()
        module.register_buffer(name, tensor)
        return live_digest(module)

    zeros = torch.zeros(4, 2, dtype=torch.float32)
    digests = {
        digest("a", zeros),
        digest("b", zeros),
        digest("a", zeros.view(8)),
        digest("a", zeros.view(torch.int32)),
    }
    assert len(digests) == 4
