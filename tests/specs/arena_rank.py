"""One rank in a process of its own, which does what it is told over a socket."""

from __future__ import annotations

import json
import os
import socket

import numpy as np
import torch
from arena_rig import Rig, key

from wtransfer.errors import to_wire
from wtransfer.kv.header import BlockHeader
from wtransfer.specs.arena import SharedRegion

MAX_DATAGRAM = 1 << 16


def main(address):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        rank = Rank()
        while datagram := connection.recv(MAX_DATAGRAM):
            order, options = json.loads(datagram)
            try:
                reply = {"value": getattr(rank, order)(**options)}
            except Exception as error:
                kind, text, _ = to_wire(error)
                reply = {"error": [kind, text]}
            connection.send(json.dumps(reply).encode())


class Rank:
    """Orders are its methods."""

    def open(self, **options):
        self.rig = Rig(**options)
        return os.fstat(self.rig.part.segment.fd).st_ino

    def close(self):
        self.rig.close()

    def write(self, number):
        """Give block 0 the bytes that belong to a number."""
        for at, tensor in enumerate(self.rig.tensors):
            tensor[0] = torch.from_numpy(self.bytes_of(number, at))

    def bytes_of(self, number, layer):
        nbytes = self.rig.tensors[0][0].nbytes
        rank = self.rig.part.rank
        return (np.arange(nbytes) * 7 + number * 31 + layer + 100 * rank).astype(np.uint8)

    def store(self, number, slot):
        self.write(number)
        return self.rig.store([0], [slot], [key(number)]).success

    def load(self, number, slot):
        """Return whether the load succeeded, and whether the bytes are those of the number."""
        for tensor in self.rig.tensors:
            tensor[1] = 0
        success = self.rig.load([1], [slot], [key(number)]).success
        right = all(
            np.array_equal(tensor[1].numpy(), self.bytes_of(number, at))
            for at, tensor in enumerate(self.rig.tensors)
        )
        return success, right

    def num_slots(self):
        return self.rig.part.layout.num_slots

    def failures(self):
        return self.rig.failures()

    def churn(self, start):
        """Store for ever, into one slot after the other."""
        num_slots = self.rig.part.layout.num_slots
        for number in range(start, 1 << 30):
            self.store(number, number % num_slots)

    def num_headers_of(self, rank):
        """Return how many slots another rank has filled, seen from here."""
        part = self.rig.part
        other = SharedRegion(part.segment, part.layout, rank)
        return int(other._headers.any(axis=1).sum())

    def look(self):
        """Judge every slot by its header alone: whole, without a header, or wrong."""
        found = {"whole": 0, "empty": 0, "begun": 0, "wrong": 0}
        part = self.rig.part
        for slot in range(part.layout.num_slots):
            header = BlockHeader.unpack(part._headers[slot].tobytes())
            if isinstance(header, BlockHeader):
                number = int(header.key[22:-4])
                wanted = [self.bytes_of(number, at) for at in range(len(self.rig.tensors))]
                whole = np.array_equal(part.slots[slot], np.concatenate(wanted))
                found["whole" if whole else "wrong"] += 1
            elif header == "absent":
                found["begun" if part.slots[slot].any() else "empty"] += 1
            else:
                found["wrong"] += 1
        return found
