"""The scheduler's side of the offloading connector."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from wtransfer.config import blocks_per_chunk, cache_groups
from wtransfer.connectors.fenced import reported_versions
from wtransfer.connectors.interface import ConnectorScheduler
from wtransfer.connectors.naming import BlockNaming
from wtransfer.connectors.offloading.events import BlockEvents
from wtransfer.connectors.offloading.metadata import (
    Job,
    OffloadingHandshake,
    OffloadingMetadata,
    OffloadingWorkerMetadata,
)
from wtransfer.connectors.serving_config import Instance, read_options
from wtransfer.connectors.tracked_requests import TrackedRequests, check_groups
from wtransfer.deadline import Deadline
from wtransfer.errors import BlockNotKeptError, ConnectorOptionError
from wtransfer.kv.fence import InvalidatedKeys, SchedulerFence
from wtransfer.kv.groups import first_needed, longest_prefix
from wtransfer.kv.step_times import StepTimes
from wtransfer.specs.factory import DEFAULT, create_spec
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
)
from wtransfer.specs.seed_adapter import adapt_spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from wtransfer.connectors.interface import (
        KVConnectorHandshakeMetadata,
        KVConnectorOutput,
        KVEvent,
    )
    from wtransfer.connectors.naming import RequestNames
    from wtransfer.connectors.offloading.metadata import Outcome
    from wtransfer.connectors.tracked_requests import Tracked
    from wtransfer.kv.keys import OffloadKey
    from wtransfer.weight_version import WeightVersions

logger = logging.getLogger(__name__)

LOOKUP_BATCH = 64
"""Chunks of a request that are named before any is looked up; then twice as many each time."""
STORE_BATCH = 32
"""Most chunks that are offered at once to the tier, which takes all of them or none."""


class OffloadingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Option of the connector, in ``kv_connector_extra_config``; all others are the spec's."""

    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 30.0
    """Longest that a spec may take to report a job, in seconds: the tokens of an overdue load are
    computed, in other blocks. Specs and tiers that have this option fail the job themselves.
    """


@dataclass
class _Offered:
    """A request, as the spec knows it."""

    context: ReqContext
    names: RequestNames
    takes_all: bool
    num_there: int = 0
    num_loaded: int = 0
    num_offered: int | None = None
    first_own: int = 0
    doubtful: int = 0
    storing: set[int] = field(default_factory=set)


@dataclass
class _InFlight:
    """A job that not all ranks have ended."""

    request_id: str
    context: ReqContext
    keys: list[OffloadKey]
    versions: WeightVersions
    loaded: Sequence[int] | None
    waiting_for: set[int]
    deadline: Deadline
    described: Mapping[OffloadKey, Any]
    success: bool = True
    last_step: int | None = None
    held: Sequence[Any] = ()


class OffloadingScheduler(ConnectorScheduler):
    """Asks the spec's manager, and prepares jobs.

    Blocks are kept in chunks of one block or, with the option ``block_size``, of several.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Shape of the KV cache; None: it stands in ``config.cache_config``.
    """

    default_spec: ClassVar[str] = DEFAULT
    """Name of the spec where the options name none."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self._instance = instance = Instance.of(config)
        spec = create_spec(config, kv_cache_config or config.cache_config, self.default_spec)
        self._manager = adapt_spec(spec).get_manager()
        # By KV cache group.
        self._groups = cache_groups(kv_cache_config or config.cache_config)
        self._windows = tuple(group.reach for group in self._groups)
        self._num_ranks = instance.num_ranks
        self._fence = SchedulerFence(self._num_ranks)
        self._invalidated = InvalidatedKeys()
        self._block_size = instance.block_size
        extra = config.kv_transfer_config.kv_connector_extra_config or {}
        # A spec that has the deadline itself fails the job first.
        own = {k: v for k, v in extra.items() if k in OffloadingOptions.__struct_fields__}
        self._job_s = 1.1 * read_options(OffloadingOptions, own).deadline_s
        self._spec_name = extra.get("tier") or extra.get("spec_name", self.default_spec)
        self._blocks_per_chunk = blocks_per_chunk(extra, self._block_size)
        if self._blocks_per_chunk > 1 and any(group.has_states for group in self._groups):
            raise ConnectorOptionError(
                f"block_size={extra['block_size']}: the states of this model's linear attention "
                f"are kept by single blocks; leave the option out, or set it to {self._block_size}"
            )
        self._naming = self._name_blocks({})
        events = getattr(config, "kv_events_config", None)
        self._events = BlockEvents(
            self._block_size,
            self._blocks_per_chunk,
            enabled=bool(getattr(events, "enable_kv_cache_events", False)),
        )
        self._requests: dict[str, _Offered] = {}
        self._progress = TrackedRequests()
        self._job_ids = itertools.count()
        # In the order of their deadlines, which are equally far away.
        self._in_flight: dict[int, _InFlight] = {}
        self._overdue: dict[int, _InFlight] = {}
        self._pool: Any = None
        self._next = OffloadingMetadata()
        self._step = 0
        self._heard: dict[int, int] = {}
        self._times = StepTimes()
        # Counts of jobs; the spec's manager counts blocks.
        self._counts = Counter(
            load_jobs_failed_total=0,
            store_jobs_failed_total=0,
            loaded_bytes_total=0,
            stored_bytes_total=0,
            overdue_jobs_total=0,
            unknown_outcomes_total=0,
            fence_changes_total=0,
            fence_misses_total=0,
            fence_stores_refused_total=0,
            fence_blocks_invalidated_total=0,
        )

    def _name_blocks(self, layouts: Mapping[int, bytes]) -> BlockNaming:
        """Return the naming of blocks that all ranks lay out in this way."""
        layout = b"".join(layouts.get(rank, b"") for rank in range(self._num_ranks))
        return BlockNaming(self._block_size * self._blocks_per_chunk, self._instance.root + layout)

    # -- look-ups

    def on_new_request(self, request: Any) -> None:
        """Do nothing yet: the versions of a request are noted when it is about to begin."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens the tier has beyond the computed ones."""
        offered = self._begin(request)
        offered.num_there = num_computed_tokens
        # The last token is always computed: its output is not kept.
        chunk = self._naming.block_size
        last = (request.num_tokens - 1) // chunk
        first = num_computed_tokens // chunk
        is_asked = self._instance.receives and not self._overdue
        if num_computed_tokens % self._block_size or last <= first or not is_asked:
            return 0, False
        found = self._num_hits(request, offered, first, last)
        if found is None:
            return None, False
        num_tokens = (first + found) * chunk - num_computed_tokens if found else 0
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Prepare the load, if there is one."""
        offered = self._requests.get(request.request_id) or self._announce(request)
        self._fence.ensure_begun(request.request_id)
        self._progress.know(request)
        # Only now: a request that has no room yet is asked about again and again.
        chunk = self._naming.block_size
        num_there = offered.num_there // chunk
        there = [
            key
            for group, window in enumerate(self._windows)
            for key in self._keys(
                *(request.request_id, offered, group),
                first_needed(window, offered.num_there, chunk),
                num_there,
            )
        ]
        if there:
            self._manager.touch(there, offered.context)
        if not num_external_tokens:
            return
        offered.num_loaded = num_external_tokens
        first = offered.num_there // self._block_size
        end = first + num_external_tokens // self._block_size
        self._load(request, offered, first, end, blocks.get_block_ids())

    def _num_hits(self, request: Any, offered: _Offered, first: int, last: int) -> int | None:
        request_id = request.request_id
        if self._fence.versions(request_id) is None:
            self._counts["fence_misses_total"] += 1
        keys = [
            self._keys(request_id, offered, group, first, min(last, first + LOOKUP_BATCH))
            for group in range(len(self._windows))
        ]
        if not keys[0]:
            return 0

        def is_kept(group: int, chunk: int) -> bool | None:
            named = keys[group]
            # A long prompt that the tier does not have costs few names.
            if chunk - first >= len(named):
                end = min(last, max(chunk + 1, first + 2 * len(named)))
                named = keys[group] = self._keys(request_id, offered, group, first, end)
            found = self._manager.lookup(named[chunk - first], offered.context)
            return None if found is LookupResult.RETRY else found is LookupResult.HIT

        end, is_pending = longest_prefix(
            self._windows, self._naming.block_size, first, last, is_kept
        )
        if events := list(self._manager.take_events()):
            # Of blocks that were found in a tier which others fill as well.
            named = {key for event in events for key in event.keys}
            places = {
                key: (group, first + n)
                for group, of_group in enumerate(keys)
                for n, key in enumerate(of_group)
                if key in named
            }
            fingerprint = self._fence.fingerprint(request_id)
            self._events.hear(events, self._events.describe(request, places, fingerprint))
        return None if is_pending else end - first

    def _begin(self, request: Any) -> _Offered:
        """Return what the spec knows of a request that has no blocks of its own.

        The request may have had some, and have lost them, by preemption or as the weights have
        changed. The KV that it builds on is found or computed from here on, so it belongs to the
        present weights.
        """
        offered = self._requests.get(request.request_id)
        is_stale = self._fence.versions(request.request_id) is None
        self._fence.begin(request.request_id)
        if offered is None:
            return self._announce(request)
        if is_stale:
            self._manager.on_request_finished(offered.context)
            return self._announce(request)
        # Blocks that jobs may still read are no longer its own.
        offered.storing.clear()
        offered.num_offered, offered.num_loaded, offered.first_own = None, 0, 0
        return offered

    def _announce(self, request: Any) -> _Offered:
        params = getattr(request, "kv_transfer_params", None)
        context = ReqContext(request.request_id, params)
        wanted = self._manager.on_new_request(context)
        takes_all = wanted.policy is OffloadPolicy.REQUEST_LEVEL
        offered = _Offered(context, self._naming.of(request), takes_all)
        self._requests[request.request_id] = offered
        return offered

    def _keys(
        self, request_id: str, offered: _Offered, group: int, first: int, end: int
    ) -> list[OffloadKey]:
        """Return keys of a group's chunks, as far as their tokens are known; none if stale."""
        fingerprint = self._fence.fingerprint(request_id)
        if fingerprint is None:
            return []
        return self._invalidated.valid(offered.names.under(fingerprint, end, group)[first:])

    # -- jobs

    def _load(
        self,
        request: Any,
        offered: _Offered,
        first: int,
        end: int,
        groups: Sequence[Sequence[int]],
    ) -> None:
        request_id, per_chunk, size = request.request_id, self._blocks_per_chunk, self._block_size
        check_groups(groups, len(self._windows))
        places: dict[OffloadKey, tuple[int, int]] = {}
        block_ids: list[int] = []
        begins = [max(first, first_needed(each, end * size, size)) for each in self._windows]
        for number, begin in enumerate(begins):
            chunks = begin // per_chunk, -(-end // per_chunk)
            keys = self._keys(request_id, offered, number, *chunks)
            places |= {key: (number, chunks[0] + n) for n, key in enumerate(keys)}
            block_ids += groups[number][begin:end]
        keys, versions = list(places), self._fence.versions(request_id)
        try:
            if versions is None:
                raise BlockNotKeptError("the weights have changed since the look-up")
            source = self._manager.prepare_load(keys, offered.context)
        except BlockNotKeptError:
            self._next.gone[request_id] = block_ids
            return
        job_id = self._enter(request, offered.context, places, versions, loaded=block_ids)
        blocks = GPULoadStoreSpec(block_ids, [end - begin for begin in begins], begins)
        self._next.loads.append(Job(job_id, request_id, blocks, source, versions))

    def _offer(self, tracked: Tracked) -> None:
        """Offer the chunks that a request has filled to the tier."""
        request = tracked.request
        offered = self._requests[request.request_id]
        chunk = self._naming.block_size
        before = tracked.num_before // chunk
        if offered.num_offered is None:
            offered.num_offered = 0 if offered.takes_all else before
            if tracked.num_before > offered.num_there + offered.num_loaded:
                # Another connector loads them, within the step perhaps. Should that fail, all that
                # the step computes is wrong, and some hosts end it as if it were not.
                offered.doubtful = self._step
                # Nor is a chunk stored of which the other one has loaded a part.
                offered.first_own = -(-tracked.num_before // chunk)
        offered.first_own = min(offered.first_own, -(-tracked.num_before // chunk))
        # A step that did not count is taken again: its blocks were not stored.
        offered.num_offered = max(min(offered.num_offered, before), offered.first_own)
        if offered.doubtful > self._num_heard or not self._instance.sends or self._overdue:
            return
        end = tracked.num_computed // chunk
        versions = self._fence.versions(request.request_id)
        if versions is None:
            self._counts["fence_stores_refused_total"] += end > offered.num_offered
            offered.num_offered = max(end, offered.num_offered)
            return
        first = offered.num_offered
        if end <= first:
            return
        keys = [
            self._keys(request.request_id, offered, group, first, end)
            for group in range(len(self._windows))
        ]
        offered.num_offered = first + len(keys[0])
        step = max(1, STORE_BATCH // len(keys))
        for start in range(0, len(keys[0]), step):
            batch = [each[start : start + step] for each in keys]
            self._store(tracked, offered, first + start, batch, versions)

    def _store(
        self,
        tracked: Tracked,
        offered: _Offered,
        first: int,
        keys: list[list[OffloadKey]],
        versions: WeightVersions,
    ) -> None:
        """Store chunks from `first` on; `keys` are those of each group.

        A host releases the blocks of a window, and of states, that later steps do not read, before
        the store has ended perhaps: they are held until then. Of a chunk of several blocks the
        first ones may be others' already; it is left out.
        """
        places = {
            each[place - first]: (group, place)
            for group, each in enumerate(keys)
            for place in self._own_places(tracked, group, first, first + len(each))
        }
        output = self._manager.prepare_store(list(places), offered.context) if places else None
        if output is None or not output.keys_to_store:
            return
        stored = {key: places[key] for key in output.keys_to_store}
        blocks: list[int] = []
        held: list[Any] = []
        sizes, begins = [], []
        # In the order in which they were given: by group, and in a group from the first one on.
        for group in range(len(keys)):
            kept = [place for number, place in stored.values() if number == group]
            of_group = self._blocks_at(tracked, group, kept)
            blocks += of_group
            sizes.append(len(of_group))
            begins.append(kept[0] * self._blocks_per_chunk if kept else 0)
            if self._windows[group] is not None:
                held += [self._pool.blocks[block] for block in of_group]
        if held:
            self._pool.touch(held)
        request_id = tracked.request.request_id
        job_id = self._enter(tracked.request, offered.context, stored, versions, held=held)
        offered.storing.add(job_id)
        source = GPULoadStoreSpec(blocks, sizes, begins)
        self._next.stores.append(Job(job_id, request_id, source, output.store_spec, versions))

    def _own_places(self, tracked: Tracked, group: int, first: int, end: int) -> Sequence[int]:
        """Return those chunks that a request has filled whose blocks are all its own."""
        window, size = self._windows[group], self._block_size
        if window is not None and self._pool is None:
            return ()
        if self._groups[group].has_states:
            return [n for n in range(first, end) if (group, (n + 1) * size) in tracked.states]
        passed = first_needed(window, tracked.num_before, size)
        return range(max(first, -(-passed // self._blocks_per_chunk)), end)

    def _blocks_at(self, tracked: Tracked, group: int, places: Sequence[int]) -> list[int]:
        per_chunk, block_ids = self._blocks_per_chunk, tracked.groups[group]
        if self._groups[group].has_states:
            return [tracked.states[group, (n + 1) * self._block_size] for n in places]
        return [block_ids[n * per_chunk + i] for n in places for i in range(per_chunk)]

    def _enter(
        self,
        request: Any,
        context: ReqContext,
        places: Mapping[OffloadKey, tuple[int, int]],
        versions: WeightVersions,
        *,
        loaded: Sequence[int] | None = None,
        held: Sequence[Any] = (),
    ) -> int:
        """Record a job of chunks, with group and number of each.

        `loaded` are the blocks that a load writes, None: a store.
        """
        job_id, request_id = next(self._job_ids), request.request_id
        ranks, deadline = set(range(self._num_ranks)), Deadline(self._job_s)
        # Now: by the end of the job the request may have ended.
        described = self._events.describe(request, places, self._fence.fingerprint(request_id))
        self._in_flight[job_id] = _InFlight(
            *(request_id, context, list(places), versions, loaded, ranks, deadline, described),
            held=held,
        )
        return job_id

    def _let_go(self) -> None:
        """Have no request wait for a job that the spec has not reported by its deadline.

        Resources of the job stay in use until every rank has reported it: blocks that a load may
        still write are held, and the manager gets no completion, so that no slot is given to
        another block. So a late report changes nothing, and a missing one costs these blocks for
        good: hence nothing is asked of the spec meanwhile.
        """
        for job_id, job in list(self._in_flight.items()):
            if not job.deadline.expired:
                return
            # No result is collected while there are no steps: every rank takes one more first.
            job.last_step = job.last_step or self._step
            if job.last_step > self._num_heard:
                continue
            what = "store" if job.loaded is None else "load"
            if job.loaded is not None and self._pool is None:
                if job.success:
                    self._counts["overdue_jobs_total"] += 1
                    logger.error(
                        "%s has not reported a load of request %r within %g s; the request waits: "
                        "the host does not let connectors hold blocks (bind_gpu_block_pool)",
                        *(self._spec_name, job.request_id, self._job_s),
                    )
                job.success = False
                continue
            # Before the workers name the request: the host then gives its blocks away.
            if job.loaded:
                job.held = [self._pool.blocks[each] for each in job.loaded]
                self._pool.touch(job.held)
            is_first = not self._overdue
            self._overdue[job_id] = self._in_flight.pop(job_id)
            if job.loaded is None and job.held:
                # It only reads, and is never looked up: it has failed, whatever it reports.
                self._pool.free_blocks(job.held)
                job.held = []
            self._next.overdue.append(job_id)
            self._counts["overdue_jobs_total"] += 1
            if (offered := self._requests.get(job.request_id)) is not None:
                offered.storing.discard(job_id)
            if is_first:
                logger.error(
                    "%s has not reported a %s of request %r within %g s (option deadline_s): what "
                    "it was to load is computed, blocks that it may still write are held, and it "
                    "is asked for nothing until it has reported; further jobs are only counted",
                    *(self._spec_name, what, job.request_id, self._job_s),
                )

    # -- steps

    def build_connector_meta(self, scheduler_output: Any) -> OffloadingMetadata:
        """Return the jobs of this step."""
        self._step += 1
        self._let_go()
        for tracked in self._progress.step(scheduler_output):
            self._offer(tracked)
        preempted = sorted(scheduler_output.preempted_req_ids or ())
        metadata, self._next = self._next, OffloadingMetadata()
        metadata.step, metadata.preempted = self._step, preempted
        new = tuple(each.req_id for each in scheduler_output.scheduled_new_reqs)
        scheduled = scheduler_output.num_scheduled_tokens
        self._times.begin(self._step, scheduled.values(), self._naming.block_size)
        context = ScheduleEndContext(new, tuple(preempted), self._times.seconds_per_token)
        self._manager.on_schedule_end(context)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the weight versions of the ranks, and the jobs that have ended."""
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, OffloadingWorkerMetadata):
            self._hear(said.versions)
            self._heard |= said.steps
            self._times.end(self._num_heard)
            for rank, outcomes in said.outcomes.items():
                for outcome in outcomes:
                    self._take(rank, outcome)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Record weights and layout of all ranks, before the first step."""
        self._hear(reported_versions(metadata))
        layouts = {
            rank: each.layout
            for rank, each in metadata.items()
            if isinstance(each, OffloadingHandshake)
        }
        if layouts:
            self._naming = self._name_blocks(layouts)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks while they are being stored; the host keeps those that are loaded."""
        self._progress.forget(request.request_id)
        self._fence.forget(request.request_id)
        offered = self._requests.pop(request.request_id, None)
        if offered is None:
            return False, None
        self._manager.on_request_finished(offered.context)
        if offered.storing:
            self._next.ended.append(request.request_id)
        return bool(offered.storing), None

    @property
    def _num_heard(self) -> int:
        """Last step that all ranks have reported."""
        return min(self._heard.get(rank, 0) for rank in range(self._num_ranks))

    def _hear(self, versions: Mapping[int, Any]) -> None:
        if not self._fence.update(versions):
            return
        self._counts["fence_changes_total"] += 1
        # A hint for the order of eviction: without it old keys are not looked up either.
        try:
            self._manager.weights_changed()
        except Exception:
            logger.exception("%s.weights_changed failed", type(self._manager).__name__)

    def _take(self, rank: int, outcome: Outcome) -> None:
        job = self._in_flight.get(outcome.job_id) or self._overdue.get(outcome.job_id)
        if job is None or rank not in job.waiting_for:
            self._counts["unknown_outcomes_total"] += 1
            return
        job.waiting_for.remove(rank)
        job.success &= outcome.success
        what = "stored" if job.loaded is None else "loaded"
        self._counts[f"{what}_bytes_total"] += outcome.nbytes
        if job.waiting_for:
            return
        if self._in_flight.pop(outcome.job_id, None) is None:
            del self._overdue[outcome.job_id]
            # No request has waited for the job, whatever its outcome on other ranks.
            job.success = False
        if job.held:
            self._pool.free_blocks(job.held)
        offered = self._requests.get(job.request_id)
        if offered is not None:
            offered.storing.discard(outcome.job_id)
        self._complete(job)

    def _complete(self, job: _InFlight) -> None:
        if job.loaded is None:
            self._counts["store_jobs_failed_total"] += not job.success
            self._manager.complete_store(job.keys, job.context, job.success)
        else:
            self._complete_load(job)
        self._events.hear(self._manager.take_events(), job.described)

    def _complete_load(self, job: _InFlight) -> None:
        self._counts["load_jobs_failed_total"] += not job.success
        if not job.success:
            suspect = job.versions is self._fence.current
            # Managers of other classes may lack this method.
            load_failed = getattr(self._manager, "load_failed", None)
            is_known = load_failed is not None and load_failed(job.keys, job.context, suspect)
            if suspect and not is_known:
                self._events.lose(job.keys)
                self._counts["fence_blocks_invalidated_total"] += self._invalidated.add(job.keys)
        self._manager.complete_load(job.keys, job.context)

    # -- the rest

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the host's block pool, to hold blocks that overdue loads may still write."""
        self._pool = gpu_block_pool
        self._events.hash_block_size = getattr(gpu_block_pool, "hash_block_size", self._block_size)

    def has_pending_push_work(self) -> bool:
        """Return whether a request may wait for a job, the spec wants more steps, or events wait.

        So a host without a request takes the step by which others learn of new weights.
        """
        return (
            bool(self._in_flight)
            or self._manager.has_pending_work()
            or self._events.is_due(self._offered_fingerprint)
        )

    def has_pending_block_frees(self) -> bool:
        """Return whether stores hold blocks; those of overdue jobs may never be free."""
        return any(job.held for job in self._in_flight.values())

    def take_events(self) -> Iterable[KVEvent]:
        """Return the events of blocks of the present weights, if the host has enabled events."""
        self._events.hear(self._manager.take_events())
        return self._events.take(self._offered_fingerprint)

    @property
    def _offered_fingerprint(self) -> str | None:
        """Weights whose blocks a look-up finds; None: the spec is not asked."""
        is_asked = self._instance.receives and not self._overdue
        return self._fence.current_fingerprint if is_asked else None

    def reset_cache(self) -> bool | None:
        """Drop all stored blocks; return False where the spec cannot."""
        return self._manager.reset_cache() is not False

    def get_stats(self) -> dict[str, float]:
        """Return the manager's numbers, and those of jobs."""
        is_open = float(self._fence.current is not None)
        held = float(sum(len(each.held) for each in self._overdue.values()))
        own = {"fence_open": is_open, "overdue_blocks_held": held, **self._counts}
        return {**self._manager.get_stats(), **own}

    def shutdown(self) -> None:
        """Shut down the manager."""
        self._manager.shutdown()


class SharedStorageScheduler(OffloadingScheduler):
    """The scheduler's side of `wtransfer.connectors.shared_storage.SharedStorageConnector`."""

    default_spec = "file"
