"""An ``LLM`` that is a Ray actor, and a publisher that reaches it by its client."""

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from engines import PROMPTS

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(400)]

HOST = Path(__file__).parent / "live" / "ray_host.py"
MARK = "WTRANSFER_RAY_TEST"
# Ray's processes listen on every interface; so they get a network of their own with none.
APART = ["unshare", "--map-root-user", "--net"]
ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Otherwise Ray writes a token into the home folder, and reports how it is used.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A machine that others fill is no reason to end an actor.
    "RAY_memory_monitor_refresh_ms": "0",
}


def why_not():
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: tests/make_env.py ENV"
    tried = subprocess.run([*APART, "true"], capture_output=True, text=True, check=False)
    return tried.stderr if tried.returncode else ""


def processes(mark):
    """Return the processes that descend from the run with this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def await_none(mark):
    limit = time.monotonic() + 20
    while processes(mark) and time.monotonic() < limit:
        time.sleep(0.1)
    return processes(mark)


@pytest.fixture(scope="module")
def run(models):
    """Run all steps in one Ray; yield what they came to, and what was left of it."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    # Sockets lie in it, whose paths may have 107 bytes.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    checkpoint = models / "B" / "model.safetensors"
    env = ENV | {"RAY_AUTH_TOKEN": secrets.token_hex(32), MARK: mark}
    try:
        done = subprocess.run(
            [*APART, sys.executable, HOST, folder, models / "A", checkpoint, PROMPTS[0]],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )
        left = await_none(mark)
        assert done.returncode == 0, done.stderr[-4000:]
        said = json.loads(done.stdout.splitlines()[-1])
        yield {**said, "left": left}
    finally:
        for pid in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_publisher_takes_an_actor_from_one_version_to_the_next(run, fresh):
    assert run["update"] == {
        "before": fresh["A"][0],
        "outcomes": ["committed"],
        "after": fresh["B"][0],
        "label": "b",
    }


def test_exception_of_an_actor_reaches_the_publisher(run):
    said = run["refusals"]["foreign"]
    assert said["type"] == "RemoteError"
    assert "ValueError: init_info names no publisher of wtransfer" in said["text"]
    assert "no verified update was there to commit" in run["refusals"]["ended"]["text"]


def test_an_actor_that_is_busy_for_too_long_is_named_and_not_waited_for(run):
    said = run["refusals"]["late"]
    assert said["type"] == "StallError"
    assert "did not answer start_weight_update within 0.5 s" in said["text"]
    assert said["text"].startswith("Ray Actor(LLM, ")


def test_an_actor_knows_that_it_is_on_the_publishers_node(run):
    assert run["refusals"]["is_local"] is True


def test_an_actor_that_died_is_named_within_the_deadline(run):
    published, joined = run["killed"]["published"], run["killed"]["joined"]
    assert (published["in_time"], joined["in_time"]) == (True, True)
    assert joined["type"] == "PeerLostError"
    assert joined["text"].startswith(f"{run['killed']['name']} is gone: ActorDiedError: ")
    assert published["type"] in {"PeerLostError", "RoundAbortedError", "NoWorkersError"}


def test_ray_leaves_nothing_behind(run):
    assert run["left"] == []
