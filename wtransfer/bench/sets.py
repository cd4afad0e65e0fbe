"""The sets of tensors that are moved, as plain data: children make them, the bench knows them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

BFLOAT16_NBYTES = 2
_VOCABULARY = 16_032
# Width of the stream and of the feed-forward; below a GiB a smaller model, or two layers fill it.
_WIDE = (4096, 14_336)
_NARROW = (1024, 3584)
_WIDE_FROM_NBYTES = 1 << 30


@dataclass(frozen=True)
class TensorSet:
    """A set of bfloat16 tensors.

    Equal sets have equal shapes in every process.
    """

    kind: str
    """``llama``: shapes of a Llama, as many layers as it takes. ``many``: small ones. ``one``:
    a single one with as many bytes."""
    nbytes: int
    """Bytes asked for; of each tensor where there are many."""
    number: int = 1
    """How many, where there are many."""

    def plain(self) -> tuple[str, int, int]:
        """Return what makes an equal set in another process."""
        return self.kind, self.nbytes, self.number

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape."""
        if self.kind == "many":
            shape = (self.nbytes // BFLOAT16_NBYTES,)
            return {f"tensor.{index}": shape for index in range(self.number)}
        if self.kind == "one":
            return {"tensor": (self.number * self.nbytes // BFLOAT16_NBYTES,)}
        return _llama(self.nbytes)

    def total_nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return _total(self.shapes())


def _total(shapes: dict[str, tuple[int, ...]]) -> int:
    return BFLOAT16_NBYTES * sum(math.prod(shape) for shape in shapes.values())


def _llama(nbytes: int) -> dict[str, tuple[int, ...]]:
    width, inner = _WIDE if nbytes >= _WIDE_FROM_NBYTES else _NARROW
    shapes: dict[str, tuple[int, ...]] = {"embed": (_VOCABULARY, width)}
    layer = {
        "q": (width, width),
        "k": (width // 4, width),
        "v": (width // 4, width),
        "o": (width, width),
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
        "norm": (width,),
    }
    for number in count():
        if _total(shapes) >= nbytes:
            return shapes
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    raise AssertionError
