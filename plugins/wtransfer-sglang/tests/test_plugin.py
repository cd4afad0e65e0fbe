"""SGLang's plug-in is registered whole, or not at all."""

import pytest

pytest.importorskip("sglang")

from sglang.srt.plugins import hook_registry

from wtransfer_sglang import plugin

pytestmark = pytest.mark.live


@pytest.fixture
def registered(monkeypatch):
    """Targets that were registered."""
    found = []
    monkeypatch.setattr(
        hook_registry.HookRegistry,
        "register",
        classmethod(lambda _cls, target, *_args, **_options: found.append(target)),
    )
    return found


def test_other_release_is_refused_by_its_number(monkeypatch, registered):
    monkeypatch.setattr("sglang.__version__", "0.6.0")
    with pytest.raises(
        plugin.UnknownSglangError, match=r"run with SGLang 0.5.23, and this is 0.6.0"
    ):
        plugin.register()
    assert registered == []


@pytest.mark.parametrize("name", [*plugin.BEFORE, *plugin.AFTER, *plugin.USED])
def test_hook_that_was_renamed_is_named_and_none_is_registered(monkeypatch, registered, name):
    def without(wanted):
        if wanted == name:
            raise AttributeError(name.rpartition(".")[2])

    monkeypatch.setattr(plugin.pkgutil, "resolve_name", without)
    with pytest.raises(plugin.UnknownSglangError, match=f"has no {name}, which"):
        plugin.register()
    assert registered == []
