"""SGLang's plug-in is registered whole, or not at all."""

import importlib.util
import pkgutil
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: tests/make_env.py ENV")

from sglang.srt.plugins.hook_registry import HookRegistry

from wtransfer_sglang import plugin

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

HOOKED = [*plugin.BEFORE, *plugin.AFTER, *plugin.AROUND]


@pytest.fixture(scope="module", autouse=True)
def stand_ins():
    """SGLang's modules that exist for CUDA alone are stood in, as in the servers' processes."""
    file = Path(__file__).parent / "stand_ins" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("stand_ins", file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        patch.setattr(sys, "meta_path", list(sys.meta_path))
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in [*HOOKED, *plugin.USED]:
                pkgutil.resolve_name(name)
        yield


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """SGLang's own registry, with no hook before and after the test."""
    monkeypatch.setattr(plugin, "is_registered", False)
    HookRegistry.reset()
    yield HookRegistry
    HookRegistry.reset()


def hooked(monkeypatch, registry):
    """Have SGLang apply what was registered; return the names that were hooked."""
    before = {name: pkgutil.resolve_name(name) for name in HOOKED}
    for name, found in before.items():
        monkeypatch.setattr(name, found)
    registry.apply_hooks()
    return [name for name, found in before.items() if pkgutil.resolve_name(name) is not found]


def test_every_hook_is_where_sglang_calls_it(monkeypatch, registry):
    assert hooked(monkeypatch, registry) == []
    plugin.register()
    assert plugin.is_registered
    assert hooked(monkeypatch, registry) == HOOKED


def test_other_release_is_refused_by_its_number(monkeypatch, registry):
    monkeypatch.setattr("sglang.__version__", "0.6.0")
    with pytest.raises(
        plugin.UnknownSglangError, match=r"run with SGLang 0.5.23, and this is 0.6.0"
    ):
        plugin.register()
    assert not plugin.is_registered
    assert hooked(monkeypatch, registry) == []


# Without its own `__init__` a class has that of `object`.
@pytest.mark.parametrize(
    "name", [name for name in (*HOOKED, *plugin.USED) if not name.endswith(".__init__")]
)
def test_name_that_sglang_has_no_more_is_named_and_none_is_hooked(monkeypatch, registry, name):
    owner, _, attribute = name.rpartition(".")
    monkeypatch.delattr(pkgutil.resolve_name(owner), attribute)
    with pytest.raises(plugin.UnknownSglangError, match=f"has no {name}, which"):
        plugin.register()
    assert not plugin.is_registered
    monkeypatch.undo()
    assert hooked(monkeypatch, registry) == []
