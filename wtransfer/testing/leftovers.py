"""Find what this process holds: threads, descriptors, shared memory, sockets, objects."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
import sys
import threading
import time
import types
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLL_S = 0.02
_SHM = "/dev/shm/"  # noqa: S108 - looked at, not written


class Leftovers:
    """Records the resources of this process now, and finds later ones.

    Linux only. Descriptors and mappings are counted by kind, since their numbers are reused. A file
    in ``/dev/shm`` counts if this process has opened it from Python, or if it or one of its
    children holds it: other processes make and remove files there at any time.

    Args:
        threads_by_name: Whether a thread may take the place of another of its name.
    """

    def __init__(self, *, threads_by_name: bool = False) -> None:
        self._by_name = threads_by_name
        _record_opened_files()
        self._threads = set(threading.enumerate())
        self._named = Counter(_kind(thread.name) for thread in self._threads)
        self._held = _held()

    def found(self, within_s: float = 5.0) -> list[str]:
        """Return the resources that were not held before, once there are none or time is up.

        Args:
            within_s: Longest wait for their release, in seconds.
        """
        end = time.monotonic() + within_s
        while (found := self._more()) and time.monotonic() < end:
            # Objects that wait for the garbage collector are no leftovers.
            gc.collect()
            time.sleep(_POLL_S)
        return found

    def check(self, within_s: float = 5.0) -> None:
        """Fail if there are leftovers, and name each in full.

        Args:
            within_s: Longest wait for their release, in seconds.

        Raises:
            AssertionError: There are leftovers.
        """
        found = self.found(within_s)
        if found:
            raise AssertionError("\n  ".join([f"after {within_s:g} s these are left:", *found]))

    def _more(self) -> list[str]:
        threads = [t.name for t in threading.enumerate() if t not in self._threads]
        if self._by_name:
            now = Counter(_kind(t.name) for t in threading.enumerate())
            threads = list((now - self._named).elements())
        more = [f"{number} x {what}" for what, number in (_held() - self._held).items()]
        return [f"thread {name}" for name in threads] + more


def _kind(name: str) -> str:
    """Return a name without its numbers."""
    return re.sub("[0-9]+", "#", name)


def _held() -> Counter[str]:
    own = list(_targets("self"))
    held = Counter(f"{kind} of {_kind(target)}" for kind, target in own)
    ours = {_opened_name(target) for _, target in own} | _opened
    for pid in descendants():
        ours.update(_opened_name(target) for _, target in _targets(pid))
    held.update(f"file {_SHM}{name}" for name in os.listdir(_SHM) if name in ours)  # noqa: PTH208
    return held


def _targets(pid: str) -> Iterator[tuple[str, str]]:
    """Yield the targets of a process's descriptors, and of its mappings of shared memory."""
    for target in descriptors(pid):
        yield "descriptor", target
    with contextlib.suppress(OSError):  # the process has ended, or access is denied
        for line in Path(f"/proc/{pid}/maps").read_text("utf-8").splitlines():
            if "/memfd:" in line or _SHM in line:
                yield "mapping", line.split(maxsplit=5)[5]


def descriptors(pid: str = "self") -> Iterator[str]:
    """Yield the targets of a process's descriptors."""
    with contextlib.suppress(OSError):  # the process has ended, or access is denied
        for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - one of them vanishes
            with contextlib.suppress(OSError):
                yield str(Path(f"/proc/{pid}/fd/{fd}").readlink())


def resident_nbytes() -> int:
    """Return the bytes of memory that this process uses, once garbage is collected."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def descendants(pid: str = "self") -> Iterator[str]:
    """Yield the process ids of all descendants of a process."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in file.read_text("utf-8").split():
                yield child
                yield from descendants(child)


def num_kept(*roots: object) -> Counter[str]:
    """Count what objects keep, by class of the keeper: entries, attributes and other references.

    Modules, classes, loggers and threads are no part of an object, nor is what they refer to. What
    has a bound, as the last numbers of a gauge, does not count.
    """
    counts, seen, waiting = Counter[str](), set[int](), list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _NO_PARTS):
            continue
        seen.add(id(each))
        if isinstance(each, deque) and each.maxlen is not None:
            continue
        if isinstance(each, types.FunctionType):
            # Not its globals, which are its module.
            parts = [*(each.__closure__ or ()), each.__defaults__]
        else:
            parts = [part for part in gc.get_referents(each) if part is not type(each)]
        counts[type(each).__name__] += len(parts)
        waiting += parts
    return counts


_NO_PARTS: tuple[type, ...] = (types.ModuleType, types.CodeType, types.FrameType, type)
_NO_PARTS += (logging.Logger, threading.Thread, str, bytes, int, float)
_opened: set[str] = set()
"""Names in ``/dev/shm`` that this process has opened."""


def _opened_name(path: str) -> str:
    """Return the first part of a path below ``/dev/shm``; empty for any other path."""
    return path[len(_SHM) :].split("/", maxsplit=1)[0] if path.startswith(_SHM) else ""


@functools.cache
def _record_opened_files() -> None:
    """Note from now on which files in ``/dev/shm`` this process opens."""

    def note(event: str, args: tuple[Any, ...]) -> None:
        # As the interpreter ends, the names of this module have no values any more.
        if not sys or sys.is_finalizing():
            return
        for path in args:
            if isinstance(path, str | bytes | os.PathLike):
                _opened.add(_opened_name(os.fsdecode(path)))
        # Shared memory is opened without an event, and then truncated or mapped.
        if event in ("os.truncate", "mmap.__new__") and isinstance(args[0], int):
            with contextlib.suppress(OSError):
                _opened.add(_opened_name(str(Path(f"/proc/self/fd/{args[0]}").readlink())))

    sys.addaudithook(note)
