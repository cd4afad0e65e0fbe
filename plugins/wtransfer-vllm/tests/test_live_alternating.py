"""A program of one thread that publishes and generates, and holds no lock."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import python_path

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

PROGRAM = Path(__file__).parent / "live" / "alternating.py"
SHARED = "SharedStorageConnector"


def _nightly(*case):
    return pytest.param(*case, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("engine", "connector", "program"),
    [
        # A slow engine core shows in a few rounds what else shows in one of a hundred.
        ("LLM", SHARED, {"rounds": 10, "slow_s": 0.05}),
        _nightly("LLM", SHARED, {"rounds": 200, "slow_s": 0}),
        _nightly("LLM", None, {"rounds": 200, "slow_s": 0}),
        _nightly("AsyncLLM", SHARED, {"rounds": 200, "slow_s": 0}),
        _nightly("AsyncLLM", None, {"rounds": 200, "slow_s": 0}),
    ],
)
def test_every_token_after_publish_is_of_the_version_it_returned_for(
    models, fresh, engine, connector, program
):
    options = {"engine": engine} | program
    if connector is not None:
        options["kv_transfer_config"] = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "shared_storage_path": f"{models}/kv-{engine}-{program['rounds']}"
            },
        }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(models), json.dumps(options)],
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(engine == "AsyncLLM")),
        },
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {name: [fresh[name]] for name in "AB"}
