"""A trainer's process, told what to do by lines of JSON.

python trainer.py '{"engine": ..., ...}'    then ["CHECKPOINT", "VERSION", "HALFWAY"] per line

HALFWAY names what happens once half of the weights has been sent, if anything shall.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

import wtransfer
from safetensors.torch import load_file
from sources import HALFWAY, HalfwaySource


def main(engine, *, options=None, spoil="", hosts=(), deadline_s=30.0):
    held = {}
    source = HalfwaySource(held)
    trainer = getattr(importlib.import_module("spoiling"), spoil) if spoil else None
    with wtransfer.Publisher(
        source, engine=engine, trainer=trainer, options=options, hosts=hosts, deadline_s=deadline_s
    ) as publisher:
        say(address=publisher.address, token=publisher.token)
        for line in sys.stdin:
            checkpoint, version, halfway = json.loads(line)
            held.update(load_file(checkpoint))
            source.act = HALFWAY[halfway]
            publish(publisher, version, says_phase=not hosts)


def publish(publisher, version, *, says_phase):
    publisher.wait_for_workers(1, timeout_s=20)
    try:
        round_ = publisher.publish(version, wait=False)
        if says_phase:
            await_commit(round_)
        say(outcomes=[worker.outcome for worker in round_.result(30).workers])
    except wtransfer.WTransferError as error:
        say(error=f"{type(error).__name__}: {error}")


def await_commit(round_):
    while not round_.done and round_.phase != "commit":
        time.sleep(0.002)
    say(phase=round_.phase)


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
