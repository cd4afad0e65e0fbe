"""Make the environment of the live tests: SGLang on a CPU, wtransfer and this plug-in.

    python make_env.py ENV                    3 minutes and 3 GB
    ENV/bin/python -m pytest plugins/wtransfer-sglang/tests

SGLang requires distributions that exist for CUDA alone; so it is installed without its
requirements. Those follow from `sglang-requirements.txt`; `stand_ins/sitecustomize.py` is what the
tests put in the place of the rest.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PLUGIN = TESTS.parent
CORE = PLUGIN.parents[1]
SGLANG = "sglang==0.5.23"
# Their requirements name CUDA, or other versions than SGLang does.
ALONE = (
    "xgrammar==0.2.7",
    "timm==1.0.25",
    "torch_memory_saver",
    "triton==3.7.1",
    "smg-grpc-servicer",
    "deepseek-recipe==0.2.0",
    "tml-renderers==0.1.0",
)

GUIDE = (PLUGIN / "README.md").read_text("utf-8")
INSTALL = re.findall(r"^pip install (.*?) *#", GUIDE, re.MULTILINE)[0]
"""What the guide's first command installs."""


def main(folder: str) -> None:
    """Make the environment in a new folder, or bring an old one up to date."""
    # Debian's own Python has no `venv` that works before a further package is installed.
    maker = "virtualenv" if importlib.util.find_spec("virtualenv") else "venv"
    subprocess.run([sys.executable, "-m", maker, folder], check=True)
    pip = [str(Path(folder) / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for what in (
        ["-r", str(TESTS / "sglang-requirements.txt")],
        ["--no-deps", SGLANG, *ALONE],
        [f"{CORE}[test]"],
        INSTALL.split(),
        [f"{PLUGIN.parent / 'wtransfer-valkey'}[test]"],
    ):
        subprocess.run([*pip, "install", *what], cwd=CORE, check=True)


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
