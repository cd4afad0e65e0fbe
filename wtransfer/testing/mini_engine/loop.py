"""The loop of the reference host: plan, compute, take the results, over and over."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, Protocol

from wtransfer.deadline import Deadline
from wtransfer.testing.mini_engine.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

    from wtransfer.testing.mini_engine.messages import StepPlan, StepResult
    from wtransfer.testing.mini_engine.scheduler import Scheduler
    from wtransfer.testing.mini_engine.worker import ServingWorker

_IDLE_S = 0.0005


class Workers(Protocol):
    """The ranks of the host."""

    def handshakes(self) -> Sequence[Any]:
        """Return what each rank's side of the connector says before the first step."""

    def step(self, plan: StepPlan) -> Sequence[StepResult]:
        """Let every rank take a step; return their results in order of rank."""

    def close(self) -> None:
        """End them."""


class LocalWorkers:
    """The only rank, in this process.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: ServingWorker) -> None:
        self.worker = worker
        """The worker."""

    def handshakes(self) -> list[Any]:
        """Return what the connector says before the first step."""
        return [self.worker.handshake()]

    def step(self, plan: StepPlan) -> list[StepResult]:
        """Take a step."""
        return [self.worker.step(plan)]

    def close(self) -> None:
        """Let go of everything."""
        self.worker.close()


class ServingLoop:
    """Serves requests.

    Args:
        scheduler: Decides.
        workers: Compute.
    """

    def __init__(self, scheduler: Scheduler, workers: Workers) -> None:
        self.scheduler = scheduler
        """Decides."""
        self.workers = workers
        """Compute."""
        self._numbers = itertools.count()
        if scheduler.link:
            scheduler.link.meet(workers.handshakes())

    def submit(
        self,
        prompt: list[int],
        max_new_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> Request:
        """Take a request; it is served by the steps that follow.

        Args:
            prompt: Its tokens.
            max_new_tokens: How many are generated.
            kv_transfer_params: What the connector is told of it.
        """
        name = f"request-{next(self._numbers)}"
        request = Request(name, prompt, max_new_tokens, kv_transfer_params)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Take one step, and return the requests that it has ended."""
        plan = self.scheduler.plan()
        finished = self.scheduler.update(plan, self.workers.step(plan))
        if not plan.spans:
            # Only copies are under way, or nothing at all.
            time.sleep(_IDLE_S)
        return finished

    def run(self, deadline_s: float = 60.0) -> None:
        """Take steps until every request has been served and the connector has nothing to do.

        Raises:
            StallError: That did not come to pass in time.
        """
        deadline = Deadline(deadline_s)
        while self.scheduler.is_busy:
            self.step()
            deadline.check("the requests of this host")

    def generate(
        self, prompts: Iterable[list[int]], max_new_tokens: int, deadline_s: float = 60.0
    ) -> list[list[int]]:
        """Serve prompts side by side; return what follows each."""
        requests = [self.submit(prompt, max_new_tokens) for prompt in prompts]
        self.run(deadline_s)
        return [request.output for request in requests]

    def close(self) -> None:
        """End the workers, and let go of the connector."""
        try:
            self.workers.close()
        finally:
            self.scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
