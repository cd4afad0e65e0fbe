"""Live tests need SGLang: `make_env.py` makes the environment. Without it they skip, loudly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "live")]

IS_INSTALLED = importlib.util.find_spec("wtransfer_sglang") is not None
# Without the plug-in there is nothing to test; `test_installed.py` says so.
collect_ignore_glob = [] if IS_INSTALLED else ["test_[!i]*.py"]


def pytest_collection_modifyitems(items):
    missing = importlib.util.find_spec("sglang") is None
    for item in items:
        if missing and "live" in item.keywords:
            item.add_marker(
                pytest.mark.skip(reason="SGLang is not installed: tests/make_env.py ENV")
            )


def pytest_configure(config):
    config.addinivalue_line("markers", "live: needs SGLang")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder with models A and B of each kind: llama-A, llama-B, moe-A, moe-B."""
    import sglang_models

    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "moe"):
        for seed, name in enumerate("AB", start=1):
            sglang_models.make(folder / f"{kind}-{name}", kind, seed)
    return folder


@pytest.fixture(scope="session")
def servers(models, tmp_path_factory):
    """Kind of model -> a server of its model A; both start at once."""
    from publishers import pushed
    from server import PROMPT, Server

    options = {"chunked-prefill-size": "64", "max-running-requests": "4"}
    folder = tmp_path_factory.mktemp("servers")
    started = {
        kind: Server(folder / kind, models / f"{kind}-A", options) for kind in ("llama", "moe")
    }
    for kind, server in started.items():
        server.ready()
        # Blocks that were computed before the first update, of weights that are received again.
        server.tell("no_flush")
        server.base = [server.ask(PROMPT)]
        pushed(models / f"{kind}-A", server, "A")
        server.base.append(server.ask(PROMPT))
        server.forget("no_flush")
    yield started
    for server in started.values():
        server.close()


@pytest.fixture(scope="module", params=["llama", "moe"])
def kind(request):
    """The kind of model: a server of a module's own is started once for each."""
    return request.param


@pytest.fixture
def server(servers, kind):
    """The server, with model A under the label A."""
    return servers[kind]


@pytest.fixture
def folders(models, kind):
    return {
        "default": models / f"{kind}-A",
        "A": models / f"{kind}-A",
        "B": models / f"{kind}-B",
    }
