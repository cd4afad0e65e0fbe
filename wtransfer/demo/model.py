"""A small byte-level transformer: plain torch, pre-norm, causal, with tied embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from wtransfer.demo.sizes import HEAD_WIDTH, NUM_BYTES, ModelShape

CONTEXT = 64
"""Bytes that the model looks back."""


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised residual stream.

    Args:
        width: Size of the stream.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the stream after the block: [batch, length, width]."""
        stream = stream + self._attend(self.attention_norm(stream))
        hidden = F.gelu(self.feed_in(self.feed_norm(stream)))
        out: torch.Tensor = stream + self.feed_out(hidden)
        return out

    def _attend(self, normed: torch.Tensor) -> torch.Tensor:
        batch, length, width = normed.shape
        heads = self.query_key_value(normed).view(batch, length, 3, -1, HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class ByteTransformer(nn.Module):
    """Predicts the next byte.

    Beside the embedding of a byte stands one of the pair that it ends. That table makes the model
    heavy to move and cheap to compute, and it learns fast. The head shares the embedding's storage
    (an update must send it once and keep the tie), and `trained_steps` is a buffer without
    dimensions (an update must bring it along).

    Args:
        shape: Depth and width.
        seed: Equal seeds give equal weights.
    """

    trained_steps: torch.Tensor

    def __init__(self, shape: ModelShape, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, shape.width)
        self.pairs = nn.Embedding(NUM_BYTES**2, shape.width, sparse=True)
        self.position = nn.Embedding(CONTEXT, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width) for _ in range(shape.num_layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, NUM_BYTES, bias=False)
        self.register_buffer("trained_steps", torch.zeros((), dtype=torch.int64))
        self._draw_weights(seed)
        self.head.weight = self.embedding.weight

    def _draw_weights(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02, generator=random)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits.

        Args:
            inputs: Bytes as int64, [batch, length], at most `CONTEXT` long.

        Returns:
            [batch, length, 256].
        """
        pairs = F.pad(inputs, (1, 0))[:, :-1] * NUM_BYTES + inputs
        stream = self.embedding(inputs) + self.pairs(pairs)
        stream = stream + self.position.weight[: inputs.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(stream)))
        return logits

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding are the same memory, as they must be after every update."""
        return self.head.weight.data_ptr() == self.embedding.weight.data_ptr()

    def num_parameters(self) -> int:
        """Return the number of weights, tied ones once."""
        return sum(parameter.numel() for parameter in self.parameters())
