"""FAULTS 11: two trainers at once."""

from __future__ import annotations

import pytest

from wtransfer.errors import AddressInUseError
from wtransfer.transport.address import random_address


def test_the_second_trainer_is_refused_with_holder_and_age(flow, failing):
    home = {"token": "shared"}
    first = flow.trainer(**home)
    second = flow.trainer(**home)
    worker = flow.worker(trainer=first)
    worker.ask("join", address=second.ask("where")["address"])
    holder = first.ask("where")["address"]
    first.ask("wait", n=1)
    second.ask("wait", n=1)
    worker.witness.hold("transfer")
    round_id = first.ask("begin", number=1)
    worker.until_held()
    with failing("RoundBusyError") as busy:
        second.ask("publish", number=2)
    assert holder in busy.error.text
    assert round_id in busy.error.text
    assert " s old" in busy.error.text
    assert worker.name == busy.worker
    worker.go_on()
    assert first.ask("result")["ok"]
    flow.holds(worker, 1)
    # The first one is done: now the second may.
    assert second.ask("publish", number=3)["ok"]
    flow.holds(worker, 3)


def test_one_publisher_refuses_its_own_second_round(flow, failing):
    trainer = flow.trainer()
    worker = flow.worker(hold="transfer")
    trainer.ask("wait", n=1)
    round_id = trainer.ask("begin", number=1)
    worker.until_held()
    with failing("RoundBusyError") as busy:
        trainer.ask("publish", number=2)
    assert round_id in busy.error.text
    assert "under way since" in busy.error.text
    worker.go_on()


def test_a_second_trainer_cannot_listen_where_one_listens(flow):
    from wtransfer.weight_sync.trainer.publisher import Publisher

    home = {"listen": random_address(), "token": "t"}
    flow.trainer(**home)
    with pytest.raises(AddressInUseError, match=home["listen"]):
        Publisher({}, **home)
