"""A plug-in of SGLang for the tests: it sees what a commit meets, and injects faults there.

It is told what to do by files in the folder that ``WITNESS`` names:

=============  ====================================================================================
``hold``       JSON of ``running``, ``waiting`` and ``chunked``: once the scheduler has as many, it
               stands still between two steps until an update waits for its commit
``fail_at``    a number: each load fails at that tensor, but for the one after it, the way back
``stall_at``   a number: each load stands still at that tensor while there is this file
``spoil``      JSON of a `Fault`: each update by the engine ``spoilt-shm`` arrives with it
``rank``       a number: loads fail or stand still, and updates are spoilt, in that rank alone
``lossy``      a number: that rank loses its weights after each commit
``left_out``   a number: each load but the checkpoint's leaves that tensor out
``no_flush``   KV cache is never flushed, as where copies to a lower level are under way
``holding``    written: it stands still
``arrived``    written: a request has come since it stands still
``stalled``    written: a load stands still
``pid-N``      written: number of rank N's process
``paused``     written: one line of JSON for each pause, with what it has met
=============  ====================================================================================
"""

import json
import os
import time
from pathlib import Path

import torch
from wtransfer import WorkerSession

from wtransfer_sglang import bridge

FOLDER = Path(os.environ["WITNESS"])


def state(scheduler):
    running = {id(req) for req in scheduler.running_batch.reqs}
    if scheduler.last_batch is not None:
        running |= {id(req) for req in scheduler.last_batch.reqs}
    return {
        "running": len(running),
        "waiting": len(scheduler.waiting_queue),
        "chunked": int(scheduler.chunked_req is not None),
        "paused": int(scheduler._engine_paused),
    }


def is_met(scheduler):
    try:
        wanted = json.loads((FOLDER / "hold").read_text())
    except FileNotFoundError:
        return False
    now = state(scheduler)
    return all(now[key] >= value for key, value in wanted.items())


def hold(scheduler, *args, **kwargs):
    # One rank that stands still keeps the others in the next broadcast.
    if scheduler.ipc_channels.recv_from_tokenizer is None:
        return
    if not is_met(scheduler):
        return
    (FOLDER / "holding").touch()
    # The test may ask for more meanwhile: then the scheduler goes on until it has that.
    while is_met(scheduler):
        if scheduler.ipc_channels.recv_from_tokenizer.poll(0):
            (FOLDER / "arrived").touch()
        if bridge._bridge.session.status().pending:
            (FOLDER / "hold").unlink()
            return
        time.sleep(0.001)


def note(scheduler, *args, **kwargs):
    with (FOLDER / "paused").open("a") as file:
        file.write(json.dumps(state(scheduler)) + "\n")


def flush(call, *args, **kwargs):
    return False if (FOLDER / "no_flush").exists() else call(*args, **kwargs)


def rank():
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def note_process(*args, **kwargs):
    (FOLDER / f"pid-{rank()}").write_text(str(os.getpid()))


def is_at_fault():
    file = FOLDER / "rank"
    return not file.exists() or int(file.read_text()) == rank()


def commit(session, *args, **kwargs):
    done = WorkerSession.commit_pending(session, *args, **kwargs)
    if (file := FOLDER / "lossy").exists() and int(file.read_text()) == rank():
        session.weights_lost("the test says so")
        return False
    return done


way_back = []
"""Not empty: the load before has failed, and the next one is the way back."""


loads = []
"""Not empty: the checkpoint was loaded."""


def without_left_out(weights):
    file = FOLDER / "left_out"
    left_out = int(file.read_text()) if loads and file.exists() else None
    loads.append(True)
    return (item for number, item in enumerate(weights) if number != left_out)


def load(call, model, weights, device):
    weights = without_left_out(weights)
    file, fail_at = FOLDER / "fail_at", None
    if way_back:
        way_back.clear()
    elif file.exists() and is_at_fault():
        way_back.append(True)
        fail_at = int(file.read_text())

    def failing():
        for number, item in enumerate(weights):
            if number == fail_at:
                raise RuntimeError(f"the load fails at tensor {number}")
            stand_still(number)
            yield item

    return call(model, failing(), device)


def stand_still(number):
    file = FOLDER / "stall_at"
    if file.exists() and number == int(file.read_text()) and is_at_fault():
        (FOLDER / "stalled").touch()
        while file.exists():
            time.sleep(0.001)


def copy_pages(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Stands in for sgl_kernel's ``transfer_kv_direct``, which SGLang has for CUDA alone."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def allocate(dims, dtype, device, **_):
    """Stands in for SGLang's allocation of host memory, which it pins for CUDA."""
    return torch.empty(dims, dtype=dtype, device=device)


def unpin(_result, pool, *args, **kwargs):
    """Nothing can be pinned without a device."""
    pool.pin_memory = False


def register():
    from sglang.srt.mem_cache.pool_host import common, mha
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    bridge.RankSession.commit_pending = commit
    mha.transfer_kv_direct = copy_pages
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    loader = "sglang.srt.model_loader.loader.DefaultModelLoader"
    pool = "sglang.srt.mem_cache.pool_host.base.HostKVCache"
    HookRegistry.register(f"{pool}.__init__", unpin, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.__init__", note_process, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.ingest_requests", hold, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.pause_generation", note, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.flush_cache", flush, HookType.AROUND)
    HookRegistry.register(f"{loader}.load_weights_only", load, HookType.AROUND)
