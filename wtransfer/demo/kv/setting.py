"""What the instances of the story are, and what they are asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, ModelShape

PREFILL, DECODE, FRESH = "prefill", "decode", "fresh"
"""Names of the instances. The last one has no connector: it computes everything itself."""
ROLES = {PREFILL: "kv_producer", DECODE: "kv_consumer"}
"""What each is for the connector."""
BLOCK_SIZE = 16
"""Tokens per block."""
SHELF_NBYTES = 64 << 20
"""Memory for what waits to be fetched: enough for all prompts."""
_MOST_AFTER = 256  # tokens of a question and its answer
_MODEL = ModelShape(num_layers=4, width=128, num_heads=4, num_kv_heads=2)
_TOPIC = "specialnames"
_ENDS = (
    "When is __del__ called?",
    "What does __hash__ return?",
    "Which method makes an instance callable?",
    "What is a descriptor?",
    "How are classes made?",
    "What does __slots__ save?",
    "When is __getattr__ called, and when __getattribute__?",
)


def usual_options(connector: str, folder: str) -> dict[str, Any]:
    """Return what connectors that need to be told something are told.

    Args:
        connector: Its name.
        folder: Of this run.
    """
    known: dict[str, dict[str, Any]] = {
        "SharedMemoryConnector": {"shelf_bytes": SHELF_NBYTES},
        "SharedStorageConnector": {"shared_storage_path": folder},
    }
    return known.get(connector, {})


@dataclass(frozen=True)
class KvSetting:
    """All that the story depends on."""

    connector: str = "SharedMemoryConnector"
    """What brings the KV cache."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its options; what is not said of those that are known here is as `usual_options` has it."""
    num_document_tokens: int = 2000
    """Tokens that all prompts have in common; a token is a byte."""
    num_new_tokens: int = 8
    """Tokens of an answer."""
    model: ModelShape = _MODEL
    """Sizes of the model; its weights are random."""

    @property
    def num_shared(self) -> int:
        """Those among them that fill whole blocks."""
        return self.num_document_tokens // BLOCK_SIZE * BLOCK_SIZE

    def prompt(self, number: int) -> list[int]:
        """Return one of the prompts: the document, and a question."""
        document = topics[_TOPIC].encode()[: self.num_document_tokens]
        return list(document + f"\n\nQuestion {number}: {_ENDS[number % len(_ENDS)]}\n".encode())

    def host(self, name: str, folder: str) -> EngineConfig:
        """Return what one of the instances is.

        Args:
            name: Its name.
            folder: Of this run.
        """
        num_blocks = -(-(self.num_document_tokens + _MOST_AFTER) // BLOCK_SIZE)
        cache = CacheShape(BLOCK_SIZE, 2 * num_blocks)
        if name == FRESH:
            return EngineConfig(self.model, cache, engine_id=name)
        return EngineConfig(
            self.model,
            cache,
            connector=self.connector,
            options={**usual_options(self.connector, folder), **self.options},
            role=ROLES[name],
            engine_id=name,
        )
