"""Find what the import of a module changes in its process: asked in a process that is forked."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wtransfer.registry.discovery import CORE
from wtransfer.testing.leftovers import Leftovers

if TYPE_CHECKING:
    from collections.abc import Mapping

NUM_THREADS = 3
"""Threads of torch before the import: a number that no module asks for."""
WITHIN_S = 0.2
"""Time that an import may take to end what it has begun, in seconds."""


def tell(asker: int, name: str, file: str, path: list[str], folder: str) -> None:
    """Import a module, and print what it has changed, or why it cannot be imported, as JSON.

    Args:
        asker: Process that asks; it may have imported the module by now.
        name: Its name, under which this process may have another one.
        file: Its file, for a module that is not found by its name.
        path: ``sys.path`` of the process that asks.
        folder: An empty folder, which is the current one, and that of temporary files.
    """
    sys.path[:] = path
    os.chdir(folder)
    os.umask(0o22)
    first = Path(f"/proc/{asker}/environ").read_bytes().split(b"\0")
    os.environb.clear()
    for each in first:
        variable, is_one, value = each.partition(b"=")
        if is_one:
            os.environb[variable] = value
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        answer: dict[str, Any] = {"changed": _changed(name, file, Path(folder))}
    except BaseException as error:  # of any import
        answer = {"error": f"{type(error).__name__}: {error}"}
    # The module may print as well.
    sys.stdout.write(f"\n{json.dumps(answer)}")


def _changed(name: str, file: str, folder: Path) -> list[str]:
    top = name.partition(".")[0]
    if top != CORE:
        for each in [each for each in sys.modules if each.partition(".")[0] == top]:
            del sys.modules[each]
    torch.set_num_threads(NUM_THREADS)
    leftovers, before = Leftovers(), _settings()
    _load(name, file)
    left = [f"{each} is left" for each in leftovers.found(WITHIN_S)]
    left += [f"the file {each.name} is left" for each in sorted(folder.iterdir())]
    now = _settings()
    return left + [
        f"{each} is {_shown(now, each)}, and was {_shown(before, each)}"
        for each in sorted(now.keys() | before.keys())
        if now.get(each) != before.get(each)
    ]


def _load(name: str, file: str) -> None:
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
    if spec is None or name in sys.modules:
        # One of ours is loaded by now, and one of a test's is found by nobody else.
        spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module {name}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _settings() -> dict[str, Any]:
    """Return settings that all modules of a process share."""
    umask = os.umask(0)
    os.umask(umask)
    handlers = {f"the handler of {each.name}": signal.getsignal(each) for each in signal.Signals}
    return {
        **{f"the variable {each}": value for each, value in os.environ.items()},
        **handlers,
        "socket.getdefaulttimeout()": socket.getdefaulttimeout(),
        "the umask": oct(umask),
        "os.getcwd()": os.getcwd(),  # noqa: PTH109
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "sys.getrecursionlimit()": sys.getrecursionlimit(),
        "the level of the root logger": logging.root.level,
        "the handlers of the root logger": list(logging.root.handlers),
        "the state of `random`": hash(random.getstate()),
        "torch.initial_seed()": torch.initial_seed(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.get_default_device()": str(torch.get_default_device()),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
    }


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "not set"
