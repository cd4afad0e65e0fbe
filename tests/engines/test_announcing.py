"""Announcements run beside the sending, and belong to their round."""

from __future__ import annotations

import threading

import pytest

from wtransfer.engines.announcing import Announcer
from wtransfer.engines.sender import RoundClient
from wtransfer.errors import NotInitializedError, RoundAbortedError


class SomeRound:
    """What a client needs of a round."""

    def __init__(self):
        self.delivered = []
        self.failed = False

    def deliver(self, info):
        if self.failed:
            raise RoundAbortedError("the round is over")
        self.delivered.append(info)


class PlainClient:
    """A serving engine's own client."""

    def __init__(self):
        self.got = []

    def update_weights(self, info):
        self.got.append(info)


def test_an_announcement_that_is_late_does_not_reach_the_next_round():
    client, old, new = RoundClient(), SomeRound(), SomeRound()
    held, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def prepare(_info):
        held.set()
        go_on.wait(5.0)
        ended.set()

    client.attach(old)
    announcer = Announcer(client, prepare=prepare)
    announcer.announce({"bucket": 1})
    assert held.wait(5.0)
    announcer.__exit__(OSError, OSError("the disk"), None)
    old.failed = True
    client.attach(new)
    go_on.set()
    assert ended.wait(5.0)
    with pytest.raises(RoundAbortedError, match="the round is over"):
        announcer.wait()
    assert (old.delivered, new.delivered) == ([], [])


def test_a_client_without_rounds_is_called_as_it_is():
    client = PlainClient()
    with Announcer(client) as announcer:
        announcer.announce({"bucket": 1})
    assert client.got == [{"bucket": 1}]


def test_a_client_that_has_no_round_yet_has_none_to_stay_with():
    with pytest.raises(NotInitializedError, match="no round yet"):
        RoundClient().of_this_round()
