"""What is read of installed distributions, and what a broken one costs."""

from __future__ import annotations

import sys

import importlib_metadata

from wtransfer.registry.discovery import discover
from wtransfer.registry.kinds import ENGINES, SPECS


def names(catalog, kind=ENGINES):
    return [record.name for record in catalog.of(kind)]


def test_a_record_holds_what_the_distribution_says(site):
    site.add("acme-wt", "2.3", fast="acme_engine:Engine")
    (record,) = [r for r in discover(site.distributions).records if r.name == "fast"]
    assert (record.kind, record.value) == ("engines", "acme_engine:Engine")
    assert (record.distribution, record.version, record.origin) == ("acme-wt", "2.3", "discovered")


def test_our_own_entries_are_the_built_ins_and_give_the_version(site):
    catalog = discover(site.distributions)
    assert [(r.name, r.origin) for r in catalog.records] == [("shm", "built-in")]
    assert catalog.core_version == "0.1.0"


def test_groups_are_kept_apart(site):
    site.add("acme-wt", group="wtransfer.specs", fast="acme_engine:Spec")
    catalog = discover(site.distributions)
    assert names(catalog) == ["shm"]
    assert names(catalog, SPECS) == ["fast"]


def test_other_groups_are_nothing_to_us(site):
    site.add("acme-wt", group="console_scripts", shm="acme:main")
    assert names(discover(site.distributions)) == ["shm"]


def test_a_file_that_is_not_utf8_costs_only_its_own_entries(site):
    bad = site.add("aaa-bad", bad="bad:Bad")
    (bad / "entry_points.txt").write_bytes(b"[wtransfer.engines]\nb\xff\xfed = bad:Bad\n")
    site.add("acme-wt", fast="acme_engine:Engine")
    catalog = discover(site.distributions)
    assert set(names(catalog)) == {"shm", "fast"}
    (diagnostic,) = catalog.diagnostics
    assert diagnostic.distribution == "aaa-bad"
    assert "UnicodeDecodeError" in diagnostic.problem


def test_a_malformed_file_costs_only_its_own_entries(site):
    bad = site.add("aaa-bad", bad="bad:Bad")
    (bad / "entry_points.txt").write_text("[wtransfer.engines]\nno equals sign\n")
    catalog = discover(site.distributions)
    assert names(catalog) == ["shm"]
    assert [d.distribution for d in catalog.diagnostics] == ["aaa-bad"]


def test_metadata_without_a_version_or_missing_is_a_diagnostic(site):
    bad = site.add("aaa-bad", bad="bad:Bad")
    (bad / "METADATA").unlink()
    catalog = discover(site.distributions)
    assert names(catalog) == ["shm"]
    assert "aaa_bad" in catalog.diagnostics[0].distribution


def test_a_search_path_that_fails_half_way_keeps_what_was_read(site):
    def distributions():
        yield from site.distributions()
        raise OSError("stale handle")

    catalog = discover(distributions)
    assert names(catalog) == ["shm"]
    assert "stale handle" in catalog.diagnostics[0].problem


def test_the_first_of_two_installations_shadows_the_other(site, tmp_path):
    site.add("acme-wt", "2.0", other="acme_engine:Engine")
    second = tmp_path / "second"
    second.mkdir()
    old = second / "acme_wt-1.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-wt\nVersion: 1.0\n")
    (old / "entry_points.txt").write_text("[wtransfer.engines]\nfast = acme_engine:Engine\n")
    path = [str(tmp_path), str(second)]
    catalog = discover(lambda: importlib_metadata.distributions(path=path))
    assert set(names(catalog)) == {"shm", "other"}


def test_a_name_with_a_colon_cannot_pose_as_another_distributions(site):
    bad = site.add("aaa-bad")
    (bad / "entry_points.txt").write_text("[wtransfer.engines]\nacme-wt:fast = bad:Bad\n")
    catalog = discover(site.distributions)
    assert names(catalog) == ["shm"]
    assert "acme-wt:fast" in catalog.diagnostics[0].problem


def test_nothing_is_imported(site):
    site.add("acme-wt", fast="acme_engine:Engine")
    site.module("acme_engine", "raise SystemExit(3)")
    registry = site.engines()
    assert registry.names() == ["fast", "shm"]
    assert registry.record("fast").value == "acme_engine:Engine"
    assert "acme_engine" not in sys.modules


def test_an_entry_written_twice_is_one(site):
    info = site.add("acme-wt", fast="acme_engine:Engine")
    entries = info / "entry_points.txt"
    entries.write_text(entries.read_text() + "fast = acme_engine:Engine\n")
    assert names(discover(site.distributions)) == ["fast", "shm"]
