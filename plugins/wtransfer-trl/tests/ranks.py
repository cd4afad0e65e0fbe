"""One rank of a trainer whose policy is sharded (FSDP2), and its generation by a server.

python ranks.py RANK STORE: tells the token that its part of the generation has. The first rank
has the server, which is restarted within the generation.
"""

import sys
from types import SimpleNamespace

import torch.distributed
from stand_ins import Policy, Server, generate, generation_by
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wtransfer_trl

NUM_RANKS = 2


def main(rank, store):
    rank = int(rank)
    torch.distributed.init_process_group("gloo", f"file://{store}", None, NUM_RANKS, rank)
    wtransfer_trl.install()
    model = Policy(7)
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    server = Server() if rank == 0 else None
    with generation_by(server, model) as generation:
        # As TRL finds where accelerate is configured so.
        generation._dist = SimpleNamespace(is_fsdp=True, fsdp_version=2)
        generation.sync_weights()
        if server is not None:
            server.before = iter([server.restart_in_request])
        token = generate(generation)
        print(token)  # noqa: T201  # its standard output is what the test reads
        if server is not None:
            print(server.answers)  # noqa: T201
            server.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
