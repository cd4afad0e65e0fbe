"""Sockets that other hosts reach, as the kits look for them."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from wtransfer.testing.reachable import check_this_host_only, reachable

LISTENS = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    input()
"""


def test_sockets_of_this_process_and_of_its_children_are_found():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with socket.create_server(("127.0.0.1", 0)) as own:
        with subprocess.Popen([sys.executable, "-c", LISTENS], **pipes) as child:
            theirs = int(child.stdout.readline())
            found = reachable()
            child.communicate(b"\n")
        assert {own.getsockname(), ("127.0.0.1", theirs)} <= found
    assert ("127.0.0.1", theirs) not in reachable()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_loopback_is_told_from_all_interfaces(family, kind):
    before = reachable()
    host = "::1" if family is socket.AF_INET6 else "127.0.0.1"
    with socket.socket(family, kind) as own:
        own.bind((host, 0))
        if kind is socket.SOCK_STREAM:
            own.listen()
        port = own.getsockname()[1]
        assert (host, port) in reachable() - before
    check_this_host_only({(host, port)}, {})


@pytest.mark.parametrize(
    ("options", "is_named"),
    [
        ({"host": "10.0.0.1"}, True),
        ({"url": "tcp://10.0.0.1:80"}, True),
        ({"host": "10.0.0.11"}, False),
        ({"hosts": ["110.0.0.1", "127.0.0.1"]}, False),
        ({}, False),
    ],
)
def test_address_that_an_option_names_is_allowed(options, is_named):
    if is_named:
        check_this_host_only({("10.0.0.1", 80)}, options)
    else:
        with pytest.raises(AssertionError, match=r"it listens at \[10.0.0.1\]:80, which"):
            check_this_host_only({("10.0.0.1", 80)}, options)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:10.0.0.1"])
def test_sockets_beyond_this_host_are_refused(host):
    with pytest.raises(AssertionError, match="which other hosts reach"):
        check_this_host_only({(host, 80), ("::ffff:127.0.0.1", 81)}, {"host": "127.0.0.1"})
