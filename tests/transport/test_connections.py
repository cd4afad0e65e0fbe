"""Connections that begin or end at an endpoint are hung up, and nothing else of the process is."""

import contextlib
import errno
import os
import socket
import threading

import pytest

from wtransfer.transport.connections import hang_up, listening

HOST = "127.0.0.1"
PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def _leaves_nothing(leaves_nothing):
    """Every duplicate is closed again."""


@pytest.fixture
def opened():
    """Keeps sockets until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


def connected(opened, host=HOST, family=socket.AF_INET, dialed=None):
    """Return a listener, what it accepted, and the connection that was dialed."""
    listener = opened(socket.create_server((host, 0), family=family))
    port = listener.getsockname()[1]
    dialer = opened(socket.create_connection((dialed or host, port), PATIENCE_S))
    accepted = opened(listener.accept()[0])
    accepted.settimeout(PATIENCE_S)
    return listener, accepted, dialer


def goes_on(accepted, dialer):
    dialer.sendall(b"ping")
    accepted.sendall(accepted.recv(4))
    return dialer.recv(4) == b"ping"


def is_over(connection):
    return connection.recv(1) == b""


def test_both_ends_of_a_connection_are_found_by_the_listeners_address(opened):
    listener, accepted, dialer = connected(opened)
    assert hang_up({listener.getsockname()}) == 2
    assert is_over(accepted)
    assert is_over(dialer)


def test_a_thread_that_waits_in_a_connection_is_woken(opened):
    listener, accepted, _ = connected(opened)
    received = []
    accepted.settimeout(None)
    thread = threading.Thread(target=lambda: received.append(accepted.recv(1)))
    thread.start()
    hang_up({listener.getsockname()})
    thread.join(PATIENCE_S)
    assert received == [b""]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_what_cannot_be_looked_at_is_told_once_the_rest_is_hung_up(opened, monkeypatch, number):
    listener, accepted, dialer = connected(opened)
    duplicate = os.dup

    def exhausted_once(descriptor):
        if descriptor == accepted.fileno():
            raise OSError(number, os.strerror(number))
        return duplicate(descriptor)

    monkeypatch.setattr(os, "dup", exhausted_once)
    with pytest.raises(OSError, match=os.strerror(number)):
        hang_up({listener.getsockname()})
    assert is_over(dialer)
    with pytest.raises(OSError, match=os.strerror(number)):
        listening()


def test_connections_to_other_endpoints_and_listeners_go_on(opened):
    listener, _, _ = connected(opened)
    bystander, accepted, dialer = connected(opened)
    hang_up({listener.getsockname()})
    assert goes_on(accepted, dialer)
    # The listener of what was hung up takes connections as before, as does the other.
    for each in (listener, bystander):
        again = opened(socket.create_connection(each.getsockname(), PATIENCE_S))
        assert goes_on(opened(each.accept()[0]), again)


def test_the_same_port_at_another_address_is_another_endpoint(opened):
    listener, _, _ = connected(opened)
    port = listener.getsockname()[1]
    twin = opened(socket.create_server(("127.0.0.2", port)))
    dialer = opened(socket.create_connection(("127.0.0.2", port), PATIENCE_S))
    accepted = opened(twin.accept()[0])
    assert hang_up({(HOST, port)}) == 2
    assert goes_on(accepted, dialer)


def test_an_ipv4_connection_on_ipv6_sockets_is_found_by_its_ipv4_address(opened):
    listener = opened(socket.socket(socket.AF_INET6))
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind((f"::ffff:{HOST}", 0))
    listener.listen()
    port = listener.getsockname()[1]
    dialer = opened(socket.socket(socket.AF_INET6))
    dialer.connect((f"::ffff:{HOST}", port))
    assert (HOST, port) in listening()
    opened(listener.accept()[0])
    assert hang_up({(HOST, port)}) == 2
    assert is_over(dialer)


def test_an_ipv6_connection_is_found(opened):
    listener, accepted, _ = connected(opened, "::1", socket.AF_INET6)
    endpoint = listener.getsockname()[:2]
    assert endpoint in listening()
    assert hang_up({endpoint}) == 2
    assert is_over(accepted)


def test_sockets_of_other_kinds_are_left_alone(opened):
    one, two = (opened(each) for each in socket.socketpair())
    datagrams = opened(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    datagrams.bind((HOST, 0))
    datagrams.settimeout(PATIENCE_S)
    assert hang_up({datagrams.getsockname()}) == 0
    assert goes_on(one, two)
    datagrams.sendto(b"ping", datagrams.getsockname())
    assert datagrams.recv(4) == b"ping"


def test_sockets_stay_blocking_whatever_time_out_the_application_set(opened):
    listener, accepted, dialer = connected(opened)
    sockets = [listener, accepted, dialer]
    for each in sockets:
        each.settimeout(None)
    socket.setdefaulttimeout(3.0)
    try:
        listening()
        hang_up({("192.0.2.1", 1)})
    finally:
        socket.setdefaulttimeout(None)
    assert [os.get_blocking(each.fileno()) for each in sockets] == [True] * 3


def test_listening_tells_where_and_nothing_else(opened):
    before = listening()
    listener, _, _ = connected(opened)
    opened(socket.socket()).bind((HOST, 0))
    assert listening() - before == {listener.getsockname()}


def test_a_storm_of_other_sockets_disturbs_neither_them_nor_us(opened):
    listener, accepted, dialer = connected(opened)
    over = threading.Event()
    troubles = []

    def storm():
        try:
            while not over.is_set():
                with contextlib.ExitStack() as stack:
                    assert goes_on(*connected(stack.enter_context)[1:])
        except (OSError, AssertionError) as error:
            troubles.append(error)

    threads = [threading.Thread(target=storm) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            assert listener.getsockname() in listening()
            assert hang_up({("192.0.2.1", 1)}) == 0
        assert goes_on(accepted, dialer)
        assert hang_up({listener.getsockname()}) == 2
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert troubles == []
