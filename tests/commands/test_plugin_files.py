"""An engine and a tier of one file each, without packaging, in every command that takes one."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("uvicorn")

from wtransfer.scaffold import shelf_tier, stream_engine

pytestmark = pytest.mark.slow  # each command imports torch anew
ENGINE = "./my_engine.py:StreamEngine"
WEIGHTS = {"weight": torch.arange(12.0)}


@pytest.fixture
def folder(tmp_path):
    """A folder of files as an author has them."""
    for module, name in ((stream_engine, "my_engine.py"), (shelf_tier, "my_tier.py")):
        (tmp_path / name).write_text(Path(module.__file__).read_text("utf-8"), "utf-8")
    for name, factor in (("old", 0), ("new", 1)):
        save_file({k: factor * v for k, v in WEIGHTS.items()}, tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.fixture
def start(folder):
    """Start a module of Python in the folder."""
    processes = []
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WTRANSFER_")}
    environ = {**clean, "WTRANSFER_TOKEN": secrets.token_hex(16)}

    def begin(*arguments):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return processes[-1]

    yield begin
    for each in processes:
        each.kill()
        each.communicate()


@pytest.fixture
def run(start):
    """Run one to its end; return its exit code and its output."""

    def call(*arguments):
        process = start(*arguments)
        out, _ = process.communicate(timeout=90)
        return process.returncode, out

    return call


def test_engine_of_a_file_is_pushed_to_a_worker_that_has_it_and_refused_by_one_without(start, run):
    def serve(*options):
        process = start("wtransfer", "worker", "--checkpoint", "old.safetensors", *options)
        line = process.stdout.readline()
        return line.split()[1]

    engine = ("--plugin", ENGINE, "--engine", "StreamEngine")
    code, out = run("wtransfer", "push", "new.safetensors", "--to", serve(*engine[:2]), *engine)
    assert (code, "committed" in out) == (0, True), out
    code, out = run("wtransfer", "push", "new.safetensors", "--to", serve(), *engine)
    assert code == 1, out
    assert "Invalid weight transfer backend: StreamEngine" in " ".join(out.split())
    assert "my_engine.py" in out
    assert "give this worker the same file, by --plugin" in " ".join(out.split())


def test_check_loads_the_class_of_a_file(run):
    kind = ("--kind", "engines", "--json")
    code, out = run("wtransfer", "plugins", "check", "--plugin", ENGINE, *kind)
    (card,) = json.loads(out)["plugins"]
    assert (code, card["usable"], card["distribution"]) == (0, True, "my_engine.py")


def test_check_asks_for_the_kind_of_the_class(run):
    code, out = run("wtransfer", "plugins", "check", "--plugin", ENGINE)
    assert code == 2
    assert "beside --kind" in out


def test_kit_of_a_tier_of_a_file_has_it_in_other_processes_too(run):
    kit = ("pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "wtransfer.testing")
    tier = ("--wtransfer-plugin", "./my_tier.py:ShelfTier", "--wtransfer-tier", "ShelfTier")
    options = ("--wtransfer-option", "folder={folder}", "-k", "each_others or replaces")
    code, out = run(*kit, *tier, *options)
    assert (code, "2 passed" in out) == (0, True), out


@pytest.mark.nightly  # two of them
def test_bench_measures_backends_of_files(run, folder):
    few = ("--nbytes", "1MiB", "--rounds", "1", "--quick")
    tier = ("--plugin", "./my_tier.py:ShelfTier", "--tier", "ShelfTier", "--blocks", "128KiB")
    where = ("--tier-option", f"folder={folder}", "--only", "tier-put-128KiB")
    code, out = run("wtransfer", "bench", "offload", *tier, *where, *few)
    assert (code, "into the tier 'ShelfTier'" in out) == (0, True), out
    engine = ("--plugin", ENGINE, "--engine", "StreamEngine", "--workers", "1", "--only", "adopt")
    code, out = run("wtransfer", "bench", "weights", *engine, *few)
    assert (code, "adopt: StreamEngine" in out) == (0, True), out
