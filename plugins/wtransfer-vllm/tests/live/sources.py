"""Weights with something in the middle."""

from __future__ import annotations

import os
import signal

from wtransfer.weight_sync.trainer.source import as_source


class HalfwaySource:
    """Weights that are sent as ever, but for what happens halfway.

    Args:
        weights: As a publisher takes them.
        act: Called once half of the pieces is on its way; may be set anew before each round.
    """

    def __init__(self, weights, act=None):
        self.act = act
        self._source = as_source(weights)

    @property
    def metadata(self):
        return self._source.metadata

    def iter_full(self):
        half = len(self.metadata) // 2
        for index, each in enumerate(self._source.iter_full()):
            if index == half and self.act is not None:
                self.act()
            yield each


def stop():
    """Stop this process: it goes on when somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


HALFWAY = {"": None, "stop": stop}
"""What a trainer's process may be told to do."""
