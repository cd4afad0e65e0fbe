"""Tier `shelf-tier`: KV cache in files of a shared folder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from wtransfer import Tier


@dataclass(kw_only=True)
class Options:
    """Options in ``kv_connector_extra_config``; all others are refused."""

    folder: str
    """Where the files are; every process has to see it."""


class ShelfTier(Tier):
    """Keep each value in a file of its own."""

    options_cls = Options
    example_options: ClassVar[Mapping[str, Any]] = {"folder": "/mnt/kv"}

    def __init__(self, options: Options) -> None:
        self.folder = Path(options.folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether `get` would find it."""
        return [(self.folder / key.hex()).exists() for key in keys]

    def put(self, key: bytes, data: memoryview) -> None:
        """Keep a value, whole or not at all: another process may read it, or this one be killed."""
        self.write_whole(self.folder / key.hex(), data)

    def get(self, key: bytes, into: memoryview) -> bool:
        """Fill `into`; return False if there is no value of this length."""
        # Not looked at first: others may remove it in between.
        with contextlib.suppress(FileNotFoundError):
            return self.fill(into, (self.folder / key.hex()).read_bytes())
        return False

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove values; those that are not there are ignored."""
        for key in keys:
            (self.folder / key.hex()).unlink(missing_ok=True)
