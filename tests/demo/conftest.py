import os
import textwrap

import pytest


@pytest.fixture
def sabotage(monkeypatch, tmp_path):
    """Let every child process execute this at its start, and end it where this fails."""

    def arm(code):
        body = textwrap.indent(code, "    ")
        (tmp_path / "sitecustomize.py").write_text(
            f"try:\n{body}\nexcept BaseException as error:\n"
            "    import sys\n"
            "    print('sabotage failed:', repr(error), file=sys.stderr)\n"
            "    raise SystemExit(70) from error\n"
        )
        inherited = os.environ.get("PYTHONPATH")
        path = f"{tmp_path}{os.pathsep}{inherited}" if inherited else str(tmp_path)
        monkeypatch.setenv("PYTHONPATH", path)

    return arm
