"""Make the environment of `test_old_vllm.py`, over that of the other live tests.

    python make_env.py ENV              first
    python make_old_env.py OLD ENV      about 2 minutes, 0.4 GB
    OLD/bin/python -m pytest plugins/wtransfer-vllm/tests/test_old_vllm.py

OLD has a vLLM of the seed era and what must be of its time; all else is ENV's, torch, wtransfer and
this plug-in among it. The compiled part of that vLLM does not load beside a newer torch: see
`live/old_kernels.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("old-vllm-requirements.txt")
FIND_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


def make_over(folder: str, beneath: str, *what: str) -> None:
    """Make an environment over another, or bring an old one up to date.

    Args:
        folder: Where to make it.
        beneath: The environment whose packages it has as well, behind its own.
        *what: Arguments of ``pip install``; no requirements of these are installed.
    """
    lower = Path(beneath).resolve() / "bin" / "python"
    # No environment within an environment: the lower one's Python may itself be of one.
    subprocess.run([lower, "-m", "venv", "--without-pip", folder], check=True)
    upper = Path(folder) / "bin" / "python"
    link = Path(_packages(upper)) / "beneath.pth"
    # Apart from the lower one while pip is at work, which must not look for anything there.
    link.unlink(missing_ok=True)
    install = [lower, "-m", "pip", "--disable-pip-version-check", "--python", upper, "install"]
    subprocess.run([*install, "--no-deps", *what], check=True)
    # A line that begins with `import` is run: so the lower one's own `.pth` files count, too.
    link.write_text(f"import site; site.addsitedir({_packages(lower)!r})\n")


def _packages(python: Path) -> str:
    return subprocess.check_output([python, "-c", FIND_PACKAGES], text=True).strip()


if __name__ == "__main__":
    # The requirements of that vLLM name another torch, and much that is never imported here.
    make_over(*sys.argv[1:], "-r", str(REQUIREMENTS))
