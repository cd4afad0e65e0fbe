"""Two relays under one connector: what goes, and what is refused."""

from __future__ import annotations

import pytest
from matrix_stacks import describe
from matrix_watch import Watch

from wtransfer.errors import ConnectorOptionError

ORDERS = pytest.mark.parametrize(("near", "far"), [("shm", "group"), ("group", "shm")])
TEXT = [*range(100, 172)]
WHOLE = len(TEXT) // 16 * 16


@ORDERS
@pytest.mark.parametrize("sender_first", [False, True], ids=["receives first", "sends first"])
def test_what_one_relay_has_brought_the_other_hands_on(host, kit, near, far, sender_first):
    """A host in the middle: to one neighbour there is shared memory, to the other a network."""
    begin, end = host([describe(near, "kv_producer")]), host([describe(far, "kv_consumer")])
    both = [describe(near, "kv_consumer"), describe(far, "kv_producer")]
    middle = host(both[::-1] if sender_first else both)
    told = {}
    for made, length, loaded in ((begin, 72, 0), (middle, 90, WHOLE), (end, 110, 80)):
        text = TEXT + list(range(length - len(TEXT)))
        with Watch(made, 2) as watch:
            told["do_remote_decode"] = made is not end
            request = watch.add(made.submit(text, 2, told))
            made.run()
        assert request.output == kit.truth(text, count=2)
        watch.check(request)
        assert made.scheduler.counts["tokens_loaded"] == loaded
        told = request.kv_transfer_params or {}
    assert told == {}


@ORDERS
def test_only_one_of_them_may_hand_a_request_over(host, near, far):
    """It carries one address; which one it should be is for the user to say."""
    made = host([describe(near, "kv_both"), describe(far, "kv_both")])
    made.submit(TEXT, 1, {"do_remote_decode": True})
    with pytest.raises(ConnectorOptionError, match="only one of them can hand requests over"):
        made.run()
