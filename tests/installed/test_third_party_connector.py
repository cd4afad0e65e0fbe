"""A connector from outside the repository serves by its name."""

from __future__ import annotations

import functools
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


def test_connector_is_listed_with_its_distribution(python):
    rows = python("-m", "wtransfer", "plugins", "list", "--json")["plugins"]
    (row,) = [row for row in rows if row["distribution"] == "acme-folder-connector"]
    assert (row["kind"], row["name"], row["status"]) == ("connectors", "acme-folder", "found")


@pytest.fixture
def serve(site, serve_beside, tmp_path):
    """Serves requests in a process of its own, all over one folder: (right, tokens loaded) each."""
    return functools.partial(serve_beside, site, "acme-folder", {"folder": str(tmp_path)})


def test_connector_mentions_no_weights():
    text = (HERE / "third_party_connector/src/acme_folder_connector/connector.py").read_text()
    assert "weight" not in text
    assert "fingerprint" not in text


# Promise 3, without a line of its own (FAULTS 50).
def test_processes_with_other_weights_never_load_each_others_blocks(serve):
    assert serve(3, "1") == [[True, 0]]
    # What the first has left is there, and so is soon what this one leaves; in both orders.
    assert serve(4, "1", "2") == [[True, 0], [True, 0]]
    assert serve(3, "2", "1") == [[True, 0], [True, 64]], "equal weights share"


# FAULTS 51.
def test_blocks_are_shared_under_one_salt_only(serve):
    answers = serve(3, "1:tenant", "1:other", "1", "1:tenant")
    assert answers == [[True, 0], [True, 0], [True, 0], [True, 64]]
