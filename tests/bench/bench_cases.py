"""What processes of the tests run; some of it is wrong on purpose."""

import os
import signal
import time
from pathlib import Path

import numpy as np
from torch import distributed as dist

from wtransfer.bench import connectors, weights
from wtransfer.bench.harness import Outcome


class Prepared:
    """A runner whose cases have been run."""

    def __init__(self, trainer, *workers):
        self.run = lambda *_, **__: Outcome(trainer, list(workers))


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


def publish_the_same(setup, **keywords):
    weights.renew = lambda *_: None
    return weights.publish(setup, **keywords)


# -- connectors


def decode(setup, seen=None, **keywords):
    return connectors.decode(setup, **keywords)


def prefill_and_die(setup, seen=None, **keywords):
    """Die after the first round was saved; tell before that which files there are."""

    class Mortal(connectors.Instance):
        def serve(self, *arguments):
            super().serve(*arguments)
            if seen:
                files = [str(path) for path in Path(setup.folder, "kv").rglob("*")]
                Path(seen).write_text("\n".join(files))
            kill_self(setup)

    connectors.Instance = Mortal
    connectors.prefill(setup, **keywords)


def prefill_another_page(setup, **keywords):
    """Save a page that is not what it should be: the connector cannot know."""
    pages_of = connectors.StampModel._pages

    def pages_with_another(*arguments):
        *pages, (mark, page) = pages_of(*arguments)
        return [*pages, (mark ^ np.uint64(1), page)]

    connectors.StampModel._pages = pages_with_another
    connectors.prefill(setup, **keywords)


def prefill_one_block_less(setup, num_blocks, **keywords):
    connectors.prefill(setup, num_blocks=num_blocks - 1, **keywords)
