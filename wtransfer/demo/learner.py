"""Training, as plain as it gets: random windows, cross entropy, AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch.nn.utils import clip_grad_norm_

from wtransfer.demo.model import CONTEXT, NUM_BYTES
from wtransfer.demo.text import Batches, corpus

if TYPE_CHECKING:
    from wtransfer.demo.model import ByteTransformer

_NUM_ROWS = 4
_WARM_UP_STEPS = 10
_SEED = 20


class Learner:
    """A model in training.

    Args:
        model: Changed in place by every step.
    """

    def __init__(self, model: ByteTransformer) -> None:
        self.model = model
        self.loss = float("nan")
        """Cross entropy of the last batch, in nats per byte."""
        self._batches = Batches(corpus(), _NUM_ROWS, CONTEXT, _SEED)
        # Wide models want smaller steps; 256 is the width that the rate was chosen for.
        rate = 2e-3 * min(1.0, 256 / model.embedding.embedding_dim)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP_STEPS)
        )

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return int(self.model.trained_steps)

    def step(self) -> None:
        """Take one optimizer step."""
        inputs, following = self._batches.draw()
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, NUM_BYTES), following.reshape(-1))
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self.model.trained_steps += 1
        self.loss = loss.item()
