"""One object says how long still."""

from __future__ import annotations

import time

import pytest

from wtransfer.deadline import Deadline
from wtransfer.errors import StallError


def test_time_left_shrinks_and_never_falls_below_zero():
    deadline = Deadline(0.02)
    assert 0.0 < deadline.remaining() <= 0.02
    assert not deadline.expired
    time.sleep(0.03)
    assert deadline.remaining() == 0.0
    assert deadline.expired


def test_checking_in_time_does_nothing():
    Deadline(60.0).check("anything")


def test_checking_late_says_what_was_waited_for():
    with pytest.raises(
        StallError, match=r"no progress on the plan within 0 s \[worker w0\]"
    ) as late:
        Deadline(0.0).check("the plan", worker="w0")
    assert (late.value.seconds, late.value.worker) == (0.0, "w0")
    assert isinstance(late.value, TimeoutError)


def test_a_restart_allows_the_whole_time_again():
    deadline = Deadline(60.0)
    time.sleep(0.01)
    before = deadline.remaining()
    deadline.restart()
    assert deadline.remaining() > before
