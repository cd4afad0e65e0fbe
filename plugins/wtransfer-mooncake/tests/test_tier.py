"""The tier against a real master, each case in a network namespace of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("cases.py")
# Ports of the store are open to everyone: nothing of it runs outside of a namespace. All that a
# case starts ends with it.
IN_NAMESPACE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "sh", "-c"]
IN_NAMESPACE.append('ip link set lo up && exec "$@"')


def missing():
    """Return what is missing for these tests; empty: nothing."""
    for module in ("wtransfer_mooncake", "mooncake"):
        if importlib.util.find_spec(module) is None:
            return f"no module {module}: pip install './plugins/wtransfer-mooncake[test]'"
    try:
        done = subprocess.run(
            [*IN_NAMESPACE, "sh", sys.executable, "-c", "import mooncake.store"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except OSError as error:
        return f"no program unshare: {error}"
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


if WHY := missing():
    pytest.skip(
        f"MOONCAKE IS NOT TESTED HERE: {WHY} (needs root, network namespaces, iproute2, and "
        "Debian's libibverbs1, libnl-3-200, libnl-route-3-200)",
        allow_module_level=True,
    )


@pytest.mark.parametrize(
    "case",
    [
        "contract",
        "two_processes",
        "scheduler_gives_no_memory",
        "full_memory",
        "close_waits",
        "killed_peer",
        "killed_master",
        "exit_within_a_call",
        "options",
        "kit",
        "tokens",
    ],
)
def test_case(case):
    done = subprocess.run(
        [*IN_NAMESPACE, "sh", sys.executable, str(CASES), case],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert done.stdout.endswith(f"{case} passed\n")
