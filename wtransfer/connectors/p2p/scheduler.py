"""The scheduler's side of both connectors, in both roles."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wtransfer.connectors.fenced import WeightReport, reported_versions
from wtransfer.connectors.interface import ConnectorScheduler
from wtransfer.connectors.naming import BlockNaming
from wtransfer.connectors.p2p.protocol import (
    Load,
    P2PHandshake,
    P2PMetadata,
    P2POptions,
    P2PWorkerMetadata,
    Save,
    TransferParams,
    read_params,
)
from wtransfer.connectors.serving_config import Instance
from wtransfer.connectors.tracked_requests import Tracked, TrackedRequests, only_group
from wtransfer.kv.fence import SchedulerFence
from wtransfer.weight_version import instance_fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wtransfer.connectors.interface import KVConnectorHandshakeMetadata, KVConnectorOutput
    from wtransfer.connectors.naming import RequestNames

logger = logging.getLogger(__name__)


@dataclass
class _Request:
    params: TransferParams
    keys: RequestNames
    refused_peer: str
    """Address of its blocks that must not be dialed, if there is one."""
    # Once: either its load is planned, or the other instance was told to release it.
    is_settled: bool
    saved: list[tuple[int, bytes]] = field(default_factory=list)
    """Block and key of each saved block, in order."""
    has_run: bool = False
    """True if a step has computed the request since it got its blocks."""


class P2PScheduler(ConnectorScheduler):
    """Decides which blocks are staged, and which are fetched.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Not used.

    Raises:
        ConnectorOptionError: An option is not valid.
    """

    options: P2POptions

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self.instance = Instance.of(config)
        self._naming = BlockNaming(self.instance.block_size, self.instance.root)
        self._fence = SchedulerFence(self.instance.num_ranks)
        self._progress = TrackedRequests()
        self._workers: dict[int, P2PHandshake] = {}
        self._requests: dict[str, _Request] = {}
        self._loading: set[str] = set()
        self._next = P2PMetadata()
        self._counts: Counter[str] = Counter()
        # Slots without a lease that workers reported last; None: no report yet.
        self._num_unleased: int | None = None
        self._reported_step = 0
        # Keys planned since that report, with the last step that planned each.
        self._unreported: dict[bytes, int] = {}
        self._postponed: set[str] = set()

    @abstractmethod
    def is_address(self, address: str) -> bool:
        """Return whether an address is of this connector's kind."""

    def allows(self, address: str) -> bool:  # noqa: ARG002
        """Return whether the options let workers connect to an address."""
        return True

    # -- a request begins

    def on_new_request(self, request: Any) -> None:
        """Record a new request."""
        self._register(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens the other instance has staged whole blocks of.

        A host loads all of them or none: `update_state_after_alloc` counts from their end. None,
        at most once for each request: its blocks have no room in the staging buffers so far as
        the last report says, and the next one may tell of more.
        """
        request_id = request.request_id
        known = self._requests.get(request_id) or self._read(request)
        if (
            known.params.do_remote_decode
            and request_id not in self._postponed
            and self._room < min(self._num_slots, self._num_prompt_blocks(request))
        ):
            self._postponed.add(request_id)
            return None, False
        if known.is_settled or self._fence.current is None:
            return 0, False
        fingerprint = instance_fingerprint(self._fence.current)
        num_new = self._num_staged_tokens(request, known, fingerprint) - num_computed_tokens
        fits = known.params.remote_weights == fingerprint
        is_whole = num_computed_tokens % self.instance.block_size == 0
        return (num_new, True) if fits and is_whole and num_new > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan a load into a request's blocks, or release the request on the other instance."""
        request_id = request.request_id
        known = self._register(request)
        if known.has_run:
            # The request has lost its blocks, and is computed anew, perhaps under other weights. A
            # request whose load has ended gets blocks once more, too, but before its first step.
            known.has_run = False
            self._fence.forget(request_id)
        self._fence.ensure_begun(request_id)
        fingerprint = self._fence.fingerprint(request_id) or ""
        if known.saved and known.saved[0][1] != bytes(known.keys.under(fingerprint)[0]):
            # Saved under other weights.
            known.saved.clear()
        if known.is_settled:
            return
        known.is_settled = True
        load = Load(request_id, known.params)
        self._next.loads.append(load)
        if num_external_tokens:
            end = self._num_staged_tokens(request, known, fingerprint)
            block_size = self.instance.block_size
            part = slice((end - num_external_tokens) // block_size, end // block_size)
            load.keys = [bytes(key) for key in known.keys.under(fingerprint)[part]]
            load.block_ids = list(only_group(blocks.get_block_ids())[part])
            self._loading.add(request_id)

    # -- a step

    def build_connector_meta(self, scheduler_output: Any) -> P2PMetadata:
        """Return the work of this step."""
        metadata, self._next = self._next, P2PMetadata(step=self._next.step + 1)
        for load in metadata.loads:
            load.versions = self._fence.versions(load.request_id) or ()
        for tracked in self._progress.step(scheduler_output):
            save = self._save(tracked, metadata.step)
            if save is not None:
                metadata.saves.append(save)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the workers' weights, ended loads and failed blocks."""
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, WeightReport):
            self._fence.update(told.versions)
        for request_id in connector_output.finished_recving or ():
            self._counts["received_unknown_total"] += request_id not in self._loading
            self._loading.discard(request_id)
        if isinstance(told, P2PWorkerMetadata):
            if told.step >= self._reported_step:
                self._reported_step, self._num_unleased = told.step, told.num_unleased
                self._unreported = {
                    key: step for key, step in self._unreported.items() if step > told.step
                }
            if told.not_saved:
                self._take_back(lambda _, key: key in told.not_saved)
        invalid = connector_output.invalid_block_ids
        if invalid:
            self._next.invalidated += self._take_back(lambda block, _: block in invalid)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Record the workers' weights and addresses."""
        self._fence.update(reported_versions(metadata))
        given = {rank: each for rank, each in metadata.items() if isinstance(each, P2PHandshake)}
        self._workers = {rank: each for rank, each in given.items() if each.address}

    # -- a request ends

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return where the request's blocks are staged; hold blocks that are being loaded into."""
        request_id = request.request_id
        known = self._requests.pop(request_id, None)
        params = self._hand_over(request_id, known) if known is not None else None
        if known is not None and not known.is_settled:
            self._next.loads.append(Load(request_id, known.params))
        if request_id in self._loading:
            self._next.aborted_loads.append(request_id)
        self._fence.forget(request_id)
        self._progress.forget(request_id)
        self._postponed.discard(request_id)
        return request_id in self._loading, params

    def get_stats(self) -> dict[str, int]:
        """Return counters (``_total``) and present numbers."""
        now = {"requests": len(self._requests), "loads_under_way": len(self._loading)}
        return {**self._counts, **now}

    # -- parameters

    def _register(self, request: Any) -> _Request:
        known = self._requests.get(request.request_id)
        if known is None:
            known = self._requests[request.request_id] = self._read(request)
            self._progress.know(request)
            if known.refused_peer:
                self._counts["peers_refused_total"] += 1
                # Once: clients can make addresses up.
                if self._counts["peers_refused_total"] == 1:
                    logger.warning(
                        "a request's blocks are at %s, which is not in allowed_peers: they are "
                        "computed here and not fetched. If an instance of yours listens there, add "
                        "its address or network to allowed_peers in kv_connector_extra_config "
                        "(later requests of this kind are only counted)",
                        known.refused_peer,
                    )
        return known

    def _read(self, request: Any) -> _Request:
        """Return a request with as much of its parameters as can be used."""
        params = read_params(getattr(request, "kv_transfer_params", None))
        params.do_remote_decode &= self.instance.sends
        addresses = params.remote_addresses
        can_fetch = (
            params.do_remote_prefill
            and self.instance.receives
            and bool(addresses)
            and all(map(self.is_address, addresses))
        )
        refused = [each for each in addresses if can_fetch and not self.allows(each)]
        is_settled = not can_fetch or bool(refused)
        return _Request(params, self._naming.of(request), "".join(refused[:1]), is_settled)

    # -- the staging buffers

    @property
    def _num_slots(self) -> int:
        return min((each.num_slots for each in self._workers.values()), default=0)

    @property
    def _room(self) -> int:
        """Number of blocks that are sure to find room in every worker's staging buffer.

        A host may end a request before it hands on the report of its last step, so a block that
        finds no room would be advertised. Too low a count only costs hits: another instance may
        have released slots since the report, and a block may be staged already.
        """
        reported = self._num_slots if self._num_unleased is None else self._num_unleased
        return reported - len(self._unreported)

    def _num_prompt_blocks(self, request: Any) -> int:
        return len(request.prompt_token_ids or ()) // self.instance.block_size

    # -- one request

    def _num_staged_tokens(self, request: Any, known: _Request, fingerprint: str) -> int:
        """Return how many tokens can be fetched, from the first on, whatever the weights.

        At least one is left to compute.
        """
        most = min(known.params.remote_num_tokens, request.num_tokens - 1)
        block_size = self.instance.block_size
        return len(known.keys.under(fingerprint, most // block_size)) * block_size

    def _save(self, tracked: Tracked, step: int) -> Save | None:
        request_id = tracked.request.request_id
        known, fingerprint = self._requests.get(request_id), self._fence.fingerprint(request_id)
        if known is None:
            return None
        known.has_run = True
        if fingerprint is None or not known.params.do_remote_decode:
            return None
        # Generated tokens are computed by the other instance.
        num_computed = tracked.num_computed // self.instance.block_size
        most = min(num_computed, self._num_prompt_blocks(tracked.request))
        keys = known.keys.under(fingerprint, most)
        start = len(known.saved)
        new_keys: list[bytes] = []
        for key in map(bytes, keys[start:]):
            if key not in self._unreported and self._room <= 0:
                break
            self._unreported[key] = step
            new_keys.append(key)
        if not new_keys:
            return None
        block_ids = tracked.block_ids[start : start + len(new_keys)]
        known.saved += zip(block_ids, new_keys, strict=True)
        self._counts["blocks_to_save_total"] += len(new_keys)
        versions = self._fence.versions(request_id) or ()
        return Save(request_id, new_keys, block_ids, versions)

    def _take_back(self, is_wrong: Callable[[int, bytes], bool]) -> list[bytes]:
        """Take back wrong saves and all after them; return their keys.

        The host computes a request anew from the first of them on.
        """
        keys = []
        for known in self._requests.values():
            first = next((i for i, saved in enumerate(known.saved) if is_wrong(*saved)), None)
            if first is not None:
                keys += [key for _, key in known.saved[first:]]
                del known.saved[first:]
        return keys

    def _hand_over(self, request_id: str, known: _Request) -> dict[str, Any] | None:
        """Return the parameters for the instance that decodes a request; None: none is staged."""
        if not known.params.do_remote_decode:
            return None
        fingerprint = self._fence.fingerprint(request_id)
        knows_workers = len(self._workers) == self.instance.num_ranks
        is_staged = bool(known.saved) and fingerprint is not None and knows_workers
        # Also if all its saves were taken back: workers may have leased slots to it.
        self._next.ended[request_id] = self.options.lease_s if is_staged else 0.0
        if not is_staged:
            return None
        workers = [self._workers[rank] for rank in range(self.instance.num_ranks)]
        return TransferParams(
            do_remote_prefill=True,
            remote_engine_id=self.instance.engine_id,
            remote_request_id=request_id,
            remote_addresses=[each.address for each in workers],
            remote_tokens=[each.token for each in workers if each.token],
            remote_num_tokens=len(known.saved) * self.instance.block_size,
            remote_weights=fingerprint or "",
        ).to_plain()
