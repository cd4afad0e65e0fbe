"""A tier from outside the repository, of 22 lines, works by its name in both KV rooms."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def site(pip_install):
    """The folder into which pip has installed the tier."""
    return pip_install("third_party_tier")


@pytest.fixture
def python(site, run_beside):
    """Runs Python where the tier is installed."""
    return functools.partial(run_beside, site)


def test_tier_is_listed_with_its_distribution_and_usable(python):
    rows = json.loads(python("-m", "wtransfer", "plugins", "list", "--json").stdout)["plugins"]
    (row,) = [row for row in rows if row["distribution"] == "acme-shelf-tier"]
    assert (row["kind"], row["name"], row["status"]) == ("specs", "acme-shelf", "found")
    (card,) = json.loads(
        python("-m", "wtransfer", "plugins", "show", "acme_shelf", "--json").stdout
    )
    assert (card["usable"], card["class"]) == (True, "acme_shelf_tier:ShelfTier")


def test_tier_has_22_lines_and_mentions_no_weights():
    text = (HERE / "third_party_tier/src/acme_shelf_tier/__init__.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) == 22
    assert "weight" not in text
    assert "fingerprint" not in text


def test_processes_share_it_by_its_name_through_either_connector(site, serve_beside, tmp_path):
    options = {"spec_name": "acme-shelf", "folder": str(tmp_path)}
    assert serve_beside(site, "OffloadingConnector", options, 3, "1") == [[True, 0]]
    found = serve_beside(site, "SharedStorageConnector", options, 3, "1", "2", "2")
    assert found == [[True, 64], [True, 0], [True, 64]]


@pytest.mark.slow
def test_tier_passes_its_kit(python):
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    done = python("-m", "pytest", *options, HERE / "third_party_tier_kit.py")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    # Its bytes have no bound, and it waits for its files.
    assert "2 NOT TESTED" in done.stdout
