"""The worker of one rank: its model, its cache, and its side of the connector."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from wtransfer.connectors.interface import KVConnectorRole
from wtransfer.errors import CommitError
from wtransfer.testing.mini_engine.cache import PagedCache
from wtransfer.testing.mini_engine.contract import (
    AttentionLayer,
    ConnectorOutput,
    ForwardContext,
    StepResult,
)
from wtransfer.testing.mini_engine.model import PagedTransformer, TensorParallelRank
from wtransfer.testing.mini_engine.serialize import deserialize, serialize
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weight_version import process_weights

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from wtransfer.connectors.interface import KVConnectorBase_V1
    from wtransfer.testing.mini_engine.config import EngineConfig
    from wtransfer.testing.mini_engine.contract import StepPlan
    from wtransfer.transport.communicator import Communicator
    from wtransfer.weight_version import WeightVersion

logger = logging.getLogger(__name__)

COMMIT_WAIT_S = 10.0
"""Longest wait for an update that another rank has received and this one has not, in seconds."""


class Worker:
    """Executes steps. Every call comes from the thread that owns the model.

    Args:
        config: Configuration of the engine.
        model: The whole model; every rank has one.
        connector: Worker side of the connector; None: the engine runs without one.
        group: Group of the ranks; None: a single rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: PagedTransformer,
        connector: KVConnectorBase_V1 | None,
        group: Communicator | None = None,
    ) -> None:
        self.model = model
        self.connector = connector
        self._tp = TensorParallelRank(config.model, group)
        self.cache = PagedCache(config.model, config.cache, len(self._tp.heads))
        self.session = _make_session(config, model, self._tp.rank)
        """Receives weights; None: they never change."""
        self._caches = self.cache.by_name()
        self._names = list(self._caches)
        self._attention_layers = {name: AttentionLayer(each) for name, each in self._caches.items()}
        self._attn_metadata: Any = []
        self._bad_blocks: set[int] = set()
        if connector is not None:
            connector.register_kv_caches(self._caches)

    def handshake(self) -> Any:
        """Return the connector's handshake metadata, serialized; None if it has none."""
        return serialize(self.connector.get_handshake_metadata()) if self.connector else None

    def close(self) -> None:
        """Release everything; the model keeps its weights."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._tp.close)
            if self.connector is not None:
                stack.callback(self.connector.shutdown)
            if self.session is not None:
                stack.callback(self.session.close)

    def step(self, plan: StepPlan) -> StepResult:
        """Commit a pending update, then compute the spans between the connector's calls.

        The spans are computed only if all ranks have the weight versions of the plan. Otherwise
        some of them build on blocks of other weights; the scheduler learns it from the result, and
        plans anew. Meanwhile the connector must not take anything for computed.
        """
        self._commit()
        version = self._version()
        expected = plan.versions[self._tp.rank] if plan.versions else None
        # Every rank computes, or none: ranks wait for each other in every layer.
        refused = self._tp.any(version is None or version != expected)
        if self.connector is None:
            return StepResult(version, None if refused else self._compute(plan))
        with self._withheld(refused):
            metadata = deserialize(plan.connector_metadata)
            self.connector.handle_preemptions(metadata)
            self.connector.bind_connector_metadata(metadata)
            tokens = self._load_and_compute(plan, self.connector, compute=not refused)
        # Without weights to serve from, the connector must not serve either.
        with self._withheld(version is None):
            output = self._end_connector_step(self.connector, plan.finished_req_ids)
        return StepResult(version, tokens, output)

    def _commit(self) -> None:
        session = self.session
        # Agreed on by all ranks: a rank that commits waits for the others, which must not compute.
        if session is None or not self._tp.any(session.status().pending):
            return
        try:
            session.commit_pending(COMMIT_WAIT_S)
        except CommitError:
            # The old weights are whole again, or the session is empty and nothing is computed.
            logger.exception("the update was not applied")

    def _version(self) -> WeightVersion | None:
        """Return this rank's weight version; None if it has none to serve from."""
        # The weights of an empty session have a name of their own; they may be torn all the same.
        if self.session is not None and self.session.state == "empty":
            return None
        return process_weights.version()

    def _withheld(self, condition: bool) -> AbstractContextManager[None]:
        return process_weights.withheld() if condition else contextlib.nullcontext()

    def _load_and_compute(
        self, plan: StepPlan, connector: KVConnectorBase_V1, *, compute: bool
    ) -> dict[str, int] | None:
        """Load, compute and save; return the tokens, or None if the step does not count."""
        context = ForwardContext(plan.spans, self._attention_layers)
        self._attn_metadata = plan.spans
        if plan.loads_first:
            connector.start_load_kv(context)
            compute = compute and not self._tp.any(self.has_load_errors())
            if not compute:
                # Otherwise the loads would go on in blocks that other requests have by then.
                for name in self._names:
                    connector.wait_for_layer_load(name)
        tokens = self._compute(plan) if compute else None
        if not plan.loads_first:
            connector.start_load_kv(context)
        # A layer's load may fail after the forward pass has begun.
        elif tokens is not None and self._tp.any(self.has_load_errors()):
            tokens = None
        if tokens:
            connector.wait_for_save()
        return tokens

    def _compute(self, plan: StepPlan) -> dict[str, int]:
        if not plan.spans:
            return {}
        hooks = (self._before_layer, self._after_layer) if self.connector else ()
        tokens = self.model.forward(plan.spans, self.cache, self._tp, *hooks)
        return {span.request_id: token for span, token in zip(plan.spans, tokens, strict=True)}

    def _before_layer(self, number: int) -> None:
        assert self.connector is not None
        self.connector.wait_for_layer_load(self._names[number])

    def _after_layer(self, number: int) -> None:
        assert self.connector is not None
        name = self._names[number]
        self.connector.save_kv_layer(name, self._caches[name], self._attn_metadata)

    def has_load_errors(self) -> bool:
        """Return whether any load of this step is known to have failed."""
        assert self.connector is not None
        self._bad_blocks |= self.connector.get_block_ids_with_load_errors()
        return bool(self._bad_blocks)

    def _end_connector_step(
        self, connector: KVConnectorBase_V1, finished_req_ids: set[str]
    ) -> ConnectorOutput:
        sent, received = connector.get_finished(finished_req_ids)
        failed = connector.get_failed_recving()
        self.has_load_errors()
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        metadata = serialize(connector.build_connector_worker_meta())
        connector.clear_connector_metadata()
        return ConnectorOutput(sent or set(), received or set(), failed, bad_blocks, metadata)


def make_worker(
    config: EngineConfig, group: Communicator | None = None, *, owns_process: bool = False
) -> Worker:
    """Return the worker of one rank.

    Args:
        config: Configuration of the engine.
        group: Group of the ranks; None: a single rank.
        owns_process: True if this process has no other model. Without a publisher, its weights are
            then named by their content, so that KV cache is exchanged with all instances that have
            the same weights; with a publisher, the session names them.
    """
    model = PagedTransformer(config.model, config.seed)
    rank = group.rank if group else 0
    worker = Worker(config, model, config.make_connector(KVConnectorRole.WORKER, rank), group)
    if owns_process and worker.session is None:
        process_weights.vouch(model)
    return worker


def _make_session(config: EngineConfig, model: PagedTransformer, rank: int) -> WorkerSession | None:
    if config.join is None:
        return None
    return WorkerSession(
        model,
        join=config.join,
        token=config.token,
        instance=config.engine_id,
        rank=rank,
        num_ranks=config.num_ranks,
        name=f"{config.engine_id}/{rank}",
    )
