"""The plug-in is tested where it is installed."""

import importlib.util
import json
import subprocess
import sys

import pytest
from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.engines.factory import WeightTransferEngineFactory

if importlib.util.find_spec("wtransfer_nccl") is None:
    pytest.skip(
        "wtransfer-nccl is not installed: pip install ./plugins/wtransfer-nccl",
        allow_module_level=True,
    )


def test_engine_is_listed_from_its_distribution_without_being_imported():
    script = (
        "import sys, json\n"
        "from wtransfer.cli import main\n"
        "try:\n"
        "    main(['plugins', 'list', '--json'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print()\n"
        "print(json.dumps(sorted({'torch', 'wtransfer_nccl'} & set(sys.modules))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    listed, _, imported = done.stdout.strip().rpartition("\n")
    (row,) = [row for row in _rows(json.loads(listed)) if row["name"] == "nccl"]
    assert (row["kind"], row["distribution"]) == ("engines", "wtransfer-nccl")
    assert json.loads(imported) == []


def test_the_default_backend_is_this_engine():
    engine = WeightTransferEngineFactory.create_engine(WeightTransferConfig(), ParallelConfig())
    assert type(engine).__name__ == "NCCLWeightTransferEngine"
    assert type(engine).__module__ == "wtransfer_nccl.engine"
    engine.shutdown()


def _rows(document):
    """Return the rows, whatever they are wrapped in."""
    return document if isinstance(document, list) else next(iter(document.values()))
