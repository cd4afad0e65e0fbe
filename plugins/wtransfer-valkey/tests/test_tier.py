"""The contract of a tier, over a real server."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import traceback

import pytest
from valkey_server import until
from wtransfer.errors import OffloadingOptionError
from wtransfer.specs.tier import open_tier

from wtransfer_valkey.tier import ValkeyOptions, ValkeyTier

KEY = bytes(range(66))
SECRET = "hunter2"
LENGTHS = [0, 1, 9, 10, 11, 99, 100, 4096, 70_000, (2 << 20) + 48]


def content(number, length):
    return random.Random(number).randbytes(length)


def got(tier, key, length):
    """Return what a tier has under a key; None if it says that there is nothing."""
    into = bytearray(b"\xee" * length)
    if tier.get(key, memoryview(into)):
        return bytes(into)
    assert into == b"\xee" * length, "it wrote, and said that it did not"
    return None


@pytest.fixture(params=["unix", "tcp"])
def either(request, serve, make_tier):
    """A tier over each kind of socket."""
    server = serve(with_port=request.param == "tcp")
    return make_tier(server.tcp_url if request.param == "tcp" else server.url)


@pytest.mark.parametrize("length", LENGTHS)
def test_put_value_is_found_until_it_is_removed(either, length):
    value = content(1, length)
    assert got(either, KEY, length) is None
    assert either.contains([KEY, b"other"]) == [False, False]
    either.put(KEY, memoryview(value))
    assert got(either, KEY, length) == value
    assert either.contains([b"other", KEY, KEY]) == [False, True, True]
    either.put(KEY, memoryview(value[::-1]))
    assert got(either, KEY, length) == value[::-1]
    either.remove([KEY, b"other"])
    assert got(either, KEY, length) is None
    assert either.contains([KEY]) == [False]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_value_of_another_length_is_not_loaded(tier, length):
    value = content(2, length)
    tier.put(KEY, memoryview(value))
    for other in LENGTHS:
        if other != length:
            assert got(tier, KEY, other) is None
    assert got(tier, KEY, length) == value


def test_values_that_look_like_the_protocol(tier):
    for value in (b"\r\n", b"$5\r\nhello\r\n", b"-ERR no\r\n", b"$-1\r\n"):
        tier.put(KEY, memoryview(value))
        assert got(tier, KEY, len(value)) == value


def test_batches_equal_single_calls(tier):
    length = 5000
    values = {b"here": content(3, length), b"here too": content(4, length)}
    values |= {b"longer": content(5, length + 1), b"shorter": content(6, 3)}
    tier.put_many([(key, memoryview(value)) for key, value in values.items()])
    for key, value in values.items():
        assert got(tier, key, len(value)) == value
    for keys in itertools.permutations([*values, b"absent"]):
        memory = [bytearray(b"\xee" * length) for _ in keys]
        found = tier.get_many([(key, memoryview(m)) for key, m in zip(keys, memory, strict=True)])
        assert found == [key.startswith(b"here") for key in keys]
        for key, here, each in zip(keys, found, memory, strict=True):
            assert each == (values[key] if here else b"\xee" * length)
    assert tier.contains([]) == []
    assert tier.get_many([]) == []
    tier.put_many([])
    tier.remove([])


def test_memory_is_the_callers_again_after_a_put(tier):
    memory = bytearray(content(7, 1 << 20))
    tier.put(KEY, memoryview(memory))
    tier.put_many([(b"1", memoryview(memory)), (b"2", memoryview(memory)[5:])])
    memory[:] = bytes(1 << 20)
    for key, start in ((KEY, 0), (b"1", 0), (b"2", 5)):
        assert got(tier, key, (1 << 20) - start) == content(7, 1 << 20)[start:]


def test_threads_do_not_mix_up_values(tier):
    failed = []

    def work(number):
        try:
            for turn in range(30):
                length = (number + 1) * 7001
                value, key = content((number, turn).__hash__(), length), b"%d" % number
                tier.put(key, memoryview(value))
                assert tier.contains([key, b"never"]) == [True, False]
                assert got(tier, key, length) == value
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []


def test_another_process_sees_the_same_values(tier, server):
    script = (
        "import sys\n"
        "from wtransfer.specs.tier import open_tier\n"
        "from wtransfer_valkey.tier import ValkeyTier\n"
        "tier, into = open_tier(ValkeyTier, {'url': sys.argv[1]}), bytearray(3)\n"
        "assert tier.get(b'ours', memoryview(into)) and into == b'abc', into\n"
        "tier.put(b'theirs', memoryview(b'defg'))\n"
    )
    tier.put(b"ours", memoryview(b"abc"))
    subprocess.run([sys.executable, "-c", script, server.url], check=True, timeout=60)
    assert got(tier, b"theirs", 4) == b"defg"


def test_prefixes_are_apart(server, make_tier):
    one, two = (make_tier(server.url, key_prefix=each) for each in ("one:", "zwei-é:"))
    one.put(b"key", memoryview(b"1"))
    assert two.contains([b"key"]) == [False]
    two.put(b"key", memoryview(b"2"))
    assert (got(one, b"key", 1), got(two, b"key", 1)) == (b"1", b"2")
    assert sorted(server.run("KEYS", "*")) == [b"one:key", "zwei-é:key".encode()]


def test_blocks_expire(server, make_tier):
    brief, long = make_tier(server.url, expire_s=0.05), make_tier(server.url, expire_s=1000)
    brief.put_many([(b"brief", memoryview(b"1"))])
    long.put(b"long", memoryview(b"2"))
    until(lambda: brief.contains([b"brief"]) == [False], "the end of a block")
    assert got(long, b"long", 1) == b"2"
    make_tier(server.url, expire_s=0.5).put(b"half", memoryview(b"3"))
    assert server.run("PTTL", "wtransfer:half") <= 500
    assert 900_000 < server.run("PTTL", "wtransfer:long") <= 1_000_000


def test_blocks_stay_where_nothing_is_said(tier, server):
    tier.put(b"key", memoryview(b"1"))
    assert server.run("PTTL", "wtransfer:key") == -1


def test_close_leaves_no_connection(server, make_tier):
    tier = make_tier(server.url)
    tier.put(KEY, memoryview(b"1"))
    assert len(server.client().client_list()) == 2
    tier.close()
    tier.close()
    until(lambda: len(server.client().client_list()) == 1, "the end of the tier's connections")


# -- options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "url"),
        ({"url": 6379}, "url"),
        ({"url": ""}, "url"),
        ({"url": "127.0.0.1:6379"}, "url"),
        ({"url": "http://127.0.0.1"}, "url"),
        ({"url": "redis://127.0.0.1:port"}, "url"),
        ({"url": "redis://[::1"}, "url"),
        ({"url": "unix://"}, "url"),
        ({"url": "rediss://h?ssl_cert_reqs=perhaps"}, "url"),
        ({"url": "rediss://h?ssl_unknown=1"}, "url"),
        ({"url": "redis://h?db=one"}, "url"),
        ({"url": "redis://h?decode_responses=1"}, "decode_responses"),
        ({"url": "redis://h?socket_timeout=100"}, "socket_timeout"),
        ({"url": "redis://h", "host": "h"}, "host"),
        ({"url": "redis://h", "cluster": "yes"}, "cluster"),
        ({"url": "unix:///socket", "cluster": True}, "cluster"),
        ({"url": "redis://h/1", "cluster": True}, "cluster"),
        ({"url": "redis://h", "expire_s": 0}, "expire_s"),
        ({"url": "redis://h", "timeout_s": 0}, "timeout_s"),
        ({"url": "redis://h", "timeout_s": float("nan")}, "timeout_s"),
        ({"url": "redis://h", "key_prefix": 1}, "key_prefix"),
        ({"url": "redis://h", "key_prefix": "\ud800"}, "key_prefix"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(options, named):
    with pytest.raises(OffloadingOptionError, match=named):
        open_tier(ValkeyTier, options)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:{}",
        "redis://user:{}/@h",
        "redis://user:1/{}@h",
        "redis://user:1?{}@h",
        "redis://user:1#{}@h",
        "redis://{}:x@h:port",
        "rediss://user:{}@h?ssl_unknown=1",
        "redis://user:{}@h?decode_responses=1",
        "http://user:{}@h",
    ],
)
def test_errors_do_not_quote_the_password(url):
    with pytest.raises(OffloadingOptionError) as caught:
        open_tier(ValkeyTier, {"url": url.format(SECRET)})
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_no_representation_contains_the_password(make_tier):
    url = f"redis://user:{SECRET}@127.0.0.1:1"
    tier = make_tier(url)
    client = tier._server._client
    assert SECRET not in repr([tier, ValkeyOptions(url=url), client, client.connection_pool])
