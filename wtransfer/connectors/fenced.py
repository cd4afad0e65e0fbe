"""The fence around a connector that does not name weights (``names_weights = False``).

Such a connector keys its store by token ids, by the host's block hashes, or by requests. Where the
store outlives the process or is shared, KV of other weights would be a hit. `fence` closes that
without a line by the author; the factory calls it for every connector of this kind.

**Naming.** The scheduler's side gets a view of each request. In the view, token *i* is the token
id XOR word *i* of a key stream, and each block hash is hashed once more with the key. The key is a
digest of the weights' fingerprint, of the model's name, dtype and number of ranks, and of whatever
else the request's KV depends on (`wtransfer.connectors.naming.particulars`: salt, multimodal
features). Other weights or another salt are therefore a miss, in any process; equal ones are a hit,
also after a restart. Encoded ids have 31 bits; lengths and counts are those of the request. Events
that the connector builds from them carry encoded ids as well.

**The scheduler's side.** A connector knows a request under one name, or not at all.

1.  A request becomes known at the first `get_num_new_matched_tokens` while the weights of all ranks
    are known: ``on_new_request`` is passed on then, and not before.
2.  A request that was in a step before it became known, one that cannot be named (prompt
    embeddings, LoRA adapter, features without identifier), and one whose ``kv_transfer_params`` say
    ``do_remote_prefill`` without ``remote_weights`` equal to this instance's fingerprint, never
    becomes known.
3.  A known request is *out* for good once the weights are not those that it began with, or are not
    known. It has no match, is left out of every step, and ends with an empty list of blocks; what
    the connector returns for the next instance is dropped.
4.  ``kv_transfer_params`` of a request that is not out get ``remote_weights``, this instance's
    fingerprint.

**The worker's side** holds the weights. Each step's metadata say which stamps the step was planned
for, and which stamps each load was planned for.

5.  In a step that was planned for other weights than the worker has, nothing is saved:
    ``save_kv_layer`` and ``wait_for_save`` are not passed on. All other calls are, as both sides of
    a connector count on metadata that arrive; the loads of such a step count as failed by rule 6.
6.  The blocks of a load that was planned for other weights than the worker has when the load ends
    are reported as load errors: with the step if it ends within the step, else with its request.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from wtransfer.connectors.fence import (
    SchedulerFence,
    Stamp,
    StampedHandshake,
    WorkerFence,
    WorkerStamps,
    handshake_stamps,
    plain_stamps,
)
from wtransfer.connectors.interface import (
    SCHEDULER_METHODS,
    WORKER_METHODS,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from wtransfer.connectors.naming import is_nameless, particulars
from wtransfer.connectors.settings import Instance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from wtransfer.connectors.interface import KVConnectorBase_V1, KVConnectorOutput

REMOTE_WEIGHTS = "remote_weights"
"""Entry of ``kv_transfer_params``: the fingerprint of the weights of the instance before."""


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


# -- what travels -----------------------------------------------------------------------------


class PlannedLoad(NamedTuple):
    """One load, as the worker's side has to judge it."""

    request_id: str
    """The request."""
    block_ids: list[int]
    """Blocks that are loaded into."""
    outlasts: bool
    """Whether the load ends beyond its step, with its request."""
    stamps: list[Stamp]
    """What the request began with, by rank; empty: that is no more."""


@dataclass
class FencedMetadata(KVConnectorMetadata):
    """A step's metadata of the connector, and what they were planned for."""

    inner: Any = None
    """Of the connector."""
    stamps: list[Stamp] = field(default_factory=list)
    """What each rank must compute with for the step to be saved; empty: nothing is."""
    loads: list[PlannedLoad] = field(default_factory=list)
    """Loads that are told with this step."""


@dataclass
class FencedSaid(WorkerStamps):
    """What the connector's worker side says, and what its rank computes with."""

    inner: KVConnectorWorkerMetadata | None = None
    """Of the connector; None: nothing."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        """Add what another worker has said; return this object."""
        super().aggregate(other)
        assert isinstance(other, FencedSaid)
        if self.inner is None:
            self.inner = other.inner
        elif other.inner is not None:
            self.inner = self.inner.aggregate(other.inner)
        return self


@dataclass
class FencedHandshake(StampedHandshake):
    """What the connector says to other instances, and what its rank computes with."""

    inner: KVConnectorHandshakeMetadata | None = None
    """Of the connector; None: nothing."""


# -- the view of a request --------------------------------------------------------------------


class RequestKey:
    """Encodes token ids and block hashes of one request.

    Args:
        key: 16 bytes; equal keys encode equally, in every process.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        # Counter-based, and its stream is fixed by numpy's policy on bit generators.
        self._philox = np.random.Philox(key=int.from_bytes(key, "little"))
        self._stream = np.empty(0, np.int64)

    def tokens(self, tokens: Sequence[int], start: int = 0) -> list[int]:
        """Return encoded token ids.

        Args:
            tokens: Consecutive ids.
            start: Position of the first in the request.
        """
        end, known = start + len(tokens), len(self._stream)
        if end > known:
            drawn = self._philox.random_raw(max(end - known, known, 256)) >> np.uint64(33)
            self._stream = np.concatenate([self._stream, drawn.astype(np.int64)])
        words = self._stream[start:end]
        encoded: list[int] = (np.asarray(list(tokens), np.int64) ^ words).tolist()
        return encoded

    def hashes(self, hashes: Sequence[bytes], start: int = 0) -> list[bytes]:
        """Return encoded block hashes, each as long as it was; `start` is of no account."""
        del start
        digest = functools.partial(hashlib.blake2b, key=self._key)
        return [digest(each, digest_size=len(each)).digest() for each in hashes]


class RequestView:
    """A request whose token ids and block hashes are encoded; all else is the request's own.

    Args:
        request: The request.
        key: Of its weights, and of all else that its KV depends on.
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

    # Not by properties: what one of them raised would let the request's own ids through.
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
        """Return a list that grows with what it encodes."""
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
    # What stands behind them in vLLM, and is read by connectors of the field.
    "_all_token_ids",
    "_output_token_ids",
)


# -- the two sides ----------------------------------------------------------------------------


class _FencedSide:
    """The methods of one side, most of which are passed on as they are."""

    names: frozenset[str]

    def __init__(self, connector: KVConnectorBase_V1, config: Any) -> None:
        self._config = config
        self._own = {name: getattr(connector, name) for name in self.names}
        self._is_inside = False

    @functools.cached_property
    def _instance(self) -> Instance:
        return Instance.of(self._config)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return what stands in the place of the connector's own methods."""
        return {name: self._method(name, own) for name, own in self._own.items()}

    def _method(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        fenced = getattr(self, name, functools.partial(self._call, name))

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            # A connector that calls a method of its own hands on what it got, which is fenced, and
            # gets what is its own.
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
    is_out: bool = False
    # Of the last answer.
    num_computed_tokens: int = 0
    outlasts: bool = False


class FencedScheduler(_FencedSide):
    """The scheduler's side: rules 1 to 4.

    Args:
        connector: The connector's side.
        config: The serving engine's configuration.
    """

    names = SCHEDULER_METHODS

    def __init__(self, connector: KVConnectorBase_V1, config: Any) -> None:
        super().__init__(connector, config)
        self._known: dict[str, _Known] = {}
        # Those that never become known, until they end; and then until a step has named them.
        self._unknown: set[str] = set()
        self._ended_unknown: set[str] = set()
        self._loads: list[PlannedLoad] = []
        self._has_met = False

    @functools.cached_property
    def _fence(self) -> SchedulerFence:
        return SchedulerFence(self._instance.num_ranks)

    # -- what the workers compute with

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take what the ranks compute with, as often as a host says it; pass the rest on, once."""
        self._fence.hear(handshake_stamps(metadata))
        said = {
            rank: each.inner for rank, each in metadata.items() if isinstance(each, FencedHandshake)
        }
        said = {rank: each for rank, each in said.items() if each is not None}
        if said and not self._has_met:
            self._call("set_xfer_handshake_metadata", said)
            self._has_met = True

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the ranks compute with, and pass the rest on."""
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, FencedSaid):
            self._fence.hear(said.stamps)
            connector_output = copy.copy(connector_output)
            connector_output.kv_connector_worker_meta = said.inner
        self._call("update_connector_output", connector_output)

    # -- requests

    def on_new_request(self, request: Any) -> None:
        """Do nothing: the weights may change before the request is asked about."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask about a request that the connector may know, and that is not out."""
        known = self._known.get(request.request_id) or self._introduce(request)
        if known is None or self._is_out(request.request_id):
            return 0, False
        num_tokens, outlasts = self._call(
            "get_num_new_matched_tokens", known.view, num_computed_tokens
        )
        known.num_computed_tokens, known.outlasts = num_computed_tokens, bool(outlasts)
        return num_tokens, outlasts

    def _introduce(self, request: Any) -> _Known | None:
        """Let a request become known, unless it must not, or cannot yet."""
        request_id = request.request_id
        if request_id in self._unknown:
            return None
        fingerprint = self._fence.begin(request_id)
        if fingerprint is None:
            return None
        if is_nameless(request) or _is_of_other_weights(request, fingerprint):
            self._unknown.add(request_id)
            return None
        named = msgspec.msgpack.encode([fingerprint, self._instance.root, *particulars(request)])
        key = RequestKey(xxhash.xxh3_128_digest(named))
        known = _Known(RequestView(request, key), key)
        self._call("on_new_request", known.view)
        self._known[request_id] = known
        return known

    def _is_out(self, request_id: str) -> bool:
        """Return whether a request is not known, or is out; from then on it stays so."""
        known = self._known.get(request_id)
        if known is None:
            return True
        # Sticky: the connector misses something of it from now on.
        known.is_out = known.is_out or self._fence.stamps(request_id) is None
        return known.is_out

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pass on what a known request has got, and note its load."""
        request_id = request.request_id
        known = self._known.get(request_id)
        if known is None:
            return
        is_out = self._is_out(request_id)
        if num_external_tokens:
            size, first = self._instance.block_size, known.num_computed_tokens
            part = slice(first // size, -(-(first + num_external_tokens) // size))
            block_ids = [each for group in blocks.get_block_ids() for each in group[part]]
            stamps = [] if is_out else plain_stamps(self._fence.stamps(request_id))
            self._loads.append(PlannedLoad(request_id, block_ids, known.outlasts, stamps))
        elif is_out:
            return
        # Also if it is out: the host waits for the load that it was promised, which will fail.
        self._call("update_state_after_alloc", known.view, blocks, num_external_tokens)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let a known request end, with its blocks unless it is out."""
        request_id = request.request_id
        is_out = self._is_out(request_id)
        fingerprint = self._fence.fingerprint(request_id)
        known = self._known.pop(request_id, None)
        self._unknown.discard(request_id)
        self._fence.forget(request_id)
        if known is None:
            self._ended_unknown.add(request_id)
            return False, None
        stays, params = self._call("request_finished", known.view, [] if is_out else block_ids)
        if is_out:
            return stays, None
        return stays, {**params, REMOTE_WEIGHTS: fingerprint} if params else params

    # -- a step

    def build_connector_meta(self, scheduler_output: Any) -> FencedMetadata:
        """Let the connector plan a step of the requests that are known and not out."""
        inner = self._call("build_connector_meta", self._seen(scheduler_output))
        loads, self._loads = self._loads, []
        return FencedMetadata(inner, plain_stamps(self._fence.now), loads)

    def _seen(self, output: Any) -> Any:
        cached = output.scheduled_cached_reqs
        hidden = set()
        for request_id in (*(each.req_id for each in output.scheduled_new_reqs), *cached.req_ids):
            if request_id not in self._known:
                self._unknown.add(request_id)
            if self._is_out(request_id):
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
        # Of those that are out the connector hears both: their blocks are others' from then on.
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
    """Return whether another instance, of weights that are not these, has computed the prompt."""
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, Mapping) or not params.get("do_remote_prefill"):
        return False
    return bool(params.get(REMOTE_WEIGHTS) != fingerprint)


class FencedWorker(_FencedSide):
    """A worker's side: rules 5 and 6.

    Args:
        connector: The connector's side.
        config: The serving engine's configuration.
    """

    names = WORKER_METHODS

    def __init__(self, connector: KVConnectorBase_V1, config: Any) -> None:
        super().__init__(connector, config)
        self._stamps: list[Stamp] = []
        self._is_stale = False
        # Those of the step, and by request those that end beyond it.
        self._loads: list[PlannedLoad] = []
        self._under_way: dict[str, PlannedLoad] = {}
        self._errors: set[int] = set()

    @functools.cached_property
    def _fence(self) -> WorkerFence:
        return WorkerFence(self._instance.rank)

    # -- what this rank computes with

    def get_handshake_metadata(self) -> FencedHandshake:
        """Add what this rank computes with."""
        return FencedHandshake(
            self._fence.say()[self._fence.rank], self._call("get_handshake_metadata")
        )

    def build_connector_worker_meta(self) -> FencedSaid:
        """Add what this rank computes with."""
        return FencedSaid(self._fence.say(), self._call("build_connector_worker_meta"))

    # -- a step

    def handle_preemptions(self, kv_connector_metadata: FencedMetadata) -> None:
        """Pass on, whatever the weights: blocks are about to be overwritten."""
        self._call("handle_preemptions", kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: FencedMetadata) -> None:
        """Take what the step and its loads were planned for."""
        self._stamps, self._is_stale = connector_metadata.stamps, False
        self._loads = [each for each in connector_metadata.loads if not each.outlasts]
        for load in connector_metadata.loads:
            if load.outlasts:
                self._under_way[load.request_id] = load
        self._may_save()
        self._call("bind_connector_metadata", connector_metadata.inner)

    def clear_connector_metadata(self) -> None:
        """Forget it: the step is over."""
        self._stamps, self._loads = [], []
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
        self._is_stale = self._is_stale or not self._fence.admits(self._stamps)
        return not self._is_stale

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Name what has ended; the blocks of a load that is for other weights are errors."""
        sent, received = self._call("get_finished", finished_req_ids)
        ended = {*(sent or ()), *(received or ())} & self._under_way.keys()
        for load in [self._under_way.pop(request_id) for request_id in ended]:
            if not self._fence.admits(load.stamps):
                self._errors.update(load.block_ids)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Add the blocks of loads that are for other weights, each once."""
        errors = {*self._call("get_block_ids_with_load_errors"), *self._errors}
        self._errors = set()
        for load in [each for each in self._loads if not self._fence.admits(each.stamps)]:
            self._loads.remove(load)
            errors.update(load.block_ids)
        return errors
