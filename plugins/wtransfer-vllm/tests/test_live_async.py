"""An ``AsyncLLM`` and a publisher in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import PROMPTS

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

HOST = Path(__file__).parent / "live" / "async_host.py"


def test_publisher_reaches_an_async_engine_and_a_session_goes_on_under_the_new_weights(
    models, fresh
):
    checkpoint = models / "B" / "model.safetensors"
    done = subprocess.run(
        [sys.executable, str(HOST), str(models / "A"), str(checkpoint), PROMPTS[0]],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = next(line for line in done.stdout.splitlines() if line.startswith('{"before"'))
    told = json.loads(said)
    answers = told.pop("answers")
    assert len(answers["session"]) == 9
    assert answers["session"] == answers["whole"]
    assert told == {
        "before": fresh["A"][0],
        "outcomes": ["committed"],
        "after": fresh["B"][0],
        "label": "b",
    }
