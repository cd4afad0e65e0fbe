"""Everything that was seen in one run of the story."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One prompt, answered by the decode instance, and by the one that computes all of it."""

    number: int
    """Which, from 1."""
    prefill: str
    """What the prefill instance was: ``alive``, ``killed`` once it had computed the prompt, or
    ``gone``."""
    num_prompt: int
    """Tokens of the prompt."""
    num_loaded: int
    """Those whose keys and values came through the connector."""
    num_cached: int
    """Those that the decode instance had still in its own cache."""
    nbytes: int
    """Bytes of what was loaded."""
    prefill_s: float | None
    """Seconds until the prefill instance had computed what it did not know yet."""
    first_token_s: float | None
    """Seconds from there to the first token of the decode instance."""
    load_s: float | None
    """Seconds of that in which it waited for keys and values."""
    memcpy_s: float | None
    """Seconds of a plain copy of as many bytes, measured beside it."""
    fresh_s: float | None
    """Seconds to the first token where all is computed."""
    tokens: list[int]
    """The answer."""
    expected: list[int]
    """The answer where all was computed."""
    num_expected_computed: int
    """Prompt tokens that were computed there."""

    @property
    def num_recomputed(self) -> int:
        """Tokens of the prompt that the decode instance has computed."""
        return self.num_prompt - self.num_loaded - self.num_cached

    @property
    def is_same(self) -> bool:
        """Whether the answer is right."""
        return bool(self.tokens) and self.tokens == self.expected

    @property
    def memcpy_share(self) -> float | None:
        """How near the load comes to a plain copy; 1 is as fast."""
        return self.memcpy_s / self.load_s if self.memcpy_s and self.load_s else None


@dataclass
class KvStory:
    """Collects; judges nothing."""

    rows: list[Row] = field(default_factory=list)
    """The prompts, in order."""
    events: list[str] = field(default_factory=list)
    """What happened beside them, in words."""
    exits: dict[str, list[int]] = field(default_factory=dict)
    """Instance -> exit status of each of its processes that were not killed."""
