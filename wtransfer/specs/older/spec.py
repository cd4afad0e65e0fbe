"""Specs in the seed's style, for hosts of today.

What was different then, and is bridged here::

    the seed                                         today
    get_handlers(kv_caches, attn_backends)           get_worker(kv_caches)
    handler.transfer_async(job_id, (src, dst))       submit_store and submit_load
    manager.lookup(block_hashes) -> int | None       lookup(key, req_context) -> LookupResult
    prepare_*, complete_*, touch(block_hashes)       ... (keys, req_context)
    PrepareStoreOutput.block_hashes_to_store         keys_to_store
    no reset_cache, no shutdown                      both

Releases in between had some of one and some of the other, so every method is judged by its own
signature. What the seed's managers assert, they are asked about before.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wtransfer.config import tokens_per_block
from wtransfer.errors import BlockNotKeptError
from wtransfer.specs.interface import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from wtransfer.specs.older.caches import seed_caches
from wtransfer.specs.older.worker import HandlersWorker

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from wtransfer.blocks import OffloadKey
    from wtransfer.specs.interface import (
        CanonicalKVCaches,
        LoadStoreSpec,
        OffloadingWorker,
        ReqContext,
        ScheduleEndContext,
    )

_EPOCH_NBYTES = 4


def todays(spec: OffloadingSpec) -> OffloadingSpec:
    """Return a spec that hosts of today can drive: itself, or what wraps it.

    Args:
        spec: Any spec. A second call for what the first returned does nothing.
    """
    if not hasattr(spec, "get_handlers"):
        return spec
    get_worker = getattr(type(spec), "get_worker", None)
    stands_in = get_worker is None or get_worker.__module__ == OffloadingSpec.__module__
    return OlderSpec(spec) if stands_in else spec


class OlderSpec(OffloadingSpec):
    """A spec in the seed's style, wrapped.

    Args:
        spec: Has ``get_handlers``; its manager may be of either style.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        """What is wrapped."""
        self.config = spec.config if hasattr(spec, "config") else None
        self.extra_config = getattr(spec, "extra_config", {})
        sizes = _numbers(spec, "tokens_per_block", "gpu_block_size")
        cache = getattr(spec, "kv_cache_config", None)
        self.tokens_per_block = sizes or (tokens_per_block(self.config, cache),)
        block_size = self.tokens_per_block[0]
        self.tokens_per_hash = (_numbers(spec, "tokens_per_hash") or (block_size,))[0]
        kept = _numbers(spec, "offloaded_block_size") or (block_size,)
        chunks = _numbers(spec, "blocks_per_chunk") or (kept[0] // block_size,)
        self.blocks_per_chunk = chunks[0]
        self._manager: OffloadingManager | None = None
        self._worker: HandlersWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """Return its manager, in today's style."""
        if self._manager is None:
            self._manager = OlderManager(self.spec.get_manager())
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return a worker that hands jobs to its handlers."""
        if self._worker is None:
            get_handlers = self.spec.get_handlers
            arguments = (
                seed_caches(kv_caches, self.spec) if takes(get_handlers, 2) else (kv_caches,)
            )
            self._worker = HandlersWorker(get_handlers(*arguments))
        return self._worker


def _numbers(spec: Any, *names: str) -> tuple[int, ...]:
    """Return the first of these attributes that says something: a number, or one for each group."""
    said = next(filter(None, (getattr(spec, name, None) for name in names)), ())
    return tuple(map(int, said)) if isinstance(said, (tuple, list)) else (int(said),)


class OlderManager(OffloadingManager):
    """A manager in the seed's style, wrapped. One of today's may be given, too.

    Args:
        manager: Has at least ``lookup``, ``prepare_load`` and ``prepare_store``.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        reset_cache = getattr(manager, "reset_cache", None)
        # That of our base class does nothing.
        inherited = getattr(reset_cache, "__func__", None) is OffloadingManager.reset_cache
        self._resets_itself = reset_cache is not None and not inherited
        self._epoch = 0
        # (request, key) -> the name under which it is in flight, and how often.
        self._loads: dict[tuple[str, bytes], tuple[bytes, int]] = {}
        self._stores: dict[tuple[str, bytes], bytes] = {}
        self._num_unknown = 0
        self._taken: dict[tuple[str, int], bool] = {}
        self._is_shut_down = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Tell it, if it wants to know."""
        answer = self._call("on_new_request", req_context)
        return answer if answer is not None else RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Ask for a series of one block."""
        name = self._name(key)
        if self._takes("lookup", 2):
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
            BlockNotKeptError: One of them is no hit.
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
        """Pass on what is under way; the rest is counted."""
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
        """Pass on what is under way; the rest is counted."""
        names = [self._stores.pop((req_context.req_id, key), None) for key in keys]
        known = [name for name in names if name is not None]
        self._num_unknown += len(names) - len(known)
        if not known:
            return
        if self._takes("complete_store", 3):
            self._manager.complete_store(known, req_context, success)
        elif hasattr(self._manager, "complete_store"):
            self._manager.complete_store(known, success)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Tell it, if it wants to know."""
        self._call("on_request_finished", req_context)

    def weights_changed(self) -> None:
        """Tell it, if it wants to know."""
        self._call("weights_changed")

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return its events, in today's form."""
        for event in self._call("take_events") or ():
            names = _first_of(event, "keys", "block_hashes")
            medium = event.medium
            if not isinstance(medium, Medium):
                medium = Medium.CPU if medium == Medium.CPU.value else Medium.STORAGE
            yield OffloadingEvent([self._key(name) for name in names], medium, event.removed)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Tell it, if it wants to know."""
        self._call("on_schedule_end", context)

    def has_pending_work(self) -> bool:
        """Ask it; it has none if it does not say."""
        return bool(self._call("has_pending_work"))

    def reset_cache(self) -> None:
        """Let it forget all blocks; where it cannot, they get other names from now on."""
        if self._resets_itself:
            self._manager.reset_cache()
        else:
            self._epoch += 1

    def get_stats(self) -> Mapping[str, float]:
        """Return its numbers, if it has any, and how many completions nobody waited for."""
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
        counts = range(len(arguments), 0, -1)
        num_taken = next((count for count in counts if self._takes(method, count)), 0)
        return function(*arguments[:num_taken])

    def _takes(self, method: str, count: int) -> bool:
        """Whether a method of the manager can be called with so many arguments; asked once."""
        if (method, count) not in self._taken:
            function = getattr(self._manager, method, None)
            self._taken[method, count] = function is not None and takes(function, count)
        return self._taken[method, count]

    # In a manager that cannot forget, a name begins with how often it should have.
    def _name(self, key: bytes) -> bytes:
        return key if self._resets_itself else self._epoch.to_bytes(_EPOCH_NBYTES, "big") + key

    def _key(self, name: bytes) -> Any:
        return name if self._resets_itself else name[_EPOCH_NBYTES:]


def takes(function: Any, count: int) -> bool:
    """Whether a function can be called with so many positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


def _first_of(holder: Any, *names: str) -> list[Any]:
    return list(next(getattr(holder, name) for name in names if hasattr(holder, name)))
