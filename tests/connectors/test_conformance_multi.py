"""Two connectors under one pass the kit as one."""

from __future__ import annotations

import pytest

from wtransfer.testing.connector import ConnectorConformance

pytestmark = pytest.mark.slow  # its children pass the kit each time


class TestMultiConnector(ConnectorConformance):
    """The one loads beyond the step, and only what its own instance left; the other within it."""

    connector = "MultiConnector"
    is_shared = True

    def options_in(self, folder):
        arena = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 2**22}
        offloading = {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": arena,
        }
        storage = {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        return {"connectors": [offloading, storage]}

    def damage(self, bed):
        files = list(bed.folder.rglob("blocks/*"))
        for file in files:
            kept = bytearray(file.read_bytes())
            kept[len(kept) // 2] ^= 1
            file.write_bytes(kept)
        return bool(files)
