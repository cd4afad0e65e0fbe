"""What children of the tests do; some of it is wrong on purpose."""

import os
import signal
import time
from pathlib import Path

from wtransfer.bench.jobs import publishing, tell, timing, unverified


def say(rank, address, token, store, num_workers, **given):
    tell(rank=rank, num_workers=num_workers, given=given)


def say_twice(**_):
    tell(number=1)
    tell(number=2)


def return_at_once(**_):
    pass


def wait(seconds=60.0, **_):
    time.sleep(seconds)


def fail(**_):
    raise ValueError("out of ink")


def kill_self(**_):
    os.kill(os.getpid(), signal.SIGKILL)


def count_starts(store, rank, **_):
    """The trainer waits until three workers have been there; each of them is killed."""
    if rank:
        with Path(store).open("a") as file:
            file.write("x")
        kill_self()
    while len(Path(store).read_text()) < 3:
        time.sleep(0.01)
    tell(starts=len(Path(store).read_text()))


def tell_pid(rank, store, **_):
    """The trainer ends with the first worker's pid; that one stays."""
    if rank:
        Path(store).write_text(str(os.getpid()))
        time.sleep(60)
    while not (pid := Path(store).read_text()):
        time.sleep(0.01)
    tell(pid=int(pid))


def send_but_one(**keywords):
    """A way to send that forgets the last tensor."""

    def send(sending):
        for tensor in list(sending.tensors.values())[:-1]:
            sending.group.finish(sending.group.broadcast(tensor))

    timing.time_rounds(send, **keywords)


def publish_without_switching_off(**keywords):
    publishing.switch_off = lambda: None
    publishing.publish(**keywords)


def publish_the_same(**keywords):
    publishing.renew = lambda *_: None
    publishing.publish(**keywords)


def digest_two(**_):
    """Tell digests of two tensors, with the digests switched off."""
    import torch

    from wtransfer.transport.digests import copy_digest, digest

    unverified.switch_off()
    small, large = torch.ones(8), torch.ones(1 << 20)
    memory = torch.zeros(large.nbytes, dtype=torch.uint8).numpy()
    tell(digests=[digest(small), digest(large), copy_digest(memory, large).hexdigest])


def join_verified(**keywords):
    from wtransfer.bench.jobs import joining

    joining.join(**(keywords | {"verified": True}))
