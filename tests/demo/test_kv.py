"""The checks of the KV demo: one tampered run for each thing that they look at."""

from dataclasses import replace

import pytest

from wtransfer.demo.kv import Row, judge

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
        prefill_s=None if prefill == "gone" else 0.2,
        first_token_s=0.01,
        load_s=0.004 if num_loaded else None,
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
        (0, None, [LOADS]),
        (2, {"tokens": [0]}, [SAME, SURVIVES]),
        (2, None, [SURVIVES]),
        (3, None, [SURVIVES]),
        (5, {"num_loaded": 0}, [RETURNS]),
        (5, None, [RETURNS]),
    ],
)
def test_a_tampered_or_missing_prompt_fails_its_check(rows, index, changes, expected):
    rows[index : index + 1] = [replace(rows[index], **changes)] if changes else []
    assert failed(rows) == expected


@pytest.mark.parametrize("exits", [{}, {"decode": [0, 1]}])
def test_a_process_that_does_not_end_well_fails_the_run(rows, exits):
    assert failed(rows, exits) == [EXITS]


def test_a_row_shows_what_was_loaded_and_what_that_saved(rows):
    assert rows[0].cells() == (
        *("1", "alive", "130", "96", "34"),
        *("200", "10", "300", "4", "yes"),
    )
    assert rows[2].cells()[-2:] == ("-", "yes")
    assert replace(rows[0], tokens=[7]).cells()[-1] == "NO"
