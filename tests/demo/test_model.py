import pytest
import torch
from torch import nn

from wtransfer.demo.model import (
    CONTEXT,
    ByteTransformer,
    Generator,
    Learner,
    digest_in_parts,
    live_digest,
)

WIDTH = 64


@pytest.fixture(autouse=True)
def as_in_the_demo(one_thread):
    """And many small steps on several threads of a busy machine take minutes."""


@pytest.fixture
def model():
    return ByteTransformer(WIDTH, seed=0)


@pytest.mark.parametrize("is_training", [True, False])
def test_attention_is_causal(model, is_training):
    model.train(is_training)
    inputs = torch.randint(256, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    changed = inputs.clone()
    changed[0, 20] += 1
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_seeds_decide_the_weights(model):
    same, other = (ByteTransformer(WIDTH, seed).state_dict() for seed in (0, 1))
    mine = model.state_dict()
    assert all(torch.equal(mine[name], same[name]) for name in mine)
    assert not torch.equal(mine["embedding.weight"], other["embedding.weight"])


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


def test_generation_depends_on_nothing_but_weights_seed_and_text_so_far(model):
    model.eval()
    one, two = Generator(model, seed=3), Generator(model, seed=3)
    for _ in range(30):
        one.next_byte()
    for _ in range(30):
        two.next_byte()
    assert one.last(34) == two.last(34)
    # New weights under a running generator: it must not use anything of the old ones.
    other = ByteTransformer(WIDTH, seed=1).eval()
    model.load_state_dict(other.state_dict())
    fresh = Generator(other, seed=3)
    fresh._text[:] = two._text
    fresh._random.set_state(two._random.get_state())
    for _ in range(80):
        two.next_byte()
        fresh.next_byte()
    assert two.last(114) == fresh.last(114)


def test_generated_text_is_printable(model):
    generator = Generator(model, seed=0)
    generator._text[:] = b"\x00\xff\n" * 30
    generator.next_byte()
    assert generator.last(50).isprintable()
    assert len(generator.last(50)) == 50


@pytest.mark.parametrize("millions", [4.0, 9.0, 25.0, 150.0])
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
        digest("a", zeros.view(torch.bfloat16)),
    }
    assert len(digests) == 5


def test_a_digest_reads_the_memory_that_the_model_has_now_a_part_at_a_time(model):
    other = ByteTransformer(WIDTH, seed=9)
    for name, parameter in model.named_parameters():
        parameter.data = other.get_parameter(name).data.clone()
    *parts, digest = digest_in_parts(model)
    assert digest == live_digest(other)
    assert 64 <= len(parts) <= 64 + len(model.state_dict())
    assert set(parts) == {""}
