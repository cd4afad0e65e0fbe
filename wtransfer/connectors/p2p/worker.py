"""The worker's side of both connectors, in both roles."""

from __future__ import annotations

import logging
import traceback
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from wtransfer.connectors.interface import ConnectorWorker
from wtransfer.connectors.p2p.buffer import StagingBuffer
from wtransfer.connectors.p2p.client import P2PClient, RemoteLoads, start_threads
from wtransfer.connectors.p2p.protocol import P2PHandshake, P2POptions, P2PWorkerMetadata
from wtransfer.connectors.p2p.server import P2PServer
from wtransfer.connectors.serving_config import Instance
from wtransfer.kv.cache_view import CacheView
from wtransfer.kv.copier import Chunks, Copier
from wtransfer.kv.fence import WorkerFence
from wtransfer.kv.header import BlockGeometry
from wtransfer.kv.slots import HeaderForm
from wtransfer.transport.channel import resolve_token

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future, ThreadPoolExecutor

    import torch

    from wtransfer.connectors.interface import KVConnectorMetadata
    from wtransfer.connectors.p2p.protocol import Load, Save
    from wtransfer.kv.slots import Headers

logger = logging.getLogger(__name__)


class P2PWorker(ConnectorWorker):
    """Stages blocks of this rank, and fetches those that other instances have staged.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Not used.

    Raises:
        ConnectorOptionError: An option is not valid.
    """

    options: P2POptions
    server_cls: ClassVar[type[P2PServer]] = P2PServer
    client_cls: ClassVar[type[P2PClient]] = P2PClient

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self.token = resolve_token(self.options.token)
        """Secret of both instances; None: each server makes one, and requests carry it."""
        self.instance = Instance.of(config)
        self.fence = WorkerFence(self.instance.rank)
        # Keys of the present step that are not staged.
        self._not_saved: set[bytes] = set()
        self._num_staging_errors = 0
        self._threads: ThreadPoolExecutor | None = None
        self._buffer: StagingBuffer | None = None
        self._saver: Copier | None = None
        self._server: P2PServer | None = None
        self._loads: RemoteLoads | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches; take the staging buffer's memory and listen.

        Raises:
            ConnectorOptionError: The caches cannot be copied by block, or no block fits into the
                staging buffer.
            StagingMemoryError: There is not enough memory for it.
            AddressError: The address to listen at is not valid.
            RuntimeError: A thread cannot be started.
        """
        instance, options = self.instance, self.options
        view = CacheView(kv_caches)
        geometry = BlockGeometry(
            instance.block_size,
            view.pages,
            instance.num_ranks,
            f"{instance.model} {instance.dtype}",
        )
        try:
            if instance.sends:
                self._threads = start_threads(options.num_threads, "wtransfer-save")
                self._buffer = StagingBuffer(geometry, options.staging_bytes)
                form = HeaderForm(geometry.digest, instance.rank)
                self._saver = Copier(self._buffer.memory, view.blocks, form)
                self._server = self.server_cls(self._buffer, instance, options, self.token)
            if instance.receives:
                self._loads = RemoteLoads(
                    geometry=geometry,
                    rank=instance.rank,
                    pages=view.blocks,
                    options=options,
                    token=self.token,
                    client_cls=self.client_cls,
                    admits=self._admits,
                )
        except BaseException:
            self.shutdown()
            raise

    def get_handshake_metadata(self) -> P2PHandshake:
        """Return this worker's address and weights."""
        version = self.fence.version()
        if self._server is None or self._buffer is None:
            return P2PHandshake(version)
        return P2PHandshake(
            version, self._server.address, self._server.new_token, self._buffer.num_slots
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step; until it counts, nothing of it is staged."""
        super().bind_connector_metadata(connector_metadata)
        self._not_saved = {key for save in self.metadata.saves for key in save.keys}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin to load, and end the leases of requests."""
        if self._loads is not None:
            for load in self.metadata.loads:
                self._loads.start(load)
            for request_id in self.metadata.aborted_loads:
                self._loads.abort(request_id)
        if self._buffer is not None:
            for request_id, lease_s in self.metadata.ended.items():
                self._buffer.lease(request_id, (), lease_s)
            self._buffer.invalidate(self.metadata.invalidated)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no step computes with blocks that are still loading."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are staged whole, once the step counts."""

    def wait_for_save(self) -> None:
        """Stage the blocks that this step has filled."""
        saves: list[Save] = self.metadata.saves
        if self._buffer is not None and self._saver is not None and saves:
            # A host commits between two steps: the bytes are those of the weights compared here.
            admitted = [save for save in saves if self._admits(save)]
            self._not_saved -= self._stage(self._buffer, self._saver, admitted)

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended, well or not."""
        return None, (self._loads and self._loads.take_received()) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded."""
        return self._loads.take_failed_blocks() if self._loads is not None else set()

    def build_connector_worker_meta(self) -> P2PWorkerMetadata:
        """Return this worker's weights and room, and the keys of this step that are not staged."""
        num_unleased = self._buffer.num_unleased() if self._buffer is not None else 0
        step = self.metadata.step
        return P2PWorkerMetadata(self.fence.report(), self._not_saved, step, num_unleased)

    def get_stats(self) -> dict[str, int]:
        """Return counters (``_total``) and present numbers."""
        stats = {"staging_errors_total": self._num_staging_errors}
        for part in (self._loads, self._buffer, self._server):
            stats |= part.get_stats() if part is not None else {}
        return stats

    def shutdown(self) -> None:
        """End all loads and leases; release memory, threads and cache."""
        # The loads stay: those that end now are reported.
        server, buffer = self._server, self._buffer
        self._server = self._buffer = self._saver = None
        for part in (self._loads, server, buffer):
            if part is not None:
                part.close()
        if self._threads is not None:
            self._threads.shutdown()

    def _stage(self, buffer: StagingBuffer, saver: Copier, saves: list[Save]) -> set[bytes]:
        """Copy blocks to the staging buffer and lease them; return the keys that are staged."""
        for save in saves:
            # First, so that blocks that are staged already are not evicted for the others.
            buffer.lease(save.request_id, save.keys)
        wanted = {
            key: block
            for save in saves
            for key, block in zip(save.keys, save.block_ids, strict=True)
        }
        slots = buffer.reserve(wanted)
        if slots:
            blocks = np.array([wanted[key] for key in slots]).reshape(-1, 1)
            chunks = Chunks(0, np.array([*slots.values()]), [*slots], blocks)
            mark = saver.pages.mark()
            assert self._threads is not None
            copies: list[Future[Headers]] = []
            try:
                # One by one: copies under way are waited for if a later one cannot begin.
                copies.extend(
                    self._threads.submit(saver.gather, task, mark)
                    for task in saver.tasks(chunks, self.options.num_threads)
                )
                buffer.commit(slots, np.concatenate([copy.result() for copy in copies]))
            except Exception:
                # A slot may be filled again only when nothing is copied to it any more.
                wait(copies)
                buffer.abort(slots)
                if not self._num_staging_errors:
                    # As text: a log record of the error would keep its frames, and the memory.
                    logger.warning(
                        "KV blocks could not be staged (later errors are only counted): %s",
                        traceback.format_exc(),
                    )
                self._num_staging_errors += 1
        staged: set[bytes] = set()
        for save in saves:
            staged.update(save.keys[: len(buffer.lease(save.request_id, save.keys))])
        return staged

    def _admits(self, planned: Load | Save) -> bool:
        return self.fence.admits(planned.versions)
