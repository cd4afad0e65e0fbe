"""Stand-ins of what needs GPUs in verl: a trainer's worker, a server adapter, a replica."""

import asyncio
import os
import signal
from types import SimpleNamespace

import torch
import torch.distributed
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs

NUM_TENSORS = 40
FAILS_AT = 20
GROUP_TIMEOUT_S = 60


def weights_of(step):
    """Yield the policy after a step."""
    generator = torch.Generator().manual_seed(step)
    for number in range(NUM_TENSORS):
        tensor = torch.randn(64, 2 + number, generator=generator)
        yield f"model.layers.{number}.weight", tensor.bfloat16() if number % 2 else tensor


class TrainerWorker(Worker):
    """Trainer rank in the place of verl's ActorRolloutRefWorker: each holds rows of each tensor.

    It calls the checkpoint engine as verl's does; its generator gathers by a real process group.
    """

    def __init__(self, config):
        super().__init__()
        torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )
        self.fails = False
        self.kills = None
        self.num_gathered = 0

    def get_per_tensor_param(self, step):
        for number, (name, whole) in enumerate(weights_of(step)):
            if number == FAILS_AT and self.fails:
                raise RuntimeError(f"the trainer failed at {name}")
            if number == FAILS_AT and self.kills and self.rank == 0:
                os.kill(self.kills, signal.SIGKILL)
            parts = [torch.empty(32, whole.shape[1], dtype=whole.dtype) for _ in range(2)]
            torch.distributed.all_gather(parts, whole.chunk(2)[self.rank].contiguous())
            self.num_gathered += 1
            yield name, torch.cat(parts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        self.num_gathered = 0
        weights = self.get_per_tensor_param(global_steps)
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class HeldAdapter:
    """Server adapter in the place of vLLM's: a model in a dict, loaded tensor by tensor."""

    replica_rank = 0
    is_leader_rank = True

    def __init__(self):
        self.model = {}
        self.num_ordered = self.num_loaded = 0
        self.waits_s = 0

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors"):
        # vLLM's adapter has its engine wait for tensors from here on.
        self.num_ordered += 1
        async for name, tensor in weights:
            self.model[name] = tensor.clone()
            await asyncio.sleep(self.waits_s / NUM_TENSORS)
        self.num_loaded += 1


class FailingAdapter(HeldAdapter):
    """Has its serving engine fail in the midst of a set."""

    async def update_weights(self, weights, **_):
        self.num_ordered += 1
        async for name, tensor in weights:
            self.model[name] = tensor.clone()
            if len(self.model) == FAILS_AT:
                raise KeyError(f"this model has no {name}")


class Replica:
    """Replica in the place of verl's, whose servers need GPUs.

    As vLLM's it discards the weights with the cache; as SGLang's it restores no cache that it has,
    and releases none twice.
    """

    def __init__(self, replica_rank, workers, *, free_cache_engine=False, load_format="auto"):
        self.replica_rank = replica_rank
        self.workers = workers
        self.config = SimpleNamespace(free_cache_engine=free_cache_engine, load_format=load_format)
        self.generates = self.has_cache = True
        self.has_weights = load_format != "dummy"

    async def abort_all_requests(self, reject_request=False):
        self.generates = False

    async def release_kv_cache(self):
        if self.config.free_cache_engine:
            assert self.has_cache, "released twice"
            self.has_cache = self.has_weights = False

    async def resume_kv_cache(self):
        if self.config.free_cache_engine:
            assert not self.has_cache, "restored what was not released"
            self.has_cache = True

    async def resume_generation(self):
        self.generates = True
