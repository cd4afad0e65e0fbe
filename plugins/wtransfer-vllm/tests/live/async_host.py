"""A process with an ``AsyncLLM`` and a publisher beside it; says what it served before and after.

python async_host.py MODEL CHECKPOINT PROMPT
"""

import asyncio
import json
import sys

import wtransfer
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from wtransfer_vllm.clients import AsyncLLMClient


def publish(client, checkpoint):
    """Run beside the event loop, as a trainer's thread does."""
    with wtransfer.Publisher(load_file(checkpoint), hosts=[client], deadline_s=10) as publisher:
        return [worker.outcome for worker in publisher.publish("b").workers]


async def tokens(engine, prompt, name):
    greedy = SamplingParams(temperature=0, max_tokens=16)
    async for output in engine.generate(prompt, greedy, name):
        found = output
    return list(found.outputs[0].token_ids)


async def main(model, checkpoint, prompt):
    options = AsyncEngineArgs(
        model=model,
        dtype="bfloat16",
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        weight_transfer_config=WeightTransferConfig(backend="shm"),
    )
    engine = AsyncLLM.from_engine_args(options)
    client = AsyncLLMClient(engine, asyncio.get_running_loop())
    try:
        return {
            "before": await tokens(engine, prompt, "before"),
            "outcomes": await asyncio.to_thread(publish, client, checkpoint),
            "after": await tokens(engine, prompt, "after"),
            "label": await engine.get_weight_version(),
        }
    finally:
        engine.shutdown()


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main(*sys.argv[1:]))) + "\n")
