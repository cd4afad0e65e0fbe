"""Training, as plain as it gets: random windows, cross entropy, Adam."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch.nn.utils import clip_grad_norm_

from wtransfer.demo.model import CONTEXT
from wtransfer.demo.sizes import NUM_BYTES
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
        table = model.pairs.weight
        self._dense = [parameter for parameter in model.parameters() if parameter is not table]
        # Wide models want smaller steps; 128 is the width that the rate was chosen for.
        self._rate = 2e-3 * min(1.0, 128 / model.embedding.embedding_dim)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.AdamW(self._dense, betas=(0.9, 0.95)),
            # Only the rows of the batch: the rest of the table costs nothing.
            torch.optim.SparseAdam([table]),
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
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        clip_grad_norm_(self._dense, 1.0)
        self._optimize()
        self.model.trained_steps += 1
        self.loss = loss.item()

    def _optimize(self) -> None:
        rate = self._rate * min(1.0, (self.steps + 1) / _WARM_UP_STEPS)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
