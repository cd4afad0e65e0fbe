"""One request, as the scheduler sees it. Its names are vLLM's: connectors read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from wtransfer.connectors.naming import RequestNames
    from wtransfer.weights import Stamps

State = Literal["waiting", "loading", "loaded", "running", "finished", "failed", "aborted"]


class Request:
    """A prompt, and the tokens that follow it.

    Args:
        request_id: Identity.
        prompt: Its tokens, at least one.
        max_new_tokens: How many are generated.
        kv_transfer_params: What a connector is told of it.
    """

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
        """Identity."""
        self.prompt_token_ids = list(prompt)
        """Its prompt."""
        self.all_token_ids = list(prompt)
        """Prompt and what was generated so far."""
        self.max_new_tokens = max_new_tokens
        """Tokens to generate."""
        self.kv_transfer_params = kv_transfer_params
        """What a connector was told of it; when it has ended, what that says to the next one."""
        self.mm_features: list[Any] = []
        """Pictures and the like; this model knows of none."""
        self.sampling_params = self.pooling_params = None
        """What a user wants of the tokens; this model takes the likeliest."""
        self.lora_request = self.prompt_embeds = self.cache_salt = None
        """What else keys and values may depend on; those of this model do not."""
        self.state: State = "waiting"
        """Where it stands."""
        self.error: str | None = None
        """Why it failed."""
        self.began = False
        """Whether anything was computed for it."""
        self.wrote_blocks = False
        """Whether anything was computed into the blocks that it has."""
        self.was_scheduled = False
        """Whether a step has had it."""
        self.num_computed_tokens = 0
        """Positions whose keys and values are in its blocks, or come with the step at hand."""
        self.num_external_tokens = 0
        """Those among them that are being loaded."""
        self.bad_blocks: set[int] = set()
        """Those of its blocks that could not be loaded."""
        self.block_ids: list[int] = []
        """Its blocks, those that are not filled yet included."""
        self.num_named = 0
        """Those of them that the cache was told the names of."""
        self.stamps: Stamps | None = None
        """What the ranks computed with when it got its blocks; None before that."""
        self.names: RequestNames | None = None
        """How its blocks are named."""

    @property
    def num_tokens(self) -> int:
        """Tokens of it that are known."""
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were generated."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """What was generated, under vLLM's name."""
        return self.output

    @property
    def output(self) -> list[int]:
        """What was generated."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_done(self) -> bool:
        """Whether all was generated."""
        return self.num_tokens >= self.num_prompt_tokens + self.max_new_tokens

    def lose_blocks(self) -> None:
        """Have no blocks, and wait for others."""
        self.state = "waiting"
        self.num_computed_tokens = self.num_external_tokens = 0
        self.block_ids, self.bad_blocks, self.num_named = [], set(), 0
        self.wrote_blocks = False
        self.stamps = None
