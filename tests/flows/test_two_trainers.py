"""FAULTS 11: two trainers at once."""

from __future__ import annotations


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
