"""Named tensors that lie in one piece of host memory, as something to hand to ``load_weights``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.transport.tensors import tensor_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from wtransfer.transport.tensors import ByteArray


class HostTensors:
    """As good as the pairs of name and tensor that it yields, each made when it is asked for.

    A session that stages views looks at the columns instead: what is wanted of many small tensors
    costs less there, and the tensors themselves need not exist before they are applied. Nothing
    here has been checked: columns may be a peer's.

    Args:
        memory: Where they lie. Tensors keep it alive.
        names: Names.
        dtype_names: Wire dtypes.
        shapes: Dimensions.
        starts: First byte of each.
    """

    def __init__(
        self,
        memory: ByteArray,
        names: Sequence[str],
        dtype_names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        starts: Sequence[int],
    ) -> None:
        self.memory = memory
        self.names = names
        self.dtype_names = dtype_names
        self.shapes = shapes
        self.starts = starts

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor.

        Raises:
            ManifestError: An unknown dtype, or a negative dimension.
            TruncatedError: A tensor does not lie within the memory.
        """
        rows = zip(self.names, self.starts, self.dtype_names, self.shapes, strict=True)
        for name, start, dtype, shape in rows:
            yield name, tensor_from(self.memory, start, dtype, shape)
