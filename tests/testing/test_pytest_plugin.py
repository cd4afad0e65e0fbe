"""The kits in an author's own pytest: what it prints, and which configuration it needs."""

from __future__ import annotations

import os
import subprocess
import sys

PLUGIN = "wtransfer.testing.pytest_plugin"
POLICY = """
from wtransfer.specs.policies import LRUCachePolicy
from wtransfer.testing.policy import PolicyConformance

class KeepsOne(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        evicted = super().evict(count, protected, incoming)
        return evicted and evicted[1:]

class TestKeepsOne(PolicyConformance):
    policy_cls = KeepsOne
"""

CONNECTOR = """
from wtransfer.testing.connector import ConnectorConformance
from wtransfer.testing.fakes import MemoryConnector

class TestMemory(ConnectorConformance):
    connector_cls = MemoryConnector
"""


def run(folder, module, *options):
    (folder / "test_mine.py").write_text(module, "utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    # Where wtransfer is installed, its entry point loads the plug-in; here an option does.
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def test_failed_asserts_of_a_kit_show_the_values(tmp_path):
    done = run(tmp_path, POLICY, "-p", PLUGIN, "-k", "test_evict_returns_the_count_asked_for and 5")
    assert "AssertionError: assert 4 == 5" in done.stdout


def test_plugin_imports_nothing_heavy():
    code = (
        f"import sys, {PLUGIN}; print(sorted({{'torch', 'numpy', 'msgspec'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_connector_kit_is_collected_under_strict_markers(tmp_path):
    done = run(tmp_path, CONNECTOR, "--strict-markers", "--collect-only")
    assert done.returncode == 0, done.stdout
    assert "test_weights_change_before_every_call" in done.stdout
