"""One rank of a small trainer, for `test_sharded.py`: all kinds of placements, in one process each.

The first prints the port of the store. Then each prints one line of JSON per round: what was
published, and whether the worker, which is the first's, has what the ranks hold together.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import wtransfer
from wtransfer.testing.contents import contents

PLACEMENTS = {
    "rows": (Shard(0), (8, 3)),
    "uneven": (Shard(0), (7, 3)),
    "one": (Shard(0), (1, 5)),
    "columns": (Shard(1), (4, 5)),
    "all": (Replicate(), (3, 2)),
    "scalar": (Replicate(), ()),
    "none": (Shard(0), (0, 4)),
}


def tensors(mesh):
    """Return tensors of all placements, and a plain one between them."""
    made = {}
    for name, (placement, shape) in PLACEMENTS.items():
        numel = torch.Size(shape).numel()
        whole = torch.arange(float(numel)).view(shape) + len(made)
        made[name] = distribute_tensor(whole.to(torch.bfloat16), mesh, [placement])
        made[f"plain.{name}"] = whole
    return made


class Distributed:
    """Tensors by name, which grow by one between two rounds."""

    arguments: ClassVar[dict[str, object]] = {}

    def __init__(self, mesh):
        self.published = self.tensors = tensors(mesh)

    def expected(self):
        whole = {}
        for name, tensor in self.tensors.items():
            gather = getattr(tensor, "full_tensor", None)
            whole[name] = gather() if gather else tensor.clone()
        return whole

    def advance(self):
        for tensor in self.tensors.values():
            tensor.add_(1)


class ByMetadata(Distributed):
    """The same through a source of the user's own: no DTensor is ever seen, only local parts."""

    class Source:
        def __init__(self, model):
            self._source = wtransfer.ShardedSource(model)

        @property
        def metadata(self):
            return self._source.metadata

        def iter_local(self):
            return self._source.iter_local()

        def iter_full(self):
            raise AssertionError("what has placements is gathered from its parts")

    def __init__(self, mesh):
        super().__init__(mesh)
        self.published = self.Source(self.tensors)


class Quantised(Distributed):
    """Tensors of which the worker's checkpoint has two as blocks of float8, one of them sharded."""

    def __init__(self, mesh):
        super().__init__(mesh)
        whole = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))
        self.tensors["a.weight"] = distribute_tensor(whole, mesh, [Shard(0)])
        self.tensors["b.weight"] = whole + 1
        self.folder = tempfile.TemporaryDirectory()
        base = Path(self.folder.name)
        self.arguments = {"base": base}
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        (base / "config.json").write_text(json.dumps({"quantization_config": fp8}))
        save_file(self.expected(), base / "model.safetensors")

    def expected(self):
        found = super().expected()
        for name in ("a.weight", "b.weight"):
            whole = found[name]
            blocks = torch.nn.functional.pad(whole, (0, 56, 0, 126)).view(2, 128, 2, 128)
            scale = blocks.abs().amax((1, 3)) / 448
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
            found[name] = (whole / spread).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = scale
        return found


KINDS = {"dtensors": Distributed, "metadata": ByMetadata, "quantised": Quantised}


def serve(target, publisher, stopped):
    with wtransfer.WorkerSession(target, join=publisher.address, token=publisher.token) as session:
        while not stopped.is_set():
            session.commit_pending(0.01)


def main(kind, engine, rank, num_ranks, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=not rank, wait_for_workers=False)
    if not rank:
        print(store.port, flush=True)  # noqa: T201 (the test reads it)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    model = KINDS[kind](init_device_mesh("cpu", (num_ranks,)))
    expected = model.expected()
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    stopped = threading.Event()
    if rank:
        publisher = wtransfer.TrainerRank(model.published, deadline_s=10)
    else:
        publisher = wtransfer.Publisher(
            model.published, engine=engine, deadline_s=10, **model.arguments
        )
        worker = threading.Thread(target=serve, args=(target, publisher, stopped))
        worker.start()
        publisher.wait_for_workers(1)
    for number in range(3):
        told = publisher.publish(f"v{number}")
        fingerprint = told if rank else told.fingerprint
        expected = model.expected()
        equal = {name: contents(target)[name] == contents(expected)[name] for name in expected}
        line = json.dumps({"fingerprint": fingerprint, "equal": equal})
        print(line, flush=True)  # noqa: T201 (the test reads it)
        model.advance()
    stopped.set()
    if not rank:
        worker.join()
    publisher.close()
    # The default group is the trainer's: it works on after its publisher is closed.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
