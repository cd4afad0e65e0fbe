"""Look on while a host takes its steps: what it computes, and what is in its cache then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from matrix_serving_kit import MODEL

from wtransfer.testing.mini_engine.reference import reference_output

if TYPE_CHECKING:
    from typing_extensions import Self

    from wtransfer.testing.mini_engine.cache import PagedCache
    from wtransfer.testing.mini_engine.contract import Request, StepPlan, StepResult
    from wtransfer.testing.mini_engine.engine import MiniEngine


def _read(cache: PagedCache, table: torch.Tensor, length: int) -> torch.Tensor:
    layers = range(MODEL.num_layers)
    return torch.stack([cache.read(layer, table, length, length) for layer in layers])


class Watch:
    """Takes note of the steps of a host while it is entered.

    Few tokens may well be right though a block is wrong. So what a request has in the cache is
    compared as well, when all of it has been loaded or computed: with the same bits from a fresh
    model.

    Args:
        host: The host.
        new_tokens: How many every request generates.
    """

    def __init__(self, host: MiniEngine, new_tokens: int) -> None:
        self.plans: list[StepPlan] = []
        """Of all steps."""
        self.bad_blocks: set[int] = set()
        """Those that the connector has said it could not load."""
        self._host, self._step = host, host.executor.step
        self._new_tokens = new_tokens
        self._held: dict[str, torch.Tensor] = {}
        self._lengths: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._host.executor.step = self._look
        return self

    def __exit__(self, *_: object) -> None:
        self._host.executor.step = self._step

    def add(self, request: Request) -> Request:
        """Take note of a request; return it."""
        self._lengths[request.request_id] = request.num_prompt_tokens + self._new_tokens - 1
        return request

    def check(self, request: Request, seed: int = 0) -> None:
        """Compare what a request had in the cache at its end with what belongs there."""
        length = self._lengths[request.request_id]
        fresh = torch.stack(reference_output(request.all_token_ids[:length], 1, seed).pages)
        assert torch.equal(fresh, self._held[request.request_id]), request.request_id

    def _look(self, plan: StepPlan) -> list[StepResult]:
        results = self._step(plan)
        self.plans.append(plan)
        told = [each.connector for each in results if each.connector is not None]
        self.bad_blocks.update(*(each.invalid_block_ids for each in told))
        for span in plan.spans:
            length = span.start + len(span.tokens)
            if length == self._lengths.get(span.request_id):
                cache, table = self._host.executor.worker.cache, torch.tensor(span.block_ids[0])
                self._held[span.request_id] = _read(cache, table, length)
        return results
