"""A real vLLM of the seed era, from A to B and through failures, by its own worker's calls.

Runs in an environment of its own (`make_old_env.py`): vLLM as it was published, on kernels written
with torch (`live/old_kernels.py`), for its compiled part does not load beside a newer torch.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOST = Path(__file__).parent / "live" / "old_host.py"
VERSION = "0.17.1"
ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Binding threads to cores is done by the compiled part.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def found_version():
    try:
        return importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return None


pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        found_version() != VERSION,
        reason=f"needs vllm-cpu {VERSION}, has {found_version()}: tests/make_old_env.py OLD ENV",
    ),
]


def say(*arguments):
    done = subprocess.run(
        [sys.executable, HOST, *arguments],
        env={**os.environ, **ENV},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # What libraries say at exit may follow on the same line.
    said = next(line for line in done.stdout.splitlines() if line.startswith('{"'))
    return json.JSONDecoder().raw_decode(said)[0]


@pytest.fixture(scope="module")
def served(models):
    """Model's name -> the tokens of a fresh vLLM of that time, without us."""
    answers = {name: say("serve", models / name) for name in ("A", "B")}
    assert [answer["version"] for answer in answers.values()] == [VERSION, VERSION]
    assert answers["A"]["tokens"] != answers["B"]["tokens"]
    return {name: answer["tokens"] for name, answer in answers.items()}


@pytest.fixture(scope="module")
def run(models):
    checkpoints = [models / name / "model.safetensors" for name in ("A", "B")]
    return say("update", models / "A", *checkpoints)


@pytest.mark.covers("weights", release="0.17.1", how="live")
def test_its_own_factory_makes_our_engine_under_a_name_that_its_config_takes(run):
    assert run["engine"] == "SeedEngine"
    assert run["names"][:2] == ["nccl", "ipc"]
    assert {"file", "shm"} <= set(run["names"][2:])


def test_unknown_backend_is_still_refused_by_its_config(run):
    assert "Input should be 'nccl', 'ipc'," in run["unknown"]
    assert "input_value='none'" in run["unknown"]


def test_updates_by_its_one_call_give_the_tokens_of_a_fresh_engine(run, served):
    assert run["before"] == served["A"]
    assert run["updates"] == [
        ["committed", True, served["B"]],
        ["committed", True, served["A"]],
    ]


def test_a_call_without_a_round_of_ours_is_an_error_and_changes_nothing(run, served):
    assert "no publisher has asked this worker to join" in run["uninvited"]
    assert "no verified update was there to commit" in run["unasked"]
    assert "weights of another trainer" in run["foreign"]
    assert run["still"] == served["A"]


def test_wherever_its_loader_fails_the_old_version_is_back_and_the_next_update_works(run, served):
    assert len(run["failures"]) == 5
    for (outcome, error, tokens), caught_up, mended in run["failures"]:
        assert (outcome, tokens) == ("restored", served["A"])
        assert "RuntimeError: broken at " in error
        assert caught_up == served["B"]
        assert mended == ["committed", None, served["A"]]


def test_prefix_cache_of_the_old_engine_is_enabled(run):
    assert run["reads_prefix_cache"] is True
