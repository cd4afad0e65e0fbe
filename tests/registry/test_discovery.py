"""What is read of installed distributions, and what a broken one costs."""

from __future__ import annotations

import importlib_metadata
import pytest

from wtransfer.registry.discovery import ENGINES, SPECS, discover


def names(catalog, kind=ENGINES):
    return [record.name for record in catalog.records if record.kind is kind]


def test_record_holds_what_the_distribution_declares(site):
    site.add("acme-wt", "2.3", fast="acme_engine:Engine")
    (record,) = [r for r in discover(site.distributions).records if r.name == "fast"]
    assert (record.kind, record.value) == (ENGINES, "acme_engine:Engine")
    assert (record.distribution, record.version, record.origin) == ("acme-wt", "2.3", "discovered")


def test_entries_of_wtransfer_are_built_ins_and_give_the_core_version(site):
    catalog = discover(site.distributions)
    assert [(r.name, r.origin) for r in catalog.records] == [("shm", "built-in")]
    assert catalog.core_version == "0.1.0"


def test_groups_are_kept_apart(site):
    site.add("acme-wt", group="wtransfer.specs", fast="acme_engine:Spec")
    site.add("tool", group="console_scripts", shm="acme:main")
    catalog = discover(site.distributions)
    assert names(catalog) == ["shm"]
    assert names(catalog, SPECS) == ["fast"]


def test_every_group_of_wtransfer_is_known_and_a_misspelt_one_is_named(site):
    site.add("acme-host", group="wtransfer.hosts", acme="acme_host:describe")
    assert discover(site.distributions).diagnostics == []
    site.add("acme-typo", group="wtransfer.host", acme="acme_host:describe")
    (diagnostic,) = discover(site.distributions).diagnostics
    assert diagnostic.distribution == "acme-typo"
    assert diagnostic.problem.endswith("did you mean wtransfer.hosts?")


def no_utf8(info):
    (info / "entry_points.txt").write_bytes(b"[wtransfer.engines]\nb\xff\xfed = bad:Bad\n")


def malformed(info):
    (info / "entry_points.txt").write_text("[wtransfer.engines]\nno equals sign\n")


def without_metadata(info):
    (info / "METADATA").unlink()


@pytest.mark.parametrize("damage", [no_utf8, malformed, without_metadata])
def test_unreadable_distribution_loses_only_its_own_entries(site, damage):
    damage(site.add("aaa-bad", bad="bad:Bad"))
    site.add("acme-wt", fast="acme_engine:Engine")
    catalog = discover(site.distributions)
    assert set(names(catalog)) == {"shm", "fast"}
    (diagnostic,) = catalog.diagnostics
    assert diagnostic.distribution == "aaa-bad"
    assert "cannot be read and are left out" in diagnostic.problem


def test_search_path_that_fails_half_way_keeps_what_was_read(site):
    def distributions():
        yield from site.distributions()
        raise OSError("stale handle")

    catalog = discover(distributions)
    assert names(catalog) == ["shm"]
    assert "stale handle" in catalog.diagnostics[0].problem


def test_first_of_two_installations_shadows_the_other(site, tmp_path):
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


def test_name_with_a_colon_is_left_out(site):
    bad = site.add("aaa-bad")
    (bad / "entry_points.txt").write_text("[wtransfer.engines]\nacme-wt:fast = bad:Bad\n")
    catalog = discover(site.distributions)
    assert names(catalog) == ["shm"]
    assert "acme-wt:fast" in catalog.diagnostics[0].problem


def test_entry_written_twice_counts_once(site):
    info = site.add("acme-wt", fast="acme_engine:Engine")
    entries = info / "entry_points.txt"
    entries.write_text(entries.read_text() + "fast = acme_engine:Engine\n")
    assert names(discover(site.distributions)) == ["fast", "shm"]
