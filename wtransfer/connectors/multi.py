"""Connector ``MultiConnector``: several connectors under one.

The first one in order that has KV of a request loads it; all of them save what is computed after
that. The option is vLLM's::

    kv_connector_extra_config = {
        "connectors": [
            {"kv_connector": "SharedMemoryConnector"},
            {"kv_connector": "SharedStorageConnector",
             "kv_connector_extra_config": {"shared_storage_path": "/mnt/kv"}},
        ]
    }

A sub-connector's configuration is the parent's with the fields given for it: ``engine_id`` and
``kv_role`` are inherited, ``kv_connector_module_path`` and ``kv_connector_extra_config`` are not.
A third party's sub-connector is fenced by itself where it does not name weights.

**Errors of one sub-connector do not disturb the others.** A failed query (look-up, events, worker
metadata, statistics) counts as an empty answer: it is logged once, then counted in the statistics
as ``<number>_<name>_unanswered_total``. Any other call reaches every sub-connector before the first
error is raised, and what the others have reported is returned by the next call. One exception: an
error in ``build_connector_meta`` ends the step, since the metadata of the others are lost, and with
them the loads that were promised.

**Reports of finished requests.** The host frees the blocks of a request at its first report, so
the worker's side reports each request once, when the last sub-connector that holds its blocks has
reported it. The holders are named in the connector metadata of the step after
``request_finished``; a report may precede that, and is kept while the request is running. A request
that ends while its load is in flight is reported as received, on every rank: ranks whose load has
ended before have reported it so already, and the host counts sent and received apart. But where
another sub-connector holds its blocks as well, every rank reports it as sent: those ranks, too,
must wait for that one, and the host takes no second report as received.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import msgspec

from wtransfer.connectors.factory import KVConnectorFactory
from wtransfer.connectors.fenced import REMOTE_WEIGHTS
from wtransfer.connectors.interface import (
    ConnectorScheduler,
    ConnectorSide,
    ConnectorWorker,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    KVEvent,
)
from wtransfer.connectors.serving_config import Instance, read_options
from wtransfer.connectors.told_blocks import ToldBlocks
from wtransfer.errors import ConnectorOptionError
from wtransfer.registry.resolve import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from typing_extensions import Self

    from wtransfer.connectors.interface import KVConnectorOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

# -- configuration ----------------------------------------------------------------------------


class SubConnectorOptions(msgspec.Struct):
    """Required field of a sub-connector; others are those of the host's ``KVTransferConfig``."""

    kv_connector: Annotated[str, msgspec.Meta(min_length=1)]


class MultiOptions(msgspec.Struct, kw_only=True):
    """Options of ``MultiConnector``."""

    connectors: Annotated[list[SubConnectorOptions], msgspec.Meta(min_length=1)]
    """Fields of each sub-connector; the first that has a prefix loads it, and all save."""


def sub_connector_fields(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the fields given for each sub-connector.

    Args:
        options: ``kv_connector_extra_config``.

    Raises:
        ConnectorOptionError: An option is unknown, missing, or of another type.
    """
    read_options(MultiOptions, options)
    return [
        {"kv_connector_module_path": None, "kv_connector_extra_config": {}, **fields}
        for fields in options["connectors"]
    ]


def sub_connector_configs(config: Any) -> list[Any]:
    """Return the configuration of each sub-connector: the parent's, but for ``kv_transfer_config``.

    Raises:
        ConnectorOptionError: The options are wrong, or name an unknown field.
    """
    configs = []
    parent = config.kv_transfer_config
    for number, fields in enumerate(sub_connector_fields(parent.kv_connector_extra_config)):
        try:
            transfer = dataclasses.replace(parent, **fields)
        except TypeError as error:
            known = ", ".join(each.name for each in dataclasses.fields(parent))
            raise ConnectorOptionError(
                f"connectors[{number}] ({fields['kv_connector']}): {error}; the fields are {known}"
            ) from error
        # Copied, as constructing it anew would run a host's own checks; the copy may be frozen.
        sub_config = copy.copy(config)
        object.__setattr__(sub_config, "kv_transfer_config", transfer)
        configs.append(sub_config)
    return configs


# -- what travels -----------------------------------------------------------------------------


@dataclass
class MultiMetadata(KVConnectorMetadata):
    """Connector metadata of a step."""

    metadata: list[KVConnectorMetadata] = field(default_factory=list)
    """Metadata of each sub-connector, in order."""
    new: set[str] = field(default_factory=set)
    """Requests that have arrived: former reports under their ids were of other requests."""
    loading: dict[str, int] = field(default_factory=dict)
    """Requests whose load begins and outlasts the step, with the sub-connector that loads."""
    finished: dict[str, list[int]] = field(default_factory=dict)
    """Requests that have finished, with the sub-connectors that hold their blocks."""
    finished_loading: dict[str, int] = field(default_factory=dict)
    """Requests in `finished` whose load has not ended on every rank, with the sub-connector that
    loads."""


@dataclass
class MultiWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker metadata of a step, of one rank or aggregated."""

    metadata: list[KVConnectorWorkerMetadata | None] = field(default_factory=list)
    """Metadata of each sub-connector, in order."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        """Merge another rank's metadata into this object, and return it."""
        assert isinstance(other, MultiWorkerMetadata)
        self.metadata = [
            theirs if ours is None else ours if theirs is None else ours.aggregate(theirs)
            for ours, theirs in zip(self.metadata, other.metadata, strict=True)
        ]
        return self


@dataclass
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """Handshake metadata of a rank."""

    metadata: list[KVConnectorHandshakeMetadata | None] = field(default_factory=list)
    """Metadata of each sub-connector, in order."""


# -- the two sides ----------------------------------------------------------------------------


class MultiSide(ConnectorSide):
    """Sub-connectors of one role, and calls to all of them.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Shape of the KV cache.

    Raises:
        ConnectorOptionError: The options are wrong.
        PluginError: A sub-connector cannot be found or loaded.
    """

    role: ClassVar[KVConnectorRole]

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        configs = sub_connector_configs(config)
        self.sub_connectors: list[KVConnectorBase_V1] = []
        """The connectors, in order."""
        self.names = [
            f"{number}_{each.kv_transfer_config.kv_connector}"
            for number, each in enumerate(configs)
        ]
        """Number and name of each connector, as in the statistics."""
        self._counts: Counter[str] = Counter()
        try:
            for each in configs:
                self.sub_connectors.append(
                    KVConnectorFactory.create_connector(each, self.role, kv_cache_config)
                )
        except BaseException:
            self.query_all(lambda c: c.shutdown())
            raise

    def call_all(self, call: Callable[[int, KVConnectorBase_V1], T]) -> list[T]:
        """Call every sub-connector, also after an error; return the results.

        Args:
            call: Gets a sub-connector's number, and the sub-connector.

        Raises:
            Exception: The first error; later ones are logged.
        """
        results: list[T] = []
        first: Exception | None = None
        for number, connector in enumerate(self.sub_connectors):
            try:
                results.append(call(number, connector))
            except Exception as error:  # noqa: PERF203
                if first is None:
                    first = error
                else:
                    logger.exception("%s has failed as well", self.names[number])
        if first is not None:
            raise first
        return results

    def query_all(self, query: Callable[[KVConnectorBase_V1], T]) -> list[T | None]:
        """Query every sub-connector; return the answers, None for one that raised.

        Args:
            query: Gets a sub-connector.
        """
        answers: list[T | None] = []
        for number, connector in enumerate(self.sub_connectors):
            try:
                answers.append(query(connector))
            except Exception:  # noqa: PERF203
                answers.append(None)
                unanswered = f"{self.names[number]}_unanswered_total"
                self._counts[unanswered] += 1
                if self._counts[unanswered] == 1:
                    logger.exception("%s has failed; taken as an empty answer", self.names[number])
        return answers

    def get_stats(self) -> dict[str, float]:
        """Return the statistics of all sub-connectors, each with its name as prefix."""
        stats: dict[str, float] = {}
        for name, given in zip(self.names, self.query_all(lambda c: c.get_stats()), strict=True):
            stats |= {f"{name}_{key}": value for key, value in (given or {}).items()}
        return {**self._counts, **stats}

    def shutdown(self) -> None:
        self.call_all(lambda _, c: c.shutdown())


class MultiScheduler(MultiSide, ConnectorScheduler):
    """The scheduler's side: chooses the sub-connector that loads a request."""

    role = KVConnectorRole.SCHEDULER

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        # By request the sub-connector of the last hit, and whether its load outlasts the step.
        self._hits: dict[str, tuple[int, bool]] = {}
        # Requests with a load in flight on any rank, with the sub-connector that loads.
        self._loading: dict[str, int] = {}
        # Of finished requests: loads whose end no rank has reported to the host.
        self._finished_loading: dict[str, int] = {}
        self._next = MultiMetadata()
        self._warned: set[int] = set()
        self._told = ToldBlocks()

    def on_new_request(self, request: Any) -> None:
        self._next.new.add(request.request_id)
        self.call_all(lambda _, c: c.on_new_request(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the first hit.

        Every sub-connector is asked, as it may rely on that. "Ask again" from one before the first
        hit is the answer.
        """

        def look_up(connector: KVConnectorBase_V1) -> tuple[int | None, bool]:
            # Converted here, where a malformed answer is an error of this sub-connector.
            found, outlasts = connector.get_num_new_matched_tokens(request, num_computed_tokens)
            return None if found is None else int(found), bool(outlasts)

        for number, answer in enumerate(self.query_all(look_up)):
            num_tokens, outlasts = answer or (0, False)
            if num_tokens is None:
                return None, False
            if num_tokens > 0:
                self._hits[request.request_id] = number, outlasts
                return num_tokens, outlasts
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Have the sub-connector of the hit load; the others get 0 tokens."""
        request_id = request.request_id
        loader, outlasts = self._hits.get(request_id, (-1, False))
        if num_external_tokens and outlasts:
            self._next.loading[request_id] = self._loading[request_id] = loader
        self.call_all(
            lambda number, c: c.update_state_after_alloc(
                request, blocks, num_external_tokens if number == loader else 0
            )
        )

    def build_connector_meta(self, scheduler_output: Any) -> MultiMetadata:
        metadata = self.call_all(lambda _, c: c.build_connector_meta(scheduler_output))
        step, self._next = self._next, MultiMetadata()
        step.metadata = metadata
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Give each sub-connector its own workers' metadata, and a copy of all else.

        A request that was received before its end, and is held by another sub-connector, is taken
        out of the host's ``finished_recving``: it is reported as sent once the holders are done.
        """
        received = connector_output.finished_recving or set()
        ended, held = {}, set()
        for request_id in {*received, *(connector_output.finished_sending or ())}:
            self._loading.pop(request_id, None)
            if request_id in self._finished_loading:
                ended[request_id] = self._finished_loading.pop(request_id)
            loader = self._next.finished_loading.pop(request_id, None)
            if loader is not None:
                # Its end was not reported to the workers yet.
                holders = self._next.finished[request_id]
                self._next.finished[request_id] = [each for each in holders if each != loader]
                if self._next.finished[request_id]:
                    held.add(request_id)
        worker_meta = connector_output.kv_connector_worker_meta

        def update(number: int, connector: KVConnectorBase_V1) -> None:
            output = copy.copy(connector_output)
            for name, value in vars(output).items():
                if isinstance(value, set):
                    setattr(output, name, set(value))
            # Also a load whose end the workers report as sent, for the other holders.
            own = {request_id for request_id, loader in ended.items() if loader == number}
            if own:
                output.finished_recving = {*(output.finished_recving or ()), *own}
            output.kv_connector_worker_meta = (
                worker_meta.metadata[number]
                if isinstance(worker_meta, MultiWorkerMetadata)
                else None
            )
            connector.update_connector_output(output)

        self.call_all(update)
        if held:
            received -= held

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether any sub-connector holds the blocks, and the merged parameters.

        Where two return the same parameter, the first one's is kept.
        """
        request_id = request.request_id
        self._hits.pop(request_id, None)
        # A request that arrived since the last step is over before the workers learn of it.
        self._next.new.discard(request_id)
        holders = self._next.finished[request_id] = []
        if request_id in self._loading:
            loader = self._loading.pop(request_id)
            self._next.finished_loading[request_id] = self._finished_loading[request_id] = loader
        params: dict[str, Any] = {}

        def finish(number: int, connector: KVConnectorBase_V1) -> None:
            holds, given = connector.request_finished(request, block_ids)
            if holds:
                holders.append(number)
            # The weights are the instance's, the same from every sub-connector.
            conflicts = params.keys() & (given or {}).keys() - {REMOTE_WEIGHTS}
            if not conflicts:
                params.update(given or {})
            elif number not in self._warned:
                # Not an error: any client's request could raise it. Blocks that are held for this
                # sub-connector's peer come back as for a peer that never fetches them.
                self._warned.add(number)
                logger.warning(
                    "%s and a connector before it both return %s for the next instance, which gets "
                    "the first one's; only one of them can hand requests over: give the others "
                    "another kv_role",
                    self.names[number],
                    sorted(conflicts),
                )

        self.call_all(finish)
        return bool(holders), params or None

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Give each sub-connector its own workers' metadata, if they have any."""

        def set_metadata(number: int, connector: KVConnectorBase_V1) -> None:
            own = {rank: each.metadata[number] for rank, each in metadata.items()}
            own = {rank: each for rank, each in own.items() if each is not None}
            if own:
                connector.set_xfer_handshake_metadata(own)

        self.call_all(set_metadata)

    def get_finished_count(self) -> int | None:
        """Return the number of workers that report a request; None: all.

        Raises:
            ConnectorOptionError: The sub-connectors do not agree.
        """
        counts = {each.get_finished_count() for each in self.sub_connectors}
        if len(counts) > 1:
            counts = {each or Instance.of(self.config).num_ranks for each in counts}
        if len(counts) > 1:
            raise ConnectorOptionError(
                f"connectors under one MultiConnector need reports of {counts} workers for each "
                "request; they must agree"
            )
        return counts.pop()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.call_all(lambda _, c: c.bind_gpu_block_pool(gpu_block_pool))

    def has_pending_push_work(self) -> bool:
        return any(self.query_all(lambda c: c.has_pending_push_work()))

    def has_pending_block_frees(self) -> bool:
        return any(self.query_all(lambda c: c.has_pending_block_frees()))

    def take_events(self) -> list[Any]:
        """Return the events of all; in one medium, a block is there while any of them has it."""
        events: list[Any] = []
        for answer in self.query_all(lambda c: list(c.take_events())):
            for event in answer or ():
                events += self._told.news(event) if isinstance(event, KVEvent) else [event]
        return events

    def reset_cache(self) -> bool | None:
        """Return False if any sub-connector does, else True if any does, else None."""
        answers = self.call_all(lambda _, c: c.reset_cache())
        return False if False in answers else True if True in answers else None


class MultiWorker(MultiSide, ConnectorWorker):
    """A worker's side: merges the reports of the sub-connectors."""

    role = KVConnectorRole.WORKER

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        # Of running requests: sub-connectors that have reported them as sent.
        self._early: dict[str, set[int]] = {}
        # Of finished requests: sub-connectors whose reports are outstanding.
        self._held: dict[str, set[int]] = {}
        # Requests in `_held` that ended while they were loaded here, and whether they are reported
        # as received.
        self._finished_loading: dict[str, bool] = {}
        # Loads in flight, with the sub-connector that loads.
        self._loading: dict[str, int] = {}
        # Reports that the host has not got yet: it gets none from a call that raises.
        self._received: set[str] = set()
        self._load_errors: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.call_all(lambda _, c: c.register_kv_caches(kv_caches))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        metadata = self._split(kv_connector_metadata)
        self.call_all(lambda number, c: c.handle_preemptions(metadata[number]))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        metadata = self._split(connector_metadata)
        super().bind_connector_metadata(connector_metadata)
        self._loading |= connector_metadata.loading
        for request_id, holders in connector_metadata.finished.items():
            outstanding, early = set(holders), self._early.pop(request_id, set())
            loader = connector_metadata.finished_loading.get(request_id)
            if loader is not None:
                outstanding.discard(loader)
                as_received = not outstanding
                # If not, this rank has reported it as received: the host frees the blocks once the
                # other ranks have.
                if request_id in self._loading:
                    outstanding.add(loader)
                    self._finished_loading[request_id] = as_received
            if outstanding:
                self._held[request_id] = outstanding - early
        # After `finished`: an id may end and be used again within one step.
        for request_id in connector_metadata.new:
            self._early[request_id] = set()
        self.call_all(lambda number, c: c.bind_connector_metadata(metadata[number]))

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.call_all(lambda _, c: c.clear_connector_metadata())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.call_all(lambda _, c: c.start_load_kv(forward_context, **kwargs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.call_all(lambda _, c: c.wait_for_layer_load(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.call_all(lambda _, c: c.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs))

    def wait_for_save(self) -> None:
        # Also where loads have failed: the host calls this only after a step that counts.
        self.call_all(lambda _, c: c.wait_for_save())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return each request once: when every sub-connector that holds its blocks has reported it.

        Reports of requests that are neither running nor held are dropped.
        """

        def collect(number: int, connector: KVConnectorBase_V1) -> None:
            sent, received = connector.get_finished(set(finished_req_ids))
            for request_id in sent or ():
                # A request that is held still is the former one of its id.
                waiting = self._held.get(request_id)
                if waiting is not None:
                    waiting.discard(number)
                elif request_id in self._early:
                    self._early[request_id].add(number)
            for request_id in received or ():
                if self._loading.get(request_id) != number:
                    continue
                del self._loading[request_id]
                if request_id in self._finished_loading:
                    self._held[request_id].discard(number)
                else:
                    self._received.add(request_id)

        self.call_all(collect)
        done = {request_id for request_id, waiting in self._held.items() if not waiting}
        loaded = {each for each in done if self._finished_loading.get(each)}
        for request_id in done:
            del self._held[request_id]
            if self._finished_loading.pop(request_id, None) is not None:
                # Still present if its end was reported as sent only.
                self._loading.pop(request_id, None)
        received, self._received = self._received | loaded, set()
        return done - loaded or None, received or None

    def get_failed_recving(self) -> set[str]:
        return set().union(*self.call_all(lambda _, c: c.get_failed_recving()))

    def get_block_ids_with_load_errors(self) -> set[int]:
        self.call_all(lambda _, c: self._load_errors.update(c.get_block_ids_with_load_errors()))
        errors, self._load_errors = self._load_errors, set()
        return errors

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        metadata = self.query_all(lambda c: c.build_connector_worker_meta())
        return MultiWorkerMetadata(metadata) if any(each is not None for each in metadata) else None

    def get_handshake_metadata(self) -> MultiHandshakeMetadata | None:
        metadata = self.call_all(lambda _, c: c.get_handshake_metadata())
        given = any(each is not None for each in metadata)
        return MultiHandshakeMetadata(metadata) if given else None

    def _split(self, metadata: MultiMetadata) -> list[KVConnectorMetadata]:
        if len(metadata.metadata) != len(self.sub_connectors):
            raise ConnectorOptionError(
                f"the scheduler's side has {len(metadata.metadata)} sub-connectors, and this "
                f"worker's has {len(self.sub_connectors)}: {self.names}; give both the same options"
            )
        return metadata.metadata


# -- both sides under one name ----------------------------------------------------------------


class MultiConnector(KVConnectorBase_V1):
    """Several connectors under one.

    Raises:
        ConnectorOptionError: ``connectors`` is missing, or one of them has unknown fields.
        PluginError: A sub-connector cannot be found or loaded.
    """

    scheduler_cls = MultiScheduler
    worker_cls = MultiWorker
    names_weights = True
    options_cls = MultiOptions
    example_options: ClassVar[Mapping[str, Any]] = {
        "connectors": [
            {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 8 << 30},
            },
            {
                "kv_connector": "SharedStorageConnector",
                "kv_connector_extra_config": {"shared_storage_path": "/mnt/kv"},
            },
        ]
    }

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Return whether any sub-connector works layer by layer."""
        return any(
            registry("connectors")
            .get_or_import(fields["kv_connector"], fields["kv_connector_module_path"])
            .requires_piecewise_for_cudagraph(fields["kv_connector_extra_config"])
            for fields in sub_connector_fields(extra_config)
        )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that any sub-connector needs.

        Raises:
            ConnectorOptionError: The sub-connectors need different layouts.
        """
        layouts = set()
        for config in sub_connector_configs(vllm_config):
            connector_cls: Any = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
            layouts.add(connector_cls.get_required_kvcache_layout(config))
        layouts.discard(None)
        if len(layouts) > 1:
            raise ConnectorOptionError(
                f"connectors under one MultiConnector need the KV cache in the layouts "
                f"{sorted(layouts)}; they must agree"
            )
        return layouts.pop() if layouts else None

    @property
    def requires_kv_delivery(self) -> bool:  # type: ignore[override]
        """True if any sub-connector must hand on the KV that a request has computed."""
        return any(each.requires_kv_delivery for each in self.side.sub_connectors)
