"""Options with which a connector has room for the blocks of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wtransfer.bench.jobs.sides import BLOCK_SIZE
from wtransfer.bench.kinds import MULTI, OFFLOADING, PROCESS_GROUP, SHM, STORAGE
from wtransfer.bench.offload import NUM_LAYERS
from wtransfer.blocks import BlockGeometry
from wtransfer.connectors.p2p.buffer import SlotLayout
from wtransfer.connectors.storage.options import DEFAULT_MAX_BYTES
from wtransfer.specs.arena.layout import stride_of

if TYPE_CHECKING:
    from collections.abc import Callable

# What an arena takes beside its slots.
_PER_SLOT_NBYTES = 256
_SPARE_NBYTES = 1 << 20


def options_of(
    connector: str, num_blocks: int, block_nbytes: int, *, token: str, folder: str
) -> dict[str, Any]:
    """Return a connector's options.

    Args:
        connector: Its name.
        num_blocks: Blocks of a round.
        block_nbytes: Bytes of each.
        token: Secret of the bench.
        folder: Where files go.
    """
    shelf_nbytes = num_blocks * _slot_nbytes(block_nbytes)

    def several() -> list[dict[str, Any]]:
        return [
            {"kv_connector": name, "kv_connector_extra_config": makers[name]()}
            for name in (SHM.connector, STORAGE.connector)
        ]

    makers: dict[str, Callable[[], dict[str, Any]]] = {
        SHM.connector: lambda: {"shelf_bytes": shelf_nbytes},
        PROCESS_GROUP.connector: lambda: {"shelf_bytes": shelf_nbytes, "token": token},
        STORAGE.connector: lambda: {
            "shared_storage_path": folder,
            "max_bytes": max(DEFAULT_MAX_BYTES, 2 * shelf_nbytes),
        },
        OFFLOADING.connector: lambda: {
            "cpu_bytes_to_use": num_blocks * (stride_of(block_nbytes) + _PER_SLOT_NBYTES)
            + _SPARE_NBYTES
        },
        MULTI.connector: lambda: {"connectors": several()},
    }
    return makers[connector]()


def _slot_nbytes(block_nbytes: int) -> int:
    """Return what a block takes on a shelf."""
    pages = (("uint8", block_nbytes // NUM_LAYERS),) * NUM_LAYERS
    return SlotLayout(BlockGeometry(BLOCK_SIZE, pages)).stride
