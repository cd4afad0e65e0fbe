"""What `wtransfer.specs.copying.pages` is, for a cache on a device: streams, and pinned memory.

It has not been run on a GPU yet. Everything here is torch's device-independent interface, and the
tests run all of it on torch's ``cpu`` device, whose streams and events do nothing: what they cannot
show is that the order of the streams is right, and how fast it is.

That order: a copy waits for what the model had been told to do when its job was submitted (`mark`),
and the copying thread waits for the copy before it looks at the bytes, or says that it is done.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.specs.copying.pages import Numbers, Page, Places

logger = logging.getLogger(__name__)

_STAGING_NBYTES = 8 * 1024 * 1024


class DevicePages:
    """The cache of one group, on a device.

    Args:
        pages: The pages of a block, in order; at least one, all on one device.
    """

    def __init__(self, pages: Sequence[Page]) -> None:
        self.num_blocks = min(page.rows.shape[0] for page in pages)
        """Number of blocks."""
        self.block_nbytes = sum(page.nbytes for page in pages)
        """Bytes of a block's pages together."""
        self._pages = list(pages)
        self.device = pages[0].rows.device
        """Where the cache is."""
        self._module: Any = torch.get_device_module(self.device)

    def mark(self) -> object:
        """Note what the model has been told to do so far."""
        event = self._module.Event()
        event.record(self._module.current_stream())
        return event

    def gather(
        self, mark: object, blocks: Numbers, places: Places, slots: Numbers, at: Numbers
    ) -> None:
        """Copy blocks of the cache to where they rest."""
        for part in self._parts(len(blocks)):
            with self._after(mark):
                chosen = torch.from_numpy(blocks[part]).to(self.device)
                rows = [page.rows.index_select(0, chosen) for page in self._pages]
                staged = torch.cat(rows, dim=1)
                for row, target in zip(
                    staged, _targets(places, slots[part], at[part]), strict=True
                ):
                    target.copy_(row, non_blocking=True)

    def scatter(
        self, mark: object, blocks: Numbers, places: Places, slots: Numbers, at: Numbers
    ) -> None:
        """Copy blocks back into the cache."""
        for part in self._parts(len(blocks)):
            with self._after(mark):
                chosen = torch.from_numpy(blocks[part]).to(self.device)
                shape = (len(chosen), self.block_nbytes)
                staged = torch.empty(shape, dtype=torch.uint8, device=self.device)
                for row, source in zip(
                    staged, _targets(places, slots[part], at[part]), strict=True
                ):
                    row.copy_(source, non_blocking=True)
                columns = torch.split(staged, [page.nbytes for page in self._pages], dim=1)
                for page, column in zip(self._pages, columns, strict=True):
                    page.rows.index_copy_(0, chosen, column)

    def _parts(self, num_blocks: int) -> list[slice]:
        step = max(1, _STAGING_NBYTES // self.block_nbytes)
        return [slice(start, start + step) for start in range(0, num_blocks, step)]

    def _after(self, mark: object) -> _Ordered:
        return _Ordered(self._module, self.device, mark)


class _Ordered:
    """A stream that begins after a mark, and is waited for at the end of the context."""

    def __init__(self, module: Any, device: torch.device, mark: object) -> None:
        self._module = module
        self._stream = module.Stream() if device.index is None else module.Stream(device)
        self._stream.wait_event(mark)
        self._context = module.stream(self._stream)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        done = self._module.Event()
        done.record(self._stream)
        self._context.__exit__(*error)
        done.synchronize()


def _targets(places: Places, slots: Numbers, at: Numbers) -> list[torch.Tensor]:
    rows = zip(slots.tolist(), at.tolist(), strict=True)
    return [torch.from_numpy(places[slot, place]) for slot, place in rows]


class Pinned:
    """Host memory that a device may read and write by itself; a faster copy, nothing more.

    Args:
        device: Which device; nothing is done for any but CUDA's.
        address: First byte, at a page's start.
        nbytes: Size.
    """

    def __init__(self, device: torch.device, address: int, nbytes: int) -> None:
        cuda: Any = torch.cuda
        self._runtime = cuda.cudart() if device.type == "cuda" else None
        self._address = address
        if self._runtime is not None:
            code = int(self._runtime.cudaHostRegister(address, nbytes, 0))
            if code:
                logger.warning(
                    "%d bytes of the arena cannot be pinned (cudaHostRegister: %d); copies work, "
                    "but slower",
                    nbytes,
                    code,
                )
                self._runtime = None

    def close(self) -> None:
        """Let go of it; a second call does nothing."""
        if self._runtime is not None:
            self._runtime.cudaHostUnregister(self._address)
            self._runtime = None
