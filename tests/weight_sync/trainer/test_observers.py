"""Observers observe: what they do on a round's thread cannot hang it."""

from __future__ import annotations

import pytest

from wtransfer.errors import RoundBusyError
from wtransfer.registry import hooks


class Waiter:
    """Waits, in a hook of the round's thread, for the round itself."""

    def __init__(self):
        self.round = None
        self.raised = []

    @hooks.hookimpl
    def wtransfer_weights_committed(self, worker):
        if worker is None:
            for wait in (self.round.result, self.round.packed):
                with pytest.raises(RoundBusyError, match="on the round's own thread") as caught:
                    wait()
                self.raised.append(caught.value)


def test_an_observer_that_waits_for_its_own_round_is_told_so(fleet, weights):
    made = fleet(weights, engine="shm")
    made.join()
    waiter = Waiter()
    hooks.register(waiter)
    try:
        waiter.round = made.publisher.publish("v1", wait=False)
        assert made.finish(waiter.round).ok
    finally:
        hooks.unregister(waiter)
    assert len(waiter.raised) == 2
