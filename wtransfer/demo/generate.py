"""Serving in its smallest form: one byte after another, for ever."""

from __future__ import annotations

import torch

from wtransfer.demo.model import CONTEXT, ByteTransformer

_PROMPT = b"The "
_TEMPERATURE = 0.7
_MAX_KEPT = 4096


class Generator:
    """Generates text from a model.

    It keeps bytes and no keys or values: the whole window is computed anew for each byte, so
    nothing that was computed under one set of weights can be used under another.

    Args:
        model: Read anew for every byte.
        seed: Equal seeds and weights give equal text.
    """

    def __init__(self, model: ByteTransformer, seed: int) -> None:
        self._model = model
        self._random = torch.Generator().manual_seed(seed)
        self._text = bytearray(_PROMPT)

    @torch.inference_mode()
    def next_byte(self) -> None:
        """Generate one byte.

        Cost: one forward pass over at most 64 bytes.
        """
        window = torch.tensor([list(self._text[-CONTEXT:])])
        logits = self._model(window)[0, -1] / _TEMPERATURE
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=self._random)
        self._text.append(int(drawn))
        del self._text[:-_MAX_KEPT]

    def last(self, length: int) -> str:
        """Return the last `length` bytes as text; what cannot be printed becomes a dot."""
        decoded = self._text[-length:].decode("ascii", "replace")
        return "".join(c if c.isprintable() and c != "\ufffd" else "." for c in decoded)
