"""The scheduler's side of a cache of slots: the block in each, and the order of eviction.

A slot's life::

    free -> storing -> kept <-> loading
             |          |
             +----------+-> free

Blocks that are being stored or loaded are pinned: their slots are given to no other block. Every
job belongs to the request that prepared it, so a completion that comes twice, late, or for another
request does not unpin what other requests hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wtransfer.errors import BlockNotKeptError, OffloadingOptionError
from wtransfer.specs.arena import ArenaLoadStoreSpec
from wtransfer.specs.interface import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from wtransfer.specs.policies import STORING, Block, EvictionOrder, policy_class

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from wtransfer.kv.keys import OffloadKey
    from wtransfer.specs.interface import ReqContext

_COUNTERS = (
    "loads_total",
    "stores_total",
    "stores_failed_total",
    "stores_refused_total",
    "evictions_total",
    "unknown_completions_total",
)


@dataclass(slots=True)
class _Jobs:
    """Jobs of one request that are under way."""

    loads: dict[OffloadKey, int] = field(default_factory=dict)
    stores: set[OffloadKey] = field(default_factory=set)


@dataclass(slots=True)
class _Sequence:
    """Blocks of one request in the order of their places in it, the head first."""

    keys: dict[OffloadKey, None] = field(default_factory=dict)
    num_ordered: int = 0
    ended: bool = False


class CPUOffloadingManager(OffloadingManager):
    """Keeps blocks in slots that are numbered from 0.

    Args:
        num_slots: Number of slots.
        policy: ``lru``, ``arc`` or ``module:Class``.
        enable_events: True if the host calls `take_events`.

    Raises:
        OffloadingOptionError: There is no such policy, or the number is negative.

    Cost:
        The cost of a call grows with the number of its keys, not with the number of blocks kept;
        only `reset_cache` looks at every block.
    """

    def __init__(self, num_slots: int, policy: str = "lru", enable_events: bool = False) -> None:
        if num_slots < 0:
            raise OffloadingOptionError(f"A cache of {num_slots} slots; expected 0 or more.")
        self.num_slots = num_slots
        """As given; 0 after `shutdown`."""
        self._policy_cls = policy_class(policy)
        self._events: list[OffloadingEvent] | None = [] if enable_events else None
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._jobs: dict[str, _Jobs] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._blocks: dict[OffloadKey, Block] = {}
        self._num_storing = 0
        # Slots from this number on were never used; of the others these are free, the last first.
        self._num_used = 0
        self._free: list[int] = []
        self._eviction = EvictionOrder(self._policy_cls, num_slots, self._blocks)

    # -- look-ups

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for the blocks that a request computes."""
        self._sequences[req_context.req_id] = _Sequence()
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:  # noqa: ARG002
        """Return the state of one block."""
        block = self._blocks.get(key)
        if block is None or block.forgotten:
            return LookupResult.MISS
        return LookupResult.HIT_PENDING if block.num_loads == STORING else LookupResult.HIT

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that blocks are in use; pinned or absent blocks are skipped."""
        self._extend(keys, req_context)
        self._eviction.touch(
            [key for key in dict.fromkeys(_tail_first(keys)) if self._is_idle(key)]
        )

    def __contains__(self, key: OffloadKey) -> bool:
        """Return whether a block has a slot, also one that is being stored or was forgotten."""
        return key in self._blocks

    # -- loads

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> ArenaLoadStoreSpec:
        """Pin blocks, and return their slots.

        Raises:
            BlockNotKeptError: A block is no hit; nothing is pinned then.
        """
        blocks = self._hits(keys)
        if not blocks:
            return ArenaLoadStoreSpec([], [])
        self._extend(keys, req_context)
        loads = self._jobs_of(req_context).loads
        # Before loads are counted: a block may be named twice.
        idle = {key: None for key, block in zip(keys, blocks, strict=True) if not block.num_loads}
        self._eviction.pin(list(idle))
        for key, block in zip(keys, blocks, strict=True):
            block.num_loads += 1
            loads[key] = loads.get(key, 0) + 1
        self._counters["loads_total"] += len(blocks)
        return ArenaLoadStoreSpec([block.slot for block in blocks], list(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin blocks; those that this request has not pinned are counted and skipped."""
        loads = self._jobs_of(req_context).loads
        ended = []
        for key in _tail_first(keys):
            count = loads.pop(key, 0)
            if not count:
                self._counters["unknown_completions_total"] += 1
                continue
            if count > 1:
                loads[key] = count - 1
            block = self._blocks[key]
            block.num_loads -= 1
            if not block.num_loads and not self._went(key, block):
                ended.append(key)
        self._eviction.release(ended)
        self._forget_jobs_if_done(req_context)
        self._order(req_context)

    def _hits(self, keys: Collection[OffloadKey]) -> list[Block]:
        blocks = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.forgotten or block.num_loads == STORING:
                raise _not_kept(key, storing=block is not None and not block.forgotten)
            blocks.append(block)
        return blocks

    # -- stores

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Make room for those of these blocks that are not kept, all of them or none."""
        self._extend(keys, req_context)
        blocks = self._blocks
        new = [key for key in dict.fromkeys(keys) if key not in blocks]
        if not new:
            return PrepareStoreOutput([], ArenaLoadStoreSpec([], []), [])
        evicted = self._make_room(new, keys)
        if evicted is None:
            self._counters["stores_refused_total"] += len(new)
            return None
        slots = self._take_slots(len(new))
        cohort = self._eviction.insert(new)
        for key, slot in zip(new, slots, strict=True):
            blocks[key] = Block(slot, cohort)
        self._jobs_of(req_context).stores.update(new)
        self._num_storing += len(new)
        self._counters["stores_total"] += len(new)
        return PrepareStoreOutput(new, ArenaLoadStoreSpec(slots, new), evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make stored blocks hits, or forget them; those that are not being stored are skipped."""
        stores = self._jobs_of(req_context).stores
        ended = [key for key in dict.fromkeys(keys) if key in stores]
        self._counters["unknown_completions_total"] += len(keys) - len(ended)
        stores.difference_update(ended)
        self._num_storing -= len(ended)
        if success:
            self._keep(ended)
        else:
            self._discard(ended)
        self._forget_jobs_if_done(req_context)
        self._order(req_context)

    def _keep(self, keys: Sequence[OffloadKey]) -> None:
        kept = [key for key in keys if not self._went(key, self._blocks[key])]
        for key in kept:
            self._blocks[key].num_loads = 0
        self._eviction.release(kept[::-1])
        self._note(kept, removed=False)

    def _discard(self, keys: Sequence[OffloadKey]) -> None:
        self._counters["stores_failed_total"] += len(keys)
        failed = [key for key in keys if not self._went(key, self._blocks[key])]
        self._eviction.remove(failed)
        for key in failed:
            self._free_slot(key)

    def _make_room(
        self, new: Sequence[OffloadKey], keys: Collection[OffloadKey]
    ) -> list[OffloadKey] | None:
        count = len(new) - len(self._free) - self.num_slots + self._num_used
        if count <= 0:
            return []
        # The caller's blocks besides the new ones shall be kept, too.
        others = {key for key in keys if self._is_idle(key)} if len(new) < len(keys) else set()
        evicted = self._eviction.evict(count, others, new)
        if evicted:
            for key in evicted:
                self._free_slot(key)
            self._counters["evictions_total"] += count
            self._note(evicted, removed=True)
        return evicted

    # -- the order of a request's blocks

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Order the request's blocks, of all its stores: the tail is evicted before the head."""
        sequence = self._sequences.get(req_context.req_id)
        if sequence is not None:
            sequence.ended = True
            self._order(req_context)

    def _extend(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        sequence = self._sequences.get(req_context.req_id)
        if sequence is not None:
            sequence.keys.update(dict.fromkeys(keys))

    def _order(self, req_context: ReqContext) -> None:
        """Order a request's blocks when it has ended, and whenever there are twice as many.

        Not at every store: each ordering costs time for all blocks of the request.
        """
        sequence = self._sequences.get(req_context.req_id)
        if sequence is None:
            return
        is_done = sequence.ended and req_context.req_id not in self._jobs
        if is_done or len(sequence.keys) >= 2 * sequence.num_ordered:
            sequence.num_ordered = len(sequence.keys)
            self._eviction.reorder([key for key in reversed(sequence.keys) if self._is_idle(key)])
        if is_done:
            del self._sequences[req_context.req_id]

    # -- all at once

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """Forget blocks; the slot of one that is pinned is free after its completion."""
        known = [k for k in keys if k in self._blocks and not self._blocks[k].forgotten]
        idle = [key for key in known if self._is_idle(key)]
        self._eviction.pin(idle)
        self._eviction.remove(known)
        for key in known:
            self._blocks[key].forgotten = True
        for key in idle:
            self._free_slot(key)
        self._note(known, removed=True)

    def weights_changed(self) -> None:
        """Evict present blocks first from now on. Cost: the same for any number of blocks."""
        self._eviction.begin_cohort()

    def reset_cache(self) -> None:
        """Forget every block; those that are pinned keep their slots until their completion."""
        before = dict(self._blocks)
        self._blocks.clear()
        self._free = [block.slot for block in before.values() if block.num_loads == 0] + self._free
        self._blocks.update((k, b) for k, b in before.items() if b.num_loads != 0)
        known = [k for k, b in before.items() if b.num_loads != STORING and not b.forgotten]
        for block in self._blocks.values():
            block.forgotten = True
        self._eviction = EvictionOrder(self._policy_cls, self.num_slots, self._blocks)
        self._note(known, removed=True)

    def shutdown(self) -> None:
        """Forget every block, and accept no more."""
        self.num_slots = self._num_used = self._num_storing = 0
        self._jobs.clear()
        self._sequences.clear()
        self._blocks.clear()
        self._free = []
        self._eviction = EvictionOrder(self._policy_cls, 0, self._blocks)

    # -- events and statistics

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call; nothing unless events were asked for."""
        events, self._events = self._events, [] if self._events is not None else None
        return events or ()

    def get_stats(self) -> Mapping[str, float]:
        """Return counters, whose names end in ``_total``, and how the slots are used."""
        num_loading = len(self._blocks) - self._num_storing - self._eviction.num_idle
        return {
            "slots": self.num_slots,
            "slots_free": self.num_slots - len(self._blocks),
            "blocks_storing": self._num_storing,
            "blocks_loading": num_loading,
            "blocks_idle": self._eviction.num_idle,
            **self._counters,
        }

    def _note(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys, Medium.CPU, removed))

    # -- slots and jobs

    def _is_idle(self, key: OffloadKey) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.num_loads == 0

    def _take_slots(self, count: int) -> list[int]:
        num_freed = min(count, len(self._free))
        first = len(self._free) - num_freed
        slots = self._free[first:]
        del self._free[first:]
        begin, self._num_used = self._num_used, self._num_used + count - num_freed
        return [*slots, *range(begin, self._num_used)]

    def _free_slot(self, key: OffloadKey) -> None:
        self._free.append(self._blocks.pop(key).slot)

    def _went(self, key: OffloadKey, block: Block) -> bool:
        """Free the slot of a block forgotten while a job held it; return whether it was."""
        if block.forgotten:
            self._free_slot(key)
        return block.forgotten

    def _jobs_of(self, req_context: ReqContext) -> _Jobs:
        jobs = self._jobs.get(req_context.req_id)
        if jobs is None:
            jobs = self._jobs[req_context.req_id] = _Jobs()
        return jobs

    def _forget_jobs_if_done(self, req_context: ReqContext) -> None:
        jobs = self._jobs[req_context.req_id]
        if not jobs.loads and not jobs.stores:
            del self._jobs[req_context.req_id]


def _not_kept(key: OffloadKey, *, storing: bool) -> BlockNotKeptError:
    return BlockNotKeptError(
        f"The block {key.hex()} {'is still being stored' if storing else 'is not kept'}; "
        "load what lookup() says is a hit, in the same step."
    )


def _tail_first(keys: Collection[OffloadKey]) -> Iterable[OffloadKey]:
    """Return keys from the last to the first: the head is used last, and so evicted last."""
    return reversed(keys if isinstance(keys, (list, tuple)) else list(keys))
