"""What the conformance kit serves from: the mini engine, every call of which can be heard."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from wtransfer.connectors.interface import KVConnectorRole
from wtransfer.testing.communicator import memory_group
from wtransfer.testing.mini_engine.engine import MiniEngine
from wtransfer.testing.mini_engine.model import PagedTransformer
from wtransfer.testing.mini_engine.reference import reference_output
from wtransfer.testing.mini_engine.scheduler import Scheduler
from wtransfer.testing.mini_engine.worker import Worker
from wtransfer.weights import process_weights

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from wtransfer.connectors.interface import KVConnectorBase_V1
    from wtransfer.testing.mini_engine.cache import PagedCache
    from wtransfer.testing.mini_engine.config import EngineConfig
    from wtransfer.testing.mini_engine.contract import Request, StepPlan, StepResult
    from wtransfer.transport.communicator import Communicator

PATIENCE_S = 60.0
"""Longest wait for a rank in a thread, in seconds."""
_RUBBISH = 7.0


class Call(NamedTuple):
    """One call of a side that has returned."""

    name: str
    """The method."""
    args: tuple[Any, ...]
    """What it was given."""
    result: Any
    """What it returned."""


class Tap:
    """One side of a connector, as the host has it: every call is noted, and may be altered.

    Args:
        side: The side.
        name: ``S``, or ``W`` and the rank.
    """

    def __init__(self, side: KVConnectorBase_V1, name: str) -> None:
        self.side = side
        """The side."""
        self.name = name
        """Which it is."""
        self.calls: list[Call] = []
        """What was called so far."""
        self.before: list[Callable[[Tap, str], None]] = []
        """Called before each call with this object and the method's name."""
        self.instead: dict[str, Callable[..., Any]] = {}
        """By method: called with the side's own method, and its arguments."""

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.side, name)
        return functools.partial(self._call, name, own) if callable(own) else own

    def results(self, name: str) -> list[Any]:
        """Return what one method has returned, in order."""
        return [call.result for call in self.calls if call.name == name]

    def _call(self, name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for hear in list(self.before):
            hear(self, name)
        altered = self.instead.get(name)
        result = own(*args, **kwargs) if altered is None else altered(own, *args, **kwargs)
        self.calls.append(Call(name, args, result))
        return result


class Weights:
    """The weights of all hosts of a test: those of one seed, which can be changed at any time."""

    def __init__(self) -> None:
        self.seed = 0
        """What they were drawn from."""
        self._models: list[PagedTransformer] = []
        self._held = process_weights.hold(self._name)

    def model(self, settings: EngineConfig) -> PagedTransformer:
        """Return one more model."""
        model = PagedTransformer(settings.model, self.seed)
        self._models.append(model)
        return model

    def change(self, *seeds: int) -> None:
        """Change the weights, as a commit does, once for each seed."""
        for seed in seeds:
            with self._held.changing(lambda: self._name):
                for model in self._models:
                    model.draw_weights(seed)
                self.seed = seed

    def close(self) -> None:
        """Let the process have no such models."""
        self._held.close()

    @property
    def _name(self) -> str:
        return f"drawn from {self.seed}"


class Ranks:
    """All ranks of a host in this process; where there are several, each in a thread.

    Args:
        makers: Each makes a worker.
    """

    def __init__(self, makers: Sequence[Callable[[], Worker]]) -> None:
        self._threads = [
            ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(len(makers)) if len(makers) > 1
        ]
        self.workers = self._each(makers)
        """The workers."""

    def handshakes(self) -> list[Any]:
        """Return what each rank's side says before the first step."""
        return self._each([worker.handshake for worker in self.workers])

    def step(self, plan: StepPlan) -> list[StepResult]:
        """Let every rank take a step."""
        return self._each([functools.partial(worker.step, plan) for worker in self.workers])

    def close(self) -> None:
        """End them."""
        try:
            self._each([worker.close for worker in self.workers])
        finally:
            for thread in self._threads:
                thread.shutdown()

    def _each(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        if not self._threads:
            return [call() for call in calls]
        futures = [thread.submit(call) for thread, call in zip(self._threads, calls, strict=True)]
        return [future.result(PATIENCE_S) for future in futures]


class KitHost:
    """A serving instance with the connector that is tested.

    Args:
        settings: Of the host.
        weights: What it computes with.
        hash_function: What the host's own cache names blocks by; None: the usual one.
    """

    def __init__(
        self,
        settings: EngineConfig,
        weights: Weights,
        hash_function: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.settings = settings
        """Of the host."""
        self._made: dict[int, tuple[Tap, PagedCache]] = {}
        self._weights = weights
        num_ranks = settings.num_ranks
        groups = memory_group(num_ranks, PATIENCE_S) if num_ranks > 1 else [None]
        models = [weights.model(settings) for _ in groups]
        self.ranks = Ranks(
            [
                functools.partial(self._make_worker, *each)
                for each in zip(groups, models, strict=True)
            ]
        )
        """The workers."""
        self.workers = [self._made[rank][0] for rank in range(num_ranks)]
        """The workers' sides, in order of rank."""
        self.caches = [self._made[rank][1] for rank in range(num_ranks)]
        """Their caches."""
        side = settings.make_connector(KVConnectorRole.SCHEDULER)
        assert side is not None
        self.scheduler = Tap(side, "S")
        """The scheduler's side."""
        scheduler = Scheduler(settings, self.scheduler, hash_function)  # type: ignore[arg-type]
        self.loop = MiniEngine(scheduler, self.ranks)
        """The host."""

    def _make_worker(self, group: Communicator | None, model: PagedTransformer) -> Worker:
        rank = group.rank if group else 0
        side = self.settings.make_connector(KVConnectorRole.WORKER, rank)
        assert side is not None
        tap = Tap(side, f"W{rank}")
        worker = Worker(self.settings, model, tap, group)  # type: ignore[arg-type]
        self._made[rank] = tap, worker.cache
        return worker

    @property
    def counts(self) -> Counter[str]:
        """What the host has done so far."""
        return self.loop.scheduler.counts

    @property
    def taps(self) -> list[Tap]:
        """All sides."""
        return [self.scheduler, *self.workers]

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        pool = self.loop.scheduler.pool
        return pool.num_blocks - pool.num_free

    def wipe(self) -> None:
        """Let the host's own cache forget everything, and whatever nobody holds be overwritten."""
        pool = self.loop.scheduler.pool
        pool.reset()
        free = pool.allocate(pool.num_free) or []
        self.spoil(free)
        pool.release(free)

    def spoil(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks."""
        for cache in self.caches:
            for layer in cache.layers:
                layer[list(blocks)] = _RUBBISH

    def check(self, request: Request, *, seed: int | None = None) -> None:
        """Compare an ended request, and what it has in the cache, with the reference output.

        The blocks must still have what they had when it ended: nothing else was served since.

        Args:
            request: The request.
            seed: Of the weights; None: those of now.
        """
        self.check_output(request, seed=seed)
        num_new = request.max_new_tokens
        expected = self._reference(request.prompt_token_ids, num_new, seed).pages
        known = request.num_tokens - 1
        table = torch.tensor(request.block_ids)
        for layer, pages in enumerate(expected):
            got = [cache.read(layer, table, known, known) for cache in self.caches]
            assert torch.cat(got, dim=1).equal(pages), f"layer {layer} has other keys or values"

    def check_output(self, request: Request, *, seed: int | None = None) -> None:
        """Compare the output of a request with the reference output.

        Args:
            request: The request.
            seed: Of the weights; None: those of now.
        """
        assert request.state == "finished", f"{request.state}: {request.error}"
        expected = self._reference(request.prompt_token_ids, request.max_new_tokens, seed).output
        assert request.output == expected

    def _reference(self, prompt: list[int], num_new: int, seed: int | None) -> Any:
        seed = self._weights.seed if seed is None else seed
        return reference_output(prompt, num_new, seed, self.settings.model)
