"""The guide's commands for a CPU, word for word: a server starts, and is pushed to."""

import re
import subprocess
from contextlib import closing

import pytest
from server import PROMPT, TESTS, ServerOfWords, words_environment
from sglang_models import wrong_tokens

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]


def line_of_the_guide(part):
    """Return the one line of the guide's shell blocks with a text in it."""
    blocks = re.findall(
        r"```sh\n(.*?)```", (TESTS.parent / "README.md").read_text("utf-8"), re.DOTALL
    )
    (line,) = (line for line in "".join(blocks).replace("\\\n", "").splitlines() if part in line)
    return line


def test_server_starts_by_the_words_of_the_guide_and_is_pushed_to(models, tmp_path):
    folders = {"default": models / "llama-A", "llama-B": models / "llama-B"}
    server = ServerOfWords(tmp_path, folders["default"], line_of_the_guide("--device cpu"))
    push = line_of_the_guide("wtransfer push")
    push = push.replace("CHECKPOINT", str(folders["llama-B"])).replace(
        "unix:@sgl-0", server.address
    )
    with closing(server.ready()):
        answers = [server.ask(PROMPT)]
        subprocess.run(["bash", "-c", push], env=words_environment(), check=True, timeout=120)
        answers.append(server.ask(PROMPT))
    assert [each.versions for each in answers] == [[("default", 0, 8)], [("llama-B", 0, 8)]]
    assert [wrong_tokens(folders, each) for each in answers] == [[], []]
