"""README.md says what was run with which vLLM, as the tests have entered it."""

import json
import shutil

import release_table


def test_the_table_in_the_readme_is_made_of_what_the_tests_have_entered():
    made = release_table.made_of(json.loads(release_table.RELEASES.read_text()))
    (shown,) = release_table.PLACE.findall(release_table.README.read_text())
    assert shown == made


def test_a_release_that_passes_is_entered_beside_the_others(tmp_path, monkeypatch):
    for name in ("RELEASES", "README"):
        copy = shutil.copy(getattr(release_table, name), tmp_path)
        monkeypatch.setattr(release_table, name, type(tmp_path)(copy))
    release_table.enter(["weights"], release="9.10.0", how="live")
    release_table.enter(["specs"], release="9.9.0", how="modules only")
    (shown,) = release_table.PLACE.findall(release_table.README.read_text())
    assert shown.splitlines()[-2:] == [
        "| 9.9.0 | not run | not run | modules only |",
        "| 9.10.0 | live | not run | not run |",
    ]
