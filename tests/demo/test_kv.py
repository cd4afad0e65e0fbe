"""The checks of the KV demo: one tampered run for each thing that they look at."""

from dataclasses import replace

import pytest

from wtransfer.demo.kv import HEADER, Row, judge

NUM_SHARED = 96
SAME, LOADS, SURVIVES, RETURNS, EXITS = range(5)


def row(number, prefill="alive", num_loaded=NUM_SHARED):
    """Return a prompt for which everything is as promised."""
    return Row(
        number=number,
        prefill=prefill,
        num_prompt=130,
        num_loaded=num_loaded,
        num_computed=130 - num_loaded,
        nbytes=1000 * num_loaded,
        prefill_s=None if prefill == "gone" else 0.2,
        first_token_s=0.01,
        load_s=0.004 if num_loaded else None,
        memcpy_s=0.001 if num_loaded else None,
        fresh_s=0.3,
        tokens=[1, 2, number],
        expected=[1, 2, number],
        num_expected_computed=130,
    )


@pytest.fixture
def rows():
    return [row(1), row(2), row(3, "killed", 0), row(4, "gone", 0), row(5), row(6)]


def failed(rows, exits=None):
    exits = {"prefill": [0], "decode": [0, 0], "fresh": [0]} if exits is None else exits
    checks = judge(rows, exits, NUM_SHARED)
    return [number for number, check in enumerate(checks) if not check.kept]


def test_a_run_as_promised_is_accepted(rows):
    assert failed(rows) == []


def test_an_empty_run_keeps_no_promise():
    assert failed([], {}) == [SAME, LOADS, SURVIVES, RETURNS, EXITS]


@pytest.mark.parametrize(
    ("index", "changes", "expected"),
    [
        (1, {"tokens": [1, 2, 9]}, [SAME]),
        (1, {"tokens": [], "expected": []}, [SAME]),
        (1, {"num_expected_computed": 129}, [SAME]),
        (0, {"num_loaded": 95}, [LOADS]),
        (0, {"num_loaded": 0, "num_computed": 130}, [LOADS]),
        (2, {"tokens": [0]}, [SAME, SURVIVES]),
        (3, {"tokens": [1]}, [SAME, SURVIVES]),
        (5, {"num_loaded": 0}, [RETURNS]),
    ],
)
def test_a_tampered_prompt_fails_its_check_and_no_other(rows, index, changes, expected):
    rows[index] = replace(rows[index], **changes)
    assert failed(rows) == expected


@pytest.mark.parametrize(
    ("index", "expected"), [(0, [LOADS]), (2, [SURVIVES]), (3, [SURVIVES]), (5, [RETURNS])]
)
def test_a_missing_prompt_fails_its_check_and_no_other(rows, index, expected):
    del rows[index]
    assert failed(rows) == expected


@pytest.mark.parametrize("exits", [{}, {"decode": [0, 1]}, {"prefill": [-9]}])
def test_a_process_that_does_not_end_well_fails_the_run(rows, exits):
    assert failed(rows, exits) == [EXITS]


def test_a_row_shows_what_was_loaded_and_what_that_saved(rows):
    assert rows[0].cells() == (
        *("1", "alive", "130", "96", "34", "0.1"),
        *("200", "10", "300", "4", "0.250", "yes"),
    )
    assert rows[2].cells() == (
        *("3", "killed", "130", "0", "130", "-"),
        *("200", "10", "300", "-", "-", "yes"),
    )
    assert replace(rows[0], tokens=[7]).cells()[-1] == "NO"


def test_the_table_fits_a_terminal():
    assert len(HEADER) <= 80
