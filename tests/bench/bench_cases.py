"""What processes of the tests run; some of it is wrong on purpose."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import distributed as dist

from wtransfer.bench import connectors, weights


def echo(setup, **keywords):
    return [setup.rank, setup.num_workers, keywords]


def wait(_setup):
    time.sleep(60)


def fail(_setup):
    raise ValueError("out of ink")


def kill_self(_setup):
    os.kill(os.getpid(), signal.SIGKILL)


def count_starts(setup):
    """The trainer waits until three workers have been there; each of them is killed."""
    path = Path(setup.folder, "starts")
    if setup.rank:
        with path.open("a") as file:
            file.write("x")
        kill_self(setup)
    while not path.exists() or len(path.read_text()) < 3:
        time.sleep(0.01)
    return len(path.read_text())


def return_pid_of_worker(setup):
    """The trainer ends with the worker's pid; the worker stays."""
    path = Path(setup.folder, "pid")
    if setup.rank:
        path.write_text(str(os.getpid()))
        wait(setup)
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return int(path.read_text())


# -- weights


def broadcast_all_but_the_last(setup, **keywords):
    def send(tensors):
        for tensor in list(tensors.values())[:-1]:
            dist.broadcast(tensor, 0)

    return weights.time_rounds(send, setup, **keywords)


def publish_without_switching_off(setup, **keywords):
    weights.switch_digests_off = lambda: None
    return weights.publish(setup, **keywords)


def publish_the_same(setup, **keywords):
    weights.renew = lambda *_: None
    return weights.publish(setup, **keywords)


def digest_with_digests_off(_setup):
    from wtransfer.transport.digests import copy_digest, digest

    weights.switch_digests_off()
    small, large = torch.ones(8), torch.ones(1 << 20)
    memory = torch.zeros(large.nbytes, dtype=torch.uint8).numpy()
    return [digest(small), digest(large), copy_digest(memory, large).hexdigest]


# -- connectors


def prefill_and_die(setup, seen=None, **keywords):
    """Die after the first round was saved; tell before that which files there are."""

    class Mortal(connectors.Instance):
        def prefill(self, *arguments):
            super().prefill(*arguments)
            if seen:
                files = [str(path) for path in self._files.rglob("*") if path.is_file()]
                Path(seen).write_text("\n".join(files))
            os.kill(os.getpid(), signal.SIGKILL)

    connectors.Instance = Mortal
    connectors.prefill(setup, **keywords)


def decode_and_die(setup, **keywords):
    connectors.Instance.load = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return connectors.decode(setup, **keywords)


def prefill_one_other_byte(setup, **keywords):
    """Save a block of which one byte is not what it should be: the connector cannot know."""
    compute = connectors.KVCache.compute

    def compute_wrongly(self, number, block_ids):
        compute(self, number, block_ids)
        self.layers["layer.31"][block_ids[-1], -1] ^= 1

    connectors.KVCache.compute = compute_wrongly
    connectors.prefill(setup, **keywords)


def prefill_one_block_less(setup, **keywords):
    prompt = connectors.prompt
    connectors.prompt = lambda number, num_blocks: prompt(number, num_blocks - 1)
    connectors.prefill(setup, **keywords)
