"""The shared storage connector passes the kit."""

from __future__ import annotations

import pytest

from wtransfer.testing.connector import ConnectorConformance

pytestmark = pytest.mark.slow  # offloading passes the same kit each time


class TestSharedStorageConnector(ConnectorConformance):
    connector = "SharedStorageConnector"
    is_shared = True

    def options_in(self, folder):
        return {"shared_storage_path": str(folder)}

    def damage(self, bed):
        files = list(bed.folder.rglob("blocks/*"))
        for file in files:
            kept = bytearray(file.read_bytes())
            kept[len(kept) // 2] ^= 1
            file.write_bytes(kept)
        return bool(files)
