"""A server that is down, stopped, full, read-only or not ours costs calls, and nothing else."""

from __future__ import annotations

import logging
import threading
import traceback

import pytest
from valkey.exceptions import AuthenticationError, OutOfMemoryError, ReadOnlyError, ValkeyError
from valkey_server import FAILURES, attempt, free_port, until

KEY = b"key"
SECRET = "hunter2"
LENGTH = 300_000


def got(tier, key, length):
    into = bytearray(length)
    return bytes(into) if tier.get(key, memoryview(into)) else None


CALLS = {
    "contains": lambda tier: tier.contains([KEY]),
    "put": lambda tier: tier.put(KEY, memoryview(bytes(LENGTH))),
    "put_many": lambda tier: tier.put_many([(KEY, memoryview(bytes(LENGTH)))] * 3),
    "get": lambda tier: tier.get(KEY, memoryview(bytearray(LENGTH))),
    "get_many": lambda tier: tier.get_many([(KEY, memoryview(bytearray(LENGTH)))] * 3),
    "remove": lambda tier: tier.remove([KEY]),
}


@pytest.fixture(params=CALLS.values(), ids=CALLS)
def call(request):
    return request.param


@pytest.mark.parametrize("url", ["unix:///nowhere/socket", "redis://nobody.invalid:1", "port"])
def test_a_server_that_is_not_there(make_tier, call, url):
    tier = make_tier(f"redis://127.0.0.1:{free_port()}" if url == "port" else url)
    for _ in range(2):
        with pytest.raises(FAILURES):
            call(tier)


def test_the_server_may_start_later(serve, make_tier):
    server = serve()
    server.kill()
    tier = make_tier(server.url)
    with pytest.raises(ValkeyError):
        tier.contains([KEY])
    server.start()
    assert tier.contains([KEY]) == [False]


def test_each_call_connects_anew_after_a_restart(tier, server, call):
    CALLS["put"](tier)
    server.kill()
    with pytest.raises(FAILURES):
        call(tier)
    server.start()
    call(tier)
    # Without a call in between, too.
    server.kill()
    server.start()
    call(tier)


class Traffic:
    """Threads that put and get until they are told to end."""

    def __init__(self, tier):
        self._tier, self._is_over = tier, threading.Event()
        self.good, self.bad, self.wrong = [0] * 4, [0] * 4, []
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(4)]
        for each in self._threads:
            each.start()

    def _work(self, number):
        turn = 0
        while not self._is_over.is_set():
            turn += 1
            key, value = b"%d" % number, bytes([number, turn % 251]) * (LENGTH // 2)
            try:
                self._tier.put(key, memoryview(value))
                found = got(self._tier, key, LENGTH)
                self._tier.contains([key, b"other"])
                self.good[number] += 1
            except FAILURES:
                self.bad[number] += 1
            except BaseException as error:
                self.wrong.append(error)
                raise
            else:
                # A server that was restarted in between has lost it.
                if found not in (value, None):
                    self.wrong.append(f"thread {number} got another value in turn {turn}")

    def until_all(self, counts):
        before = list(counts)
        until(lambda: all(now > then for now, then in zip(counts, before, strict=True)), "a turn")

    def end(self):
        self._is_over.set()
        for each in self._threads:
            each.join()
        assert self.wrong == []


def test_killed_and_restarted_under_traffic(tier, server):
    traffic = Traffic(tier)
    for _ in range(3):
        traffic.until_all(traffic.good)
        server.kill()
        traffic.until_all(traffic.bad)
        server.start()
    traffic.until_all(traffic.good)
    traffic.end()


def test_stopped_under_traffic(server, make_tier):
    traffic = Traffic(make_tier(server.url, timeout_s=0.1))
    for _ in range(3):
        traffic.until_all(traffic.good)
        server.stop()
        # Each call ends while the server is stopped.
        traffic.until_all(traffic.bad)
        server.go_on()
    traffic.until_all(traffic.good)
    traffic.end()


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_call_to_a_stopped_server_ends(server, make_tier, call, is_connected):
    tier = make_tier(server.url, timeout_s=0.1)
    if is_connected:
        until(lambda: attempt(lambda: tier.contains([KEY])), "an answer")
    server.stop()
    with pytest.raises(FAILURES, match=r"(?i)timed? ?out"):
        call(tier)
    server.go_on()
    # An answer that comes late is no answer to another call.
    value = memoryview(b"1" * LENGTH)
    until(lambda: attempt(lambda: [tier.put(b"other", value)]), "a put")
    found = until(lambda: attempt(lambda: [got(tier, b"other", LENGTH)]), "a value")
    assert found == [value]
    found = until(lambda: attempt(lambda: tier.contains([b"never", b"other"])), "an answer")
    assert found == [False, True]


def test_a_late_answer_is_no_answer_to_the_next_call(server, make_tier):
    tier = make_tier(server.url, timeout_s=0.2)

    def is_put():
        tier.put_many([(key, memoryview(key * LENGTH)) for key in (b"1", b"2")])
        return True

    def next_call():
        server.stop()
        try:
            with pytest.raises(FAILURES):
                got(tier, b"1", LENGTH)
            # The server goes on while the next call waits.
            threading.Timer(0.05, server.go_on).start()
            return attempt(lambda: got(tier, b"2", LENGTH))
        finally:
            server.go_on()

    until(lambda: attempt(is_put), "two values")
    for _ in range(3):
        assert until(next_call, "a value") == b"2" * LENGTH


@pytest.mark.parametrize("name", ["put", "put_many"])
def test_a_full_server_keeps_what_it_has(serve, make_tier, name):
    tier = make_tier(serve(maxmemory="8mb", maxmemory_policy="noeviction").url)
    tier.put(b"kept", memoryview(b"1" * LENGTH))
    others = [b"%d" % number for number in range(100)]
    assert None in [attempt(lambda o=o: [tier.put(o, memoryview(bytes(LENGTH)))]) for o in others]
    with pytest.raises(OutOfMemoryError, match="maxmemory") as caught:
        CALLS[name](tier)
    assert len(str(caught.value)) < 100
    assert got(tier, b"kept", LENGTH) == b"1" * LENGTH
    tier.remove(others)
    until(lambda: attempt(lambda: [CALLS[name](tier)]), "room")


def test_a_server_that_evicts_takes_every_block(serve, make_tier):
    tier = make_tier(serve(maxmemory="8mb", maxmemory_policy="allkeys-lru").url)
    names = [b"%d" % number for number in range(100)]
    for name in names:
        tier.put(name, memoryview(name[:1] * LENGTH))
    found = tier.contains(names)
    assert 0 < sum(found) < 100
    for name, is_there in zip(names, found, strict=True):
        assert got(tier, name, LENGTH) == (name[:1] * LENGTH if is_there else None)


def test_a_read_only_replica_serves_what_it_has(tier, server):
    tier.put(b"kept", memoryview(b"1" * LENGTH))
    server.run("REPLICAOF", "127.0.0.1", str(free_port()))
    for name in ("put", "put_many", "remove"):
        with pytest.raises(ReadOnlyError):
            CALLS[name](tier)
    assert got(tier, b"kept", LENGTH) == b"1" * LENGTH
    assert tier.contains([b"kept", KEY]) == [True, False]
    server.run("REPLICAOF", "NO", "ONE")
    CALLS["put"](tier)
    assert tier.contains([KEY]) == [True]


def test_a_key_of_another_type_is_a_failure(tier, server):
    server.run("RPUSH", "wtransfer:key", "1")
    with pytest.raises(ValkeyError, match="WRONGTYPE"):
        CALLS["get"](tier)
    with pytest.raises(ValkeyError, match="WRONGTYPE"):
        CALLS["get_many"](tier)
    CALLS["put"](tier)
    assert got(tier, KEY, LENGTH) == bytes(LENGTH)


# -- passwords


@pytest.mark.parametrize("user", ["", "default"])
def test_a_password(serve, make_tier, user):
    server = serve(with_port=True, requirepass="a/b@c:d?#")
    url = f"redis://{user}:a%2Fb%40c%3Ad%3F%23@127.0.0.1:{server.port}/3"
    CALLS["put"](make_tier(url))
    with server.client() as client:
        client.select(3)
        assert client.dbsize() == 1


def test_a_wrong_password_is_not_quoted(serve, make_tier, call, caplog):
    caplog.set_level(logging.DEBUG)
    server = serve(requirepass="right")
    tier = make_tier(f"unix://somebody@{server.socket}?password={SECRET}")
    with pytest.raises(AuthenticationError) as caught:
        call(tier)
    told = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert SECRET not in told


def test_no_password(serve, make_tier):
    tier = make_tier(serve(requirepass="right").url)
    with pytest.raises(ValkeyError, match=r"(?i)authentication required"):
        tier.contains([KEY])
    # The server takes no large value before it knows the client.
    with pytest.raises(ValkeyError):
        CALLS["put"](tier)
