"""The scheduler's side, of either kind and on either end."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.connectors.fenced import WeightReport, reported_versions
from wtransfer.connectors.interface import ConnectorScheduler
from wtransfer.connectors.naming import BlockNaming
from wtransfer.connectors.progress import Progress, Tracked, only_group
from wtransfer.connectors.relay.options import RelayOptions
from wtransfer.connectors.relay.parameters import TransferParameters, read_parameters
from wtransfer.connectors.relay.plan import (
    Load,
    Place,
    RelayHandshake,
    RelayMetadata,
    RelaySaid,
    Save,
)
from wtransfer.connectors.settings import Instance, read_options
from wtransfer.kv.fence import SchedulerFence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from wtransfer.connectors.interface import KVConnectorHandshakeMetadata, KVConnectorOutput
    from wtransfer.connectors.naming import RequestNames
    from wtransfer.weights import Stamps


logger = logging.getLogger(__name__)

MAX_REFUSED = 256
"""Refused addresses that are logged, each once. More are only counted: requests make them up."""


class _Known:
    """One request.

    Args:
        request: The serving engine's own object.
        told: What its user says of it.
        names: Of its blocks.
    """

    def __init__(self, request: Any, told: TransferParameters, names: RequestNames) -> None:
        self.told = told
        self.names = names
        self.num_prompt = len(request.prompt_token_ids or ())
        self.num_computed = 0
        self.saved: list[tuple[int, bytes]] = []
        # Stays set when saves are taken back: the workers may have leased slots to the request.
        self.has_saves = False
        self.is_settled = not told.do_remote_prefill

    def forget_other_weights(self, fingerprint: str | None) -> None:
        """Believe no more that anything was saved, unless it was under the present weights.

        The request has lost its blocks since, and is computed anew.
        """
        names = self.names.under(fingerprint or "", len(self.saved))
        if [name for _, name in self.saved] != [bytes(name) for name in names]:
            self.saved.clear()

    @property
    def place(self) -> Place:
        told = self.told
        lists = list(told.remote_addresses), list(told.remote_tokens)
        return Place(told.remote_engine_id, told.remote_request_id, *lists)


class RelayScheduler(ConnectorScheduler):
    """Decides which blocks are put on the shelves, and which are fetched.

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
        self._naming = BlockNaming(self.instance.block_size, self.instance.root)
        self._fence = SchedulerFence(self.instance.num_ranks)
        self._progress = Progress()
        self._workers: dict[int, RelayHandshake] = {}
        self._known: dict[str, _Known] = {}
        self._loading: set[str] = set()
        self._next = RelayMetadata()
        self._counts: Counter[str] = Counter()
        self._refused: set[str] = set()

    @abstractmethod
    def dials(self, address: str) -> bool:
        """Return whether an address is one of this kind; a request tells it, so it may be any."""

    def allows(self, address: str) -> bool:  # noqa: ARG002
        """Return whether the options let workers dial an address of this kind."""
        return True

    # -- a request begins

    def on_new_request(self, request: Any) -> None:
        """Take note of a request."""
        self._know(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens the other instance has whole blocks of."""
        known = self._know(request)
        known.num_computed = num_computed_tokens
        fingerprint = self._fence.begin(request.request_id)
        known.forget_other_weights(fingerprint)
        if known.is_settled or fingerprint is None:
            return 0, False
        block_size = self.instance.block_size
        most = min(known.told.remote_num_tokens, request.num_tokens - 1)
        num_blocks = len(known.names.under(fingerprint, most // block_size))
        num_new = num_blocks * block_size - num_computed_tokens
        fits = known.told.remote_weights == fingerprint and num_computed_tokens % block_size == 0
        return (num_new, True) if fits and num_new > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Hear where to load to; or that nothing is wanted, and let the other instance know."""
        request_id = request.request_id
        known = self._know(request)
        fingerprint = self._fence.fingerprint(request_id)
        self._fence.ensure_begun(request_id)
        if known.is_settled:
            return
        known.is_settled = True
        if not num_external_tokens:
            self._next.unwanted.append(known.place)
            return
        block_size = self.instance.block_size
        part = slice(
            known.num_computed // block_size,
            (known.num_computed + num_external_tokens) // block_size,
        )
        self._loading.add(request_id)
        self._counts["loads"] += 1
        self._next.loads.append(
            Load(
                request_id,
                known.place,
                [bytes(name) for name in known.names.under(fingerprint or "")[part]],
                list(only_group(blocks.get_block_ids())[part]),
                self._versions(request_id),
            )
        )

    # -- a step

    def build_connector_meta(self, scheduler_output: Any) -> RelayMetadata:
        """Return what the workers have to do in this step."""
        metadata, self._next = self._next, RelayMetadata()
        for load in metadata.loads:
            load.versions = self._versions(load.request_id)
        for tracked in self._progress.step(scheduler_output):
            save = self._save(tracked)
            if save is not None:
                metadata.saves.append(save)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear what the workers compute with, and which loads have ended."""
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, WeightReport):
            self._fence.update(said.versions)
        for request_id in connector_output.finished_recving or ():
            self._counts["received" if request_id in self._loading else "received_unknown"] += 1
            self._loading.discard(request_id)
        if isinstance(said, RelaySaid) and said.not_saved:
            self._take_back(lambda saved: saved[1] in said.not_saved)
        if connector_output.invalid_block_ids:
            invalid = connector_output.invalid_block_ids
            self._next.withdrawn += self._take_back(lambda saved: saved[0] in invalid)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Hear where the workers listen, and what they compute with."""
        self._fence.update(reported_versions(metadata))
        for rank, each in metadata.items():
            if isinstance(each, RelayHandshake) and each.address:
                self._workers[rank] = each

    # -- a request ends

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell where its blocks can be had; keep those that are still being written to."""
        request_id = request.request_id
        known = self._known.pop(request_id, None)
        told = self._hand_on(request_id, known) if known is not None else None
        if known is not None and not known.is_settled:
            self._next.unwanted.append(known.place)
        if request_id in self._loading:
            self._next.ended.append(request_id)
        self._fence.forget(request_id)
        self._progress.forget(request_id)
        return request_id in self._loading, told

    def get_stats(self) -> dict[str, int]:
        """Return what has happened so far."""
        now = {"requests": len(self._known), "loads_under_way": len(self._loading)}
        return {**self._counts, **now}

    def shutdown(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._loading.clear()

    # -- one request

    def _know(self, request: Any) -> _Known:
        known = self._known.get(request.request_id)
        if known is None:
            told = self._read(request)
            known = _Known(request, told, self._naming.of(request))
            self._known[request.request_id] = known
            self._progress.know(request)
        return known

    def _read(self, request: Any) -> TransferParameters:
        told = read_parameters(getattr(request, "kv_transfer_params", None))
        if told is None:
            self._counts["parameters_refused"] += 1
        if told is None or not self._is_ours(told):
            return TransferParameters(do_remote_decode=bool(told and told.do_remote_decode))
        return told

    def _is_ours(self, told: TransferParameters) -> bool:
        """Return whether a request's blocks can be fetched by this kind of connector."""
        return (
            told.do_remote_prefill
            and self.instance.receives
            and bool(told.remote_addresses)
            and all(map(self.dials, told.remote_addresses))
            and self._all_allowed(told.remote_addresses)
        )

    def _all_allowed(self, addresses: Iterable[str]) -> bool:
        refused = {each for each in addresses if not self.allows(each)}
        if not refused:
            return True
        self._counts["peers_refused"] += 1
        for address in sorted(refused - self._refused)[: MAX_REFUSED - len(self._refused)]:
            self._refused.add(address)
            logger.warning(
                "a request's blocks are at %s, which is not in allowed_peers: they are computed "
                "here and not fetched. If an instance of yours listens there, add its address or "
                "network to allowed_peers in kv_connector_extra_config",
                address,
            )
        return False

    def _versions(self, request_id: str) -> Stamps:
        return self._fence.versions(request_id) or ()

    def _save(self, tracked: Tracked) -> Save | None:
        request_id = tracked.request.request_id
        known, fingerprint = self._known.get(request_id), self._fence.fingerprint(request_id)
        if known is None or fingerprint is None or not self.instance.sends:
            return None
        if not known.told.do_remote_decode:
            return None
        # What was generated is the other instance's to compute.
        num_tokens = min(tracked.num_computed, known.num_prompt)
        names = known.names.under(fingerprint, num_tokens // self.instance.block_size)
        part = slice(len(known.saved), len(names))
        if part.start >= part.stop:
            return None
        named, block_ids = [bytes(name) for name in names[part]], tracked.block_ids[part]
        known.saved += zip(block_ids, named, strict=True)
        known.has_saves = True
        self._counts["blocks_to_save"] += len(named)
        return Save(request_id, named, block_ids, self._versions(request_id))

    def _take_back(self, is_wrong: Callable[[tuple[int, bytes]], bool]) -> list[bytes]:
        """Believe no more that a block was saved, nor those after it; return their names.

        The host computes a request anew from the first of them on.
        """
        names = []
        for known in self._known.values():
            first = next((i for i, saved in enumerate(known.saved) if is_wrong(saved)), None)
            if first is not None:
                names += [name for _, name in known.saved[first:]]
                del known.saved[first:]
        return names

    def _hand_on(self, request_id: str, known: _Known) -> dict[str, Any] | None:
        """Return what the instance needs that goes on with a request; None: it has nothing."""
        if not known.has_saves:
            return None
        fingerprint = self._fence.fingerprint(request_id)
        knows_workers = len(self._workers) == self.instance.num_ranks
        if not known.saved or fingerprint is None or not knows_workers:
            self._next.drop.append(request_id)
            return None
        self._next.leave.append(request_id)
        workers = [self._workers[rank] for rank in range(self.instance.num_ranks)]
        return TransferParameters(
            do_remote_prefill=True,
            remote_engine_id=self.instance.engine_id,
            remote_request_id=request_id,
            remote_addresses=tuple(each.address for each in workers),
            remote_tokens=tuple(each.token for each in workers if each.token),
            remote_num_tokens=len(known.saved) * self.instance.block_size,
            remote_weights=fingerprint,
        ).plain()
