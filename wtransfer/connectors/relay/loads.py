"""The loads of one worker: which are under way, which have ended, which blocks are missing."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.connectors.relay.plan import Load


class Loading:
    """One load under way.

    Args:
        load: What to load.
    """

    def __init__(self, load: Load) -> None:
        self.load = load
        self.num_loaded = 0
        """Blocks, from the first on, that are in the cache and are what they should be."""
        self.unwanted = False
        """Whether its request is gone; it ends at the next block."""


class Loads:
    """All loads. Any thread may use it.

    Args:
        admits: Whether what was loaded for these weights may still be used.
    """

    def __init__(self, admits: Callable[[Load], bool]) -> None:
        self._admits = admits
        self.block_nbytes = 0
        """Bytes of a block."""
        self._lock = threading.Lock()
        self._under_way: dict[str, Loading] = {}
        self._received: set[str] = set()
        self._missing: set[int] = set()
        self._counts: Counter[str] = Counter()

    def begin(self, load: Load) -> Loading | None:
        """Note a load; None: one of this request is under way, and this one is left out."""
        with self._lock:
            if load.request_id in self._under_way:
                self._counts["loads_doubled"] += 1
                return None
            self._counts["loads"] += 1
            loading = self._under_way[load.request_id] = Loading(load)
            return loading

    def give_up(self, request_id: str) -> None:
        """Hear that a request is gone: its load ends soon."""
        with self._lock:
            loading = self._under_way.get(request_id)
            if loading is not None:
                loading.unwanted = True
            else:
                self._counts["ended_unknown"] += 1

    def end(self, loading: Loading, reason: str | None) -> None:
        """Note that nothing more of a load will be written.

        Args:
            loading: The load.
            reason: Why blocks are missing, if any are.
        """
        load = loading.load
        if not self._admits(load):
            loading.num_loaded, reason = 0, "weights"
        missing = load.block_ids[loading.num_loaded :]
        with self._lock:
            if self._under_way.get(load.request_id) is not loading:
                return
            del self._under_way[load.request_id]
            self._received.add(load.request_id)
            self._counts["blocks_loaded"] += loading.num_loaded
            self._counts["bytes_loaded"] += loading.num_loaded * self.block_nbytes
            if loading.unwanted:
                self._counts["loads_unwanted"] += 1
            elif missing:
                self._missing.update(missing)
                self._counts["blocks_missed"] += len(missing)
                self._counts[f"blocks_missed_{reason}"] += len(missing)

    def received(self) -> set[str]:
        """Return the requests whose loads have ended since the last call."""
        with self._lock:
            received, self._received = self._received, set()
            return received

    def missing(self) -> set[int]:
        """Return the blocks that could not be loaded, since the last call."""
        with self._lock:
            missing, self._missing = self._missing, set()
            return missing

    def counts(self) -> dict[str, int]:
        """Return what has happened so far."""
        with self._lock:
            return {**self._counts, "loads_under_way": len(self._under_way)}
