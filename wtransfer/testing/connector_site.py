"""Where KV cache is left and found again: one instance or two, by the kind of connector."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from wtransfer.deadline import Deadline

if TYPE_CHECKING:
    from pathlib import Path

    from wtransfer.testing.connector_host import KitHost, Weights
    from wtransfer.testing.mini_engine.contract import Request

NEW_TOKENS = 3
"""Tokens that are generated, where nothing else is said."""


class Site:
    """The instance that leaves something, and the one that finds it; they may be the same.

    Args:
        leaver: Leaves.
        finder: Finds.
        weights: Of both.
        folder: What the connector's options were made with.
        prefill_params: What a request says that another instance goes on with; None: whatever
            somebody leaves can be found, and requests say nothing.
        deadline_s: Bound on every wait, in seconds.
    """

    def __init__(
        self,
        leaver: KitHost,
        finder: KitHost,
        weights: Weights,
        *,
        folder: Path,
        prefill_params: dict[str, Any] | None,
        deadline_s: float,
    ) -> None:
        self.leaver = leaver
        """Leaves."""
        self.finder = finder
        """Finds."""
        self.weights = weights
        """What they compute with."""
        self.folder = folder
        """What the connector's options were made with."""
        self.prefill_params = prefill_params
        """What a request says that another instance goes on with."""
        self.deadline_s = deadline_s
        """Bound on every wait, in seconds."""

    @property
    def hosts(self) -> list[KitHost]:
        """The instances."""
        return [self.leaver] if self.leaver is self.finder else [self.leaver, self.finder]

    # -- one after the other

    def exchange(self, prompt: list[int]) -> Request:
        """Leave a prompt, find it, and check both; return the second request."""
        return self.find(prompt, self.leave(prompt))

    def leave(self, prompt: list[int]) -> dict[str, Any] | None:
        """Serve a prompt where something is left; check it.

        Returns:
            What the request of the finder has to say.
        """
        request = self.begin_leaving(prompt)
        self.serve(request)
        self.leaver.check(request)
        return self.params_of(request)

    def find(self, prompt: list[int], params: dict[str, Any] | None = None) -> Request:
        """Serve a prompt where it is to be found, by a cache that has nothing of it; check it."""
        self.finder.wipe()
        request = self.begin_finding(prompt, params)
        self.serve(request)
        self.finder.check(request)
        return request

    # -- step by step

    def begin_leaving(self, prompt: list[int]) -> Request:
        """Submit a prompt where something is left."""
        if self.prefill_params is None:
            return self.leaver.loop.submit(prompt, NEW_TOKENS)
        return self.leaver.loop.submit(prompt, 1, dict(self.prefill_params))

    def begin_finding(
        self, prompt: list[int], params: dict[str, Any] | None, num_new: int = NEW_TOKENS
    ) -> Request:
        """Submit a prompt where it is to be found."""
        return self.finder.loop.submit(prompt, num_new, params)

    def serve(self, *requests: Request) -> None:
        """Take steps, on all instances, until requests have ended and nothing waits for them.

        Blocks that an instance holds for another that has not come yet do not count.
        """
        deadline = Deadline(self.deadline_s)
        while not all(request.state in ("finished", "failed", "aborted") for request in requests):
            self.step()
            deadline.check("requests of this test")
        # What they left is told by the steps that follow.
        self.step()
        self.step()
        while self.prefill_params is None and any(h.loop.scheduler.is_busy for h in self.hosts):
            self.step()
            deadline.check("what is under way after the requests of this test")

    def step(self) -> None:
        """Take a step on every instance."""
        for host in self.hosts:
            host.loop.step()

    def settle(self, within_s: float) -> None:
        """Take steps until no block is held any more, and the connector has nothing to do.

        Args:
            within_s: Longest that this may take, in seconds.
        """
        end = time.monotonic() + within_s
        while any(host.num_held or host.loop.scheduler.is_busy for host in self.hosts):
            assert time.monotonic() < end, f"after {within_s:g} s {self._what_is_left()}"
            self.step()

    def params_of(self, request: Request) -> dict[str, Any] | None:
        """Return what the finder's request says, as it travels: in JSON."""
        if self.prefill_params is None:
            return None
        told: dict[str, Any] | None = msgspec.json.decode(
            msgspec.json.encode(request.kv_transfer_params)
        )
        return told

    def _what_is_left(self) -> str:
        return "; ".join(
            f"{host.num_held} blocks are held"
            + (", and the scheduler is busy" if host.loop.scheduler.is_busy else "")
            for host in self.hosts
        )

    def close(self) -> None:
        """End the instances."""
        for host in self.hosts:
            host.loop.close()
