"""Specs and configs of the seed's API for current hosts, and the other way round.

Differences between the two that are adapted here::

    the seed (vLLM 0.16)                             current
    spec(config, kv_cache_config)                    spec(OffloadingConfig)
    get_handlers(kv_caches, attn_backends)           get_worker(kv_caches)
    handler.transfer_async(job_id, (src, dst))       submit_store and submit_load
    manager.lookup(block_hashes) -> int | None       lookup(key, req_context) -> LookupResult
    prepare_*, complete_*, touch(block_hashes)       ... (keys, req_context)
    PrepareStoreOutput.block_hashes_to_store         keys_to_store
    no reset_cache, no shutdown                      both

Releases in between had some of one and some of the other, so every constructor and method is judged
by its own signature, never by a trial call, which would run its code and mistake a `TypeError` of
its own for an answer. Configs may be wtransfer's dataclasses or a serving engine's objects:
attributes are read, classes are not compared.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from wtransfer.config import (
    KVCacheConfig,
    KVTransferConfig,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    ParallelConfig,
    ServingConfig,
    blocks_per_chunk,
    cache_groups,
    tokens_per_block,
)
from wtransfer.errors import (
    BlockNotKeptError,
    KVTransferConfigError,
    OffloadingOptionError,
    PluginTypeError,
)
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import torch

    from wtransfer.kv.canonical import CanonicalKVCaches
    from wtransfer.kv.keys import OffloadKey
    from wtransfer.specs.interface import LoadStoreSpec, ReqContext, ScheduleEndContext

logger = logging.getLogger(__name__)

# -- constructors -------------------------------------------------------------------------------

_BOTH = 2


def construct(spec_cls: type[OffloadingSpec], config: Any, kv_cache_config: Any) -> OffloadingSpec:
    """Make a spec of either API from the configs of either.

    Raises:
        PluginTypeError: Its constructor requires other arguments than specs are given.
    """
    arguments: tuple[Any, ...]
    if _num_configs(spec_cls) == _BOTH:
        arguments = (config, kv_cache_config)
        if not is_serving_config(config):
            arguments = to_serving_config(config)
    else:
        if is_serving_config(config):
            config = to_offloading_config(config, kv_cache_config)
        arguments = (config,)
    return spec_cls(*arguments)


def _num_configs(cls: type[OffloadingSpec]) -> int:
    """Return 2 where a constructor takes a serving engine's configs, 1 for an `OffloadingConfig`.

    A constructor that passes its arguments on (``*args``) is judged by the one that it inherits.
    Where none decides, a spec with ``get_handlers`` is of the seed's API, any other of the current
    one.
    """
    for base in cls.__mro__[: cls.__mro__.index(OffloadingSpec)]:
        if "__init__" not in vars(base):
            continue
        signature = inspect.signature(vars(base)["__init__"])
        parameters = list(signature.parameters.values())
        required = [
            each.default is Parameter.empty
            for each in parameters[1:]
            if each.kind <= Parameter.POSITIONAL_OR_KEYWORD
        ]
        if sum(required) == _BOTH or "kv_cache_config" in signature.parameters:
            number = _BOTH
        elif any(each.kind is Parameter.VAR_POSITIONAL for each in parameters):
            continue
        else:
            number = 1
        try:
            signature.bind(*[None] * (1 + number))
        except TypeError as error:
            raise PluginTypeError(
                f"The constructor of the offloading spec {cls.__module__}.{cls.__qualname__} takes "
                f"{signature}; expected (self, config) with an OffloadingConfig, or (self, config, "
                "kv_cache_config).",
                kind="specs",
                name=cls.__qualname__,
            ) from error
        return number
    return _BOTH if hasattr(cls, "get_handlers") else 1


# -- configs ------------------------------------------------------------------------------------


def is_serving_config(config: Any) -> bool:
    """Return whether this is a serving engine's whole config, as in the seed.

    Raises:
        KVTransferConfigError: A serving engine's config without ``kv_transfer_config``, or nothing
            of either kind; an `AssertionError`, too.
    """
    if getattr(config, "kv_transfer_config", None) is not None:
        return True
    if hasattr(config, "extra_config"):
        return False
    raise KVTransferConfigError(
        f"A {type(config).__name__} without kv_transfer_config: no offloading spec can be made of "
        "it. Give a ServingConfig(kv_transfer_config=KVTransferConfig(...)), or an "
        "OffloadingConfig, which has extra_config."
    )


def extra_config_of(config: Any) -> Mapping[str, Any]:
    """Return the options in a config of either kind."""
    if is_serving_config(config):
        return config.kv_transfer_config.kv_connector_extra_config or {}
    return config.extra_config or {}


def to_offloading_config(config: Any, kv_cache_config: Any = None) -> OffloadingConfig:
    """Return the config of a current spec, from a serving engine's configs.

    Args:
        config: Has ``kv_transfer_config``; further attributes are read where they exist.
        kv_cache_config: Our `KVCacheConfig`, or vLLM's; None where the host has none.

    Raises:
        OffloadingOptionError: The option ``block_size`` is no multiple of the cache's.
    """
    extra = extra_config_of(config)
    parallel = getattr(config, "parallel_config", None) or ParallelConfig()
    model = getattr(config, "model_config", None)
    events = getattr(config, "kv_events_config", None)
    groups = tuple(
        OffloadingGroupConfig(group.kv_cache_spec.block_size, tuple(group.layer_names), number)
        for number, group in enumerate(getattr(kv_cache_config, "kv_cache_groups", None) or ())
    ) or tuple(
        OffloadingGroupConfig(tokens_per_block(config, kv_cache_config), group.layer_names, number)
        for number, group in enumerate(cache_groups(kv_cache_config))
    )
    bytes_per_block = getattr(kv_cache_config, "bytes_per_block", 0)
    tensors = getattr(kv_cache_config, "kv_cache_tensors", None)
    if tensors and kv_cache_config.num_blocks:
        bytes_per_block = sum(tensor.size for tensor in tensors) // kv_cache_config.num_blocks
    return OffloadingConfig(
        extra_config=extra,
        engine_id=config.kv_transfer_config.engine_id or "",
        worker_kv_bytes_per_block=int(bytes_per_block),
        groups=groups,
        model=OffloadingModelConfig(
            name=getattr(model, "model", ""),
            dtype=str(getattr(model, "dtype", None) or "bfloat16").removeprefix("torch."),
        ),
        cache=OffloadingCacheConfig(
            tokens_per_hash=groups[0].tokens_per_block,
            blocks_per_chunk=blocks_per_chunk(extra, groups[0].tokens_per_block),
        ),
        parallel=OffloadingParallelConfig(
            rank=parallel.rank,
            world_size=parallel.world_size,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            data_parallel_index=parallel.data_parallel_index,
            data_parallel_size=parallel.data_parallel_size,
        ),
        enable_kv_cache_events=bool(getattr(events, "enable_kv_cache_events", False)),
    )


def to_serving_config(config: Any) -> tuple[ServingConfig, KVCacheConfig]:
    """Return the configs of a spec of the seed's API, from an `OffloadingConfig`.

    The number of blocks of the model's own cache is not in an `OffloadingConfig`, and is 0 here.
    """
    block_size = config.groups[0].tokens_per_block if config.groups else tokens_per_block(None)
    parallel = config.parallel
    kv_cache_config = KVCacheConfig(
        block_size=block_size, bytes_per_block=config.worker_kv_bytes_per_block
    )
    serving_config = ServingConfig(
        parallel_config=ParallelConfig(
            rank=parallel.rank,
            world_size=parallel.world_size,
            tensor_parallel_size=parallel.tp_size,
            pipeline_parallel_size=parallel.pp_size,
            data_parallel_size=parallel.data_parallel_size,
            data_parallel_index=parallel.data_parallel_index,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            engine_id=config.engine_id,
            kv_role="kv_both",
            kv_connector_extra_config={
                "block_size": block_size * config.cache.blocks_per_chunk,
                **config.extra_config,
            },
        ),
        cache_config=kv_cache_config,
    )
    return serving_config, kv_cache_config


# -- specs --------------------------------------------------------------------------------------


def adapt_spec(spec: OffloadingSpec, config: OffloadingConfig | None = None) -> OffloadingSpec:
    """Return a spec that current hosts can drive: itself, or an adapter around it; idempotent.

    Args:
        spec: A spec of either API.
        config: The host's; None: the one that the spec was made with.
    """
    get_worker = getattr(type(spec), "get_worker", None)
    has_worker = get_worker is not None and get_worker.__module__ != OffloadingSpec.__module__
    if has_worker or not hasattr(spec, "get_handlers"):
        return spec
    return SeedSpecAdapter(spec, config)


class SeedSpecAdapter(OffloadingSpec):
    """A spec of the seed's API, for current hosts.

    Args:
        spec: Has ``get_handlers``; its manager may be of either API.
        config: The host's; None: the one that the spec was made with.
    """

    def __init__(self, spec: Any, config: OffloadingConfig | None = None) -> None:
        self.spec = spec
        """The adapted spec."""
        if config is None:
            # A spec whose constructor does not call that of the base class has no config.
            config = getattr(spec, "config", None) or OffloadingConfig()
            if is_serving_config(config):
                config = to_offloading_config(config, spec.kv_cache_config)
        self.options = getattr(spec, "options", {})
        super().__init__(config)
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """Return an adapter of its manager."""
        if self._manager is None:
            self._manager = SeedManagerAdapter(self.spec.get_manager())
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return a worker that submits jobs to its handlers."""
        if self._worker is None:
            get_handlers = self.spec.get_handlers
            wants_layers = _num_taken(get_handlers, 2) == len(("kv_caches", "attn_backends"))
            arguments = seed_caches(kv_caches, self.spec) if wants_layers else (kv_caches,)
            self._worker = HandlersWorker(get_handlers(*arguments))
        return self._worker


def _num_taken(function: Any, most: int) -> int:
    """Return how many positional arguments, at most `most`, a function can be called with."""
    for count in range(most, 0, -1):
        try:
            inspect.signature(function).bind(*[None] * count)
        except TypeError:
            continue
        return count
    return 0


# -- managers -----------------------------------------------------------------------------------

_RESETS_NBYTES = 4


class SeedManagerAdapter(OffloadingManager):
    """A manager of the seed's API, for current hosts; one of the current API is passed through.

    Assertions of the seed's managers are checked here before the managers are called.

    Args:
        manager: Has at least ``lookup``, ``prepare_load`` and ``prepare_store``.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        # The base class's method does nothing.
        reset_cache = getattr(manager, "reset_cache", None)
        inherited = getattr(reset_cache, "__func__", None) is OffloadingManager.reset_cache
        self._can_reset = reset_cache is not None and not inherited
        # A manager that cannot reset knows blocks by other names after each reset: see `_name`.
        self._num_resets = 0
        # (request, key) -> the name under which it is in flight, and how often.
        self._loads: dict[tuple[str, bytes], tuple[bytes, int]] = {}
        self._stores: dict[tuple[str, bytes], bytes] = {}
        # Blocks that events tell, where the manager cannot tell the end of all of them.
        self._told: dict[OffloadKey, Medium] = {}
        self._events: list[OffloadingEvent] = []
        self._num_unknown = 0
        self._arity: dict[str, int] = {}
        self._is_shut_down = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Pass on."""
        answer = self._call("on_new_request", req_context)
        return answer if answer is not None else RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look up a series of one block."""
        name = self._name(key)
        if self._num_taken("lookup", 2) == len(("key", "req_context")):
            found = self._manager.lookup(name, req_context)
        else:
            found = self._manager.lookup([name])
        if isinstance(found, LookupResult):
            return found
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Pass on."""
        self._call("touch", [self._name(key) for key in keys], req_context)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pass on, once every block was found to be a hit.

        Raises:
            BlockNotKeptError: A block is no hit.
        """
        for key in keys:
            if self.lookup(key, req_context) is not LookupResult.HIT:
                raise BlockNotKeptError(f"The block {key.hex()} is not kept, or not whole yet.")
        names = [self._name(key) for key in keys]
        prepared: LoadStoreSpec = self._call("prepare_load", names, req_context)
        for key, name in zip(keys, names, strict=True):
            _, count = self._loads.get((req_context.req_id, key), (name, 0))
            self._loads[req_context.req_id, key] = (name, count + 1)
        return prepared

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Pass on the loads that are under way; count the others."""
        names = []
        for key in keys:
            name, count = self._loads.pop((req_context.req_id, key), (b"", 0))
            if count:
                names.append(name)
            else:
                self._num_unknown += 1
            if count > 1:
                self._loads[req_context.req_id, key] = (name, count - 1)
        if names:
            self._call("complete_load", names, req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Pass on, each block once."""
        key_of = {self._name(key): key for key in keys}
        prepared = self._call("prepare_store", list(key_of), req_context)
        if prepared is None:
            return None
        names = _first_of(prepared, "keys_to_store", "block_hashes_to_store")
        evicted = _first_of(prepared, "evicted_keys", "block_hashes_evicted")
        for name in names:
            self._stores[req_context.req_id, key_of[name]] = name
        return PrepareStoreOutput(
            [key_of[name] for name in names],
            prepared.store_spec,
            [self._key(name) for name in evicted],
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Pass on the stores that are under way; count the others."""
        names = [self._stores.pop((req_context.req_id, key), None) for key in keys]
        known = [name for name in names if name is not None]
        self._num_unknown += len(names) - len(known)
        if not known:
            return
        if self._num_taken("complete_store", 3) == len(("keys", "req_context", "success")):
            self._manager.complete_store(known, req_context, success)
        else:
            self._call("complete_store", known, success)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Pass on."""
        self._call("on_request_finished", req_context)

    def weights_changed(self) -> None:
        """Pass on."""
        self._call("weights_changed")

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return its events, in the current form, and the removals of a reset."""
        self._collect_events()
        events, self._events = self._events, []
        return events

    def _collect_events(self) -> None:
        for event in self._call("take_events") or ():
            names = _first_of(event, "keys", "block_hashes")
            medium = event.medium
            if not isinstance(medium, Medium):
                medium = Medium.CPU if medium == Medium.CPU.value else Medium.STORAGE
            keys = [self._key(name) for name in names]
            if not self._can_reset:
                # What becomes of a block of before the last reset says nothing of its key.
                known = zip(keys, names, strict=True)
                keys = [key for key, name in known if self._name(key) == name]
                for key in keys:
                    self._told.pop(key, None)
                    if not event.removed:
                        self._told[key] = medium
            if keys:
                self._events.append(OffloadingEvent(keys, medium, event.removed))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Pass on."""
        self._call("on_schedule_end", context)

    def has_pending_work(self) -> bool:
        """Pass on."""
        return bool(self._call("has_pending_work"))

    def reset_cache(self) -> None:
        """Pass on; where the manager has no reset, its blocks get other names from now on."""
        if self._can_reset:
            self._manager.reset_cache()
            return
        self._collect_events()
        for medium in set(self._told.values()):
            keys = [key for key, own in self._told.items() if own is medium]
            self._events.append(OffloadingEvent(keys, medium, removed=True))
        self._told.clear()
        self._num_resets += 1

    def get_stats(self) -> Mapping[str, float]:
        """Return its numbers, if it has any, and the number of unknown completions."""
        stats = self._call("get_stats")
        own = {"unknown_completions_total": float(self._num_unknown)}
        return {**stats, **own} if isinstance(stats, Mapping) else own

    def shutdown(self) -> None:
        """Pass on, once."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._call("shutdown")

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method with as many of these arguments as it takes; None where there is none."""
        function = getattr(self._manager, method, None)
        if function is None:
            return None
        return function(*arguments[: self._num_taken(method, len(arguments))])

    def _num_taken(self, method: str, most: int) -> int:
        """Return how many arguments a method of the manager takes; a signature is read once."""
        if method not in self._arity:
            function = getattr(self._manager, method, None)
            self._arity[method] = 0 if function is None else _num_taken(function, most)
        return self._arity[method]

    def _name(self, key: bytes) -> bytes:
        return key if self._can_reset else self._num_resets.to_bytes(_RESETS_NBYTES, "big") + key

    def _key(self, name: bytes) -> Any:
        return name if self._can_reset else name[_RESETS_NBYTES:]


def _first_of(holder: Any, *names: str) -> list[Any]:
    return list(next(getattr(holder, name) for name in names if hasattr(holder, name)))


# -- workers ------------------------------------------------------------------------------------


class HandlersWorker(OffloadingWorker):
    """Submits every job to the handler of its direction.

    Args:
        handlers: As ``get_handlers`` yields them: type of the source, type of the destination, and
            the handler between them.
    """

    def __init__(self, handlers: Iterable[tuple[Any, Any, Any]]) -> None:
        self._by_media = {
            (source.medium(), destination.medium()): handler
            for source, destination, handler in handlers
        }
        self._handlers = list({id(each): each for each in self._by_media.values()}.values())

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Submit a store to its handler."""
        return self._submit(job_id, _as_array(src_spec), dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002  # handlers have no such argument
    ) -> bool:
        """Submit a load to its handler."""
        return self._submit(job_id, src_spec, _as_array(dst_spec))

    def get_finished(self) -> list[TransferResult]:
        """Return ended jobs; handlers report results, or pairs of number and success."""
        return [
            TransferResult(*each) if isinstance(each, tuple) else each
            for handler in self._handlers
            for each in handler.get_finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Let every handler wait for its own among these jobs."""
        for handler in self._handlers:
            handler.wait(job_ids)

    def shutdown(self) -> None:
        """Shut down the handlers that have a shutdown, once."""
        handlers, self._handlers, self._by_media = self._handlers, [], {}
        for handler in handlers:
            if hasattr(handler, "shutdown"):
                handler.shutdown()

    def _submit(self, job_id: int, source: Any, destination: Any) -> bool:
        media = (source.medium(), destination.medium())
        handler = self._by_media.get(media)
        if handler is None:
            logger.error("no handler copies from %s to %s; job %d failed", *media, job_id)
            return False
        try:
            return bool(handler.transfer_async(job_id, (source, destination)))
        except Exception:
            # A job that fails is a result, never an exception.
            logger.exception("job %d from %s to %s could not be begun", job_id, *media)
            return False


def _as_array(spec: GPULoadStoreSpec) -> GPULoadStoreSpec:
    """Return the same blocks as the seed's handlers take them: numbers in an array."""
    import numpy as np

    copied = GPULoadStoreSpec(spec.block_ids, spec.group_sizes, spec.block_indices)
    copied.block_ids = np.asarray(spec.block_ids, dtype=np.int64)  # type: ignore[assignment]
    return copied


class BlocksFirst:
    """The part of an attention backend that the seed's handlers call: how a cache is laid out."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, **_: Any
    ) -> tuple[int, int, int]:
        """Return the order of dimensions: blocks, tokens, everything of a token."""
        return (num_blocks, block_size, 2 * num_kv_heads * head_size)

    @staticmethod
    def get_kv_cache_stride_order(**_: Any) -> tuple[int, int, int]:
        """Return the order of dimensions in memory, which is the same."""
        return (0, 1, 2)


def seed_caches(
    kv_caches: CanonicalKVCaches, spec: Any
) -> tuple[dict[str, torch.Tensor], dict[str, type[BlocksFirst]]]:
    """Return the arguments of ``get_handlers``: tensors and attention backends by layer.

    The tensors are views of the same memory, as bytes: ``(num_blocks, block_size, bytes)``.

    Args:
        kv_caches: The cache.
        spec: ``gpu_block_size`` is its number of tokens per block.

    Raises:
        OffloadingOptionError: The bytes of a block cannot be divided among its tokens, or the cache
            has several groups of layers, which handlers of the seed cannot tell apart.
    """
    import torch

    num_groups = len(kv_caches.group_data_refs)
    if num_groups > 1:
        raise OffloadingOptionError(
            f"{type(spec).__name__} is a spec of the seed's API, whose handlers know one group of "
            f"layers; this KV cache has {num_groups}: choose a spec with get_worker"
        )
    block_size = int(getattr(spec, "gpu_block_size", 1))
    caches = {}
    for number, each in enumerate(kv_caches.tensors):
        if each.page_size_bytes % block_size:
            raise OffloadingOptionError(
                f"Pages of {each.page_size_bytes} bytes cannot be divided among the {block_size} "
                "tokens of a block; a spec of the seed's API cannot be used with this cache."
            )
        num_blocks = each.tensor.shape[0]
        pages = each.tensor.view(num_blocks, -1).view(torch.uint8)[:, : each.page_size_bytes]
        caches[f"layer.{number}"] = pages.view(num_blocks, block_size, -1)
    return caches, dict.fromkeys(caches, BlocksFirst)
