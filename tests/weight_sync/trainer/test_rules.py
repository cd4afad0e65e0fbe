"""A publisher's choices are judged when they are made, not when a round hangs on them."""

from __future__ import annotations

import pytest

from wtransfer import Publisher


@pytest.mark.parametrize("num", [0, -3, True, 1.0, "1", None])
def test_fewer_than_one_worker_cannot_be_asked_for(num):
    with pytest.raises(ValueError, match=r"min_workers is .*, expected an integer >= 1"):
        Publisher({}, min_workers=num)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "5", True, None])
def test_a_deadline_is_a_time_that_will_come(seconds):
    with pytest.raises(ValueError, match=r"deadline_s is .*, expected a finite number"):
        Publisher({}, deadline_s=seconds)


@pytest.mark.parametrize("name", ["on_lost_worker", "nonfinite"])
def test_a_policy_that_does_not_exist_is_refused_with_those_that_do(name):
    with pytest.raises(ValueError, match=rf"{name} is 'maybe', expected one of '.*', '.*'"):
        Publisher({}, **{name: "maybe"})
