"""The driver, and what tests of connectors share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from wtransfer.transport.zygote import Zygote
from wtransfer.weight_version import process_weights

HERE = Path(__file__).parent


def _shared(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Before the tests are imported, which import it by its name.
for _name in ("driver", "storage_jobs", "tokens_connector"):
    _shared(_name)


@pytest.fixture
def weights():
    """The weights of this process, under a name that another process could have as well."""
    # A model of an earlier test would change the name as soon as the collector finds it.
    process_weights.begin_anew()
    held = process_weights.hold("fingerprint-1")
    yield held
    held.close()


@pytest.fixture(scope="session")
def zygote():
    """Forks processes that have torch, and the modules of this folder."""
    with Zygote(preload=["torch"], paths=[HERE]) as made:
        yield made


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.startswith("test_weights_change_before_every_call"):
            item.cls.exhaustive = True
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.nightly)
