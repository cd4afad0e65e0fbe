"""Make the environment of the tests: verl and Ray for CPUs, wtransfer and this plug-in.

    python make_env.py ENV                    about 1 minute and 1.4 GB, of which torch is half
    ENV/bin/python -m pytest plugins/wtransfer-verl/tests

verl is installed without its requirements: most are for training and serving (datasets, wandb,
peft...), and its checkpoint engines import none of them. No vLLM: the one for CPUs and verl ask for
different releases of transformers.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).resolve().parents[1]
CORE = PLUGIN.parents[1]
VERL = "verl==0.9.1"
# Requirements of ``import verl.checkpoint_engine``, and torch in its build for CPUs.
NEEDED = (
    "torch==2.13.0",
    "ray==2.60.0",
    "tensordict==0.10.0",
    "transformers==5.10.4",
    "hydra-core==1.3.8",
    "codetiming==1.4.0",
    "fastapi",
    "uvicorn",
)


def main(folder: str) -> None:
    """Make the environment in a new folder, or bring an old one up to date."""
    # Debian's own Python has no `venv` that works before a further package is installed.
    maker = "virtualenv" if importlib.util.find_spec("virtualenv") else "venv"
    subprocess.run([sys.executable, "-m", maker, folder], check=True)
    pip = [str(Path(folder) / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for what in (
        [*NEEDED, f"{CORE}[test]"],
        ["--no-deps", VERL, str(PLUGIN)],
    ):
        subprocess.run([*pip, "install", *what], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
