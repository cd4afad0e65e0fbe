"""The engine: a scheduler, and an executor of its steps in this process or in one per rank."""

from __future__ import annotations

import contextlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import torch

from wtransfer.connectors.interface import KVConnectorRole
from wtransfer.deadline import Deadline
from wtransfer.errors import WTransferError
from wtransfer.testing.communicator import memory_group
from wtransfer.testing.mini_engine.channel import PATIENCE_S, open_channel, start_process
from wtransfer.testing.mini_engine.config import EngineConfig  # noqa: TC001  (msgspec reads it)
from wtransfer.testing.mini_engine.contract import Request, StepPlan, StepResult
from wtransfer.testing.mini_engine.scheduler import Scheduler
from wtransfer.testing.mini_engine.serialize import deserialize
from wtransfer.testing.mini_engine.worker import make_worker
from wtransfer.transport.process_group import GlooCommunicator
from wtransfer.transport.rendezvous import host_rendezvous, join_rendezvous

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Self

    from wtransfer.testing.mini_engine.channel import Channel
    from wtransfer.testing.mini_engine.worker import Worker
    from wtransfer.transport.communicator import Communicator

RANK_MAIN = f"{__name__}:run_rank"
"""Function that the process of a rank calls."""
_HOST = "127.0.0.1"
_IDLE_S = 0.0005
_T = TypeVar("_T")


class Executor(Protocol):
    """The ranks of an engine; every list is in order of rank."""

    def handshakes(self) -> Sequence[Any]:
        """Return the handshake metadata of each rank's connector."""

    def step(self, plan: StepPlan) -> Sequence[StepResult]:
        """Execute a step on every rank."""

    def close(self) -> None:
        """End the ranks."""


class LocalExecutor:
    """Executor with all ranks in this process; several run in a thread each.

    Args:
        *workers: The worker of each rank.
    """

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(len(workers), "rank") if len(workers) > 1 else None

    @classmethod
    def make(
        cls, num_ranks: int, make_worker: Callable[[Communicator | None], Worker]
    ) -> LocalExecutor:
        """Return an executor of new workers.

        Args:
            num_ranks: Number of ranks.
            make_worker: Makes the worker of a rank of a group; None: the only rank. Called for all
                ranks at the same time, as those of a connector may wait for each other.
        """
        if num_ranks == 1:
            return cls(make_worker(None))
        with ThreadPoolExecutor(num_ranks) as threads:
            return cls(*threads.map(make_worker, memory_group(num_ranks, PATIENCE_S)))

    @property
    def worker(self) -> Worker:
        """The only worker."""
        (worker,) = self.workers
        return worker

    def handshakes(self) -> list[Any]:
        """Return the handshake metadata of each rank's connector."""
        return [worker.handshake() for worker in self.workers]

    def step(self, plan: StepPlan) -> list[StepResult]:
        """Execute a step on every rank."""
        if self._threads is None:
            return [self.worker.step(plan)]
        return list(
            self._threads.map(lambda each: each.step(plan), self.workers, timeout=PATIENCE_S)
        )

    def close(self) -> None:
        """Release everything."""
        with contextlib.ExitStack() as stack:
            for worker in self.workers:
                stack.callback(worker.close)
            if self._threads is not None:
                stack.callback(self._threads.shutdown)


class MiniEngine:
    """Serves requests, step by step."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._numbers = itertools.count()
        handshakes = map(deserialize, executor.handshakes())
        by_rank = {rank: each for rank, each in enumerate(handshakes) if each is not None}
        if scheduler.connector and by_rank:
            scheduler.connector.set_xfer_handshake_metadata(by_rank)

    @property
    def counts(self) -> Counter[str]:
        """The scheduler's counters."""
        return self.scheduler.counts

    def submit(
        self,
        prompt: list[int],
        max_new_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> Request:
        """Queue a request for the steps that follow.

        Args:
            prompt: Tokens.
            max_new_tokens: Number of tokens to generate.
            kv_transfer_params: Parameters for the connector.
        """
        request_id = f"request-{next(self._numbers)}"
        request = Request(request_id, prompt, max_new_tokens, kv_transfer_params)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Take one step, and return the requests that it has ended."""
        plan = self.scheduler.plan()
        ended = self.execute(plan)
        if not plan.spans:
            # Only copies are under way, or nothing at all.
            time.sleep(_IDLE_S)
        return ended

    def execute(self, plan: StepPlan) -> list[Request]:
        """Execute a step that the scheduler has planned; return the requests that it has ended."""
        return self.scheduler.update(plan, self.executor.step(plan))

    def run(self, deadline_s: float = 60.0) -> None:
        """Take steps until all requests have ended and the connector has no work left.

        Raises:
            StallError: The deadline has passed.
        """
        deadline = Deadline(deadline_s)
        while self.scheduler.is_busy:
            self.step()
            deadline.check("the requests of this engine")

    def generate(
        self, prompts: Iterable[list[int]], max_new_tokens: int, deadline_s: float = 60.0
    ) -> list[list[int]]:
        """Serve prompts side by side; return the output of each."""
        requests = [self.submit(prompt, max_new_tokens) for prompt in prompts]
        self.run(deadline_s)
        return [request.output for request in requests]

    def close(self) -> None:
        """End the ranks, and shut the connector down."""
        try:
            self.executor.close()
        finally:
            self.scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_engine(config: EngineConfig, executor: Executor | None = None) -> MiniEngine:
    """Return an engine whose scheduler is in this process.

    Args:
        config: Configuration.
        executor: Its ranks; None: all of them in this process.
    """
    executor = executor or LocalExecutor.make(config.num_ranks, partial(make_worker, config))
    connector = config.make_connector(KVConnectorRole.SCHEDULER)
    return MiniEngine(Scheduler(config, connector), executor)


# -- ranks in processes


class _RankStart(msgspec.Struct, frozen=True):
    """The first message to a rank; step plans follow."""

    rank: int
    config: EngineConfig
    port: int
    """Port of the ranks' rendezvous."""
    name: str
    """Name of the rendezvous."""


_STARTS = msgspec.msgpack.Decoder(_RankStart)
_PLANS = msgspec.msgpack.Decoder(StepPlan)
_HANDSHAKES = msgspec.msgpack.Decoder(Any)
_RESULTS = msgspec.msgpack.Decoder(StepResult)


class ProcessExecutor:
    """Executor with each rank in a process of its own.

    Args:
        config: Configuration of the engine.
        spawn: Starts a process that calls `RANK_MAIN` with the address that it is given.
    """

    def __init__(self, config: EngineConfig, spawn: Callable[[str], object]) -> None:
        self._channels: list[Channel] = []
        self._rendezvous = host_rendezvous(_HOST)
        try:
            for rank in range(config.num_ranks):
                channel = start_process(f"rank {rank}", spawn)
                self._channels.append(channel)
                channel.send(_RankStart(rank, config, self._rendezvous.port, self._rendezvous.name))
            # After the start of all ranks: they wait for each other.
            self._handshakes = self._receive(_HANDSHAKES)
        except BaseException:
            self.close()
            raise

    def handshakes(self) -> list[Any]:
        """Return the handshake metadata of each rank's connector."""
        return self._handshakes

    def step(self, plan: StepPlan) -> list[StepResult]:
        """Execute a step on every rank."""
        for channel in self._channels:
            channel.send(plan)
        return self._receive(_RESULTS)

    def close(self) -> None:
        """Close the channels: the ranks end by themselves."""
        for channel in self._channels:
            channel.close()
        self._rendezvous.close()

    def _receive(self, decoder: msgspec.msgpack.Decoder[_T]) -> list[_T]:
        received: list[_T] = []
        first_error: WTransferError | None = None
        for channel in self._channels:
            try:
                received.append(channel.receive(decoder))
            except WTransferError as error:  # noqa: PERF203  # each rank has its own
                # A rank's error often reports the loss of another one; the lost channel names it.
                if channel.is_lost:
                    raise
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return received


def run_rank(address: str) -> None:
    """Execute the steps of one rank until its scheduler closes the channel.

    Args:
        address: Address of the scheduler's socket.
    """
    torch.set_num_threads(1)
    with open_channel(address, "the scheduler") as channel:
        start = channel.receive(_STARTS)
        group = GlooCommunicator(
            join_rendezvous(_HOST, start.port, start.name),
            start.rank,
            start.config.num_ranks,
            host=_HOST,
            timeout_s=PATIENCE_S,
        )
        worker = make_worker(start.config, group, owns_process=True)
        try:
            channel.wait_forever()
            channel.send(worker.handshake())
            while True:
                channel.send(worker.step(channel.receive(_PLANS)))
        finally:
            worker.close()
