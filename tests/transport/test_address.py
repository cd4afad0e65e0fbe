"""Addresses: what they mean, who may listen, and what is left behind."""

from __future__ import annotations

import fcntl
import inspect
import os
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from wtransfer.deadline import Deadline
from wtransfer.errors import AddressError, AddressInUseError, PeerLostError
from wtransfer.transport.address import (
    ListeningSocket,
    address_beside,
    connect,
    parse_address,
    random_address,
    tcp_text,
)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("unix:@name", "\0name"),
        ("unix:/run/x.sock", "/run/x.sock"),
        ("tcp:127.0.0.1:80", ("127.0.0.1", 80)),
        ("tcp:[::1]:0", ("::1", 0)),
    ],
)
def test_addresses_are_read(text, target):
    assert target == parse_address(text).target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "unix:",
        "unix:@",
        "unix:relative",
        "unix:/nul\0",
        "unix:@" + "x" * 107,
        "unix:/" + "x" * 107,
        "tcp:",
        "tcp:host",
        "tcp::80",
        "tcp:127.0.0.1:",
        "tcp:127.0.0.1:-1",
        "tcp:127.0.0.1:65536",
        "tcp:127.0.0.1:\N{SUPERSCRIPT TWO}",
        "tcp:::1:80",
        "tcp:no-such-host.invalid:80",
        "http://127.0.0.1",
    ],
)
def test_malformed_or_unresolvable_address_is_refused(text):
    with pytest.raises(AddressError):
        parse_address(text)


@pytest.mark.parametrize("text", ["tcp:0.0.0.0:0", "tcp:[::]:0", "tcp:192.0.2.1:0"])
def test_listening_beyond_this_host_is_refused_without_allow_remote(text):
    with pytest.raises(AddressError, match="allow_remote=True"):
        ListeningSocket(text)


def test_listening_beyond_this_host_is_tried_with_allow_remote():
    with pytest.raises(AddressError, match=r"cannot listen at 'tcp:192\.0\.2\.1:0'"):
        ListeningSocket("tcp:192.0.2.1:0", allow_remote=True)  # documentation range: never ours


@pytest.mark.parametrize("kind", ["tcp", "abstract", "path"])
def test_a_busy_address_is_named_at_once(tmp_path, kind):
    wanted = {
        "tcp": "tcp:127.0.0.1:0",
        "abstract": random_address(),
        "path": f"unix:{tmp_path}/x.sock",
    }[kind]
    first = ListeningSocket(wanted)
    with pytest.raises(AddressInUseError, match=first.address.replace(".", r"\.")):
        ListeningSocket(first.address)
    with socket.socket(first.socket.family) as client:
        client.connect(parse_address(first.address).target)
    first.remove_file()
    first.socket.close()
    again = ListeningSocket(first.address)
    again.remove_file()
    again.socket.close()


def test_busy_address_of_this_process_is_told_with_the_line_that_made_it(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(tmp_path)
    name = random_address()
    for wanted, form, options in (
        (name, name, {}),
        (f"unix:{tmp_path}/x.sock", f"unix:{elsewhere}/x.sock", {}),
        ("tcp:127.0.0.1:0", "tcp:127.0.0.1:{}", {}),
        ("tcp:127.0.0.1:0", "tcp:0.0.0.0:{}", {"allow_remote": True}),
        ("tcp:0.0.0.0:0", "tcp:127.0.0.1:{}", {"allow_remote": True}),
    ):
        line = inspect.currentframe().f_lineno
        first = ListeningSocket(wanted, **options)
        place = f"{__file__}:{line + 1}"
        again = form.format(first.address.rpartition(":")[2])
        with first.socket, pytest.raises(AddressInUseError) as caught:
            ListeningSocket(again, **options)
        assert caught.value.made_at == place
        assert f"this process listens at {again!r} already, made at {place}; " in str(caught.value)


LISTENS = """
import signal, sys
from wtransfer.transport.address import ListeningSocket

made = ListeningSocket(sys.argv[1])
print("listens", flush=True)
signal.pause()
"""


def test_busy_address_of_another_process_is_told_as_such():
    """Also where this process has listened there before."""
    closed = ListeningSocket(random_address())
    closed.socket.close()
    command = [sys.executable, "-c", LISTENS, closed.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as listens:
        assert listens.stdout.readline()
        with pytest.raises(AddressInUseError, match="another process listens") as caught:
            ListeningSocket(closed.address)
        listens.kill()
    assert caught.value.made_at is None


def test_a_busy_folder_is_reported_within_its_bound(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(AddressInUseError, match="locked"):
        ListeningSocket(f"unix:{tmp_path}/x.sock")
    os.close(fd)


def test_socket_files_are_for_their_owner_only(tmp_path):
    path = tmp_path / "x.sock"
    before = os.umask(0)
    try:
        listening = ListeningSocket(f"unix:{path}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    listening.remove_file()
    listening.socket.close()
    assert not path.exists()


def test_the_socket_file_of_a_dead_listener_is_replaced(tmp_path):
    path = tmp_path / "x.sock"
    dead = ListeningSocket(f"unix:{path}")
    dead.socket.close()
    assert path.exists()
    alive = ListeningSocket(f"unix:{path}")
    dead.remove_file()
    assert path.exists(), "the dead listener's end must not remove its successor's file"
    alive.remove_file()
    assert not path.exists()
    alive.socket.close()


def test_sockets_that_dead_listeners_left_beside_one_are_removed(tmp_path):
    listener = f"unix:{tmp_path}/x"
    dead, alive = (ListeningSocket(address_beside(listener)) for _ in range(2))
    dead.socket.close()
    others = [ListeningSocket(f"unix:{tmp_path}/{name}") for name in ("x", "y.01234567", "x.0")]
    for other in others:
        other.socket.close()
    before = set(tmp_path.iterdir())
    assert address_beside(listener).startswith(f"{listener}.")
    assert before - set(tmp_path.iterdir()) == {Path(dead.address.removeprefix("unix:"))}
    alive.remove_file()
    alive.socket.close()


def test_remove_file_leaves_the_socket_file_of_another_listener(tmp_path):
    path = tmp_path / "x.sock"
    robbed = ListeningSocket(f"unix:{path}")
    path.unlink()
    thief = ListeningSocket(f"unix:{path}")
    robbed.remove_file()
    assert path.exists()
    for listening in (robbed, thief):
        listening.remove_file()
        listening.socket.close()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_path_that_is_no_socket_is_in_use_and_left_alone(tmp_path, kind):
    path = tmp_path / "x"
    target = tmp_path / "target"
    target.write_text("precious")
    {
        "file": lambda: path.write_text("precious"),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(target),
    }[kind]()
    with pytest.raises(AddressInUseError):
        ListeningSocket(f"unix:{path}")
    assert path.exists()
    assert target.read_text() == "precious"


def test_missing_folders_are_named(tmp_path):
    with pytest.raises(AddressError, match="nowhere"):
        ListeningSocket(f"unix:{tmp_path}/nowhere/x.sock")


def test_of_many_that_replace_a_dead_listener_one_wins(tmp_path):
    path = tmp_path / "x.sock"
    for _ in range(20):
        dead = ListeningSocket(f"unix:{path}")
        dead.socket.close()
        start = threading.Barrier(8)

        def listen(start=start):
            start.wait(10)
            try:
                return ListeningSocket(f"unix:{path}")
            except AddressInUseError:
                return None

        with ThreadPoolExecutor(8) as threads:
            winners = [one for one in threads.map(lambda _: listen(), range(8)) if one]
        assert len(winners) == 1
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        winners[0].remove_file()
        winners[0].socket.close()


def test_a_socket_that_reached_itself_is_no_connection():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        own = parse_address(tcp_text(sock.getsockname()))
        with pytest.raises(PeerLostError, match="Connection refused"):
            connect(sock, own, Deadline(20.0))
