import torch

from wtransfer.demo.text import Batches, corpus


def test_the_text_is_real_and_large():
    text = bytes(corpus().tolist())
    assert len(text) > 100_000
    assert b"generator" in text


def test_targets_are_the_bytes_that_follow():
    text = torch.arange(200, dtype=torch.uint8)
    inputs, following = Batches(text, num_rows=5, length=16, seed=0).draw()
    assert inputs.shape == following.shape == (5, 16)
    assert torch.equal(inputs + 1, following)


def test_equal_seeds_draw_equal_windows_and_others_do_not():
    text = corpus()
    first, second, other = (Batches(text, 4, 32, seed).draw()[0] for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
