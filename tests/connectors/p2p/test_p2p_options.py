"""What users may set, and what they are told where it cannot be."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
from sides import Sides

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
        (
            {"shelf_byte": 1},
            r"shelf_byte.*the options are staging_bytes \(int\), lease_s ",
        ),
        ({"staging_bytes": -1}, r"staging_bytes"),
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


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_nothing_listens_at_every_address(host, role):
    with pytest.raises(ConnectorOptionError, match="no address that others could dial"):
        made(GROUP, role, token="t", host=host)


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize(
    ("peer", "text"),
    [
        ("a.host", "'a.host' is no IP address or network"),
        ("10.0.0.1/8", "'10.0.0.1/8' is no IP address or network: .*host bits"),
        ("10.0.0.1:x", "'10.0.0.1:x' has no number for a port"),
        ("10.0.0.1:", "'10.0.0.1:' has no number for a port"),
    ],
)
def test_a_peer_that_cannot_be_read_is_named(role, peer, text):
    with pytest.raises(ConnectorOptionError, match=text):
        made(GROUP, role, token="t", allowed_peers=["10.0.0.1", peer])


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        (
            {"host": "10.0.0.1"},
            ["tcp:127.0.0.1:1", "tcp:127.9.9.9:1", "tcp:[::1]:1", "tcp:10.0.0.1:1"],
            ["tcp:10.0.0.2:1", "tcp:0.0.0.0:1", "tcp:[::]:1", "tcp:[::ffff:10.0.0.2]:1"],
        ),
        ({"host": "localhost"}, ["tcp:127.0.0.1:1"], ["tcp:10.0.0.1:1"]),
        ({"allowed_peers": []}, [], ["tcp:127.0.0.1:1"]),
        (
            {"allowed_peers": ["10.0.0.0/24", "192.0.2.1", "192.0.2.2:7000"]},
            ["tcp:10.0.0.255:1", "tcp:192.0.2.1:1", "tcp:192.0.2.2:7000"],
            ["tcp:10.0.1.0:1", "tcp:192.0.2.2:7001", "tcp:127.0.0.1:1"],
        ),
        (
            {"allowed_peers": ["fd00::/8", "[2001:db8::1]:7000", "[2001:db8::2]"]},
            ["tcp:[fd12::1]:1", "tcp:[2001:db8::1]:7000", "tcp:[2001:db8::2]:1"],
            ["tcp:[fe00::1]:1", "tcp:[2001:db8::1]:1", "tcp:[::1]:1"],
        ),
    ],
)
def test_peers_are_allowed_by_address_network_and_port(options, allowed, refused):
    scheduler = made(GROUP, KVConnectorRole.SCHEDULER, token="t", **options)
    assert [each for each in allowed + refused if scheduler.allows(each)] == allowed


def first_of_two_free_ports():
    """Return one below those that the system gives to connections."""
    for port in range(20000 + os.getpid() % 5000 * 2, 32000):
        with contextlib.suppress(OSError):
            for each in (port, port + 1):
                socket.create_server(("127.0.0.1", each)).close()
            return port
    raise AssertionError("no two free ports")


def test_ports_follow_the_rank_and_one_that_is_taken_leaves_nothing(first_store, leaves_nothing):
    def two(port):
        return Sides(GROUP, 2, token="t", port=port, staging_bytes=1 << 20)

    port = first_of_two_free_ports()
    one = two(port)
    addresses = [worker.get_handshake_metadata().address for worker in one.workers]
    assert addresses == [f"tcp:127.0.0.1:{port}", f"tcp:127.0.0.1:{port + 1}"]
    with pytest.raises(AddressInUseError):
        two(port)
    one.close()
