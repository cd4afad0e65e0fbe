"""Servers, and tiers over them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

IS_INSTALLED = importlib.util.find_spec("wtransfer_valkey") is not None
# Without the plug-in there is nothing to test; `test_installed.py` says so.
collect_ignore_glob = [] if IS_INSTALLED else ["test_[!i]*.py"]

# A name that nobody has costs seconds where no server of names is reached.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def serve():
    """Maker of servers, which are killed with the test."""
    from valkey_server import Server

    with contextlib.ExitStack() as stack:

        def make(**settings):
            made = Server(**settings)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def server(serve):
    """A server on a Unix socket."""
    return serve()


@pytest.fixture
def make_tier():
    """Maker of tiers, which are closed with the test."""
    from wtransfer.specs.tier import open_tier

    from wtransfer_valkey.tier import ValkeyTier

    with contextlib.ExitStack() as stack:

        def make(url, **options):
            # A machine that is busy fails no call.
            made = open_tier(ValkeyTier, {"url": url, "timeout_s": 30.0, **options})
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def tier(make_tier, server):
    """A tier over the server."""
    return make_tier(server.url)


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.startswith("test_any_call_may_fail["):
            item.add_marker(pytest.mark.slow)
