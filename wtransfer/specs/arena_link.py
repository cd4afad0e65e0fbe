"""The arena as a level of a spec: how large it is, and the link that copies to and from it.

Alone it is `CPUOffloadingSpec`. Over a tier (`TieringOffloadingSpec`), a block that was stored is
put into the tier from its slot, soon afterwards or, with ``write_back``, when another block takes
the slot; and a block that the tier has delivered is kept in a slot, too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from wtransfer.deadline import Deadline
from wtransfer.errors import OffloadingOptionError
from wtransfer.kv.cache_view import Pinned
from wtransfer.kv.copier import RefusedError
from wtransfer.kv.header import HEADER_NBYTES, BlockHeader
from wtransfer.specs.arena import ArenaLayout, SharedRegion
from wtransfer.specs.tier_link import STALL_S
from wtransfer.specs.worker import Link, copiers_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import numpy.typing as npt

    from wtransfer.config import OffloadingConfig
    from wtransfer.kv.cache_view import GroupPages
    from wtransfer.kv.copier import Chunks, Copier
    from wtransfer.kv.header import BlockGeometry
    from wtransfer.kv.slots import Numbers
    from wtransfer.specs.jobs import Jobs, Pool, Step
    from wtransfer.specs.tier_link import TierLink
    from wtransfer.specs.worker import Plan


def arena_layout(config: OffloadingConfig, nbytes: int) -> ArenaLayout:
    """Return the layout of an arena of at most `nbytes`, with all its ranks.

    Raises:
        OffloadingOptionError: `nbytes` is too little for a block, or the config does not give the
            size of a block.
    """
    rank, num_ranks = config.parallel.rank, config.parallel.world_size
    if not 0 <= rank < num_ranks:
        raise OffloadingOptionError(f"rank {rank} of {num_ranks}: ranks begin with 0")
    part_nbytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
    if part_nbytes <= 0:
        raise OffloadingOptionError(
            f"worker_kv_bytes_per_block={config.worker_kv_bytes_per_block}, blocks_per_chunk="
            f"{config.cache.blocks_per_chunk}: the spec divides cpu_bytes_to_use into blocks, "
            "and does not know how large one is. Set KVCacheConfig(bytes_per_block=...) in the "
            "serving config's cache_config, or OffloadingConfig(worker_kv_bytes_per_block="
            "...): the bytes of one block in the KV caches of one rank, all layers together"
        )
    layout = ArenaLayout.within(nbytes, part_nbytes, num_ranks)
    if not layout.num_slots:
        least = ArenaLayout(1, part_nbytes, num_ranks).used_nbytes
        raise OffloadingOptionError(
            f"cpu_bytes_to_use={nbytes:,} is too little for one block, which takes {least:,} "
            f"bytes on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        )
    return layout


class ArenaLink(Link):
    """Copies between one rank's cache and its region of the arena.

    Args:
        region: The region; the link's from here on.
        groups: For each group of the cache its pages, and how a chunk of it is laid out.
        blocks_per_chunk: Blocks in a slot.
        jobs: Jobs of the worker.
        num_threads: Threads that a job is divided among.
        verified: True if payloads are digested.
        below: Link to the tier under the arena; None: there is none.
        write_back: True if blocks are put into that tier when they are evicted; else when they are
            stored.
    """

    def __init__(
        self,
        region: SharedRegion,
        groups: Sequence[tuple[GroupPages, BlockGeometry]],
        blocks_per_chunk: int,
        *,
        jobs: Jobs,
        num_threads: int,
        verified: bool = True,
        below: TierLink | None = None,
        write_back: bool = False,
    ) -> None:
        self.part = region
        """This rank's region of the arena; has no slots after `close`."""
        self.copiers = copiers_of(region, groups, region.rank, blocks_per_chunk, verified=verified)
        self._jobs, self._num_threads = jobs, num_threads
        self._below, self._write_back = below, write_back
        self._nbytes_of = {copier.form.geometry: copier.chunk_nbytes for copier in self.copiers}
        # Devices that copy from and to the region are told of it.
        self._pinned = [
            Pinned(device, region.address, region.layout.region_nbytes)
            for device in {copier.pages.device for copier in self.copiers}
        ]

    def share(self, plan: Plan, chunks: Chunks) -> Chunks:
        """Return the chunks that the arena has, or gets from the cache, in their slots."""
        own = chunks.where(plan.in_arena[chunks.slots])
        return own.at(plan.slots[own.slots])

    def steps(
        self,
        plan: Plan,
        chunks: Chunks,
        mark: object,
        above: Link | None,  # noqa: ARG002
    ) -> Iterator[tuple[Pool, Step]]:
        """Yield copies of as many bytes as are worth a thread of their own."""
        copier = self.copiers[chunks.group]
        copy = self._store if plan.kind == "store" else self._load
        for task in copier.tasks(chunks, self._num_threads):
            yield plan.kind, functools.partial(copy, plan, copier, task, mark)

    def promote(self, plan: Plan, slots: Numbers, rows: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy blocks that were loaded from the tier to their slots."""
        opened = self._open(slots, plan.outdated)
        for slot, row in zip(slots, rows, strict=True):
            self.part.slots[slot, : len(row) - HEADER_NBYTES] = row[HEADER_NBYTES:]
        self.part.close(slots, opened, np.stack([row[:HEADER_NBYTES] for row in rows]))

    def close(self) -> None:
        """Release the region."""
        for pinned in self._pinned:
            pinned.close()
        self.part.detach()

    def _store(self, plan: Plan, copier: Copier, chunks: Chunks, mark: object) -> int:
        """Copy chunks into their slots.

        A store that ends early leaves the slots without headers, and their blocks are refused.

        Raises:
            RefusedError: Another store has opened one of the slots.
        """
        # The job is not given up meanwhile: the slots stay its own.
        with self._jobs.committing(plan.job_id):
            wait_s = min(STALL_S, self._jobs.seconds_left(plan.job_id))
            opened = self._open(chunks.slots, plan.outdated, wait_s)
            if not self.part.close(chunks.slots, opened, copier.gather(chunks, mark)):
                raise RefusedError("reused")
        if self._below is not None and not self._write_back:
            nbytes = copier.chunk_nbytes
            for key, slot, opening in zip(chunks.keys, chunks.slots, opened, strict=True):
                copy = functools.partial(self._copy_to, int(slot), int(opening))
                self._below.put_from_slot(key, nbytes, copy)
        return chunks.num_blocks * copier.pages.block_nbytes

    def _load(self, plan: Plan, copier: Copier, chunks: Chunks, mark: object) -> int:
        with self._jobs.committing(plan.job_id):
            copier.load(chunks, mark)
        return chunks.num_blocks * copier.pages.block_nbytes

    def _copy_to(self, slot: int, opening: int, row: npt.NDArray[np.uint8]) -> bool:
        """Copy a block to a row of the tier's; return False if its slot has another one by now."""
        slots = np.array([slot])
        before = self.part.look(slots)
        # A block without a header was found to be damaged.
        if before.openings[0] != opening or not before.headers.any():
            return False
        row[HEADER_NBYTES:] = self.part.slots[slot, : len(row) - HEADER_NBYTES]
        row[:HEADER_NBYTES] = before.headers[0]
        # A slot is opened before it is refilled: so these are the bytes of one block.
        return bool(self.part.look(slots).openings[0] == opening)

    def _open(self, slots: Numbers, outdated: Collection[int], wait_s: float = 0.0) -> Numbers:
        """Open slots for writing; with ``write_back``, their blocks are put into the tier.

        Args:
            slots: The slots.
            outdated: Those whose blocks are of other weights: they are not put.
            wait_s: Longest wait for buffers, for all blocks together, in seconds.
        """
        if self._below is not None and self._write_back:
            wait = Deadline(wait_s)
            headers = self.part.look(slots).headers
            for slot, packed in zip(slots, headers, strict=True):
                header = BlockHeader.unpack(packed.tobytes())
                if not isinstance(header, BlockHeader) or slot in outdated:
                    continue
                # A rank that is restarted with another layout finds blocks of the former one.
                nbytes = self._nbytes_of.get(header.geometry)
                payload = None if nbytes is None else self.part.slots[slot, :nbytes]
                self._below.put_evicted(header.key, packed, payload, wait.remaining())
        return self.part.open(slots)
