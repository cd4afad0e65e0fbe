import contextlib
from dataclasses import dataclass
from pathlib import Path

from wtransfer import Tier


@dataclass(kw_only=True)
class Options:
    folder: str


class ShelfTier(Tier):
    options_cls = Options

    def __init__(self, options):
        self.folder = Path(options.folder)

    def contains(self, keys):
        return [(self.folder / key.hex()).exists() for key in keys]

    def put(self, key, data):
        self.write_whole(self.folder / key.hex(), data)

    def get(self, key, into):
        with contextlib.suppress(FileNotFoundError):
            return self.fill(into, (self.folder / key.hex()).read_bytes())
        return False

    def remove(self, keys):
        for key in keys:
            (self.folder / key.hex()).unlink(missing_ok=True)
