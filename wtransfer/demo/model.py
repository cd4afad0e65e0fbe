"""A small byte-level transformer: training, generation, and the digest of its live weights."""

from __future__ import annotations

import hashlib
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTEXT = 64
"""Bytes that the model looks back."""
_NUM_BYTES = 256
_HEAD_WIDTH = 64
_BATCH_SIZE = 4
_TEMPERATURE = 0.7
_NUM_DIGEST_PARTS = 64


class ByteTransformer(nn.Module):
    """Predicts the next byte.

    Beside the embedding of a byte stands one of the pair that ends with it. That table makes the
    model heavy to move and cheap to compute. The head shares the embedding's storage (an update
    must send it once and keep the tie), and `trained_steps` is a buffer without dimensions (an
    update must include it).

    Args:
        width: Size of the residual stream; a multiple of 64.
        seed: Equal seeds give equal weights.
    """

    trained_steps: torch.Tensor

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_NUM_BYTES, width)
        self.pairs = nn.Embedding(_NUM_BYTES**2, width, sparse=True)
        self.position = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, width // _HEAD_WIDTH, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, _num_layers(width), nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, _NUM_BYTES, bias=False)
        self.register_buffer("trained_steps", torch.zeros((), dtype=torch.int64))
        random = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02, generator=random)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.head.weight = self.embedding.weight

    @classmethod
    def of_size(cls, millions: float, seed: int) -> ByteTransformer:
        """Return a model of about so many million parameters."""

        def distance(width: int) -> float:
            # A layer holds 4 width^2 weights of attention and 8 width^2 of its feed-forward.
            number = 12 * _num_layers(width) * width**2 + _NUM_BYTES**2 * width
            return abs(number - millions * 1e6)

        return cls(min(range(_HEAD_WIDTH, 8192, _HEAD_WIDTH), key=distance), seed)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits.

        Args:
            inputs: Bytes as int64, [batch, length], at most `CONTEXT` long.

        Returns:
            [batch, length, 256].
        """
        length = inputs.shape[1]
        pairs = F.pad(inputs, (1, 0))[:, :-1] * _NUM_BYTES + inputs
        stream = self.embedding(inputs) + self.pairs(pairs) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        logits: torch.Tensor = self.head(self.layers(stream, mask, is_causal=True))
        return logits

    @property
    def is_tied(self) -> bool:
        """True if head and embedding share memory, as they must after every update."""
        return self.head.weight.data_ptr() == self.embedding.weight.data_ptr()


def _num_layers(width: int) -> int:
    return width // _HEAD_WIDTH + 1


class Learner:
    """Trains a model on the help topics of Python: random windows, cross entropy, SGD."""

    def __init__(self, model: ByteTransformer) -> None:
        self._model = model
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self._windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(
            0, CONTEXT + 1, 1
        )
        self._random = torch.Generator().manual_seed(20)
        # Wide models want smaller steps; 128 is the width that the rate was chosen for.
        rate = 0.1 * min(1.0, 128 / model.embedding.embedding_dim)
        # Without momentum: only the rows of the batch cost something, not the whole table of pairs.
        self._optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(self) -> float:
        """Take one optimizer step; return the cross entropy of its batch, in nats per byte."""
        rows = torch.randint(len(self._windows), (_BATCH_SIZE,), generator=self._random)
        windows = self._windows[rows].long()
        logits = self._model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._optimizer.step()
        self._model.trained_steps += 1
        return loss.item()


class Generator:
    """Generates text from a model, one byte after another.

    The generator keeps bytes and no keys or values: the whole window is computed for each byte, so
    nothing computed under one set of weights can be used under another.

    Args:
        model: Read anew for every byte.
        seed: Equal seeds and weights give equal text.
    """

    def __init__(self, model: ByteTransformer, seed: int) -> None:
        self._model = model
        self._random = torch.Generator().manual_seed(seed)
        self._text = bytearray(b"The ")

    @torch.inference_mode()
    def next_byte(self) -> None:
        """Generate one byte: one forward pass over at most 64 bytes."""
        window = torch.tensor([list(self._text[-CONTEXT:])])
        logits = self._model(window)[0, -1] / _TEMPERATURE
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=self._random)
        self._text.append(int(drawn))

    def last(self, length: int) -> str:
        """Return the last `length` bytes as text, with a dot for each unprintable character."""
        decoded = self._text[-length:].decode("ascii", "replace")
        return "".join(c if c.isprintable() and c != "\ufffd" else "." for c in decoded)


def digest_in_parts(model: nn.Module) -> Iterator[str]:
    """Digest a live model; yield an empty text after each part, and the digest at last.

    Shares nothing with the digests of the sessions, which are of bytes as they arrive: the input is
    the tensors that the model computes with, under every name of its state dict; the hash differs.
    There are 64 large parts and one for each tensor, so that serving need not pause for it.

    Args:
        model: Must not change until the digest is done.
    """
    found = hashlib.sha256()
    tensors = sorted(model.state_dict().items())
    nbytes = sum(tensor.nbytes for _, tensor in tensors) // _NUM_DIGEST_PARTS + 1
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for part in tensor.reshape(-1).view(torch.uint8).split(nbytes):
            found.update(part.numpy().data)
            yield ""
    yield found.hexdigest()


def live_digest(model: nn.Module) -> str:
    """Return the digest of a live model, taken at once."""
    return "".join(digest_in_parts(model))
