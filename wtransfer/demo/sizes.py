"""How big the demo's model is: a word or a number of million parameters becomes a shape."""

from __future__ import annotations

from dataclasses import dataclass

NAMED_SIZES = {"tiny": 0.6, "small": 3.0, "medium": 25.0, "large": 150.0}
"""Word -> million parameters."""
HEAD_WIDTH = 64
"""Width of one attention head; widths are multiples of it."""
# A pre-norm block of width d holds 4 d^2 weights of attention and 8 d^2 of its feed-forward.
_WEIGHTS_PER_LAYER = 12
_WIDTH_PER_LAYER = 64


@dataclass(frozen=True)
class ModelShape:
    """Depth and width of the transformer."""

    num_layers: int
    """Number of blocks."""
    width: int
    """Size of the residual stream; a multiple of `HEAD_WIDTH`."""

    @classmethod
    def parse(cls, size: str) -> ModelShape:
        """Return the shape for a size.

        Args:
            size: A key of `NAMED_SIZES`, or a number of million parameters.

        Raises:
            ValueError: Neither.
        """
        try:
            millions = NAMED_SIZES.get(size) or float(size)
        except ValueError:
            millions = float("nan")
        if not 0 < millions <= 10_000:  # noqa: PLR2004  # nan fails as well
            raise ValueError(
                f"model size {size!r} is neither one of {', '.join(NAMED_SIZES)} nor a number of "
                "million parameters between 0 and 10000"
            )
        return cls.of_millions(millions)

    @classmethod
    def of_millions(cls, millions: float) -> ModelShape:
        """Return a shape of about this many million parameters, 64 times as wide as deep."""
        weights = millions * 1e6
        ideal_width = (weights * _WIDTH_PER_LAYER / _WEIGHTS_PER_LAYER) ** (1 / 3)
        width = HEAD_WIDTH * max(1, round(ideal_width / HEAD_WIDTH))
        return cls(max(1, round(weights / (_WEIGHTS_PER_LAYER * width**2))), width)
