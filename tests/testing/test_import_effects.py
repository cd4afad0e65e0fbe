"""What the import of a backend's module changes in its process, as the kits ask it."""

from __future__ import annotations

import json
import os
import sys

import pytest

from wtransfer.testing.kit import kit_zygote

TELL = "wtransfer.testing.import_effects:tell"
EFFECTS = {
    "import socket; socket.setdefaulttimeout(30)": "socket.getdefaulttimeout() is 30.0, and was",
    "import os; os.umask(0)": "the umask is '0o0', and was '0o22'",
    "import torch; torch.set_num_threads(1)": "torch.get_num_threads() is 1, and was 3",
    "import torch; torch.manual_seed(5)": "torch.initial_seed() is 5, and was ",
    "import os; os.environ['ACME'] = '1'": "the variable ACME is '1', and was not set",
    "import logging; logging.basicConfig()": "the handlers of the root logger is ",
    "import threading\nthreading.Thread(target=threading.Event().wait, name='acme', "
    "daemon=True).start()": "thread acme is left",
    "import socket; own = socket.create_server(('127.0.0.1', 0))": "descriptor of socket:[#] is",
    "import tempfile; folder = tempfile.mkdtemp(prefix='acme')": "the file acme",
    "from pathlib import Path; Path('acme.log').touch()": "the file acme.log is left",
}


@pytest.fixture
def ask(tmp_path):
    """Return what the import of a module with some code changes."""

    def asked(code, name="acme_backend", *, is_found=True):
        for each in ("current", "path"):
            (tmp_path / each).mkdir()
        file, told = tmp_path / "path" / f"{name}.py", tmp_path / "told"
        file.write_text(code)
        path = [str(file.parent), *sys.path] if is_found else sys.path
        child = kit_zygote().spawn(
            TELL, os.getpid(), name, str(file), path, str(tmp_path / "current"), stdout=told
        )
        assert child.wait(60) == 0
        return json.loads(told.read_text().splitlines()[-1])

    return asked


@pytest.mark.parametrize(("code", "expected"), EFFECTS.items())
def test_effect_of_an_import_is_named(ask, code, expected):
    (changed,) = ask(code)["changed"]
    assert changed.startswith(expected) or expected in changed


@pytest.mark.parametrize("is_found", [True, False])
def test_import_without_effects_changes_nothing(ask, is_found):
    code = (
        "import dataclasses, sqlite3, urllib.request, torch\n"
        "@dataclasses.dataclass\nclass Options:\n    size: int = 0\n"
        "LOCKS = [__import__('threading').Lock()]"
    )
    assert ask(code, is_found=is_found) == {"changed": []}


def test_import_that_fails_says_why(ask):
    assert ask("import no_such_library")["error"] == (
        "ModuleNotFoundError: No module named 'no_such_library'"
    )
