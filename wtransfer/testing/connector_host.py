"""Serving instances in this process that a connector is tested in: a producer and a consumer."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from wtransfer.connectors.interface import KVConnectorRole
from wtransfer.deadline import Deadline
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
    from pathlib import Path

    from wtransfer.connectors.interface import KVConnectorBase_V1
    from wtransfer.testing.mini_engine.cache import PagedCache
    from wtransfer.testing.mini_engine.config import EngineConfig
    from wtransfer.testing.mini_engine.contract import Request, StepPlan, StepResult
    from wtransfer.transport.communicator import Communicator

NUM_NEW_TOKENS = 3
"""Tokens to generate, unless a test asks for another number."""
PATIENCE_S = 60.0
"""Bound on a step of a rank in a thread, in seconds."""


class Call(NamedTuple):
    """One call of a connector that has returned."""

    name: str
    args: tuple[Any, ...]
    result: Any


class RecordedSide:
    """One side of a connector whose calls are recorded, and may be replaced.

    Args:
        side: The side.
        name: ``S``, or ``W`` and the rank.
    """

    def __init__(self, side: KVConnectorBase_V1, name: str) -> None:
        self.side = side
        self.name = name
        self.calls: list[Call] = []
        self.before: list[Callable[[RecordedSide, str], None]] = []
        """Called before each call with this object and the method's name."""
        self.instead: dict[str, Callable[..., Any]] = {}
        """By method: called with the side's own method and its arguments."""

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.side, name)
        return functools.partial(self._call, name, own) if callable(own) else own

    def results(self, name: str) -> list[Any]:
        """Return the results of one method, in order."""
        return [call.result for call in self.calls if call.name == name]

    def _call(self, name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for notify in list(self.before):
            notify(self, name)
        replacement = self.instead.get(name)
        result = own(*args, **kwargs) if replacement is None else replacement(own, *args, **kwargs)
        self.calls.append(Call(name, args, result))
        return result


class ModelWeights:
    """The weights of all instances of a test, drawn from a seed that can change at any time."""

    def __init__(self) -> None:
        self.seed = 0
        self._models: list[PagedTransformer] = []
        self._held = process_weights.hold(self._name)

    def model(self, settings: EngineConfig) -> PagedTransformer:
        """Return a new model with these weights."""
        model = PagedTransformer(settings.model, self.seed)
        self._models.append(model)
        return model

    def change(self, *seeds: int) -> None:
        """Change the weights as a commit does, once for each seed."""
        for seed in seeds:
            with self._held.changing(lambda: self._name):
                for model in self._models:
                    model.draw_weights(seed)
                self.seed = seed

    def close(self) -> None:
        """Withdraw the weights from this process."""
        self._held.close()

    @property
    def _name(self) -> str:
        return f"drawn from {self.seed}"


class LocalRanks:
    """All ranks of an instance in this process; several ranks run in a thread each.

    Args:
        makers: Each makes a worker.
    """

    def __init__(self, makers: Sequence[Callable[[], Worker]]) -> None:
        self._threads = [
            ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(len(makers)) if len(makers) > 1
        ]
        self.workers = self._each(makers)

    def handshakes(self) -> list[Any]:
        """Return the handshake metadata of each rank."""
        return self._each([worker.handshake for worker in self.workers])

    def step(self, plan: StepPlan) -> list[StepResult]:
        """Run a step on every rank."""
        return self._each([functools.partial(worker.step, plan) for worker in self.workers])

    def close(self) -> None:
        """Close the workers and end the threads."""
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


class LocalInstance:
    """A serving instance in this process with the connector that is tested.

    Args:
        settings: Its settings.
        weights: Weights of its model.
        hash_function: Hash of the instance's own prefix cache; None: the default.
    """

    def __init__(
        self,
        settings: EngineConfig,
        weights: ModelWeights,
        hash_function: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.settings = settings
        self._weights = weights
        made: dict[int, tuple[RecordedSide, PagedCache]] = {}

        def make_worker(group: Communicator | None, model: PagedTransformer) -> Worker:
            rank = group.rank if group else 0
            side = settings.make_connector(KVConnectorRole.WORKER, rank)
            assert side is not None
            recorded: Any = RecordedSide(side, f"W{rank}")
            worker = Worker(settings, model, recorded, group)
            made[rank] = recorded, worker.cache
            return worker

        num_ranks = settings.num_ranks
        groups = memory_group(num_ranks, PATIENCE_S) if num_ranks > 1 else [None]
        self.ranks = LocalRanks(
            [functools.partial(make_worker, group, weights.model(settings)) for group in groups]
        )
        self.workers = [made[rank][0] for rank in range(num_ranks)]
        """Worker sides of the connector, by rank."""
        self.caches = [made[rank][1] for rank in range(num_ranks)]
        """Paged caches, by rank."""
        side = settings.make_connector(KVConnectorRole.SCHEDULER)
        assert side is not None
        recorded: Any = RecordedSide(side, "S")
        self.scheduler: RecordedSide = recorded
        """Scheduler side of the connector."""
        self.loop = MiniEngine(Scheduler(settings, recorded, hash_function), self.ranks)

    @property
    def counts(self) -> Counter[str]:
        """Counters of the instance's scheduler."""
        return self.loop.scheduler.counts

    @property
    def sides(self) -> list[RecordedSide]:
        """All sides of the connector."""
        return [self.scheduler, *self.workers]

    @property
    def num_used(self) -> int:
        """Blocks of the cache that are not free."""
        pool = self.loop.scheduler.pool
        return pool.num_blocks - pool.num_free

    def clear_cache(self) -> None:
        """Empty the instance's own prefix cache, and overwrite all free blocks."""
        pool = self.loop.scheduler.pool
        pool.reset()
        free = pool.allocate(pool.num_free) or []
        self.overwrite(free)
        pool.release(free)

    def overwrite(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks of all ranks."""
        for cache in self.caches:
            for layer in cache.layers:
                layer[list(blocks)] = 7.0

    def check(self, request: Request) -> None:
        """Compare the output of an ended request, and its KV cache, with the reference output.

        Its blocks must not have been reused: no other request was served since.
        """
        self.check_output(request)
        known = request.num_tokens - 1
        table = torch.tensor(request.block_ids)
        for layer, pages in enumerate(self._expected(request).pages):
            got = [cache.read(layer, table, known, known) for cache in self.caches]
            assert torch.cat(got, dim=1).equal(pages), f"layer {layer} has other keys or values"

    def check_output(self, request: Request) -> None:
        """Compare the output of an ended request with the reference output."""
        assert request.state == "finished", f"{request.state}: {request.error}"
        assert request.output == self._expected(request).output

    def _expected(self, request: Request) -> Any:
        prompt, num_new = request.prompt_token_ids, request.max_new_tokens
        return reference_output(prompt, num_new, self._weights.seed, self.settings.model)


class ConnectorTestBed:
    """An instance that produces KV cache, and one that consumes it; they may be the same.

    Args:
        producer: Saves or sends KV cache.
        consumer: Loads it.
        weights: Weights of both.
        folder: The folder that the connector's options were made with.
        prefill_params: ``kv_transfer_params`` of a request whose KV cache another instance
            consumes; None: the connector is a store, and requests have none.
        deadline_s: Bound on every wait, in seconds.
    """

    def __init__(
        self,
        producer: LocalInstance,
        consumer: LocalInstance,
        weights: ModelWeights,
        *,
        folder: Path,
        prefill_params: dict[str, Any] | None,
        deadline_s: float,
    ) -> None:
        self.producer = producer
        self.consumer = consumer
        self.weights = weights
        self.folder = folder
        self.prefill_params = prefill_params
        self.deadline_s = deadline_s

    @property
    def instances(self) -> list[LocalInstance]:
        """The instances."""
        return [self.producer] if self.producer is self.consumer else [self.producer, self.consumer]

    @property
    def sides(self) -> list[RecordedSide]:
        """All sides of the connector in all instances."""
        return [side for instance in self.instances for side in instance.sides]

    @property
    def num_loaded(self) -> int:
        """Tokens that the consumer has loaded."""
        return self.consumer.counts["tokens_loaded"]

    def transfer(self, prompt: list[int]) -> Request:
        """Produce and consume the KV cache of a prompt, and return the consumer's request."""
        return self.consume(prompt, self.produce(prompt))

    def produce(self, prompt: list[int]) -> dict[str, Any] | None:
        """Serve a prompt on the producer, check it, and return the consumer's parameters."""
        request = self.submit_to_producer(prompt)
        self.run(request)
        self.producer.check(request)
        return self.params_of(request)

    def consume(self, prompt: list[int], params: dict[str, Any] | None = None) -> Request:
        """Serve a prompt on the consumer, whose own prefix cache is emptied, and check it."""
        self.consumer.clear_cache()
        request = self.submit_to_consumer(prompt, params)
        self.run(request)
        self.consumer.check(request)
        return request

    def submit_to_producer(self, prompt: list[int]) -> Request:
        """Submit a prompt to the producer."""
        if self.prefill_params is None:
            return self.producer.loop.submit(prompt, NUM_NEW_TOKENS)
        return self.producer.loop.submit(prompt, 1, dict(self.prefill_params))

    def submit_to_consumer(
        self, prompt: list[int], params: dict[str, Any] | None, num_new: int = NUM_NEW_TOKENS
    ) -> Request:
        """Submit a prompt to the consumer."""
        return self.consumer.loop.submit(prompt, num_new, params)

    def run(self, *requests: Request) -> None:
        """Step all instances until requests have ended, and a store has nothing left to do."""
        deadline = Deadline(self.deadline_s)
        while not all(request.state in ("finished", "failed", "aborted") for request in requests):
            self.step()
            deadline.check("requests of this test")
        # The connector is told of their end in the steps that follow.
        self.step()
        self.step()
        # A transfer may hold blocks for a consumer that is yet to come.
        while self.prefill_params is None and any(
            instance.loop.scheduler.is_busy for instance in self.instances
        ):
            self.step()
            deadline.check("work after the requests of this test")

    def step(self) -> None:
        """Run a step on every instance."""
        for instance in self.instances:
            instance.loop.step()

    def drain(self) -> None:
        """Step all instances until all blocks are free and the connector has nothing to do."""
        end = time.monotonic() + self.deadline_s
        while any(each.num_used or each.loop.scheduler.is_busy for each in self.instances):
            used = [each.num_used for each in self.instances]
            assert time.monotonic() < end, f"after {self.deadline_s:g} s blocks in use: {used}"
            self.step()

    def params_of(self, request: Request) -> dict[str, Any] | None:
        """Return the consumer's parameters as a router passes them on, which is as JSON."""
        if self.prefill_params is None:
            return None
        params: dict[str, Any] = msgspec.json.decode(
            msgspec.json.encode(request.kv_transfer_params)
        )
        return params

    def close(self) -> None:
        """Close the instances."""
        for instance in self.instances:
            instance.loop.close()
