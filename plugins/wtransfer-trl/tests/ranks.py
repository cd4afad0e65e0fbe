"""One rank of a trainer whose policy is sharded (FSDP2), and its generation by a server.

python ranks.py RANK STORE: tells the token that its part of the generation has. The first rank
has the server, which is restarted within the generation. Then tells whether a sharded policy of
experts passes in the form of its checkpoint.
"""

import sys
from types import SimpleNamespace

import torch.distributed
from stand_ins import Policy, Server, generate, generation_by
from tiny_models import of_experts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from wtransfer.weight_sync.trainer.source import as_source

import wtransfer_trl

NUM_RANKS = 2


def passes_as_its_checkpoint(generation):
    """Tell whether a policy of experts is announced, and then passes, as it would be saved."""
    wanted = dict(as_source(of_experts()).iter_full())
    generation.model = of_experts()
    for part in [*generation.model.model.layers, generation.model]:
        fully_shard(part, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    assert all(hasattr(each, "full_tensor") for each in generation.model.parameters())
    generation._weight_metadata = None
    announced = {name: each.shape for name, each in generation._iter_named_params()}
    generation._weight_metadata = announced
    sent = dict(generation._iter_named_params())
    return (
        announced == {name: each.shape for name, each in sent.items()}
        and sent.keys() == wanted.keys()
        and all(torch.equal(each, wanted[name]) for name, each in sent.items())
    )


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
    print(passes_as_its_checkpoint(generation))  # noqa: T201
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
