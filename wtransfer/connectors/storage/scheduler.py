"""The scheduler's side of ``SharedStorageConnector``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.connectors.fence import SchedulerFence
from wtransfer.connectors.interface import ConnectorScheduler
from wtransfer.connectors.naming import BlockNaming
from wtransfer.connectors.progress import Progress, only_group
from wtransfer.connectors.settings import Instance
from wtransfer.connectors.storage.counts import Counts
from wtransfer.connectors.storage.files import look
from wtransfer.connectors.storage.messages import StorageMetadata, StorageSaid, Transfer
from wtransfer.connectors.storage.options import StorageOptions
from wtransfer.connectors.storage.store import Store, file_name, shelf_name
from wtransfer.errors import WTransferError
from wtransfer.weights import instance_fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wtransfer.blocks import OffloadKey
    from wtransfer.connectors.fence import Stamp
    from wtransfer.connectors.interface import KVConnectorOutput
    from wtransfer.connectors.naming import RequestNames
    from wtransfer.connectors.progress import Tracked
    from wtransfer.transport.files import Folder


class _Computed(NamedTuple):
    """What a step was to make of a request."""

    num_saved: int
    """`_Known.num_saved` before it."""
    num_computed: int
    """Tokens that are computed after it."""


@dataclass
class _Known:
    """What is known of a request."""

    names: RequestNames
    first: int = 0
    """Block from which on names were looked for."""
    num_saved: int = 0
    """Blocks that were given to the workers to store."""
    num_sure: int = 0
    """Tokens that steps which counted have computed, or began with."""
    last_step: int = -1
    """The last step in which something of it was computed."""
    doubtful: int = -1
    """Step that has to be over before it is sure that what the request began with is right."""
    spoilt: bool = False
    """Whether a load has failed; nothing more is looked for then."""
    tracked: Tracked | None = None
    """How far it has come; None before its first step."""


class StorageScheduler(ConnectorScheduler):
    """Looks for names, and says which blocks come and go.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Not needed.

    Raises:
        ConnectorOptionError: An option cannot be used.
        StorageError: The shared folder cannot.
    """

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self._instance = Instance.of(config)
        options = StorageOptions.of(config.kv_transfer_config.kv_connector_extra_config)
        self._fence = SchedulerFence(self._instance.num_ranks)
        self._naming = BlockNaming(self._instance.block_size, self._instance.root)
        self._progress = Progress()
        self._counts = Counts()
        self._store = Store(options.shared_storage_path)
        self._known: dict[str, _Known] = {}
        self._loads: dict[str, Transfer] = {}
        self._step, self._heard = 0, -1
        self._computing: dict[int, dict[str, _Computed]] = {}
        self._parting: list[str] = []

    # -- before a request runs

    def on_new_request(self, request: Any) -> None:
        """Hear of a request."""
        self._of(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens can be loaded, within the step."""
        known, block_size = self._of(request), self._instance.block_size
        known.first, beyond = divmod(num_computed_tokens, block_size)
        fingerprint = self._fence.begin(request.request_id)
        if fingerprint is None or beyond or known.spoilt or not self._instance.receives:
            return 0, False
        names = known.names.under(fingerprint, (request.num_tokens - 1) // block_size)
        return self._num_found(fingerprint, names[known.first :]) * block_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Hear which blocks a request has got.

        Raises:
            ConnectorOptionError: The model has several KV cache groups.
        """
        request_id = request.request_id
        self._fence.settle(request_id)
        num_blocks = num_external_tokens // self._instance.block_size
        if not num_blocks:
            return
        self._counts.add("blocks_found", num_blocks)
        known, fingerprint = self._of(request), self._fence.fingerprint(request_id)
        part = slice(known.first, known.first + num_blocks)
        # Where the weights have changed since, without names: the workers refuse the blocks.
        names = [] if fingerprint is None else known.names.under(fingerprint)[part]
        block_ids = only_group(blocks.get_block_ids())[part]
        load = self._transfer(request_id, fingerprint, names, block_ids, known.first)
        self._loads[request_id] = load

    # -- a step

    def build_connector_meta(self, scheduler_output: Any) -> StorageMetadata:
        """Return what the workers have to load, and what they have to store."""
        self._step += 1
        told = StorageMetadata(self._step)
        for request_id, load in self._loads.items():
            load.stamps = self._stamps(request_id)
            told.loads.append(load)
        self._loads = {}
        begun = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        begun.update(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id in self._known:
                self._known[request_id].tracked = None
        for tracked in self._progress.step(scheduler_output):
            self._compute(tracked, told, has_begun=tracked.request.request_id in begun)
        told.parting = self._part()
        return told

    def _compute(self, tracked: Tracked, told: StorageMetadata, *, has_begun: bool) -> None:
        """Take note of what a step computes of a request, and have it stored if it may be."""
        request_id, known = tracked.request.request_id, self._of(tracked.request)
        known.tracked, known.last_step = tracked, self._step
        computed = _Computed(known.num_saved, tracked.num_computed)
        self._computing.setdefault(self._step, {})[request_id] = computed
        if has_begun:
            # In other blocks than before, if there was a before.
            known.num_sure = 0
        if has_begun and tracked.num_before:
            # From here or from another connector: whether it could be loaded turns out on the
            # workers, and if it could not, what this step computes is wrong, on all of them.
            known.doubtful = self._step
        if known.doubtful <= self._heard:
            told.saves += self._saves(known, tracked.num_computed)

    def _unsaved(self, known: _Known, num_computed: int) -> list[OffloadKey]:
        """Return the names of blocks that are not stored yet, among so many tokens."""
        if known.tracked is None or not self._instance.sends:
            return []
        fingerprint = self._fence.fingerprint(known.tracked.request.request_id)
        if fingerprint is None:
            return []
        whole = num_computed // self._instance.block_size
        return known.names.under(fingerprint, whole)[known.num_saved :]

    def _saves(self, known: _Known, num_computed: int) -> list[Transfer]:
        """Return the blocks of a request that are to be stored, and take them for stored."""
        tracked, names = known.tracked, self._unsaved(known, num_computed)
        if tracked is None or not names:
            return []
        request_id = tracked.request.request_id
        fingerprint = self._fence.fingerprint(request_id)
        first = known.num_saved
        block_ids = tracked.block_ids[first : first + len(names)]
        known.num_saved += len(names)
        return [self._transfer(request_id, fingerprint, names, block_ids, first)]

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear which weights there are, and what became of loads and saves."""
        if connector_output.invalid_block_ids:
            self._spoil(connector_output.invalid_block_ids)
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, StorageSaid):
            self._fence.hear(said.stamps)
            self._hear_steps(said)

    def _spoil(self, invalid: set[int]) -> None:
        for known in self._known.values():
            block_ids = [] if known.tracked is None else known.tracked.block_ids
            wrong = [n for n, block in enumerate(block_ids) if block in invalid]
            if wrong:
                known.num_saved = min(known.num_saved, wrong[0])
                known.spoilt = True

    def _hear_steps(self, said: StorageSaid) -> None:
        ranks = range(self._instance.num_ranks)
        self._heard = max(self._heard, min(said.steps.get(rank, -1) for rank in ranks))
        counted = {said.saved.get(rank, -1) for rank in ranks} == {self._heard}
        for step in [each for each in self._computing if each <= self._heard]:
            for request_id, computed in self._computing.pop(step).items():
                known = self._known.get(request_id)
                if known is None:
                    continue
                if counted and step == self._heard:
                    known.num_sure = computed.num_computed
                else:
                    # The host has passed over the step, or over what was said of it.
                    known.num_saved = min(known.num_saved, computed.num_saved)

    # -- afterwards

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hear that a request has ended.

        Returns:
            Whether its blocks stay for a step: they are not stored yet, as it was not sure that
            they are right.
        """
        request_id = request.request_id
        self._loads.pop(request_id, None)
        known = self._known.get(request_id)
        stays = (
            known is not None
            and known.tracked is not None
            and bool(self._unsaved(known, known.tracked.num_computed))
        )
        if stays:
            self._parting.append(request_id)
        else:
            self._forget(request_id)
        return stays, None

    def _part(self) -> list[Transfer]:
        """Return the last blocks of the requests that stayed, as far as they are sure now."""
        parting = []
        for request_id in list(self._parting):
            known = self._known[request_id]
            if known.last_step > self._heard:
                continue
            saves = [] if known.spoilt else self._saves(known, known.num_sure)
            # With nothing to store as well: their blocks may go.
            parting += saves or [self._transfer(request_id, None, [], [], 0)]
            self._parting.remove(request_id)
            self._forget(request_id)
        return parting

    def _forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._progress.forget(request_id)
        self._fence.forget(request_id)

    def has_pending_work(self) -> bool:
        """Return whether requests that have ended wait for a step."""
        return bool(self._parting)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Hear which weights there are before the first step."""
        self._fence.hear({rank: each.stamp for rank, each in metadata.items()})

    def reset_cache(self) -> bool:
        """Remove all blocks of this model under these weights, for every instance.

        Returns:
            Whether that was done: False while the weights change, and where the disk fails.
        """
        if self._fence.now is None:
            return False
        try:
            self._store.remove_shelf(self._shelf(instance_fingerprint(self._fence.now)))
        except WTransferError as error:
            self._counts.fail("reset_failures", "error", error)
            return False
        return True

    def get_stats(self) -> dict[str, float]:
        """Return how many blocks were found, and how often the folder could not be read."""
        return self._counts.numbers()

    def shutdown(self) -> None:
        """Close the folder. A second call does nothing."""
        self._store.close()

    # -- names

    def _num_found(self, fingerprint: str, names: Sequence[OffloadKey]) -> int:
        """Return how many blocks from the first one on are there for all ranks."""
        try:
            shelf = self._store.shelf(self._shelf(fingerprint))
            if shelf is None:
                return 0
            with shelf:
                found = (self._is_there(shelf, name) for name in names)
                return sum(1 for _ in itertools.takewhile(bool, found))
        except WTransferError as error:
            self._counts.fail("lookup_failures", "error", error)
            return 0

    def _is_there(self, shelf: Folder, name: bytes) -> bool:
        ranks = range(self._instance.num_ranks)
        return all(look(shelf, file_name(name, rank)) is not None for rank in ranks)

    def _shelf(self, fingerprint: str) -> str:
        return shelf_name(self._instance.root, fingerprint)

    def _transfer(
        self,
        request_id: str,
        fingerprint: str | None,
        names: Sequence[bytes],
        block_ids: list[int],
        first: int,
    ) -> Transfer:
        shelf, stamps = self._shelf(fingerprint or ""), self._stamps(request_id)
        return Transfer(request_id, shelf, list(names), block_ids, stamps, first)

    def _stamps(self, request_id: str) -> list[Stamp]:
        stamps = self._fence.stamps(request_id) or ()
        return [(each.fingerprint, each.epoch) for each in stamps]

    def _of(self, request: Any) -> _Known:
        known = self._known.get(request.request_id)
        if known is None:
            known = self._known[request.request_id] = _Known(self._naming.of(request))
            self._progress.know(request)
        return known
