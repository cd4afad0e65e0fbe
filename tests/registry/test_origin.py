"""Which releases of a backend two processes may have."""

from __future__ import annotations

import pytest

from wtransfer.errors import PluginIncompatibleError
from wtransfer.registry.discovery import ENGINES, Record, contract_of


class Plain: ...


class Stated:
    contract_version = "1.0"


class Derived(Stated): ...


def check(theirs, contract, cls=Plain, distribution="acme-wt"):
    record = Record(ENGINES, "fast", "acme:Fast", "acme-wt", "1.2.3", "discovered")
    record.check_origin(distribution, theirs, contract, "on the trainer", lambda: cls)


def test_releases_of_one_contract_agree_whatever_their_versions():
    check("1.2.4", "1.0", Stated)
    check("0.9", "1.0", Stated)


def test_equal_versions_agree_where_a_side_states_no_contract():
    record = Record(ENGINES, "fast", "acme:Fast", "acme-wt", "1.2.3", "discovered")
    record.check_origin("acme-wt", "1.2.3", None, "on the trainer", pytest.fail)
    check("1.2.3", "1.0", Plain)
    check("1.2.3", "1.0", Derived)
    check("1.2.3", "1.0", Stated)


def test_equal_versions_of_two_contracts_are_refused():
    with pytest.raises(PluginIncompatibleError, match=r"here \(contract 1\.0, there 1\.1\)"):
        check("1.2.3", "1.1", Stated)


@pytest.mark.parametrize("stated", ["1", "1.0.2", "1.0\n", "v1.0", "", 1.0, None])
def test_what_is_no_major_minor_is_no_contract(stated):
    assert contract_of(type("Engine", (), {"contract_version": stated})) is None


@pytest.mark.parametrize(
    ("contract", "cls", "stated"),
    [
        ("1.1", Stated, " (contract 1.0, there 1.1); install releases of one contract"),
        ("1.0", Plain, " (contract not stated, there 1.0); install releases of one contract"),
        # What derives from a backend is another author's.
        ("1.0", Derived, " (contract not stated, there 1.0); install releases of one contract"),
        (None, Stated, "; install the same distribution and version"),
        (None, Plain, "; install the same distribution and version"),
    ],
)
def test_other_contracts_and_versions_without_one_are_refused(contract, cls, stated):
    with pytest.raises(PluginIncompatibleError) as caught:
        check("1.2.4", contract, cls)
    assert caught.value.message == (
        "weight transfer engine 'fast' comes from acme-wt 1.2.4 on the trainer and from acme-wt "
        f"1.2.3 here{stated} on both sides"
    )


def test_one_contract_of_two_distributions_is_refused():
    with pytest.raises(PluginIncompatibleError, match=r"from acme-fork 1\.2\.3 on the trainer"):
        check("1.2.3", "1.0", Stated, distribution="acme-fork")
