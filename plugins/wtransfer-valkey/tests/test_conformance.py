"""The tier, and `OffloadingConnector` over it, pass the kits that third parties get."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import pytest
from valkey_server import Server
from wtransfer.testing.connector import ConnectorConformance
from wtransfer.testing.tier import TierConformance


@pytest.fixture(scope="module")
def shared_server():
    made = Server()
    yield made
    made.close()


FAULTS = {"full": ("maxmemory", 1, 0), "read-only": ("min-replicas-to-write", 1, 0)}
"""Setting of the server, its value and the healthy one, by fault."""


class TestValkeyTier(TierConformance):
    tier = "valkey"

    @pytest.fixture(autouse=True)
    def server(self, shared_server):
        self.made = shared_server

    def options_in(self, folder):
        # A machine that is busy fails no call.
        return {"url": self.made.url, "timeout_s": 30.0}

    slow_options: ClassVar = {"timeout_s": 0.2}

    @contextlib.contextmanager
    def fault(self, kind):
        if kind == "slow":
            self.made.stop()
        elif kind == "gone":
            self.made.kill()
            self.made.start()
        else:
            setting, value, healthy = FAULTS[kind]
            self.made.run("CONFIG", "SET", setting, value)
        try:
            yield
        finally:
            if kind == "slow":
                self.made.go_on()
            elif kind in FAULTS:
                self.made.run("CONFIG", "SET", setting, healthy)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
class TestValkeyTierKilled(TestValkeyTier):
    num_kills = 300
    deadline_s = 150.0


@pytest.mark.nightly  # the tier and the connector pass their own kits in less time
class TestValkey(ConnectorConformance):
    connector = "OffloadingConnector"
    is_shared = True

    @pytest.fixture(autouse=True)
    def server(self):
        self.made = Server()
        yield self.made
        self.made.close()

    def options_in(self, folder):
        return {"spec_name": "valkey", "url": self.made.url, "buffer_bytes": 1 << 20}

    def damage(self, bed, where):
        with self.made.client() as client:
            for name in client.keys("wtransfer:*"):
                value = bytearray(client.get(name))
                value[round(where * (len(value) - 1))] ^= 1
                client.set(name, bytes(value))
        return True
