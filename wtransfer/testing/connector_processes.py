"""Tests of the connector kit: its sides in processes of their own, as they are where it matters."""

from __future__ import annotations

import atexit
import contextlib
import functools
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from wtransfer.testing.connector_kit import ConnectorKit
from wtransfer.testing.connector_site import NEW_TOKENS
from wtransfer.testing.connector_tokens import SIX_HEADS
from wtransfer.testing.mini_engine.config import EngineConfig
from wtransfer.testing.mini_engine.instance import MODULES, Instance
from wtransfer.testing.mini_engine.reference import reference_output, some_prompts
from wtransfer.transport.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from wtransfer.testing.mini_engine.instance import Answer


class ProcessTests(ConnectorKit):
    """Scheduler, ranks and instances share nothing but what the connector has."""

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[..., Instance]]:
        """Starts instances that end with the test: by name, number of ranks, seed of weights."""
        if not self.in_processes:
            pytest.skip("in_processes is not set: other processes do not find the connector")
        settings = self._settings(EngineConfig(model=SIX_HEADS), tmp_path / "kept")
        with contextlib.ExitStack() as stack:

            def start(name: str, num_ranks: int, seed: int = 0) -> Instance:
                named = msgspec.structs.replace(
                    settings, engine_id=name, num_ranks=num_ranks, seed=seed
                )
                return stack.enter_context(Instance(named, _zygote().spawn))

            yield start

    def test_ranks_may_be_processes(self, start: Callable[..., Instance]) -> None:
        """Each side has only what it is told."""
        leaver = start("leaver", 2)
        finder = start("finder", 2) if self._are_two() else leaver
        num_loaded = 0
        for prompt in some_prompts(2):
            left = self._left(leaver, prompt)
            finder.forget_cache()
            found = finder.ask(prompt, NEW_TOKENS, _params(left), self.deadline_s)
            _check(prompt, found)
            num_loaded += found.counts["tokens_loaded"]
        assert num_loaded > 0

    def test_an_instance_that_was_killed_is_not_waited_for(
        self, start: Callable[..., Instance]
    ) -> None:
        """Whatever it had is a miss, if it has gone with it (FAULTS 27)."""
        if not self._are_two():
            pytest.skip("nobody finds what another instance has left")
        leaver, finder = start("leaver", 1), start("finder", 1)
        prompts = some_prompts(2)
        left = [self._left(leaver, prompt) for prompt in prompts]
        # The one is known to the other by now, the second request only by hearsay.
        finder.ask(prompts[0], NEW_TOKENS, _params(left[0]), self.deadline_s)
        leaver.kill()
        finder.forget_cache()
        for prompt, each in zip(prompts, left, strict=True):
            _check(prompt, finder.ask(prompt, NEW_TOKENS, _params(each), self.deadline_s))

    def test_instances_with_other_weights_never_load_each_others_blocks(
        self, start: Callable[..., Instance]
    ) -> None:
        """Over one store, in both orders; with equal weights they share, if instances do at all."""
        one, other = start("one", 1), start("other", 1, 1)
        instances = [(one, other), (other, one)]
        instances += [(one, start("equal", 1))] if self._are_two() else []
        for number, (leaver, finder) in enumerate(instances):
            prompt = some_prompts(1, seed=number)[0]
            left = self._left(leaver, prompt)
            found = finder.ask(prompt, NEW_TOKENS, _params(left), self.deadline_s)
            _check(prompt, found, finder.config.seed)
            is_equal = leaver.config.seed == finder.config.seed
            assert bool(found.counts.get("tokens_loaded")) == is_equal

    def _left(self, leaver: Instance, prompt: list[int]) -> Answer:
        """Return what an instance says that leaves a prompt."""
        transfers = self.kind == "transfer"
        params = dict(self.prefill_params) if transfers else None
        left = leaver.ask(prompt, 1 if transfers else NEW_TOKENS, params, self.deadline_s)
        _check(prompt, left, leaver.config.seed)
        return left


@functools.cache
def _zygote() -> Zygote:
    """Return a process whose children are instances and ranks: one for all connectors."""
    zygote = Zygote(preload=["torch", *MODULES])
    atexit.register(zygote.close)
    return zygote


def _params(left: Answer) -> dict[str, Any] | None:
    return left.kv_transfer_params


def _check(prompt: list[int], answer: Answer, seed: int = 0) -> None:
    """Compare an answer with the reference output of the weights of a seed."""
    assert answer.state == "finished", answer.error
    assert answer.tokens == reference_output(prompt, len(answer.tokens), seed, SIX_HEADS).output
