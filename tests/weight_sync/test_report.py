"""The report of a round as text: its table, and its stages as bars."""

import dataclasses

import pytest

from wtransfer.weight_sync.report import Report, WorkerReport


def report_of(seconds, **workers):
    reports = tuple(
        WorkerReport(name, name, 0, "committed", "v1", "f", seconds=of_worker)
        for name, of_worker in workers.items()
    )
    total = {**seconds, "total": sum(seconds.values())}
    return Report("v1", "f", "r", 4, reports, total, 0.0)


def stages(seconds, **workers):
    return report_of(seconds, **workers).stages().splitlines()


def test_stages_are_as_long_as_their_seconds_on_one_scale():
    publisher, slow, fast, legend = stages(
        {"transfer": 2.0, "commit": 1.0},
        slow={"transfer": 1.0, "verify": 0.5},
        fast={"transfer": 0.25, "commit": 0.05},
    )
    assert publisher == f"publisher  {'t' * 40}{'c' * 20}  3.000 s"
    assert slow == f"slow       {'t' * 20}{'v' * 10}{' ' * 30}  1.500 s"
    assert fast == f"fast       {'t' * 5}c{' ' * 54}  0.300 s"
    assert legend == "           t transfer  c commit  v verify"


def test_a_bar_of_many_short_stages_is_as_long_as_their_sum():
    seconds = {f"{letter}{letter}": 0.49 / 60 for letter in "abcdefghijklmnopqrst"} | {
        "u": 50.2 / 60
    }
    publisher, _ = stages(seconds)
    bar = publisher.removeprefix("publisher  ").split()[0]
    assert (len(bar), bar.count("u")) == (60, 50)


def test_each_stage_has_a_letter_of_its_own():
    *_, legend = stages({"plan": 1.0, "prepare": 1.0, "ppp": 1.0})
    assert legend.strip().split("  ") == ["p plan", "r prepare", "? ppp"]


def test_a_worker_without_stages_has_no_bar_and_no_name_steers_the_terminal():
    lines = stages({"init": 0.0}, late={}, **{"w\x1b[2J": {"accept": 0.0}})
    assert [line.split()[0] for line in lines[:-1]] == ["publisher", "w\\x1b[2J"]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e308, -1.0, -float("inf")])
def test_a_number_of_seconds_that_is_none_counts_as_0(number):
    _, bar, legend = stages({"init": 0.0}, w={"a": number, "b": number, "c": 2.0})
    assert bar == f"w          {'c' * 60}  2.000 s"
    assert legend.strip() == "i init  a a  b b  c c"


@pytest.mark.parametrize(
    ("stage", "drawn"),
    [
        ("", "?"),
        ("a\nb", "a a\\nb"),
        (" verify", "v  verify"),
        ("\x1b[2J", "x \\x1b[2J"),
        ("---", "? ---"),
    ],
)
def test_a_stage_of_any_name_has_a_letter_and_cannot_steer_the_terminal(stage, drawn):
    _, bar, legend = stages({"init": 0.0}, w={stage: 1.0})
    assert bar == f"w          {drawn[0] * 60}  1.000 s"
    assert legend.strip() == f"i init  {drawn}".strip()


def test_table_of_a_report_cannot_steer_the_terminal():
    lines = str(report_of({"init": 0.0}, **{"w\x1b[2J": {"\nstage": 1.0}})).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["publisher", "w\\x1b[2J"]
    assert "\\nstage 1.000s" in lines[-1]


def test_label_of_a_report_cannot_steer_the_terminal():
    report = dataclasses.replace(report_of({"init": 0.0}), version="v\n1\x1b[2J\N{SNOWMAN}")
    head, *_ = str(report).splitlines()
    assert head.startswith("v\\n1\\x1b[2J\N{SNOWMAN}  ")
