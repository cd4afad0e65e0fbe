"""One thread publishes and generates in turn, with an engine in its own process.

python alternating.py MODELS '{"engine": "LLM" or "AsyncLLM", "rounds": 20, "slow_s": 0, ...}'
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import wtransfer
from engines import PROMPTS
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from wtransfer_vllm import engine_core
from wtransfer_vllm.clients import AsyncLLMClient, LLMClient

OPTIONS = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "weight_transfer_config": {"backend": "shm"},
}
GREEDY = SamplingParams(temperature=0, max_tokens=16)


class Sync:
    """An ``LLM``, and calls that block."""

    def __init__(self, options):
        self.llm = LLM(**options)
        self.client = LLMClient(self.llm)

    async def publish(self, publisher, version):
        return publisher.publish(version)

    async def tokens(self):
        done = self.llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    def close(self):
        """Do nothing: it ends with its process."""


class Async:
    """An ``AsyncLLM``, and calls that do not block its loop."""

    def __init__(self, options):
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
        self.client = AsyncLLMClient(self.llm, asyncio.get_running_loop())
        self.num_asked = 0

    async def publish(self, publisher, version):
        return await publisher.publish_async(version)

    async def tokens(self):
        return [await self.ask(prompt) for prompt in PROMPTS]

    async def ask(self, prompt):
        self.num_asked += 1
        async for output in self.llm.generate(prompt, GREEDY, str(self.num_asked)):
            found = output
        return list(found.outputs[0].token_ids)

    def close(self):
        self.llm.shutdown()


def slow_down(seconds):
    """Let the engine core take its time between its workers' commit and what follows."""
    settle = engine_core.Watch._settle

    def slowly(self, **keywords):
        time.sleep(seconds)
        return settle(self, **keywords)

    engine_core.Watch._settle = slowly


async def main(folder, engine, rounds, slow_s, **options):
    """Return what followed each prompt, by the round's weights; differing answers are kept."""
    weights = {name: load_file(Path(folder, name, "model.safetensors")) for name in "AB"}
    host = {"LLM": Sync, "AsyncLLM": Async}[engine](OPTIONS | options | {"model": f"{folder}/A"})
    slow_down(slow_s)
    held = dict(weights["A"])
    seen = {"A": [], "B": []}
    with contextlib.closing(host):
        # Joining is a call of the publisher's own, which blocks.
        publisher = await asyncio.to_thread(
            wtransfer.Publisher, held, hosts=[host.client], deadline_s=30
        )
        try:
            for number in range(rounds):
                name = "BA"[number % 2]
                held.update(weights[name])
                report = await host.publish(publisher, f"{name}-{number}")
                report.raise_unless_ok()
                found = await host.tokens()
                if found not in seen[name]:
                    seen[name].append(found)
        finally:
            await asyncio.to_thread(publisher.close)
    return seen


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1], **json.loads(sys.argv[2])))
    sys.stdout.write("\n" + json.dumps(found) + "\n")
