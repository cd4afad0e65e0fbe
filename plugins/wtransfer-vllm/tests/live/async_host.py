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
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
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


async def session(engine, between):
    """Return the answers to two inputs of one session, and to the whole as one prompt.

    Args:
        engine: The engine.
        between: Awaited between the two inputs.
    """
    options = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
    delta = SamplingParams(**options, output_kind=RequestOutputKind.DELTA)
    first, second = ([3 + step * each % 200 for each in range(60)] for step in (7, 11))
    heard, is_answered = [], asyncio.Event()

    async def inputs():
        yield StreamingInput(prompt={"prompt_token_ids": [*first]}, sampling_params=delta)
        await is_answered.wait()
        # vLLM's session waits for its next input once its scheduler has seen the last token.
        await tokens(engine, "another one", f"another of {id(heard)}")
        await between()
        yield StreamingInput(prompt={"prompt_token_ids": [*second]}, sampling_params=delta)

    async for output in engine.generate(inputs(), delta, f"session {id(heard)}"):
        heard += [token for each in output.outputs for token in each.token_ids]
        if len(heard) >= options["max_tokens"]:
            is_answered.set()
    # vLLM drops the last token of an answer.
    whole = {"prompt_token_ids": [*first, *heard[:8], *second]}
    async for output in engine.generate(whole, SamplingParams(**options), f"whole {id(heard)}"):
        found = output
    return {"session": heard[9:], "whole": list(found.outputs[0].token_ids)}


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
        said = {"before": await tokens(engine, prompt, "before")}

        async def update():
            said["outcomes"] = await asyncio.to_thread(publish, client, checkpoint)

        answers = await asyncio.wait_for(session(engine, update), 120)
        return {
            **said,
            "after": await tokens(engine, prompt, "after"),
            "label": await engine.get_weight_version(),
            "answers": answers,
        }
    finally:
        engine.shutdown()


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main(*sys.argv[1:]))) + "\n")
