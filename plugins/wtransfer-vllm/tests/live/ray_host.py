"""A publisher, and an ``LLM`` that is a Ray actor; says what came of each step.

python ray_host.py FOLDER MODEL CHECKPOINT PROMPT    FOLDER: Ray's, short, for sockets lie in it

`ray_apart.run` runs it.
"""

import json
import sys
import time

import ray
import ray_apart
import wtransfer
from safetensors.torch import load_file

from wtransfer_vllm.ray_client import RayClient

DEADLINE_S = 10.0
OPTIONS = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
}


def serving(model, **options):
    """Return an actor that is vLLM's ``LLM``, as users make one."""
    from vllm import LLM

    return ray.remote(LLM).remote(model, **OPTIONS, **options)


def tokens(actor, prompt):
    return ray.get(actor.__ray_call__.remote(_generate, prompt), timeout=120)


def _generate(llm, prompt):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=16)
    return list(llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids)


def failure(call):
    """Return what a call raised, and whether that was within its deadline."""
    begun = time.monotonic()
    try:
        call()
    except wtransfer.WTransferError as error:
        in_time = time.monotonic() - begun < DEADLINE_S + 8
        return {"type": type(error).__name__, "text": str(error), "in_time": in_time}
    return None


def update(actor, checkpoint, prompt):
    """Take the actor from A to B."""
    before = tokens(actor, prompt)
    client = RayClient(actor, timeout_s=60)
    with wtransfer.Publisher(load_file(checkpoint), hosts=[client], deadline_s=60) as publisher:
        outcomes = [worker.outcome for worker in publisher.publish("b").workers]
    label = ray.get(actor.get_weight_version.remote(), timeout=60)
    after = tokens(actor, prompt)
    return {"before": before, "outcomes": outcomes, "after": after, "label": label}


def refusals(actor):
    """Ask for what cannot be had."""
    client = RayClient(actor, timeout_s=60)
    foreign = failure(lambda: client.init_weight_transfer_engine({"master_port": 1}))
    busy = actor.__ray_call__.remote(lambda _: time.sleep(3))
    late = failure(RayClient(actor, timeout_s=0.5).start_weight_update)
    ray.get(busy, timeout=60)
    # What was asked too late is done all the same; nothing was ordered, so nothing comes of it.
    ended = failure(client.finish_weight_update)
    return {"foreign": foreign, "late": late, "ended": ended, "is_local": client.is_local}


def killed(actor, checkpoint):
    """Let the actor die in a publisher's hands, and come to one dead."""
    client = RayClient(actor, timeout_s=DEADLINE_S)
    held = load_file(checkpoint)
    with wtransfer.Publisher(held, hosts=[client], deadline_s=DEADLINE_S) as publisher:
        ray.kill(actor)
        published = failure(lambda: publisher.publish("c"))
    fresh_client = RayClient(actor, timeout_s=DEADLINE_S)
    joined = failure(lambda: wtransfer.Publisher(held, hosts=[fresh_client]))
    return {"published": published, "joined": joined, "name": client.name}


def main(folder, model, checkpoint, prompt):
    with ray_apart.started(folder, num_cpus=2):
        actor = serving(model, weight_transfer_config={"backend": "shm"})
        return {
            "update": update(actor, checkpoint, prompt),
            "refusals": refusals(actor),
            "killed": killed(actor, checkpoint),
        }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(*sys.argv[1:])) + "\n")
