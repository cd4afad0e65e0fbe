"""A connector from outside the repository serves by its name, or by its module's path alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def site(pip_install):
    """The folder into which pip has installed the connector."""
    return pip_install("third_party_connector")


@pytest.fixture
def python(site, tmp_path):
    """Runs Python where the connector is installed; returns what it printed, as JSON."""

    def run(*arguments):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("WTRANSFER_")}
        path = os.pathsep.join(filter(None, [str(site), clean.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**clean, "PYTHONPATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_it_is_listed_with_its_distribution(python):
    rows = python("-m", "wtransfer", "plugins", "list", "--json")["plugins"]
    (row,) = [row for row in rows if row["distribution"] == "acme-folder-connector"]
    assert (row["kind"], row["name"], row["status"]) == ("connectors", "acme-folder", "available")


@pytest.mark.parametrize("how", ["name", "path"])
def test_it_serves_loads_what_it_kept_and_forgets_when_the_weights_change(python, tmp_path, how):
    folder = tmp_path / "kept"
    folder.mkdir()
    assert python(HERE / "third_party_connector_peer.py", folder, how) == {
        "computed": True,
        "loaded": True,
        "tokens loaded": 64,
        "with other weights": True,
        "tokens loaded then": 0,
    }
