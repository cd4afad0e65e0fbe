"""From a name to a class: the order, the sentences, and what is never decided silently."""

from __future__ import annotations

import logging
import sys

import pytest

from wtransfer.errors import (
    AlreadyRegisteredError,
    PluginAmbiguousError,
    PluginBlockedError,
    PluginError,
    PluginNotInstalledError,
    PluginSettingError,
    RegistrationError,
    UnknownBackendError,
    WTransferError,
)


class Engine:
    def __init__(self, config, parallel_config): ...
    def init_transfer_engine(self, init_info): ...
    def receive_weights(self, update_info, load_weights): ...
    def shutdown(self): ...


class Other(Engine):
    pass


def add(site, distribution, *names, version="1.0"):
    """Install a distribution that offers `names`, from a module of its own."""
    module = distribution.replace("-", "_") + "_module"
    site.module(module)
    site.add(distribution, version, **dict.fromkeys(names, f"{module}:Engine"))


def test_a_repeated_look_up_gives_the_same_class_without_asking_again(site, monkeypatch):
    add(site, "acme-wt", "fast")
    registry = site.engines()
    first = registry.get("fast")
    monkeypatch.setattr(registry, "_first", None)
    assert registry.get("fast") is first


def test_run_time_beats_discovered(site):
    add(site, "acme-wt", "fast")
    registry = site.engines()
    discovered = registry.get("fast")
    registry.register("fast", Engine)
    assert discovered is not Engine
    assert registry.get("fast") is Engine


def test_pin_beats_run_time(site):
    add(site, "acme-wt", "fast")
    registry = site.engines(WTRANSFER_PIN="engines:fast=acme-wt")
    registry.register("fast", Engine)
    assert registry.get("fast").__module__ == "acme_wt_module"


def test_pin_beats_built_in(site):
    add(site, "acme-wt", "shm")
    registry = site.engines(WTRANSFER_PIN="engines:shm=acme-wt")
    assert registry.get("shm").__module__ == "acme_wt_module"
    assert registry.get("wtransfer:shm").__module__ == "builtin_shm"


def test_built_in_beats_discovered_and_says_so_once(site, caplog):
    add(site, "acme-wt", "SHM")
    registry = site.engines()
    with caplog.at_level(logging.WARNING):
        assert registry.get("shm").__module__ == "builtin_shm"
        assert registry.get("Shm").__module__ == "builtin_shm"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == (
        "The built-in weight transfer engine 'shm' (wtransfer 0.1.0) is used, though 'SHM' "
        '(acme-wt 1.0) would answer to this name, too: set WTRANSFER_PIN="engines:SHM=acme-wt", '
        "or address it as 'acme-wt:SHM'"
    )
    assert registry.get("acme-wt:shm").__module__ == "acme_wt_module"


def test_run_time_names_compare_exactly_as_written(site):
    registry = site.engines()
    registry.register("SHM", Engine)
    registry.register("my_engine", Engine)
    registry.register("my-engine", Other)
    assert registry.get("SHM") is Engine
    assert registry.get("shm").__module__ == "builtin_shm"
    assert registry.get("my_engine") is Engine
    assert registry.get("my-engine") is Other
    with pytest.raises(UnknownBackendError):
        registry.get("My-Engine")


@pytest.mark.parametrize("name", ["my-fast", "MY_FAST", "My-Fast"])
def test_discovered_names_compare_folded(site, name):
    add(site, "acme-wt", "My_fast")
    registry = site.engines()
    assert registry.get(name) is registry.get("My_fast")


@pytest.mark.parametrize("name", ["acme-wt:fast", "Acme.WT:FAST", "acme_wt:fast"])
def test_distribution_and_name_address_one(site, name):
    add(site, "acme-wt", "fast")
    add(site, "other-wt", "fast")
    assert site.engines().get(name).__module__ == "acme_wt_module"


@pytest.mark.parametrize("name", ["mine", "shm", "nccl"])
def test_registered_built_in_and_reserved_names_are_taken(site, name):
    registry = site.engines()
    registry.register("mine", Engine)
    with pytest.raises(AlreadyRegisteredError) as caught:
        registry.register(name, Other)
    assert str(caught.value) == f"Weight transfer engine '{name}' is already registered."
    assert isinstance(caught.value, ValueError)
    assert registry.get("mine") is Engine


def test_nccl_stays_reserved_when_it_is_installed(site):
    add(site, "wtransfer-nccl", "nccl")
    registry = site.engines()
    with pytest.raises(AlreadyRegisteredError):
        registry.register("nccl", Engine)
    assert registry.get("nccl").__module__ == "wtransfer_nccl_module"


def test_a_module_path_is_imported_on_first_use(site):
    site.module("lazy_module")
    registry = site.engines()
    registry.register("lazy", "lazy_module", "Engine")
    assert "lazy_module" not in sys.modules
    assert registry.get("lazy") is sys.modules["lazy_module"].Engine


def test_a_module_path_needs_a_class_name(site):
    with pytest.raises(RegistrationError) as caught:
        site.engines().register("lazy", "lazy_module")
    assert str(caught.value) == "class_name is required when registering with module path"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("name", "place"), [("x", 3), (3, Engine), (None, "module")])
def test_registering_something_else_is_refused(site, name, place):
    with pytest.raises(RegistrationError, match="takes a name with a class or a module path"):
        site.engines().register(name, place, "Engine")


def test_the_duplicate_texts_of_the_other_kinds_are_the_seeds(site):
    host = site.host()
    for word in ("connectors", "specs"):
        host.registry(word).register("x", "module", "Class")
        with pytest.raises(ValueError, match=r"^Connector 'x' is already registered\.$"):
            host.registry(word).register("x", "module", "Class")


def failure(registry, name, cls=PluginError):
    with pytest.raises(cls) as caught:
        registry.get(name)
    assert isinstance(caught.value, WTransferError)
    return caught.value


def test_unknown_lists_what_exists_and_the_nearest(site):
    add(site, "acme-wt", "fast")
    registry = site.engines()
    registry.register("mine", Engine)
    error = failure(registry, "fats", UnknownBackendError)
    assert str(error) == (
        "Invalid weight transfer backend: fats. Available engines: ['fast', 'mine', 'shm']. "
        "Did you mean 'fast'? Install the distribution that provides it, or register it at run "
        "time."
    )
    assert error.available == ("fast", "mine", "shm")
    assert isinstance(error, ValueError)
    assert isinstance(error, LookupError)


@pytest.mark.parametrize(
    ("word", "start"),
    [
        ("connectors", "Unsupported connector type: x. Available connectors: []."),
        ("specs", "Unsupported spec type: x. Available specs: []."),
    ],
)
def test_unknown_names_of_the_other_kinds_begin_as_the_seeds(site, word, start):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        site.host().registry(word).get("x")
    assert str(caught.value).startswith(start)


def test_a_name_that_is_no_text_is_unknown(site):
    assert str(failure(site.engines(), None, UnknownBackendError)).startswith(
        "Invalid weight transfer backend: None. Available engines: ['shm']"
    )


@pytest.mark.parametrize("name", ["nccl", "NCCL", "wtransfer-nccl:nccl"])
def test_first_party_names_say_what_to_install(site, name):
    error = failure(site.engines(), name, PluginNotInstalledError)
    assert str(error) == (
        f"Invalid weight transfer backend: {name}. Available engines: ['shm']. It is provided by "
        "'wtransfer-nccl', which is not installed here: pip install wtransfer-nccl"
    )
    assert error.distribution == "wtransfer-nccl"


def test_our_distribution_is_not_suggested_for_another_one_s_backend(site):
    for error in (
        failure(site.engines(), "acme-wt:nccl", UnknownBackendError),
        failure(site.engines(WTRANSFER_PIN="engines:nccl=acme-wt"), "nccl", UnknownBackendError),
    ):
        assert type(error) is UnknownBackendError
        assert "No distribution 'acme-wt' that is installed here offers it" in str(error)


def test_an_unknown_distribution_is_never_suggested_for_installing(site):
    add(site, "acme-wt", "fast")
    error = failure(site.engines(), "evil:fast", UnknownBackendError)
    assert str(error) == (
        "Invalid weight transfer backend: evil:fast. Available engines: ['fast', 'shm']. No "
        "distribution 'evil' that is installed here offers it. Offered by: 'fast' (acme-wt 1.0)."
    )


def test_a_pin_to_nothing_is_an_error_of_that_name(site):
    add(site, "acme-wt", "fast")
    registry = site.engines(WTRANSFER_PIN="engines:fast=gone-wt")
    assert str(failure(registry, "fast", UnknownBackendError)) == (
        "Invalid weight transfer backend: fast. Available engines: ['acme-wt:fast', 'shm']. No "
        "distribution 'gone-wt' that is installed here offers it (WTRANSFER_PIN asks for it). "
        "Offered by: 'fast' (acme-wt 1.0)."
    )
    assert registry.get("shm").__module__ == "builtin_shm"


def test_blocked_says_by_what(site):
    add(site, "acme-wt", "fast")
    registry = site.engines(WTRANSFER_PLUGINS_BLOCK="acme-wt")
    error = failure(registry, "fast", PluginBlockedError)
    assert error.message == (
        "The weight transfer engine 'fast' is installed and blocked here. 'fast' (acme-wt 1.0): "
        "WTRANSFER_PLUGINS_BLOCK names 'acme-wt'; remove it there to use it."
    )
    assert (error.distribution, error.distribution_version) == ("acme-wt", "1.0")
    assert registry.names() == ["shm"]
    assert "acme_wt_module" not in sys.modules


def test_an_empty_allow_list_allows_built_ins_only(site):
    add(site, "acme-wt", "fast")
    registry = site.engines(WTRANSFER_PLUGINS="")
    failure(registry, "fast", PluginBlockedError)
    assert registry.get("shm").__module__ == "builtin_shm"


def test_a_blocked_built_in_is_not_replaced_silently(site):
    add(site, "acme-wt", "shm")
    registry = site.engines(WTRANSFER_PLUGINS_BLOCK="wtransfer:shm")
    failure(registry, "shm", PluginBlockedError)
    assert registry.get("acme-wt:shm").__module__ == "acme_wt_module"


def test_ambiguous_names_both_and_the_pin(site):
    add(site, "acme-wt", "fast")
    add(site, "other-wt", "FAST", version="2.0")
    registry = site.engines()
    error = failure(registry, "fast", PluginAmbiguousError)
    assert str(error) == (
        "The weight transfer engine 'fast' is offered by several distributions: 'fast' (acme-wt "
        "1.0), 'FAST' (other-wt 2.0). Choose one: set "
        'WTRANSFER_PIN="engines:fast=acme-wt" or '
        "WTRANSFER_PIN=\"engines:FAST=other-wt\", or address it as 'acme-wt:fast' or "
        "'other-wt:FAST'."
    )
    assert registry.names() == ["acme-wt:fast", "other-wt:FAST", "shm"]


def test_the_pin_that_the_error_shows_works(site):
    add(site, "acme-wt", "fast")
    add(site, "other-wt", "FAST")
    registry = site.engines(WTRANSFER_PIN="engines:FAST=other-wt")
    assert registry.get("fast").__module__ == "other_wt_module"
    assert registry.names() == ["FAST", "acme-wt:fast", "shm"]


def test_blocking_one_of_two_decides(site):
    add(site, "acme-wt", "fast")
    add(site, "other-wt", "fast")
    registry = site.engines(WTRANSFER_PLUGINS_BLOCK="acme-wt")
    assert registry.get("fast").__module__ == "other_wt_module"


def test_two_spellings_in_one_distribution_are_told_apart_exactly_or_not_at_all(site):
    site.module("one_module", "from builtin_shm import Engine\nclass Second(Engine): ...")
    site.add("acme-wt", my_fast="one_module:Engine", my__fast="one_module:Second")
    registry = site.engines()
    assert registry.get("my_fast").__name__ == "Engine"
    assert registry.get("my-fast").__name__ == "Second"
    assert "is declared more than once by acme-wt 1.0" in str(
        failure(registry, "MY-FAST", PluginAmbiguousError)
    )


def test_a_setting_that_cannot_be_read_stops_every_choice(site):
    with pytest.raises(PluginSettingError, match="WTRANSFER_PIN"):
        site.engines(WTRANSFER_PIN="nonsense").get("shm")


def test_an_unknown_name_can_be_registered_and_used_later(site):
    registry = site.engines()
    failure(registry, "late", UnknownBackendError)
    registry.register("late", Engine)
    assert registry.get("late") is Engine


def test_every_listed_name_can_be_used(site):
    add(site, "acme-wt", "fast", "SHM")
    add(site, "other-wt", "Fast", "slow")
    registry = site.engines()
    registry.register("mine", Engine)
    names = registry.names()
    assert names == ["acme-wt:SHM", "acme-wt:fast", "mine", "other-wt:Fast", "shm", "slow"]
    assert {registry.get(name).__module__ for name in names} == {
        "acme_wt_module",
        "other_wt_module",
        "builtin_shm",
        __name__,
    }


def test_a_record_is_found_without_importing(site):
    add(site, "acme-wt", "fast")
    registry = site.engines()
    registry.register("mine", "no_such_module", "Engine")
    assert registry.record("fast").distribution == "acme-wt"
    assert registry.record("mine").origin == "run time"
    assert registry.record("mine").distribution is None
    assert "acme_wt_module" not in sys.modules
