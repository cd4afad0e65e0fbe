"""The commands of the guides, word for word: servers start by them, and do what they say."""

import re
import secrets
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from engines import PROMPTS
from server import ServerOfWords, environment

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
GUIDES = {
    name: ROOT / name / "README.md"
    for name in (".", "plugins/wtransfer-vllm", "plugins/wtransfer-valkey")
}


def lines_of(guide, part):
    """Return the lines of a guide's shell blocks with a word in them, each as one line."""
    blocks = re.findall(r"```sh\n(.*?)```", GUIDES[guide].read_text("utf-8"), re.DOTALL)
    # A quoted argument goes over several lines.
    text = "".join(blocks).replace("\\\n", "")
    lines = re.findall(r"(?:'[^']*'|[^'\n])+", text)
    return [line for line in lines if part in line]


CASES = [
    pytest.param(guide, number, marks=() if (guide, number) == (".", 0) else pytest.mark.nightly)
    for guide in GUIDES
    for number in range(len(lines_of(guide, "api_server")))
]


def test_guides_have_a_command_for_weights_and_one_for_kv():
    for guide, kinds in ((".", {"weight", "kv"}), ("plugins/wtransfer-vllm", {"weight", "kv"})):
        told = "".join(lines_of(guide, "api_server"))
        assert set(re.findall(r"--(\w+)-transfer-config", told)) == kinds
    assert len(lines_of("plugins/wtransfer-valkey", "api_server")) == 1


@pytest.mark.parametrize(("guide", "number"), CASES)
def test_server_starts_by_the_words_of_the_guide(guide, number, models, fresh, tmp_path):
    words = lines_of(guide, "api_server")[number]
    for example, here in {
        "base/": str(models / "A"),
        "MODEL": str(models / "A"),
        "/mnt/kv": str(tmp_path / "kv"),
        "redis://10.0.0.5:6379": f"unix://{tmp_path}/no-server.sock",
    }.items():
        words = words.replace(f"{example} ", f"{here} ").replace(f'"{example}"', f'"{here}"')
    token = {"WTRANSFER_TOKEN": secrets.token_hex(32)}
    with closing(ServerOfWords(tmp_path, words, token)) as server:
        assert server.tokens(PROMPTS) == fresh["A"]
        if "--kv-transfer-config" in words:
            # Those of a store that is not there are computed.
            assert any((tmp_path / "kv").rglob("*")) == ("/kv" in words)
            assert server.tokens(PROMPTS) == fresh["A"]
        else:
            (push,) = lines_of(".", "wtransfer push step-7/ --to http")
            push = push.replace("step-7/", str(models / "B")).replace(
                "http://127.0.0.1:8000", server.url
            )
            done = subprocess.run(
                ["bash", "-c", push],
                env=environment() | token,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert server.tokens(PROMPTS) == fresh["B"]
