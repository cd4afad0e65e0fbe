"""How far each request has come, as the scheduler's side of a connector follows it step by step."""

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
    """Its blocks, in order, those that are not full yet included."""
    num_before: int = 0
    """Tokens whose keys and values are there before the step."""
    num_computed: int = 0
    """Tokens whose keys and values are there once the step is done. A token that was only guessed
    is none: it may turn out to be another one."""


class Progress:
    """All requests that have blocks."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._tracked: dict[str, Tracked] = {}

    def know(self, request: Any) -> None:
        """Take note of a request, which later steps name by its identity only."""
        self._known[request.request_id] = request

    def step(self, scheduler_output: Any) -> Iterator[Tracked]:
        """Yield the requests for which a step computes something, as they are after it.

        Args:
            scheduler_output: ``scheduled_new_reqs``, ``scheduled_cached_reqs``,
                ``num_scheduled_tokens``, as vLLM has them, and if a host guesses tokens
                ``scheduled_spec_decode_tokens``.
        """
        guessed = getattr(scheduler_output, "scheduled_spec_decode_tokens", None) or {}
        computed = {
            request_id: number - len(guessed.get(request_id, ()))
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
        """Hear that a request has ended."""
        self._known.pop(request_id, None)
        self._tracked.pop(request_id, None)

    def _begin(self, request_id: str, block_ids: Any) -> None:
        self._tracked[request_id] = Tracked(self._known[request_id], list(only_group(block_ids)))

    def _advance(self, request_id: str, before: int, computed: Mapping[str, int]) -> Tracked:
        tracked = self._tracked[request_id]
        tracked.num_before, tracked.num_computed = before, before + computed[request_id]
        return tracked


def only_group(block_ids: Any) -> list[int]:
    """Return the blocks of the only KV cache group.

    Args:
        block_ids: By group, as ``get_block_ids()`` returns them.

    Raises:
        ConnectorOptionError: There are several.
    """
    if len(block_ids) != 1:
        raise ConnectorOptionError(
            f"this model has {len(block_ids)} KV cache groups; this connector moves one"
        )
    group: list[int] = block_ids[0]
    return group
