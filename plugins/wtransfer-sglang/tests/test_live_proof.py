"""A live SGLang whose load is not proven takes no update, says why, and serves on."""

import pytest
import wtransfer
from safetensors.torch import load_file
from server import PROMPT, TOKEN, Server
from sglang_models import wrong_tokens
from wtransfer.errors import WTransferError

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture
def start(models, tmp_path):
    """Maker of a server."""
    started = []

    def start(options=None, env=None, **told):
        folder = tmp_path / "server"
        folder.mkdir()
        for name, text in told.items():
            (folder / name).write_text(text)
        started.append(Server(folder, models / "llama-A", options, env))
        return started[-1]

    yield start
    for server in started:
        server.close()


def refusal(server, folder):
    """Return what a publisher of a checkpoint is told."""
    held = load_file(folder / "model.safetensors")
    hosts = [server.address]
    with (
        wtransfer.Publisher(held, hosts=hosts, token=TOKEN, deadline_s=20) as publisher,
        pytest.raises(WTransferError) as caught,
    ):
        publisher.publish("B")
    return str(caught.value)


def test_load_that_leaves_a_tensor_out_is_refused_and_the_server_serves_on(start, models):
    server = start(left_out="3").ready()
    text = refusal(server, models / "llama-B")
    assert "this SGLang takes no update: " in text
    assert "other bits than those that serve" in text
    assert "this SGLang takes no update: " in server.log.read_text()
    answer = server.ask(PROMPT)
    assert answer.versions == [("default", 0, 8)]
    assert wrong_tokens({"default": models / "llama-A"}, answer) == []


@pytest.mark.nightly
def test_model_that_was_not_loaded_from_its_files_is_refused_and_the_server_serves_on(
    start, models
):
    server = start({"load-format": "dummy"}).ready()
    text = "a model of load format 'dummy' does not consist of its files"
    assert f"this SGLang takes no update: {text}" in refusal(server, models / "llama-B")
    assert server.ask(PROMPT).versions == [("default", 0, 8)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"WTRANSFER_TOKEN": ""}, "set WTRANSFER_TOKEN or WTRANSFER_TOKEN_FILE"),
        ({"WTRANSFER_SGLANG_CAST": "yes"}, "WTRANSFER_SGLANG_CAST is 'yes', expected 0 or 1"),
    ],
)
def test_variable_that_is_not_valid_ends_the_start(start, env, text):
    server = start(env=env)
    with pytest.raises(AssertionError):
        server.ready()
    assert text in server.log.read_text()
