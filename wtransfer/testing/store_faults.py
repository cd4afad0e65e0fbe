"""Faults of a store that keeps files in a folder, brought about from outside of its tier."""

from __future__ import annotations

import contextlib
import select
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_HOLDER = """
import fcntl, os, select, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
number = 0
for path in sys.argv[1:]:
    try:
        fcntl.fcntl(os.open(path, os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
        number += 1
    except OSError:
        pass
print(number, flush=True)
while not select.select([0], [], [], 0)[0]:
    if signal.sigtimedwait([signal.SIGIO], 0.01):
        print("held", flush=True)
"""
"""Holds leases of files until its standard input ends, and says when one is opened."""


def files_of(folder: Path) -> list[Path]:
    """Return all files below a folder that are there."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


@contextlib.contextmanager
def held_up(folder: Path) -> Iterator[Callable[[], bool] | None]:
    """Let whoever opens a file that is below a folder now wait until the block ends.

    By leases, as Linux has them: such an `open` blocks, and fails at once with ``O_NONBLOCK``.

    Yields:
        Whether one was opened; None where no file can be held up.
    """
    command = [sys.executable, "-I", "-S", "-c", _HOLDER, *map(str, files_of(folder))]
    with subprocess.Popen(  # noqa: S603  # no shell
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        out = holder.stdout
        has_any = int(holder.stdout.readline()) > 0
        try:
            yield (lambda: bool(select.select([out], [], [], 0)[0])) if has_any else None
        finally:
            holder.stdin.close()
            holder.wait()


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Take the right to write away from a folder, and from all that is below it."""
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    for path, mode in reversed(modes.items()):
        path.chmod(mode & ~0o222)
    try:
        yield
    finally:
        for path, mode in modes.items():
            with contextlib.suppress(FileNotFoundError):
                path.chmod(mode)


def empty(folder: Path) -> None:
    """Remove all that is below a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
