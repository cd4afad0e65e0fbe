"""A worker in a process of its own: says every version that it holds, until its input ends.

Arguments: address of the publisher, name, device of the model. The token is in the environment.
"""

import sys
import threading

import torch
import wtransfer
from wtransfer.transport.digests import digest

ADDRESS, NAME, DEVICE = sys.argv[1:]


def say(*words):
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


def main():
    weights = {
        "big": torch.zeros(1 << 20, device=DEVICE),
        "small": torch.zeros(3, dtype=torch.bfloat16, device=DEVICE),
    }
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with wtransfer.WorkerSession(weights, join=ADDRESS, name=NAME, deadline_s=60.0) as session:
        say("joined")
        while not ended.is_set():
            if session.commit_pending(0.05):
                digests = [digest(each, "wsum64") for each in weights.values()]
                say(session.version, *digests)


if __name__ == "__main__":
    main()
