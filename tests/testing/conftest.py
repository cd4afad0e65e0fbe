"""The kits, run as their authors' users would: on broken backends, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Outcome of each ``WANTED`` test of the module's ``BROKEN``: passed, failed or excused."""
    broken, wanted = request.module.BROKEN, request.module.WANTED
    file = tmp_path_factory.mktemp("kit") / "junit.xml"
    nodes = [f"{broken}::{cls}::{name}" for cls, name in wanted]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={file}"]
    done = subprocess.run([*command, *nodes], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    cases = ET.parse(file).getroot().iter("testcase")
    return {
        (case.get("classname").split(".")[-1], case.get("name")): _outcome(case) for case in cases
    }


def _outcome(case):
    tags = {child.tag for child in case}
    return "failed" if tags & {"failure", "error"} else "excused" if "skipped" in tags else "passed"
