"""The scheduler of the reference host: which tokens are computed next, and on which blocks."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from wtransfer.connectors.settings import load_failure_policy
from wtransfer.testing.mini_engine.messages import Span, StepPlan
from wtransfer.testing.mini_engine.schedule import Step
from wtransfer.testing.mini_engine.shape import Limits
from wtransfer.weights import instance_fingerprint, known_stamps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.blocks import OffloadKey
    from wtransfer.connectors.naming import BlockNaming
    from wtransfer.testing.mini_engine.messages import StepResult
    from wtransfer.testing.mini_engine.pool import BlockPool
    from wtransfer.testing.mini_engine.request import Request, State
    from wtransfer.testing.mini_engine.scheduler_link import SchedulerLink
    from wtransfer.weights import Stamps, WeightsStamp


class Scheduler:
    """Plans steps, and takes their results.

    Requests run side by side, in the order in which they were admitted. Each step computes the next
    token of those that have all of their prompt, and as much of the other prompts as it can hold.
    Where blocks run out, the last that was admitted gives its own up, and begins anew later; the
    first never does, so that whatever comes, one of them is nearer to its end.

    A request builds on blocks of its own weights only, and leaves blocks only as long as these have
    not changed. A request for which nothing was computed when they change begins anew.

    Args:
        pool: The blocks of the cache.
        naming: How blocks are named.
        limits: How much is served at once.
        link: The connector; None: there is none.
        on_load_failure: ``recompute`` or ``fail``: what becomes of a request whose blocks could not
            be loaded.
    """

    def __init__(
        self,
        pool: BlockPool,
        naming: BlockNaming,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        link: SchedulerLink | None = None,
        on_load_failure: str = "recompute",
    ) -> None:
        self.pool = pool
        """The blocks of the cache."""
        self.link = link
        """The connector."""
        self._naming = naming
        self._block_size = naming.block_size
        self._limits = limits
        self._fails = load_failure_policy(on_load_failure) == "fail"
        self._stamps: Stamps | None = None
        self._waiting: deque[Request] = deque()
        self._loading: dict[str, Request] = {}
        self._loaded: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        # All that have not ended.
        self._requests: dict[str, Request] = {}
        # Blocks of requests that have ended: by request, while the connector sends from them, or
        # still writes into them.
        self._held: dict[str, list[int]] = {}
        # Those among them that ended while they were loaded.
        self._written: set[str] = set()
        self._ended: set[str] = set()
        self._preempted: set[str] = set()
        self.counts: Counter[str] = Counter()
        """What was done so far: ``tokens_computed``, ``tokens_cached`` (found in the cache),
        ``tokens_loaded`` (by the connector), ``loads_failed``, ``steps_refused``, ``preemptions``,
        ``restarts``, ``weight_changes``, ``late_errors`` (of loads that had been taken for good),
        ``unknown_notices`` (of the connector, about requests that nobody waits for)."""

    @property
    def is_busy(self) -> bool:
        """Whether more steps are needed."""
        # The last of them: of ends that the workers have not heard of.
        requests = self._requests or self._held or (self.link and self._ended)
        return bool(requests or (self.link and self.link.connector.has_pending_push_work()))

    def add(self, request: Request) -> None:
        """Take a request.

        Raises:
            ValueError: The cache is too small for it, even if it were alone. Or another one, which
                may have ended but still has blocks, has its identity.
        """
        request_id = request.request_id
        if request_id in self._requests or request_id in self._held:
            raise ValueError(f"request {request_id!r} is there already; give this one another name")
        # What follows the last token is not computed.
        needed = self._blocks_for(request.num_prompt_tokens + request.max_new_tokens - 1)
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"request {request_id!r} needs {needed} blocks; the cache has "
                f"{self.pool.num_blocks}"
            )
        request.names = self._naming.of(request)
        if self.link:
            # It may refuse the request: then there is none.
            self.link.connector.on_new_request(request)
        self._requests[request_id] = request
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request before its time; one that has ended stays as it is."""
        if request.request_id in self._requests:
            self._end(request, "aborted")

    def close(self) -> None:
        """Let go of the connector."""
        if self.link:
            self.link.connector.shutdown()

    # -- planning

    def plan(self) -> StepPlan:
        """Return the next step; each one is followed by its `update`."""
        step = Step(self._limits.max_num_batched_tokens)
        if self._stamps is not None:
            self._go_on(step)
            # Who has just lost its blocks would only take them back.
            if not self._preempted:
                self._admit_loaded(step)
                # Else those that come later would take what one that is loaded waits for.
                if not self._loaded:
                    self._admit(step)
        step.output.preempted_req_ids, self._preempted = self._preempted, set()
        step.output.finished_req_ids, self._ended = self._ended, set()
        return StepPlan(
            None if self._stamps is None else list(self._stamps),
            [_span(request, count) for request, count in step.requests],
            self.link.metadata(step.output) if self.link else None,
            step.loads_first,
            step.output.finished_req_ids,
        )

    def _go_on(self, step: Step) -> None:
        for request in list(self._running.values()):
            count = min(request.num_tokens - request.num_computed_tokens, step.budget)
            if request.request_id not in self._running or not count:
                continue
            blocks = self._grow(request, count)
            while blocks is None and self._make_room(request):
                blocks = self._grow(request, count)
            if blocks is not None:
                step.go_on(request, count, blocks)

    def _make_room(self, request: Request) -> bool:
        """Take blocks from others, so that a request may go on; return whether any were taken.

        Those for which nothing was computed yet give theirs up first, then those that were admitted
        last. The first of all never does, else two could undo in turns what the other has done:
        where blocks are in the hands of the connector, it waits for them.
        """
        if self._loaded:
            self._preempt(self._loaded.pop())
            return True
        first, last = next(iter(self._running.values())), next(reversed(self._running.values()))
        if last is not first:
            self._preempt(last)
        return last is not request

    def _grow(self, request: Request, count: int) -> list[int] | None:
        """Return the blocks that a request gets for more tokens; None if there are too few."""
        needed = self._blocks_for(request.num_computed_tokens + count) - len(request.block_ids)
        blocks = self.pool.take(max(needed, 0))
        if blocks is not None:
            request.block_ids += blocks
        return blocks

    def _preempt(self, request: Request) -> None:
        self.counts["preemptions"] += 1
        self._put_back(request)

    def _put_back(self, request: Request) -> None:
        """Let a request begin anew, and be the next to do so."""
        self._running.pop(request.request_id, None)
        self.pool.release(request.block_ids)
        request.lose_blocks()
        self._waiting.appendleft(request)
        if request.was_scheduled:
            self._preempted.add(request.request_id)

    def _has_room(self, step: Step) -> bool:
        return bool(step.budget) and len(self._running) < self._limits.max_num_seqs

    def _admit_loaded(self, step: Step) -> None:
        """Let requests run that have blocks already, before others get any."""
        while self._loaded and self._has_room(step):
            request = self._loaded[0]
            count = min(request.num_tokens - request.num_computed_tokens, step.budget)
            if self._grow(request, count) is not None:
                self._loaded.popleft()
                if self.link:
                    self.link.allocated(request, 0)
                self._run(request, count, step)
            elif self._running or self._loading or len(self._loaded) == 1:
                return
            else:
                # They have all blocks among them, and none has enough.
                self._preempt(self._loaded.pop())

    def _admit(self, step: Step) -> None:
        asked_again = []
        while self._waiting and self._has_room(step):
            request = self._waiting.popleft()
            answer = self._begin(request, step)
            if answer is None:
                asked_again.append(request)
            elif not answer:
                self._waiting.appendleft(request)
                break
        self._waiting.extendleft(reversed(asked_again))

    def _begin(self, request: Request, step: Step) -> bool | None:
        """Give a request its first blocks.

        Returns:
            Whether there were enough; None: the connector must be asked again.
        """
        found = self._found(request)
        # Before others are taken: nobody holds these, and they would be among them.
        self.pool.hold(found)
        num_found = len(found) * self._block_size
        num_external, outlasts = self.link.matched(request, num_found) if self.link else (0, False)
        if num_external is None:
            self.pool.release(found)
            return None
        filled = num_found + num_external
        # The last token is computed in any case.
        there = min(filled, request.num_tokens - 1)
        later = bool(num_external) and outlasts
        count = 0 if later else min(request.num_tokens - there, step.budget)
        fresh = self.pool.take(self._blocks_for(max(filled, there + count)) - len(found))
        if fresh is None:
            self.pool.release(found)
            return False
        request.stamps = self._stamps
        request.block_ids = found + fresh
        request.num_computed_tokens, request.num_external_tokens = there, num_external
        self.counts["tokens_cached"] += num_found
        if self.link:
            self.link.allocated(request, num_external)
        if later:
            request.state = "loading"
            self._loading[request.request_id] = request
        else:
            step.loads_first |= bool(num_external)
            self._run(request, count, step)
        return True

    def _found(self, request: Request) -> list[int]:
        """Return the blocks of the cache with which a request can begin."""
        assert self._stamps is not None
        # The last token is always computed: what follows it is not kept.
        most = (request.num_tokens - 1) // self._block_size
        return self.pool.find(self._names(request, self._stamps)[:most])

    def _names(self, request: Request, stamps: Stamps) -> list[OffloadKey]:
        assert request.names is not None
        return request.names.under(instance_fingerprint(stamps))

    def _run(self, request: Request, count: int, step: Step) -> None:
        request.state = "running"
        self._running[request.request_id] = request
        step.begin(request, count)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    # -- results

    def update(self, plan: StepPlan, results: Sequence[StepResult]) -> list[Request]:
        """Take what came of a step, one result for each rank in order; return what has ended."""
        # First: what else the ranks say may be of other weights than this side believed.
        self._learn([result.stamp for result in results])
        ended = self._take_errors(results)
        if all(result.executed for result in results):
            tokens = results[0].tokens
            spans = [each for each in plan.spans if self._stands(each)]
            ended += [each for span in spans if (each := self._take(span, tokens)).is_done]
        else:
            self.counts["steps_refused"] += bool(plan.spans)
        # Last: the connector may have sent what the step computed of a request that it ended.
        return ended + self._hear(results)

    def _stands(self, span: Span) -> bool:
        """Return whether a span's request is still where it was when the step was planned."""
        request = self._running.get(span.request_id)
        return request is not None and request.num_computed_tokens == span.start

    def _learn(self, said: Sequence[WeightsStamp | None]) -> None:
        stamps = known_stamps(said)
        if stamps == self._stamps:
            return
        self.counts["weight_changes"] += self._stamps is not None
        self._stamps = stamps
        self.pool.forget_all()
        while self._loaded:
            self._restart(self._loaded.pop())
        for request in reversed(list(self._running.values())):
            if not request.wrote_blocks:
                self._restart(request)

    def _restart(self, request: Request) -> None:
        self.counts["restarts"] += 1
        self._put_back(request)

    def _take_errors(self, results: Sequence[StepResult]) -> list[Request]:
        """Take which blocks could not be loaded; return requests that have failed by it."""
        said = [result.said for result in results if result.said is not None]
        bad_blocks = set().union(*(each.invalid_block_ids for each in said))
        within = [each for each in self._running.values() if each.num_external_tokens]
        for request in (*self._loading.values(), *within):
            request.bad_blocks = request.bad_blocks | bad_blocks.intersection(request.block_ids)
        failed = self._distrust(bad_blocks) if bad_blocks else []
        return failed + [each for each in within if not self._take_load(each)]

    def _distrust(self, bad_blocks: set[int]) -> list[Request]:
        """Take errors that come late, of blocks that were taken for good; return as above."""
        waited_for = [each for each in self._running.values() if each.num_external_tokens]
        owners = [each.block_ids for each in (*self._loading.values(), *waited_for)]
        late = bad_blocks.difference(*owners, *self._held.values())
        built = [
            each
            for each in (*self._running.values(), *self._loaded)
            if late.intersection(each.block_ids)
        ]
        if not built and not self.pool.knows_any(late):
            return []
        self.counts["late_errors"] += 1
        # Others may stand on them under names that are right.
        self.pool.forget_all()
        for request in built:
            request.bad_blocks = late.intersection(request.block_ids)
        return [each for each in built if not self._rewind(each)]

    def _hear(self, results: Sequence[StepResult]) -> list[Request]:
        """Take what else the connector says; return requests that have failed by it."""
        if self.link is None:
            return []
        heard = self.link.hear(
            [result.said for result in results],
            running=self._requests,
            held=self._held,
            loading={*self._loading, *self._written},
            failing=[each for each, request in self._loading.items() if request.bad_blocks],
        )
        self.counts["unknown_notices"] = self.link.num_unknown
        received = heard.finished_recving or set()
        arrived = [self._loading.pop(each) for each in sorted(received) if each in self._loading]
        failed = [each for each in arrived if not self._take_load(each)]
        # Whichever comes: a connector names a request that has ended once, when it is done with it.
        for request_id in received | (heard.finished_sending or set()):
            self._written.discard(request_id)
            self.pool.release(self._held.pop(request_id, []))
        return failed

    def _take_load(self, request: Request) -> bool:
        """Take what was loaded for a request; return whether it goes on."""
        num_external, request.num_external_tokens = request.num_external_tokens, 0
        if request.stamps is not self._stamps:
            if request.state == "loading":
                self._restart(request)
            request.bad_blocks = set()
            return True
        before = request.num_computed_tokens
        if request.bad_blocks and not self._rewind(request):
            return False
        self.counts["tokens_loaded"] += num_external - (before - request.num_computed_tokens)
        self._name(request)
        if request.state == "loading":
            request.state = "loaded"
            self._loaded.append(request)
        return True

    def _rewind(self, request: Request) -> bool:
        """Compute from the first block that could not be loaded on; return whether it goes on."""
        bad_blocks, request.bad_blocks = request.bad_blocks, set()
        self.counts["loads_failed"] += 1
        if self._fails:
            request.error = f"{len(bad_blocks)} KV blocks could not be loaded"
            self._end(request, "failed")
            return False
        # As if nobody had ever had them, nor what builds on them.
        good = min(map(request.block_ids.index, bad_blocks)) * self._block_size
        request.num_computed_tokens = min(request.num_computed_tokens, good)
        request.num_named = min(request.num_named, good // self._block_size)
        return True

    def _take(self, span: Span, tokens: dict[str, int]) -> Request:
        request = self._running[span.request_id]
        request.began = request.wrote_blocks = True
        request.num_computed_tokens = span.start + len(span.tokens)
        self.counts["tokens_computed"] += len(span.tokens)
        self._name(request)
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(tokens[span.request_id])
        if request.is_done:
            self._end(request, "finished")
        return request

    def _name(self, request: Request) -> None:
        """Let the cache know what the full blocks of a request contain, unless it is mixed.

        The cache is this host's own, so it is for the host to see that the weights are those that
        the request began with. Connectors have their fence.
        """
        if self._stamps is None or request.stamps is not self._stamps:
            return
        full = request.num_computed_tokens // self._block_size
        new = slice(request.num_named, full)
        if new.start >= full:
            return
        names = self._names(request, self._stamps)
        for block, name in zip(request.block_ids[new], names[new], strict=False):
            self.pool.name(block, name)
        request.num_named = full

    def _end(self, request: Request, state: State) -> None:
        request_id = request.request_id
        for queue in (self._waiting, self._loaded):
            if request in queue:
                queue.remove(request)
        self._running.pop(request_id, None)
        del self._requests[request_id]
        self._ended.add(request_id)
        request.state = state
        is_written = self._loading.pop(request_id, None) is not None
        is_read = self.link is not None and self.link.finished(request)
        if is_written:
            self._written.add(request_id)
        if is_written or is_read:
            self._held[request_id] = request.block_ids
        else:
            self.pool.release(request.block_ids)


def _span(request: Request, count: int) -> Span:
    start = request.num_computed_tokens
    tokens = request.all_token_ids[start : start + count]
    return Span(request.request_id, tokens, start, list(request.block_ids))
