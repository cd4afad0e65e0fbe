"""A tier over a folder."""

import secrets
from pathlib import Path

from wtransfer import Tier
from wtransfer.errors import OffloadingOptionError


class ShelfTier(Tier):
    """Keeps each value in a file."""

    def __init__(self, options):
        if options.keys() != {"folder"}:
            raise OffloadingOptionError(f"expected the option folder, got {', '.join(options)}")
        self.folder = Path(options["folder"])

    def contains(self, keys):
        return [(self.folder / key.hex()).exists() for key in keys]

    def put(self, key, data):
        part = self.folder / f"{secrets.token_hex(8)}.part"
        part.write_bytes(data)
        part.rename(self.folder / key.hex())

    def get(self, key, into):
        try:
            data = (self.folder / key.hex()).read_bytes()
        except FileNotFoundError:
            return False
        if len(data) != len(into):
            return False
        into[:] = data
        return True

    def remove(self, keys):
        for key in keys:
            (self.folder / key.hex()).unlink(missing_ok=True)
