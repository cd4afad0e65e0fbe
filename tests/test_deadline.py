"""One object says how long still."""

from __future__ import annotations

import time

import pytest

from wtransfer.deadline import Deadline
from wtransfer.errors import StallError


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
