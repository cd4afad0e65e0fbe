"""FAULTS 9: a trainer and a worker of different protocol versions."""

from __future__ import annotations

import pytest

from wtransfer.transport.handshake import PROTOCOL


@pytest.mark.parametrize(("of_trainer", "of_worker"), [(0, 1), (1, 0)])
def test_both_sides_refuse_and_name_both_versions(flow, failing, of_trainer, of_worker):
    trainer = flow.trainer(protocol_step=of_trainer)
    worker = flow.worker(protocol_step=of_worker)
    flow.until(lambda: worker.look()["refusal"])
    refusal = worker.look()["refusal"]
    assert "ProtocolError" in refusal["classes"]
    versions = {str(PROTOCOL + of_trainer), str(PROTOCOL + of_worker)}
    assert versions <= set(_words(refusal["text"]))
    assert not worker.look()["connected"]
    with failing("NoWorkersError"):
        trainer.ask("publish", number=1)
    # Each side hears of the other by itself.
    flow.until(lambda: trainer.ask("refusal") is not None)
    told = trainer.ask("refusal")
    assert "ProtocolError" in told["classes"]
    assert versions <= set(_words(told["text"]))


def test_the_same_versions_agree(flow):
    trainer = flow.trainer(protocol_step=1)
    worker = flow.worker(protocol_step=1)
    trainer.ask("wait", n=1)
    assert trainer.ask("publish", number=1)["ok"]
    flow.holds(worker, 1)


def _words(text):
    return text.replace(",", " ").replace(";", " ").split()
