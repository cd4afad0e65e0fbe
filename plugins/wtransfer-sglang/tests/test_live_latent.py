"""A live SGLang with multi-head latent attention, which keeps tensors made of the weights."""

import pytest
import sglang_models
from publishers import pushed
from server import PROMPT, Server
from sglang_models import wrong_tokens

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]


def test_absorbed_weights_follow_each_update(tmp_path):
    folders = {name: tmp_path / name for name in "AB"}
    for seed, folder in enumerate(folders.values(), start=1):
        sglang_models.make(folder, "latent", seed)
    server = Server(tmp_path / "server", folders["A"])
    try:
        first = server.ready().ask(PROMPT)
        assert wrong_tokens({"default": folders["A"]}, first) == []
        for name in "BA":
            pushed(folders[name], server, name)
            answer = server.ask(PROMPT)
            assert answer.versions == [(name, 0, 8)]
            assert wrong_tokens(folders, answer) == []
        assert answer.tokens == first.tokens
    finally:
        server.close()
