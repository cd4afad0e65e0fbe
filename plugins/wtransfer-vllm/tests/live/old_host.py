"""A publisher and an old vLLM's ``LLM`` in one process; says what came of each step.

python old_host.py serve MODEL          its tokens, without us
python old_host.py update MODEL A B     A, B: checkpoints of what MODEL is, and of others
"""

import json
import sys
import time

import old_kernels  # noqa: F401  # before vLLM
import torch
import vllm
import wtransfer
from engines import PROMPTS, await_commit, report_of
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins

from wtransfer_vllm.clients import LLMClient

OPTIONS = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
    "compilation_config": {"custom_ops": ["none"]},
    "worker_extension_cls": "breaking.Breaking",
}
# vLLM looks at a model's class in a process of its own, which would not have the kernels.
registry._run_in_subprocess = lambda look: look()


def tokens(llm):
    greedy = SamplingParams(temperature=0, max_tokens=16)
    done = llm.generate(PROMPTS, greedy, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in done]


def serve(model):
    return {"version": vllm.__version__, "tokens": tokens(LLM(model, **OPTIONS))}


def refused(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def reach(llm, checkpoints):
    """Update by a publisher that calls the engine itself; return what came of each checkpoint."""
    held = load_file(checkpoints[0])
    steps = []
    client = LLMClient(llm)
    with wtransfer.Publisher(held, hosts=[client], deadline_s=20) as publisher:
        for checkpoint in checkpoints:
            held.update(load_file(checkpoint))
            worker = publisher.publish(checkpoint).workers[0]
            # The worker's receipt may come before the engine has answered the call.
            with client.lock:
                steps.append([worker.outcome, worker.digests_equal, tokens(llm)])
    return steps


class Rounds:
    """Updates whose calls are made here, on the thread that generates, also those that fail."""

    def __init__(self, llm, publisher, held):
        self.llm = llm
        self.publisher = publisher
        self.held = held
        where = {"address": publisher.address, "token": publisher.token}
        LLMClient(llm).init_weight_transfer_engine({"wtransfer": where})
        publisher.wait_for_workers(1, timeout_s=20)

    def commit(self):
        return refused(LLMClient(self.llm).finish_weight_update)

    def publish(self, checkpoint, version):
        self.held.update(load_file(checkpoint))
        round_ = self.publisher.publish(version, wait=False)
        await_commit(round_)
        error = self.commit()
        return [report_of(round_).workers[0].outcome, error, tokens(self.llm)]

    def fail(self, at, checkpoint):
        self.llm.collective_rpc("break_loader", args=(at,))
        failed = self.publish(checkpoint, f"broken-{at}")
        limit = time.monotonic() + 20
        # Behind, until the publisher has brought the same version again.
        while self.commit() is not None:
            assert time.monotonic() < limit
        return [failed, tokens(self.llm)]


def update(model, a, b):
    load_general_plugins()
    llm = LLM(model, weight_transfer_config={"backend": "shm"}, **OPTIONS)
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    # As the worker for GPUs notes when it starts. The one for CPUs does not, and so would raise in
    # every update, whichever engine it has.
    worker.device = torch.device("cpu")
    held = load_file(b)
    said = {
        "engine": type(worker.weight_transfer_engine).__name__,
        "names": list(WeightTransferEngineFactory._registry),
        "unknown": refused(WeightTransferConfig, backend="none"),
        "before": tokens(llm),
        "uninvited": refused(LLMClient(llm).finish_weight_update),
        "updates": reach(llm, [b, a]),
    }
    with wtransfer.Publisher(held, deadline_s=20) as publisher:
        rounds = Rounds(llm, publisher, held)
        return said | {
            "unasked": rounds.commit(),
            "foreign": refused(llm.update_weights, {"update_info": {"names": ["x"]}}),
            "still": tokens(llm),
            "failures": [
                [*rounds.fail(at, b), rounds.publish(a, f"mended-{at}")]
                for at in range(0, len(held), 5)
            ],
            "reads_prefix_cache": core.scheduler.kv_cache_manager.enable_caching,
        }


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    sys.stdout.write("\n" + json.dumps({"serve": serve, "update": update}[what](*arguments)) + "\n")
