"""The worker's side of both connectors, in both roles."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from wtransfer.connectors.interface import ConnectorWorker
from wtransfer.connectors.p2p.buffer import StagingBuffer
from wtransfer.connectors.p2p.client import P2PClient, RemoteLoads, start_threads
from wtransfer.connectors.p2p.protocol import (
    MISSING,
    P2PHandshake,
    P2POptions,
    P2PWorkerMetadata,
)
from wtransfer.connectors.p2p.server import P2PServer
from wtransfer.connectors.settings import Instance, read_options
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

    options_cls: ClassVar[type[P2POptions]] = P2POptions
    server_cls: ClassVar[type[P2PServer]] = P2PServer
    client_cls: ClassVar[type[P2PClient]] = P2PClient

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        extra = config.kv_transfer_config.kv_connector_extra_config
        self.options = read_options(self.options_cls, extra)
        self.token = resolve_token(self.options.token)
        """Secret of both instances; None: each server makes one, and requests carry it."""
        self.instance = Instance.of(config)
        self.fence = WorkerFence(self.instance.rank)
        # Keys of the present step that are not staged; None: the step does not count.
        self._not_saved: set[bytes] | None = None
        self._staging_errors: Counter[type[Exception]] = Counter()
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
                self._buffer = StagingBuffer(geometry, options.shelf_bytes)
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

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin to load, and end the leases of requests."""
        if self._loads is not None:
            for load in self.metadata.loads:
                self._loads.start(load)
            for request_id in self.metadata.aborted_loads:
                self._loads.abort(request_id)
            for remote in self.metadata.remote_releases:
                self._loads.release(remote)
        if self._buffer is not None:
            for request_id in self.metadata.expiring:
                self._buffer.expire_in(request_id, self.options.lease_s)
            for request_id in self.metadata.released:
                self._buffer.release(request_id)
            self._buffer.invalidate(self.metadata.invalidated)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no step computes with blocks that are still loading."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        """Do nothing: blocks are staged whole, once the step counts."""

    def wait_for_save(self) -> None:
        """Stage the blocks that this step has filled."""
        saves: list[Save] = self.metadata.saves
        self._not_saved = {key for save in saves for key in save.keys}
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
        """Return this worker's weights and room, and what of this step it has not staged."""
        missing = self._not_saved
        if missing is None:
            missing = {key for save in self.metadata.saves for key in save.keys}
        num_unleased = self._buffer.num_unleased() if self._buffer is not None else 0
        return P2PWorkerMetadata(self.fence.report(), missing, self.metadata.step, num_unleased)

    def clear_connector_metadata(self) -> None:
        """End the step."""
        super().clear_connector_metadata()
        self._not_saved = None

    def get_stats(self) -> dict[str, int]:
        """Return counters (``_total``) and what there is now."""
        stats: dict[str, int] = {}
        if self.instance.sends:
            stats["staging_errors_total"] = self._staging_errors.total()
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
        filling = [
            (key, slot, block)
            for save in saves
            for key, block in zip(save.keys, save.block_ids, strict=True)
            if (slot := buffer.reserve(key)) is not None
        ]
        if filling:
            keys, slots, blocks = zip(*filling, strict=True)
            chunks = Chunks(0, np.array(slots), keys, np.array(blocks).reshape(-1, 1))
            mark = saver.pages.mark()
            assert self._threads is not None
            copies: list[Future[Headers]] = []
            try:
                # One by one: those that are under way are waited for if a later one cannot begin.
                copies.extend(
                    self._threads.submit(saver.gather, task, mark)
                    for task in saver.tasks(chunks, self.options.num_threads)
                )
                headers = np.concatenate([copy.result() for copy in copies])
            except Exception as error:
                # A slot may be filled again only when nothing is copied to it any more.
                wait(copies)
                kind = type(error)
                if kind not in self._staging_errors:
                    # As text: a log record of the error would keep its frames, and the memory.
                    logger.warning(
                        "KV blocks could not be staged (later errors of this kind are only "
                        "counted): %s",
                        traceback.format_exc(),
                    )
                self._staging_errors[kind] += 1
                for key in keys:
                    buffer.abort(key)
            else:
                for key, header in zip(keys, headers, strict=True):
                    buffer.commit(key, header)
        staged = set()
        for save in saves:
            leased = buffer.lease(save.request_id, save.keys)
            staged |= {key for key, slot in zip(save.keys, leased, strict=True) if slot != MISSING}
        return staged

    def _admits(self, planned: Load | Save) -> bool:
        return self.fence.admits(planned.versions)
