"""An offloading spec over any `Tier`: what keeps a store of bytes from making an answer wrong.

1.  S looks blocks up on a thread of its own: `TierManager.lookup` answers *ask again* until the
    tier has answered, and *miss* where it takes longer than `LOOKUP_S`. A hit needs the part of
    every rank.
2.  W stores: a block is copied to a buffer, which releases it, and put from there. A tier that
    hangs holds buffers, and blocks of the cache for `STALL_S`: then stores fail until a buffer
    comes free again. A copy is put only if its job had not ended when it was made.
3.  W loads: a thread gets a block into a buffer, and copies it to one that the tier has never seen,
    unless the tier says that nothing writes to the first after its call (`Tier.writes_after_get`).
    From there `Copier.load` verifies it and writes it to the cache, only while its job has not
    ended. A job that takes longer than
    ``deadline_s`` fails; bytes that arrive later are dropped.
4.  A block that is not what it should be is removed from the tier, and one that cannot be read is
    replaced by the next store. A key whose load has failed is a miss until then, or for `FAILED_S`.
5.  A tier of which `FAILURES` calls in a row have failed is left alone for `PAUSE_S`: misses, and
    blocks that are not kept, without a call. Then it is tried again.
6.  Loads that take longer than computing their blocks are skipped (`wtransfer.specs.payoff`).

The contents of a key are the connector's (`wtransfer.connectors.offloading`); here a rank's number
is added. The value under it is a `BlockHeader` and the block's pages, one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np

from wtransfer.calls import start_call
from wtransfer.config import backend_options, decode_options
from wtransfer.deadline import Deadline
from wtransfer.errors import BlockNotKeptError, OffloadingOptionError
from wtransfer.kv.copier import Copier, RefusedError
from wtransfer.kv.fence import InvalidatedKeys
from wtransfer.kv.header import HEADER_NBYTES
from wtransfer.kv.slots import HeaderForm, Look
from wtransfer.specs.interface import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    PrepareStoreOutput,
    Tier,
    options_of_spec,
)
from wtransfer.specs.jobs import NICENESS, SHUTDOWN_S, CopyThreads, Jobs, JobWorker
from wtransfer.specs.payoff import Payoff

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from typing_extensions import Self

    from wtransfer.config import OffloadingConfig
    from wtransfer.kv.cache_view import GroupPages
    from wtransfer.kv.copier import Chunks, Reason
    from wtransfer.kv.header import BlockGeometry
    from wtransfer.kv.keys import OffloadKey
    from wtransfer.kv.slots import Headers, Numbers
    from wtransfer.specs.interface import ReqContext, ScheduleEndContext
    from wtransfer.specs.jobs import Kind

logger = logging.getLogger(__name__)

LOOKUP_S = 1.0
"""Longest wait of a request for an answer of the tier, in seconds."""
FRESH_S = 0.5
"""Time after which a request that has used an answer asks the tier again, in seconds."""
FAILED_S = 30.0
"""Time for which a key whose load has failed is a miss, unless it is stored anew, in seconds."""
STALL_S = 1.0
"""Longest wait of a store for a buffer while none comes free, in seconds."""
CLOSE_S = 2.0
"""Longest wait for a tier to close, in seconds."""
END_S = 0.2
"""Time that running puts may take after waiting ones were dropped, in seconds."""
FAILURES = 3
"""Calls that fail in a row before a tier is left alone."""
PAUSE_S = 5.0
"""Length of that pause, in seconds; then one more failure is enough."""
BATCH_CHUNKS = 64
"""Most blocks in one call of a tier that has batches."""
BATCH_NBYTES = 4 << 20
"""Bytes that are worth a call of their own."""
MAX_OFFERED = 1 << 16
"""Most keys whose offers are counted; the oldest are forgotten."""

_NO_BUFFER = -1


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every tier, in ``kv_connector_extra_config``; all others are the tier's own."""

    buffer_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 40)] = 128 << 20
    """Memory of each rank for blocks on their way to the tier; at least one block."""
    num_io_threads: Annotated[int, msgspec.Meta(gt=0, le=64)] = 2
    """Threads of each rank that put, and as many that get."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 10.0
    """Longest duration of a load or a store, in seconds; then it fails."""
    store_threshold: Annotated[int, msgspec.Meta(gt=0)] = 1
    """A block is stored when it is offered for the n-th time: 2 keeps what was computed twice."""
    skip_slow_loads: bool = True
    """True if blocks are computed that the tier delivers more slowly than the model."""
    cpu_bytes_to_use: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    """Host memory for an arena over the tier, for all ranks together; 0: the tier alone."""
    eviction_policy: str = "lru"
    """Policy of the arena, refused without one: ``lru``, ``arc`` or ``module:Class``."""
    write_back: bool = False
    """True if blocks are put when the arena evicts them; else when they are stored. Refused without
    an arena."""

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Read the options; return the options of every tier, and those of this one.

        Raises:
            OffloadingOptionError: An option cannot be used.
        """
        extra = {k: v for k, v in options_of_spec(extra_config).items() if k != "tier"}
        shared = {k: v for k, v in extra.items() if k in cls.__struct_fields__}
        name = "kv_connector_extra_config of every tier"
        options = decode_options(shared, cls, OffloadingOptionError, name)
        for name in ("eviction_policy", "write_back"):
            if extra.get(name) and not options.cpu_bytes_to_use:
                raise OffloadingOptionError(
                    f"kv_connector_extra_config: {name} is about an arena over the tier, and there "
                    f"is none: set cpu_bytes_to_use, its size, or leave {name} out"
                )
        return options, {k: v for k, v in extra.items() if k not in shared}


class TierLoadStoreSpec(LoadStoreSpec):
    """Blocks by key.

    Args:
        keys: Keys, in the order of the blocks.
        failed: Keys whose load has failed.
        slots: Places of the blocks in the arena over the tier; a number from the number of its
            slots on: nowhere. None: there is no arena.
        fetched: Slots that a load fills from the tier.
        outdated: Slots whose former block is of other weights.
    """

    def __init__(
        self,
        keys: Collection[OffloadKey],
        failed: Collection[OffloadKey] = (),
        slots: Sequence[int] | None = None,
        fetched: Collection[int] = (),
        outdated: Collection[int] = (),
    ) -> None:
        self.keys = list(keys)
        """Keys, without rank."""
        self.failed = list(failed)
        """Keys that are stored even if the tier has them."""
        self.slots = list(range(len(self.keys)) if slots is None else slots)
        """A number for each key, none twice."""
        self.fetched = list(fetched)
        """Slots that a load fills from the tier."""
        self.outdated = list(outdated)
        """Slots whose former block is of no use any more: with ``write_back`` it is not put."""

    @staticmethod
    def medium() -> str:
        """Return ``"STORAGE"``."""
        return "STORAGE"


def rank_key(key: bytes, rank: int) -> bytes:
    """Return the key of one rank's part of a block."""
    return key + rank.to_bytes(2, "big")


def open_tier(tier_cls: type[Tier], options: Mapping[str, Any]) -> Tier:
    """Make an object of a tier.

    Raises:
        OffloadingOptionError: An option is unknown, missing, of another type, or was refused by the
            constructor.
    """
    return tier_cls(backend_options(tier_cls, options, OffloadingOptionError))


def close_tier(tier: Tier) -> None:
    """Close a tier; a close that takes longer than `CLOSE_S` continues on a thread."""
    call = start_call(tier.close, "wtransfer-tier-close")
    if not call.done.wait(CLOSE_S):
        logger.warning("%s.close takes longer than %g s", type(tier).__name__, CLOSE_S)
    elif call.error is not None:
        raise call.error


class _Counts:
    """Counts failures by reason, and logs the first of each reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[f"{name}_total"] += number

    def fail(self, name: str, reason: str, detail: object, number: int = 1) -> None:
        with self._lock:
            is_first = not self._counts[f"{name}_{reason}_total"]
            self._counts[f"{name}_total"] += number
            self._counts[f"{name}_{reason}_total"] += number
        if is_first:
            text = "%s (%s): %s; further ones are only counted"
            logger.warning(text, name.replace("_", " "), reason, detail)

    def numbers(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)


class _Health:
    """Leaves a tier alone whose calls fail. Thread-safe."""

    def __init__(self) -> None:
        self._num_failed, self._until = 0, 0.0

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._until

    def ended(self, *, success: bool) -> None:
        """Count the end of a call."""
        self._num_failed = 0 if success else self._num_failed + 1
        if self._num_failed >= FAILURES:
            self._until = time.monotonic() + PAUSE_S


# -- the scheduler's side ---------------------------------------------------------------------


@dataclasses.dataclass
class Load:
    """Sources of the blocks of a load."""

    got: list[OffloadKey]
    """Blocks from the tier."""
    pinned: list[OffloadKey] = dataclasses.field(default_factory=list)
    """Blocks from the arena over it."""
    promoted: list[OffloadKey] = dataclasses.field(default_factory=list)
    """Blocks from the tier that are copied to the arena as well."""
    success: bool = True
    """False: it has failed on a rank."""
    began: float = dataclasses.field(default_factory=time.monotonic)
    """Time at which it was prepared."""


@dataclasses.dataclass
class _Answer:
    """The tier's answer for one key."""

    asked: float
    """Time at which the tier was asked."""
    hit: bool | None = None
    """None: no answer yet."""
    read: float | None = None
    """Time of the answer's first use: it ages from then on, as steps may be long."""


class _Request:
    """One request: the tier's answers by key, and loads that are under way by their keys."""

    def __init__(self) -> None:
        self.answers: dict[OffloadKey, _Answer] = {}
        self.loads: dict[tuple[OffloadKey, ...], Load] = {}

    @classmethod
    def of(cls, req_context: ReqContext) -> _Request:
        request = req_context.get_state(cls)
        if request is None:
            req_context.set_state(request := cls())
        return request


class TierManager(OffloadingManager):
    """Looks blocks up in the tier, on a thread; nothing here waits for the tier.

    Args:
        tier: The tier; this side's own.
        config: Ranks, whose parts make a block, and tokens of a block.
        options: Rules when to store, and when to load.
    """

    num_slots = 0
    """Slots of an arena over the tier; blocks that have none are numbered from here on."""

    def __init__(self, tier: Tier, config: OffloadingConfig, options: TierOptions) -> None:
        self._tier = tier
        self._ranks = range(config.parallel.world_size)
        self._options = options
        self._payoff = Payoff(config.groups[0].tokens_per_block * config.cache.blocks_per_chunk)
        self._health = _Health()
        self._thread = CopyThreads("wtransfer-tier-lookup", 1)
        self._lock = threading.Lock()
        self._asked: list[tuple[OffloadKey, _Answer]] = []
        self._busy_since: float | None = None
        self._storing: set[OffloadKey] = set()
        self._failed: dict[OffloadKey, float] = {}
        self._num_offers: dict[OffloadKey, int] = {}
        self._counts = _Counts()
        self._pid, self._closed = os.getpid(), False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return the tier's answer, *RETRY* until then; a late answer is a miss."""
        answers, now = _Request.of(req_context).answers, time.monotonic()
        known, busy_since = answers.get(key), self._busy_since
        # A tier that hangs is not asked: the answer would wait behind.
        is_late = busy_since is not None and now - busy_since > LOOKUP_S
        if known is not None and known.hit is None:
            is_late = is_late or now - known.asked > LOOKUP_S
        if is_late or self._health.is_paused:
            self._counts.add("lookups_late" if is_late else "lookups_paused")
            return LookupResult.MISS
        if known is None or (known.read is not None and now - known.read > FRESH_S):
            answers[key] = self._ask(key, now)
            return LookupResult.RETRY
        if known.hit is None:
            return LookupResult.RETRY
        known.read = known.read or now
        if not known.hit or self._failed.get(key, 0.0) > now:
            return LookupResult.MISS
        if self._options.skip_slow_loads and self._payoff.is_loss():
            self._counts.add("loads_skipped")
            return LookupResult.MISS
        return LookupResult.HIT

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TierLoadStoreSpec:
        """Return the places of former hits; nothing is pinned, a lost block fails its load.

        Raises:
            BlockNotKeptError: A block was no hit.
        """
        self._begin_load(keys, req_context, Load(list(keys)))
        return self._nowhere(keys)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Record the duration of the load."""
        self._end_load(keys, req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Take all blocks but those that are being stored, or that this request has found."""
        answers = _Request.of(req_context).answers
        found = {key for key in keys if key in answers and answers[key].hit}
        taken = (found - self._failed.keys()) | self._storing
        return self._store_in_tier([key for key in self._count_offers(keys) if key not in taken])

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        """Let the tier be asked again about these keys, and take them again."""
        self._storing.difference_update(keys)
        answers = _Request.of(req_context).answers
        for key in keys:
            answers.pop(key, None)
            if success:
                self._failed.pop(key, None)

    def load_failed(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        suspect: bool,
    ) -> bool:
        """Let suspect keys be misses for a while: another load may fail like this one."""
        if (load := _Request.of(req_context).loads.get(tuple(keys))) is not None:
            load.success = False
            # Blocks from the arena are whole, as far as is known: a load of those alone would tell.
            keys = load.got or keys
        if not suspect:
            return True
        self._forget(keys)
        now = time.monotonic()
        self._failed = {key: until for key, until in self._failed.items() if until > now}
        self._failed.update(dict.fromkeys(keys, now + FAILED_S))
        return True

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Record the model's time per token."""
        self._payoff.computed(context.seconds_per_token)

    def reset_cache(self) -> bool:
        """Return False: other instances share the tier; its blocks stay."""
        return False

    def get_stats(self) -> Mapping[str, float]:
        """Return how many keys were looked up and found, and how many look-ups failed."""
        return {**self._tier.get_stats(), **self._counts.numbers(), **self._payoff.numbers()}

    def shutdown(self) -> None:
        """Close the tier, unless a look-up hangs in it.

        Nothing happens at a second call, nor in a forked child: the tier is its parent's.
        """
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._thread.stop()
            if self._thread.join(Deadline(SHUTDOWN_S)):
                close_tier(self._tier)

    def _begin_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext, load: Load
    ) -> None:
        request = _Request.of(req_context)
        for key in load.got:
            if key not in request.answers or not request.answers[key].hit:
                raise BlockNotKeptError(f"The block {key.hex()} is no hit; look it up first.")
        request.loads[tuple(keys)] = load

    def _end_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Load | None:
        """Return a load that has ended; None: it had ended before, or never begun."""
        load = _Request.of(req_context).loads.pop(tuple(keys), None)
        if load is not None and load.got:
            self._payoff.end(len(load.got) if load.success else 0, load.began)
        return load

    def _forget(self, keys: Collection[OffloadKey]) -> None:
        """Remove suspect keys from the arena, if there is one."""

    def _store_in_tier(self, keys: Collection[OffloadKey]) -> PrepareStoreOutput:
        self._storing.update(keys)
        return PrepareStoreOutput(list(keys), self._nowhere(keys), [])

    def _nowhere(self, keys: Collection[OffloadKey]) -> TierLoadStoreSpec:
        """Return a spec of blocks that have no slot."""
        slots = range(self.num_slots, self.num_slots + len(keys))
        return TierLoadStoreSpec(keys, self._suspect(keys), slots)

    def _suspect(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        # A load ends at the first damaged block: the blocks behind it are there, unverified.
        return [key for key in keys if key in self._failed]

    def _count_offers(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that were offered often enough, none twice."""
        unique = list(dict.fromkeys(keys))
        least, offers = self._options.store_threshold, self._num_offers
        if least == 1:
            return unique
        for key in unique:
            offers[key] = offers.pop(key, 0) + 1
        while len(offers) > MAX_OFFERED:
            del offers[next(iter(offers))]
        return [key for key in unique if offers.get(key, 0) >= least]

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


# -- the worker's side ------------------------------------------------------------------------


class _Buffers:
    """Memory for blocks on their way, a row each for header and pages: the slots of copiers."""

    def __init__(self, number: int, nbytes: int) -> None:
        # The system takes memory for a row when it is first written to.
        self.rows = np.empty((number, HEADER_NBYTES + nbytes), np.uint8)
        self.headers, self.slots = self.rows[:, :HEADER_NBYTES], self.rows[:, HEADER_NBYTES:]
        self._openings = np.zeros(number, np.int64)

    def look(self, slots: Numbers) -> Look:
        """Return copies of headers; a row has one user at a time, so it is never opened."""
        return Look(self.headers[slots], self._openings[slots])

    def quarantine(self, slot: int, seen: Headers) -> None:
        """Do nothing: a damaged block is removed from the tier."""


class Put(NamedTuple):
    """A block that is to be put."""

    own: bytes
    """Key of this rank's part."""
    nbytes: int
    """Bytes with header."""
    buffer: int = _NO_BUFFER
    """Buffer that holds it, or that it is copied to from its slot."""
    job_id: int | None = None
    """Job of which this is a part."""
    slot: int | None = None
    """Slot of the arena that holds it."""
    opening: int = -1
    """Number of the slot's openings when the block came there."""


class TierWorker(JobWorker):
    """Copies between one rank's cache and the tier. Made by `TieringOffloadingSpec.get_worker`.

    Args:
        tier: The tier; this worker's own.
        groups: For each group its pages, and how a chunk of it is laid out.
        config: Rank and chunk size.
        options: Buffers, threads and deadline.
        num_slots: Slots of an arena over the tier.
    """

    release_s = STALL_S

    def __init__(
        self,
        tier: Tier,
        groups: Sequence[tuple[GroupPages, BlockGeometry]],
        config: OffloadingConfig,
        options: TierOptions,
        num_slots: int = 0,
    ) -> None:
        self._tier = tier
        self._rank = config.parallel.rank
        name = f"rank {self._rank} of engine {config.engine_id!r}"
        num_threads, deadline_s = options.num_io_threads, options.deadline_s
        nbytes = max(geometry.nbytes for _, geometry in groups)
        batch = max(1, min(BATCH_CHUNKS, BATCH_NBYTES // nbytes))
        # A call for one chunk and a call for several fail alike only where a tier has the latter.
        self._put_batch = 1 if type(tier).put_many is Tier.put_many else batch
        self._get_batch = 1 if type(tier).get_many is Tier.get_many else batch
        num_puts = max(1, options.buffer_bytes // (HEADER_NBYTES + nbytes))
        num_gets, num_copies = num_threads * self._get_batch, num_threads * self._put_batch
        try:
            self._buffers = _Buffers(num_puts + 2 * num_gets + num_copies, nbytes)
        except MemoryError:
            raise OffloadingOptionError(
                f"buffer_bytes={options.buffer_bytes:,}: there is not that much memory"
            ) from None
        # The last rows are never the tier's: blocks that are verified and copied on lie there.
        self._own = num_gets + num_copies
        tier.register_memory(self._buffers.rows[: num_puts + self._own].reshape(-1).data)
        self._puts = CopyThreads("wtransfer-tier-put", num_threads, NICENESS)
        self._to_put: deque[Put] = deque()
        # Numbers of buffers, the one used last first. A load never waits for buffers of stores: a
        # batch of them, which begins at this number, is its own. Nor does a thread that puts wait:
        # as many are its own as it puts at once.
        self._free, self._free_for_loads, self._free_for_copies = (
            queue.LifoQueue[int](),
            queue.LifoQueue[int](),
            queue.LifoQueue[int](),
        )
        for number in range(num_puts):
            self._free.put(number)
        for number in range(num_puts, num_puts + num_gets, self._get_batch):
            self._free_for_loads.put(number)
        for number in range(num_copies):
            self._free_for_copies.put(num_puts + num_gets + number)
        copiers = [
            Copier(
                self._buffers,
                pages,
                HeaderForm(geometry.digest, self._rank),
                config.cache.blocks_per_chunk,
            )
            for pages, geometry in groups
        ]
        jobs = Jobs(
            name,
            num_slots,
            num_threads,
            2 * deadline_s,
            give_up_s=deadline_s,
            has_fetches=num_slots > 0,
        )
        super().__init__(name, copiers, jobs)
        self._lock = threading.Lock()
        # Keys of blocks that are there and of no use: they are put again all the same.
        self._unreadable: dict[bytes, None] = {}
        # By first buffer, the time since which it is in use.
        self._gets: dict[int, float] = {}
        self._num_threads, self._deadline_s = num_threads, deadline_s
        self._is_stalled = self._is_ending = False
        # A store that is full or read-only can still be read.
        self._put_health, self._get_health = _Health(), _Health()
        self._counts = _Counts()

    def get_released(self) -> set[int]:
        """Return stores whose blocks are in the buffers."""
        return self._jobs.released()

    def get_stats(self) -> Mapping[str, float]:
        """Return how many jobs, bytes and failures there were, the latter also by reason."""
        free = (self._free, self._free_for_loads, self._free_for_copies)
        now = {
            "buffers_free": sum(each.qsize() for each in free),
            "puts_waiting": len(self._to_put),
        }
        return {**self._tier.get_stats(), **self._jobs.counts(), **self._counts.numbers(), **now}

    def shutdown(self) -> None:
        """End within four seconds: puts that are under way may end, jobs fail.

        Nothing happens at a second call, nor in a forked child. A tier in which a call hangs is not
        closed.
        """
        if os.getpid() != self._pid or not self._copiers:
            return
        # The copiers hold views of the cache.
        self._copiers = ()
        for _ in range(self._num_threads):
            self._free.put(_NO_BUFFER)
        ended = self._jobs.shutdown()
        self._puts.stop()
        if not self._puts.join(Deadline(SHUTDOWN_S)):
            self._is_ending = True
            ended &= self._puts.join(Deadline(END_S))
        if ended:
            self._leave_arena()
            close_tier(self._tier)

    # -- the arena over the tier, if there is one

    def _leave_arena(self) -> None:
        """Release the arena, which nothing uses any more."""

    def _promote(self, chunks: Chunks, first: int) -> None:
        """Copy chunks that were loaded to their slots; they are in the buffers from `first` on."""

    def _copy_from_slot(self, put: Put, buffer: int) -> bool:
        """Copy a block to a buffer; return False if its slot has another one by now."""
        raise NotImplementedError

    # -- jobs

    def _num_places(self, kept: TierLoadStoreSpec) -> int:
        return self._jobs.num_slots + len(kept.keys)

    def _refusal(self, kind: Kind, kept: Any, slots: Numbers) -> Reason | None:
        if kind == "load" and self._needs_tier(slots) and self._hangs():
            return "slow"
        for key in getattr(kept, "failed", ()):
            self._mark_unreadable(rank_key(key, self._rank))
        return None

    def _needs_tier(self, slots: Numbers) -> bool:
        """Return whether a load of these slots gets anything from the tier."""
        return len(slots) > 0

    def _tasks(self, copier: Copier, chunks: Chunks) -> Iterable[Chunks]:  # noqa: ARG002
        return chunks.split(self._get_batch)

    def _store(self, job_id: int, copier: Copier, chunks: Chunks, mark: object) -> int:
        """Copy chunks to buffers, and have them put from there."""
        if (chunks.blocks < 0).any():
            raise RefusedError("malformed")
        # The end of a prefix first, as between steps: a store that evicts what was used longest ago
        # keeps its head.
        for chunk in reversed(list(chunks.split(1))):
            buffer = self._take_buffer(min(STALL_S, self._jobs.seconds_left(job_id)))
            try:
                (header,) = copier.gather(_in_buffers(chunk, buffer), mark)
                # Refused if the job was given up meanwhile: the block may be another one by now.
                self._jobs.add_part(job_id)
            except BaseException:
                self._free.put(buffer)
                raise
            self._buffers.headers[buffer] = header
            own = rank_key(chunk.keys[0], self._rank)
            self._put_later(Put(own, HEADER_NBYTES + copier.chunk_nbytes, buffer, job_id))
        return len(chunks) * copier.chunk_nbytes

    def _take_buffer(self, wait_s: float) -> int:
        try:
            buffer = self._free.get(timeout=0.0 if self._is_stalled else wait_s)
        except queue.Empty:
            self._is_stalled = True
            raise RefusedError("slow") from None
        if buffer == _NO_BUFFER:
            raise RefusedError("shutdown")
        return buffer

    def _put_later(self, put: Put) -> None:
        # Puts from buffers are as many as there are buffers.
        if put.slot is not None and len(self._to_put) > self._jobs.num_slots + len(
            self._buffers.rows
        ):
            self._counts.add("puts_dropped")
            return
        self._to_put.append(put)
        self._puts.submit(self._put)

    def _put(self) -> None:
        """Put waiting blocks, on a thread: as many as fit into one call."""
        batch: list[Put] = []
        with contextlib.suppress(IndexError):
            while len(batch) < self._put_batch:
                batch.append(self._to_put.popleft())
        copies = self._copies_of([each for each in batch if each.slot is not None])
        batch = [each for each in batch if each.slot is None] + copies
        reason: Reason | None = None
        if batch and self._is_ending:
            self._counts.add("puts_dropped", len(batch))
            reason = "shutdown"
        elif batch and self._put_health.is_paused:
            self._counts.add("puts_paused", len(batch))
            reason = "error"
        elif batch:
            try:
                self._put_new(batch)
                self._put_health.ended(success=True)
            except BaseException as error:
                self._counts.fail("put_failures", type(error).__name__, error, len(batch))
                self._put_health.ended(success=False)
                reason = "error"
        for each in batch:
            if each.slot is not None:
                self._free_for_copies.put(each.buffer)
                continue
            self._free.put(each.buffer)
            self._is_stalled = False
            if each.job_id is not None:
                self._jobs.end_part(each.job_id, reason)

    def _copies_of(self, puts: Sequence[Put]) -> list[Put]:
        """Return blocks of the arena as copies in buffers, without those gone from their slots."""
        copies = []
        for each in puts:
            buffer = self._free_for_copies.get()
            if not self._is_ending and self._copy_from_slot(each, buffer):
                copies.append(each._replace(buffer=buffer))
            else:
                self._free_for_copies.put(buffer)
                self._counts.add("puts_dropped")
        return copies

    def _put_new(self, batch: Sequence[Put]) -> None:
        """Put the blocks that the tier does not have, or has in an unreadable form."""
        doubtful = [each.own for each in batch if each.own not in self._unreadable]
        answers = self._tier.contains(doubtful) if doubtful else []
        kept = {own for own, is_kept in zip(doubtful, answers, strict=True) if is_kept}
        new = [each for each in batch if each.own not in kept]
        rows = self._buffers.rows
        if new:
            self._tier.put_many([(each.own, rows[each.buffer, : each.nbytes].data) for each in new])
        with self._lock:
            for each in new:
                self._unreadable.pop(each.own, None)
        self._counts.add("puts", len(new))
        self._counts.add("puts_skipped", len(batch) - len(new))

    def _load(self, job_id: int, copier: Copier, chunks: Chunks, mark: object) -> int:
        """Get chunks, and load the right ones that are still wanted into the cache."""
        # There are as many batches as threads that load.
        first = self._free_for_loads.get()
        self._gets[first] = time.monotonic()
        try:
            own = self._get(chunks, copier.chunk_nbytes, first)
            # The reason only: the error would hold this frame, and with it the cache.
            reason: Reason | None = None
            row = len(chunks)
            with self._jobs.committing(job_id):
                try:
                    copier.load(_in_buffers(chunks, own), mark)
                except RefusedError as error:
                    reason, row = error.reason, error.row
                self._promote(chunks[:row], own)
            if reason is not None:
                self._remove(rank_key(chunks.keys[row], self._rank), reason)
                raise RefusedError(reason)
        finally:
            del self._gets[first]
            self._free_for_loads.put(first)
        return chunks.num_blocks * copier.pages.block_nbytes

    def _get(self, chunks: Chunks, nbytes: int, first: int) -> int:
        """Fill buffers, and copy them where the tier may still write there; return the first.

        A buffer without a header is refused as an absent block.
        """
        if self._get_health.is_paused:
            self._counts.add("gets_paused", len(chunks))
            raise RefusedError("error")
        own = [rank_key(key, self._rank) for key in chunks.keys]
        rows = self._buffers.rows[first : first + len(own), : HEADER_NBYTES + nbytes]
        try:
            items = [(each, row.data) for each, row in zip(own, rows, strict=True)]
            for row, is_filled in zip(rows, self._tier.get_many(items), strict=True):
                if not is_filled:
                    row[:HEADER_NBYTES] = 0
            self._get_health.ended(success=True)
        except BaseException as error:
            self._counts.fail("get_failures", type(error).__name__, error, len(own))
            self._get_health.ended(success=False)
            for each in own:
                self._mark_unreadable(each)
            raise RefusedError("error") from error
        if not self._tier.writes_after_get:
            return first
        copies = first + self._own
        self._buffers.rows[copies : copies + len(own), : HEADER_NBYTES + nbytes] = rows
        return copies

    def _remove(self, own: bytes, reason: Reason) -> None:
        """Remove a block that is not what it should be."""
        self._counts.fail("blocks_refused", reason, f"{own.hex()} is removed")
        try:
            self._tier.remove([own])
        except BaseException as error:
            self._counts.fail("remove_failures", type(error).__name__, error)
            self._mark_unreadable(own)

    def _mark_unreadable(self, own: bytes) -> None:
        with self._lock:
            self._unreadable[own] = None
            if len(self._unreadable) > InvalidatedKeys.MAX_KEYS:
                del self._unreadable[next(iter(self._unreadable))]

    def _hangs(self) -> bool:
        """Return whether every thread that loads has been in one call for too long."""
        since = time.monotonic() - self._deadline_s
        calls = list(self._gets.values())
        return len(calls) == self._num_threads and max(calls) < since


def _in_buffers(chunks: Chunks, first: int) -> Chunks:
    return dataclasses.replace(chunks, slots=np.arange(first, first + len(chunks)))
