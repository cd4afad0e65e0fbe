"""``wtransfer plugins show`` beside a real vLLM: an argument to copy, which vLLM takes."""

import json
import shlex
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def show(name):
    command = [sys.executable, "-m", "wtransfer", "plugins", "show", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (card,) = json.loads(done.stdout)
    return card["hosts"]["vllm"]


@pytest.mark.parametrize(
    ("name", "in_vllm"),
    [
        ("OffloadingConnector", "wtransfer-OffloadingConnector"),
        pytest.param(
            "CPUOffloadingSpec",
            "wtransfer-CPUOffloadingSpec, which refuses: it runs under",
            marks=pytest.mark.nightly,
        ),
        pytest.param("shm", "shm", marks=pytest.mark.nightly),
    ],
)
def test_a_backend_has_its_name_and_an_argument_to_copy(name, in_vllm):
    told = show(name)
    assert told["name"].startswith(in_vllm)
    option, config = shlex.split(told["argument"])
    config = json.loads(config)
    if option == "--weight-transfer-config":
        assert config == {"backend": "shm"}
        return
    assert option == "--kv-transfer-config"
    assert config["kv_connector"] == "wtransfer-OffloadingConnector"
    assert config["kv_connector_extra_config"]["cpu_bytes_to_use"] > 0
