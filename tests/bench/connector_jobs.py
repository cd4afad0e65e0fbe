"""Sides of ``bench connectors`` that go wrong; each runs in a child, as the right ones do."""

import os
import signal
from pathlib import Path

from wtransfer.bench.jobs import connecting
from wtransfer.bench.jobs.kv_cache import KVCache
from wtransfer.bench.jobs.sides import Sides


def prefill_and_die(seen=None, **keywords):
    """Die after the first round was saved; tell before that where the files are."""

    class Mortal(Sides):
        def prefill(self, *arguments):
            super().prefill(*arguments)
            if seen:
                Path(seen).write_text(self._folder)
            os.kill(os.getpid(), signal.SIGKILL)

    connecting.Sides = Mortal
    connecting.prefill(**keywords)


def decode_and_die(**keywords):
    connecting._Loading.round = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    connecting.decode(**keywords)


def prefill_one_other_byte(**keywords):
    """Save a block of which one byte is not what it should be: the connector cannot know."""
    compute = KVCache.compute

    def compute_wrongly(self, number, block_ids):
        compute(self, number, block_ids)
        self.layers["layer.31"][block_ids[-1], -1] ^= 1

    KVCache.compute = compute_wrongly
    connecting.prefill(**keywords)


def prefill_one_block_less(**keywords):
    prompt = connecting.prompt
    connecting.prompt = lambda number, num_blocks: prompt(number, num_blocks - 1)
    connecting.prefill(**keywords)
