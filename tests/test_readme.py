"""The examples of the README and of the guides, executed as the processes that they show."""

from __future__ import annotations

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


def test_it_holds_exactly_two_set_up_commands():
    pip, plugins = "pip install torch==2.13.0", "./plugins/wtransfer-"
    assert [line for line in README.splitlines() if line.startswith(pip)] == [
        f"{pip} . && wtransfer demo",
        f'{pip} ".[test]" {plugins}nccl "{plugins}valkey[test]" && pytest -n 4 --dist loadfile',
    ]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_its_links_lead_to_files(guide):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", guide.read_text("utf-8"))
    assert [each for each in targets if not (guide.parent / each).exists()] == []
