"""README.md says on which architectures a check was run, as the command has entered it."""

import json
import shutil

import architectures
import kinds

ROWS = [
    *({"name": name, "result": "right", "why": None} for name in ("update", "way back")),
    {"name": "second update", "result": "right", "why": None},
    {"name": "KV of a fresh engine", "result": "refused", "why": "two groups; none moved"},
    {"name": "KV of the updated engine", "result": "refused", "why": "two groups; none moved"},
    {
        "name": "update by transformers",
        "result": "refused",
        "why": "28 names do not fit:\n  a: wanted int8\n  b: wanted int8",
    },
]


def test_the_table_in_the_readme_is_made_of_what_the_command_has_entered():
    made = architectures.made_of(json.loads(architectures.FOUND.read_text()))
    (shown,) = architectures.PLACE.findall(architectures.README.read_text())
    assert shown == made


def test_every_architecture_has_been_run():
    assert json.loads(architectures.FOUND.read_text()).keys() == architectures.CASES.keys()


def test_table_of_kinds_in_the_readme_is_that_of_the_kinds_that_are_run():
    (shown,) = kinds.PLACE.findall(architectures.README.read_text())
    assert shown == kinds.table()


def test_worst_row_of_a_column_is_entered_with_the_first_of_its_reasons(tmp_path, monkeypatch):
    for name in ("FOUND", "README"):
        copy = shutil.copy(getattr(architectures, name), tmp_path)
        monkeypatch.setattr(architectures, name, type(tmp_path)(copy))
    # The place is empty before the first entry.
    text = architectures.PLACE.sub("", architectures.README.read_text(), count=1)
    architectures.README.write_text(text)
    versions = {"vllm": "9.9.0", "transformers": "8.8.0"}
    facts = {"experts": None, "quantisation": "some", "kv_cache": "linear attention x 2"}
    architectures.enter("Llama", {"rows": ROWS} | facts, versions=versions)
    wrong = [{"name": "second update", "result": "WRONG", "why": "prompt 1"}]
    assert architectures.results_of({"rows": ROWS[:2] + wrong + ROWS[3:]})["update"] == [
        "WRONG",
        "prompt 1",
    ]
    architectures.enter("gpt2", {"error": "it is unknown"}, versions=versions)
    text = architectures.README.read_text()
    assert "<!-- releases -->" in text
    (shown,) = architectures.PLACE.findall(text)
    lines = shown.splitlines()
    at = lines.index("vLLM 9.9.0 on a CPU, transformers 8.8.0:")
    row, other = (lines[at + n].strip("| ").split(" | ") for n in (4, 5))
    assert row[:3] == ["Llama", "some; linear attention x 2", "right"]
    assert [other[0], other[2]] == ["gpt2", other[3]]
    reasons = [each[each.index("(") + 1 : -1] for each in (row[3], row[4], other[2])]
    for number, sentence in zip(
        reasons,
        ["28 names do not fit: a: wanted int8", "two groups; none moved", "it is unknown"],
        strict=True,
    ):
        assert f"{number}. {sentence}" in lines
