"""A connector from outside the repository serves by its name, or by its module's path alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def site(pip_install):
    """The folder into which pip has installed the connector."""
    return pip_install("third_party_connector")


@pytest.fixture
def python(site, run_beside):
    """Runs Python where the connector is installed; returns what it printed, as JSON."""

    def run(*arguments):
        done = run_beside(site, *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_it_is_listed_with_its_distribution(python):
    rows = python("-m", "wtransfer", "plugins", "list", "--json")["plugins"]
    (row,) = [row for row in rows if row["distribution"] == "acme-folder-connector"]
    assert (row["kind"], row["name"], row["status"]) == ("connectors", "acme-folder", "available")


@pytest.mark.parametrize("how", ["name", pytest.param("path", marks=pytest.mark.slow)])
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
