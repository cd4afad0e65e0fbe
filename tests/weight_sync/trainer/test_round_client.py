"""Announcements run beside the sending, and belong to their round."""

from __future__ import annotations

import contextvars
import threading

import pytest

from wtransfer.calls import Announcer
from wtransfer.errors import NotInitializedError, RoundAbortedError
from wtransfer.weight_sync.trainer import engine_runner
from wtransfer.weight_sync.trainer.engine_runner import RoundClient


class SomeRound:
    """What a client needs of a round."""

    def __init__(self):
        self.delivered = []
        self.failed = False

    def deliver(self, info):
        if self.failed:
            raise RoundAbortedError("the round is over")
        self.delivered.append(info)


def test_an_announcement_that_is_late_does_not_reach_the_next_round():
    client, old, new = RoundClient(), SomeRound(), SomeRound()
    held, go_on, outcome = threading.Event(), threading.Event(), []

    def tell(info):
        held.set()
        go_on.wait(5.0)
        try:
            client.update_weights(info)
        except RoundAbortedError as error:
            outcome.append(error)
            raise

    def send():
        engine_runner._ROUND.set(old)
        announcer = Announcer(tell)
        announcer.announce({"bucket": 1})
        assert held.wait(5.0)
        announcer.__exit__(OSError, OSError("the disk"), None)
        return announcer

    client.attach(old)
    announcer = contextvars.copy_context().run(send)
    old.failed = True
    client.attach(new)
    go_on.set()
    with pytest.raises(RoundAbortedError, match="the round is over"):
        announcer.wait()
    assert len(outcome) == 1
    assert (old.delivered, new.delivered) == ([], [])


def test_a_client_without_a_round_says_so():
    with pytest.raises(NotInitializedError, match="no round yet"):
        RoundClient().update_weights({})
