"""The plug-in is tested where it is installed."""

import importlib.util

import pytest


def test_the_plugin_is_installed():
    if importlib.util.find_spec("wtransfer_vllm") is None:
        pytest.skip("wtransfer-vllm is not installed: pip install ./plugins/wtransfer-vllm")
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="vllm.general_plugins", name="wtransfer")
    assert entry.value == "wtransfer_vllm.plugin:register"
