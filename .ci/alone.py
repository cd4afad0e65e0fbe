"""Run the tests that failed beside others again, alone on the machine, three times each.

    python .ci/alone.py OUTPUT REPORT PYTEST...

A test that passes three times alone tells of a busy machine: it is listed in REPORT with its first
failure, to be mended. Exit code 1: a test fails alone, or too many failed for one busy moment.

Args:
    OUTPUT: What the run printed.
    REPORT: File that the tests that passed alone are added to.
    PYTEST: The command that pytest is started by, in the folder of the run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import dropwhile, takewhile
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
MAX_FAILED = 8
MAX_FAILED_IN_FILE = 1
NUM_RUNS = 3


def first_failure(output: list[str], test: str) -> list[str]:
    """Return what a run printed of the failure of one test."""
    name = test.partition("::")[2].replace("::", ".")
    head = re.compile(rf"_+ (ERROR at \w+ of )?{re.escape(name)} _+")
    found = list(dropwhile(lambda line: not head.fullmatch(line), output))
    rest = takewhile(lambda line: not re.match(r"_{3,} .* _{3,}$|={3,} ", line), found[1:])
    return [*found[:1], *rest]


def main(output: str, report: str, *pytest: str) -> None:
    """Run what failed last."""
    if not LAST_FAILED.exists():
        sys.exit("the run failed, and no test did")
    failed = sorted(json.loads(LAST_FAILED.read_text("utf-8")))
    files = Counter(test.partition("::")[0] for test in failed)
    if len(failed) > MAX_FAILED or max(files.values()) > MAX_FAILED_IN_FILE:
        listed = "".join(f"\n  {test}" for test in failed)
        sys.exit(f"too many tests failed to be run alone, or several in one file:{listed}")
    printed = Path(output).read_text("utf-8", "replace").splitlines()
    for test in failed:
        for number in range(1, NUM_RUNS + 1):
            print(f"== alone, {number} of {NUM_RUNS}: {test}", flush=True)
            if subprocess.run([*pytest, "-m", "", test], check=False).returncode:
                sys.exit(f"{test} fails alone as well")
        with Path(report).open("a", encoding="utf-8") as listed_alone:
            print(test, *first_failure(printed, test), sep="\n", file=listed_alone)


if __name__ == "__main__":
    main(*sys.argv[1:])
