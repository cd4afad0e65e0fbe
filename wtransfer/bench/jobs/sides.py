"""Both sides of a connector in one process, called as a host with one request at a time does."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.config import KVCacheConfig, KVTransferConfig, ModelConfig, ServingConfig
from wtransfer.connectors.factory import KVConnectorFactory
from wtransfer.connectors.interface import KVConnectorOutput, KVConnectorRole
from wtransfer.connectors.storage.store import FORMAT, REMOVED
from wtransfer.deadline import Deadline
from wtransfer.errors import IncompleteUpdateError
from wtransfer.testing.mini_engine.contract import (
    KVCacheBlocks,
    NewRequestData,
    Request,
    SchedulerOutput,
)
from wtransfer.weights import process_weights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

    from wtransfer.bench.jobs.kv_cache import KVCache

BLOCK_SIZE = 16
"""Tokens of a block."""
PATIENCE_S = 300.0
"""Longest wait for a load, and for blocks to be free again, in seconds."""

# Short beside a load; and for most of one, nobody asks.
_POLL_S = 0.0002
_QUIET_PART = 0.7
_IDLE_S = 0.005
# All processes of the bench compute with the same ones, or no block would fit.
_WEIGHTS = "the bench's weights"


class Prefilled(NamedTuple):
    """A prompt that was computed."""

    params: dict[str, Any] | None
    """What the next instance needs to know."""
    save_s: float
    """Seconds of the step that went into saving."""


class Loaded(NamedTuple):
    """A prompt whose blocks were loaded."""

    plan_s: float
    """Seconds that the scheduler's side took."""
    load_s: float
    """Seconds from the order until all was in the cache."""


class Sides:
    """One instance. Use it as a context manager.

    Args:
        connector: Name of the connector.
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        options: Of the connector.
        cache: Of the only worker.
    """

    def __init__(self, connector: str, role: str, options: dict[str, Any], cache: KVCache) -> None:
        self._connector, self._cache = connector, cache
        self._folder = options.get("shared_storage_path")
        self._numbers = itertools.count()
        self._fastest_s = 0.0
        self._weights = process_weights.hold(_WEIGHTS)
        config = ServingConfig(
            kv_transfer_config=KVTransferConfig(connector, f"bench-{role}", role, None, options),
            cache_config=KVCacheConfig(cache.num_blocks, BLOCK_SIZE, cache.block_nbytes),
            model_config=ModelConfig("bench", "uint8"),
        )
        make = KVConnectorFactory.create_connector_v1
        self._scheduler = make(config, KVConnectorRole.SCHEDULER)
        self._worker = make(config, KVConnectorRole.WORKER)
        self._worker.register_kv_caches(cache.layers)
        said = self._worker.get_handshake_metadata()
        if said is not None:
            self._scheduler.set_xfer_handshake_metadata({0: said})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.shutdown()
        self._scheduler.shutdown()
        self._weights.close()

    # -- a request

    def prefill(self, tokens: list[int], block_ids: list[int]) -> Prefilled:
        """Take a prompt for computed: its blocks are what they shall be."""
        request = self._begin(tokens, {"do_remote_decode": True})
        self._scheduler.get_num_new_matched_tokens(request, 0)
        self._scheduler.update_state_after_alloc(request, KVCacheBlocks(block_ids), 0)
        self._bind(_step_of(request, block_ids))
        self._worker.start_load_kv(None)
        began = time.perf_counter()
        for name, layer in self._cache.layers.items():
            self._worker.save_kv_layer(name, layer, None)
        self._worker.wait_for_save()
        save_s = time.perf_counter() - began
        self._hear(*self._worker.get_finished(set()))
        return Prefilled(self._finish(request, block_ids), save_s)

    def load(
        self, tokens: list[int], params: dict[str, Any] | None, block_ids: list[int]
    ) -> Loaded:
        """Load all of a prompt but the last token.

        Args:
            tokens: Whole blocks of them, and one more.
            params: What the instance that has computed them says.
            block_ids: Where they belong.

        Raises:
            IncompleteUpdateError: Some of its blocks are not found, or do not come.
        """
        request = self._begin(tokens, params)
        began = time.perf_counter()
        number, is_later = self._scheduler.get_num_new_matched_tokens(request, 0)
        number = number or 0
        self._scheduler.update_state_after_alloc(request, KVCacheBlocks(block_ids), number)
        output = SchedulerOutput() if is_later else _step_of(request, block_ids, number)
        metadata = self._scheduler.build_connector_meta(output)
        plan_s = time.perf_counter() - began
        if number != len(tokens) - 1:
            raise self._incomplete(f"found {number} of {len(tokens) - 1} tokens")
        load_s = self._load(request, metadata, is_later=is_later)
        self._finish(request, block_ids)
        return Loaded(plan_s, load_s)

    def _load(self, request: Request, metadata: Any, *, is_later: bool) -> float:
        self._worker.handle_preemptions(metadata)
        self._worker.bind_connector_metadata(metadata)
        began = time.perf_counter()
        self._worker.start_load_kv(None)
        received = self._wait_for_load() if is_later else None
        load_s = time.perf_counter() - began
        self._fastest_s = min(load_s, self._fastest_s or load_s)
        missing = self._worker.get_block_ids_with_load_errors()
        if missing or received not in (None, {request.request_id}):
            raise self._incomplete(f"could not load {len(missing)} blocks")
        if not is_later:
            self._worker.wait_for_save()
        self._hear(None, received)
        return load_s

    def _wait_for_load(self) -> set[str]:
        """Return who has received; whoever asks takes turns with the threads that copy."""
        deadline = Deadline(PATIENCE_S)
        time.sleep(_QUIET_PART * self._fastest_s)
        while True:
            _, received = self._worker.get_finished(set())
            if received:
                return received
            deadline.check(f"a load by {self._connector}")
            time.sleep(_POLL_S)

    def forget(self) -> None:
        """Have nothing left of what was saved, so that each round finds what the first one found.

        Raises:
            StallError: Something stays.
        """
        deadline = Deadline(PATIENCE_S)
        self._scheduler.reset_cache()
        while self._worker.get_stats().get("leases") or self._is_removing():
            deadline.check(f"blocks that {self._connector} lets go of")
            time.sleep(_IDLE_S)

    def _is_removing(self) -> bool:
        """Whether files go in the background, which would be in the way of the next round."""
        if self._folder is None:
            return False
        return any(Path(self._folder, FORMAT).glob(f"{REMOVED}*"))

    # -- parts of it

    def _begin(self, tokens: list[int], params: dict[str, Any] | None) -> Request:
        request = Request(f"request-{next(self._numbers)}", tokens, 1, params)
        self._scheduler.on_new_request(request)
        return request

    def _bind(self, output: SchedulerOutput) -> None:
        metadata = self._scheduler.build_connector_meta(output)
        self._worker.handle_preemptions(metadata)
        self._worker.bind_connector_metadata(metadata)

    def _hear(self, sent: set[str] | None, received: set[str] | None) -> None:
        """End a step."""
        errors = self._worker.get_block_ids_with_load_errors()
        said = self._worker.build_connector_worker_meta()
        self._worker.clear_connector_metadata()
        self._scheduler.update_connector_output(KVConnectorOutput(sent, received, said, errors))

    def _finish(self, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
        """End a request, and wait until its blocks are free; return what the next one needs."""
        stays, params = self._scheduler.request_finished(request, list(block_ids))
        finished, deadline = {request.request_id}, Deadline(PATIENCE_S)
        while True:
            sent = self._idle_step(finished)
            if not stays or request.request_id in sent:
                return params
            deadline.check(f"blocks that {self._connector} sends")
            finished = set()
            time.sleep(_IDLE_S)

    def _idle_step(self, finished: set[str]) -> set[str]:
        """Make a step that computes nothing; return whose blocks are free after it."""
        self._bind(SchedulerOutput(finished_req_ids=finished))
        self._worker.start_load_kv(None)
        sent, received = self._worker.get_finished(finished)
        self._hear(sent, received)
        return sent or set()

    def _incomplete(self, what: str) -> IncompleteUpdateError:
        stats = {**self._scheduler.get_stats(), **self._worker.get_stats()}
        return IncompleteUpdateError(f"the bench's {self._connector} {what}: {stats}")


def prompt(number: int, num_blocks: int) -> list[int]:
    """Return the tokens of a round: so many blocks, and one more; none begins as another does."""
    return [number, *range(num_blocks * BLOCK_SIZE)]


def _step_of(request: Request, block_ids: Iterable[int], num_computed: int = 0) -> SchedulerOutput:
    """Return a step that computes a request."""
    data = (request.request_id, request.prompt_token_ids, (list(block_ids),), num_computed)
    scheduled = {request.request_id: request.num_tokens - num_computed}
    return SchedulerOutput([NewRequestData(*data)], num_scheduled_tokens=scheduled)
