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


@contextlib.contextmanager
def publishing(server, folder):
    """Open a publisher of a checkpoint's weights that has invited the server."""
    held = load_file(folder / "model.safetensors")
    with wtransfer.Publisher(held, hosts=[server.address], token=TOKEN, deadline_s=30) as publisher:
        yield publisher, held
