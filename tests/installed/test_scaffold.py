"""``wtransfer plugins new``: what it writes is installed, typed, tested, and found by its name."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys

import pytest

from wtransfer.scaffold import GROUPS

NAME = "acme-new"
SERVED = {
    "connector": (NAME, {"folder": ""}),
    "spec": ("OffloadingConnector", {"spec_name": NAME, "memory_bytes_to_use": 1 << 20}),
    "tier": ("OffloadingConnector", {"spec_name": NAME, "folder": ""}),
}
"""Kind -> connector and its options in the mini engine; a folder is given by the test."""


def kinds():
    """Every kind; those beside the smallest are slow."""
    marks = [() if kind == "tier" else pytest.mark.slow for kind in sorted(GROUPS)]
    return [pytest.param(kind, marks=m) for kind, m in zip(sorted(GROUPS), marks, strict=True)]


@pytest.fixture(scope="module", params=kinds())
def made(request, tmp_path_factory, pip_install):
    """A distribution of each kind as the command writes it, and where pip has installed it."""
    folder = tmp_path_factory.mktemp("new") / NAME
    command = ["wtransfer", "plugins", "new", request.param, NAME, "--folder", str(folder)]
    subprocess.run([sys.executable, "-m", *command], check=True, timeout=60)
    return request.param, folder, pip_install(folder)


@pytest.fixture
def python(made, run_beside):
    """Runs Python where it is installed."""
    return functools.partial(run_beside, made[2])


@pytest.fixture
def engine(made, python):
    """Runs Python where an engine is installed."""
    if made[0] != "engine":
        pytest.skip("no engine")
    return python


def test_scaffolded_plugin_is_found_by_its_name_and_usable(made, python):
    done = python("-m", "wtransfer", "plugins", "check", NAME, "--json")
    assert done.returncode == 0, done.stdout
    (card,) = json.loads(done.stdout)["plugins"]
    assert (card["distribution"], card["usable"]) == (NAME, True)


def test_tokens_are_served_through_it_by_its_name(made, serve_beside, tmp_path):
    kind, _, site = made
    if kind == "engine":
        pytest.skip("an engine moves weights: see below")
    connector, options = SERVED[kind]
    if "folder" in options:
        options = options | {"folder": str(tmp_path)}
    assert serve_beside(site, connector, options, 3, "1", "1") == [[True, 0], [True, 64]]


ROUND = f"""
import sys, torch, wtransfer
model = {{"weight": torch.arange(600.0)}}
publisher = wtransfer.Publisher(model, engine="{NAME}", deadline_s=20)
received = {{"weight": torch.zeros(600)}}
session = wtransfer.WorkerSession(received, join=publisher.address, token=publisher.token)
publisher.wait_for_workers(1, 20)
round_ = publisher.publish("v1", wait=False)
while not round_.done:
    session.commit_pending(0.05)
assert round_.result().ok
assert torch.equal(received["weight"], model["weight"])
session.close()
publisher.close()
"""


@pytest.mark.slow
def test_a_round_is_published_by_its_name(engine):
    done = engine("-W", "error", "-c", ROUND)
    assert done.returncode == 0, done.stderr


PUSH = f"""
import subprocess, sys, torch
from pathlib import Path
from safetensors.torch import save_file
for number, folder in enumerate(("base", "next")):
    Path(folder).mkdir()
    save_file({{"weight": torch.arange(600.0) + number}}, f"{{folder}}/model.safetensors")
command = [sys.executable, "-m", "wtransfer"]
address = "unix:" + str(Path("worker.sock").resolve())
serve = [*command, "worker", "--checkpoint", "base", "--listen", address]
worker = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
assert worker.stdout.readline().startswith("ready")
try:
    push = [*command, "push", "next", "--to", address, "--engine", "{NAME}", "--json"]
    sys.exit(subprocess.run(push, timeout=60).returncode)
finally:
    worker.terminate()
    worker.wait(20)
"""


@pytest.mark.slow
def test_a_checkpoint_is_pushed_by_its_name(engine):
    done = engine("-c", PUSH, WTRANSFER_TOKEN="of a test, longer than thirty-two letters")
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)["workers"]
    assert (told["outcome"], told["version"]) == ("committed", "next")


NOT_TESTED = {
    # It moves one group, the guide says how another moves several; its names are the framework's;
    # and a privileged user writes to a folder that is read-only.
    "connector": ("two KV cache groups", "blocks whose names collide", "a store that is read-only"),
    # Its files have no bound, and it waits for them.
    "tier": ("whether kept bytes are bounded", "what get() does once it has given up"),
}
"""Questions that the kit cannot ask of what is written, by kind."""


@pytest.mark.slow
def test_its_own_tests_pass(made, python):
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-c", made[1] / "pyproject.toml"]
    done = python("-m", "pytest", *options, made[1])
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    told = re.findall(r"NOT TESTED: (.*)", done.stdout)
    assert [each for each in told if not each.startswith(NOT_TESTED.get(made[0], ()))] == []


DROP = f"""
import subprocess, sys, torch, wtransfer
WORKER = '''
import os, sys, torch, wtransfer
address, moment = sys.argv[1:]
model = {{f"w{{n}}": torch.zeros(1 << 18) for n in range(8)}}
session = wtransfer.WorkerSession(model, join=address, name=moment)
calls = []
from acme_new import AcmeNew
receive = AcmeNew.receive_weights
def dying(self, update_info, load_weights):
    def load(pairs):
        calls.append(pairs)
        if moment == "midway" and len(calls) == 3:
            os._exit(9)
        load_weights(pairs)
    if moment == "first":
        os._exit(9)
    receive(self, update_info, load)
AcmeNew.receive_weights = dying
while not session.commit_pending(1.0):
    pass
sys.stdin.read()
'''
source = {{f"w{{n}}": torch.full((1 << 18,), float(n)) for n in range(8)}}
for moment in ("first", "midway"):
    with wtransfer.Publisher(source, engine="{NAME}", on_lost_worker="drop") as publisher:
        workers = [
            subprocess.Popen([sys.executable, "-c", WORKER, publisher.address, each], stdin=-1)
            for each in ("lives", moment)
        ]
        try:
            publisher.wait_for_workers(2, 60)
            report = publisher.publish("v1")
            found = {{each.worker: each.outcome for each in report.workers}}
            assert found == {{"lives": "committed", moment: "dropped"}}, found
        finally:
            for each in workers:
                each.kill()
                each.wait()
"""


@pytest.mark.slow
def test_worker_that_is_lost_is_left_out_where_the_publisher_says_so(engine):
    done = engine("-c", DROP, WTRANSFER_TOKEN="of a test, longer than thirty-two letters")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What mypy knows of torch and of wtransfer."""
    return tmp_path_factory.mktemp("mypy")


# A library without types, which is there wherever torch is.
CLIENT = """
import networkx


def has(graph: networkx.Graph, name: str) -> bool:
    return graph.has_node(name)
"""


@pytest.mark.slow
def test_scaffolded_plugin_passes_mypy_with_an_untyped_client(made, python, cache):
    pytest.importorskip("mypy", reason="pip install '.[lint]'")
    (made[1] / "src" / NAME.replace("-", "_") / "client.py").write_text(CLIENT)
    options = ["--config-file", "pyproject.toml", "--cache-dir", cache]
    done = python("-m", "mypy", *options, cwd=made[1])
    assert done.returncode == 0, done.stdout
