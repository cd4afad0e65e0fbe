"""The tier, and `OffloadingConnector` over it, pass the kits that third parties get."""

from __future__ import annotations

import pytest
from valkey_server import Server
from wtransfer.testing.connector import ConnectorConformance
from wtransfer.testing.tier import TierConformance


class OverServer:
    @pytest.fixture(autouse=True)
    def server(self):
        self.made = Server()
        yield self.made
        self.made.close()


@pytest.mark.slow  # what it has in common with the tier's own tests is tested there each time
class TestValkeyTier(OverServer, TierConformance):
    tier = "valkey"

    def options_in(self, folder):
        return {"url": self.made.url}


class TestValkey(OverServer, ConnectorConformance):
    connector = "OffloadingConnector"
    is_shared = True

    def options_in(self, folder):
        return {"spec_name": "valkey", "url": self.made.url, "buffer_bytes": 1 << 20}

    def damage(self, bed):
        with self.made.client() as client:
            for name in client.keys("wtransfer:*"):
                value = bytearray(client.get(name))
                value[-1] ^= 1
                client.set(name, bytes(value))
        return True
