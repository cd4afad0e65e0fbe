"""HiCache over a tier of wtransfer: SGLang's pages of KV cache are blocks of an offloading spec.

SGLang makes a `TierStorage` in each rank, by its name. Three of SGLang's threads call it: one asks
how many pages are kept, one loads pages from the tier to SGLang's host memory, and one stores them.
The spec over the tier (`wtransfer.specs.tier_spec`) does the rest: buffers, threads, headers and
digests, deadlines, and whether loads pay.

SGLang names a page by a digest of its tokens, of all before them, and of the request's
``extra_key``, in which the name of the weights stands (`wtransfer_sglang.bridge`). Here model,
layout and rank are added.

SGLang's scheduler waits for these threads when it flushes its cache, as at every commit. So a call
outlasts neither the deadline nor, from there on, `STALL_S`: the load that it waits for is given up,
and the spec writes none that was given up to SGLang's memory.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from sglang.srt.runtime_context import get_model
from wtransfer.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
)
from wtransfer.errors import BlockNotKeptError, OffloadingOptionError
from wtransfer.kv.cache_view import page_form
from wtransfer.kv.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from wtransfer.kv.keys import fence_key, make_offload_key
from wtransfer.kv.step_times import StepTimes
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wtransfer.kv.keys import OffloadKey
    from wtransfer.specs.interface import OffloadingManager, OffloadingWorker

logger = logging.getLogger(__name__)

POLL_S = 0.001
"""Time between two looks at a job or a look-up that is under way, in seconds."""
SMALL_PAGE = 16
"""Tokens of a page below which the log warns: a tier works block by block."""
TOKEN_AXES = {"layer_first": -3, "page_first": -4, "page_first_direct": -5, "page_head": -5}
"""Layout of SGLang's host memory -> its dimension that counts tokens, or pages of tokens."""
_OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1"}


@dataclass(eq=False)
class _Job:
    """A transfer that the worker has been given."""

    number: int
    keys: list[OffloadKey]
    context: ReqContext
    is_store: bool
    success: bool | None = None
    """None: it has not ended."""


class TierStorage(HiCacheStorage):
    """SGLang's storage of KV cache in a tier, for one rank.

    Args:
        storage_config: SGLang's, of this rank. Its ``extra_config`` has ``tier``, the name of a
            tier, and options: those of every tier, and the tier's own.

    Raises:
        OffloadingOptionError: An option cannot be used.
        UnknownBackendError: There is no tier of this name.
        RuntimeError: The hooks are not registered, without which no page is named by its weights.
    """

    def __init__(self, storage_config: Any, _options: Mapping[str, Any]) -> None:
        from wtransfer_sglang import plugin

        if not plugin.is_registered:
            raise RuntimeError(
                "SGLang runs without the hooks of wtransfer-sglang, so its KV cache is not named "
                "by weights and is not kept in a tier: its log says why (SGLANG_PLUGINS, if set, "
                "must name wtransfer)"
            )
        given = storage_config.extra_config
        # SGLang reads it next: pages are then copied from its memory, and to it.
        given["interface_v1"] = 1
        self._extra_config = {k: v for k, v in given.items() if k not in _OF_SGLANG}
        if not self._extra_config.get("tier"):
            raise OffloadingOptionError(
                "hicache-storage-backend-extra-config needs the option tier, the name of a tier: "
                "'file', or one that a package brings"
            )
        if self._extra_config.get("cpu_bytes_to_use"):
            raise OffloadingOptionError(
                "hicache-storage-backend-extra-config: cpu_bytes_to_use is about an arena over the "
                "tier, and SGLang's host memory is one: leave it out, and set --hicache-ratio or "
                "--hicache-size"
            )
        # Looked up now, to be refused before SGLang takes its host memory.
        OffloadingSpecFactory.get_spec_cls(self._extra_config)
        self._config = storage_config
        self._namespace = ""
        self._page_size = 0
        self._manager: OffloadingManager
        self._worker: OffloadingWorker
        self._sides: list[OffloadingManager | OffloadingWorker] = []
        self._stop = threading.Event()
        # Guards everything below, and the manager, which is made for one thread.
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._num_jobs = 0
        self._times = StepTimes()
        self._num_begun = self._num_ended = 0

    # -- SGLang makes it ready

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tier for the pages of SGLang's host memory.

        Raises:
            OffloadingOptionError: An option cannot be used, or the memory's layout.
        """
        super().register_mem_pool_host(mem_pool_host)
        pages = _pages_of(mem_pool_host)
        layout = mem_pool_host.layout
        nbytes = pages[:1].numel() * pages.element_size()
        self._page_size = page_size = int(mem_pool_host.page_size)
        if page_size < SMALL_PAGE and not self._config.tp_rank:
            logger.warning(
                "--page-size %d: the tier %s keeps a block of %d bytes for every %d tokens of each "
                "rank, %d of them for a prompt of 1,000 tokens; set --page-size 64, say",
                *(page_size, self._extra_config["tier"], nbytes, page_size, 1000 // page_size),
            )
        self._namespace = f"{_identity(self._config)} {page_size} {page_form(layout, pages)}"
        spec = OffloadingSpecFactory.create_spec(
            OffloadingConfig(
                extra_config=self._extra_config,
                engine_id=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
                worker_kv_bytes_per_block=nbytes,
                groups=(OffloadingGroupConfig(tokens_per_block=page_size),),
                model=OffloadingModelConfig(str(self._config.model_name), str(pages.dtype)),
                cache=OffloadingCacheConfig(tokens_per_hash=page_size),
            )
        )
        self._manager = spec.get_manager()
        self._sides.append(self._manager)
        self._worker = spec.get_worker(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(pages, nbytes)],
                [[CanonicalKVCacheRef(0, nbytes, page_form(layout, pages))]],
            )
        )
        self._sides.append(self._worker)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse pools beside that of keys and values.

        Raises:
            OffloadingOptionError: It is such a pool.
        """
        if host_pool_name != PoolName.KV:
            raise OffloadingOptionError(
                f"this model has KV cache of several kinds ({host_pool_name!s}), and a tier keeps "
                "keys and values of full attention alone"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def heed(self, stop: threading.Event) -> None:
        """Let calls end soon once this event is set: SGLang then waits for its threads."""
        self._stop = stop

    # -- steps of the model

    def begin_step(self, batch: Any) -> None:
        """Note that the model is given a step."""
        self._num_begun += 1
        counts = batch.extend_lens if batch.forward_mode.is_extend() else ()
        self._times.begin(self._num_begun, counts or (), self._page_size)

    def end_step(self) -> None:
        """Note that the result of the oldest step is there."""
        self._num_ended += 1
        self._times.end(self._num_ended)
        with self._lock:
            self._manager.on_schedule_end(
                ScheduleEndContext(seconds_per_token=self._times.seconds_per_token)
            )

    # -- SGLang's threads

    def exists(self, key: str) -> bool:
        """Return whether a page is kept."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """Return how many pages are kept and worth a load, from the first on."""
        return self._num_hits(self._names(keys), ReqContext(""))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,  # noqa: ARG002
    ) -> list[bool]:
        """Load pages; return for each whether it is there, whole and the one that was asked for.

        Pages of one call fail together.
        """
        context = ReqContext("")
        wanted = self._names(keys)
        names = wanted[: self._num_hits(wanted, context)]
        loaded = bool(names) and self._load(names, self._pages(host_indices), context)
        return [loaded and number < len(names) for number in range(len(keys))]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,  # noqa: ARG002
    ) -> list[bool]:
        """Store pages; return for each whether it was copied on its way to the tier, or is there.

        Pages of one call fail together.
        """
        names, context = self._names(keys), ReqContext("")
        page_of = dict(zip(names, self._pages(host_indices), strict=True))
        with self._lock:
            room = None if self._stop.is_set() else self._manager.prepare_store(names, context)
            if room is None:
                return [False] * len(keys)
            job = self._new_job(room.keys_to_store, context, is_store=True)
            pages = GPULoadStoreSpec([page_of[name] for name in job.keys])
            accepted = self._worker.submit_store(job.number, pages, room.store_spec)
        if accepted:
            # Until the pages may be used again: puts go on from buffers.
            self._worker.wait({job.number})
        return [accepted and self._outcome(job) is not False] * len(keys)

    def clear(self) -> None:
        """Keep the blocks: other servers share the tier."""
        logger.warning("blocks stay in the tier, which other servers may share: empty it itself")

    def close(self) -> None:
        """Close what was opened of the tier; SGLang calls it after a failed start as well."""
        for side in self._sides:
            side.shutdown()

    # SGLang calls these where pages are not copied from and to its memory.

    def _refuse(self, *_args: object, **_options: object) -> Any:
        raise NotImplementedError("pages are copied by batch_get_v1 and batch_set_v1")

    get = set = batch_get = batch_set = _refuse

    # -- names and places

    def _names(self, keys: Sequence[str]) -> list[OffloadKey]:
        return [fence_key(make_offload_key(bytes.fromhex(key)), self._namespace) for key in keys]

    def _pages(self, host_indices: torch.Tensor) -> list[int]:
        firsts = host_indices[:: self._page_size]
        return [int(first) // self._page_size for first in firsts.tolist()]

    # -- look-ups and jobs

    def _num_hits(self, names: Sequence[OffloadKey], context: ReqContext) -> int:
        with self._lock:
            # A page whose store has ended is asked about again.
            self._end_jobs()
            # The tier is asked for all of them at once.
            for name in names:
                self._manager.lookup(name, context)
        num_hits = 0
        while num_hits < len(names) and not self._stop.is_set():
            with self._lock:
                found = self._manager.lookup(names[num_hits], context)
            if found is LookupResult.RETRY:
                self._stop.wait(POLL_S)
            elif found is LookupResult.HIT:
                num_hits += 1
            else:
                break
        return num_hits

    def _load(self, names: list[OffloadKey], pages: list[int], context: ReqContext) -> bool:
        with self._lock:
            try:
                kept = self._manager.prepare_load(names, context)
            except BlockNotKeptError:
                return False
            job = self._new_job(names, context)
            accepted = self._worker.submit_load(
                job.number, kept, GPULoadStoreSpec(pages[: len(names)])
            )
        while accepted and self._outcome(job) is None:
            if self._stop.wait(POLL_S):
                # The spec gives the load up, unless it is writing at this moment.
                self._worker.wait({job.number})
                break
        success = accepted and bool(self._outcome(job))
        with self._lock:
            if not success:
                self._manager.load_failed(names, context, suspect=not self._stop.is_set())
            self._manager.complete_load(names, context)
        return success

    def _new_job(
        self, keys: list[OffloadKey], context: ReqContext, *, is_store: bool = False
    ) -> _Job:
        self._num_jobs += 1
        job = self._jobs[self._num_jobs] = _Job(self._num_jobs, keys, context, is_store)
        return job

    def _outcome(self, job: _Job) -> bool | None:
        """Return whether a job has succeeded; None: it is under way."""
        with self._lock:
            self._end_jobs()
            return job.success

    def _end_jobs(self) -> None:
        """Note the outcomes of jobs that have ended; called under the lock."""
        for result in self._worker.get_finished():
            ended = self._jobs.pop(result.job_id)
            ended.success = result.success
            if ended.is_store:
                self._manager.complete_store(ended.keys, ended.context, result.success)


def _pages_of(pool: Any) -> torch.Tensor:
    """Return SGLang's host memory as a view whose first dimension counts pages."""
    axis, buffer = TOKEN_AXES.get(pool.layout), getattr(pool, "kv_buffer", None)
    if (
        axis is None
        or not isinstance(buffer, torch.Tensor)
        # A page of another pool has further memory, such as scales.
        or buffer.numel() * buffer.element_size() != pool.size * pool.size_per_token
    ):
        raise OffloadingOptionError(
            f"the host memory of SGLang's {type(pool).__name__} in layout {pool.layout!r} is not "
            "kept in a tier: expected one tensor of keys and values, in one of the layouts "
            f"{', '.join(TOKEN_AXES)} (--hicache-mem-layout)"
        )
    if pool.layout in ("layer_first", "page_first"):
        shape = buffer.shape
        buffer = buffer.view(*shape[:axis], -1, pool.page_size, *shape[axis + 1 :])
        axis -= 1
    return buffer.movedim(axis, 0)


def _identity(config: Any) -> str:
    """Return what a page depends on besides tokens, weights and layout: model, dtype and rank."""
    parts = [config.model_name, get_model().kv_cache_dtype]
    parts += [(config.pp_rank, config.pp_size), (config.attn_cp_rank, config.attn_cp_size)]
    # SGLang keeps the cache of such a model alike in all tensor-parallel ranks; one stores it.
    if not config.is_mla_model:
        parts.append((config.tp_rank, config.tp_size))
    return repr(parts)
