"""The process of one rank: takes steps until its scheduler hangs up."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import torch

from wtransfer.demo.serving.build import make_worker
from wtransfer.demo.serving.messages import Ready, StepPlan
from wtransfer.demo.serving.remote import HOST, PATIENCE_S, Line, Start
from wtransfer.errors import PeerLostError
from wtransfer.transport.auth import check_same_user
from wtransfer.transport.process_group import GlooCommunicator
from wtransfer.transport.rendezvous import join_rendezvous

if TYPE_CHECKING:
    from wtransfer.demo.serving.worker import ServingWorker


def main(address: str) -> None:
    """Be a rank.

    Args:
        address: Of the scheduler's socket.
    """
    torch.set_num_threads(1)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    check_same_user(connection)
    line = Line(connection, "the scheduler")
    worker = _worker(line.receive(Start))
    line.wait_for_ever()
    try:
        line.send(Ready(worker.handshake()))
        while True:
            line.send(worker.step(line.receive(StepPlan)))
    except PeerLostError:
        return
    finally:
        worker.close()
        line.close()


def _worker(start: Start) -> ServingWorker:
    if start.meeting is None:
        return make_worker(start.settings)
    rendezvous = join_rendezvous(HOST, start.meeting.port, start.meeting.name)
    group = GlooCommunicator(
        rendezvous, start.rank, start.settings.num_ranks, host=HOST, timeout_s=PATIENCE_S
    )
    return make_worker(start.settings, group)
