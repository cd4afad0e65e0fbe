"""Drives the spec as a host does, fenced; prints what became of a block, in JSON.

Usage: third_party_spec_peer.py FOLDER
"""

import json
import sys

import torch

from wtransfer import (
    KVCacheConfig,
    KVTransferConfig,
    OffloadingConfig,
    OffloadingSpecFactory,
    ServingConfig,
)
from wtransfer.blocks import make_offload_key
from wtransfer.specs.fenced import FencedSpec
from wtransfer.specs.interface import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    ReqContext,
)
from wtransfer.weights import process_weights

options = {"spec_name": "acme-disk", "folder": sys.argv[1], "disk_bytes_to_use": 2**20}
seed_config = ServingConfig(kv_transfer_config=KVTransferConfig(kv_connector_extra_config=options))
seeds = OffloadingSpecFactory.create_spec(seed_config, KVCacheConfig(bytes_per_block=256))
spec = FencedSpec(
    OffloadingSpecFactory.create_spec(
        OffloadingConfig(extra_config=options, worker_kv_bytes_per_block=256)
    )
)
cache = torch.arange(8 * 256, dtype=torch.int64).to(torch.uint8).view(8, 256)
cache[1] = 77
caches = CanonicalKVCaches([CanonicalKVCacheTensor(cache, 256)], [[CanonicalKVCacheRef(0, 256)]])
manager, worker = spec.get_manager(), spec.get_worker(caches)
key = make_offload_key(b"block")
held = process_weights.hold("weights A")
found = {"same class": type(seeds) is type(spec.spec)}


def request(name):
    ctx = ReqContext(name)
    manager.weights_are([worker.stamp()])
    manager.on_new_request(ctx)
    return ctx


def ended(job):
    worker.wait({job})
    return {each.job_id: each.success for each in worker.get_finished()}[job]


ctx = request("one")
prepared = manager.prepare_store([key], ctx)
worker.submit_store(1, GPULoadStoreSpec([1]), prepared.store_spec)
manager.complete_store([key], ctx, ended(1))
found["kept"] = manager.lookup(key, ctx).name
where = manager.prepare_load([key], ctx)
worker.submit_load(2, where, GPULoadStoreSpec([3]))
found["loaded"] = ended(2) and bool((cache[3] == 77).all())
manager.complete_load([key], ctx)

held.settle("weights B")
found["under other weights"] = manager.lookup(key, request("two")).name
worker.submit_load(3, where, GPULoadStoreSpec([4]))
found["old load"] = ended(3)
held.settle("weights A")
found["after the way back"] = manager.lookup(key, request("three")).name
found["the old request"] = manager.lookup(key, ctx).name
worker.shutdown()
manager.shutdown()
print(json.dumps(found))  # noqa: T201
