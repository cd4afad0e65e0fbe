"""A trainer's process, told what to do by lines of JSON.

python trainer.py ENGINE '{"option": ...}'    then ["CHECKPOINT", "VERSION"] per line
"""

import importlib
import json
import sys
import time

import wtransfer
from safetensors.torch import load_file

engine, options, spoil = sys.argv[1:]
held = {}
trainer = getattr(importlib.import_module("spoiling"), spoil) if spoil else None


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def publish(publisher, checkpoint, version):
    held.update(load_file(checkpoint))
    publisher.wait_for_workers(1, timeout_s=20)
    round_ = publisher.publish(version, wait=False)
    while not round_.done and round_.phase != "commit":
        time.sleep(0.002)
    say(phase=round_.phase)
    try:
        say(outcomes=[worker.outcome for worker in round_.result(30).workers])
    except wtransfer.WTransferError as error:
        say(error=f"{type(error).__name__}: {error}")


with wtransfer.Publisher(
    held, engine=engine, trainer=trainer, options=json.loads(options)
) as publisher:
    say(address=publisher.address, token=publisher.token)
    for line in sys.stdin:
        publish(publisher, *json.loads(line))
