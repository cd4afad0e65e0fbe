"""Track blocks and computed tokens of each request, step by step, on the scheduler's side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wtransfer.errors import ConnectorOptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass
class Tracked:
    """One request."""

    request: Any
    """The serving engine's own object."""
    groups: list[list[int]] = field(default_factory=list)
    """Blocks of each KV cache group in order, the last ones may not be full. Where the group has a
    window, blocks that it has passed are others' by now."""
    num_before: int = 0
    """Tokens whose KV is computed before the step."""
    num_computed: int = 0
    """Tokens whose KV is computed after the step. Speculated tokens do not count: they may be
    rejected."""
    states: dict[tuple[int, int], int] = field(default_factory=dict)
    """Blocks that hold a state after the step, by group and number of the tokens before it."""

    @property
    def block_ids(self) -> list[int]:
        """Blocks of the single KV cache group."""
        return only_group(self.groups)


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
                ``num_scheduled_tokens``, as in vLLM; ``scheduled_spec_decode_tokens`` if the host
                speculates; ``kv_connector_block_state`` if there are groups with states.
        """
        of_blocks = getattr(scheduler_output, "kv_connector_block_state", None)
        states = getattr(of_blocks, "boundary_state_offloads", None) or {}
        speculated = getattr(scheduler_output, "scheduled_spec_decode_tokens", None) or {}
        computed = {
            request_id: number - len(speculated.get(request_id, ()))
            for request_id, number in scheduler_output.num_scheduled_tokens.items()
        }
        for new in scheduler_output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids)
            yield self._advance(new.req_id, new.num_computed_tokens, computed, states)
        cached = scheduler_output.scheduled_cached_reqs
        fields = (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens)
        for request_id, block_ids, before in zip(*fields, strict=True):
            if request_id in cached.resumed_req_ids:
                self._begin(request_id, block_ids)
            elif block_ids:
                for known, added in zip(self._tracked[request_id].groups, block_ids, strict=True):
                    known.extend(added)
            yield self._advance(request_id, before, computed, states)

    def forget(self, request_id: str) -> None:
        """Remove a request; an unknown one is ignored."""
        self._known.pop(request_id, None)
        self._tracked.pop(request_id, None)

    def _begin(self, request_id: str, block_ids: Any) -> None:
        groups = [list(group) for group in block_ids]
        self._tracked[request_id] = Tracked(self._known[request_id], groups)

    def _advance(
        self,
        request_id: str,
        before: int,
        computed: Mapping[str, int],
        states: Mapping[str, Sequence[tuple[int, int, int]]],
    ) -> Tracked:
        tracked = self._tracked[request_id]
        tracked.states = {
            (group, num_tokens): block for group, block, num_tokens in states.get(request_id, ())
        }
        tracked.num_before, tracked.num_computed = before, before + computed[request_id]
        return tracked


def only_group(block_ids: Any) -> list[int]:
    """Return the blocks of the single KV cache group.

    Args:
        block_ids: Blocks by group, as ``get_block_ids()`` returns them.

    Raises:
        ConnectorOptionError: The model has several groups.
    """
    check_groups(block_ids, 1)
    group: list[int] = block_ids[0]
    return group


def check_groups(block_ids: Any, expected: int) -> None:
    """Check the number of KV cache groups.

    Args:
        block_ids: Blocks by group, as ``get_block_ids()`` returns them.
        expected: Number of groups that the connector was made for.

    Raises:
        ConnectorOptionError: The model has another number of groups.
    """
    if len(block_ids) != expected:
        moved = "one" if expected == 1 else f"the {expected} of its KVCacheConfig"
        raise ConnectorOptionError(
            f"this model has {len(block_ids)} KV cache groups; this connector moves {moved}"
        )
