"""What ``wtransfer plugins new`` writes, installed, by its names in a live SGLang."""

import json
import os
import subprocess
import sys
from contextlib import closing

import pytest
from server import PROMPT, TOKEN, Server
from sglang_models import wrong_tokens
from test_live_hicache import LONG, NUM_PAGES, OPTIONS, PAGE, TIER

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An engine and a tier of third parties are installed, for servers that are started as well."""
    packages = []
    for kind in ("engine", "tier"):
        packages.append(str(tmp_path / kind))
        new = ["plugins", "new", kind, f"acme-{kind}", "--folder", packages[-1]]
        subprocess.run([sys.executable, "-m", "wtransfer", *new], check=True, timeout=60)
    site = str(tmp_path / "site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    # The build backend is there already; nothing is fetched.
    options = ["--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, *options, *packages], check=True, timeout=300)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([site, os.environ.get("PYTHONPATH", "")]))


def test_engine_and_tier_of_third_parties_serve_by_their_names(installed, models, tmp_path):
    folders = {"default": models / "llama-A", "A": models / "llama-A", "B": models / "llama-B"}
    extra = {
        **TIER,
        "tier": "acme-tier",
        "folder": str(tmp_path / "kv"),
        "prefetch_threshold": PAGE,
    }
    options = {
        **OPTIONS,
        "hicache-storage-backend": "dynamic",
        "hicache-storage-backend-extra-config": json.dumps(extra),
    }

    def push(name):
        """Push as a user does, by the command line."""
        command = ["push", str(folders[name]), "--to", server.address, "--label", name]
        subprocess.run(
            [sys.executable, "-m", "wtransfer", *command, "--engine", "acme-engine"],
            env={**os.environ, "WTRANSFER_TOKEN": TOKEN},
            check=True,
            timeout=120,
        )

    with closing(Server(tmp_path / "server", models / "llama-A", options)) as server:
        server.ready()
        first = server.ask(LONG)
        for name in "BA":
            push(name)
            answer = server.ask([*PROMPT, 1])
            assert answer.versions == [(name, 0, 8)]
            assert wrong_tokens(folders, answer) == []
        again = server.ask(LONG)
        assert again.num_cached == NUM_PAGES * PAGE
        assert again.tokens == first.tokens
