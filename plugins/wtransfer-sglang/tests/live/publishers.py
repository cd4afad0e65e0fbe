"""Publishers of checkpoints for a live server."""

import contextlib
import os
import subprocess
import sys

import wtransfer
from safetensors.torch import load_file
from server import TOKEN


def pushed(folder, server, label):
    """Publish a checkpoint to the server."""
    with wtransfer.Publisher(
        wtransfer.CheckpointSource(folder), hosts=[server.address], token=TOKEN, deadline_s=30
    ) as publisher:
        assert publisher.publish(label).ok


def pushed_by_command(folder, server, label, *options):
    """Push a checkpoint as a user does, by the command line."""
    command = [sys.executable, "-m", "wtransfer", "push", str(folder), "--to", server.address]
    done = subprocess.run(
        [*command, "--label", label, *options],
        env={**os.environ, "WTRANSFER_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout


PUSHER = """
import itertools, sys
import wtransfer
from safetensors.torch import load_file

address, token, deadline_s, *folders = sys.argv[1:]
sets = [load_file(folder + "/model.safetensors") for folder in folders]
held = dict(sets[0])
with wtransfer.Publisher(held, hosts=[address], token=token, deadline_s=float(deadline_s)) as to:
    print("joined", flush=True)
    sys.stdin.readline()
    for number in itertools.cycle(range(len(sets))):
        held.update(sets[number])
        to.publish("AB"[number])
        print("AB"[number], flush=True)
"""


class Pusher:
    """A publisher in a process of its own, which publishes A and B in turn for as long as it lives.

    Args:
        folders: Folders of the checkpoints A and B.
        server: The server.
        deadline_s: Deadline of a round.
    """

    def __init__(self, folders, server, deadline_s=30):
        arguments = [server.address, TOKEN, str(deadline_s), folders["A"], folders["B"]]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PUSHER, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "joined\n"

    def begin(self, rounds=0):
        """Let it publish; return after as many rounds."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for _ in range(rounds):
            assert self.process.stdout.readline()

    def close(self):
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def publishing(server, folder):
    """Open a publisher of a checkpoint's weights that has invited the server."""
    held = load_file(folder / "model.safetensors")
    with wtransfer.Publisher(held, hosts=[server.address], token=TOKEN, deadline_s=30) as publisher:
        yield publisher, held
