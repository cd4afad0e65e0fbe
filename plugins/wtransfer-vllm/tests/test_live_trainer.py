"""vLLM's trainer factory, by an engine's name: a live server generates with what was sent."""

import os
import subprocess
import sys
from contextlib import closing

import pytest
from engines import PROMPTS
from kv import install
from safetensors.torch import load_file
from server import Server
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from wtransfer_vllm import trainer

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Environment in which an engine of ``plugins new`` is installed."""
    folder = tmp_path_factory.mktemp("new")
    new = ["plugins", "new", "engine", "acme-engine", "--folder", str(folder / "engine")]
    subprocess.run([sys.executable, "-m", "wtransfer", *new], check=True, timeout=60)
    return install([str(folder / "engine")], folder / "site")


@pytest.mark.parametrize(
    "backend",
    [
        "shm",
        pytest.param("file", marks=pytest.mark.nightly),
        pytest.param("gloo", marks=pytest.mark.nightly),
    ],
)
def test_tokens_are_those_of_what_was_sent(backend, models, fresh, tmp_path):
    from transformers import AutoModelForCausalLM

    options = {"path": str(tmp_path / "versions")} if backend == "file" else {}
    policy = AutoModelForCausalLM.from_pretrained(models / "A", dtype="bfloat16")
    with closing(Server(tmp_path, models / "A", backend)) as server:
        engine = WeightTransferTrainerFactory.trainer_init(
            trainer.init_info(backend, rank=0, options=options),
            client=HTTPVLLMWeightSyncClient(server.url),
            source=ModuleSource(policy),
        )
        try:
            for number, name in enumerate("BAB"):
                policy.load_state_dict(load_file(models / name / "model.safetensors"))
                engine.send_weights(weight_version=f"{name}-{number}")
                assert server.tokens(PROMPTS) == fresh[name]
                assert server.label() == f"{name}-{number}"
        finally:
            engine.shutdown()


TRAINER = """
import sys
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from wtransfer_vllm.trainer import init_info

model, url = sys.argv[1:]
policy = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16")
engine = WeightTransferTrainerFactory.trainer_init(
    init_info("acme-engine", rank=0),
    client=HTTPVLLMWeightSyncClient(url),
    source=ModuleSource(policy),
)
for line in sys.stdin:
    policy.load_state_dict(load_file(line.strip()))
    print(engine.send_weights().version, flush=True)
engine.shutdown()
"""


@pytest.mark.nightly
def test_engine_of_a_third_party_is_a_trainer_by_its_name(package, models, fresh, tmp_path):
    environ = {**os.environ, **package, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with closing(Server(tmp_path, models / "A", "acme-engine", package)) as server:
        command = [sys.executable, "-c", TRAINER, str(models / "A"), server.url]
        with subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                for number, name in enumerate("BAB", start=1):
                    process.stdin.write(f"{models / name / 'model.safetensors'}\n")
                    process.stdin.flush()
                    assert f"round-{number}\n" in iter(process.stdout.readline, "")
                    assert server.tokens(PROMPTS) == fresh[name]
                process.stdin.close()
                assert process.wait(60) == 0
            finally:
                process.kill()
