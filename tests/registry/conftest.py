"""Distributions on disk, read and imported as if they were installed, and a host over them."""

from __future__ import annotations

import importlib
import sys
import textwrap
from typing import TYPE_CHECKING

import importlib_metadata
import pytest

from wtransfer.registry.hooks import PluginManager
from wtransfer.registry.resolve import Host

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENGINE = """
    class Engine:
        def __init__(self, config, parallel_config): ...
        def init_transfer_engine(self, init_info): ...
        def receive_weights(self, update_info, load_weights): ...
        def shutdown(self): ...
"""


class Site:
    """A folder like site-packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.board = PluginManager()

    def add(self, name, version="1.0", *, group="wtransfer.engines", requires=(), **entries):
        """Install a distribution that declares `entries`; ``__`` in a keyword stands for ``-``."""
        info = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        head += [f"Requires-Dist: {each}" for each in requires]
        (info / "METADATA").write_text("\n".join(head) + "\n")
        lines = [f"{key.replace('__', '-')} = {value}" for key, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
        return info

    def offer(self, name, *names, version="1.0"):
        """Install a distribution that offers engines, from a module of its own."""
        module = self.module(name.replace("-", "_") + "_module")
        self.add(name, version, **dict.fromkeys(names, f"{module}:Engine"))

    def module(self, name, source=ENGINE):
        """Write a module."""
        (self.root / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return name

    def host(self, **environ):
        """Return a new host over this folder."""
        self.board = PluginManager()
        return Host(environ, self.distributions, self.board)

    def engines(self, **environ):
        """Return a new host's registry of engines."""
        return self.host(**environ).registry("engines")

    def distributions(self):
        return importlib_metadata.distributions(path=[str(self.root)])


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))
    site = Site(tmp_path)
    site.add("wtransfer", "0.1.0", shm="builtin_shm:Engine")
    site.module("builtin_shm")
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and file.startswith(str(tmp_path)):
            del sys.modules[name]
