"""The tier `file`, whose loads hang while there is a file ``hold_get`` in the witness's folder."""

import os
import time
from pathlib import Path

from wtransfer.specs.file import FileTier

FOLDER = Path(os.environ["WITNESS"])


class HeldFiles(FileTier):
    def get_many(self, items):
        while (FOLDER / "hold_get").exists():
            (FOLDER / "getting").touch()
            time.sleep(0.01)
        return super().get_many(items)
