"""One rank of a trainer whose module is sharded by FSDP2, which drives vLLM's trainer factory.

python fsdp_ranks.py RANK NUM_RANKS STORE URL    one line of JSON per round, by rank 0
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from wtransfer.errors import WTransferError
from wtransfer.weight_sync.http.client import HttpClient

from wtransfer_vllm.trainer import init_info


class Source(ModuleSource):
    """Announces, in one round, a shape that no worker has."""

    announces_another = False

    def metadata(self):
        found = super().metadata()
        if self.announces_another:
            found[-1] = type(found[-1])(found[-1].name, found[-1].dtype, (1, 1, 1))
        return found


def main(rank, num_ranks, store, url):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(num_ranks)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    fully_shard(model)
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info("shm", rank=int(rank), deadline_s=10),
        client=HttpClient(url),
        source=Source(model),
    )
    for label in ("v1", "refused", "v3"):
        with torch.no_grad():
            for each in model.parameters():
                each.add_(1)
        whole = {name: each.full_tensor() for name, each in model.named_parameters()}
        total = sum(float(each.sum()) for each in whole.values())
        engine.source.announces_another = label == "refused"
        try:
            report = engine.send_weights(label)
            outcome = None if report is None else report.outcome
        except WTransferError as error:
            outcome = type(error).__name__
        # Gathers of all ranks, after the round: none of them is in another.
        dist.barrier()
        sys.stdout.write(json.dumps({"outcome": outcome, "total": total}) + "\n")
    engine.shutdown()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
