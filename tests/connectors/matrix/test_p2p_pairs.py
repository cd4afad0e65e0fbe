"""Two P2P connectors under one connector."""

from __future__ import annotations

import pytest
from matrix_stacks import describe
from matrix_watch import Watch

ORDERS = pytest.mark.parametrize(("near", "far"), [("shm", "group"), ("group", "shm")])
TEXT = [*range(100, 172)]
WHOLE = len(TEXT) // 16 * 16


@ORDERS
@pytest.mark.parametrize("sender_first", [False, True], ids=["receives first", "sends first"])
def test_blocks_that_one_p2p_connector_loaded_are_handed_over_by_the_other(
    host, kit, near, far, sender_first
):
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
        assert request.output == kit.reference(text, count=2)
        watch.check(request)
        assert made.scheduler.counts["tokens_loaded"] == loaded
        told = request.kv_transfer_params or {}
    assert told == {}


@ORDERS
def test_only_the_first_of_them_hands_a_request_over(host, near, far, caplog):
    """It carries one address; a request that asks for it must not end the host."""
    made = host([describe(near, "kv_both"), describe(far, "kv_both")])
    for _ in range(2):
        request = made.submit(TEXT, 1, {"do_remote_decode": True})
        made.run()
        scheme = {"shm": "unix:", "group": "tcp:"}[near]
        (address,) = request.kv_transfer_params["remote_addresses"]
        assert address.startswith(scheme)
    assert caplog.text.count("only one of them can hand requests over") == 1
