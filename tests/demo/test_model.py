import pytest
import torch

from wtransfer.demo.generate import Generator
from wtransfer.demo.learner import Learner
from wtransfer.demo.model import CONTEXT, ByteTransformer
from wtransfer.demo.sizes import ModelShape

SHAPE = ModelShape(num_layers=2, width=64)


@pytest.fixture(autouse=True)
def as_in_the_demo(one_thread):
    """And many small steps on several threads of a busy machine take minutes."""


@pytest.fixture
def model():
    return ByteTransformer(SHAPE, seed=0)


def test_no_byte_sees_a_later_one(model):
    model.eval()
    inputs = torch.randint(256, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    changed = inputs.clone()
    changed[0, 20] += 1
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_tied_weights_are_one_memory_until_somebody_unties_them(model):
    assert model.is_tied
    assert {"head.weight", "embedding.weight", "trained_steps"} <= set(model.state_dict())
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    assert not model.is_tied


def test_seeds_decide_the_weights(model):
    same, other = (ByteTransformer(SHAPE, seed).state_dict() for seed in (0, 1))
    mine = model.state_dict()
    assert all(torch.equal(mine[name], same[name]) for name in mine)
    assert not torch.equal(mine["embedding.weight"], other["embedding.weight"])


def test_training_learns_and_counts_its_steps_in_the_weights(model):
    learner = Learner(model)
    learner.step()
    first = learner.loss
    for _ in range(39):
        learner.step()
    assert first > 5.0
    assert learner.loss < first - 1.5
    assert learner.steps == 40 == int(model.state_dict()["trained_steps"])
    assert model.is_tied


def test_generation_depends_on_nothing_but_weights_seed_and_text_so_far(model):
    one, two = Generator(model, seed=3), Generator(model, seed=3)
    for _ in range(30):
        one.next_byte()
    other = ByteTransformer(SHAPE, seed=1)
    for _ in range(30):
        two.next_byte()
    assert one.last(34) == two.last(34)
    # New weights under a running generator: it must not use anything of the old ones.
    model.load_state_dict(other.state_dict())
    fresh = Generator(other, seed=3)
    fresh._text[:] = two._text
    fresh._random.set_state(two._random.get_state())
    for _ in range(80):
        two.next_byte()
        fresh.next_byte()
    assert two.last(114) == fresh.last(114)


def test_generated_text_is_printable_and_bounded(model):
    generator = Generator(model, seed=0)
    generator._text[:] = b"\x00\xff\n" * 3000
    generator.next_byte()
    assert len(generator._text) <= 4096
    assert generator.last(50).isprintable()
    assert len(generator.last(50)) == 50
