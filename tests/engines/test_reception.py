"""A worker's part of one round, where its threads meet in an awkward order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from wtransfer.manifest import Manifest
from wtransfer.transport.layout import TensorLayout
from wtransfer.weight_sync.messages import Plan
from wtransfer.weight_sync.worker.hosted import HostedEngine
from wtransfer.weight_sync.worker.ledger import Ledger
from wtransfer.weight_sync.worker.reception import Reception


@pytest.fixture
def engine():
    hosted = HostedEngine(0, 1, None)
    yield hosted
    hosted.shutdown()


def test_a_round_that_ends_while_it_claims_the_session_leaves_it_free(engine):
    ledger, sent = Ledger(), []
    reception = Reception(
        Plan("dead", "v1", Manifest(())),
        Manifest(()),
        engine,
        layout_of=TensorLayout,
        session=SimpleNamespace(name="w", schema=dict, cast=False, cast_hint=""),
        notes=[],
        send=sent.append,
        on_error=lambda _error: None,
        on_over=lambda: ledger.free("dead"),
    )

    def claim_at_the_last_moment():
        # The channel's thread ends the round between the look at it and the claim.
        reception.end("the publisher was lost")
        ledger.claim(None, "dead", "v1")

    reception.start(claim_at_the_last_moment)
    assert engine.submit(lambda: None).wait(10)
    assert sent == []
    ledger.claim("another link", "next", "v2")
