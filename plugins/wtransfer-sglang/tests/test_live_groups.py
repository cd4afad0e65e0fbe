"""Models with several groups of KV cache take no update; windows in the one group are updated."""

import os
import subprocess
import sys
from contextlib import closing

import pytest
import sglang_models
from plain_server import parts
from publishers import pushed
from server import PROMPT, TESTS, Server
from sglang_models import wrong_tokens
from test_live_proof import refusal

from wtransfer_sglang.places import refusal_of

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]

LONG = PROMPT * 4
"""Longer than a window."""
READ = """
import sys
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

for folder in sys.argv[1:]:
    print(uses_ssm_state(ModelConfig(folder)))
"""
"""What SGLang's scheduler is told of models, by the function that tells it."""


@pytest.fixture
def folders(kind, tmp_path):
    made = {name: tmp_path / name for name in "AB"}
    for seed, folder in enumerate(made.values(), start=1):
        sglang_models.make(folder, kind, seed)
    return {"default": made["A"], **made}


@pytest.mark.parametrize("kind", ["window"])
def test_model_with_windows_in_the_one_group_is_updated(folders, tmp_path):
    with closing(Server(tmp_path / "server", folders["A"])) as server:
        server.ready()
        first = server.ask(LONG)
        assert wrong_tokens(folders, first) == []
        for name in "BA":
            pushed(folders[name], server, name)
            answer = server.ask(LONG)
            assert answer.versions == [(name, 0, 8)]
            assert answer.num_cached == 0
            assert wrong_tokens(folders, answer) == []


@pytest.mark.parametrize("kind", ["groups"])
def test_model_with_several_groups_is_refused_by_name_and_served(folders, tmp_path):
    text = "this SGLang takes no update: start it without a model with several groups of KV cache"
    with closing(Server(tmp_path / "server", folders["A"])) as server:
        server.ready()
        assert text in server.log.read_text(), "told at the start"
        assert text in refusal(server, folders["B"])
        answer = server.ask(LONG)
        assert answer.versions == [("default", 0, 8)]
        assert wrong_tokens(folders, answer) == []


def test_model_with_state_spaces_is_refused_by_sglangs_own_reading_of_it(models, tmp_path):
    """SGLang starts none on a CPU: they are computed by kernels of sgl_kernel."""
    sglang_models.make(tmp_path / "states", "states", 1)
    folders = [models / "llama-A", models / "moe-A", tmp_path / "states"]
    path = os.pathsep.join([str(TESTS / "stand_ins"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    found = []
    for line in done.stdout.split():
        given = parts()
        given.scheduler.is_hybrid_ssm = {"False": False, "True": True}[line]
        found.append(refusal_of(**vars(given)))
    assert found[:2] == [None, None]
    assert "several groups of KV cache, one of them for state spaces" in found[2]
