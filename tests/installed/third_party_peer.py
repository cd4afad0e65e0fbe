"""A publisher or a worker in a process of its own, ordered about over stdin, answering in JSON.

Usage: third_party_peer.py publisher FOLDER | worker NAME ADDRESS   (token in WTRANSFER_TOKEN)
"""

import contextlib
import importlib
import json
import sys
import threading

import torch

import wtransfer
from wtransfer.testing.contents import contents

ENGINE = "acme-file"
TENSORS = {
    "embed": torch.arange(4096.0).view(64, 64),
    "norm": torch.ones(64, dtype=torch.bfloat16),
    "step": torch.tensor(0),
}


def answer(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def fill(tensors, number):
    """Make every element a function of the version's number."""
    for tensor in tensors.values():
        tensor.fill_(number)


class PublisherPeer:
    def __init__(self, folder):
        self.tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
        self.publisher = wtransfer.Publisher(
            self.tensors, engine=ENGINE, options={"folder": folder}, deadline_s=10.0
        )
        answer(address=self.publisher.address)

    def wait(self, num_workers):
        self.publisher.wait_for_workers(int(num_workers), 20)
        answer(workers=len(self.publisher.workers()))

    def publish(self, number):
        fill(self.tensors, int(number))
        try:
            report = self.publisher.publish(f"v{number}")
        except wtransfer.WTransferError as error:
            kinds = [cls.__name__ for cls in type(error).__mro__]
            answer(kinds=kinds, text=str(error), worker=error.worker, piece=error.piece)
        else:
            answer(
                ok=report.ok,
                contents=contents(self.tensors),
                fingerprint=report.fingerprint,
                outcomes={each.worker: each.outcome for each in report.workers},
                errors={each.worker: repr(each.error) for each in report.workers},
                proven=[each.digests_equal for each in report.workers],
            )

    def close(self):
        self.publisher.close()
        answer(closed=True)


class WorkerPeer:
    def __init__(self, name, address):
        self.tensors = {key: torch.full_like(tensor, 99) for key, tensor in TENSORS.items()}
        self.session = wtransfer.WorkerSession(
            self.tensors, join=address, name=name, engines=[ENGINE], deadline_s=5.0
        )
        self.serving = threading.Thread(target=self.serve, daemon=True)
        self.serving.start()
        answer(worker=name)

    def serve(self):
        """Step, and commit between two steps."""
        with contextlib.suppress(wtransfer.errors.ClosedError):
            while True:
                self.session.commit_pending(0.02)

    def state(self):
        answer(
            version=self.session.version,
            fingerprint=self.session.fingerprint,
            contents=contents(self.tensors),
        )

    def damage(self, what):
        """Make the engine's *reader* lose or change a tensor, once, outside of the engine."""
        module = importlib.import_module("acme_file_engine.worker")
        real = module.safe_open

        class Damaged:
            def __init__(self, *arguments, **options):
                module.safe_open = real
                self.opened = real(*arguments, **options)

            def __enter__(self):
                self.reader = self.opened.__enter__()
                return self

            def __exit__(self, *error):
                return self.opened.__exit__(*error)

            def keys(self):
                return [k for k in self.reader.keys() if what != "drop" or k != "norm"]  # noqa: SIM118 - no mapping

            def get_tensor(self, name):
                tensor = self.reader.get_tensor(name).clone()
                if what == "flip" and name == "norm":
                    tensor.view(torch.uint8)[3] ^= 1
                return tensor

        module.safe_open = Damaged
        answer(damaged=what)

    def close(self):
        self.session.close()
        self.serving.join(5)
        answer(closed=True)


peer = {"publisher": PublisherPeer, "worker": WorkerPeer}[sys.argv[1]](*sys.argv[2:])
for line in sys.stdin:
    order, *arguments = line.split()
    getattr(peer, order)(*arguments)
    if order == "close":
        break
