"""The scheduler: choice of the tokens to compute next, and of their blocks."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING

from wtransfer.connectors.interface import KVConnectorOutput
from wtransfer.connectors.naming import BlockNaming
from wtransfer.errors import ConnectorOptionError
from wtransfer.kv.groups import first_needed, longest_prefix
from wtransfer.testing.mini_engine.cache import BlockPool
from wtransfer.testing.mini_engine.contract import (
    KVCacheBlocks,
    NewRequestData,
    SchedulerOutput,
    Span,
    StepPlan,
    block_numbers,
)
from wtransfer.testing.mini_engine.serialize import deserialize, serialize
from wtransfer.weight_version import instance_fingerprint, known_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from wtransfer.connectors.interface import KVConnectorBase_V1
    from wtransfer.kv.keys import OffloadKey
    from wtransfer.testing.mini_engine.config import EngineConfig
    from wtransfer.testing.mini_engine.contract import (
        BlockIds,
        ConnectorOutput,
        Request,
        State,
        StepResult,
    )
    from wtransfer.weight_version import WeightVersion, WeightVersions


_Notices = defaultdict[str, set[int]]  # ranks by request


class Scheduler:
    """Plans steps, and processes their results.

    Requests run side by side, in the order in which they were admitted. Each step computes the next
    token of requests whose prompt is computed, and as much of the other prompts as its budget
    allows. Where blocks run out, the request that was admitted last is preempted, and begins anew
    later; the first is never preempted, so one of them always makes progress.

    A request builds on blocks of its own weight version only, and its blocks are cached only as
    long as the version has not changed. A request for which nothing was computed at a change begins
    anew.

    A request has a table of blocks for each KV cache group. Blocks that the window of a group has
    passed are released when the next step is planned. With several groups, or a window, loads
    outlast their step, and a request of which one has failed begins anew.

    Args:
        config: Configuration of the engine.
        connector: Scheduler side of the connector; None: the engine runs without one.
        hash_function: Hash of the prefix cache; None: the default of `BlockNaming`.
    """

    def __init__(
        self,
        config: EngineConfig,
        connector: KVConnectorBase_V1 | None = None,
        hash_function: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._windows = config.model.windows
        self._is_hybrid = config.is_hybrid
        self.pool = BlockPool(config.cache.num_blocks, num_reserved=int(config.is_hybrid))
        self.connector = connector
        if connector is not None:
            connector.bind_gpu_block_pool(self.pool)
        self._num_ranks = config.num_ranks
        self._block_size = config.cache.block_size
        hashing = {"hash_function": hash_function} if hash_function else {}
        self._naming = BlockNaming(self._block_size, config.model_name.encode(), **hashing)
        self._limits = config.limits
        self._fails = config.on_load_failure == "fail"
        self._versions: WeightVersions | None = None
        self._waiting: deque[Request] = deque()
        self._loading: dict[str, Request] = {}
        self._loaded: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        # Requests that have not ended, in any state.
        self._requests: dict[str, Request] = {}
        # Blocks of ended requests, by request, while the connector still reads or writes them.
        self._held: dict[str, list[int]] = {}
        # Held requests that ended while they were loaded.
        self._written: set[str] = set()
        self._ended: set[str] = set()
        self._preempted: set[str] = set()
        self._sent: _Notices = defaultdict(set)
        self._received: _Notices = defaultdict(set)
        self.counts: Counter[str] = Counter()
        """``tokens_computed``, ``tokens_cached`` (found in the prefix cache), ``tokens_loaded`` (by
        the connector), ``loads_failed``, ``steps_refused``, ``preemptions``, ``restarts``,
        ``weight_changes``, ``unknown_notices`` (duplicate notices of a rank's connector, or about
        requests that do not wait for any)."""

    @property
    def is_busy(self) -> bool:
        """True if more steps are needed."""
        if self.connector is None:
            return bool(self._requests)
        # Ended requests: the workers are told of them in the next step.
        under_way = self._requests or self._held or self._ended
        return bool(under_way) or self.connector.has_pending_push_work()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: The cache is too small for the request alone; or its identity is that of
                another request that has not ended, or still holds blocks.
        """
        request_id = request.request_id
        if request_id in self._requests or request_id in self._held:
            raise ValueError(f"request {request_id!r} is there already; give this one another name")
        # No keys and values are computed for the last token.
        per_group = self._num_blocks(request.num_prompt_tokens + request.max_new_tokens - 1)
        needed = len(self._windows) * per_group
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"request {request_id!r} needs {needed} blocks; the cache has "
                f"{self.pool.num_blocks}"
            )
        request.names = self._naming.of(request)
        if self.connector:
            # May raise: then the request must not be queued.
            self.connector.on_new_request(request)
        self._requests[request_id] = request
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request early; idempotent."""
        if request.request_id in self._requests:
            self._finish(request, "aborted")

    def close(self) -> None:
        """Shut the connector down."""
        if self.connector:
            self.connector.shutdown()

    # -- planning

    def plan(self) -> StepPlan:
        """Return the next step; `update` must follow before the next call."""
        step = _Step(self._limits.max_num_batched_tokens)
        if self._versions is not None:
            self._plan_running(step)
            # Preempted requests would only take their blocks back.
            if not self._preempted:
                self._admit_loaded(step)
                # Later requests would take the blocks that a loaded one waits for.
                if not self._loaded:
                    self._admit_waiting(step)
        output = step.output
        output.preempted_req_ids, self._preempted = self._preempted, set()
        output.finished_req_ids, self._ended = self._ended, set()
        metadata = None
        if self.connector:
            metadata = serialize(self.connector.build_connector_meta(output))
            # Events are not used here; taken in every step, as vLLM does.
            self.connector.take_events()
        versions = None if self._versions is None else list(self._versions)
        return StepPlan(versions, step.spans(), metadata, step.loads_first, output.finished_req_ids)

    def _plan_running(self, step: _Step) -> None:
        for request in list(self._running.values()):
            count = min(request.num_tokens - request.num_computed_tokens, step.budget)
            # An earlier request may have preempted this one.
            if request.request_id not in self._running or not count:
                continue
            end = request.num_computed_tokens + count
            blocks = self._grow(request, end)
            while blocks is None and self._preempt_for(request):
                blocks = self._grow(request, end)
            if blocks is not None:
                step.add_cached(request, count, blocks)

    def _preempt_for(self, request: Request) -> bool:
        """Preempt another request so that this one gets blocks; return whether it may go on.

        Loaded requests for which nothing was computed yet are preempted first, then the last
        admitted, but never the first: two requests could undo each other's work in turns.
        Where the connector holds the other blocks, the first waits for them; and every one for
        blocks that the connector releases soon.
        """
        if self.connector and self.connector.has_pending_block_frees():
            return False
        if self._loaded:
            self._requeue(self._loaded.pop(), "preemptions")
            return True
        first, last = next(iter(self._running.values())), next(reversed(self._running.values()))
        if last is not first:
            self._requeue(last, "preemptions")
        return last is not request

    def _grow(self, request: Request, end: int) -> BlockIds | None:
        """Release the blocks that a window has passed, and allocate those up to a token.

        Returns:
            The new blocks, by group; None if too few are free.
        """
        num_blocks, counts = self._num_blocks(end), []
        for table, window in zip(request.block_tables, self._windows, strict=True):
            begin = first_needed(window, request.num_computed_tokens, self._block_size)
            self.pool.release([each for each in table[:begin] if each is not None])
            table[:begin] = [None] * begin
            counts.append(max(num_blocks - len(table), 0))
        fresh = self.pool.allocate(sum(counts))
        if fresh is None:
            return None
        numbers = iter(fresh)
        added = tuple(list(itertools.islice(numbers, count)) for count in counts)
        for table, blocks in zip(request.block_tables, added, strict=True):
            table.extend(blocks)
        return added

    def _requeue(self, request: Request, counted_as: str) -> None:
        """Release a request's blocks, and make it the next to be admitted."""
        self.counts[counted_as] += 1
        request.num_preemptions += counted_as == "preemptions"
        self._running.pop(request.request_id, None)
        self._lose_blocks(request)
        self._waiting.appendleft(request)
        if request.was_scheduled:
            self._preempted.add(request.request_id)

    def _has_room(self, step: _Step) -> bool:
        return bool(step.budget) and len(self._running) < self._limits.max_num_seqs

    def _admit_loaded(self, step: _Step) -> None:
        """Run requests that have blocks already, before others get any."""
        while self._loaded and self._has_room(step):
            request = self._loaded[0]
            count = min(request.num_tokens - request.num_computed_tokens, step.budget)
            if self._grow(request, request.num_computed_tokens + count) is not None:
                self._loaded.popleft()
                self._report_blocks(request, 0)
                self._run(request, count, step)
            elif self._running or self._loading or len(self._loaded) == 1:
                return
            else:
                # The loaded requests hold all blocks among them, and none has enough.
                self._requeue(self._loaded.pop(), "preemptions")

    def _admit_waiting(self, step: _Step) -> None:
        asked_again = []
        while self._waiting and self._has_room(step):
            request = self._waiting.popleft()
            admitted = self._admit(request, step)
            if admitted is None:
                asked_again.append(request)
            elif not admitted:
                self._waiting.appendleft(request)
                break
        self._waiting.extendleft(reversed(asked_again))

    def _admit(self, request: Request, step: _Step) -> bool | None:
        """Allocate a request's first blocks.

        Returns:
            True if enough were free; None: the connector must be asked again in the next step.
        """
        assert self._versions is not None
        # Pinned before others are allocated: free blocks that are not pinned would be among them.
        num_cached = self._take_cached(request, self._versions)
        num_external: int | None = 0
        loads_later = False
        if self.connector:
            num_external, loads_later = self.connector.get_num_new_matched_tokens(
                request, num_cached
            )
        if num_external is None:
            self._lose_blocks(request)
            return None
        loads_later = loads_later and num_external > 0
        if self._is_hybrid and num_external and not loads_later:
            raise ConnectorOptionError(
                f"{num_external} tokens of request {request.request_id!r} are to be loaded within "
                "the step; with several KV cache groups, or a window, loads outlast their step: "
                "return True beside the number in get_num_new_matched_tokens"
            )
        filled = num_cached + num_external
        # At least one token is computed.
        num_computed = min(filled, request.num_tokens - 1)
        count = 0 if loads_later else min(request.num_tokens - num_computed, step.budget)
        request.num_computed_tokens, request.num_external_tokens = num_computed, num_external
        if self._grow(request, max(filled, num_computed + count)) is None:
            self._lose_blocks(request)
            return False
        request.versions = self._versions
        self.counts["tokens_cached"] += num_cached
        self._report_blocks(request, num_external)
        if loads_later:
            request.state = "loading"
            self._loading[request.request_id] = request
        else:
            step.loads_first |= num_external > 0
            self._run(request, count, step)
        return True

    def _take_cached(self, request: Request, versions: WeightVersions) -> int:
        """Give a request the blocks of its longest cached prefix; return the number of tokens."""
        size = self._block_size
        groups = range(len(self._windows))
        found = [list(map(self.pool.lookup, self._keys(request, versions, n))) for n in groups]
        # The last token is always computed: its successor is not cached.
        most = min((request.num_tokens - 1) // size, len(found[0]))
        end, _ = longest_prefix(
            self._windows, size, 0, most, lambda group, block: found[group][block] is not None
        )
        request.block_tables = [blocks[:end] for blocks in found]
        self.pool.pin(request.block_ids)
        return end * size

    def _lose_blocks(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.lose_blocks()

    def _report_blocks(self, request: Request, num_external_tokens: int) -> None:
        if self.connector is None:
            return
        blocks = KVCacheBlocks(block_numbers(request.block_tables))
        self.connector.update_state_after_alloc(request, blocks, num_external_tokens)

    def _run(self, request: Request, count: int, step: _Step) -> None:
        request.state = "running"
        self._running[request.request_id] = request
        step.add(request, count)

    def _keys(self, request: Request, versions: WeightVersions, group: int) -> list[OffloadKey]:
        assert request.names is not None
        return request.names.under(instance_fingerprint(versions), group=group)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    # -- results

    def update(self, plan: StepPlan, results: Sequence[StepResult]) -> list[Request]:
        """Process a step's results, one for each rank in order; return the requests that ended."""
        # Weights first: the other results may be of other weights than the plan.
        self._update_weights([result.version for result in results])
        outputs = [result.connector for result in results if result.connector is not None]
        ended = self._record_load_errors(outputs)
        if all(result.tokens is not None for result in results):
            for span in plan.spans:
                request = self._running.get(span.request_id)
                # Otherwise the request was aborted, restarted or rewound after the planning.
                if request is not None and request.num_computed_tokens == span.start:
                    self._advance(request, span, results[0].tokens or {})
                    ended += [request] if request.is_done else []
        else:
            self.counts["steps_refused"] += bool(plan.spans)
        # Connector last: it may have sent blocks that this step computed of a request it ended.
        return ended + self._update_connector(outputs)

    def _update_weights(self, reported: Sequence[WeightVersion | None]) -> None:
        versions = known_versions(reported)
        if versions == self._versions:
            return
        self.counts["weight_changes"] += self._versions is not None
        self._versions = versions
        self.pool.reset()
        while self._loaded:
            self._requeue(self._loaded.pop(), "restarts")
        for request in reversed(list(self._running.values())):
            if not request.wrote_blocks:
                self._requeue(request, "restarts")

    def _record_load_errors(self, outputs: Sequence[ConnectorOutput]) -> list[Request]:
        """Record blocks that could not be loaded; return the requests that failed by it."""
        bad_blocks = set().union(*(each.invalid_block_ids for each in outputs))
        in_step = [each for each in self._running.values() if each.num_external_tokens]
        for request in (*self._loading.values(), *in_step):
            request.bad_blocks = request.bad_blocks | bad_blocks.intersection(request.block_ids)
        return [each for each in in_step if not self._finish_load(each)]

    def _update_connector(self, outputs: Sequence[ConnectorOutput]) -> list[Request]:
        """Process the other reports of the connector; return the requests that failed by it."""
        if self.connector is None:
            return []
        loading = {*self._loading, *self._written}
        # A connector that pushes may have sent a request before its end: the notice counts once
        # the request has ended.
        sent = self._agreed(
            self._sent, [each.finished_sending for each in outputs], self._held, self._requests
        )
        received = self._agreed(
            self._received, [each.finished_recving for each in outputs], loading
        )
        metas = [
            deserialize(each.worker_metadata)
            for each in outputs
            if each.worker_metadata is not None
        ]
        for each in set().union(*(each.failed_recving for each in outputs)) & self._loading.keys():
            request = self._loading[each]
            request.begins_anew, request.bad_blocks = True, set(request.block_ids)
        failing = {each for each, request in self._loading.items() if request.bad_blocks}
        self.connector.update_connector_output(
            KVConnectorOutput(
                finished_sending=sent or None,
                finished_recving=received or None,
                kv_connector_worker_meta=(
                    functools.reduce(lambda one, other: one.aggregate(other), metas)
                    if metas
                    else None
                ),
                invalid_block_ids=set().union(*(each.invalid_block_ids for each in outputs)),
                failed_recving=received & failing,
            )
        )
        arrived = [self._loading.pop(each) for each in sorted(received) if each in self._loading]
        failed = [each for each in arrived if not self._finish_load(each)]
        # Either notice ends the hold: a connector names an ended request once, when it neither
        # reads nor writes.
        for request_id in received | sent:
            self._written.discard(request_id)
            self.pool.release(self._held.pop(request_id, []))
        return failed

    def _agreed(
        self,
        notices: _Notices,
        reported: Sequence[set[str]],
        expected: Collection[str],
        early: Collection[str] = (),
    ) -> set[str]:
        """Return the expected requests that every rank has named by now; each is named once.

        Duplicate and late notices are counted, and have no other effect.

        Args:
            notices: Ranks that have named a request so far.
            reported: Requests named in this step, in order of rank.
            expected: Requests that wait for this notice.
            early: Requests that may be named before they wait for it.
        """
        for rank, request_ids in enumerate(reported):
            for request_id in request_ids:
                is_known = request_id in expected or request_id in early
                is_new = is_known and rank not in notices[request_id]
                self.counts["unknown_notices"] += not is_new
                notices[request_id].add(rank)
        assert self.connector is not None
        needed = self.connector.get_finished_count() or self._num_ranks
        agreed = {
            each for each, ranks in notices.items() if len(ranks) >= needed and each in expected
        }
        for request_id in list(notices):
            is_known = request_id in expected or request_id in early
            if request_id in agreed or not is_known:
                del notices[request_id]
        return agreed

    def _finish_load(self, request: Request) -> bool:
        """Use the blocks loaded for a request; return whether the request goes on."""
        num_external, request.num_external_tokens = request.num_external_tokens, 0
        if request.versions is not self._versions:
            if request.state == "loading":
                self._requeue(request, "restarts")
            request.bad_blocks = set()
            return True
        before = request.num_computed_tokens
        if request.bad_blocks and not self._rewind(request):
            return False
        if request.begins_anew:
            self._requeue(request, "restarts")
            return True
        self.counts["tokens_loaded"] += num_external - (before - request.num_computed_tokens)
        self._cache_full_blocks(request)
        if request.state == "loading":
            request.state = "loaded"
            self._loaded.append(request)
        return True

    def _rewind(self, request: Request) -> bool:
        """Go back to the first bad block, or begin anew; return whether the request goes on."""
        bad_blocks, request.bad_blocks = request.bad_blocks, set()
        self.counts["loads_failed"] += 1
        if self._fails:
            request.error = f"{len(bad_blocks)} KV blocks could not be loaded"
            self._finish(request, "failed")
            return False
        if self._is_hybrid:
            request.begins_anew = True
            return True
        num_good = min(map(request.block_ids.index, bad_blocks))
        request.num_computed_tokens = min(request.num_computed_tokens, num_good * self._block_size)
        request.num_cached_blocks = min(request.num_cached_blocks, num_good)
        return True

    def _advance(self, request: Request, span: Span, tokens: dict[str, int]) -> None:
        request.began = request.wrote_blocks = True
        request.num_computed_tokens += len(span.tokens)
        self.counts["tokens_computed"] += len(span.tokens)
        self._cache_full_blocks(request)
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(tokens[span.request_id])
        if request.is_done:
            self._finish(request, "finished")

    def _cache_full_blocks(self, request: Request) -> None:
        """Insert new full blocks into the prefix cache, unless their weights are mixed."""
        if self._versions is None or request.versions is not self._versions:
            return
        full = request.num_computed_tokens // self._block_size
        new = slice(request.num_cached_blocks, full)
        if new.start >= full:
            return
        for group, table in enumerate(request.block_tables):
            keys = self._keys(request, self._versions, group)[new]
            for block, key in zip(table[new], keys, strict=False):
                if block is not None:
                    self.pool.insert(block, key)
        request.num_cached_blocks = full

    def _finish(self, request: Request, state: State) -> None:
        request_id = request.request_id
        for queue in (self._waiting, self._loaded):
            if request in queue:
                queue.remove(request)
        self._running.pop(request_id, None)
        del self._requests[request_id]
        self._ended.add(request_id)
        request.state = state
        is_written = self._loading.pop(request_id, None) is not None
        is_read = False
        if self.connector:
            numbers = [each for group in block_numbers(request.block_tables) for each in group]
            is_read, request.kv_transfer_params = self.connector.request_finished(request, numbers)
        if is_written:
            self._written.add(request_id)
        if is_written or is_read:
            self._held[request_id] = request.block_ids
        else:
            self.pool.release(request.block_ids)


class _Step:
    """A step that is being planned."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that the step can still take."""
        self.output = SchedulerOutput()
        self.loads_first = False
        self._requests: list[tuple[Request, int]] = []

    def add(self, request: Request, count: int) -> None:
        """Add tokens of a request whose blocks were allocated in this step."""
        if request.was_scheduled:
            cached = self.output.scheduled_cached_reqs
            cached.resumed_req_ids.add(request.request_id)
            cached.all_token_ids[request.request_id] = list(request.all_token_ids)
            self.add_cached(request, count, block_numbers(request.block_tables))
            return
        request.was_scheduled = True
        self.output.scheduled_new_reqs.append(
            NewRequestData(
                request.request_id,
                request.prompt_token_ids,
                block_numbers(request.block_tables),
                request.num_computed_tokens,
            )
        )
        self._add(request, count)

    def add_cached(self, request: Request, count: int, new_blocks: BlockIds) -> None:
        """Add tokens of a request that an earlier step had."""
        cached = self.output.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(new_blocks if any(new_blocks) else None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(request.num_output_tokens)
        self._add(request, count)

    def _add(self, request: Request, count: int) -> None:
        self._requests.append((request, count))
        self.output.num_scheduled_tokens[request.request_id] = count
        self.budget -= count

    def spans(self) -> list[Span]:
        """Return the spans to compute; called once all blocks of the step are allocated."""
        spans = []
        for request, count in self._requests:
            start = request.num_computed_tokens
            tokens = request.all_token_ids[start : start + count]
            blocks = block_numbers(request.block_tables)
            spans.append(Span(request.request_id, tokens, start, blocks))
        return spans
