"""The process of one serving instance: serves requests until its user hangs up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from wtransfer.testing.mini_engine.build import make_host
from wtransfer.testing.mini_engine.instance_messages import (
    BEGINNINGS,
    ORDERS,
    Abort,
    Answer,
    AskNumbers,
    ForgetCache,
    Numbers,
    Refusal,
    Serving,
    SpawnRank,
    Submit,
)
from wtransfer.testing.mini_engine.line import call
from wtransfer.testing.mini_engine.loop import LocalWorkers
from wtransfer.testing.mini_engine.remote import RemoteWorkers
from wtransfer.testing.mini_engine.sole_worker import make_sole_worker

if TYPE_CHECKING:
    from collections import Counter

    from wtransfer.testing.mini_engine.build import HostSettings
    from wtransfer.testing.mini_engine.instance_messages import Begin, Order
    from wtransfer.testing.mini_engine.line import Line
    from wtransfer.testing.mini_engine.loop import ServingLoop
    from wtransfer.testing.mini_engine.request import Request

IDLE_S = 0.05
"""Longest time between two steps: without requests, too, weights come and connectors have work."""
_OVER = ("finished", "failed", "aborted")


def main(address: str) -> None:
    """Be an instance.

    Args:
        address: Of the user's socket.
    """
    torch.set_num_threads(1)
    with call(address, "the user") as line:
        begin = line.receive(BEGINNINGS)
        with make_host(begin.settings, _workers(begin, line)) as loop:
            line.wait_for_ever()
            line.send(Serving())
            _Service(begin.settings, line, loop).run()


def _workers(begin: Begin, line: Line) -> LocalWorkers | RemoteWorkers:
    if begin.ranks_apart or begin.settings.num_ranks > 1:
        return RemoteWorkers(begin.settings, lambda address: line.send(SpawnRank(address)))
    return LocalWorkers(make_sole_worker(begin.settings))


class _Served:
    """A request on its way.

    Args:
        order: What the user wants.
        request: What the scheduler has of it.
        counts: Of the scheduler, before it began.
    """

    def __init__(self, order: Submit, request: Request, counts: Counter[str]) -> None:
        self.request = request
        self._order = order
        self._before = counts.copy()
        self._first_token_s: float | None = None
        self._loading_since: float | None = None
        self._load_s: float | None = None

    def note(self, began: float, ended: float) -> None:
        """Look at it after a step that took from one time to the other."""
        state, since = self.request.state, self._loading_since
        if self._first_token_s is None and self.request.output:
            self._first_token_s = ended - self._order.sent_at
        if since is None and state in ("loading", "loaded"):
            since = self._loading_since = began
        if since is not None and self._load_s is None and state != "loading":
            self._load_s = ended - since

    def answer(self, counts: Counter[str]) -> Answer:
        """Return what came of it."""
        request = self.request
        return Answer(
            self._order.number,
            request.state,
            request.output,
            request.kv_transfer_params,
            {name: counts[name] - self._before[name] for name in counts},
            time.monotonic() - self._order.sent_at,
            self._first_token_s,
            self._load_s,
            request.error,
        )


class _Service:
    """Takes orders between the steps of a host.

    Args:
        settings: Of the host.
        line: To the user.
        loop: The host.
    """

    def __init__(self, settings: HostSettings, line: Line, loop: ServingLoop) -> None:
        self._vocabulary = settings.model.vocabulary
        self._line = line
        self._loop = loop
        self._active: dict[int, _Served] = {}

    def run(self) -> None:
        """Serve.

        Raises:
            PeerLostError: The user has hung up, or a rank is gone.
        """
        while True:
            self._take_orders()
            began = time.monotonic()
            self._loop.step()
            ended = time.monotonic()
            for served in self._active.values():
                served.note(began, ended)
            self._answer()

    def _take_orders(self) -> None:
        wait_s = 0.0 if self._loop.scheduler.is_busy else IDLE_S
        while self._line.has_news(wait_s):
            wait_s = 0.0
            self._take(self._line.receive(ORDERS))

    def _take(self, order: Order) -> None:
        scheduler = self._loop.scheduler
        match order:
            case Submit():
                self._submit(order)
            case Abort():
                served = self._active.get(order.number)
                if served is not None:
                    scheduler.abort(served.request)
                    self._answer()
            case ForgetCache():
                scheduler.pool.forget_all()
            case AskNumbers():
                self._line.send(self._numbers())

    def _submit(self, order: Submit) -> None:
        counts = self._loop.scheduler.counts
        try:
            self._check_tokens(order.prompt)
            request = self._loop.submit(
                order.prompt, order.max_new_tokens, order.kv_transfer_params
            )
        except ValueError as error:
            self._line.send(Refusal(order.number, str(error)))
        else:
            self._active[order.number] = _Served(order, request, counts)

    def _check_tokens(self, prompt: list[int]) -> None:
        for place, token in enumerate(prompt):
            if not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"token {place} of the prompt is {token}; the model knows 0 to "
                    f"{self._vocabulary - 1}"
                )

    def _answer(self) -> None:
        counts = self._loop.scheduler.counts
        for number, served in list(self._active.items()):
            if served.request.state in _OVER:
                del self._active[number]
                self._line.send(served.answer(counts))

    def _numbers(self) -> Numbers:
        scheduler, workers = self._loop.scheduler, self._loop.workers
        side = scheduler.link.connector if scheduler.link else None
        if isinstance(workers, LocalWorkers):
            said = [workers.worker.get_stats()]
        else:
            assert isinstance(workers, RemoteWorkers)
            said = workers.get_stats()
        return Numbers(dict(scheduler.counts), dict(side.get_stats()) if side else {}, said)
