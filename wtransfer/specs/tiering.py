"""Spec ``TieringOffloadingSpec``: KV cache in a tier, and in an arena of host memory over it.

``tier``, or ``spec_name``, names the tier; ``cpu_bytes_to_use`` makes the arena. Without one,
blocks are copied between cache and tier (`wtransfer.specs.tier`). With one:

1. S looks a block up in the arena, then in the tier (`wtransfer.specs.tier.TierManager`).
2. A load takes what the arena has. Any other block is *promoted*: the load gets it from the tier,
   verifies it and writes it to the cache, and to a slot. Other requests that want it wait for that.
3. A store goes to the arena. From there a block is put into the tier soon afterwards, or with
   ``write_back`` when it is evicted. A tier that is too slow for that misses blocks: those that are
   evicted before they were put, and with ``write_back`` those for which no buffer comes free within
   `STALL_S`. What the arena has no room for goes to the tier alone.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from wtransfer.deadline import Deadline
from wtransfer.errors import EvictionPolicyError, OffloadingOptionError
from wtransfer.kv.cache_view import geometries_of, pages_of
from wtransfer.kv.copier import RefusedError
from wtransfer.kv.header import HEADER_NBYTES, BlockHeader
from wtransfer.specs.cpu import arena_layout, pin_region
from wtransfer.specs.interface import LookupResult, OffloadingSpec, PrepareStoreOutput
from wtransfer.specs.manager import CPUOffloadingManager
from wtransfer.specs.shared_region import SharedRegion
from wtransfer.specs.tier import (
    STALL_S,
    Load,
    Put,
    TierLoadStoreSpec,
    TierManager,
    TierOptions,
    TierWorker,
    close_tier,
    open_tier,
    rank_key,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from wtransfer.config import OffloadingConfig
    from wtransfer.kv.cache_view import GroupPages
    from wtransfer.kv.canonical import CanonicalKVCaches
    from wtransfer.kv.copier import Chunks, Copier, Reason
    from wtransfer.kv.header import BlockGeometry
    from wtransfer.kv.keys import OffloadKey
    from wtransfer.kv.slots import Headers, Numbers
    from wtransfer.specs.interface import (
        OffloadingEvent,
        ReqContext,
        RequestOffloadingContext,
        Tier,
    )
    from wtransfer.specs.jobs import Kind, Pool
    from wtransfer.specs.shared_region import ArenaLayout, ArenaLoadStoreSpec


logger = logging.getLogger(__name__)


@functools.cache
def tier_spec(tier_cls: type[Tier]) -> type[TieringOffloadingSpec]:
    """Return the offloading spec that keeps blocks in a tier of this class."""
    attributes = {"tier_cls": tier_cls, "example_options": tier_cls.example_options}
    bases = (TieringOffloadingSpec,)
    return type(tier_cls.__name__, bases, {**attributes, "__module__": tier_cls.__module__})


class TieringOffloadingSpec(OffloadingSpec):
    """Keeps blocks in a tier; `tier_spec` makes the subclass for each.

    Args:
        config: Options in ``extra_config``: `TierOptions`, and the tier's.

    Raises:
        OffloadingOptionError: An option of `TierOptions` cannot be used, or no tier is named.
    """

    tier_cls: ClassVar[type[Tier]]
    """The tier."""
    example_options: ClassVar[Mapping[str, Any]] = {
        "tier": "file",
        "shared_storage_path": "/mnt/kv",
        "cpu_bytes_to_use": 8 << 30,
    }
    options_cls = (TierOptions,)  # and the tier's

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if not hasattr(self, "tier_cls"):
            raise OffloadingOptionError(
                "TieringOffloadingSpec needs the option tier, the name of a tier: 'file', or one "
                "that a package brings"
            )
        self.options, self.tier_options = TierOptions.of(config.extra_config)
        self.layout: ArenaLayout | None = None
        """Layout of the arena; None: the tier alone."""
        if self.options.cpu_bytes_to_use:
            self.layout = arena_layout(config, self.options.cpu_bytes_to_use)
        self._manager: TierManager | None = None
        self._worker: TierWorker | None = None

    def get_manager(self) -> TierManager:
        """Open the tier for the scheduler's side.

        Raises:
            OffloadingOptionError: There is no such eviction policy.
        """
        if self._manager is None:
            config, options = self.config, self.options
            if self.layout is None:
                tier = open_tier(self.tier_cls, self.tier_options)
                self._manager = TierManager(tier, config, options)
            else:
                arena = CPUOffloadingManager(
                    self.layout.num_slots,
                    options.eviction_policy,
                    enable_events=config.enable_kv_cache_events,
                )
                tier = open_tier(self.tier_cls, self.tier_options)
                self._manager = TieringManager(tier, config, options, arena)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> TierWorker:
        """Open the tier for one rank, and attach its region of the arena.

        Raises:
            OffloadingOptionError: The cache is not what the config says of it, or there is not
                enough memory for ``buffer_bytes``.
            WTransferError: The arena cannot be attached: see `SharedRegion.attach`.
        """
        if self._worker is None:
            config, options, groups = self.config, self.options, pages_of(kv_caches)
            most = max(pages.block_nbytes for pages in groups) * config.cache.blocks_per_chunk
            if self.layout is not None:
                most = self.layout.part_nbytes
            copies = list(zip(groups, geometries_of(config, kv_caches, most), strict=True))
            tier = open_tier(self.tier_cls, self.tier_options)
            try:
                self._worker = (
                    TierWorker(tier, copies, config, options)
                    if self.layout is None
                    else TieringWorker(tier, copies, config, options, self.layout)
                )
            except BaseException:
                close_tier(tier)
                raise
        return self._worker


# -- the scheduler's side ---------------------------------------------------------------------


class TieringManager(TierManager):
    """Decides which blocks are in the arena, and asks the tier for the others.

    Args:
        tier: The tier; this side's own.
        config: As `TierManager`.
        options: As `TierManager`.
        arena: Manager of the slots.
    """

    def __init__(
        self,
        tier: Tier,
        config: OffloadingConfig,
        options: TierOptions,
        arena: CPUOffloadingManager,
    ) -> None:
        super().__init__(tier, config, options)
        self._arena = arena
        self.num_slots = arena.num_slots
        self._promoting: set[OffloadKey] = set()
        # Number of changes of the weights, and by slot that number when a block was given the slot.
        self._num_changes, self._changes_at = 0, dict[int, int]()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for the blocks that a request computes."""
        self._arena.on_new_request(req_context)
        return super().on_new_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look up a block in the arena, then in the tier; *RETRY* while it is promoted."""
        if key in self._promoting:
            return LookupResult.RETRY
        found = self._arena.lookup(key, req_context)
        return super().lookup(key, req_context) if found is LookupResult.MISS else found

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that blocks are in use."""
        self._arena.touch(keys, req_context)

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TierLoadStoreSpec:
        """Pin blocks of the arena, and make room for those of the tier.

        Raises:
            BlockNotKeptError: A block was no hit; nothing is pinned then.
        """
        arena, load = self._arena, Load([])
        for key in keys:
            is_hit = arena.lookup(key, req_context) is LookupResult.HIT
            (load.pinned if is_hit else load.got).append(key)
        self._begin_load(keys, req_context, load)
        # Pinned before room is made, which could evict them.
        pinned = arena.prepare_load(load.pinned, req_context)
        slots = dict(zip(load.pinned, pinned.slots, strict=True))
        try:
            room = arena.prepare_store(load.got, req_context)
        except EvictionPolicyError:
            logger.exception("nothing is promoted")
            room = None
        promoted = {} if room is None else _slots_of(room)
        load.promoted = list(promoted)
        self._promoting.update(promoted)
        slots |= promoted
        nowhere = range(self.num_slots, self.num_slots + len(keys))
        places = [slots.get(key, number) for key, number in zip(keys, nowhere, strict=True)]
        outdated = self._take(promoted.values())
        return TierLoadStoreSpec(keys, (), places, promoted.values(), outdated)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin blocks, and make promoted blocks hits."""
        load = self._end_load(keys, req_context)
        if load is None:
            return
        self._arena.complete_load(load.pinned, req_context)
        self._arena.complete_store(load.promoted, req_context, load.success)
        self._promoting.difference_update(load.promoted)

    def _forget(self, keys: Collection[OffloadKey]) -> None:
        self._arena.forget(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Make room in the arena; where there is none, blocks go to the tier alone."""
        wanted = [key for key in self._count_offers(keys) if key not in self._storing]
        room = self._arena.prepare_store(wanted, req_context)
        if room is None:
            return self._store_in_tier([key for key in wanted if key not in self._arena])
        slots = _slots_of(room)
        outdated = self._take(slots.values())
        spec = TierLoadStoreSpec(slots, self._suspect(slots), list(slots.values()), (), outdated)
        return PrepareStoreOutput(list(slots), spec, room.evicted_keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make stored blocks hits, or forget them."""
        in_arena = [key for key in keys if key not in self._storing]
        self._arena.complete_store(in_arena, req_context, success)
        super().complete_store(keys, req_context, success)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Order the request's blocks: its tail is evicted before its head."""
        self._arena.on_request_finished(req_context)

    def weights_changed(self) -> None:
        """Evict present blocks first from now on, without putting them into the tier."""
        self._num_changes += 1
        self._arena.weights_changed()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events in the arena since the last call."""
        return self._arena.take_events()

    def _take(self, slots: Iterable[int]) -> list[int]:
        """Note that slots have new blocks; return those whose former block is of other weights."""
        now, at = self._num_changes, self._changes_at
        outdated = [slot for slot in slots if at.get(slot, now) != now]
        at.update(dict.fromkeys(slots, now))
        return outdated

    def reset_cache(self) -> bool:
        """Empty the arena; return False, as other instances share the tier."""
        self._arena.reset_cache()
        return super().reset_cache()

    def get_stats(self) -> Mapping[str, float]:
        """Return the numbers of the arena and of the tier."""
        return {**self._arena.get_stats(), **super().get_stats()}

    def shutdown(self) -> None:
        """Empty the arena, and close the tier. A second call does nothing."""
        self._arena.shutdown()
        super().shutdown()


def _slots_of(room: PrepareStoreOutput) -> dict[OffloadKey, int]:
    slots = cast("ArenaLoadStoreSpec", room.store_spec).slots
    return dict(zip(room.keys_to_store, slots, strict=True))


# -- the worker's side ------------------------------------------------------------------------


class TieringWorker(TierWorker):
    """Copies between one rank's cache, its region of the arena, and the tier.

    Args:
        tier: The tier; this worker's own.
        groups: As `TierWorker`.
        config: As `TierWorker`.
        options: As `TierWorker`.
        layout: Layout of the arena.
    """

    def __init__(
        self,
        tier: Tier,
        groups: Sequence[tuple[GroupPages, BlockGeometry]],
        config: OffloadingConfig,
        options: TierOptions,
        layout: ArenaLayout,
    ) -> None:
        region = SharedRegion.attach(config.engine_id, config.parallel.rank, layout)
        try:
            super().__init__(tier, groups, config, options, layout.num_slots)
        except BaseException:
            region.detach()
            raise
        self.part = region
        """This rank's region of the arena; has no slots after `shutdown`."""
        self._in_arena = [dataclasses.replace(each, part=region) for each in self._copiers]
        self._pinned = pin_region(region, self._in_arena)
        self._writes_back = options.write_back
        # By slot: True if its last load fills it from the tier; True if the block that was in it
        # before its last job is of other weights.
        self._fetched = np.zeros(layout.num_slots, np.bool_)
        self._outdated = np.zeros(layout.num_slots, np.bool_)

    def shutdown(self) -> None:
        """End as `TierWorker.shutdown` does, and release the arena; where a call hangs, later."""
        if os.getpid() == self._pid:
            # The copiers hold views of the cache.
            self._in_arena = []
        super().shutdown()

    def _leave_arena(self) -> None:
        for pinned in self._pinned:
            pinned.close()
        self.part.detach()

    def _refusal(self, kind: Kind, kept: Any, slots: Numbers) -> Reason | None:
        own = slots[slots < self._jobs.num_slots]
        self._fetched[own] = np.isin(own, getattr(kept, "fetched", ())) if kind == "load" else False
        self._outdated[own] = np.isin(own, getattr(kept, "outdated", ()))
        return super()._refusal(kind, kept, slots)

    def _is_in_arena(self, slots: Numbers) -> npt.NDArray[np.bool_]:
        """Return a mask: the slots that have the block, or get it from the cache."""
        has_slot = slots < self._jobs.num_slots
        return has_slot & ~self._fetched[np.where(has_slot, slots, 0)]

    def _needs_tier(self, slots: Numbers) -> bool:
        return not self._is_in_arena(slots).all()

    def _tasks(self, copier: Copier, chunks: Chunks) -> Iterable[Chunks]:
        in_arena = self._is_in_arena(chunks.slots)
        yield from copier.tasks(chunks.where(in_arena), self._num_threads)
        yield from super()._tasks(copier, chunks.where(~in_arena))

    def _pool(self, kind: Kind, chunks: Chunks) -> Pool:
        is_fetch = kind == "load" and self._needs_tier(chunks.slots)
        return "fetch" if is_fetch else kind

    def _store(self, job_id: int, copier: Copier, chunks: Chunks, mark: object) -> int:
        if self._needs_tier(chunks.slots):
            return super()._store(job_id, copier, chunks, mark)
        copier = self._in_arena[chunks.group]
        # The job is not given up meanwhile: the slots stay its own.
        with self._jobs.committing(job_id):
            opened = self._open_slots(chunks, min(STALL_S, self._jobs.seconds_left(job_id)))
            headers = copier.gather(chunks, mark)
            if not self.part.close(chunks.slots, opened, headers):
                raise RefusedError("reused")
        if not self._writes_back:
            nbytes = HEADER_NBYTES + copier.chunk_nbytes
            for key, slot, opening in zip(chunks.keys, chunks.slots, opened, strict=True):
                own = rank_key(key, self._rank)
                self._put_later(Put(own, nbytes, slot=int(slot), opening=int(opening)))
        return chunks.num_blocks * copier.pages.block_nbytes

    def _load(self, job_id: int, copier: Copier, chunks: Chunks, mark: object) -> int:
        if self._needs_tier(chunks.slots):
            return super()._load(job_id, copier, chunks, mark)
        with self._jobs.committing(job_id):
            self._in_arena[chunks.group].load(chunks, mark)
        return chunks.num_blocks * copier.pages.block_nbytes

    def _promote(self, chunks: Chunks, first: int) -> None:
        rows = np.arange(first, first + len(chunks))
        has_slot = chunks.slots < self._jobs.num_slots
        chunks, rows = chunks.where(has_slot), rows[has_slot]
        opened = self._open_slots(chunks)
        nbytes = self._copiers[chunks.group].chunk_nbytes
        for slot, row in zip(chunks.slots, rows, strict=True):
            self.part.slots[slot, :nbytes] = self._buffers.slots[row, :nbytes]
        self.part.close(chunks.slots, opened, self._buffers.headers[rows])

    def _copy_from_slot(self, put: Put, buffer: int) -> bool:
        assert put.slot is not None
        slots = np.array([put.slot])
        before = self.part.look(slots)
        # A block without a header was found to be damaged.
        if before.openings[0] != put.opening or not before.headers.any():
            return False
        nbytes = put.nbytes - HEADER_NBYTES
        self._buffers.slots[buffer, :nbytes] = self.part.slots[put.slot, :nbytes]
        self._buffers.headers[buffer] = before.headers[0]
        # A slot is opened before it is refilled: so these are the bytes of one block.
        return bool(self.part.look(slots).openings[0] == put.opening)

    def _open_slots(self, chunks: Chunks, wait_s: float = 0.0) -> Numbers:
        """Open slots for writing; with ``write_back``, their blocks are put into the tier.

        Args:
            chunks: Chunks that take their places.
            wait_s: Longest wait for buffers, for all of them together, in seconds.
        """
        if self._writes_back:
            wait = Deadline(wait_s)
            headers = self.part.look(chunks.slots).headers
            for slot, packed in zip(chunks.slots, headers, strict=True):
                header = BlockHeader.unpack(packed.tobytes())
                if isinstance(header, BlockHeader) and not self._outdated[slot]:
                    self._put_evicted(slot, packed, header, wait.remaining())
        return self.part.open(chunks.slots)

    def _put_evicted(self, slot: int, packed: Headers, header: BlockHeader, wait_s: float) -> None:
        fitting = (each for each in self._copiers if each.form.geometry == header.geometry)
        copier = next(fitting, None)
        try:
            if copier is None:
                raise RefusedError("geometry")
            buffer = self._take_buffer(wait_s)
        except RefusedError:
            self._counts.add("puts_dropped")
            return
        nbytes = copier.chunk_nbytes
        self._buffers.headers[buffer] = packed
        self._buffers.slots[buffer, :nbytes] = self.part.slots[slot, :nbytes]
        self._put_later(Put(rank_key(header.key, self._rank), HEADER_NBYTES + nbytes, buffer))
