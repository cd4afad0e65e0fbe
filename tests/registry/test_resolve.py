"""From a name to a class: the order, the sentences, and what is never chosen silently."""

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


def test_pin_beats_run_time_and_built_in_and_run_time_beats_discovered(site):
    site.offer("acme-wt", "fast", "shm")
    registry = site.engines()
    discovered = registry.get("fast")
    registry.register("fast", Engine)
    assert registry.get("fast") is Engine is not discovered
    pinned = site.engines(WTRANSFER_PIN="engines:fast=acme-wt, engines:shm=acme-wt")
    pinned.register("fast", Engine)
    assert pinned.get("fast") is pinned.get("shm") is discovered
    assert pinned.get("wtransfer:shm").__module__ == "builtin_shm"


def test_built_in_beats_discovered_and_warns_once(site, caplog):
    site.offer("acme-wt", "SHM")
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
    site.offer("acme-wt", "My_fast")
    registry = site.engines()
    assert registry.get(name) is registry.get("My_fast")


@pytest.mark.parametrize("name", ["acme-wt:fast", "Acme.WT:FAST", "acme_wt:fast"])
def test_distribution_and_name_address_one_backend(site, name):
    site.offer("acme-wt", "fast")
    site.offer("other-wt", "fast")
    assert site.engines().get(name).__module__ == "acme_wt_module"


def test_nccl_stays_reserved_when_it_is_installed(site):
    site.offer("wtransfer-nccl", "nccl")
    registry = site.engines()
    with pytest.raises(AlreadyRegisteredError):
        registry.register("nccl", Engine)
    assert registry.get("nccl").__module__ == "wtransfer_nccl_module"


@pytest.mark.parametrize(("name", "place"), [("x", 3), (3, Engine), (None, "module")])
def test_registration_of_another_object_is_refused(site, name, place):
    with pytest.raises(RegistrationError, match="takes a name with a class or a module path"):
        site.engines().register(name, place, "Engine")


def failure(registry, name, cls=PluginError):
    with pytest.raises(cls) as caught:
        registry.get(name)
    assert isinstance(caught.value, WTransferError)
    return caught.value


def test_unknown_lists_what_exists_and_the_nearest(site):
    site.offer("acme-wt", "fast")
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


def test_name_that_is_no_string_is_unknown(site):
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


def test_first_party_tiers_say_what_to_install(site):
    error = failure(site.host().registry("specs"), "valkey", PluginNotInstalledError)
    assert error.distribution == "wtransfer-valkey"


def test_first_party_distribution_is_not_suggested_for_an_addressed_or_pinned_one(site):
    for error in (
        failure(site.engines(), "acme-wt:nccl", UnknownBackendError),
        failure(site.engines(WTRANSFER_PIN="engines:nccl=acme-wt"), "nccl", UnknownBackendError),
    ):
        assert type(error) is UnknownBackendError
        assert "No distribution 'acme-wt' that is installed here offers it" in str(error)


def test_unknown_distribution_is_not_suggested_for_installing(site):
    site.offer("acme-wt", "fast")
    error = failure(site.engines(), "evil:fast", UnknownBackendError)
    assert str(error) == (
        "Invalid weight transfer backend: evil:fast. Available engines: ['fast', 'shm']. No "
        "distribution 'evil' that is installed here offers it. Offered by: 'fast' (acme-wt 1.0)."
    )


def test_pin_to_a_missing_distribution_is_an_error_of_that_name(site):
    site.offer("acme-wt", "fast")
    registry = site.engines(WTRANSFER_PIN="engines:fast=gone-wt")
    assert str(failure(registry, "fast", UnknownBackendError)) == (
        "Invalid weight transfer backend: fast. Available engines: ['acme-wt:fast', 'shm']. No "
        "distribution 'gone-wt' that is installed here offers it (WTRANSFER_PIN asks for it). "
        "Offered by: 'fast' (acme-wt 1.0)."
    )
    assert registry.get("shm").__module__ == "builtin_shm"


def test_blocked_names_the_variable_and_the_entry(site):
    site.offer("acme-wt", "fast")
    registry = site.engines(WTRANSFER_PLUGINS_BLOCK="acme-wt")
    error = failure(registry, "fast", PluginBlockedError)
    assert error.message == (
        "The weight transfer engine 'fast' is installed and blocked here. 'fast' (acme-wt 1.0): "
        "WTRANSFER_PLUGINS_BLOCK names 'acme-wt'; remove it there to use it."
    )
    assert (error.distribution, error.distribution_version) == ("acme-wt", "1.0")
    assert registry.names() == ["shm"]
    assert "acme_wt_module" not in sys.modules


def test_blocked_built_in_is_not_replaced_silently(site):
    site.offer("acme-wt", "shm")
    registry = site.engines(WTRANSFER_PLUGINS_BLOCK="wtransfer:shm")
    failure(registry, "shm", PluginBlockedError)
    assert registry.get("acme-wt:shm").__module__ == "acme_wt_module"


def test_ambiguous_name_shows_both_and_the_pins(site):
    site.offer("acme-wt", "fast")
    site.offer("other-wt", "FAST", version="2.0")
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


def test_two_spellings_in_one_distribution_must_be_written_exactly(site):
    site.module("one_module", "from builtin_shm import Engine\nclass Second(Engine): ...")
    site.add("acme-wt", my_fast="one_module:Engine", my__fast="one_module:Second")
    registry = site.engines()
    assert registry.get("my_fast").__name__ == "Engine"
    assert registry.get("my-fast").__name__ == "Second"
    assert "'MY-FAST' is declared more than once by acme-wt 1.0: 'my-fast' = 'one_mod" in str(
        failure(registry, "MY-FAST", PluginAmbiguousError)
    )


@pytest.mark.parametrize(
    "text", ["Acme.WT", "ACME_wt", "acme-wt:my-engine", "x, acme-wt:MY_ENGINE"]
)
def test_list_entries_name_a_distribution_or_one_of_its_backends(site, text):
    site.offer("acme-wt", "My_Engine")
    assert site.engines(WTRANSFER_PLUGINS=text).names() == ["My_Engine", "shm"]
    assert site.engines(WTRANSFER_PLUGINS_BLOCK=text).names() == ["shm"]


@pytest.mark.parametrize("text", ["", "other-wt", "acme-wt:other", " , "])
def test_list_entries_name_nothing_else(site, text):
    site.offer("acme-wt", "My_Engine")
    assert site.engines(WTRANSFER_PLUGINS_BLOCK=text).names() == ["My_Engine", "shm"]
    registry = site.engines(WTRANSFER_PLUGINS=text)
    error = failure(registry, "my-engine", PluginBlockedError)
    assert "WTRANSFER_PLUGINS does not list it; add 'acme-wt' there to use it" in str(error)
    assert registry.get("shm").__module__ == "builtin_shm"


def test_block_list_beats_allow_list(site):
    site.offer("acme-wt", "fast")
    registry = site.engines(WTRANSFER_PLUGINS="acme-wt", WTRANSFER_PLUGINS_BLOCK="acme-wt:fast")
    assert "WTRANSFER_PLUGINS_BLOCK names 'acme-wt:fast'" in str(
        failure(registry, "fast", PluginBlockedError)
    )


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        (
            "WTRANSFER_PLUGINS_BLOCK",
            "acme-wtt",
            (
                "'acme-wtt' has no effect: that distribution has no backend here; did you mean "
                "'acme-wt'?"
            ),
        ),
        (
            "WTRANSFER_PLUGINS",
            "acme-wt, other:x",
            "'other:x' has no effect: that distribution has no backend here",
        ),
        (
            "WTRANSFER_PLUGINS_BLOCK",
            "ACME_wt:fsat",
            (
                "'ACME_wt:fsat' has no effect: that distribution has no backend 'fsat'; did you "
                "mean 'Fast'?"
            ),
        ),
        (
            "WTRANSFER_PIN",
            "engines:fast=acmewt",
            (
                "'engines:fast=acmewt' has no effect: that distribution has no backend here; did "
                "you mean 'acme-wt'?"
            ),
        ),
    ],
)
def test_setting_that_names_nothing_that_is_installed_is_logged_once(
    site, caplog, variable, text, problem
):
    site.offer("acme-wt", "Fast")
    registry = site.engines(**{variable: text})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            registry.get("shm")
    assert [each.getMessage() for each in caplog.records] == [f"{variable}: {problem}"]


def test_settings_that_name_what_is_installed_are_logged_not_at_all(site, caplog):
    site.offer("acme-wt", "Fast")
    registry = site.engines(
        WTRANSFER_PLUGINS="Acme_WT",
        WTRANSFER_PLUGINS_BLOCK="acme-wt:FAST",
        WTRANSFER_PIN="engines:fast=acme-wt",
    )
    with caplog.at_level(logging.WARNING):
        registry.get("shm")
    assert caplog.records == []


def test_pin_names_a_kind_and_a_folded_name(site):
    site.offer("acme-wt", "My_fast")
    site.offer("other-wt", "my-fast")
    pins = " engines:MY_fast = acme-wt , specs:my-fast=other-wt"
    registry = site.engines(WTRANSFER_PIN=pins)
    assert registry.get("my-FAST").__module__ == "acme_wt_module"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WTRANSFER_PIN", "nccl=acme"),
        ("WTRANSFER_PIN", "engine:nccl=acme"),
        ("WTRANSFER_PIN", "engines:nccl"),
        ("WTRANSFER_PIN", "engines:=acme"),
        ("WTRANSFER_PIN", "engines: =acme"),
        ("WTRANSFER_PIN", "engines:nccl="),
        ("WTRANSFER_PLUGINS", ":nccl"),
        ("WTRANSFER_PLUGINS_BLOCK", "acme:"),
        ("WTRANSFER_LOAD_TIMEOUT_S", "soon"),
        ("WTRANSFER_LOAD_TIMEOUT_S", "-1"),
        ("WTRANSFER_LOAD_TIMEOUT_S", "inf"),
        ("WTRANSFER_LOAD_TIMEOUT_S", ""),
    ],
)
def test_unreadable_setting_stops_every_look_up(site, variable, value):
    with pytest.raises(PluginSettingError) as caught:
        site.engines(**{variable: value}).get("shm")
    assert variable in str(caught.value)
    assert repr(value) in str(caught.value)


def num_calls(function):
    """Return how many calls of Python functions a call makes."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", ["name-{}", "name"])
def test_cost_of_listing_is_linear_in_the_entry_points_of_a_distribution(site, name):
    calls = []
    for num_entries in (100, 200):
        lines = [f"{name.format(i)} = acme_module:Engine{i}" for i in range(num_entries)]
        info = site.add("acme-wt", str(num_entries))
        (info / "entry_points.txt").write_text("\n".join(["[wtransfer.engines]", *lines]))
        calls.append(num_calls(site.engines().names))
        for path in info.iterdir():
            path.unlink()
        info.rmdir()
    assert calls[1] < 2.5 * calls[0]


def test_unknown_name_can_be_registered_and_used_later(site):
    registry = site.engines()
    failure(registry, "late", UnknownBackendError)
    registry.register("late", Engine)
    assert registry.get("late") is Engine


def test_every_listed_name_can_be_used(site):
    site.offer("acme-wt", "fast", "SHM")
    site.offer("other-wt", "Fast", "slow")
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


def test_record_is_found_without_importing(site):
    site.offer("acme-wt", "fast")
    registry = site.engines()
    registry.register("mine", "no_such_module", "Engine")
    assert registry.record("fast").distribution == "acme-wt"
    assert registry.record("mine").origin == "run time"
    assert registry.record("mine").distribution is None
    assert "acme_wt_module" not in sys.modules
