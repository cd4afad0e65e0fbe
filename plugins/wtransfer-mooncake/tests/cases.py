"""What `test_tier.py` runs, each in a process and a network namespace of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
from wtransfer.errors import ClosedError, OffloadingOptionError
from wtransfer.specs.tier import open_tier
from wtransfer.testing.tier import TierConformance

from wtransfer_mooncake.tier import MooncakeError, MooncakeTier

MASTER = "127.0.0.1:50051"
OPTIONS = {"master": MASTER, "segment_bytes": 64 << 20}
NBYTES = 1 << 20
PATIENCE_S = 60.0
"""Of the longest call: the store's own deadline is 30 seconds."""


def start_master():
    """Start a master, and wait until it listens."""
    import mooncake

    (folder,) = mooncake.__path__
    program = Path(folder) / "mooncake_master"
    argv = [str(program), "--rpc_address=127.0.0.1", "--rpc_port=50051", "--metrics_host=127.0.0.1"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    host, port = MASTER.split(":")

    def listens():
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return True
        assert process.poll() is None
        return False

    until(listens)
    return process


def until(ready):
    """Wait for something."""
    end = time.monotonic() + PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)
    return found


def code_of(call):
    """Return the number of the error that a call raises; 0: none."""
    try:
        call()
    except MooncakeError as error:
        return error.code
    return 0


def end(process):
    process.kill()
    process.wait()


def block(number, nbytes=NBYTES):
    return memoryview(bytearray([number]) * nbytes)


def key(number):
    """Return a key of the greatest length."""
    return bytes([number]) * 66


@contextlib.contextmanager
def started(target):
    """Start this file in another process; yield it when it says that it is ready."""
    argv = [sys.executable, __file__, target]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def say_ready():
    """Say so, and stay until the starter ends this process."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


# -- the contract


def contract():
    start_master()
    tier, memory = open_tier(MooncakeTier, OPTIONS), memoryview(bytearray(8 * NBYTES))
    tier.register_memory(memory)
    parts = [memory[n * NBYTES : (n + 1) * NBYTES] for n in range(8)]
    assert tier.contains([key(1), key(2)]) == [False, False]
    assert tier.contains([]) == []
    assert tier.get(key(1), parts[0]) is False
    parts[0][:] = block(1)
    tier.put(key(1), parts[0])
    assert tier.contains([key(1), key(2), b"\0"]) == [True, False, False]
    assert tier.get(key(1), parts[1])
    assert parts[1] == block(1)
    # In the place of what was read just now, and has a lease; also of another length.
    for number, nbytes in ((2, NBYTES), (3, 1000), (4, NBYTES)):
        parts[0][:nbytes] = block(number, nbytes)
        tier.put(key(1), parts[0][:nbytes])
        assert tier.get(key(1), parts[1][:nbytes])
        assert parts[1][:nbytes] == block(number, nbytes)
    for nbytes in (1, NBYTES - 1, NBYTES + 1):
        assert tier.get(key(1), memory[NBYTES : NBYTES + nbytes]) is False
    tier.remove([key(1), key(2)])
    assert tier.contains([key(1)]) == [False]
    assert tier.get(key(1), parts[1]) is False
    # Batches are what single calls are, for one memory and another.
    others = [block(n, 1000 + n) for n in range(4)]
    tier.put_many([(key(n), others[n]) for n in range(4)])
    for n in range(4):
        got = memoryview(bytearray(1000 + n))
        assert tier.get(key(n), got)
        assert got == others[n]
    into = [memoryview(bytearray(nbytes)) for nbytes in (1000, 1000, 1002, 1004)]
    items = [(key(n), each) for n, each in enumerate(into)]
    items.append((key(9), memoryview(bytearray(10))))
    assert tier.get_many(items) == [tier.get(*each) for each in items]
    assert tier.get_many(items) == [True, False, True, False, False]
    assert into[2] == others[2]
    # By several threads.
    wrong = []

    def work(number):
        for _ in range(20):
            tier.put(key(number), block(number))
            got = memoryview(bytearray(NBYTES))
            if not tier.get(key(number), got) or got != block(number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(10, 14)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []
    tier.close()
    tier.close()
    # The client itself would end the process.
    for call in (lambda: tier.contains([key(1)]), lambda: tier.get(key(1), parts[0])):
        with pytest.raises(ClosedError):
            call()


def peer():
    """Keep two blocks, and stay."""
    tier = open_tier(MooncakeTier, OPTIONS)
    for number in (1, 2):
        tier.put(key(number), block(number))
    say_ready()


def two_processes():
    start_master()
    with started("peer"):
        tier, got = open_tier(MooncakeTier, OPTIONS), memoryview(bytearray(NBYTES))
        assert tier.contains([key(1), key(2), key(3)]) == [True, True, False]
        for number in (1, 2):
            assert tier.get(key(number), got)
            assert got == block(number)
        # Over the other's.
        tier.put(key(1), block(7))
        assert tier.get(key(1), got)
        assert got == block(7)
        tier.close()


def scheduler_gives_no_memory():
    start_master()
    scheduler, none = (
        open_tier(MooncakeTier, OPTIONS),
        open_tier(MooncakeTier, {**OPTIONS, "segment_bytes": 0}),
    )
    assert scheduler.contains([key(1)]) == [False]
    with pytest.raises(MooncakeError, match=r"no space.*\(-200\)"):
        none.put(key(1), block(1))
    worker = open_tier(MooncakeTier, OPTIONS)
    memory = block(1)
    worker.register_memory(memory)
    none.put(key(1), block(1))
    assert scheduler.contains([key(1)]) == [True]
    for each in (scheduler, none, worker):
        each.close()


def full_memory():
    """The master evicts; what is there is right."""
    start_master()
    tier, got = open_tier(MooncakeTier, OPTIONS), memoryview(bytearray(NBYTES))
    failed = 0
    for number in range(200):
        code = code_of(lambda number=number: tier.put(key(number), block(number)))
        assert code in (0, -200)
        failed += code != 0
    assert tier.get_stats()["blocks_without_space_total"] == failed
    found = tier.contains([key(number) for number in range(200)])
    assert 10 < sum(found) <= 64
    assert not found[0]
    for number, is_there in enumerate(found):
        # It may be evicted in between.
        if is_there and tier.get(key(number), got):
            assert got == block(number)
    until(lambda: code_of(lambda: tier.put(key(201), block(201))) == 0)
    tier.close()


def close_waits():
    start_master()
    tier = open_tier(MooncakeTier, OPTIONS)
    is_in, leave, closed = threading.Event(), threading.Event(), threading.Event()

    def hold():
        with tier._call():
            is_in.set()
            leave.wait()
            assert not closed.is_set()
            assert tier._store.batch_is_exist(["a"]) == [0]

    def close():
        tier.close()
        closed.set()

    threads = [threading.Thread(target=hold), threading.Thread(target=close)]
    threads[0].start()
    is_in.wait()
    threads[1].start()
    until(lambda: tier._is_closed)
    leave.set()
    for each in threads:
        each.join()
    assert closed.is_set()


# -- faults


def killed_peer():
    """Its blocks are gone with it, which costs hits."""
    start_master()
    tier, got = open_tier(MooncakeTier, OPTIONS), memoryview(bytearray(NBYTES))
    # It has put nothing yet: all memory is the other's.
    with started("peer") as process:
        assert tier.get(key(1), got)
        end(process)
    begun = time.monotonic()
    assert code_of(lambda: tier.get(key(2), got)) == -800
    assert time.monotonic() - begun < PATIENCE_S
    until(lambda: tier.contains([key(1), key(2)]) == [False, False])
    tier.put(key(3), block(3))
    assert tier.get(key(3), got)
    assert got == block(3)
    tier.close()


def killed_master():
    master = start_master()
    tier, got = open_tier(MooncakeTier, OPTIONS), memoryview(bytearray(NBYTES))
    tier.put(key(1), block(1))
    end(master)
    for call in (
        lambda: tier.contains([key(1)]),
        lambda: tier.put(key(2), block(2)),
        lambda: tier.get(key(1), got),
        lambda: tier.remove([key(1)]),
    ):
        begun = time.monotonic()
        with pytest.raises(MooncakeError, match="the master") as caught:
            call()
        assert caught.value.code in (-900, -901)
        assert time.monotonic() - begun < PATIENCE_S
    with pytest.raises(MooncakeError, match="no Mooncake master at 127"):
        open_tier(MooncakeTier, OPTIONS)
    # A new master knows of no blocks, and is given the memory anew.
    start_master()
    until(lambda: code_of(lambda: tier.put(key(3), block(3))) == 0)
    assert tier.contains([key(1), key(3)]) == [False, True]
    assert tier.get(key(3), got)
    assert got == block(3)
    tier.close()


def options():
    for wrong, name in (
        ({}, "master"),
        ({"master": ""}, "master"),
        ({"master": "host"}, "master"),
        ({"master": 5}, "master"),
        ({**OPTIONS, "segment_bytes": -1}, "segment_bytes"),
        ({**OPTIONS, "protocol": "carrier"}, "protocol"),
        ({**OPTIONS, "local_hostname": "a:1"}, "local_hostname"),
        ({**OPTIONS, "colour": 1}, "colour"),
    ):
        with pytest.raises(OffloadingOptionError, match=name):
            open_tier(MooncakeTier, wrong)
    with pytest.raises(MooncakeError, match="no Mooncake master at 127"):
        open_tier(MooncakeTier, {"master": "127.0.0.1:99999"})
    start_master()
    tier = open_tier(MooncakeTier, {"master": MASTER, "segment_bytes": 1 << 40})
    # More than the machine has; it says so, and goes on.
    with pytest.raises(MooncakeError, match="segment_bytes"):
        tier.put(key(1), block(1))
    assert tier.contains([key(1)]) == [False]
    tier.close()


def exit_within_a_call():
    """The process ends in order, with a thread in the client and nothing closed."""
    master = start_master()
    tier = open_tier(MooncakeTier, OPTIONS)
    tier.put(key(1), block(1))
    end(master)
    # The first calls fail at once, those after them take seconds.
    for _ in range(2):
        with pytest.raises(MooncakeError):
            tier.contains([key(1)])

    def call():
        with contextlib.suppress(Exception):
            while True:
                with contextlib.suppress(MooncakeError):
                    tier.contains([key(1)])

    threading.Thread(target=call, daemon=True).start()
    until(lambda: tier._num_running)


# -- the kit


class TestMooncake(TierConformance):
    tier = "mooncake"
    options: ClassVar = OPTIONS


def kit():
    """Tests of the kit on labels and on damage; the store misses a process that others kill."""
    start_master()
    some = ["-k", "label or damaged"]
    subprocess.run([sys.executable, "-m", "pytest", "-q", *some, __file__], check=True)


# -- a connector


PROMPT = list(range(30))


@contextlib.contextmanager
def instance(weights, num_ranks=1):
    from wtransfer.testing.connector import SMALL, RecordedInstance
    from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig

    config = EngineConfig(
        model=SMALL,
        cache=CacheShape(4, 64),
        connector="OffloadingConnector",
        options={"spec_name": "mooncake", "buffer_bytes": 1 << 20, **OPTIONS},
        num_ranks=num_ranks,
    )
    with RecordedInstance(config, weights) as made:
        made.step()
        yield made


def serve(made, prompt, count):
    """Serve a prompt, compare tokens, keys and values with a fresh model; return tokens loaded."""
    from wtransfer.testing.mini_engine.contract import OVER, Request

    made.clear_cache()
    before = made.counts.copy()
    request = Request(f"request-{os.urandom(4).hex()}", list(prompt), count)
    made.scheduler.add(request)
    limit = time.monotonic() + PATIENCE_S
    while request.state not in OVER:
        assert time.monotonic() < limit
        made.step()
    made.run(PATIENCE_S)
    made.check(request)
    return request, (made.counts - before)["tokens_loaded"]


def producer():
    """Serve a prompt, and stay: the blocks are in this process's memory."""
    from wtransfer.testing.mini_engine.model import LocalWeights

    with contextlib.closing(LocalWeights(0)) as weights, instance(weights) as made:
        assert serve(made, PROMPT, 6)[1] == 0
        say_ready()


def tokens():
    """Equal to those of a fresh model, in a second process and after an update."""
    import torch
    from wtransfer.testing.mini_engine.model import LocalWeights

    torch.set_num_threads(1)
    master = start_master()
    with (
        started("producer"),
        contextlib.closing(LocalWeights(0)) as weights,
        instance(weights) as made,
    ):
        request, loaded = serve(made, PROMPT, 6)
        assert loaded == 28
        conversation = [*request.all_token_ids, 40, 41, 42]
        assert serve(made, conversation, 4)[1] > 28
        # In the midst of it the weights change: nothing of the old ones is loaded.
        weights.change(1)
        request, loaded = serve(made, conversation, 4)
        assert loaded == 0
        assert serve(made, [*request.all_token_ids, 43], 4)[1] >= 32
        # Without a master the engine serves on.
        end(master)
        assert serve(made, PROMPT, 6)[1] == 0


if __name__ == "__main__":
    name = sys.argv[1]
    globals()[name]()
    sys.stdout.write(f"{name} passed\n")
