"""A process with a vLLM engine in it, told what to do by lines of JSON.

python host.py NAME_OF_ABSTRACT_SOCKET '{"model": ..., ...options of LLM...}'
"""

from __future__ import annotations

import atexit
import collections
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
from vllm import LLM, PoolingParams, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from wtransfer.weight_version import process_weights

from wtransfer_vllm import in_flight
from wtransfer_vllm.clients import LLMClient
from wtransfer_vllm.engine import SeedEngine
from wtransfer_vllm.spans import spans
from wtransfer_vllm.vouching import vouch_for_checkpoint, weights_were_replaced

DEFAULTS = {
    "worker_extension_cls": "breaking.Breaking",
    "dtype": "bfloat16",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
}


class SeedEngineHere(SeedEngine):
    """The seed era's engine over the base class of today's vLLM, which asks for two calls more."""

    start_weight_update = finish_weight_update = None


def keep_async_scheduling():
    """Have vLLM's platform leave asynchronous scheduling on, which that of CPUs turns off."""
    adjust = current_platform.check_and_update_config

    def check_and_update_config(vllm_config):
        adjust(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    type(current_platform).check_and_update_config = staticmethod(check_and_update_config)


class Host:
    """Each public method is a command."""

    def __init__(self, options):
        if options.get("async_scheduling"):
            keep_async_scheduling()
        self.llm = LLM(**(DEFAULTS | options))
        self.client = LLMClient(self.llm)
        self.running = {}
        self.num_deferred = 0
        self.ended = {}
        self.spans = {}

    def generate(self, prompts, max_tokens=16, adapter=None):
        """Return the tokens of each; with `adapter`, fields of a ``LoRARequest``, through that."""
        greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
        lora = adapter and LoRARequest(**adapter)
        done = self.llm.generate(prompts, greedy, use_tqdm=False, lora_request=lora)
        return [list(each.outputs[0].token_ids) for each in done]

    def answer(self, prompts, max_tokens=16, transfers=None):
        """Generate; return what came of each prompt, with the five most probable tokens a step.

        Args:
            prompts: What to go on with.
            max_tokens: How far.
            transfers: ``kv_transfer_params`` of each, or None.
        """
        settings = [_greedy(max_tokens, each) for each in transfers or [None] * len(prompts)]
        done = self.llm.generate(prompts, settings, use_tqdm=False)
        return [_answer(each) for each in done]

    def tokens_of(self, prompt):
        """Return the tokens of a prompt."""
        return self.llm.get_tokenizer().encode(prompt)

    def counters(self):
        """Return every counter and gauge of vLLM's metrics, by name; of several labels the sum."""
        numbers = collections.Counter()
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                numbers[metric.name] += metric.value
        return numbers

    def forget_prefixes(self):
        """Empty vLLM's own prefix cache, so that a prefix can only come by the connector."""
        return self.llm.reset_prefix_cache()

    def kv_cache(self):
        """Return the shape of vLLM's KV cache: blocks, bytes, and the kind of each group."""
        config = self._core().scheduler.kv_cache_config
        kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
        return [config.num_blocks, config.kv_cache_tensors[0].size, kinds]

    def begin(self, name, prompt, max_tokens, transfer=None, adapter=None):
        """Begin a request that goes on by `step` only; `adapter` is as that of `generate`."""
        greedy = _greedy(max_tokens, transfer)
        greedy.ignore_eos = True
        lora = adapter and LoRARequest(**adapter)
        self.llm.llm_engine.add_request(name, prompt, greedy, lora_request=lora)
        self.running[name] = []

    def load_adapter(self, adapter):
        """Load an adapter, fields of a ``LoRARequest``."""
        return self.llm.llm_engine.add_lora(LoRARequest(**adapter))

    def remove_adapter(self, number):
        """Remove the adapter of a number."""
        return self.llm.llm_engine.remove_lora(number)

    def abort(self, name):
        """Abort a request that was begun."""
        self.llm.llm_engine.abort_request([name])

    def step(self, count):
        """Take steps; return the tokens of every request that was begun, and what else was seen."""
        longest = 0.0
        for _ in range(count):
            if not self.llm.llm_engine.has_unfinished_requests():
                break
            begun = time.perf_counter()
            for output in self.llm.llm_engine.step():
                self.running[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.ended[output.request_id] = output.outputs[0].finish_reason
                    self.spans[output.request_id] = spans(output.outputs[0].weight_versions)
            longest = max(longest, time.perf_counter() - begun)
        return {
            "tokens": self.running,
            "ended": self.ended,
            "spans": self.spans,
            "longest_s": longest,
            "num_deferred": self.num_deferred,
        }

    def ask(self, requests, task):
        """Ask each; return what `answers` returns once all have ended.

        Args:
            requests: As of `kinds.py`.
            task: Task of vLLM's pooling; None: tokens are made.
        """
        self.begin_asking(requests, task)
        return self.answers()

    def begin_asking(self, requests, task):
        """Begin requests that go on by `answers` only, or by as many steps as `take` takes."""
        self.asked = {}
        for number, request in enumerate(requests):
            params = PoolingParams(task=task) if task else _greedy(16)
            self.llm.llm_engine.add_request(f"asked {number}", prompt_of(request), params)
            self.asked[f"asked {number}"] = None

    def take(self, count):
        """Take steps; return which requests have ended."""
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self.asked[output.request_id] = _said(output)
        return [said is not None for said in self.asked.values()]

    def answers(self):
        """Let all end; return rows, or tokens with their probabilities, of each request."""
        while self.llm.llm_engine.has_unfinished_requests():
            self.take(1)
        return list(self.asked.values())

    def keep_in_flight(self, keeps):
        """Let requests that run at a commit keep their KV; in one process only."""
        os.environ[in_flight.VARIABLE] = "keep" if keeps else "recompute"

    def progress(self):
        """Return the tokens of each request whose KV is computed; in one process only."""
        requests = self._core().scheduler.requests.values()
        return {each.request_id: each.num_computed_tokens for each in requests}

    def score(self, prompts):
        """Return how much less likely than the likeliest each token but the first of each is."""
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self.llm.generate(asked, scored, use_tqdm=False)
        return [
            [
                max(each.logprob for each in step.values()) - step[token].logprob
                for token, step in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for prompt, output in zip(prompts, done, strict=True)
        ]

    def queue_batches(self, size):
        """Let so many batches be in flight, as under stages of a pipeline; 1: none, as before."""
        core = self._core()
        core.batch_queue_size = size
        core.batch_queue = collections.deque(maxlen=size) if size > 1 else None
        core.step_fn = core.step_with_batch_queue if size > 1 else core.step

    def preempt_in_flight(self):
        """Let vLLM preempt the request whose next token is in flight, as where no block is free."""
        scheduler = self._core().scheduler
        (request,) = scheduler.running
        while not request.num_in_flight_tokens:
            self.step(1)
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())

    def defer_loaded(self):
        """Let no request that has loaded its KV be scheduled, as where no block is free."""
        manager = self._core().scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        def allocate_slots(request, *args, **options):
            if request.status.name == "WAITING" and request.num_computed_tokens:
                self.num_deferred += 1
                return None
            return allocate(request, *args, **options)

        manager.allocate_slots = allocate_slots

    def go_on(self):
        """End `defer_loaded`."""
        del self._core().scheduler.kv_cache_manager.allocate_slots

    # -- for the benchmark

    def time_first_token(self, prompt):
        """Return the seconds until a prompt's first token, which is its only one."""
        engine = self.llm.llm_engine
        begun = time.perf_counter()
        engine.add_request(f"timed {begun}", prompt, _greedy(1))
        while not engine.step():
            pass
        return time.perf_counter() - begun

    def time_steps(self, number, count, label):
        """Return the seconds of each of some steps in which so many requests decode."""
        engine = self.llm.llm_engine
        names = [f"{label} {each}" for each in range(number)]
        for name in names:
            engine.add_request(name, name, SamplingParams(max_tokens=2 * count, ignore_eos=True))
        for _ in range(4):
            engine.step()
        seconds = []
        for _ in range(count):
            begun = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begun)
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        return seconds

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
        status = self._member().session.status()
        return {"state": status.state, "version": status.version, "name": status.worker}

    def seed_join(self, init_info):
        """Join as a worker of vLLM 0.17 does, whose engine is made without a model."""
        config = types.SimpleNamespace(backend="shm")
        place = types.SimpleNamespace(rank=0, world_size=1, data_parallel_index=0)
        self.seed = SeedEngineHere(config, place)
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
        version = process_weights.version()
        return version and version.fingerprint

    def _member(self):
        return self._worker().weight_transfer_engine.member

    def _core(self):
        return self.llm.llm_engine.engine_core.engine_core

    def _worker(self):
        core = self._core()
        return core.model_executor.driver_worker.worker


def _greedy(max_tokens, transfer=None):
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=5, extra_args=extra)


def prompt_of(request):
    """Return what vLLM takes for a request of `kinds.py`."""
    ((kind, value),) = request.items()
    generator = torch.Generator().manual_seed(value if isinstance(value, int) else 0)
    if kind == "prompt":
        return {"prompt_token_ids": value}
    if kind == "embeds":
        return {"prompt_embeds": torch.randn(value, 128, generator=generator).bfloat16()}
    if kind == "sound":
        sound = torch.rand(16000, generator=generator).numpy()
        heard = {"prompt": "", "multi_modal_data": {"audio": (sound, 16000)}}
        return {"encoder_prompt": heard, "decoder_prompt": {"prompt_token_ids": [256, 5, 6]}}
    from PIL import Image

    pixels = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
    return {"prompt": "", "multi_modal_data": {"image": Image.fromarray(pixels.numpy())}}


def _said(output):
    is_rows = hasattr(output.outputs, "data")
    return output.outputs.data.tolist() if is_rows else _answer(output)


def _answer(output):
    (one,) = output.outputs
    likely = [{str(token): each.logprob for token, each in step.items()} for step in one.logprobs]
    return {
        "tokens": list(one.token_ids),
        "likely": likely,
        "ended": one.finish_reason,
        "transfer": output.kv_transfer_params,
    }


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
    # All that is to be done at an exit; what the interpreter does after it takes seconds.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
