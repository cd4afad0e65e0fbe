"""The worker's side of both connectors, in both roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.connectors.interface import ConnectorWorker
from wtransfer.connectors.p2p.buffer import StagingBuffer
from wtransfer.connectors.p2p.client import ClientPool, LoadTracker, LocalSide, P2PClient
from wtransfer.connectors.p2p.copier import BlockLoader, BlockSaver, CacheView
from wtransfer.connectors.p2p.protocol import P2PHandshake, P2POptions, P2PWorkerMetadata
from wtransfer.connectors.p2p.server import P2PServer
from wtransfer.connectors.settings import Instance, read_options
from wtransfer.kv.fence import WorkerFence
from wtransfer.transport.channel import resolve_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from wtransfer.connectors.p2p.protocol import Load, Save


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
        self._tracker = LoadTracker(self._admits)
        self._step_counts = False
        self._cache: CacheView | None = None
        self._buffer: StagingBuffer | None = None
        self._saver: BlockSaver | None = None
        self._server: P2PServer | None = None
        self._loader: BlockLoader | None = None
        self._clients: ClientPool | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches; take the staging buffer's memory and listen.

        Raises:
            ConnectorOptionError: The caches cannot be copied by block, or no block fits into the
                staging buffer.
            StagingMemoryError: There is not enough memory for it.
            AddressError: The address to listen at is not valid.
        """
        instance, options = self.instance, self.options
        self._cache = cache = CacheView(kv_caches, instance)
        try:
            if instance.sends:
                self._buffer = StagingBuffer(cache.layout, options.shelf_bytes, instance.rank)
                self._saver = BlockSaver(cache, self._buffer, self._admits, options.num_threads)
                self._server = self.server_cls(self._buffer, instance, options, self.token)
            if instance.receives:
                self._tracker.block_nbytes = cache.layout.geometry.nbytes
                self._loader = BlockLoader(cache, instance.rank, options.num_threads)
                local = LocalSide(self._loader, self._tracker, options)
                self._clients = ClientPool(
                    local,
                    self.token,
                    lambda address, token: self.client_cls(address, token, local),
                )
        except BaseException:
            self.shutdown()
            raise

    def get_handshake_metadata(self) -> P2PHandshake:
        """Return this worker's address and weights."""
        version = self.fence.version()
        if self._server is None:
            return P2PHandshake(version)
        return P2PHandshake(version, self._server.address, self._server.new_token)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin to load, and end the leases of requests."""
        if self._clients is not None:
            self._start_loads(self._clients)
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
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Begin to stage what this step has computed of a layer."""
        if self._saver is not None and self.metadata.saves:
            self._saver.save_layer(layer_name, self.metadata.saves)

    def wait_for_save(self) -> None:
        """Return once the blocks that this step has filled are staged."""
        if self._saver is not None:
            self._saver.finish()
        self._step_counts = True

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended, well or not."""
        return None, self._tracker.take_received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded."""
        return self._tracker.take_failed_blocks()

    def build_connector_worker_meta(self) -> P2PWorkerMetadata:
        """Return this worker's weights, and what it did not save if the step did not count."""
        saves = () if self._step_counts else self.metadata.saves
        return P2PWorkerMetadata(self.fence.report(), {key for save in saves for key in save.keys})

    def clear_connector_metadata(self) -> None:
        """End the step; if it did not count, drop what it saved."""
        super().clear_connector_metadata()
        self._step_counts = False
        if self._saver is not None:
            self._saver.abort()

    def get_stats(self) -> dict[str, int]:
        """Return counters (``_total``) and what there is now."""
        stats = self._tracker.get_stats()
        for part in (self._buffer, self._server):
            stats |= part.get_stats() if part is not None else {}
        return stats

    def shutdown(self) -> None:
        """End all loads and leases; release memory, threads and cache."""
        parts = (
            self._clients,
            self._loader,
            self._server,
            self._saver,
            self._buffer,
            self._cache,
        )
        self._clients = self._loader = self._server = None
        self._saver = self._buffer = self._cache = None
        for part in parts:
            if part is not None:
                part.close()

    def _start_loads(self, clients: ClientPool) -> None:
        for load in self.metadata.loads:
            pending = self._tracker.begin(load)
            if pending is not None and self._admits(load):
                clients.load(pending)
            elif pending is not None:
                self._tracker.end(pending, "weights")
                clients.release(load.remote)
        for request_id in self.metadata.aborted_loads:
            self._tracker.abort(request_id)
        for remote in self.metadata.remote_releases:
            clients.release(remote)

    def _admits(self, planned: Load | Save) -> bool:
        return self.fence.admits(planned.versions)
