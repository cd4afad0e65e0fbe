"""Two live servers share a storage; each finds the blocks that it would compute, and no others."""

import shutil
import time

import pytest
import torch
from publishers import pushed
from safetensors.torch import load_file, save_file
from server import Server
from sglang_models import wrong_tokens
from test_live_hicache import LONG, NUM_PAGES, OPTIONS, PAGE

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture
def start(tmp_path):
    """Maker of servers over SGLang's own storage in files."""
    storage, started = tmp_path / "storage", []
    storage.mkdir()

    def start(folder, **more):
        options = {**OPTIONS, "hicache-storage-backend": "file"}
        options["hicache-storage-backend-extra-config"] = f'{{"prefetch_threshold": {PAGE}}}'
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(storage)}
        env["WTRANSFER_SGLANG_CAST"] = "1"
        server = Server(tmp_path / f"server-{len(started)}", folder, options | more, env)
        started.append(server)
        return server.ready()

    start.num_pages = lambda: len(list(storage.iterdir()))
    yield start
    for server in started:
        server.close()


def asked(start, server):
    """Return an answer whose pages are stored."""
    before = start.num_pages()
    answer = server.ask(LONG)
    end = time.monotonic() + 60
    while start.num_pages() < before + NUM_PAGES:
        assert time.monotonic() < end
        time.sleep(0.05)
    return answer


def test_server_that_computes_in_another_dtype_takes_no_blocks(start, models):
    folders = {"default": models / "llama-A"}
    server = start(folders["default"])
    first = asked(start, server)
    server.close()
    other = start(folders["default"], dtype="float16")
    answer = other.ask(LONG)
    assert answer.num_cached == 0
    assert wrong_tokens(folders, answer) == []
    assert answer.tokens == first.tokens
    other.close()
    again = start(folders["default"])
    assert again.ask(LONG).num_cached == NUM_PAGES * PAGE


def test_set_that_was_cast_otherwise_has_another_name(start, models, tmp_path):
    """One set of float32, rounded at once in one server, and by way of float16 in the other."""
    bfloat16, float16, masters = (tmp_path / name for name in ("bfloat16", "float16", "masters"))
    held = load_file(models / "llama-A" / "model.safetensors")
    for folder, dtype in ((bfloat16, torch.bfloat16), (float16, torch.float16)):
        shutil.copytree(models / "llama-A", folder)
        stored = {name: each.to(dtype) for name, each in held.items()}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    # What is sent: halfway between two values of bfloat16, and a little above.
    shutil.copytree(models / "llama-A", masters)
    sent = {name: each.float() * (1 + 2**-8 + 2**-14) for name, each in held.items()}
    save_file(sent, masters / "model.safetensors", {"format": "pt"})
    server = start(bfloat16)
    pushed(masters, server, "M")
    asked(start, server)
    server.close()
    other = start(float16)
    pushed(masters, other, "M")
    assert other.ask(LONG).num_cached == 0
    assert other.weight_info()["weight_version"] == "M"
