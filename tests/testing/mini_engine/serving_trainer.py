"""A trainer in a process of its own: publishes the weights of any seed, when ordered."""

from __future__ import annotations

import json
import socket

import torch

from wtransfer.testing.mini_engine.config import ModelShape
from wtransfer.testing.mini_engine.model import PagedTransformer
from wtransfer.weight_sync.trainer.publisher import Publisher


def main(address):
    torch.set_num_threads(1)
    model = PagedTransformer(ModelShape(), 0)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line,
        Publisher(model, engine="shm") as publisher,
    ):
        line.connect(address)
        line.send(json.dumps([publisher.address, publisher.token]).encode())
        while (order := json.loads(line.recv(1 << 16))) is not None:
            publisher.wait_for_workers(order["num_workers"], 20.0)
            model.draw_weights(order["seed"])
            report = publisher.publish(order["label"])
            line.send(json.dumps([report.ok, report.fingerprint]).encode())
        publisher.close()
        line.send(b"[]")
