"""The plug-in is tested where it is installed."""

import importlib.util

import pytest


def test_the_plugin_is_installed():
    if importlib.util.find_spec("wtransfer_sglang") is None:
        pytest.skip("wtransfer-sglang is not installed: pip install ./plugins/wtransfer-sglang")
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="sglang.srt.plugins", name="wtransfer")
    assert entry.value == "wtransfer_sglang.plugin:register"
