"""Report weight versions between a connector's sides; fence one that does not name weights.

A connector without ``names_weights`` keys its store by token ids, by the host's block hashes, or by
requests. Where the store outlives the process or is shared, KV of other weights would be a hit.
`fence` closes that without a line by the author; the factory calls it for each such connector.

**Keys.** The scheduler's side gets a view of each request. In the view, token *i* is the token id
XOR word *i* of a key stream, and each block hash is hashed once more with the key. The key is a
digest of the weights' fingerprint, of the model's name, dtype and number of ranks, and of all else
that the request's KV depends on (`wtransfer.connectors.naming.request_root`: salt, multimodal
features). Other weights or another salt are therefore a miss, in any process; equal ones are a hit,
also after a restart. Encoded ids have 31 bits; lengths and counts are those of the request. Events
that the connector builds from them carry encoded ids as well, and are taken and dropped: they name
no block that a host knows.

**The scheduler's side.** The connector knows a request under one key, or not at all.

1.  A request becomes known at the first `get_num_new_matched_tokens` while the weights of all ranks
    are known: ``on_new_request`` is passed on then, and not before.
2.  Three kinds of request never become known: one that was in a step before, one that is
    uncacheable (prompt embeddings, LoRA adapter, features without identifier), and one whose
    ``kv_transfer_params`` say ``do_remote_prefill`` with ``remote_weights`` other than this
    instance's fingerprint.
3.  A known request that is stale (`wtransfer.kv.fence`) stays so, as the connector misses steps of
    it. A stale request has no match, is left out of every step, and ends with an empty list of
    blocks; the connector's parameters for the next instance are dropped.
4.  ``kv_transfer_params`` of other requests get ``remote_weights``, this instance's fingerprint.
5.  A block whose load has failed under the present weights is invalidated: later requests show its
    tokens, all after it and their hashes under another key. So the connector neither finds the
    value that could not be loaded nor takes it for saved, and what is computed instead is kept.
    Requests with ``kv_transfer_params`` load what another request has computed, and are left out.

**The worker's side.** The metadata of a step carry the versions that the step, and each load, was
planned for.

6.  In a step for other weights than the worker has, nothing is saved: ``save_kv_layer`` and
    ``wait_for_save`` are not passed on. All other calls are, as both sides of a connector count on
    metadata that arrive; the loads of such a step have failed by rule 7.
7.  The blocks of a load for other weights than the worker has when the load ends are reported as
    load errors: with the step if it ends within the step, else with its request.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from wtransfer.connectors.interface import (
    SCHEDULER_METHODS,
    WORKER_METHODS,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from wtransfer.connectors.naming import known_tokens, request_root
from wtransfer.connectors.serving_config import Instance
from wtransfer.kv.fence import InvalidatedKeys, SchedulerFence, WorkerFence
from wtransfer.kv.keys import OffloadKey, hash_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Self

    from wtransfer.connectors.interface import KVConnectorBase_V1, KVConnectorOutput
    from wtransfer.weight_version import WeightVersion, WeightVersions

REMOTE_WEIGHTS = "remote_weights"
"""Entry of ``kv_transfer_params``: fingerprint of the weights that computed the prompt."""


def fence(connector: KVConnectorBase_V1, config: Any) -> None:
    """Put the fence on one side of a connector.

    Methods of this object are replaced, and ``names_weights`` is True of it from now on. Its class
    stays as it is.

    Args:
        connector: The side; its ``role`` says which.
        config: The serving engine's configuration.
    """
    is_scheduler = connector.role is KVConnectorRole.SCHEDULER
    fenced = (FencedScheduler if is_scheduler else FencedWorker)(connector, config)
    vars(connector).update(fenced.methods(), names_weights=True)


# -- messages ---------------------------------------------------------------------------------


@dataclass
class WeightReport(KVConnectorWorkerMetadata):
    """The weight versions of workers, for the scheduler's side; a base for richer metadata."""

    versions: dict[int, WeightVersion | None] = field(default_factory=dict)
    """Versions by rank; None while a rank's weights change."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        """Add another worker's metadata; return this object."""
        assert isinstance(other, WeightReport)
        self.versions |= other.versions
        return self


@dataclass
class WeightHandshake(KVConnectorHandshakeMetadata):
    """The weight version of a worker before the first step; a base for richer metadata."""

    version: WeightVersion | None = None
    origins: list[tuple[str, str, str | None, str | None, str | None]] = field(
        default_factory=list, kw_only=True
    )
    """Kind, name, distribution, version and contract of the worker's backends; set by the
    factory."""


def reported_versions(
    metadata: Mapping[int, KVConnectorHandshakeMetadata],
) -> dict[int, WeightVersion | None]:
    """Return the versions that handshakes report, by rank."""
    reports = {rank: each for rank, each in metadata.items() if isinstance(each, WeightHandshake)}
    return {rank: each.version for rank, each in reports.items()}


class PlannedLoad(NamedTuple):
    """A load, as the worker's side judges it."""

    request_id: str
    block_ids: list[int]
    """Blocks that are loaded into."""
    is_async: bool
    """True if the load ends after its step, with its request."""
    versions: WeightVersions
    """Versions that the request began with; empty: the request is stale."""


@dataclass
class FencedMetadata(KVConnectorMetadata):
    """A step's metadata of the connector, and the weight versions that they were planned for."""

    inner: Any = None
    versions: WeightVersions = ()
    """Version that each rank must compute with for the step to be saved; empty: no save."""
    loads: list[PlannedLoad] = field(default_factory=list)


@dataclass
class FencedReport(WeightReport):
    """The worker metadata of the connector, and the weight version of its rank."""

    inner: KVConnectorWorkerMetadata | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        """Add another worker's metadata; return this object."""
        super().aggregate(other)
        assert isinstance(other, FencedReport)
        if self.inner is None:
            self.inner = other.inner
        elif other.inner is not None:
            self.inner = self.inner.aggregate(other.inner)
        return self


@dataclass
class FencedHandshake(WeightHandshake):
    """The handshake metadata of the connector, and the weight version of its rank."""

    inner: KVConnectorHandshakeMetadata | None = None


# -- the view of a request --------------------------------------------------------------------


class RequestKey:
    """Encode token ids and block hashes of one request.

    Args:
        key: 16 bytes; equal keys encode equally, in every process.
        hash_block_size: Tokens per block hash.
    """

    def __init__(self, key: bytes, hash_block_size: int = 1) -> None:
        self._hash_block_size = hash_block_size
        self._keys: list[tuple[int, bytes]] = []
        """Position of the token from which on a key encodes, and the key."""
        self._stream = np.empty(0, np.int64)
        self.change(0, key)

    def change(self, start: int, key: bytes) -> None:
        """Encode by another key from a token on, which is behind earlier changes."""
        self._draw(start)
        self._keys.append((start, key))
        # Counter-based, and its stream is fixed by numpy's policy on bit generators.
        self._philox = np.random.Philox(key=int.from_bytes(key, "little"))
        self._stream = self._stream[:start]

    def tokens(self, tokens: Sequence[int], start: int = 0) -> list[int]:
        """Return encoded token ids.

        Args:
            tokens: Consecutive ids.
            start: Position of the first in the request.
        """
        end = start + len(tokens)
        self._draw(end)
        words = self._stream[start:end]
        encoded: list[int] = (np.asarray(list(tokens), np.int64) ^ words).tolist()
        return encoded

    def _draw(self, end: int) -> None:
        """Have at least the words of the first `end` tokens."""
        known = len(self._stream)
        if end > known:
            drawn = self._philox.random_raw(max(end - known, known, 256)) >> np.uint64(33)
            self._stream = np.concatenate([self._stream, drawn.astype(np.int64)])

    def hashes(self, hashes: Sequence[bytes], start: int = 0) -> list[bytes]:
        """Return encoded block hashes, each as long as it was.

        Args:
            hashes: Hashes of consecutive blocks.
            start: Number of the first block in the request.
        """
        return [
            hashlib.blake2b(each, key=self._key_of(number), digest_size=len(each)).digest()
            for number, each in enumerate(hashes, start)
        ]

    def _key_of(self, number: int) -> bytes:
        """Return the key of the last token of a block."""
        last = (number + 1) * self._hash_block_size - 1
        return next(key for start, key in reversed(self._keys) if start <= last)


class RequestView:
    """Show a request with encoded token ids and block hashes; all else is the request's own.

    Args:
        request: The request.
        key: Key of its weights, and of all else that its KV depends on.
    """

    __slots__ = ("_request", "_view_key", "_view_known")

    def __init__(self, request: Any, key: RequestKey) -> None:
        self._request = request
        self._view_key = key
        self._view_known: dict[str, list[Any]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RequestView.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._request, name, value)

    # Not by properties: an error raised in one would let the request's own ids through.
    def __getattr__(self, name: str) -> Any:
        if name in RequestView.__slots__:
            raise AttributeError(name)
        value = getattr(self._request, name)
        if value is None or name not in _ENCODED:
            return value
        if name in ("output_token_ids", "_output_token_ids"):
            return self._view_key.tokens(value, len(self._request.prompt_token_ids))
        key = self._view_key
        return self._follow(name, value, key.hashes if name == "block_hashes" else key.tokens)

    def _follow(
        self, name: str, values: Sequence[Any], encode: Callable[[Sequence[Any], int], list[Any]]
    ) -> list[Any]:
        """Return a list that grows with the values that it encodes."""
        known = self._view_known.setdefault(name, [])
        # Sessions of vLLM give up their last tokens, and go on with others.
        first, end = max(len(known) - _COMPARED, 0), len(known)
        if encode(values[first:end], first) != known[first:]:
            known.clear()
        known += encode(values[len(known) :], len(known))
        return known


_COMPARED = 16
_ENCODED = (
    "prompt_token_ids",
    "all_token_ids",
    "output_token_ids",
    "block_hashes",
    # The lists behind them in vLLM, which connectors of the field read.
    "_all_token_ids",
    "_output_token_ids",
)


# -- the two sides ----------------------------------------------------------------------------


class _FencedSide:
    """Replace the methods of one side; most are passed on as they are."""

    names: frozenset[str]

    def __init__(self, connector: KVConnectorBase_V1, config: Any) -> None:
        self._config = config
        self._own = {name: getattr(connector, name) for name in self.names}
        self._is_inside = False

    @functools.cached_property
    def _instance(self) -> Instance:
        return Instance.of(self._config)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the replacements of the connector's own methods."""
        return {name: self._method(name, own) for name, own in self._own.items()}

    def _method(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        fenced = getattr(self, name, functools.partial(self._call, name))

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            # A connector that calls its own method passes arguments that are fenced already, and
            # gets its own results.
            return (own if self._is_inside else fenced)(*args, **kwargs)

        return call

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the connector's own method."""
        self._is_inside = True
        try:
            return self._own[name](*args, **kwargs)
        finally:
            self._is_inside = False


@dataclass
class _Known:
    """A request that the connector knows."""

    view: RequestView
    key: RequestKey
    # Of the last answer.
    num_computed_tokens: int = 0
    is_async: bool = False


class _Loading(NamedTuple):
    """A load whose failure would invalidate a block."""

    view: RequestView
    numbers: dict[int, int]
    """By block that is loaded into, its number in the request."""
    versions: WeightVersions


class FencedScheduler(_FencedSide):
    """The scheduler's side: rules 1 to 5.

    Args:
        connector: The connector's side.
        config: The serving engine's configuration.
    """

    names = SCHEDULER_METHODS

    def __init__(self, connector: KVConnectorBase_V1, config: Any) -> None:
        super().__init__(connector, config)
        self._known: dict[str, _Known] = {}
        # Requests that never become known, until they end; then until a step has listed them.
        self._unknown: set[str] = set()
        self._ended_unknown: set[str] = set()
        self._loads: list[PlannedLoad] = []
        self._has_met = False
        # By request. A host may end a request before it tells that its load has failed.
        self._loading: dict[str, _Loading] = {}
        self._invalidated = InvalidatedKeys()
        self._block_pool: Any = None

    @functools.cached_property
    def _fence(self) -> SchedulerFence:
        return SchedulerFence(self._instance.num_ranks)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Note how many tokens the host's block hashes have; pass the pool on."""
        self._block_pool = gpu_block_pool
        self._call("bind_gpu_block_pool", gpu_block_pool)

    # -- weight versions

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the versions, as often as the host reports them; pass the rest on, once."""
        self._fence.update(reported_versions(metadata))
        inner = {
            rank: each.inner for rank, each in metadata.items() if isinstance(each, FencedHandshake)
        }
        inner = {rank: each for rank, each in inner.items() if each is not None}
        if inner and not self._has_met:
            self._call("set_xfer_handshake_metadata", inner)
            self._has_met = True

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the versions, invalidate what could not be loaded, and pass the rest on."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, FencedReport):
            self._fence.update(report.versions)
            connector_output = copy.copy(connector_output)
            connector_output.kv_connector_worker_meta = report.inner
        self._invalidate(getattr(connector_output, "invalid_block_ids", None) or set())
        self._call("update_connector_output", connector_output)

    # -- requests

    def on_new_request(self, request: Any) -> None:
        """Do nothing: the weights may change before the first look-up."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look up a request that the connector may know and that is not stale."""
        known = self._known.get(request.request_id) or self._introduce(request)
        if known is None or self._is_hidden(request.request_id):
            return 0, False
        num_tokens, is_async = self._call(
            "get_num_new_matched_tokens", known.view, num_computed_tokens
        )
        known.num_computed_tokens, known.is_async = num_computed_tokens, bool(is_async)
        return num_tokens, is_async

    def _introduce(self, request: Any) -> _Known | None:
        """Let a request become known, unless it must not, or cannot yet."""
        request_id = request.request_id
        if request_id in self._unknown:
            return None
        fingerprint = self._fence.begin(request_id)
        if fingerprint is None:
            return None
        named = request_root(request, fingerprint, self._instance.root)
        if named is None or _is_of_other_weights(request, fingerprint):
            self._unknown.add(request_id)
            return None
        size = self._instance.block_size
        key = RequestKey(
            xxhash.xxh3_128_digest(named), getattr(self._block_pool, "hash_block_size", size)
        )
        self._rename(request, key)
        known = _Known(RequestView(request, key), key)
        self._call("on_new_request", known.view)
        self._known[request_id] = known
        return known

    def _rename(self, request: Any, key: RequestKey) -> None:
        """Encode the invalidated blocks of a request, and all after each, by other keys."""
        if not self._invalidated or getattr(request, "kv_transfer_params", None):
            return
        view, number = RequestView(request, key), 0
        names = self._names(view)
        while number < len(names):
            (valid,) = self._invalidated.valid([names[number]])
            if valid == names[number]:
                number += 1
            else:
                key.change(number * self._instance.block_size, valid)
                names = self._names(view)

    def _names(self, view: RequestView) -> list[OffloadKey]:
        """Name the blocks of a request by its encoded tokens, as a connector might."""
        encoded, size = known_tokens(view), self._instance.block_size
        return [OffloadKey(each) for each in hash_blocks(encoded, size)]

    def _invalidate(self, block_ids: set[int]) -> None:
        """Invalidate the first block of each load that could not be loaded."""
        for request_id, load in list(self._loading.items()):
            failed = [load.numbers[each] for each in block_ids & load.numbers.keys()]
            # Under other weights the block may be whole.
            if failed and load.versions is self._fence.current:
                self._invalidated.add([self._names(load.view)[min(failed)]])
            if failed or request_id not in self._known:
                del self._loading[request_id]

    def _is_hidden(self, request_id: str) -> bool:
        # Known requests begin once: a stale one stays stale, as the connector misses steps of it.
        return request_id not in self._known or self._fence.versions(request_id) is None

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pass on the blocks of a known request, and record its load."""
        request_id = request.request_id
        known = self._known.get(request_id)
        if known is None:
            return
        versions = self._fence.versions(request_id) or ()
        if num_external_tokens:
            size, first = self._instance.block_size, known.num_computed_tokens
            part = slice(first // size, -(-(first + num_external_tokens) // size))
            numbers = {
                each: number
                for group in blocks.get_block_ids()
                for number, each in enumerate(group[part], part.start)
            }
            self._loads.append(PlannedLoad(request_id, [*numbers], known.is_async, versions))
            if not getattr(request, "kv_transfer_params", None):
                self._loading[request_id] = _Loading(known.view, numbers, versions)
        elif not versions:
            return
        # Also for a stale request: the host waits for the promised load, which will fail.
        self._call("update_state_after_alloc", known.view, blocks, num_external_tokens)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a known request, with its blocks unless it is stale."""
        request_id = request.request_id
        fingerprint = self._fence.fingerprint(request_id)
        known = self._known.pop(request_id, None)
        self._unknown.discard(request_id)
        self._fence.forget(request_id)
        if known is None:
            self._ended_unknown.add(request_id)
            return False, None
        is_stale = fingerprint is None
        stays, params = self._call("request_finished", known.view, [] if is_stale else block_ids)
        if is_stale:
            return stays, None
        return stays, {**params, REMOTE_WEIGHTS: fingerprint} if params else params

    def take_events(self) -> Iterable[Any]:
        """Drop the events: no host knows the ids and hashes in them."""
        self._call("take_events")
        return ()

    # -- a step

    def build_connector_meta(self, scheduler_output: Any) -> FencedMetadata:
        """Let the connector plan a step of the requests that are known and not stale."""
        inner = self._call("build_connector_meta", self._seen(scheduler_output))
        loads, self._loads = self._loads, []
        return FencedMetadata(inner, self._fence.current or (), loads)

    def _seen(self, output: Any) -> Any:
        cached = output.scheduled_cached_reqs
        hidden = set()
        for request_id in (*(each.req_id for each in output.scheduled_new_reqs), *cached.req_ids):
            if request_id not in self._known:
                self._unknown.add(request_id)
            if self._is_hidden(request_id):
                hidden.add(request_id)
        seen = copy.copy(output)
        shown = vars(seen)
        for name, value in vars(output).items():
            if hidden and isinstance(value, dict):
                shown[name] = {key: each for key, each in value.items() if key not in hidden}
        shown["scheduled_new_reqs"] = [
            self._seen_new(each) for each in output.scheduled_new_reqs if each.req_id not in hidden
        ]
        shown["scheduled_cached_reqs"] = self._seen_cached(cached, hidden)
        if "total_num_scheduled_tokens" in shown:
            shown["total_num_scheduled_tokens"] = sum(seen.num_scheduled_tokens.values())
        # Stale requests stay in both: their blocks belong to other requests from then on.
        for name in ("preempted_req_ids", "finished_req_ids"):
            if shown.get(name):
                shown[name] = shown[name] - self._unknown - self._ended_unknown
        self._ended_unknown.clear()
        return seen

    def _seen_new(self, new: Any) -> Any:
        seen, key = copy.copy(new), self._key(new.req_id)
        for name in ("prompt_token_ids", "prefill_token_ids", "all_token_ids"):
            if vars(new).get(name) is not None:
                vars(seen)[name] = key.tokens(vars(new)[name])
        return seen

    def _seen_cached(self, cached: Any, hidden: set[str]) -> Any:
        seen, num = copy.copy(cached), len(cached.req_ids)
        shown = vars(seen)
        places = [n for n, request_id in enumerate(cached.req_ids) if request_id not in hidden]
        for name, value in vars(cached).items():
            if isinstance(value, list) and len(value) == num:
                shown[name] = [value[n] for n in places]
            elif isinstance(value, dict):
                shown[name] = {key: each for key, each in value.items() if key not in hidden}
            elif isinstance(value, set):
                shown[name] = value - hidden
        if shown.get("new_token_ids"):
            rows = zip(seen.req_ids, seen.new_token_ids, seen.num_computed_tokens, strict=True)
            shown["new_token_ids"] = [self._key(each).tokens(*row) for each, *row in rows]
        if shown.get("all_token_ids"):
            tokens = seen.all_token_ids.items()
            shown["all_token_ids"] = {each: self._key(each).tokens(ids) for each, ids in tokens}
        return seen

    def _key(self, request_id: str) -> RequestKey:
        return self._known[request_id].key


def _is_of_other_weights(request: Any, fingerprint: str) -> bool:
    """Return whether another instance, with weights other than these, has computed the prompt."""
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, Mapping) or not params.get("do_remote_prefill"):
        return False
    return bool(params.get(REMOTE_WEIGHTS) != fingerprint)


class FencedWorker(_FencedSide):
    """A worker's side: rules 6 and 7.

    Args:
        connector: The connector's side.
        config: The serving engine's configuration.
    """

    names = WORKER_METHODS

    def __init__(self, connector: KVConnectorBase_V1, config: Any) -> None:
        super().__init__(connector, config)
        self._versions: WeightVersions = ()
        self._is_stale = False
        # Loads of the step; and by request, those that end after their step.
        self._loads: list[PlannedLoad] = []
        self._async_loads: dict[str, PlannedLoad] = {}
        self._errors: set[int] = set()

    @functools.cached_property
    def _fence(self) -> WorkerFence:
        return WorkerFence(self._instance.rank)

    # -- weight versions

    def get_handshake_metadata(self) -> FencedHandshake:
        """Add this rank's version."""
        return FencedHandshake(self._fence.version(), self._call("get_handshake_metadata"))

    def build_connector_worker_meta(self) -> FencedReport:
        """Add this rank's version."""
        return FencedReport(self._fence.report(), self._call("build_connector_worker_meta"))

    # -- a step

    def handle_preemptions(self, kv_connector_metadata: FencedMetadata) -> None:
        """Pass on, whatever the weights: blocks are about to be overwritten."""
        self._call("handle_preemptions", kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: FencedMetadata) -> None:
        """Take the versions that the step and its loads were planned for."""
        self._versions, self._is_stale = connector_metadata.versions, False
        self._loads = [each for each in connector_metadata.loads if not each.is_async]
        for load in connector_metadata.loads:
            if load.is_async:
                self._async_loads[load.request_id] = load
        self._may_save()
        self._call("bind_connector_metadata", connector_metadata.inner)

    def clear_connector_metadata(self) -> None:
        """Drop the versions and loads: the step is over."""
        self._versions, self._loads = (), []
        self._call("clear_connector_metadata")

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Pass on, unless the step is for other weights."""
        if self._may_save():
            self._call("save_kv_layer", *args, **kwargs)

    def wait_for_save(self) -> None:
        """Let the step count, unless it is for other weights."""
        if self._may_save():
            self._call("wait_for_save")

    def _may_save(self) -> bool:
        # Sticky: a layer that was left out must not count when the weights are known again.
        self._is_stale = self._is_stale or not self._fence.admits(self._versions)
        return not self._is_stale

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the ended requests; the blocks of a load for other weights are load errors."""
        sent, received = self._call("get_finished", finished_req_ids)
        ended = {*(sent or ()), *(received or ())} & self._async_loads.keys()
        for load in [self._async_loads.pop(request_id) for request_id in ended]:
            if not self._fence.admits(load.versions):
                self._errors.update(load.block_ids)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Add the blocks of loads for other weights, each once."""
        errors = {*self._call("get_block_ids_with_load_errors"), *self._errors}
        self._errors = set()
        for load in [each for each in self._loads if not self._fence.admits(each.versions)]:
            self._loads.remove(load)
            errors.update(load.block_ids)
        return errors
