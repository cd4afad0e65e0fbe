"""How big the demo's model is: a word or a number of million parameters becomes a shape."""

from __future__ import annotations

from dataclasses import dataclass

NAMED_SIZES = {"tiny": 4.0, "small": 9.0, "medium": 40.0, "large": 150.0}
"""Word -> million parameters."""
NUM_BYTES = 256
"""Vocabulary: the values of a byte."""
HEAD_WIDTH = 64
"""Width of one attention head; widths are multiples of it."""
MAX_MILLIONS = 10_000
"""Largest model, in million parameters."""
# A pre-norm block of width d holds 4 d^2 weights of attention and 8 d^2 of its feed-forward.
_WEIGHTS_PER_LAYER = 12
_MAX_WIDTH = 8192


@dataclass(frozen=True)
class ModelShape:
    """Depth and width of the transformer."""

    num_layers: int
    """Number of blocks."""
    width: int
    """Size of the residual stream; a multiple of `HEAD_WIDTH`."""

    @classmethod
    def parse(cls, size: str) -> ModelShape:
        """Return the shape whose number of weights is nearest to a size.

        Args:
            size: A key of `NAMED_SIZES`, or a number of million parameters.

        Raises:
            ValueError: Neither.
        """
        try:
            millions = NAMED_SIZES.get(size) or float(size)
        except ValueError:
            millions = float("nan")
        if not 0 < millions <= MAX_MILLIONS:  # false for nan as well
            raise ValueError(
                f"model size {size!r} is neither one of {', '.join(NAMED_SIZES)} nor a number of "
                f"million parameters between 0 and {MAX_MILLIONS}"
            )
        shapes = (cls.of_width(width) for width in range(HEAD_WIDTH, _MAX_WIDTH, HEAD_WIDTH))
        return min(shapes, key=lambda shape: abs(shape.num_weights - millions * 1e6))

    @classmethod
    def of_width(cls, width: int) -> ModelShape:
        """Return a shape of usual proportions: 64 times as wide as deep, and one block more."""
        return cls(width // HEAD_WIDTH + 1, width)

    @property
    def num_weights(self) -> int:
        """Weights in the blocks and in the table of pairs, which is nearly all of them."""
        in_blocks = _WEIGHTS_PER_LAYER * self.num_layers * self.width**2
        return in_blocks + NUM_BYTES**2 * self.width
