"""A process with a vLLM engine in it, told what to do by lines of JSON.

python host.py NAME_OF_ABSTRACT_SOCKET '{"model": ..., ...options of LLM...}'
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
import traceback
import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from wtransfer.weights import process_weights

from wtransfer_vllm.clients import LLMClient
from wtransfer_vllm.seed_adapter import SeedAdapter
from wtransfer_vllm.vouching import vouch_for_checkpoint, weights_were_replaced

DEFAULTS = {
    "worker_extension_cls": "breaking.Breaking",
    "dtype": "bfloat16",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
}


class Host:
    """Each public method is a command."""

    def __init__(self, options):
        self.llm = LLM(**(DEFAULTS | options))
        self.client = LLMClient(self.llm)
        self.running = {}
        self.gaps = []

    def generate(self, prompts, max_tokens=16):
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
        done = self.llm.generate(prompts, greedy, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    def begin(self, name, prompt, max_tokens):
        """Begin a request that goes on by `step` only."""
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.llm.llm_engine.add_request(name, prompt, greedy)
        self.running[name] = []

    def step(self, count):
        """Take steps; return the tokens of every request that was begun, and the longest gap."""
        longest = 0.0
        for _ in range(count):
            if not self.llm.llm_engine.has_unfinished_requests():
                break
            begun = time.perf_counter()
            for output in self.llm.llm_engine.step():
                self.running[output.request_id] = list(output.outputs[0].token_ids)
            longest = max(longest, time.perf_counter() - begun)
        return {"tokens": self.running, "longest_s": longest}

    def init(self, init_info):
        self.client.init_weight_transfer_engine(init_info)

    def start(self):
        self.client.start_weight_update()

    def update(self, update_info):
        self.llm.update_weights({"update_info": update_info})

    def finish(self, label=None):
        begun = time.perf_counter()
        self.client.finish_weight_update(label)
        return time.perf_counter() - begun

    def shutdown_engine(self):
        self.client.leave("of any publisher")

    def rpc(self, method, *args):
        self.llm.collective_rpc(method, args=args)

    def sleep(self, level):
        self.llm.sleep(level)

    def wake_up(self, tags=None):
        return self.llm.wake_up(tags)

    def label(self):
        return self.llm.get_weight_version()

    # -- in one process only

    def session(self):
        session = self._member().session
        return {"state": session.state, "version": session.version, "name": session.name}

    def seed_join(self, init_info):
        """Join as a worker of vLLM 0.17 does, whose engine is made without a model."""
        config = types.SimpleNamespace(backend="shm")
        place = types.SimpleNamespace(rank=0, world_size=1, data_parallel_index=0)
        self.seed = SeedAdapter(config, place)
        self.seed.init_transfer_engine(self.seed.parse_init_info(init_info))

    def seed_update(self, update_info):
        """Update weights as the worker of vLLM 0.17 does, line by line."""
        worker = self._worker()
        model = worker.model_runner.model
        info = self.seed.parse_update_info(update_info)
        assert info.is_checkpoint_format
        with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
            initialize_layerwise_reload(model)
            self.seed.receive_weights(info, load_weights=model.load_weights)
            finalize_layerwise_reload(model, worker.model_config)
        self.llm.reset_prefix_cache()
        return dataclasses.asdict(self.seed.member.outcome)

    def vouch(self):
        vouch_for_checkpoint(self._worker().vllm_config)

    def weights_replaced(self):
        weights_were_replaced(self._worker(), "said by a test")

    def kv_name(self):
        """Return what names KV cache at this moment; None if nothing does."""
        stamp = process_weights.stamp()
        return stamp and stamp.fingerprint

    def _member(self):
        return self._worker().weight_transfer_engine.member

    def _worker(self):
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker


def main():
    place, options = sys.argv[1:]
    line = socket.socket(socket.AF_UNIX)
    line.connect(f"\0{place}")
    with line, line.makefile("rw") as stream:
        host = Host(json.loads(options))
        print(json.dumps({"result": os.getpid()}), file=stream, flush=True)
        for order in stream:
            name, arguments = json.loads(order)
            try:
                answer = {"result": getattr(host, name)(*arguments)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=stream, flush=True)


if __name__ == "__main__":
    main()
