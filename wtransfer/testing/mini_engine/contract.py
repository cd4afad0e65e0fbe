"""Requests and steps, as scheduler, ranks and connectors exchange them.

The first part has vLLM's names, which connectors read; the second part travels between scheduler
and ranks, as plain data also where they share a process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from wtransfer.weight_version import WeightVersion  # noqa: TC001  (msgspec reads it)

if TYPE_CHECKING:
    import torch

    from wtransfer.connectors.naming import RequestNames
    from wtransfer.weight_version import WeightVersions

State = Literal["waiting", "loading", "loaded", "running", "finished", "failed", "aborted"]
OVER = ("finished", "failed", "aborted")
"""States in which a request ends."""
BlockIds = tuple[list[int], ...]
"""Blocks by KV cache group."""
BlockTables = list[list[int | None]]
"""Blocks of a request in order, by KV cache group; None: the group's window has passed it."""
NULL_BLOCK = 0
"""Number that stands for passed blocks, as in vLLM; where there is a window, no request has it."""


def block_numbers(tables: BlockTables) -> BlockIds:
    """Return the blocks as connectors and ranks get them: numbers only."""
    return tuple([NULL_BLOCK if each is None else each for each in table] for table in tables)


class Request:
    """A prompt, and the tokens that follow it.

    Args:
        request_id: Identity.
        prompt: Tokens, at least one.
        max_new_tokens: Number of tokens to generate.
        kv_transfer_params: Parameters for the connector.
    """

    # Further attributes that connectors of vLLM read: this model has no adapters and no media, and
    # takes the most likely token.
    sampling_params = pooling_params = lora_request = prompt_embeds = None
    cache_salt: str | None = None

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        max_new_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        if not prompt or max_new_tokens < 1:
            raise ValueError(f"request {request_id!r} has no prompt, or nothing to generate")
        self.request_id = request_id
        self.prompt_token_ids = list(prompt)
        self.all_token_ids = list(prompt)
        """Prompt and generated tokens."""
        self.max_new_tokens = max_new_tokens
        self.kv_transfer_params = kv_transfer_params
        """Parameters for the connector; after the end, its parameters for the next instance."""
        self.mm_features: list[Any] = []
        self.state: State = "waiting"
        self.error: str | None = None
        """Cause of the failure."""
        self.began = False
        """True once a step has computed anything for the request."""
        self.wrote_blocks = False
        """True once a step has computed anything into its present blocks."""
        self.was_scheduled = False
        """True once a step had the request: connectors are told of it as new only once."""
        self.num_computed_tokens = 0
        """Positions whose keys and values are in its blocks, or come with the present step."""
        self.num_external_tokens = 0
        """Part of `num_computed_tokens` that is being loaded."""
        self.bad_blocks: set[int] = set()
        """Blocks of the request that could not be loaded."""
        self.begins_anew = False
        """True if bytes may still arrive in its blocks once its load is over."""
        self.block_tables: BlockTables = []
        self.num_preemptions = 0
        """Times that it has lost its blocks to another request, under vLLM's name."""
        self.num_cached_blocks = 0
        """Blocks that the prefix cache has the keys of."""
        self.versions: WeightVersions | None = None
        """Weight versions of the ranks when its blocks were allocated; None before that."""
        self.names: RequestNames | None = None
        """Keys of its blocks."""

    @property
    def block_ids(self) -> list[int]:
        """Blocks that the request has, of all groups."""
        return [each for table in self.block_tables for each in table if each is not None]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, under vLLM's name."""
        return self.all_token_ids[self.num_prompt_tokens :]

    output = output_token_ids

    @property
    def is_done(self) -> bool:
        """True if all tokens were generated."""
        return self.num_output_tokens >= self.max_new_tokens

    def lose_blocks(self) -> None:
        """Wait for other blocks; the present ones were released."""
        self.state = "waiting"
        self.num_computed_tokens = self.num_external_tokens = self.num_cached_blocks = 0
        self.block_tables, self.bad_blocks = [], set()
        self.wrote_blocks = self.begins_anew = False
        self.versions = None


@dataclass(frozen=True)
class KVCacheBlock:
    """One block."""

    block_id: int


class KVCacheBlocks:
    """The blocks of a request."""

    def __init__(self, block_ids: BlockIds) -> None:
        self._block_ids = block_ids

    @property
    def blocks(self) -> tuple[list[KVCacheBlock], ...]:
        """The blocks by KV cache group."""
        return tuple(list(map(KVCacheBlock, group)) for group in self._block_ids)

    def get_block_ids(self) -> BlockIds:
        """Return their numbers by KV cache group."""
        return tuple(map(list, self._block_ids))


@dataclass
class NewRequestData:
    """A request that no earlier step had."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: BlockIds
    num_computed_tokens: int
    """Tokens whose keys and values are in the cache, or come with this step."""
    mm_features: list[Any] = field(default_factory=list)
    sampling_params: Any = None
    pooling_params: Any = None
    lora_request: Any = None
    prompt_embeds: Any = None


@dataclass
class CachedRequestData:
    """Requests that earlier steps had; every list has one entry for each."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    """Requests that begin anew after a preemption: their blocks are all new."""
    new_block_ids: list[BlockIds | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Prompt and generated tokens of requests that begin anew."""
    new_token_ids: list[list[int]] = field(default_factory=list)
    """Empty, as where there is no pipeline: the workers have generated the tokens themselves."""


@dataclass
class SchedulerOutput:
    """One step, as a connector's scheduler side is told of it."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that have ended since the last step."""
    preempted_req_ids: set[str] = field(default_factory=set)
    """Requests that have lost their blocks since the last step."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_scheduled_tokens.values())


@dataclass
class AttentionLayer:
    """A layer of the model that has a cache."""

    kv_cache: torch.Tensor
    """Its cache; dim 0 counts blocks."""


@dataclass
class ForwardContext:
    """A forward pass, as a connector's worker side is told of it."""

    attn_metadata: Any
    """The spans that are computed."""
    no_compile_layers: dict[str, AttentionLayer]
    """Layers by name."""


# -- between scheduler and ranks


class Span(msgspec.Struct, frozen=True):
    """Consecutive tokens of one request that a step computes."""

    request_id: str
    tokens: list[int]
    start: int
    """Position of the first token."""
    block_ids: BlockIds
    """Complete lists of the request's blocks, in order, by KV cache group."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step, the same for all ranks."""

    versions: list[WeightVersion] | None = None
    """Weight version that each rank must have: the blocks that the spans build on were computed
    with it. None: not known yet, and there are no spans."""
    spans: list[Span] = []
    connector_metadata: Any = None
    """Metadata of the connector's scheduler side, serialized; None without a connector."""
    loads_first: bool = False
    """True if the spans need blocks that the connector loads in this step."""
    finished_req_ids: set[str] = set()
    """Requests that have ended since the last step."""


class ConnectorOutput(msgspec.Struct, frozen=True):
    """Output of one rank's connector for a step."""

    finished_sending: set[str] = set()
    finished_recving: set[str] = set()
    failed_recving: set[str] = set()
    """Received requests that begin anew in other blocks."""
    invalid_block_ids: set[int] = set()
    """Blocks that could not be loaded."""
    worker_metadata: Any = None
    """Metadata for the connector's scheduler side, serialized."""


class StepResult(msgspec.Struct, frozen=True):
    """Result of a step on one rank."""

    version: WeightVersion | None
    """Weight version of the rank; None: it holds none to serve from, and nothing was computed."""
    tokens: dict[str, int] | None
    """The token that follows each span. None: the step was refused, and nothing of the spans was
    written that counts."""
    connector: ConnectorOutput | None = None
    """None without a connector."""
