"""verl's checkpoint engine ``wtransfer``: one publisher for each sync of trainer and rollouts."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING, Any

import verl
from packaging.specifiers import SpecifierSet
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from wtransfer import Publisher, StreamSource, WorkerSession
from wtransfer.deadline import Deadline
from wtransfer.errors import AuthenticationError, PeerLostError, StallError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    import torch
    from wtransfer import TensorSpec
    from wtransfer.weight_sync.report import Report

    Weights = Iterable[tuple[str, torch.Tensor]]

logger = logging.getLogger(__name__)

VERL_RANGE = ">=0.9.1,<0.10"
POLL_S = 0.05
"""Seconds between two looks at a publisher that sends nothing."""

if not SpecifierSet(VERL_RANGE).contains(verl.__version__, prereleases=True):
    raise ImportError(
        f"wtransfer-verl was not run with verl {verl.__version__}; install one of its range: "
        f'pip install "verl{VERL_RANGE}"'
    )


@CheckpointEngineRegistry.register("wtransfer")
class WTransferCheckpointEngine(CheckpointEngine):
    """Weights of a sync reach every rollout, verified, or none.

    verl makes one for each trainer rank and one for each rollout rank; keyword arguments are
    ``checkpoint_engine.engine_kwargs.wtransfer``. verl calls, in each sync: `prepare` on all,
    `build_topology`, `init_process_group` on all, `send_weights` and `receive_weights` at the same
    time, `finalize` on all. It calls nothing more in a sync that has failed.

    Args:
        bucket_size: Not used: size of verl's buckets between rollout and serving engine, in bytes.
        is_master: True on the trainer rank that publishes.
        engine: Engine name in the group ``wtransfer.engines``.
        options: Options of the engine.
        listen: Address to listen at, for rollouts on other hosts: ``tcp:host:port``. Default: one
            that only this host can reach.
        deadline_s: Longest time without progress of a round, in seconds.
        timeout_s: Longest wait of a rollout for a whole set, and of the master, when a round has
            failed, for a gather that other ranks have not joined; in seconds.
    """

    def __init__(
        self,
        bucket_size: int,  # noqa: ARG002  # verl gives it to every engine
        is_master: bool = False,
        *,
        engine: str = "shm",
        options: Mapping[str, Any] | None = None,
        listen: str | None = None,
        deadline_s: float = 30.0,
        timeout_s: float = 600.0,
    ) -> None:
        self._is_master = is_master
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        # Of a trainer's master.
        self._source = StreamSource(timeout_s)
        self._open_publisher = functools.partial(
            Publisher,
            self._source,
            engine=engine,
            options=dict(options or {}),
            listen=listen,
            deadline_s=deadline_s,
        )
        self._publisher: Publisher | None = None
        self._sending = self._ends = False
        # Of a rollout.
        self._received: _ReceivedSet | None = None
        self._session: WorkerSession | None = None
        self._handed_over = False

    def prepare(self) -> dict[str, Any]:
        """Listen, on the trainer's master; drop what a failed sync has left, on all.

        Raises:
            PluginError: No such engine, or it cannot be loaded.
            AddressInUseError: The address is in use.
        """
        self._release()
        if not self._is_master:
            return {}
        # A publisher of its own for each sync: its workers are the rollouts that verl has now,
        # without those that it has removed, and it keeps no memory between two syncs.
        self._publisher = self._open_publisher()
        return {"address": self._publisher.address, "token": self._publisher.token}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`: for each trainer rank, each rollout."""
        (publisher,) = filter(None, metadata)
        return (
            {"publisher": [None] * actor_wg_world_size},
            {
                "publisher": [publisher] * rollout_world_size,
                "rank": list(range(rollout_world_size)),
                "num_ranks": [rollout_world_size] * rollout_world_size,
            },
        )

    def init_process_group(
        self, publisher: dict[str, Any] | None, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Join the publisher, on a rollout; returns when it has been reached.

        Raises:
            AuthenticationError: The publisher has another token.
            StallError: It cannot be reached in time.
        """
        if publisher is None:
            return
        self._received = _ReceivedSet()
        self._session = WorkerSession(
            self._received,
            join=publisher["address"],
            token=publisher["token"],
            # Nothing to roll back to: what serves is in the serving engine.
            keep_previous=False,
            # All rollouts commit or none, and no round begins without one of them.
            instance="rollouts",
            rank=rank,
            num_ranks=num_ranks,
            deadline_s=self._deadline_s,
        )
        deadline = Deadline(self._deadline_s)
        while not (status := self._session.status()).connected:
            if isinstance(status.refusal, AuthenticationError):
                raise status.refusal
            if deadline.expired:
                raise StallError(
                    f"the trainer at {publisher['address']} was not reached within "
                    f"{self._deadline_s:g} s; rollouts on other hosts need "
                    "engine_kwargs.wtransfer.listen=tcp:HOST:PORT"
                    + (f"; last error: {status.refusal}" if status.refusal else ""),
                    seconds=self._deadline_s,
                )
            time.sleep(POLL_S)

    async def send_weights(
        self, weights: Weights, global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish what verl gathers, on the master; take part in the gathers, on other ranks.

        The generator is read to its end unless it raises, or one step of it takes more than
        `timeout_s`: each step may be a collective, in which other ranks wait.

        Returns:
            Numbers of the sync, for verl's metrics; empty on other ranks than the master.

        Raises:
            WTransferError: The sync failed; no rollout has yielded a tensor of it, or, after the
                commit, some have not.
        """
        if not self._is_master:
            for _ in weights:
                pass
            return {}
        assert self._publisher is not None, "verl calls prepare() first"
        self._sending, self._ends = True, False
        try:
            report = await self._publish(self._publisher, weights, f"step-{global_steps}")
        except BaseException:
            # Rollouts that wait for the set learn it by the loss of their publisher; verl finalizes
            # no sync that has failed.
            self._ends = True
            raise
        finally:
            self._sending = False
            if self._ends:
                self._release_failed()
        return {"wtransfer/seconds": report.seconds["total"], "wtransfer/bytes": report.nbytes}

    async def _publish(self, publisher: Publisher, weights: Weights, version: str) -> Report:
        # verl announces nothing: the first set is copied to be known, later ones as the last was.
        with self._source.round(None, weights):
            await asyncio.to_thread(publisher.wait_for_workers, 1, self._deadline_s)
            return (await publisher.publish_async(version)).raise_unless_ok()

    def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Wait for the whole set, verified and committed, and return a pass over it.

        Blocks until then, rather than at the first step of the pass: verl's server adapters order
        their serving engine to receive before they take that step, and an engine whose weights do
        not come then serves no more.

        Args:
            global_steps: verl's number of the step, for errors.

        Raises:
            WTransferError: The round was aborted, or the publisher lost: the set is not complete.
            StallError: It did not come in time.
        """
        session, received = self._session, self._received
        assert session is not None, "verl calls init_process_group() first"
        assert received is not None
        deadline = Deadline(self._timeout_s)
        try:
            while not session.commit_pending(min(POLL_S, deadline.remaining())):
                status = session.status()
                if status.pending:
                    continue
                if status.last_error is not None:
                    raise status.last_error
                if not status.connected:
                    raise PeerLostError(
                        f"the weights of step {global_steps} will not come: the trainer has ended "
                        "the sync; its own error says why"
                    )
                if deadline.expired:
                    raise StallError(
                        f"the weights of step {global_steps} have not come within "
                        f"{self._timeout_s:g} s (engine_kwargs.wtransfer.timeout_s)",
                        seconds=self._timeout_s,
                    )
        except BaseException:
            self._release_failed()
            raise
        self._handed_over = True
        return _pass_over(received.tensors)

    def handed_over(self) -> bool:
        """Return True if the serving engine may have a part of the set of this sync."""
        return self._handed_over

    def finalize(self) -> None:
        """End the sync, and release its memory; while `send_weights` runs, at the end of it."""
        # A rollout's failure is known to the manager while this rank still publishes. Both run in
        # the event loop of one actor, so neither sees the other half done.
        self._ends = True
        if not self._sending:
            self._release()

    def _release(self) -> None:
        self._handed_over = False
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
        session, self._session = self._session, None
        received, self._received = self._received, None
        if session is not None and received is not None:
            session.close()
            # At once: the session's objects know each other, and go when the collector finds them.
            received.tensors = {}

    def _release_failed(self) -> None:
        try:
            self._release()
        except Exception:
            # The sync's error is the one to raise.
            logger.exception("the failed sync has not ended as it should")


class _ReceivedSet:
    """Target of a rollout's session: the set, until the serving engine has it."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, torch.Tensor] = {}

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return None: the serving engine knows the names that its model has."""
        return None

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def capture(self) -> Mapping[str, torch.Tensor] | None:
        return self.tensors


async def _pass_over(
    tensors: Mapping[str, torch.Tensor],
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for item in tensors.items():
        yield item
