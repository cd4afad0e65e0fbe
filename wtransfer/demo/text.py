"""Real text that every Python ships: the help topics of the language reference."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch


def corpus() -> torch.Tensor:
    """Return the text as bytes: uint8, one dimension, about 460,000 of them."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Batches:
    """Random windows of a text.

    Args:
        text: uint8, one dimension.
        num_rows: Windows per batch.
        length: Bytes per window that are predicted.
        seed: Equal seeds draw equal windows.
    """

    def __init__(self, text: torch.Tensor, num_rows: int, length: int, seed: int) -> None:
        self._windows = text.unfold(0, length + 1, 1)
        self._num_rows = num_rows
        self._random = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and the byte that follows each of them: int64, [num_rows, length]."""
        rows = torch.randint(len(self._windows), (self._num_rows,), generator=self._random)
        windows = self._windows[rows].long()
        return windows[:, :-1], windows[:, 1:]
