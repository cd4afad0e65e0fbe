"""A tier over a real cluster: two servers, each with half of the keys."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
from valkey import ValkeyCluster
from valkey.exceptions import ConnectionError as ServerLostError
from valkey.exceptions import ValkeyError
from valkey_server import FAILURES, Server, attempt, until

KEYS = [b"%d" % number for number in range(40)]
LENGTH = 20_000
MEMBERS = 2


@pytest.fixture(scope="module")
def cluster():
    """The servers; it takes the first one two seconds to serve."""
    with contextlib.ExitStack() as stack:
        servers = [Server(with_port=True, in_cluster=True) for _ in range(MEMBERS)]
        for number, each in enumerate(servers):
            stack.callback(each.close)
            slots = 16384 // MEMBERS
            each.run("CLUSTER", "ADDSLOTSRANGE", number * slots, (number + 1) * slots - 1)
            each.run("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        servers[0].run("CLUSTER", "MEET", "127.0.0.1", servers[1].port, servers[1].cluster_port)
        _until_ok(servers)
        yield servers


def _until_ok(servers):
    def is_ok(server):
        return b"cluster_state:ok" in server.run("CLUSTER", "INFO")

    def has_all_slots(server):
        return len(server.run("CLUSTER", "SLOTS")) == MEMBERS

    until(lambda: all(is_ok(each) and has_all_slots(each) for each in servers), "a cluster")


@pytest.fixture
def tier(cluster, make_tier):
    for each in cluster:
        each.run("FLUSHALL")
    return make_tier(cluster[0].tcp_url, cluster=True)


def value(key, length=LENGTH):
    return (key * length)[:length]


def got(tier, key, length):
    into = bytearray(b"\xee" * length)
    if tier.get(key, memoryview(into)):
        return bytes(into)
    assert into == b"\xee" * length
    return None


def test_keys_are_on_all_servers(cluster, tier):
    tier.put_many([(key, memoryview(value(key))) for key in KEYS])
    assert tier.contains([*KEYS, b"other"]) == [True] * len(KEYS) + [False]
    sizes = [each.run("DBSIZE") for each in cluster]
    assert sum(sizes) == len(KEYS)
    assert min(sizes) > 0
    for key in KEYS:
        assert got(tier, key, LENGTH) == value(key)
        assert got(tier, key, LENGTH - 1) is None
    memory = [bytearray(LENGTH) for _ in KEYS]
    assert all(tier.get_many([(key, memoryview(m)) for key, m in zip(KEYS, memory, strict=True)]))
    assert memory == [value(key) for key in KEYS]
    tier.remove([*KEYS, b"other"])
    assert tier.contains(KEYS) == [False] * len(KEYS)


def test_large_values(tier):
    data = value(b"12345", 2 << 20)
    tier.put(b"large", memoryview(data))
    assert got(tier, b"large", 2 << 20) == data


def test_threads_that_begin_at_once(cluster, make_tier, monkeypatch):
    made, closed = [], []

    class Noted(ValkeyCluster):
        def __init__(self, **options):
            made.append(self)
            super().__init__(**options)

        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr("wtransfer_valkey.tier.ValkeyCluster", Noted)
    tier = make_tier(cluster[0].tcp_url, cluster=True)
    failed, begin = [], threading.Barrier(6)

    def work(number):
        try:
            begin.wait()
            for turn in range(10):
                data = value(b"%d %d," % (number, turn))
                tier.put(b"%d" % number, memoryview(data))
                assert got(tier, b"%d" % number, LENGTH) == data
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []
    # The clients of all threads but one are given up: a socket left open is a warning here.
    gc.collect()
    assert len(made) - len(closed) == 1
    tier.close()
    with pytest.raises(ServerLostError):
        tier.contains([b"0"])
    assert set(map(id, made)) == set(map(id, closed))


def test_without_the_option_keys_of_other_servers_are_failures(cluster, tier, make_tier):
    single = make_tier(cluster[0].tcp_url)
    put = [attempt(lambda key=key: single.put(key, memoryview(b"1")) or True) for key in KEYS]
    assert set(put) == {True, None}
    with pytest.raises(ValkeyError, match=r"\d+ 127\.0\.0\.1"):
        single.put_many([(key, memoryview(b"1")) for key in KEYS])


def test_one_server_is_killed_and_restarted(cluster, tier):
    tier.put_many([(key, memoryview(value(key))) for key in KEYS])
    cluster[1].kill()
    # All keys may be refused until the cluster knows which of its servers it has lost.
    found = [attempt(lambda key=key: got(tier, key, LENGTH)) for key in KEYS]
    assert all(each in (None, value(key)) for key, each in zip(KEYS, found, strict=True))
    assert None in found
    cluster[1].start()
    _until_ok(cluster)

    def is_well():
        return attempt(lambda: tier.put_many([(key, memoryview(value(key))) for key in KEYS]) or 1)

    until(is_well, "keys on both servers")
    assert [got(tier, key, LENGTH) for key in KEYS] == [value(key) for key in KEYS]


@pytest.mark.parametrize("is_connected", [True, False])
def test_all_servers_are_killed_and_restarted(cluster, tier, is_connected):
    if is_connected:
        assert tier.contains(KEYS) == [False] * len(KEYS)
    for each in cluster:
        each.kill()
    for _ in range(3):
        with pytest.raises(FAILURES):
            tier.contains(KEYS)
    for each in cluster:
        each.start()
    _until_ok(cluster)
    until(lambda: attempt(lambda: tier.contains(KEYS)), "an answer")
    tier.put(b"key", memoryview(b"1"))
    assert got(tier, b"key", 1) == b"1"


def test_a_server_has_moved_while_all_were_down(cluster, tier):
    assert tier.contains(KEYS) == [False] * len(KEYS)
    for each in cluster:
        each.kill()
    for key in KEYS:
        with pytest.raises(FAILURES):
            tier.contains([key])
    cluster[1].port = 0
    for each in cluster:
        each.start()
    _until_ok(cluster)
    until(lambda: attempt(lambda: tier.contains(KEYS)), "answers of both servers")


def test_a_command_that_is_refused_is_not_repeated(cluster, tier):
    slot = cluster[0].run("CLUSTER", "KEYSLOT", "wtransfer:key")
    owner = cluster[slot * MEMBERS // 16384]
    tier.put(b"key", memoryview(b"1"))
    owner.run("CLUSTER", "DELSLOTS", slot)
    owner.run("CONFIG", "RESETSTAT")
    with pytest.raises(ValkeyError):
        tier.put(b"key", memoryview(b"2"))
    refused = owner.run("INFO", "errorstats")
    owner.run("CLUSTER", "ADDSLOTS", slot)
    assert refused["errorstat_CLUSTERDOWN"] == {"count": 1}
    _until_ok(cluster)


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_call_to_stopped_servers_ends(cluster, make_tier, is_connected):
    tier = make_tier(cluster[0].tcp_url, cluster=True, timeout_s=0.2)
    if is_connected:
        until(lambda: attempt(lambda: tier.contains(KEYS)), "an answer")
    for each in cluster:
        each.stop()
    try:
        with pytest.raises(FAILURES):
            tier.contains(KEYS)
        with pytest.raises(FAILURES):
            tier.put(b"key", memoryview(value(b"key", 2 << 20)))
    finally:
        for each in cluster:
            each.go_on()
    _until_ok(cluster)
    until(lambda: attempt(lambda: tier.contains(KEYS)), "an answer")
