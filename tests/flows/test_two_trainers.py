"""FAULTS 11: two trainers at once."""

from __future__ import annotations

import pytest

from wtransfer.errors import AddressInUseError
from wtransfer.transport.address import random_address


def test_second_trainer_is_refused_while_the_first_is_connected(flow, failing):
    home = {"token": "shared"}
    first, second = flow.trainer(**home), flow.trainer(**home)
    address = second.ask("where")["address"]
    worker = flow.worker(trainer=first)
    first.ask("wait", n=1)
    worker.witness.hold("transfer")
    first.ask("begin", number=1)
    worker.until_held()
    with failing("RoundBusyError") as busy:
        worker.ask("join", address=address)
    assert first.ask("where")["address"] in busy.error.text
    assert "connected for " in busy.error.text
    worker.go_on()
    assert first.ask("result")["ok"]
    flow.holds(worker, 1)
    # Lost, it is replaced.
    first.kill()
    flow.until(lambda: not worker.look()["connected"])
    worker.ask("join", address=address)
    second.ask("wait", n=1)
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
