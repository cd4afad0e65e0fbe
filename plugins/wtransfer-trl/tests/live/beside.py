"""Run a script that trains, unchanged, with something happening beside it.

python beside.py '{"spoilt": 8, ...}' SCRIPT ARGUMENT...

on_error: argument of ``install``.
spoilt: number of an update of which one bit is another than its digest says.
broken: number of an update that the engine fails to load.
hold: number of a generation after which a line of standard input is waited for, and told.
hold_within: number of a generation before whose request a line of standard input is waited for;
    the label that the server has after each request is told.
lora: train an adapter, and tell after each update whether it was unmerged.
colocated: of a vLLM in the script's process tell what is called, keep the policy of each update,
    as the folder ``policy-NUMBER``, and after each generation what it answers to a test's prompts,
    as ``answers-NUMBER.json``.
    Where TRL lets it sleep, that goes as far as on a CPU: TRL's part, vLLM's scheduler and executor
    are real, and the memory is overwritten here.
"""

from __future__ import annotations

import copy
import functools
import json
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from peft import LoraConfig
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from wtransfer.engines.shm import ShmTrainerEngine
from wtransfer.weight_sync.http.client import HttpClient

import wtransfer_trl
from wtransfer_trl.policy_sync import PolicySync

sys.path.append(str(Path(__file__).parents[3] / "wtransfer-vllm" / "tests" / "live"))


class SpoilingSource:
    """A round's source, one bit of which flips in its memory once it is digested."""

    def __init__(self, source, number):
        self._source = source
        self._rounds_left = number

    def __getattr__(self, name):
        return getattr(self._source, name)

    def iter_buckets(self, nbytes, allocate):
        self._rounds_left -= 1
        place = None

        def noted(bucket):
            nonlocal place
            place = allocate(bucket)
            return place

        for number, bucket in enumerate(self._source.iter_buckets(nbytes, noted)):
            if (self._rounds_left, number) == (0, 0):
                place[0] ^= 1
            yield bucket


class Spoiling(ShmTrainerEngine):
    number = 0

    def __init__(self, init_info, *, client, source=None):
        super().__init__(init_info, client=client, source=SpoilingSource(source, self.number))


class Adapted(trl.GRPOTrainer):
    """A trainer of an adapter, which looks at its model before and after each update."""

    def __init__(self, *args, **more):
        super().__init__(*args, peft_config=LoraConfig(r=4, init_lora_weights=False), **more)
        update = PolicySync.update

        def checked(sync, metadata, tensors):
            # As it is after one merge and unmerge: no base weight is what it was before.
            expected = copy.deepcopy(self.model)
            expected.merge_adapter()
            expected.unmerge_adapter()
            expected = dict(expected.named_parameters())
            try:
                update(sync, metadata, tensors)
            finally:
                found = dict(self.model.named_parameters())
                say(
                    "unmerged",
                    found.keys() == expected.keys()
                    and all(torch.equal(each, expected[name]) for name, each in found.items()),
                )

        PolicySync.update = checked


def hold_after(number):
    """Wait after a generation, and tell when the update that follows begins."""
    generate, update = VLLMGeneration.generate, VLLMClient.update_named_params
    num_generated = 0

    def counting(generation, *args, **more):
        nonlocal num_generated
        answer = generate(generation, *args, **more)
        num_generated += 1
        if num_generated == number:
            say("generated", number)
            sys.stdin.readline()
        return answer

    def telling(client, *args):
        say("updating after", num_generated)
        update(client, *args)

    VLLMGeneration.generate, VLLMClient.update_named_params = counting, telling


def hold_within(number):
    """Wait before a generation's request, and tell after each which weights the server holds."""
    generate = VLLMClient.generate
    num_generated = 0

    def holding(client, *args, **more):
        nonlocal num_generated
        num_generated += 1
        if num_generated == number:
            say("generating", number)
            sys.stdin.readline()
        answer = generate(client, *args, **more)
        say("generated under", HttpClient(client.base_url).weight_info()["weight_version"])
        return answer

    VLLMClient.generate = holding


def colocate(asked):
    """Have TRL make an engine that tells what is done with it."""
    # They import vLLM, which a trainer with a server need not have.
    from breaking import Breaking
    from engines import PROMPTS
    from host import Host

    from wtransfer_trl import policy_llm

    class Told(policy_llm.PolicyLLM):
        def __init__(self, sync, *, enable_sleep_mode, **arguments):
            self.folder = arguments["model"]
            self.num_updates = self.num_generated = 0
            super().__init__(sync, **arguments)

        @property
        def worker(self):
            return self.llm_engine.model_executor.driver_worker.worker

        def update(self, metadata, tensors):
            self.num_updates += 1
            say("update")
            policy = {}

            def kept():
                # The policy before is loaded by now, where it was lost in sleep.
                if self.num_updates == asked.get("broken"):
                    Breaking.break_loader(self.worker, 7)
                for name, tensor in tensors:
                    policy[name] = tensor.bfloat16().clone()
                    yield name, tensor

            try:
                super().update(metadata, kept())
            finally:
                folder = Path(f"policy-{self.num_updates}")
                shutil.copytree(self.folder, folder)
                save_file(policy, folder / "model.safetensors", {"format": "pt"})

        def generate(self, *args, **more):
            done = super().generate(*args, **more)
            self.num_generated += 1
            say("generated under", self.get_weight_version())
            answers = Host.answer(SimpleNamespace(llm=super()), PROMPTS)
            Path(f"answers-{self.num_generated}.json").write_text(json.dumps(answers), "utf-8")
            return done

        def sleep(self, level):
            super().sleep(level)
            Breaking.let_memory_go(self.worker)
            say("asleep at level", level)

        def wake_up(self, tags):
            say("wake", *tags)
            return super().wake_up(tags)

    policy_llm.PolicyLLM = Told


def say(*what):
    print(*what, flush=True)  # noqa: T201  # its standard output is what tests read


def main(order, script, *arguments):
    asked = json.loads(order)
    more = {name: asked[name] for name in ("on_error",) if name in asked}
    if "spoilt" in asked:
        Spoiling.number = asked["spoilt"]
        more["trainer"] = Spoiling
    install = wtransfer_trl.install

    def installed(*args, **given):
        install(*args, **given, **more)
        if "hold" in asked:
            hold_after(asked["hold"])
        if "hold_within" in asked:
            hold_within(asked["hold_within"])

    wtransfer_trl.install = functools.wraps(install)(installed)
    if "colocated" in asked:
        colocate(asked)
    if asked.get("lora"):
        trl.GRPOTrainer = Adapted
    sys.argv[:] = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
