"""What the operator's variables mean, and that none is guessed at."""

from __future__ import annotations

import pytest

from wtransfer.errors import PluginSettingError
from wtransfer.registry.discovery import Record
from wtransfer.registry.policy import DEFAULT_LOAD_TIMEOUT_S, Policy

ACME = Record("engines", "My_Engine", "a:B", "Acme.WT", "1", "discovered")
SHM = Record("engines", "shm", "a:B", "wtransfer", "1", "built-in")


def test_nothing_set_allows_everything():
    policy = Policy.read({})
    assert policy.refusal(ACME) is None
    assert policy.pin("engines", "nccl") is None
    assert policy.load_timeout_s == DEFAULT_LOAD_TIMEOUT_S


@pytest.mark.parametrize(
    "text", ["acme-wt", "ACME_wt", "acme-wt:my-engine", "x, acme-wt:MY_ENGINE"]
)
def test_entries_name_a_distribution_or_one_name_of_it(text):
    assert Policy.read({"WTRANSFER_PLUGINS": text}).refusal(ACME) is None
    assert Policy.read({"WTRANSFER_PLUGINS_BLOCK": text}).refusal(ACME) is not None


@pytest.mark.parametrize("text", ["", "other-wt", "acme-wt:other", " , "])
def test_what_the_lists_do_not_mean(text):
    refusal = Policy.read({"WTRANSFER_PLUGINS": text}).refusal(ACME)
    assert refusal == "WTRANSFER_PLUGINS does not list it; add 'Acme.WT' there to use it"
    assert Policy.read({"WTRANSFER_PLUGINS_BLOCK": text}).refusal(ACME) is None


def test_block_beats_allow():
    environ = {"WTRANSFER_PLUGINS": "acme-wt", "WTRANSFER_PLUGINS_BLOCK": "acme-wt:my-engine"}
    refusal = Policy.read(environ).refusal(ACME)
    assert refusal == (
        "WTRANSFER_PLUGINS_BLOCK names 'acme-wt:my-engine'; remove it there to use it"
    )


def test_built_ins_need_no_permission_and_can_be_blocked():
    assert Policy.read({"WTRANSFER_PLUGINS": ""}).refusal(SHM) is None
    assert Policy.read({"WTRANSFER_PLUGINS_BLOCK": "wtransfer:shm"}).refusal(SHM) is not None


def test_pins_compare_folded_names():
    policy = Policy.read({"WTRANSFER_PIN": " engines:My_Engine = acme-wt , specs:x=y"})
    assert policy.pin("engines", "my-ENGINE") == "acme-wt"
    assert policy.pin("specs", "my-engine") is None
    assert policy.pin("specs", "X") == "y"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WTRANSFER_PIN", "nccl=acme"),
        ("WTRANSFER_PIN", "engine:nccl=acme"),
        ("WTRANSFER_PIN", "engines:nccl"),
        ("WTRANSFER_PIN", "engines:=acme"),
        ("WTRANSFER_PIN", "engines:nccl="),
        ("WTRANSFER_PLUGINS", ":nccl"),
        ("WTRANSFER_PLUGINS_BLOCK", "acme:"),
        ("WTRANSFER_LOAD_TIMEOUT_S", "soon"),
        ("WTRANSFER_LOAD_TIMEOUT_S", "-1"),
        ("WTRANSFER_LOAD_TIMEOUT_S", "inf"),
        ("WTRANSFER_LOAD_TIMEOUT_S", ""),
    ],
)
def test_what_cannot_be_read_is_an_error_that_quotes_it(variable, value):
    with pytest.raises(PluginSettingError) as caught:
        Policy.read({variable: value})
    assert variable in str(caught.value)
    assert repr(value) in str(caught.value)
