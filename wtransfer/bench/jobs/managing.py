"""What managers take for each block, ours and vLLM's, in turn."""

from __future__ import annotations

import gc
import importlib
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from wtransfer.bench.jobs import tell
from wtransfer.blocks import make_offload_key
from wtransfer.specs.interface import ReqContext
from wtransfer.specs.manager import CPUOffloadingManager

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.blocks import OffloadKey

    MakeManager = Callable[[int, str], Any]
    """Slots and policy to a manager."""

_WARM_UP_ROUNDS = 1
_LEAST_CALLS = 32


def measure(num_blocks: int, num_keys: int, num_rounds: int, policy: str, **_: Any) -> None:
    """Tell the microseconds per block of every round, of each manager and operation.

    Args:
        num_blocks: How many blocks a full cache has.
        num_keys: Blocks of one request, which each call is given.
        num_rounds: Rounds that count.
        policy: What gives way.
    """
    sides = {"ours": _Side(_ours, ReqContext)}
    missing = ""
    try:
        sides["vllm"] = _vllm()
    except Exception as error:
        # Not installed, or not one that this was written for: there is nothing beside ours then.
        missing = f"{type(error).__name__}: {error}"
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(_WARM_UP_ROUNDS + num_rounds):
        if number == _WARM_UP_ROUNDS:
            found.clear()
        for name, side in sides.items():
            for operation, us in side.times(num_blocks, num_keys, policy).items():
                found[f"{name}_{operation}"].append(us)
    tell(missing=missing, **found)


class _Side:
    """One manager's class.

    Args:
        make: Makes it.
        context: Makes what it knows a request by.
    """

    def __init__(self, make: MakeManager, context: Callable[[str], Any]) -> None:
        self._make = make
        self._context = context

    def times(self, num_blocks: int, num_keys: int, policy: str) -> dict[str, float]:
        """Return microseconds per block of each operation, with a full cache."""
        manager = self._make(num_blocks, policy)
        kept = _requests(0, num_blocks, num_keys)
        # As many calls as the clock needs, and as come to some percent of a large cache.
        calls = min(len(kept), max(_LEAST_CALLS, len(kept) // 20))
        filling, chosen = kept[:-calls], kept[:: max(1, len(kept) // calls)][:calls]
        new = _requests(num_blocks, calls * num_keys, num_keys)
        contexts = [self._context(str(number)) for number in range(len(kept) + 3 * calls)]
        gc.collect()
        gc.disable()
        try:
            self._store(manager, filling, contexts)
            told = {"store": self._time(self._store, manager, kept[-calls:], contexts)}
            for name, run, requests in (
                ("lookup", self._lookup, chosen),
                ("load", self._load, chosen),
                ("evict", self._store, new),
            ):
                told[name] = self._time(run, manager, requests, contexts)
        finally:
            gc.enable()
        return told

    @staticmethod
    def _time(
        run: Any, manager: Any, requests: list[list[OffloadKey]], contexts: list[Any]
    ) -> float:
        used = contexts[-len(requests) :]
        del contexts[-len(requests) :]
        for context in used:
            manager.on_new_request(context)
        # Of the processor, not of the clock on the wall: nothing here waits, but others may work.
        began = time.thread_time()
        run(manager, requests, used)
        seconds = time.thread_time() - began
        return seconds / sum(map(len, requests)) * 1e6

    @staticmethod
    def _store(manager: Any, requests: list[list[OffloadKey]], contexts: list[Any]) -> None:
        for keys, context in zip(requests, contexts, strict=False):
            manager.complete_store(manager.prepare_store(keys, context).keys_to_store, context)

    @staticmethod
    def _lookup(manager: Any, requests: list[list[OffloadKey]], contexts: list[Any]) -> None:
        lookup = manager.lookup
        for keys, context in zip(requests, contexts, strict=True):
            for key in keys:
                lookup(key, context)

    @staticmethod
    def _load(manager: Any, requests: list[list[OffloadKey]], contexts: list[Any]) -> None:
        for keys, context in zip(requests, contexts, strict=True):
            manager.prepare_load(keys, context)
            manager.complete_load(keys, context)


def _requests(start: int, num_blocks: int, num_keys: int) -> list[list[OffloadKey]]:
    keys = [make_offload_key(n.to_bytes(32, "big")) for n in range(start, start + num_blocks)]
    return [keys[at : at + num_keys] for at in range(0, num_blocks, num_keys)]


def _ours(num_blocks: int, policy: str) -> CPUOffloadingManager:
    return CPUOffloadingManager(num_blocks, policy)


def _vllm() -> _Side:
    manager = importlib.import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager
    context = importlib.import_module("vllm.v1.kv_offload.base").ReqContext
    _Side(manager, context).times(_LEAST_CALLS, 1, "lru")
    return _Side(manager, context)
