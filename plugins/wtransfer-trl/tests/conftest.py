"""The tests need TRL beside a vLLM: `make_env.py` makes the environment."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import secrets
import sys
from pathlib import Path

import pytest

VLLM_TESTS = Path(__file__).parents[2] / "wtransfer-vllm" / "tests"
HERE = Path(__file__).parent
sys.path[:0] = map(str, (HERE, HERE / "live", VLLM_TESTS, VLLM_TESTS / "live"))

NEEDED = ("wtransfer_trl", "trl", "vllm", "peft", "datasets")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]


def pytest_configure(config):
    # TRL and vLLM warn of their own parts as they are imported.
    config.addinivalue_line("filterwarnings", "ignore:TRL currently supports vLLM:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:You are importing from .trl.experimental")
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
    config.addinivalue_line("markers", "live: needs vLLM")
    config.addinivalue_line("markers", "nightly: too long for the gate")


@pytest.fixture
def restored(monkeypatch):
    """Let `install` last for one test."""
    from trl.experimental.async_distillation import AsyncDistillationTrainer
    from trl.experimental.async_grpo import AsyncGRPOTrainer
    from trl.experimental.online_dpo import OnlineDPOTrainer
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    replaced = [(VLLMClient, name) for name, each in vars(VLLMClient).items() if callable(each)]
    replaced += [(vllm_generation, "LLM"), (vllm_generation, "VLLMClient")]
    replaced += [(VLLMGeneration, "sync_weights"), (VLLMGeneration, "generate")]
    replaced += [(VLLMGeneration, "_iter_named_params")]
    replaced += [(OnlineDPOTrainer, "_generate_vllm_server")]
    replaced += [(OnlineDPOTrainer, "_move_model_to_vllm")]
    replaced += [
        (AsyncGRPOTrainer, "_streaming_iter"),
        (AsyncDistillationTrainer, "_streaming_iter"),
    ]
    for owner, name in replaced:
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder with models A and B, of two seeds."""
    import tiny_models

    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("AB", start=1):
        tiny_models.make(folder / name, seed)
    return folder


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """A model of experts, which transformers holds in one tensor for a layer."""
    import tiny_models

    return tiny_models.make_twin(tmp_path_factory.mktemp("experts"), tiny_models.EXPERTS, 1)


@pytest.fixture(scope="session")
def guide():
    """The package's README."""
    return (Path(__file__).parents[1] / "README.md").read_text("utf-8")


@pytest.fixture(scope="session")
def script(guide):
    """The script of the guide."""
    (code,) = re.findall(r"```python\n(# train\.py\n.*?)```", guide, re.DOTALL)
    return code


@pytest.fixture(scope="session")
def saving(script):
    """The script of the guide, which publishes what it has trained and saves it."""
    return f"""{script}
trainer.vllm_generation.sync_weights()
trainer.save_model("saved")
"""


@pytest.fixture(scope="session")
def token():
    """Environment that server and trainer share."""
    return {"WTRANSFER_TOKEN": secrets.token_hex(32)}


@pytest.fixture(scope="session")
def server_words(guide, models):
    """The command of the guide that starts a server, of model A."""
    (words,) = re.findall(r"```sh\n(VLLM_SERVER_DEV_MODE.*?)\n```", guide, re.DOTALL)
    return words.replace("MODEL ", f"{models / 'A'} ")


@pytest.fixture(scope="session")
def server(server_words, token, tmp_path_factory):
    """The server of the guide, word for word."""
    from server import ServerOfWords

    folder = tmp_path_factory.mktemp("server")
    with contextlib.closing(ServerOfWords(folder, server_words, token)) as server:
        yield server
