"""The process of one rank: takes steps until its scheduler hangs up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from wtransfer.testing.mini_engine.line import PATIENCE_S, call
from wtransfer.testing.mini_engine.messages import Ready
from wtransfer.testing.mini_engine.remote import HOST, Order, Start
from wtransfer.testing.mini_engine.sole_worker import make_sole_worker
from wtransfer.transport.process_group import GlooCommunicator
from wtransfer.transport.rendezvous import join_rendezvous

if TYPE_CHECKING:
    from wtransfer.testing.mini_engine.line import Line
    from wtransfer.testing.mini_engine.worker import ServingWorker

_STARTS = msgspec.msgpack.Decoder(Start)
_ORDERS = msgspec.msgpack.Decoder(Order)


def main(address: str) -> None:
    """Be a rank.

    Args:
        address: Of the scheduler's socket.
    """
    torch.set_num_threads(1)
    with call(address, "the scheduler") as line:
        _serve(line)


def _serve(line: Line) -> None:
    worker = _worker(line.receive(_STARTS))
    try:
        line.wait_for_ever()
        line.send(Ready(worker.handshake()))
        while True:
            plan = line.receive(_ORDERS).plan
            line.send(worker.get_stats() if plan is None else worker.step(plan))
    finally:
        worker.close()


def _worker(start: Start) -> ServingWorker:
    if start.meeting is None:
        return make_sole_worker(start.settings)
    rendezvous = join_rendezvous(HOST, start.meeting.port, start.meeting.name)
    group = GlooCommunicator(
        rendezvous, start.rank, start.settings.num_ranks, host=HOST, timeout_s=PATIENCE_S
    )
    return make_sole_worker(start.settings, group)
