"""Classes of files, without packaging: found by their names, not imported before they are used."""

from __future__ import annotations

import sys

import pytest

from wtransfer.errors import (
    PluginAmbiguousError,
    PluginBlockedError,
    PluginBrokenError,
    PluginIncompatibleError,
    PluginSettingError,
    PluginTypeError,
    UnknownBackendError,
)
from wtransfer.registry.resolve import FILES, add_file


@pytest.fixture
def engines(site):
    """Maker of registries that know the engine of a file."""
    site.module("first_try")

    def make(**environ):
        place = f"engines:{site.root}/first_try.py:Engine"
        return site.engines(**{"WTRANSFER_PLUGIN_FILES": place, **environ})

    return make


def test_class_is_found_by_its_name_and_imported_at_its_first_use(engines):
    registry = engines()
    assert "Engine" in registry.names()
    assert "Engine" in [each.address for each in registry.listed()]
    assert "first_try" not in sys.modules
    assert registry.get("Engine").__module__ == "first_try"
    assert (registry.record("Engine").distribution, registry.record("Engine").origin) == (
        "first_try.py",
        "file",
    )


def test_only_the_named_kind_has_it(site, engines):
    host = site.host(WTRANSFER_PLUGIN_FILES=f"specs:{site.root}/first_try.py:Engine")
    with pytest.raises(UnknownBackendError):
        host.registry("engines").get("Engine")
    with pytest.raises(PluginTypeError, match=r"'Engine' .first_try.py .* expected a subclass of"):
        host.registry("specs").get("Engine")


def test_lists_and_pins_hold_for_it(site, engines):
    for variable, value in (("PLUGINS", ""), ("PLUGINS_BLOCK", "first_try.py")):
        with pytest.raises(PluginBlockedError, match=r"first_try\.py"):
            engines(**{f"WTRANSFER_{variable}": value}).get("Engine")
    assert engines(WTRANSFER_PLUGINS="first_try.py:Engine").get("Engine")
    site.offer("acme-wt", "Engine")
    with pytest.raises(PluginAmbiguousError, match=r"engines:Engine=first_try\.py"):
        engines().get("Engine")
    pinned = engines(WTRANSFER_PIN="engines:Engine=first_try.py").get("Engine")
    assert pinned.__module__ == "first_try"


def test_peer_with_another_file_is_refused(site, engines):
    theirs = engines().record("Engine")
    (site.root / "first_try.py").write_text("# changed\n")
    ours = engines().record("Engine")
    with pytest.raises(PluginIncompatibleError, match=r"first_try\.py .* on the trainer"):
        ours.check_origin(
            theirs.distribution, theirs.version, None, "on the trainer", engines().load
        )


def test_module_of_another_place_is_not_replaced(site, engines, monkeypatch):
    monkeypatch.setitem(sys.modules, "first_try", sys)
    with pytest.raises(PluginBrokenError, match=r"imported already.*rename the file"):
        engines().get("Engine")
    assert sys.modules["first_try"] is sys


def test_file_that_cannot_be_imported_costs_its_own_name_only(site, engines):
    (site.root / "first_try.py").write_text("1 / 0")
    registry = engines()
    with pytest.raises(PluginBrokenError, match=r"ZeroDivisionError.*Only this name is affected"):
        registry.get("Engine")
    assert "first_try" not in sys.modules
    assert registry.get("shm")


@pytest.mark.parametrize("place", ["first_try.py:Engine", "engines:/first_try.py", "x:/a.py:B"])
def test_entry_of_another_form_is_refused(engines, place):
    with pytest.raises(PluginSettingError, match=f"{FILES} has the entry {place!r}; expected kind"):
        engines(WTRANSFER_PLUGIN_FILES=place).names()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("my_engine.py", "names no class of a file; expected for example ./my_engine.py:MyEngine"),
        ("./no_such_engine.py:MyEngine", "there is no file /"),
    ],
)
def test_place_without_a_class_or_a_file_is_refused(place, message):
    with pytest.raises(PluginSettingError, match=message):
        add_file("engines", place)
