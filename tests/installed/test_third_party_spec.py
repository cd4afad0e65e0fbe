"""A spec from outside the repository works by its name, and gets the fence for nothing.

It keeps blocks in files and knows nothing of weights (`third_party_spec`).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def site(pip_install):
    """The folder into which pip has installed the spec."""
    return pip_install("third_party_spec")


@pytest.fixture
def python(site, run_beside, tmp_path):
    """Runs Python where the spec is installed; returns what it printed."""
    return functools.partial(run_beside, site, ACME_FOLDER=str(tmp_path))


def test_spec_is_listed_with_its_distribution_and_usable(python):
    rows = json.loads(python("-m", "wtransfer", "plugins", "list", "--json").stdout)["plugins"]
    (row,) = [row for row in rows if row["distribution"] == "acme-disk-spec"]
    assert (row["kind"], row["name"], row["origin"], row["status"]) == (
        "specs",
        "acme-disk",
        "discovered",
        "found",
    )
    (card,) = json.loads(python("-m", "wtransfer", "plugins", "show", "ACME_disk", "--json").stdout)
    assert (card["usable"], card["class"]) == (True, "acme_disk_spec.spec:DiskSpec")


def test_spec_mentions_no_weights():
    text = "".join(each.read_text() for each in (HERE / "third_party_spec" / "src").rglob("*.py"))
    assert "weight" not in text
    assert "fingerprint" not in text


# Promise 3, without a line of its own.
@pytest.mark.slow
def test_blocks_of_other_weights_are_never_loaded(python, tmp_path):
    done = python(HERE / "third_party_spec_peer.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "same class": True,
        "kept": 4,
        "loaded": True,
        "blocks of the old load that failed": [4],
        "under other weights": 0,
        "after the way back": 4,
    }


@pytest.mark.slow
def test_spec_passes_its_kit(python):
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    done = python("-m", "pytest", *options, HERE / "third_party_spec_kit.py")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
