"""The verdict falls whatever single promise is broken, and names it."""

from dataclasses import replace

import pytest

from wtransfer.demo.kv.verdict import judge


def broken(story, num_shared):
    return [number for number, check in enumerate(judge(story, num_shared)) if not check.kept]


def test_all_is_as_promised(story, num_shared):
    assert broken(story, num_shared) == []
    assert len(judge(story, num_shared)) == 5


@pytest.mark.parametrize(
    ("place", "facts", "expected"),
    [
        (1, {"tokens": [1, 2, 9]}, [0]),
        (1, {"tokens": [], "expected": []}, [0]),
        (1, {"num_expected_computed": 129}, [0]),
        (0, {"num_loaded": 95}, [1]),
        (0, {"num_loaded": 0, "num_cached": 130}, [1]),
        (2, {"tokens": [0]}, [0, 2]),
        (3, {"tokens": [1]}, [0, 2]),
        (5, {"num_loaded": 0}, [3]),
    ],
)
def test_one_prompt_that_is_not_as_promised_fails_it(story, num_shared, place, facts, expected):
    story.rows[place] = replace(story.rows[place], **facts)
    assert broken(story, num_shared) == expected


@pytest.mark.parametrize(("place", "expected"), [(0, [1]), (2, [2]), (3, [2]), (5, [3])])
def test_a_part_of_the_story_that_is_missing_fails_it(story, num_shared, place, expected):
    del story.rows[place]
    assert broken(story, num_shared) == expected


@pytest.mark.parametrize("exits", [{}, {"decode": [0, 1]}, {"prefill": [-9]}])
def test_a_process_that_does_not_end_well_fails_it(story, num_shared, exits):
    story.exits = exits
    assert broken(story, num_shared) == [4]


def test_nothing_at_all_keeps_no_promise(story, num_shared):
    story.rows, story.exits = [], {}
    assert broken(story, num_shared) == [0, 1, 2, 3, 4]
