"""What the scheduler tells a connector about a step, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wtransfer.testing.mini_engine.request import Request

BlockIds = tuple[list[int], ...]
"""Blocks by KV cache group; this host has one."""


@dataclass(frozen=True)
class KVCacheBlock:
    """One block."""

    block_id: int
    """Its number."""


class KVCacheBlocks:
    """The blocks of a request.

    Args:
        block_ids: In order.
    """

    def __init__(self, block_ids: list[int]) -> None:
        self._block_ids = block_ids

    @property
    def blocks(self) -> tuple[list[KVCacheBlock], ...]:
        """The blocks by KV cache group; this host has one."""
        return (list(map(KVCacheBlock, self._block_ids)),)

    def get_block_ids(self) -> BlockIds:
        """Return their numbers."""
        return (list(self._block_ids),)


@dataclass
class NewRequestData:
    """A request that no step has had before."""

    req_id: str
    """Identity."""
    prompt_token_ids: list[int]
    """Its prompt."""
    block_ids: BlockIds
    """All its blocks."""
    num_computed_tokens: int
    """Tokens whose keys and values are there, or come with this step."""
    mm_features: list[Any] = field(default_factory=list)
    """This model knows of no pictures."""
    sampling_params: Any = None
    """It takes the likeliest token, whatever a user wants."""
    pooling_params: Any = None
    """It only generates."""
    lora_request: Any = None
    """It has no adapters."""
    prompt_embeds: Any = None
    """Its prompts are tokens."""


@dataclass
class CachedRequestData:
    """Requests that earlier steps have had; one entry for each in every list."""

    req_ids: list[str] = field(default_factory=list)
    """Identities."""
    resumed_req_ids: set[str] = field(default_factory=set)
    """Those among them that begin anew, and whose blocks are all new."""
    new_block_ids: list[BlockIds | None] = field(default_factory=list)
    """Blocks that were added."""
    num_computed_tokens: list[int] = field(default_factory=list)
    """Tokens whose keys and values are there."""
    num_output_tokens: list[int] = field(default_factory=list)
    """Tokens that were generated."""
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Prompt and what was generated, of those that begin anew."""
    new_token_ids: list[list[int]] = field(default_factory=list)
    """Empty, as where there is no pipeline: the workers know what they have generated."""


@dataclass
class SchedulerOutput:
    """One step."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    """Requests that no step has had before."""
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    """Other requests for which something is computed."""
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that are computed, by request."""
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that have ended since the last step."""
    preempted_req_ids: set[str] = field(default_factory=set)
    """Requests that have lost their blocks since the last step."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens that are computed."""
        return sum(self.num_scheduled_tokens.values())


class Step:
    """A step that is being planned.

    Args:
        budget: Most tokens that it computes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that it still can take."""
        self.output = SchedulerOutput()
        """What a connector hears of it."""
        self.requests: list[tuple[Request, int]] = []
        """Requests, each with the number of its tokens that are computed."""
        self.loads_first = False
        """Whether something that is loaded within the step is needed in it."""

    def begin(self, request: Request, count: int) -> None:
        """Enter a request that has just got its blocks."""
        if request.was_scheduled:
            self._add_cached(request, request.block_ids)
            cached = self.output.scheduled_cached_reqs
            cached.resumed_req_ids.add(request.request_id)
            cached.all_token_ids[request.request_id] = list(request.all_token_ids)
        else:
            request.was_scheduled = True
            blocks = KVCacheBlocks(request.block_ids).get_block_ids()
            data = (request.request_id, request.prompt_token_ids, blocks)
            new = NewRequestData(*data, request.num_computed_tokens)
            self.output.scheduled_new_reqs.append(new)
        self._take(request, count)

    def go_on(self, request: Request, count: int, new_blocks: list[int]) -> None:
        """Enter a request that runs."""
        self._add_cached(request, new_blocks)
        self._take(request, count)

    def _add_cached(self, request: Request, blocks: list[int]) -> None:
        cached = self.output.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append((list(blocks),) if blocks else None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(request.num_output_tokens)

    def _take(self, request: Request, count: int) -> None:
        self.requests.append((request, count))
        self.output.num_scheduled_tokens[request.request_id] = count
        self.budget -= count
