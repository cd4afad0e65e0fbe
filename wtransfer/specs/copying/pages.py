"""A worker's KV cache as the copier sees it: for one group, the pages of a block in their order.

`wtransfer.specs.copying.device_pages` does the same for a cache on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from wtransfer.errors import OffloadingOptionError
from wtransfer.transport.pages import byte_rows, runs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    Numbers = npt.NDArray[np.int64]
    """Numbers of blocks, slots or places in a slot."""
    Places = npt.NDArray[np.uint8]
    """Where blocks rest, shape ``(num_slots, blocks per slot, block_nbytes)``."""

# Below it a call for each block costs more than a second copy, of many blocks at once.
_LARGE_NBYTES = 16 * 1024


class Page(NamedTuple):
    """The pages of one layer, one for each block."""

    rows: torch.Tensor
    """uint8, shape ``(num_blocks, nbytes)``; rows may have gaps between them."""

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.rows.shape[1]


class GroupPages(Protocol):
    """The cache of one group."""

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block's pages together."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        ...

    def mark(self) -> object:
        """Note what the model has been told to do so far; called on its thread, must not wait.

        A copy that is given the mark comes after all that.
        """
        ...

    def gather(
        self, mark: object, blocks: Numbers, places: Places, slots: Numbers, at: Numbers
    ) -> None:
        """Copy blocks of the cache to where they rest; done when it returns.

        Args:
            mark: Of when the job was submitted.
            blocks: Numbers of the blocks.
            places: Where they rest.
            slots: The slot of each.
            at: The place of each in its slot.
        """
        ...

    def scatter(
        self, mark: object, blocks: Numbers, places: Places, slots: Numbers, at: Numbers
    ) -> None:
        """Copy blocks back into the cache; arguments as for `gather`."""
        ...


def page_of(tensor: torch.Tensor, nbytes: int) -> Page:
    """Return the pages of a tensor.

    Args:
        tensor: Shape ``(num_blocks, ...)``, any dtype; what belongs to a block lies together.
        nbytes: Bytes of a page that are used.

    Raises:
        OffloadingOptionError: The tensor is laid out in another way, or has smaller pages.
    """
    row = tensor[0] if tensor.shape[0] else tensor.new_empty(tensor.shape[1:])
    if not row.is_contiguous() or row.nbytes < nbytes:
        raise OffloadingOptionError(
            f"a KV cache of shape {tuple(tensor.shape)}, strides {tensor.stride()} and dtype "
            f"{tensor.dtype} cannot be copied by block: expected that the first dimension counts "
            f"blocks, and that {nbytes:,} bytes of each lie together"
        )
    return Page(byte_rows(tensor, nbytes))


class HostPages:
    """The cache of one group, in host memory.

    Args:
        pages: The pages of a block, in order; at least one.
    """

    def __init__(self, pages: Sequence[Page]) -> None:
        self.num_blocks = min(page.rows.shape[0] for page in pages)
        """Number of blocks."""
        self.block_nbytes = sum(page.nbytes for page in pages)
        """Bytes of a block's pages together."""
        self.device = pages[0].rows.device
        """Where the cache is."""
        self._runs = list(runs_of([page.rows.numpy() for page in pages], self.num_blocks))

    def mark(self) -> None:
        """Note nothing: what is done in host memory is done."""

    def gather(
        self,
        mark: object,  # noqa: ARG002  # the protocol's
        blocks: Numbers,
        places: Places,
        slots: Numbers,
        at: Numbers,
    ) -> None:
        """Copy blocks of the cache to where they rest."""
        rows = _rows(blocks, slots, at)
        for run in self._runs:
            if run.nbytes >= _LARGE_NBYTES:
                for block, slot, place in rows:
                    target = places[slot, place, run.where]
                    np.copyto(target.reshape(run.shape), run.pages[block])
            else:
                # The first is a copy; small enough to stay in the processor's cache.
                pages = run.pages[blocks].reshape(len(blocks), -1)
                places[slots, at, run.where] = pages

    def scatter(
        self,
        mark: object,  # noqa: ARG002  # the protocol's
        blocks: Numbers,
        places: Places,
        slots: Numbers,
        at: Numbers,
    ) -> None:
        """Copy blocks back into the cache."""
        rows = _rows(blocks, slots, at)
        for run in self._runs:
            if run.nbytes >= _LARGE_NBYTES:
                for block, slot, place in rows:
                    np.copyto(run.pages[block], places[slot, place, run.where].reshape(run.shape))
            else:
                run.pages[blocks] = places[slots, at, run.where].reshape(-1, *run.shape)


def _rows(*columns: Numbers) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))
