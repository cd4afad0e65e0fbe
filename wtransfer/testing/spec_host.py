"""A host in one process that drives a spec as a serving engine would, with tensors of its own."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from wtransfer.blocks import fence_key, make_offload_key
from wtransfer.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
)
from wtransfer.specs.interface import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    ReqContext,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from wtransfer.blocks import OffloadKey
    from wtransfer.specs.interface import (
        LoadStoreSpec,
        OffloadingSpec,
        PrepareStoreOutput,
        TransferResult,
    )

_numbers = itertools.count()


@dataclass(frozen=True)
class Geometry:
    """What a cache looks like."""

    num_layers: int = 2
    """Layers of each group."""
    page_nbytes: int = 1024
    """Bytes of a layer in one block."""
    num_groups: int = 1
    """Groups of layers; each has blocks of its own."""
    block_size: int = 16
    """Tokens per block."""
    blocks_per_chunk: int = 1
    """Blocks that are kept under one key."""
    num_blocks: int = 32
    """Blocks of the cache, of each group."""

    @property
    def chunk_nbytes(self) -> int:
        """Bytes that are kept under one key, at most."""
        return self.num_layers * self.page_nbytes * self.num_groups * self.blocks_per_chunk


def key_of(number: int, group: int = 0) -> OffloadKey:
    """Return the key of a block, as hosts have them: fenced, with hash and group."""
    return fence_key(make_offload_key(number.to_bytes(32, "big"), group), "weights of the kit")


class SpecHost:
    """Both sides of a spec, and a cache between which and the tier blocks travel.

    What passes from one side to the other is copied, as it would be between processes.

    Args:
        make_spec: Makes a spec from an `OffloadingConfig`; called once for each side.
        geometry: The cache.
        options: The spec's.
        deadline_s: Bound on every wait, in seconds.
    """

    def __init__(
        self,
        make_spec: Callable[[OffloadingConfig], OffloadingSpec],
        geometry: Geometry,
        options: dict[str, Any],
        deadline_s: float,
    ) -> None:
        self.geometry = geometry
        """The cache's."""
        self.deadline_s = deadline_s
        """Bound on every wait."""
        config = config_of(geometry, options)
        self.tensors = _tensors(geometry)
        """For each group, the tensors of its layers, all zero at first."""
        self.manager = make_spec(config).get_manager()
        """The scheduler's side."""
        self.worker = make_spec(config).get_worker(_canonical(self.tensors, geometry))
        """The worker's side."""
        self.finished: dict[int, TransferResult] = {}
        """Jobs that have ended, by number."""
        self._jobs = itertools.count(1)

    # -- the cache

    def write(self, block: int, seed: int, group: int = 0) -> None:
        """Fill a block with bytes that no other seed has."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors[group]:
            tensor[block] = torch.randint(
                0, 256, tensor[block].shape, generator=generator, dtype=torch.uint8
            )

    def digest(self, block: int, group: int = 0) -> str:
        """Return the digest of a block's bytes: pytest's diff of the bytes would take minutes."""
        parts = (tensor[block].numpy().tobytes() for tensor in self.tensors[group])
        return xxhash.xxh3_128_hexdigest(b"".join(parts))

    def digests(self) -> list[str]:
        """Return the digests of all blocks."""
        groups = range(self.geometry.num_groups)
        blocks = range(self.geometry.num_blocks)
        return [self.digest(block, group) for group in groups for block in blocks]

    # -- jobs

    def request(self) -> ReqContext:
        """Return a request that the manager has heard of."""
        ctx = ReqContext(f"request {next(_numbers)}")
        self.manager.on_new_request(ctx)
        return ctx

    def submit_store(self, blocks: Sequence[int], where: LoadStoreSpec, **of: Any) -> int:
        """Begin a store; return its number, which is that of a failed job if it was refused."""
        job = next(self._jobs)
        source = GPULoadStoreSpec(blocks, **of)
        if not self.worker.submit_store(job, source, copy.deepcopy(where)):
            return -job
        return job

    def submit_load(self, blocks: Sequence[int], where: LoadStoreSpec, **of: Any) -> int:
        """Begin a load; as `submit_store`."""
        job = next(self._jobs)
        destination = GPULoadStoreSpec(blocks, **of)
        if not self.worker.submit_load(job, copy.deepcopy(where), destination):
            return -job
        return job

    def succeeded(self, job: int) -> bool:
        """Wait for a job; return whether it was begun and ended well."""
        if job < 0:
            return False
        if job not in self.finished:
            self.worker.wait({job})
            self.collect()
        assert job in self.finished, f"job {job} has ended, and get_finished() does not say so"
        return self.finished[job].success

    def collect(self) -> list[TransferResult]:
        """Return what get_finished() says, after noting it."""
        results = self.worker.get_finished()
        for result in results:
            assert result.job_id not in self.finished, f"job {result.job_id} was reported twice"
            self.finished[result.job_id] = result
        return results

    # -- whole stores and loads

    def store(
        self, keys: Collection[OffloadKey], blocks: Sequence[int], ctx: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """Store one block for each key, and wait; of those that are kept already, nothing moves."""
        ctx = ctx or self.request()
        prepared = self.manager.prepare_store(keys, ctx)
        if prepared is not None and prepared.keys_to_store:
            block_of = dict(zip(keys, blocks, strict=True))
            job = self.submit_store(
                [block_of[key] for key in prepared.keys_to_store], prepared.store_spec
            )
            success = self.succeeded(job)
            self.manager.complete_store(prepared.keys_to_store, ctx, success)
            assert success, "a store was not successful"
        return prepared

    def load(
        self, keys: Collection[OffloadKey], blocks: Sequence[int], ctx: ReqContext | None = None
    ) -> bool:
        """Load one block for each key, and wait; return whether that was successful."""
        ctx = ctx or self.request()
        where = self.manager.prepare_load(keys, ctx)
        success = self.succeeded(self.submit_load(blocks, where))
        self.manager.complete_load(keys, ctx)
        return success

    def close(self) -> None:
        """Shut both sides down."""
        self.worker.shutdown()
        self.manager.shutdown()


class Shelf:
    """Block after block that is stored, with what its bytes were.

    Args:
        host: Stores them, from block 0 of its cache.
    """

    def __init__(self, host: SpecHost) -> None:
        self._host = host
        self._next = 0
        self.digest_of: dict[OffloadKey, str] = {}
        """Key -> digest, of every block that was ever stored."""
        self.order: deque[OffloadKey] = deque()
        """Keys that are kept, as far as the manager said."""

    def add(self) -> PrepareStoreOutput | None:
        """Store one more block; note what gave way."""
        key = key_of(self._next)
        self._host.write(0, seed=self._next)
        prepared = self._host.store([key], [0])
        if prepared is not None:
            self._next += 1
            self.digest_of[key] = self._host.digest(0)
            self.order.append(key)
            for each in prepared.evicted_keys:
                self.order.remove(each)
        return prepared

    def fill(self, most: int = 256) -> list[OffloadKey]:
        """Store blocks until one gives way; return those that are kept."""
        for _ in range(most):
            prepared = self.add()
            if prepared is None or prepared.evicted_keys:
                return list(self.order)
        raise AssertionError(f"{most} blocks were stored and none gave way: is the size an option?")


def config_of(geometry: Geometry, options: dict[str, Any]) -> OffloadingConfig:
    """Return what a spec is made with."""
    groups = range(geometry.num_groups)
    return OffloadingConfig(
        extra_config=options,
        engine_id=f"conformance {next(_numbers)}",
        worker_kv_bytes_per_block=geometry.chunk_nbytes // geometry.blocks_per_chunk,
        groups=tuple(
            OffloadingGroupConfig(geometry.block_size, (f"layers of {group}",), group)
            for group in groups
        ),
        model=OffloadingModelConfig("conformance", "uint8"),
        cache=OffloadingCacheConfig(geometry.block_size, geometry.blocks_per_chunk),
        enable_kv_cache_events=True,
    )


def _tensors(geometry: Geometry) -> list[list[torch.Tensor]]:
    shape = (geometry.num_blocks, geometry.page_nbytes)
    return [
        [torch.zeros(shape, dtype=torch.uint8) for _ in range(geometry.num_layers)]
        for _ in range(geometry.num_groups)
    ]


def _canonical(tensors: list[list[torch.Tensor]], geometry: Geometry) -> CanonicalKVCaches:
    nbytes = geometry.page_nbytes
    flat = [CanonicalKVCacheTensor(each, nbytes) for group in tensors for each in group]
    numbers = iter(range(len(flat)))
    refs = [[CanonicalKVCacheRef(next(numbers), nbytes) for _ in group] for group in tensors]
    return CanonicalKVCaches(flat, refs)
