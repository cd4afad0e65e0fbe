"""A host in a process of its own, which is killed, and asked as a `Service` is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from wtransfer.testing.mini_engine.instance import Instance

if TYPE_CHECKING:
    from pathlib import Path

    from matrix_stacks import Stack

    from wtransfer.testing.mini_engine.config import EngineConfig


class ProcessService:
    """A host whose weights a trainer publishes between two requests.

    Args:
        kit: What the tests of the mini engine share.
        stack: Its connectors: no P2P.
        config: Its configuration.
        folder: Where it keeps files.
        spawn: Starts processes.
        trainer: None: it keeps the weights that it has loaded.
    """

    def __init__(  # noqa: PLR0917
        self,
        kit: Any,
        stack: Stack,
        config: EngineConfig,
        folder: Path,
        spawn: Any,
        trainer: Any,
    ) -> None:
        self.stack, self.folder, self.block_size = stack, folder, config.cache.block_size
        self.weights = SimpleNamespace(seed=config.seed)
        self._kit, self._spawn, self._trainer = kit, spawn, trainer
        self._config, self._versions = config, itertools.count()
        self._instance = Instance(config, spawn)
        if trainer is not None:
            # Before the first update its weights have a name that no other process knows.
            self._publish(config.seed)

    def ask(self, texts: list[list[int]], new_tokens: int, held: None, change: Any) -> Any:
        """Ask for one text after the other, after the weights have changed."""
        del held
        if change is not None:
            self._publish(change[0])
        answers = [self._instance.ask(text, new_tokens) for text in texts]
        expected = self._kit.references(texts, self.weights.seed, new_tokens)
        assert [each.tokens for each in answers] == expected
        requests = [
            SimpleNamespace(all_token_ids=[*text, *each.tokens], num_tokens=len(text) + new_tokens)
            for text, each in zip(texts, answers, strict=True)
        ]
        loaded = sum(each.counts.get("tokens_loaded", 0) for each in answers)
        return SimpleNamespace(requests=requests, counts={"tokens_loaded": loaded}, cut=None)

    def forget(self) -> None:
        """Leave nothing in the host's own cache."""
        self._instance.forget_cache()

    def restart(self) -> None:
        """Kill the host, and start one that has the same weights and no trainer."""
        self._instance.kill()
        self._instance.close()
        alone = replace(self._config, seed=self.weights.seed, join=None, token=None)
        self._instance = Instance(alone, self._spawn)

    def wait_for_releases(self) -> None:
        """Do nothing: nothing is handed over."""

    def num_evicted(self) -> int:
        """Return 0: there is room for all."""
        return 0

    def close(self) -> None:
        """End the host."""
        self._instance.kill()
        self._instance.close()

    def _publish(self, seed: int) -> None:
        assert self._trainer.publish(f"v{next(self._versions)}", seed).result().ok
        self.weights.seed = seed
