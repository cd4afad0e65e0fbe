"""Times to wait, as callers may give them."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from wtransfer.deadline import checked_timeout


@pytest.mark.parametrize("timeout_s", [math.nan, -1, -math.inf, "1", np.float32("nan")])
def test_a_time_that_is_none_is_refused_by_every_wait(fleet, weights, timeout_s):
    made = fleet(weights)
    session = made.join().session
    round_ = made.publisher.publish("v1", wait=False)
    for wait in (
        session.commit_pending,
        lambda given: asyncio.run(session.commit_pending_async(given)),
        lambda given: session.wait_for("v1", given),
        lambda given: made.publisher.wait_for_workers(9, given),
        round_.packed,
        round_.result,
    ):
        with pytest.raises(ValueError, match=r"timeout_s is .*, expected a number of seconds"):
            wait(timeout_s)
    assert made.finish(round_).ok


def test_no_limit_is_for_rounds_alone(fleet, weights):
    made = fleet(weights)
    session = made.join().session
    for wait in (
        session.commit_pending,
        lambda given: asyncio.run(session.commit_pending_async(given)),
        lambda given: session.wait_for("v1", given),
        lambda given: made.publisher.wait_for_workers(9, given),
    ):
        with pytest.raises(ValueError, match="timeout_s is None"):
            wait(None)
    assert checked_timeout(None, endless=True) is None


def test_infinity_is_a_wait_as_any(fleet, weights):
    made = fleet(weights)
    session = made.join().session
    made.publisher.wait_for_workers(1, math.inf)
    round_ = made.publisher.publish("v1", wait=False)
    assert asyncio.run(session.commit_pending_async(math.inf))
    round_.packed(math.inf)
    assert round_.result(math.inf).ok
    round_ = made.publisher.publish("v2", wait=False)
    session.wait_for("v2", math.inf)
    assert round_.result(np.float32(math.inf)).ok
    round_ = made.publisher.publish("v3", wait=False)
    assert session.commit_pending(math.inf)
    assert round_.result().ok
