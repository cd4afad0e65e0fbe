"""The worker's side, of either kind and on either end."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.connectors.interface import ConnectorWorker
from wtransfer.connectors.relay.layout import SlotLayout
from wtransfer.connectors.relay.link import Here
from wtransfer.connectors.relay.links import Links
from wtransfer.connectors.relay.loads import Loads
from wtransfer.connectors.relay.options import RelayOptions
from wtransfer.connectors.relay.pages import CachePages
from wtransfer.connectors.relay.plan import RelayHandshake, RelaySaid
from wtransfer.connectors.relay.saving import Saving, request_holder
from wtransfer.connectors.relay.shelf import Shelf
from wtransfer.connectors.relay.taking import Taker
from wtransfer.connectors.settings import Instance, read_options
from wtransfer.kv.fence import WorkerFence

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from wtransfer.connectors.relay.desk import Desk
    from wtransfer.connectors.relay.link import Link
    from wtransfer.connectors.relay.plan import Load, Save


class RelayWorker(ConnectorWorker):
    """Puts blocks on the shelf of this rank, and fetches them from those of others.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Not looked at.

    Raises:
        ConnectorOptionError: An option cannot be used.
    """

    options_cls: ClassVar[type[RelayOptions]] = RelayOptions
    """What its options are."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        extra = config.kv_transfer_config.kv_connector_extra_config
        self.options = read_options(self.options_cls, extra)
        """Its options."""
        self.instance = Instance.of(config)
        """Where it belongs."""
        self.fence = WorkerFence(self.instance.rank)
        """What it knows of the weights."""
        self._loads = Loads(self._admits)
        self._step_counts = False
        self._pages: CachePages | None = None
        self._shelf: Shelf | None = None
        self._saving: Saving | None = None
        self._desk: Desk | None = None
        self._taker: Taker | None = None
        self._links: Links | None = None

    # -- what kinds have to say

    @abstractmethod
    def make_desk(self, shelf: Shelf) -> Desk:
        """Return what answers those who ask for blocks."""

    @abstractmethod
    def make_link(self, address: str, token: str, here: Here) -> Link:
        """Return a link to a worker of another instance.

        Args:
            address: Where it listens, as a request says.
            token: What to prove to know there, as a request says.
            here: This worker.
        """

    # -- the worker's side

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches; take the shelf's memory and listen.

        Raises:
            ConnectorOptionError: The caches cannot be copied by block, or no block fits on the
                shelf.
            StagingMemoryError: There is not enough memory for the shelf.
            AddressError: The address to listen at cannot be used.
        """
        self._pages = CachePages(kv_caches, self.instance)
        layout, rank = SlotLayout(self._pages.geometry), self.instance.rank
        try:
            if self.instance.sends:
                self._shelf = Shelf(layout, self.options.shelf_bytes, rank)
                self._saving = Saving(self._pages, self._shelf, self._admits)
                self._desk = self.make_desk(self._shelf)
            if self.instance.receives:
                self._loads.block_nbytes = layout.geometry.nbytes
                self._taker = Taker(self._pages, layout, rank, self.options.num_threads)
                here = Here(self._taker, self._loads, self.options.deadline_s)
                self._links = Links(here, lambda at, token: self.make_link(at, token, here))
        except BaseException:
            self.shutdown()
            raise

    def get_handshake_metadata(self) -> RelayHandshake:
        """Say where this worker listens, and what it computes with."""
        version = self.fence.version()
        if self._desk is None:
            return RelayHandshake(version)
        return RelayHandshake(version, self._desk.address, self.told_token(self._desk))

    def told_token(self, desk: Desk) -> str:  # noqa: ARG002
        """Return what a request shall carry for those who ask; empty: they know it."""
        return ""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin to load, and hear what became of requests."""
        if self._links is not None:
            self._start(self._links)
        if self._shelf is not None:
            for request_id in self.metadata.leave:
                self._shelf.last(request_holder(request_id), self.options.lease_s)
            for request_id in self.metadata.drop:
                self._shelf.release(request_holder(request_id))
            self._shelf.withdraw(self.metadata.withdrawn)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no step computes with what is still being loaded."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Begin to put what this step has computed of a layer on the shelf."""
        if self._saving is not None and self.metadata.saves:
            self._saving.layer(layer_name, self.metadata.saves)

    def wait_for_save(self) -> None:
        """Return once what this step has filled is on the shelf."""
        if self._saving is not None:
            self._saving.finish()
        self._step_counts = True

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended, well or not."""
        return None, self._loads.received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded."""
        return self._loads.missing()

    def build_connector_worker_meta(self) -> RelaySaid:
        """Say what this worker computes with, and what a step that did not count did not save."""
        saves = () if self._step_counts else self.metadata.saves
        return RelaySaid(self.fence.report(), {name for save in saves for name in save.names})

    def clear_connector_metadata(self) -> None:
        """Forget the step, and what it began to save without letting it count."""
        super().clear_connector_metadata()
        self._step_counts = False
        if self._saving is not None:
            self._saving.drop()

    def get_stats(self) -> dict[str, int]:
        """Return what has happened so far."""
        counts = self._loads.counts()
        for part in (self._shelf, self._desk):
            counts |= part.counts() if part is not None else {}
        return counts

    def shutdown(self) -> None:
        """End all loads and leases, and let go of memory, threads and cache."""
        parts = (self._links, self._taker, self._desk, self._saving, self._shelf, self._pages)
        self._links = self._taker = self._desk = self._saving = self._shelf = self._pages = None
        for part in parts:
            if part is not None:
                part.close()

    def _start(self, links: Links) -> None:
        for load in self.metadata.loads:
            loading = self._loads.begin(load)
            if loading is not None and self._admits(load):
                links.load(loading)
            elif loading is not None:
                self._loads.end(loading, "weights")
                links.over(load.place)
        for request_id in self.metadata.ended:
            self._loads.give_up(request_id)
        for place in self.metadata.unwanted:
            links.over(place)

    def _admits(self, planned: Load | Save) -> bool:
        return self.fence.admits(planned.versions)
