"""A live SGLang whose start is refused: what its user is told."""

import json
import secrets
import time
from contextlib import ExitStack, closing

import pytest
import sglang_models
import torch
import wtransfer
from server import START_S, TOKEN, Server
from test_live_hicache import OPTIONS, TIER
from wtransfer.weight_sync.http.server import WorkerServer

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]


def wait_for_end(server, text):
    """Assert that the start ends, and that its log has a text."""
    end = time.monotonic() + START_S
    while not server.ended():
        assert time.monotonic() < end, server.log.read_text()[-4000:]
        time.sleep(0.1)
    assert text in server.log.read_text()


def test_address_that_is_taken_ends_the_start_and_is_named(models, tmp_path, monkeypatch):
    monkeypatch.setenv("WTRANSFER_TOKEN", TOKEN)
    address = f"unix:@wtransfer-sglang-{secrets.token_hex(6)}"
    with ExitStack() as stack:
        session = stack.enter_context(wtransfer.WorkerSession(torch.nn.Linear(2, 2)))
        stack.enter_context(closing(WorkerServer(session, listen=address)))
        server = Server(tmp_path, models / "llama-A", env={"WTRANSFER_LISTEN": address})
        stack.enter_context(closing(server))
        wait_for_end(server, f"WTRANSFER_LISTEN={address!r}: another process listens at")


def test_tier_that_is_unknown_ends_the_start_and_those_there_are_are_named(models, tmp_path):
    options = {
        **OPTIONS,
        "hicache-storage-backend": "dynamic",
        "hicache-storage-backend-extra-config": json.dumps({**TIER, "tier": "fiel"}),
    }
    with closing(Server(tmp_path, models / "llama-A", options)) as server:
        wait_for_end(server, "Unsupported spec type: fiel. Available specs: [")


def test_tier_for_a_model_with_several_groups_of_kv_cache_ends_the_start(tmp_path):
    sglang_models.make(tmp_path / "model", "groups", 1)
    extra = {**TIER, "tier": "file", "shared_storage_path": str(tmp_path)}
    options = {
        **OPTIONS,
        "hicache-storage-backend": "dynamic",
        "hicache-storage-backend-extra-config": json.dumps(extra),
    }
    with closing(Server(tmp_path / "server", tmp_path / "model", options)) as server:
        wait_for_end(server, "this model has KV cache of several kinds (swa), and a tier keeps")
