"""The scheduler's side of ``SharedStorageConnector``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.connectors.fenced import reported_versions
from wtransfer.connectors.interface import ConnectorScheduler
from wtransfer.connectors.naming import BlockNaming
from wtransfer.connectors.progress import Progress, only_group
from wtransfer.connectors.settings import Instance
from wtransfer.connectors.storage.counts import Counts
from wtransfer.connectors.storage.finder import Finder
from wtransfer.connectors.storage.messages import (
    StorageHandshake,
    StorageMetadata,
    StorageSaid,
    Transfer,
)
from wtransfer.connectors.storage.options import StorageOptions
from wtransfer.connectors.storage.store import Store, shelf_name
from wtransfer.errors import WTransferError
from wtransfer.kv.fence import SchedulerFence
from wtransfer.weights import instance_fingerprint, known_versions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wtransfer.blocks import OffloadKey
    from wtransfer.connectors.interface import KVConnectorOutput
    from wtransfer.connectors.naming import RequestNames
    from wtransfer.connectors.progress import Tracked
    from wtransfer.weights import WeightVersions


@dataclass
class _Known:
    """What is known of a request."""

    names: RequestNames
    first: int = 0
    """Block from which on names were looked for."""
    loads: bool = False
    """Whether what it begins with comes from here, from block `first` on."""
    num_saved: int = 0
    """Blocks that were given to the workers to store, or are not to be."""
    num_sure: int = 0
    """Tokens that steps which counted have computed, or began with."""
    last_step: int = -1
    """The last step in which something of it was computed."""
    doubtful: int = -1
    """Step that has to be over before it is sure that what the request began with is right."""
    is_invalidated: bool = False
    """Whether a load has failed; nothing more is looked for then."""
    tracked: Tracked | None = None
    """How far it has come; None before its first step."""


class _Computed(NamedTuple):
    """What a step was to make of a request."""

    known: _Known
    """The request."""
    tracked: Tracked
    """`_Known.tracked` in it: another one when the request has got other blocks since."""
    num_saved: int
    """`_Known.num_saved` before it."""
    num_computed: int
    """Tokens that are computed after it."""
    is_whole: bool
    """Whether it computed all that the request has, from the first token on."""


class _Parting(NamedTuple):
    """A request that has ended, and whose blocks stay. Its name may be another one's already."""

    request_id: str
    """Its name."""
    known: _Known
    """What is known of it."""
    versions: WeightVersions | None
    """What it began with."""


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
        self._finder = Finder(self._store, self._instance.num_ranks)
        self._known: dict[str, _Known] = {}
        self._loads: dict[str, Transfer] = {}
        self._step, self._heard = 0, -1
        self._layouts: dict[int, bytes] = {}
        self._computing: dict[int, list[_Computed]] = {}
        self._parting: list[_Parting] = []

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
        if fingerprint is None or beyond or known.is_invalidated or not self._instance.receives:
            return 0, False
        names = known.names.under(fingerprint, (request.num_tokens - 1) // block_size)
        return self._num_found(fingerprint, names[known.first :]) * block_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Hear which blocks a request has got.

        Raises:
            ConnectorOptionError: The model has several KV cache groups.
        """
        request_id = request.request_id
        self._fence.ensure_begun(request_id)
        num_blocks = num_external_tokens // self._instance.block_size
        known, versions = self._of(request), self._fence.versions(request_id)
        known.loads = num_blocks > 0
        if not num_blocks:
            return
        self._counts.add("blocks_found", num_blocks)
        part = slice(known.first, known.first + num_blocks)
        # Where the weights have changed since, without names: the workers refuse the blocks.
        names = [] if versions is None else known.names.under(instance_fingerprint(versions))[part]
        block_ids = only_group(blocks.get_block_ids())[part]
        load = self._transfer(request_id, versions, names, block_ids, known.first)
        self._loads[request_id] = load

    # -- a step

    def build_connector_meta(self, scheduler_output: Any) -> StorageMetadata:
        """Return what the workers have to load, and what they have to store."""
        self._step += 1
        told = StorageMetadata(self._step)
        for request_id, load in self._loads.items():
            load.versions = self._fence.versions(request_id) or ()
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
        if has_begun:
            # In other blocks than before, if there was a before, and perhaps by other weights.
            known.num_sure = 0
            # What somebody else has put there may be of other weights than these.
            others = self._num_blocks(tracked.num_before)
            known.num_saved = known.first if known.loads else others
        is_whole = tracked.num_before == 0
        computed = _Computed(known, tracked, known.num_saved, tracked.num_computed, is_whole)
        self._computing.setdefault(self._step, []).append(computed)
        if has_begun and tracked.num_before:
            # From here or from another connector: whether it could be loaded turns out on the
            # workers, and if it could not, what this step computes is wrong, on all of them.
            known.doubtful = self._step
        if known.doubtful <= self._heard:
            told.saves += self._saves(known, tracked.num_computed, self._fence.versions(request_id))

    def _num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens have, the last one perhaps in part."""
        return -(-num_tokens // self._instance.block_size)

    def _unsaved(
        self, known: _Known, num_computed: int, versions: WeightVersions | None
    ) -> list[OffloadKey]:
        """Return the names of blocks that are not stored yet, among so many tokens."""
        if known.tracked is None or versions is None or not self._instance.sends:
            return []
        whole = num_computed // self._instance.block_size
        return known.names.under(instance_fingerprint(versions), whole)[known.num_saved :]

    def _saves(
        self, known: _Known, num_computed: int, versions: WeightVersions | None
    ) -> list[Transfer]:
        """Return the blocks of a request that are to be stored, and take them for stored."""
        tracked, names = known.tracked, self._unsaved(known, num_computed, versions)
        if tracked is None or not names:
            return []
        first = known.num_saved
        block_ids = tracked.block_ids[first : first + len(names)]
        known.num_saved += len(names)
        return [self._transfer(tracked.request.request_id, versions, names, block_ids, first)]

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear which weights there are, and what became of loads and saves."""
        if connector_output.invalid_block_ids:
            self._finder.forget()
            self._invalidate(connector_output.invalid_block_ids)
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, StorageSaid):
            self._fence.update(said.versions)
            self._hear_steps(said)

    def _invalidate(self, invalid: set[int]) -> None:
        parting = (each.known for each in self._parting)
        for known in itertools.chain(self._known.values(), parting):
            block_ids = [] if known.tracked is None else known.tracked.block_ids
            wrong = [n for n, block in enumerate(block_ids) if block in invalid]
            if wrong:
                known.num_saved = min(known.num_saved, wrong[0])
                known.is_invalidated = True

    def _hear_steps(self, said: StorageSaid) -> None:
        ranks = range(self._instance.num_ranks)
        self._heard = max(self._heard, min(said.steps.get(rank, -1) for rank in ranks))
        counted = {said.saved.get(rank, -1) for rank in ranks} == {self._heard}
        began = known_versions(said.began.get(rank) for rank in ranks)
        # Nothing has changed within the step, of which all have spoken.
        together = {said.steps.get(rank, -1) for rank in ranks} == {self._heard}
        steady = together and began is not None and began == self._fence.current
        for step in [each for each in self._computing if each <= self._heard]:
            for computed in self._computing.pop(step):
                known = computed.known
                if known.tracked is not computed.tracked:
                    continue
                if counted and step == self._heard:
                    known.num_sure = computed.num_computed
                    if computed.is_whole and steady:
                        self._begin_anew(computed)
                else:
                    # The host has passed over the step, or over what was said of it.
                    known.num_saved = min(known.num_saved, computed.num_saved)

    def _begin_anew(self, computed: _Computed) -> None:
        """Take a request for one of these weights, which have computed all of it in one step.

        What was known of the weights when it was planned were others; so the workers have refused
        what it was to load and to store.
        """
        request_id = computed.tracked.request.request_id
        is_it = self._known.get(request_id) is computed.known
        if is_it and self._fence.versions(request_id) is None:
            self._fence.begin(request_id)
            computed.known.num_saved = 0

    # -- afterwards

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hear that a request has ended.

        Args:
            request: The request.
            block_ids: What it has now: a host may have taken its blocks since the last step.

        Returns:
            Whether its blocks stay for a step: they are not stored yet, as it was not sure that
            they are right.
        """
        request_id = request.request_id
        self._loads.pop(request_id, None)
        known, versions = self._known.pop(request_id, None), self._fence.versions(request_id)
        # All that is known by its name goes now: the next request may have the same.
        self._progress.forget(request_id)
        self._fence.forget(request_id)
        if known is None:
            return any(each.request_id == request_id for each in self._parting), None
        tracked = known.tracked
        stays = (
            tracked is not None
            and self._has_still(tracked, block_ids)
            and bool(self._unsaved(known, tracked.num_computed, versions))
        )
        if stays:
            self._parting.append(_Parting(request_id, known, versions))
        return stays, None

    def _has_still(self, tracked: Tracked, block_ids: list[int]) -> bool:
        """Return whether a request has all blocks that were computed of it."""
        whole = self._num_blocks(tracked.num_computed)
        return block_ids[:whole] == tracked.block_ids[:whole]

    def _part(self) -> list[Transfer]:
        """Return the last blocks of the requests that stayed, as far as they are sure now."""
        parting = []
        going = [each for each in self._parting if each.known.last_step <= self._heard]
        self._parting = [each for each in self._parting if each.known.last_step > self._heard]
        for request_id, known, began in going:
            versions = began if began == self._fence.current else None
            saves = [] if known.is_invalidated else self._saves(known, known.num_sure, versions)
            # With nothing to store as well: their blocks may go.
            parting += saves or [self._transfer(request_id, None, [], [], 0)]
        return parting

    def has_pending_push_work(self) -> bool:
        """Return whether requests that have ended wait for a step."""
        return bool(self._parting)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Hear which weights there are before the first step, and how blocks are laid out."""
        self._fence.update(reported_versions(metadata))
        self._layouts |= {
            rank: each.geometry
            for rank, each in metadata.items()
            if isinstance(each, StorageHandshake)
        }

    def reset_cache(self) -> bool:
        """Remove all blocks of this model under these weights, for every instance.

        Returns:
            Whether that was done: False while the weights change, and where the disk fails.
        """
        self._finder.forget()
        if self._fence.current is None:
            return False
        try:
            self._store.remove_shelf(self._shelf(instance_fingerprint(self._fence.current)))
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
            return self._finder.num_found(self._shelf(fingerprint), names)
        except WTransferError as error:
            self._counts.fail("lookup_failures", "error", error)
            return 0

    def _shelf(self, fingerprint: str) -> str:
        ranks = range(self._instance.num_ranks)
        layout = b"".join(self._layouts.get(rank, b"") for rank in ranks)
        return shelf_name(self._instance.root, fingerprint, layout)

    def _transfer(
        self,
        request_id: str,
        versions: WeightVersions | None,
        names: Sequence[bytes],
        block_ids: list[int],
        first: int,
    ) -> Transfer:
        shelf = self._shelf("" if versions is None else instance_fingerprint(versions))
        return Transfer(request_id, shelf, list(names), block_ids, versions or (), first)

    def _of(self, request: Any) -> _Known:
        known = self._known.get(request.request_id)
        if known is None:
            known = self._known[request.request_id] = _Known(self._naming.of(request))
            self._progress.know(request)
        return known
