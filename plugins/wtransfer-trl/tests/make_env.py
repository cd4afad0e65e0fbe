"""Make the environment of these tests, over that of wtransfer-vllm's live tests.

    python plugins/wtransfer-vllm/tests/make_env.py VLLM_ENV      first
    python plugins/wtransfer-trl/tests/make_env.py ENV VLLM_ENV   about 1 minute, 0.3 GB
    ENV/bin/python -m pytest plugins/wtransfer-trl/tests

TRL's extra ``vllm`` would choose another vLLM; so TRL is installed without its requirements, beside
those of them that vLLM does not have.
"""

from __future__ import annotations

import sys
from pathlib import Path

PLUGIN = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PLUGIN.parent / "wtransfer-vllm" / "tests"))

from make_old_env import make_over  # noqa: E402  # found by the line above

TRL = (
    "trl==1.16.0",
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "pandas==3.1.1",
    "pyarrow==26.0.1",
    "python-dateutil==4.0.0",
    "six==1.17.0",
    "tzdata==2026.6",
)

if __name__ == "__main__":
    make_over(*sys.argv[1:], *TRL, str(PLUGIN))
