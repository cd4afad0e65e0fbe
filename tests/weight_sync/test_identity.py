"""Weights that nobody has published have the name that a round would give them."""

from __future__ import annotations

import torch
from torch import nn

from wtransfer.weight_sync.identity import module_fingerprint


class Tied(nn.Module):
    """A module with all that a source has to deal with."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 3).to(torch.bfloat16)
        self.second = nn.Linear(5, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.arange(4).view(2, 2).T)
        self.register_buffer("not_kept", torch.rand(2), persistent=False)


def test_module_fingerprint_is_the_fingerprint_of_a_round(fleet):
    model, worker = Tied(0), Tied(1)
    made = fleet(model)
    made.join(worker)
    before = module_fingerprint(worker)
    report = made.publish("v1")
    assert module_fingerprint(model) == report.fingerprint
    assert module_fingerprint(worker) == report.fingerprint != before


def test_every_tensor_that_is_published_counts_and_no_other():
    model = Tied(0)
    whole = module_fingerprint(model)
    model.not_kept.add_(1)
    assert module_fingerprint(model) == whole
    for tensor in (model.first.weight, model.first.bias, model.kept):
        with torch.no_grad():
            before = tensor.clone()
            tensor[-1] += 1
            assert module_fingerprint(model) != whole
            tensor.copy_(before)
    assert module_fingerprint(model) == whole


def test_module_fingerprint_depends_on_the_digest_algorithm():
    assert module_fingerprint(Tied(0), "wsum64") != module_fingerprint(Tied(0))
