"""A tier whose calls a test holds, or makes slow."""

import threading
import time
from collections import Counter

from wtransfer.testing.fakes import MemoryTier

held = set()
"""Names of calls that wait until `gate` is open."""
gate = threading.Event()
slow_s = 0.0
"""Length of a `get`."""
num_ended = Counter()
"""Calls that have ended, by name."""


class HeldTier(MemoryTier):
    def _call(self, name, call, *args):
        if name in held:
            gate.wait(60)
        try:
            return call(*args)
        finally:
            num_ended[name] += 1

    def contains(self, keys):
        return self._call("contains", super().contains, keys)

    def put(self, key, data):
        return self._call("put", super().put, key, data)

    def get(self, key, into):
        time.sleep(slow_s)
        return self._call("get", super().get, key, into)
