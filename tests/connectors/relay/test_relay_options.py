"""What users may set, and what they are told where it cannot be."""

from __future__ import annotations

import socket

import pytest

from wtransfer import KVConnectorFactory, KVTransferConfig, ServingConfig
from wtransfer.config import KVCacheConfig
from wtransfer.connectors.interface import KVConnectorRole
from wtransfer.errors import AddressInUseError, ConnectorOptionError

SHM, GROUP = "SharedMemoryConnector", "ProcessGroupConnector"


def made(kind, role=KVConnectorRole.WORKER, **options):
    serving = ServingConfig(
        kv_transfer_config=KVTransferConfig(kind, "e", None, None, options),
        cache_config=KVCacheConfig(8, 4),
    )
    return KVConnectorFactory.create_connector(serving, role).side


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    for name in ("WTRANSFER_TOKEN", "WTRANSFER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shelf_byte": 1}, r"shelf_byte.*the options are shelf_bytes, lease_s, deadline_s"),
        ({"shelf_bytes": -1}, r"shelf_bytes"),
        ({"lease_s": 0}, r"lease_s"),
        ({"deadline_s": "soon"}, r"deadline_s"),
        ({"num_threads": 0}, r"num_threads"),
    ],
)
@pytest.mark.parametrize("kind", [SHM, GROUP])
def test_an_option_that_cannot_be_used_is_named(kind, role, options, text):
    with pytest.raises(ConnectorOptionError, match=text):
        made(kind, role, token="t", **options)


def test_across_hosts_a_token_is_needed(monkeypatch):
    with pytest.raises(ConnectorOptionError, match="needs a token that both instances know"):
        made(GROUP)
    monkeypatch.setenv("WTRANSFER_TOKEN", "t")
    made(GROUP)
    monkeypatch.delenv("WTRANSFER_TOKEN")
    made(SHM)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_nothing_listens_at_every_address(host):
    with pytest.raises(ConnectorOptionError, match="no address that others could dial"):
        made(GROUP, token="t", host=host)


def test_ports_follow_the_rank_and_one_that_is_taken_leaves_nothing(instance, leaves_nothing):
    def two(port):
        options = {"token": "t", "port": port, "shelf_bytes": 1 << 20}
        return instance.Instance("p", GROUP, ranks=2, alone=False, options=options)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    one = two(port)
    addresses = [worker.get_handshake_metadata().address for worker in one.workers]
    assert addresses == [f"tcp:127.0.0.1:{port}", f"tcp:127.0.0.1:{port + 1}"]
    with pytest.raises(AddressInUseError):
        two(port)
    one.close()
