"""An offloading spec over any `Tier`: what keeps a store of bytes from making an answer wrong.

1.  S looks blocks up on a thread of its own: `TierManager.lookup` answers *ask again* until the
    tier has answered, and *miss* where it takes longer than `LOOKUP_S`. A hit needs the part of
    every rank.
2.  W stores: a block is copied to a buffer, which releases it, and put from there. A tier that
    hangs holds buffers, and blocks of the cache for `STALL_S`: then stores fail until a buffer
    comes free again. A copy is put only if its job had not ended when it was made.
3.  W loads: a thread gets a block into a buffer of its own, from which `Copier.load` verifies it
    and writes it to the cache, only while its job has not ended. A job that takes longer than
    ``deadline_s`` fails; bytes that arrive later are dropped.
4.  A block that is not what it should be is removed from the tier, and one that cannot be read is
    replaced by the next store. A key whose load has failed is a miss until then, or for `FAILED_S`.

What a key contains is the connector's (`wtransfer.connectors.offloading`); here a rank's number is
added. What stands under it is a `BlockHeader` and the block's pages, one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import queue
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np

from wtransfer.deadline import Deadline
from wtransfer.errors import BlockNotKeptError, OffloadingOptionError
from wtransfer.kv.cache_view import geometries_of, pages_of
from wtransfer.kv.copier import Copier, RefusedError
from wtransfer.kv.fence import InvalidatedKeys
from wtransfer.kv.header import HEADER_NBYTES
from wtransfer.kv.slots import HeaderForm, Look
from wtransfer.specs.interface import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from wtransfer.specs.jobs import SHUTDOWN_S, CopyThreads, Jobs, JobWorker
from wtransfer.transport.niceness import NICENESS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from wtransfer.config import OffloadingConfig
    from wtransfer.kv.cache_view import GroupPages
    from wtransfer.kv.copier import Chunks, Reason
    from wtransfer.kv.header import BlockGeometry
    from wtransfer.kv.keys import OffloadKey
    from wtransfer.kv.slots import Headers, Numbers
    from wtransfer.specs.interface import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        ReqContext,
        Tier,
    )
    from wtransfer.specs.jobs import Kind

logger = logging.getLogger(__name__)

LOOKUP_S = 1.0
"""Longest that a request waits for an answer of the tier, in seconds."""
FRESH_S = 0.5
"""Time after which a request that has used an answer asks the tier again, in seconds."""
FAILED_S = 30.0
"""How long a key whose load has failed is a miss, unless it is stored anew, in seconds."""
STALL_S = 1.0
"""Longest that a store waits for a buffer while none comes free, in seconds."""

_OF_THE_HOST = ("spec_name", "spec_module_path", "block_size")


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every tier, in ``kv_connector_extra_config``; all others are the tier's own."""

    buffer_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 40)] = 128 << 20
    """Memory of each rank for blocks on their way to the tier; at least one block."""
    num_io_threads: Annotated[int, msgspec.Meta(gt=0, le=64)] = 2
    """Threads of each rank that put, and as many that get."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 10.0
    """Longest that a load or a store may take, in seconds; it fails then."""


@functools.cache
def tier_spec(tier_cls: type[Tier]) -> type[TierSpec]:
    """Return the offloading spec that keeps blocks in a tier of this class."""
    attributes = {"tier_cls": tier_cls, "example_options": tier_cls.example_options}
    return type(tier_cls.__name__, (TierSpec,), {**attributes, "__module__": tier_cls.__module__})


class TierSpec(OffloadingSpec):
    """Keeps blocks in a tier. Made by `tier_spec`.

    Args:
        config: Options in ``extra_config``: `TierOptions`, and the tier's.

    Raises:
        OffloadingOptionError: An option of `TierOptions` cannot be used.
    """

    tier_cls: ClassVar[type[Tier]]
    """The tier."""
    example_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        extra = {k: v for k, v in config.extra_config.items() if k not in _OF_THE_HOST}
        try:
            self.options = msgspec.convert(extra, TierOptions)
            """Those of every tier."""
        except msgspec.ValidationError as error:
            raise OffloadingOptionError(f"kv_connector_extra_config: {error}") from error
        known = TierOptions.__struct_fields__
        self.tier_options = {name: value for name, value in extra.items() if name not in known}
        """Those of this tier."""
        self._manager: TierManager | None = None
        self._worker: TierWorker | None = None

    def get_manager(self) -> TierManager:
        """Open the tier for the scheduler's side."""
        if self._manager is None:
            tier = self.tier_cls(self.tier_options)
            self._manager = TierManager(tier, self.config.parallel.world_size)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> TierWorker:
        """Open the tier for one rank.

        Raises:
            OffloadingOptionError: The cache is not what the config says of it, or there is not
                enough memory for ``buffer_bytes``.
        """
        if self._worker is None:
            config, groups = self.config, pages_of(kv_caches)
            most = max(pages.block_nbytes for pages in groups) * config.cache.blocks_per_chunk
            geometries = geometries_of(config, kv_caches, most)
            tier = self.tier_cls(self.tier_options)
            copies = list(zip(groups, geometries, strict=True))
            try:
                self._worker = TierWorker(tier, copies, config, self.options)
            except BaseException:
                tier.close()
                raise
        return self._worker


class TierLoadStoreSpec(LoadStoreSpec):
    """Blocks by key.

    Args:
        keys: In the order of the blocks.
        failed: Those whose load has failed.
    """

    def __init__(self, keys: Collection[OffloadKey], failed: Collection[OffloadKey] = ()) -> None:
        self.keys = list(keys)
        """Keys, without rank."""
        self.failed = list(failed)
        """Keys that are stored even if the tier has them."""

    @property
    def slots(self) -> range:
        """Numbers of the keys: to the worker, each is a slot."""
        return range(len(self.keys))

    @staticmethod
    def medium() -> str:
        """Return ``"STORAGE"``."""
        return "STORAGE"


def rank_key(key: bytes, rank: int) -> bytes:
    """Return the key of one rank's part of a block."""
    return key + rank.to_bytes(2, "big")


class _Counts:
    """Counts failures by reason, and logs the first of each reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[f"{name}_total"] += number

    def fail(self, name: str, reason: str, detail: object) -> None:
        with self._lock:
            self._counts[f"{name}_total"] += 1
            self._counts[f"{name}_{reason}_total"] += 1
            is_first = self._counts[f"{name}_{reason}_total"] == 1
        if is_first:
            text = "%s (%s): %s; further ones are only counted"
            logger.warning(text, name.replace("_", " "), reason, detail)

    def numbers(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)


# -- the scheduler's side ---------------------------------------------------------------------


@dataclasses.dataclass
class _Answer:
    """What the tier has said of one key."""

    asked: float
    """When the tier was asked."""
    hit: bool | None = None
    """None: nothing yet."""
    read: float | None = None
    """When the answer was first used: it ages from then on, as steps may be long."""


class _Answers(dict["OffloadKey", _Answer]):
    """Answers for one request, by key."""

    @classmethod
    def of(cls, req_context: ReqContext) -> _Answers:
        answers = req_context.get_state(cls)
        if answers is None:
            req_context.set_state(answers := cls())
        return answers


class TierManager(OffloadingManager):
    """Asks the tier what it has, on a thread; nothing here waits for the tier.

    Args:
        tier: The tier; this side's own.
        num_ranks: Ranks whose parts make a block.
    """

    def __init__(self, tier: Tier, num_ranks: int) -> None:
        self._tier = tier
        self._ranks = range(num_ranks)
        self._thread = CopyThreads("wtransfer-tier-lookup", 1)
        self._lock = threading.Lock()
        self._asked: list[tuple[OffloadKey, _Answer]] = []
        self._busy_since: float | None = None
        self._storing: set[OffloadKey] = set()
        self._failed: dict[OffloadKey, float] = {}
        self._counts = _Counts()
        self._closed = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for the blocks that a request computes."""
        req_context.set_state(_Answers())
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return what the tier has answered, *RETRY* until then; a late answer is a miss."""
        answers, now = _Answers.of(req_context), time.monotonic()
        known, busy_since = answers.get(key), self._busy_since
        # A tier that hangs is not asked: the answer would wait behind.
        is_late = busy_since is not None and now - busy_since > LOOKUP_S
        if known is not None and known.hit is None:
            is_late = is_late or now - known.asked > LOOKUP_S
        if is_late:
            self._counts.add("lookups_late")
            return LookupResult.MISS
        if known is None or (known.read is not None and now - known.read > FRESH_S):
            answers[key] = self._ask(key, now)
            return LookupResult.RETRY
        if known.hit is None:
            return LookupResult.RETRY
        known.read = known.read or now
        has_failed = self._failed.get(key, 0.0) > now
        return LookupResult.HIT if known.hit and not has_failed else LookupResult.MISS

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> TierLoadStoreSpec:
        """Return where blocks are that were hits; nothing is pinned, a lost one fails its load.

        Raises:
            BlockNotKeptError: One was no hit.
        """
        answers = _Answers.of(req_context)
        for key in keys:
            if key not in answers or not answers[key].hit:
                raise BlockNotKeptError(f"The block {key.hex()} is no hit; look it up first.")
        return TierLoadStoreSpec(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Take all blocks but those that are being stored, or that this request has found."""
        answers = _Answers.of(req_context)
        found = {key for key in keys if key in answers and answers[key].hit}
        taken = (found - self._failed.keys()) | self._storing
        new = [key for key in dict.fromkeys(keys) if key not in taken]
        self._storing.update(new)
        # A load ends at the first block that is damaged: those behind it are there, unverified.
        failed = [key for key in new if key in self._failed]
        return PrepareStoreOutput(new, TierLoadStoreSpec(new, failed), [])

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        """Let the tier be asked again about these keys, and take them again."""
        self._storing.difference_update(keys)
        answers = _Answers.of(req_context)
        for key in keys:
            answers.pop(key, None)
            if success:
                self._failed.pop(key, None)

    def load_failed(self, keys: Collection[OffloadKey]) -> bool:
        """Let keys be misses for a while: another load may fail like this one."""
        now = time.monotonic()
        self._failed = {key: until for key, until in self._failed.items() if until > now}
        self._failed.update(dict.fromkeys(keys, now + FAILED_S))
        return True

    def reset_cache(self) -> bool:
        """Return False: other instances share the tier; what it keeps stays."""
        return False

    def get_stats(self) -> Mapping[str, float]:
        """Return how many keys were looked up and found, and how many look-ups failed."""
        return {**self._tier.get_stats(), **self._counts.numbers()}

    def shutdown(self) -> None:
        """Close the tier, unless a look-up hangs in it. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._thread.stop()
            if self._thread.join(Deadline(SHUTDOWN_S)):
                self._tier.close()

    def _ask(self, key: OffloadKey, now: float) -> _Answer:
        answer = _Answer(now)
        with self._lock:
            self._asked.append((key, answer))
            is_first = len(self._asked) == 1
        # One call for all that is asked until the thread comes to it.
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
                found = list(self._tier.contains(keys))
            if len(found) != len(keys):
                raise ValueError(f"contains() of {len(keys)} keys returned {len(found)} answers")
        except Exception as error:
            self._counts.fail("lookup_failures", type(error).__name__, error)
            found = [False] * len(keys)
        step = len(self._ranks)
        for number, (_, answer) in enumerate(asked):
            answer.hit = all(found[number * step : (number + 1) * step])
        self._busy_since = None
        self._counts.add("lookups", len(asked))
        self._counts.add("lookup_hits", sum(bool(answer.hit) for _, answer in asked))


# -- the worker's side ------------------------------------------------------------------------


class _Buffers:
    """What stands under a key, in a row each: the slots of blocks on their way."""

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


class TierWorker(JobWorker):
    """Copies between one rank's cache and the tier. Made by `TierSpec.get_worker`.

    Args:
        tier: The tier; this worker's own.
        groups: For each group its pages, and how a chunk of it is laid out.
        config: Rank and chunk size.
        options: Buffers, threads and deadline.
    """

    release_s = STALL_S

    def __init__(
        self,
        tier: Tier,
        groups: Sequence[tuple[GroupPages, BlockGeometry]],
        config: OffloadingConfig,
        options: TierOptions,
    ) -> None:
        self._tier = tier
        self._rank = config.parallel.rank
        name = f"rank {self._rank} of engine {config.engine_id!r}"
        num_threads, deadline_s = options.num_io_threads, options.deadline_s
        nbytes = max(geometry.nbytes for _, geometry in groups)
        num_puts = max(1, options.buffer_bytes // (HEADER_NBYTES + nbytes))
        try:
            self._buffers = _Buffers(num_puts + num_threads, nbytes)
        except MemoryError:
            raise OffloadingOptionError(
                f"buffer_bytes={options.buffer_bytes:,}: there is not that much memory"
            ) from None
        self._puts = CopyThreads("wtransfer-tier-put", num_threads, NICENESS)
        # Numbers of buffers, the one used last first. A load never waits for those of puts.
        self._free, self._free_for_loads = queue.LifoQueue[int](), queue.LifoQueue[int]()
        for number in range(num_puts + num_threads):
            (self._free if number < num_puts else self._free_for_loads).put(number)
        copiers = [
            Copier(
                self._buffers,
                pages,
                HeaderForm(geometry.digest, self._rank),
                config.cache.blocks_per_chunk,
            )
            for pages, geometry in groups
        ]
        jobs = Jobs(name, None, num_threads, 2 * deadline_s, give_up_s=deadline_s)
        super().__init__(name, copiers, jobs)
        # Keys that are there and of no use: they are put again all the same.
        self._unreadable: dict[bytes, None] = {}
        # By buffer, when the call began that runs.
        self._gets: dict[int, float] = {}
        self._num_threads, self._deadline_s = num_threads, deadline_s
        self._is_stalled = False
        self._counts = _Counts()

    def get_released(self) -> set[int]:
        """Return stores whose blocks are in the buffers."""
        return self._jobs.released()

    def get_stats(self) -> Mapping[str, float]:
        """Return how many jobs, bytes and failures there were, the latter also by reason."""
        return {**self._tier.get_stats(), **self._jobs.counts(), **self._counts.numbers()}

    def shutdown(self) -> None:
        """End within two seconds: puts that are under way may end, jobs fail.

        A second call does nothing. A tier in which a call hangs is not closed.
        """
        if not self._copiers:
            return
        # They hold views of the cache.
        self._copiers = ()
        ended = self._jobs.shutdown()
        self._puts.stop()
        if self._puts.join(Deadline(SHUTDOWN_S)) and ended:
            self._tier.close()

    # -- jobs

    def _submit(self, job_id: int, kind: Kind, cache: GPULoadStoreSpec, kept: Any) -> bool:
        if kind == "load" and self._hangs():
            return self._jobs.fail(job_id, kind, "slow")
        for key in getattr(kept, "failed", ()):
            self._mark_unreadable(rank_key(key, self._rank))
        return super()._submit(job_id, kind, cache, kept)

    def _tasks(self, copier: Copier, chunks: Chunks) -> Iterable[Chunks]:  # noqa: ARG002
        return chunks.split(1)

    def _store(self, job_id: int, copier: Copier, chunk: Chunks, mark: object) -> int:
        """Copy a chunk to a buffer, and have it put from there."""
        if (chunk.blocks < 0).any():
            raise RefusedError("malformed")
        buffer = self._take_buffer(job_id)
        try:
            (header,) = copier.gather(_in_buffer(chunk, buffer), mark)
            # Refused if the job was given up meanwhile: the block may be another one by now.
            self._jobs.add_part(job_id)
        except BaseException:
            self._free.put(buffer)
            raise
        self._buffers.headers[buffer] = header
        own = rank_key(chunk.keys[0], self._rank)
        self._puts.submit(functools.partial(self._put, job_id, own, copier.chunk_nbytes, buffer))
        return copier.chunk_nbytes

    def _take_buffer(self, job_id: int) -> int:
        wait_s = 0.0 if self._is_stalled else min(STALL_S, self._jobs.seconds_left(job_id))
        try:
            return self._free.get(timeout=wait_s)
        except queue.Empty:
            self._is_stalled = True
            raise RefusedError("slow") from None

    def _put(self, job_id: int, own: bytes, nbytes: int, buffer: int) -> None:
        reason: Reason | None = None
        try:
            if own not in self._unreadable and self._tier.contains([own]) == [True]:
                self._counts.add("puts_skipped")
            else:
                self._tier.put(own, self._buffers.rows[buffer, : HEADER_NBYTES + nbytes].data)
                self._unreadable.pop(own, None)
                self._counts.add("puts")
        except Exception as error:
            self._counts.fail("put_failures", type(error).__name__, error)
            reason = "error"
        self._free.put(buffer)
        self._is_stalled = False
        self._jobs.end_part(job_id, reason)

    def _load(self, job_id: int, copier: Copier, chunk: Chunks, mark: object) -> int:
        """Get a chunk, and load it into the cache if it is right and still wanted."""
        own = rank_key(chunk.keys[0], self._rank)
        # There are as many as threads that load.
        buffer = self._free_for_loads.get()
        try:
            self._get(own, copier.chunk_nbytes, buffer)
            # Not the error itself: it would hold this frame, and with it the cache.
            reason: Reason | None = None
            with self._jobs.committing(job_id):
                try:
                    copier.load(_in_buffer(chunk, buffer), mark)
                except RefusedError as error:
                    reason = error.reason
        finally:
            self._free_for_loads.put(buffer)
        if reason is not None:
            self._counts.fail("blocks_refused", reason, f"{own.hex()} is removed")
            try:
                self._tier.remove([own])
            except Exception as error:
                self._counts.fail("remove_failures", type(error).__name__, error)
                self._mark_unreadable(own)
            raise RefusedError(reason)
        return chunk.num_blocks * copier.pages.block_nbytes

    def _get(self, own: bytes, nbytes: int, buffer: int) -> None:
        """Fill a buffer; one without a header is refused as an absent block."""
        self._gets[buffer] = time.monotonic()
        try:
            if not self._tier.get(own, self._buffers.rows[buffer, : HEADER_NBYTES + nbytes].data):
                self._buffers.headers[buffer] = 0
        except Exception as error:
            self._counts.fail("get_failures", type(error).__name__, error)
            self._mark_unreadable(own)
            raise RefusedError("error") from error
        finally:
            del self._gets[buffer]

    def _mark_unreadable(self, own: bytes) -> None:
        self._unreadable[own] = None
        if len(self._unreadable) > InvalidatedKeys.MAX_KEYS:
            del self._unreadable[next(iter(self._unreadable))]

    def _hangs(self) -> bool:
        """Return whether every thread that loads has been in one call for too long."""
        since = time.monotonic() - self._deadline_s
        calls = list(self._gets.values())
        return len(calls) == self._num_threads and max(calls) < since


def _in_buffer(chunk: Chunks, buffer: int) -> Chunks:
    return dataclasses.replace(chunk, slots=np.array([buffer]))
