"""The scheduler's side of a spec over a tier: an arena's manager and look-ups in the tier.

The flow of a block is that of `wtransfer.specs.tier_spec`. This module decides when the tier
counts:

1.  It is asked on a thread of its own: `lookup` answers *ask again* until it has answered, and
    *miss* where it takes longer than `LOOKUP_S`. A hit of the tier needs the part of every rank.
2.  A key whose load has failed is a miss until it is stored anew, or for `FAILED_S`.
3.  Loads that take longer than computing their blocks are skipped (`wtransfer.specs.payoff`).
4.  Events tell a block as in the tier once it was put there or found, and as removed once a look-up
    or a load finds it gone: others may remove it at any time. So nothing is told of a block that
    nothing was heard of since the start. A block that is a miss as the tier is late, paused or slow
    is told as removed, too: a router sends no request here for it. Found again, it is told again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar, cast

from wtransfer.deadline import Deadline
from wtransfer.errors import BlockNotKeptError, EvictionPolicyError
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from wtransfer.specs.jobs import SHUTDOWN_S, CopyThreads
from wtransfer.specs.payoff import Payoff
from wtransfer.specs.tier import Counts, Health, TierLoadStoreSpec, close_tier, rank_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from wtransfer.config import OffloadingConfig
    from wtransfer.kv.keys import OffloadKey
    from wtransfer.specs.arena import ArenaLoadStoreSpec
    from wtransfer.specs.interface import ReqContext, ScheduleEndContext, Tier
    from wtransfer.specs.tier import TierOptions

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOKUP_S = 1.0
"""Longest wait of a request for an answer of the tier, in seconds."""
FRESH_S = 0.5
"""Time after which a request that has used an answer asks the tier again, in seconds."""
FAILED_S = 30.0
"""Time for which a key whose load has failed is a miss, unless it is stored anew, in seconds."""
MAX_OFFERED = 1 << 16
"""Most keys whose offers are counted; the oldest are forgotten."""
MAX_TOLD = 1 << 16
"""Most blocks of a tier that events tell at a time; the oldest are told as removed."""


def _of(req_context: ReqContext, cls: type[T]) -> T:
    """Return the object of this class that a request has, a new one if it has none.

    It is the context's, and not its id's: a request that was aborted may come again under its id
    while a load of the former one runs.
    """
    known = req_context.get_state(cls)
    if known is None:
        req_context.set_state(known := cls())
    return known


# -- look-ups in the tier


@dataclasses.dataclass
class _Answer:
    """The tier's answer for one key."""

    asked: float
    """Time at which the tier was asked."""
    hit: bool | None = None
    """None: no answer yet."""
    read: float | None = None
    """Time of the answer's first use: it ages from then on, as steps may be long."""


class _Answers(dict["OffloadKey", _Answer]):
    """The tier's answers for one request, by key."""


class TierLookups:
    """Looks blocks up in a tier, on a thread; nothing here waits for the tier.

    Args:
        tier: The tier; this side's own.
        config: Ranks, whose parts make a block, and tokens of a block.
        skip_slow_loads: True if blocks are misses that the tier delivers more slowly than the
            model.
    """

    def __init__(self, tier: Tier, config: OffloadingConfig, *, skip_slow_loads: bool) -> None:
        self._tier = tier
        self._ranks = range(config.parallel.world_size)
        self._skip_slow_loads = skip_slow_loads
        self.payoff = Payoff(config.groups[0].tokens_per_block * config.cache.blocks_per_chunk)
        """Times of the tier's loads, and of computing."""
        self._health = Health()
        self._thread = CopyThreads("wtransfer-tier-lookup", 1)
        self._lock = threading.Lock()
        self._asked: list[tuple[OffloadKey, _Answer]] = []
        self._busy_since: float | None = None
        # No plain dicts where the first entry is taken: see `wtransfer.specs.policies`.
        self._failed: OrderedDict[OffloadKey, float] = OrderedDict()
        """Times until which keys are misses, the earliest first."""
        self._counts = Counts()
        self._told: OrderedDict[OffloadKey, None] = OrderedDict()
        self._events: list[OffloadingEvent] | None = [] if config.enable_kv_cache_events else None
        self._pid, self._closed = os.getpid(), False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return the tier's answer, *RETRY* until then; a late answer is a miss."""
        answers, now = _of(req_context, _Answers), time.monotonic()
        known, busy_since = answers.get(key), self._busy_since
        # A tier that hangs is not asked: the answer would wait behind.
        is_late = busy_since is not None and now - busy_since > LOOKUP_S
        if known is not None and known.hit is None:
            is_late = is_late or now - known.asked > LOOKUP_S
        if is_late or self._health.is_paused:
            self._counts.add("lookups_late" if is_late else "lookups_paused")
            self._tell([key], removed=True)
            return LookupResult.MISS
        if known is None or (known.read is not None and now - known.read > FRESH_S):
            answers[key] = self._ask(key, now)
            return LookupResult.RETRY
        if known.hit is None:
            return LookupResult.RETRY
        known.read = known.read or now
        if not known.hit or self._failed.get(key, 0.0) > now:
            self._tell([key], removed=True)
            return LookupResult.MISS
        if self._skip_slow_loads and self.payoff.skip():
            self._counts.add("loads_skipped")
            self._tell([key], removed=True)
            return LookupResult.MISS
        self._tell([key], removed=False)
        return LookupResult.HIT

    def was_found(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether the tier's last answer to a request was that it has the block."""
        answer = _of(req_context, _Answers).get(key)
        return answer is not None and bool(answer.hit)

    def is_suspect(self, key: OffloadKey) -> bool:
        """Return whether a load of the block has failed since it was stored."""
        return key in self._failed

    def stored(
        self, keys: Collection[OffloadKey], req_context: ReqContext, *, success: bool
    ) -> None:
        """Let the tier be asked again about keys whose store has ended."""
        answers = _of(req_context, _Answers)
        for key in keys:
            answers.pop(key, None)
            if success:
                self._failed.pop(key, None)

    def put(self, keys: Iterable[OffloadKey]) -> None:
        """Note that the tier has these blocks from now on."""
        self._tell(keys, removed=False)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call; nothing unless the host takes events."""
        events, self._events = self._events, None if self._events is None else []
        return events or []

    def _tell(self, keys: Iterable[OffloadKey], *, removed: bool) -> None:
        if self._events is None:
            return
        told = self._told
        changed = [key for key in keys if (key in told) == removed]
        for key in changed:
            if removed:
                del told[key]
            else:
                told[key] = None
        if changed:
            self._events.append(OffloadingEvent(changed, Medium.STORAGE, removed))
        while len(told) > MAX_TOLD:
            self._tell([next(iter(told))], removed=True)

    def suspect(self, keys: Collection[OffloadKey]) -> None:
        """Let keys be misses for a while: another load may fail like this one."""
        failed, now = self._failed, time.monotonic()
        for key in keys:
            failed[key] = now + FAILED_S
            failed.move_to_end(key)
        while failed and failed[next(iter(failed))] <= now:
            failed.popitem(last=False)
        self._tell(keys, removed=True)

    def get_stats(self) -> Mapping[str, float]:
        """Return how many keys were looked up and found, and how many look-ups failed."""
        return {**self._tier.get_stats(), **self._counts.numbers(), **self.payoff.numbers()}

    def shutdown(self) -> None:
        """Close the tier, unless a look-up hangs in it.

        Nothing happens at a second call, nor in a forked child: the tier is its parent's.
        """
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._thread.stop()
            if self._thread.join(Deadline(SHUTDOWN_S)):
                close_tier(self._tier)

    def _ask(self, key: OffloadKey, now: float) -> _Answer:
        answer = _Answer(now)
        with self._lock:
            self._asked.append((key, answer))
            is_first = len(self._asked) == 1
        # One call for all keys that are asked until the thread comes to it.
        if is_first:
            self._thread.submit(self._answer)
        return answer

    def _answer(self) -> None:
        self._busy_since = time.monotonic()
        with self._lock:
            asked, self._asked = self._asked, []
        keys = [rank_key(key, rank) for key, _ in asked for rank in self._ranks]
        found = [False] * len(keys)
        try:
            if not self._closed:
                found = [bool(each) for each in self._tier.contains(keys)]
            if len(found) != len(keys):
                raise ValueError(f"contains() of {len(keys)} keys returned {len(found)} answers")
            self._health.ended(success=True)
        except BaseException as error:
            self._counts.fail("lookup_failures", type(error).__name__, error)
            self._health.ended(success=False)
            found = [False] * len(keys)
        step = len(self._ranks)
        for number, (_, answer) in enumerate(asked):
            answer.hit = all(found[number * step : (number + 1) * step])
        self._busy_since = None
        self._counts.add("lookups", len(asked))
        self._counts.add("lookup_hits", sum(bool(answer.hit) for _, answer in asked))


# -- the manager


@dataclasses.dataclass
class _Load:
    """Sources of the blocks of a load."""

    pinned: list[OffloadKey]
    """Blocks from the arena."""
    got: list[OffloadKey]
    """Blocks from the tier."""
    promoted: list[OffloadKey] = dataclasses.field(default_factory=list)
    """Blocks from the tier that are copied to the arena as well."""
    success: bool = True
    """False: it has failed on a rank."""
    began: float = dataclasses.field(default_factory=time.monotonic)
    """Time at which it was prepared."""


class _Loads(dict[tuple["OffloadKey", ...], _Load]):
    """Loads of one request that are under way, by their keys."""


class TierManager(OffloadingManager):
    """Decides which blocks are in the arena, and asks the tier for the others.

    Made by `TieringOffloadingSpec.get_manager`.

    Args:
        tier: The tier; this side's own.
        config: Ranks, whose parts make a block, and tokens of a block.
        options: Rules when to store, and when to load.
        arena: Manager of the slots of the arena over the tier; None: there is none.
    """

    def __init__(
        self,
        tier: Tier,
        config: OffloadingConfig,
        options: TierOptions,
        arena: CPUOffloadingManager | None = None,
    ) -> None:
        self._tier = TierLookups(tier, config, skip_slow_loads=options.skip_slow_loads)
        # In the place of none an arena without slots: it has no block, and room for none.
        self._arena = CPUOffloadingManager(0) if arena is None else arena
        self._has_arena = arena is not None
        self._store_threshold = options.store_threshold
        self._num_offers: OrderedDict[OffloadKey, int] = OrderedDict()
        # Blocks on their way to the tier alone, and blocks on their way from it to the arena.
        self._storing: set[OffloadKey] = set()
        self._promoting: set[OffloadKey] = set()
        # Number of changes of the weights, and by slot that number when a block was given the slot.
        self._num_changes, self._changes_at = 0, dict[int, int]()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for the blocks that a request computes."""
        return self._arena.on_new_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look up a block in the arena, then in the tier; *RETRY* while it is promoted."""
        if key in self._promoting:
            return LookupResult.RETRY
        found = self._arena.lookup(key, req_context)
        return self._tier.lookup(key, req_context) if found is LookupResult.MISS else found

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that blocks are in use."""
        self._arena.touch(keys, req_context)

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TierLoadStoreSpec:
        """Pin blocks of the arena, and make room for those of the tier.

        In the tier nothing is pinned: a block that it loses fails its load.

        Raises:
            BlockNotKeptError: A block was no hit; nothing is pinned then.
        """
        arena, load = self._arena, _Load([], [])
        for key in keys:
            is_hit = arena.lookup(key, req_context) is LookupResult.HIT
            (load.pinned if is_hit else load.got).append(key)
        for key in load.got:
            if not self._tier.was_found(key, req_context):
                raise BlockNotKeptError(f"The block {key.hex()} is no hit; look it up first.")
        # Pinned before room is made, which could evict them.
        pinned = arena.prepare_load(load.pinned, req_context)
        try:
            room = arena.prepare_store(load.got, req_context)
        except EvictionPolicyError:
            logger.exception("nothing is promoted")
            room = None
        promoted = {} if room is None else _slots_of(room)
        load.promoted = list(promoted)
        self._promoting.update(promoted)
        _of(req_context, _Loads)[tuple(keys)] = load
        return TierLoadStoreSpec(
            list(keys),
            in_arena=_by_place(keys, dict(zip(load.pinned, pinned.slots, strict=True))),
            promoted=_by_place(keys, promoted),
            outdated=self._take(promoted.values()),
        )

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin blocks, make promoted blocks hits, and record the duration of the load."""
        load = _of(req_context, _Loads).pop(tuple(keys), None)
        if load is None:
            return  # it had ended before, or never begun
        if load.got:
            self._tier.payoff.end(len(load.got) if load.success else 0, load.began)
        self._arena.complete_load(load.pinned, req_context)
        self._arena.complete_store(load.promoted, req_context, load.success)
        self._promoting.difference_update(load.promoted)

    def load_failed(
        self, keys: Collection[OffloadKey], req_context: ReqContext, suspect: bool
    ) -> bool:
        """Let suspect keys be misses for a while."""
        if (load := _of(req_context, _Loads).get(tuple(keys))) is not None:
            load.success = False
            # Blocks from the arena are whole, as far as is known: a load of those alone would tell.
            keys = load.got or keys
        if suspect:
            self._arena.forget(keys)
            self._tier.suspect(keys)
        return True

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Make room in the arena; where there is none, blocks go to the tier alone.

        To the tier goes none that this request has found there.
        """
        arena, tier = self._arena, self._tier
        wanted = [key for key in self._count_offers(keys) if key not in self._storing]
        room = arena.prepare_store(wanted, req_context)
        if room is None:
            slots: dict[OffloadKey, int] = {}
            taken = [
                key
                for key in wanted
                if key not in arena
                and (tier.is_suspect(key) or not tier.was_found(key, req_context))
            ]
            self._storing.update(taken)
        else:
            slots = _slots_of(room)
            taken = list(slots)
        spec = TierLoadStoreSpec(
            taken,
            in_arena=_by_place(taken, slots),
            outdated=self._take(slots.values()),
            # A load ends at the first damaged block: the blocks behind it are there, unverified.
            rewritten=[key for key in taken if tier.is_suspect(key)],
        )
        return PrepareStoreOutput(taken, spec, [] if room is None else room.evicted_keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make stored blocks hits, or forget them; the tier is asked again about them."""
        in_arena = [key for key in keys if key not in self._storing]
        self._arena.complete_store(in_arena, req_context, success)
        self._tier.stored(keys, req_context, success=success)
        if success:
            # Blocks of the arena are put later, and no word of it comes here.
            self._tier.put([key for key in keys if key in self._storing])
        self._storing.difference_update(keys)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Order the request's blocks: its tail is evicted before its head."""
        self._arena.on_request_finished(req_context)

    def weights_changed(self) -> None:
        """Evict present blocks first from now on, without putting them into the tier."""
        self._num_changes += 1
        self._arena.weights_changed()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events in the arena and in the tier since the last call."""
        return [*self._arena.take_events(), *self._tier.take_events()]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Record the model's time per token."""
        self._tier.payoff.computed(context.seconds_per_token)

    def reset_cache(self) -> bool:
        """Empty the arena; return False: other instances share the tier, its blocks stay."""
        self._arena.reset_cache()
        return False

    def get_stats(self) -> Mapping[str, float]:
        """Return the numbers of the arena, if there is one, and of the tier."""
        of_arena = self._arena.get_stats() if self._has_arena else {}
        return {**of_arena, **self._tier.get_stats()}

    def shutdown(self) -> None:
        """Empty the arena, and close the tier. A second call does nothing."""
        self._arena.shutdown()
        self._tier.shutdown()

    def _take(self, slots: Iterable[int]) -> list[int]:
        """Note that slots have new blocks; return those whose former block is of other weights."""
        now, at = self._num_changes, self._changes_at
        outdated = [slot for slot in slots if at.get(slot, now) != now]
        at.update(dict.fromkeys(slots, now))
        return outdated

    def _count_offers(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that were offered often enough, none twice."""
        unique = list(dict.fromkeys(keys))
        least, offers = self._store_threshold, self._num_offers
        if least == 1:
            return unique
        for key in unique:
            offers[key] = offers.pop(key, 0) + 1
        while len(offers) > MAX_OFFERED:
            offers.popitem(last=False)
        return [key for key in unique if offers.get(key, 0) >= least]


def _slots_of(room: PrepareStoreOutput) -> dict[OffloadKey, int]:
    slots = cast("ArenaLoadStoreSpec", room.store_spec).slots
    return dict(zip(room.keys_to_store, slots, strict=True))


def _by_place(keys: Iterable[OffloadKey], slots: Mapping[OffloadKey, int]) -> dict[int, int]:
    return {place: slots[key] for place, key in enumerate(keys) if key in slots}
