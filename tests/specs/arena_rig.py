"""One rank with a cache of real tensors, its arena, and the few calls that a host would make."""

from __future__ import annotations

import contextlib
import itertools

import torch

from wtransfer.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from wtransfer.kv.keys import fence_key, make_offload_key
from wtransfer.specs.arena import ArenaLoadStoreSpec
from wtransfer.specs.cpu import CPUOffloadingSpec
from wtransfer.specs.interface import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)


def key(number, group=0, fingerprint="weights"):
    return fence_key(make_offload_key(b"block %d" % number, group), fingerprint)


def even(num_blocks, nbytes, num_layers):
    """Layers in one allocation: all pages of a block are evenly spaced."""
    whole = torch.zeros(num_layers, num_blocks, nbytes, dtype=torch.uint8)
    return list(whole)


def scattered(num_blocks, nbytes, num_layers):
    """Layers with odd distances between them."""
    whole = torch.zeros(num_layers * (num_blocks * nbytes + 64 * num_layers), dtype=torch.uint8)
    starts = [n * num_blocks * nbytes + 64 * n * n for n in range(num_layers)]
    return [whole[at : at + num_blocks * nbytes].view(num_blocks, nbytes) for at in starts]


def packed(num_blocks, nbytes, num_layers):
    """All layers of a block beside each other: rows have gaps."""
    whole = torch.zeros(num_blocks, num_layers, nbytes, dtype=torch.uint8)
    return list(whole.unbind(1))


def shaped(num_blocks, nbytes, num_layers):
    """As a model has them: floats, with heads and positions."""
    shape = (num_blocks, 2, nbytes // 8, 2)
    return [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(num_layers)]


class Rig:
    """See the module.

    Args:
        layers: Makes the tensors of a group.
        page_nbytes: Bytes of a page, for each group.
        num_layers: Layers of each group.
        more: Of the config: rank, world_size, engine_id, model, dtype; the rest are options.
    """

    def __init__(
        self,
        *,
        layers=even,
        page_nbytes=(1024,),
        num_layers=3,
        num_blocks=24,
        num_slots=16,
        blocks_per_chunk=1,
        tokens_per_block=16,
        rank=0,
        world_size=1,
        engine_id="engine",
        model="model",
        **options,
    ):
        self.groups = [layers(num_blocks, nbytes, num_layers) for nbytes in page_nbytes]
        self.blocks_per_chunk = blocks_per_chunk
        refs, tensors = [], []
        for group, nbytes in zip(self.groups, page_nbytes, strict=True):
            refs.append([CanonicalKVCacheRef(len(tensors) + n, nbytes) for n in range(len(group))])
            tensors += [CanonicalKVCacheTensor(tensor, nbytes) for tensor in group]
        self.caches = CanonicalKVCaches(tensors, refs)
        block_nbytes = num_layers * max(page_nbytes)
        chunk_nbytes = (block_nbytes * blocks_per_chunk + 4096) * world_size
        self.config = OffloadingConfig(
            extra_config={"cpu_bytes_to_use": num_slots * (chunk_nbytes + 8192), **options},
            engine_id=engine_id,
            worker_kv_bytes_per_block=block_nbytes,
            groups=tuple(
                OffloadingGroupConfig(tokens_per_block, group_id=n) for n in range(len(refs))
            ),
            model=OffloadingModelConfig(model, "bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_block, blocks_per_chunk),
            parallel=OffloadingParallelConfig(rank=rank, world_size=world_size),
        )
        self.spec = CPUOffloadingSpec(self.config)
        self.worker = self.spec.get_worker(self.caches)
        self.part = self.worker.links[0].part
        self._ids = itertools.count()

    # -- the cache

    def fill(self, seed=0):
        """Give every byte of the cache a value."""
        torch.manual_seed(seed)
        for tensor in self.tensors:
            values = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, device="cpu")
            tensor.copy_(values.view(tensor.dtype).view(tensor.shape))
        return self

    def wipe(self):
        for tensor in self.tensors:
            tensor.zero_()

    @property
    def tensors(self):
        return [tensor for group in self.groups for tensor in group]

    def block(self, number, group=0):
        """Return the bytes of a block."""
        return b"".join(
            tensor[number].cpu().contiguous().view(torch.uint8).numpy().tobytes()
            for tensor in self.groups[group]
        )

    def snapshot(self):
        num_blocks = len(self.groups[0][0])
        return [[self.block(n, g) for n in range(num_blocks)] for g in range(len(self.groups))]

    # -- jobs

    def store(self, blocks, slots, keys, **groups):
        return self.result(self.submit_store(blocks, slots, keys, **groups))

    def load(self, blocks, slots, keys, **groups):
        return self.result(self.submit_load(blocks, slots, keys, **groups))

    def submit_store(self, blocks, slots, keys, **groups):
        number = next(self._ids)
        arena = ArenaLoadStoreSpec(slots, keys)
        assert self.worker.submit_store(number, GPULoadStoreSpec(blocks, **groups), arena)
        return number

    def submit_load(self, blocks, slots, keys, **groups):
        number = next(self._ids)
        arena = ArenaLoadStoreSpec(slots, keys)
        assert self.worker.submit_load(number, arena, GPULoadStoreSpec(blocks, **groups))
        return number

    def result(self, number):
        self.worker.wait({number})
        (result,) = self.worker.get_finished()
        assert result.job_id == number
        return result

    # -- what it says

    def failures(self):
        """Return what failed, by kind and reason."""
        return {
            name.removesuffix("_total"): count
            for name, count in self.worker.get_stats().items()
            if "_failed_" in name and not name.endswith("_failed_total")
        }

    def header(self, slot):
        return self.part._headers[slot]

    def close(self):
        self.worker.shutdown()


@contextlib.contextmanager
def rig(**options):
    made = Rig(**options)
    try:
        yield made
    finally:
        made.close()
