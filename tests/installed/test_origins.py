"""Processes that use a backend from other distributions, or in other versions, say so (FAULTS 42).

The plug-ins are third parties', pip-installed in two versions, one for each process.
"""

from __future__ import annotations

import pytest

SIDES = {
    "acme-folder": ("third_party_connector", "acme-folder", {"folder": "{}"}),
    "acme-shelf": (
        "third_party_tier",
        "OffloadingConnector",
        {"spec_name": "acme-shelf", "folder": "{}"},
    ),
    "tier": ("third_party_tier", "SharedStorageConnector", {"tier": "acme-shelf", "folder": "{}"}),
}


@pytest.fixture
def side_of(zygote, tmp_path):
    """Make one side of a connector in a process of its own; return what it prints."""
    out, err = tmp_path / "out", tmp_path / "err"

    def run(site, connector, options, *handshake):
        out.write_text("")
        options = {key: value.format(tmp_path) for key, value in options.items()}
        arguments = (str(site), connector, options, *handshake)
        child = zygote.spawn("third_party_side:main", *arguments, stdout=out, stderr=err)
        assert child.wait(60) == 0, err.read_text()
        return out.read_text().strip()

    return run


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, marks=[pytest.mark.slow] if each == "acme-shelf" else [])
        for each in SIDES
    ],
)
def test_sides_of_a_connector_in_two_versions_are_refused_in_one_sentence(
    pip_install, side_of, case
):
    project, connector, options = SIDES[case]
    old, new = (pip_install(project, version=version) for version in ("1.0", "1.1"))
    handshake = side_of(old, connector, options)
    assert side_of(old, connector, options, handshake) == "agreed"
    backend, distribution = (
        ("connector 'acme-folder'", "acme-folder-connector")
        if case == "acme-folder"
        else ("offloading spec 'acme-shelf'", "acme-shelf-tier")
    )
    sentence, *facts = side_of(new, connector, options, handshake).splitlines()
    assert sentence == (
        f"{backend} comes from {distribution} 1.0 on the worker of rank 0 and from "
        f"{distribution} 1.1 here; install the same distribution and version on both sides"
    )
    assert facts == [distribution, "1.1"]


def test_sides_of_a_connector_from_two_distributions_are_refused(pip_install, side_of):
    one = pip_install("third_party_connector")
    other = pip_install("third_party_connector", name="other-folder")
    _, connector, options = SIDES["acme-folder"]
    handshake = side_of(one, connector, options)
    text = side_of(other, connector, options, handshake)
    assert "acme-folder-connector 0.3 on the worker of rank 0 and from other-folder 0.3" in text


@pytest.mark.slow
def test_sides_of_a_connector_in_two_releases_of_one_contract_agree(pip_install, side_of):
    old, new, other = (
        pip_install("third_party_connector", contract_version=contract, version=version)
        for contract, version in (("1.0", "1.0.1"), ("1.0", "1.0.2"), ("1.1", "1.1.0"))
    )
    _, connector, options = SIDES["acme-folder"]
    for one, another in ((old, new), (new, old)):
        assert side_of(another, connector, options, side_of(one, connector, options)) == "agreed"
    text = side_of(other, connector, options, side_of(old, connector, options))
    assert "(contract 1.1, there 1.0); install releases of one contract on both sides" in text
