"""One request, as the scheduler sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from wtransfer.blocks import hash_blocks, make_offload_key, witness_blocks
from wtransfer.demo.serving.pool import BlockName

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.blocks import OffloadKey
    from wtransfer.specs.interface import ReqContext
    from wtransfer.weights import Stamps

State = Literal["waiting", "loading", "running", "finished"]


class Request:
    """A prompt, and the tokens that follow it.

    Args:
        request_id: Identity.
        prompt: Its tokens, at least one.
        max_new_tokens: How many are generated.
    """

    def __init__(self, request_id: str, prompt: list[int], max_new_tokens: int) -> None:
        if not prompt or max_new_tokens < 1:
            raise ValueError(f"request {request_id!r} has no prompt, or nothing to generate")
        self.request_id = request_id
        """Identity."""
        self.tokens = list(prompt)
        """Prompt and what was generated so far."""
        self.num_prompt = len(prompt)
        """Tokens of the prompt."""
        self.max_new_tokens = max_new_tokens
        """Tokens to generate."""
        self.state: State = "waiting"
        """Where it stands."""
        self.began = False
        """Whether anything was computed for it."""
        self.num_computed = 0
        """Positions whose keys and values are in its blocks."""
        self.num_offered = 0
        """Blocks that need not be offered to the tier any more."""
        self.offers_all = False
        """Whether the tier wants to be offered those blocks, too, that were found."""
        self.block_ids: list[int] = []
        """Its blocks, those that are not filled yet included."""
        self.context: ReqContext | None = None
        """What specs know of it; None before it was announced to one."""
        self.stamps: Stamps | None = None
        """What the ranks computed with when it was admitted; None before that."""

    @property
    def output(self) -> list[int]:
        """What was generated."""
        return self.tokens[self.num_prompt :]

    @property
    def is_done(self) -> bool:
        """Whether all was generated."""
        return len(self.tokens) >= self.num_prompt + self.max_new_tokens

    def reset(self) -> None:
        """Stand at the beginning again."""
        self.state = "waiting"
        self.num_computed = self.num_offered = 0
        self.block_ids = []
        self.context = self.stamps = None


class BlockNames:
    """How blocks are named on one host.

    Args:
        block_size: Tokens per block.
        root: What keys and values depend on besides tokens and weights.
        hash_function: Of bytes; None: the usual one.
    """

    def __init__(
        self, block_size: int, root: bytes, hash_function: Callable[[bytes], bytes] | None = None
    ) -> None:
        self._block_size = block_size
        self._root = root
        self._options = {"hash_function": hash_function} if hash_function else {}

    def of(self, tokens: list[int]) -> list[tuple[OffloadKey, bytes]]:
        """Return key and witness of every whole block of a sequence."""
        hashes = hash_blocks(tokens, self._block_size, self._root, **self._options)
        witnesses = witness_blocks(tokens, self._block_size, self._root)
        return [
            (make_offload_key(block_hash), witness)
            for block_hash, witness in zip(hashes, witnesses, strict=True)
        ]


def block_names(fingerprint: str, named: list[tuple[OffloadKey, bytes]]) -> list[BlockName]:
    """Return the names of blocks that were computed with certain weights."""
    return [BlockName(fingerprint, key, witness) for key, witness in named]
