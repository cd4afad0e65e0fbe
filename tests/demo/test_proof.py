import pytest
import torch
from torch import nn

from wtransfer.demo.model import ByteTransformer
from wtransfer.demo.proof import LiveDigest, weights_digest
from wtransfer.demo.sizes import ModelShape


@pytest.fixture
def model():
    return ByteTransformer(ModelShape(1, 64), seed=0)


def test_equal_models_have_equal_digests(model):
    other = ByteTransformer(ModelShape(1, 64), seed=5)
    assert weights_digest(other) != weights_digest(model)
    other.load_state_dict(model.state_dict())
    assert weights_digest(other) == weights_digest(model)


def test_every_tensor_counts_to_its_last_bit(model):
    whole = weights_digest(model)
    for tensor in model.state_dict().values():
        flat = tensor.view(-1).view(torch.uint8)
        flat[-1] ^= 1
        assert weights_digest(model) != whole
        flat[-1] ^= 1
    assert weights_digest(model) == whole


def test_equal_bytes_in_another_shape_dtype_or_name_differ():
    def holder(name, tensor):
        module = nn.Module()
        module.register_buffer(name, tensor)
        return weights_digest(module)

    zeros = torch.zeros(4, 2, dtype=torch.float32)
    digests = {
        holder("a", zeros),
        holder("b", zeros),
        holder("a", zeros.view(8)),
        holder("a", zeros.view(torch.int32)),
        holder("a", zeros.view(torch.bfloat16)),
    }
    assert len(digests) == 5


def test_it_can_be_taken_a_part_at_a_time(model):
    digest = LiveDigest(model)
    num_tensors = len(model.state_dict())
    large = model.pairs.weight.nbytes // (1 << 20)
    for _ in range(2 * num_tensors + large - 1):
        assert digest.advance(0.0) is None
    assert digest.advance(0.0) == weights_digest(model)


def test_it_reads_the_memory_that_the_model_has_now(model):
    other = ByteTransformer(ModelShape(1, 64), seed=9)
    for name, parameter in model.named_parameters():
        parameter.data = other.get_parameter(name).data.clone()
    assert weights_digest(model) == weights_digest(other)
