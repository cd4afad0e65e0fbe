"""Drives the spec by OffloadingConnector; prints what became of a block, in JSON.

Usage: third_party_spec_peer.py FOLDER
"""

import json
import sys

import torch

from wtransfer import (
    KVCacheConfig,
    KVConnectorFactory,
    KVTransferConfig,
    OffloadingConfig,
    OffloadingSpecFactory,
    ServingConfig,
)
from wtransfer.config import ModelConfig
from wtransfer.connectors.interface import KVConnectorOutput, KVConnectorRole
from wtransfer.testing.mini_engine.contract import (
    CachedRequestData,
    KVCacheBlocks,
    NewRequestData,
    Request,
    SchedulerOutput,
    block_numbers,
)
from wtransfer.weight_version import process_weights

options = {"spec_name": "acme-disk", "folder": sys.argv[1], "disk_bytes_to_use": 2**20}
shape = KVCacheConfig(num_blocks=8, block_size=4, bytes_per_block=256)
config = ServingConfig(
    kv_transfer_config=KVTransferConfig(
        "OffloadingConnector",
        engine_id="e",
        kv_role="kv_both",
        kv_connector_extra_config=options,
    ),
    cache_config=shape,
    model_config=ModelConfig("model", "float32"),
)
made = [
    OffloadingSpecFactory.create_spec(config, shape),
    OffloadingSpecFactory.create_spec(
        OffloadingConfig(extra_config=options, worker_kv_bytes_per_block=256)
    ),
]
scheduler, worker = (KVConnectorFactory.create_connector(config, r, shape) for r in KVConnectorRole)
cache = torch.arange(8 * 256, dtype=torch.int64).to(torch.uint8).view(8, 256)
cache[1] = 77
worker.register_kv_caches({"layer": cache})
held = process_weights.hold("weights A")
found = {"same class": type(made[0]) is type(made[1])}


def ask(name):
    request = Request(name, [1, 2, 3, 4, 5], 1)
    return request, scheduler.get_num_new_matched_tokens(request, 0)[0]


def allocate(request, block, num_found=0):
    request.block_tables = [[block, 0]]
    blocks = KVCacheBlocks(([block, 0],))
    scheduler.update_state_after_alloc(request, blocks, num_found)


def plan(*new):
    output = SchedulerOutput(scheduled_cached_reqs=CachedRequestData())
    for each in new:
        data = NewRequestData(
            each.request_id, each.prompt_token_ids, block_numbers(each.block_tables), 0
        )
        output.scheduled_new_reqs.append(data)
        output.num_scheduled_tokens[each.request_id] = 5
    return scheduler.build_connector_meta(output)


def work(metadata):
    """Take steps until all jobs have ended; return blocks that could not be loaded."""
    failed = set()
    while True:
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        worker.get_finished(set())
        failed |= worker.get_block_ids_with_load_errors()
        report = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        if not scheduler.has_pending_push_work():
            return failed
        metadata = plan()


scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
work(plan())
one, _ = ask("one")
allocate(one, 1)
work(plan(one))
two, found["kept"] = ask("two")
allocate(two, 3, found["kept"])
found["loaded"] = work(plan()) == set() and bool((cache[3] == 77).all())

three, num_found = ask("three")
allocate(three, 4, num_found)
metadata = plan()
held.settle("weights B")
found["blocks of the old load that failed"] = sorted(work(metadata))
found["under other weights"] = ask("four")[1]
held.settle("weights A")
work(plan())
found["after the way back"] = ask("five")[1]
for side in (scheduler, worker):
    side.shutdown()
print(json.dumps(found))  # noqa: T201
