"""Track blocks and computed tokens of each request, step by step, on the scheduler's side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wtransfer.errors import ConnectorOptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass
class Tracked:
    """One request."""

    request: Any
    """The serving engine's own object."""
    block_ids: list[int] = field(default_factory=list)
    """Blocks in order, the last ones may not be full."""
    num_before: int = 0
    """Tokens whose KV is computed before the step."""
    num_computed: int = 0
    """Tokens whose KV is computed after the step. Speculated tokens do not count: they may be
    rejected."""


class TrackedRequests:
    """The scheduler's requests, with the blocks and computed tokens of each."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._tracked: dict[str, Tracked] = {}

    def know(self, request: Any) -> None:
        """Add a request; steps name it by its id only."""
        self._known[request.request_id] = request

    def step(self, scheduler_output: Any) -> Iterator[Tracked]:
        """Yield each request for which a step computes tokens, with its progress after the step.

        Args:
            scheduler_output: ``scheduled_new_reqs``, ``scheduled_cached_reqs``,
                ``num_scheduled_tokens``, as in vLLM, and ``scheduled_spec_decode_tokens`` if the
                host speculates.
        """
        speculated = getattr(scheduler_output, "scheduled_spec_decode_tokens", None) or {}
        computed = {
            request_id: number - len(speculated.get(request_id, ()))
            for request_id, number in scheduler_output.num_scheduled_tokens.items()
        }
        for new in scheduler_output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids)
            yield self._advance(new.req_id, new.num_computed_tokens, computed)
        cached = scheduler_output.scheduled_cached_reqs
        fields = (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens)
        for request_id, block_ids, before in zip(*fields, strict=True):
            if request_id in cached.resumed_req_ids:
                self._begin(request_id, block_ids)
            elif block_ids:
                self._tracked[request_id].block_ids += only_group(block_ids)
            yield self._advance(request_id, before, computed)

    def forget(self, request_id: str) -> None:
        """Remove a request; an unknown one is ignored."""
        self._known.pop(request_id, None)
        self._tracked.pop(request_id, None)

    def _begin(self, request_id: str, block_ids: Any) -> None:
        self._tracked[request_id] = Tracked(self._known[request_id], list(only_group(block_ids)))

    def _advance(self, request_id: str, before: int, computed: Mapping[str, int]) -> Tracked:
        tracked = self._tracked[request_id]
        tracked.num_before, tracked.num_computed = before, before + computed[request_id]
        return tracked


def only_group(block_ids: Any) -> list[int]:
    """Return the blocks of the single KV cache group.

    Args:
        block_ids: Blocks by group, as ``get_block_ids()`` returns them.

    Raises:
        ConnectorOptionError: The model has several groups.
    """
    if len(block_ids) != 1:
        raise ConnectorOptionError(
            f"this model has {len(block_ids)} KV cache groups; this connector moves one"
        )
    group: list[int] = block_ids[0]
    return group
