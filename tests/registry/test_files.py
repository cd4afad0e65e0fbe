"""Classes of files, without packaging: found by their names, not imported before they are used."""

from __future__ import annotations

import os
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
from wtransfer.registry.resolve import FILES, PIN, add_file, host

ENGINE = """
    class Engine:
        def __init__(self, config, parallel_config): ...
        def init_transfer_engine(self, init_info): ...
        def receive_weights(self, update_info, load_weights): ...
        def shutdown(self): ...
"""


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
    assert not any("first_try" in name for name in sys.modules)
    version = registry.record("Engine").version
    assert registry.get("Engine").__module__ == f"wtransfer_file_first_try_{version}"
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
    assert pinned.__module__.startswith("wtransfer_file_first_try_")


@pytest.mark.parametrize("contract", [None, "1.0"])
def test_peer_with_another_file_is_refused_whatever_contract_it_states(site, engines, contract):
    source = ENGINE + "        contract_version = '1.0'\n"
    site.module("first_try", source)
    theirs = engines().record("Engine")
    site.module("first_try", source + "        # changed\n")
    registry = engines()
    with pytest.raises(
        PluginIncompatibleError,
        match=r"first_try\.py .* on the trainer.*the same dist.* and version",
    ):
        registry.record("Engine").check_origin(
            theirs.distribution,
            theirs.version,
            contract,
            "on the trainer",
            lambda: registry.get("Engine"),
        )


@pytest.mark.parametrize("name", ["colorsys", "my-engine.2"])
def test_file_takes_the_name_of_no_module(site, name):
    site.module(name)
    registry = site.engines(WTRANSFER_PLUGIN_FILES=f"engines:{site.root}/{name}.py:Engine")
    before = sys.modules.get(name)
    cls = registry.get("Engine")
    assert sys.modules.get(name) is before
    assert vars(sys.modules[cls.__module__])["Engine"] is cls
    assert "." not in cls.__module__


def test_file_that_changes_after_it_was_named_is_not_imported(site, engines):
    registry = engines()
    version = registry.record("Engine").version
    site.module("first_try", ENGINE + "        # changed\n")
    with pytest.raises(PluginBrokenError, match="has changed since it was named: start"):
        registry.get("Engine")
    anew = engines()
    assert version not in anew.get("Engine").__module__


def test_file_that_is_gone_costs_its_own_name_only(site, engines):
    (site.root / "first_try.py").unlink()
    registry = engines()
    assert {"Engine", "shm"} <= {each.address for each in registry.listed()}
    with pytest.raises(PluginBrokenError, match=f"{FILES} names a file that cannot.*No such"):
        registry.get("Engine")
    assert registry.get("shm")


def test_two_entries_of_one_name_are_told_what_to_do(site):
    places = []
    for folder in ("one", "two"):
        (site.root / folder).mkdir()
        (site.root / folder / "mine.py").write_text(f"# {folder}\n")
        places.append(f"engines:{site.root}/{folder}/mine.py:Engine")
    registry = site.engines(WTRANSFER_PLUGIN_FILES=",".join(places))
    with pytest.raises(PluginAmbiguousError, match=f"two entries of {FILES}; keep one") as caught:
        registry.get("Engine")
    assert "author" not in caught.value.message


def test_file_that_cannot_be_imported_costs_its_own_name_only(site, engines):
    (site.root / "first_try.py").write_text("1 / 0")
    registry = engines()
    with pytest.raises(PluginBrokenError, match=r"ZeroDivisionError.*Only this name is affected"):
        registry.get("Engine")
    assert not any("first_try" in name for name in sys.modules)
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
        (f"{'x' * 100_000}.py:MyEngine", "no file can have the path 'xxx.*too long"),
        (f"{'x' * 300}/y.py:MyEngine", "no file can have the path 'xxx.*too long"),
        ("a\0b.py:MyEngine", "(no file can have the path 'a|there is no file /)"),
        ("x" * 100_000, "names no class of a file"),
    ],
    ids=["no class", "no file", "long path", "long folder", "null", "long text"],
)
def test_place_without_a_class_or_a_file_is_refused(place, message):
    with pytest.raises(PluginSettingError, match=message) as caught:
        add_file("engines", place)
    assert len(caught.value.message) < 1000


@pytest.fixture
def own_environ(monkeypatch):
    """Variables of this process that `add_file` may set, as they were at the end."""
    monkeypatch.setenv(FILES, "")
    host.reread()
    yield monkeypatch
    monkeypatch.undo()
    host.reread()


def test_name_of_another_backend_is_refused_unless_a_pin_chooses_the_file(tmp_path, own_environ):
    (tmp_path / "mine.py").write_text("class shm: ...\nclass Other: ...\n")
    with pytest.raises(PluginSettingError, match=r"'shm' of .* built-in .*: rename the class"):
        add_file("engines", f"{tmp_path}/mine.py:shm")
    assert os.environ[FILES] == ""
    assert add_file("engines", f"{tmp_path}/mine.py:Other") == "Other"
    # Again, as a process does that was started with the entry.
    assert add_file("engines", f"{tmp_path}/mine.py:Other") == "Other"
    own_environ.setenv(PIN, "engines:shm=mine.py")
    host.reread()
    add_file("engines", f"{tmp_path}/mine.py:shm")
    assert host.registry("engines").record("shm").origin == "file"


@pytest.mark.parametrize("folder", ["one,two", "line\nend"])
def test_path_that_the_variable_cannot_hold_is_refused(tmp_path, own_environ, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "mine.py").write_text("class Mine: ...\n")
    own_environ.chdir(tmp_path / folder)
    with pytest.raises(PluginSettingError, match=f"has a comma or a .* {FILES} cannot"):
        add_file("engines", "./mine.py:Mine")
    assert os.environ[FILES] == ""
