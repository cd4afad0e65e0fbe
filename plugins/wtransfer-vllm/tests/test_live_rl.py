"""The loop of the guide: a trainer, a vLLM that generates, a reward, and weights between them."""

import os
import re
import secrets
import statistics
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from server import Server

# TRL's trainer, beside it, shows the same in each run.
pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]

GUIDE = Path(__file__).parents[1] / "README.md"
NUM_STEPS = 20


@pytest.fixture(scope="module")
def token():
    return {"WTRANSFER_TOKEN": secrets.token_hex(32)}


@pytest.fixture(scope="module")
def server(models, tmp_path_factory, token):
    """A server that rounds what a trainer has in float32."""
    env = {**token, "WTRANSFER_VLLM_CAST": "1"}
    with closing(Server(tmp_path_factory.mktemp("rl"), models / "A", "shm", env)) as made:
        yield made


def test_rewards_rise_by_what_the_trainer_publishes(server, models, tmp_path, token):
    (code,) = re.findall(r"```python\n(# rl\.py\n.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    script = tmp_path / "rl.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(models / "A"), server.url, str(NUM_STEPS)],
        env={**os.environ, **token, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"^(step-\d+) reward (\S+)$", done.stdout, re.MULTILINE)
    assert [label for label, _ in rows] == [f"step-{number}" for number in range(NUM_STEPS)]
    assert server.label() == f"step-{NUM_STEPS - 1}"
    rewards = [float(reward) for _, reward in rows]
    # They are of what vLLM has generated. Without `publish` they stay where they begin, below 0.2.
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:3]) + 0.2, rewards
