"""One rank of a sharded trainer in a process of its own: it publishes, or takes part."""

from __future__ import annotations

import os

import flow_stage
import torch
import torch.distributed as dist
from flow_trainer import TrainerPuppet
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from wtransfer.weight_sync.trainer import sharded
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.trainer.sharded import TrainerRank
from wtransfer.weight_sync.trainer.source import ModuleSource


def watch_gathers():
    """Let a pass have several buckets, and this process be held inside a gather, at its door."""
    sharded.BUCKET_NBYTES = 40_000  # two tensors of these tests
    gathered = sharded.gathered

    def gathered_when_let(meta, shard):
        flow_stage.witness.enter("between")
        if FaultySource.divergence == "inside a gather":
            raise torch.OutOfMemoryError("no memory for the whole tensor")
        return gathered(meta, shard)

    sharded.gathered = gathered_when_let


class FaultySource(ModuleSource):
    """A module's source that can be told to diverge, and shows where its passes are."""

    divergence = None

    def iter_local(self):
        for index, (name, tensor) in enumerate(super().iter_local()):
            if index == 2:
                flow_stage.witness.enter("midst")
            if index == 3 and self.divergence == "name":
                yield "layers.other", tensor
            elif index == 3 and self.divergence == "raises":
                raise OSError("the disk is gone")
            else:
                yield name, tensor


class RankPuppet(TrainerPuppet):
    """A rank; the first one publishes."""

    def __init__(
        self,
        address,
        witness_path,
        *,
        rank,
        num_ranks,
        num_tensors,
        numel,
        port=0,
        host=0,
        **options,
    ):
        flow_stage.Puppet.__init__(self, address, witness_path)
        flow_stage.register()
        watch_gathers()
        self.rank, self.num_ranks = rank, num_ranks
        self.store = dist.TCPStore(
            "127.0.0.1", port, is_master=rank == host, wait_for_workers=False
        )
        self.model = flow_stage.Weights(num_tensors, numel)
        self.options = options
        self.publisher = self.round = None

    # -- orders

    def port(self):
        return self.store.port

    def init(self):
        """Begin to train: what the user's program does, with the default group that is its own."""
        common = {"rank": self.rank, "world_size": self.num_ranks}
        dist.init_process_group("gloo", store=self.store, **common)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.num_ranks,)))
        self.source = FaultySource(self.model)
        if self.rank:
            self.publisher = TrainerRank(self.source, **self.options)
        else:
            engine = flow_stage.ENGINES[self.options.pop("engine", "gloo")]
            self.publisher = Publisher(self.source, engine=engine, **self.options)

    def take_part(self, number):
        """Publish on a rank that is not the first; return the fingerprint."""
        self.model.fill(number)
        return self.publisher.publish(f"v{number}")

    def diverge(self, how):
        FaultySource.divergence = how

    def distribute(self, number):
        """Have a tensor more or less: a model of another size on this rank."""
        self.publisher.close()
        other = flow_stage.Weights(number, 64)
        fully_shard(other, mesh=init_device_mesh("cpu", (self.num_ranks,)))
        self.publisher = TrainerRank(other, **self.options)

    def all_reduce(self):
        """Use the trainer's own group, which must be in step on all ranks."""
        found = torch.ones(1)
        dist.all_reduce(found)
        return float(found)

    def close(self):
        if self.publisher is not None:
            self.publisher.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def main(*args, **options):
    """Be a rank of a trainer."""
    os.environ.pop("WTRANSFER_TOKEN", None)
    RankPuppet(*args, **options).serve()
