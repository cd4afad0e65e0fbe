"""``wtransfer seal``, as a user runs it."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.cli import main

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3), "c": torch.empty(0, 2)}


@pytest.fixture
def file(tmp_path):
    """The one file of a checkpoint."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def run(*arguments):
    return CliRunner().invoke(main, ["seal", *map(str, arguments)])


def test_check_accepts_a_checkpoint_as_it_was_sealed(file):
    done = run(file.parent, "--label", "step-7", "--json")
    document = json.loads(done.stdout)
    assert (
        done.exit_code,
        document["ok"],
        document["label"],
        document["num_tensors"],
    ) == (0, True, "step-7", 3)
    assert CheckpointSource(file.parent).manifest.fingerprint == document["fingerprint"]
    assert run(file.parent, "--check").exit_code == 0
    # A temporary file would be a leftover.
    assert {"model.safetensors", "wtransfer.json"} == {each.name for each in file.parent.iterdir()}


@pytest.mark.parametrize("label", ["", "v" * 257, "half of a pair \udcff"])
def test_label_that_no_version_can_have_is_refused(file, label):
    done = run(file.parent, "--label", label)
    assert (done.exit_code, "expected a label of 1 to 256" in done.stderr) == (2, True)
    assert [each.name for each in file.parent.iterdir()] == ["model.safetensors"]


def test_check_names_every_tensor_that_differs(file):
    assert run(file.parent).exit_code == 0
    save_file({**TENSORS, "a": TENSORS["a"] + 1, "b": TENSORS["b"] + 1}, file)
    done = run(file.parent, "--check", "--json")
    document = json.loads(done.stdout)
    assert (1, False, {"a", "b"}) == (
        done.exit_code,
        document["ok"],
        set(document["differences"]),
    )
    assert "'a' has other bytes" in run(file.parent, "--check").stdout


@pytest.mark.parametrize("arguments", [["--check"], ["--check", "--json"]])
def test_check_without_a_seal_fails(file, arguments):
    done = run(file.parent, *arguments)
    assert (done.exit_code, "wtransfer seal" in done.output) == (1, True)


def test_a_cut_checkpoint_is_not_sealed(file):
    file.write_bytes(file.read_bytes()[:-1])
    done = run(file.parent)
    assert (done.exit_code, "'a' ends at byte" in done.stderr) == (1, True)
    assert [each.name for each in file.parent.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["nowhere"], "does not exist"), ([".", "--check", "--label", "x"], "omit one of them")],
)
def test_usage_errors_end_with_code_2(arguments, text):
    done = run(*arguments)
    assert (done.exit_code, text in done.stderr) == (2, True)
