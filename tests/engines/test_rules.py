"""A publisher's choices are judged when they are made, not when a round hangs on them."""

from __future__ import annotations

import pytest

from wtransfer.weight_sync.trainer.rules import Rules


@pytest.mark.parametrize("num", [0, -3, True, 1.0, "1", None])
def test_fewer_than_one_worker_cannot_be_asked_for(num):
    with pytest.raises(ValueError, match=r"min_workers is .*, expected an integer >= 1"):
        Rules(min_workers=num)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "5", True, None])
def test_a_deadline_is_a_time_that_will_come(seconds):
    with pytest.raises(ValueError, match=r"deadline_s is .*, expected a finite number"):
        Rules(deadline_s=seconds)


def test_the_smallest_choices_are_taken():
    assert Rules(min_workers=1, deadline_s=1) == Rules(deadline_s=1.0)
